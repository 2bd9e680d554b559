"""Torch's ``fully_shard`` (FSDP2) in the form in which the strategies use it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from asa.sharding.collectives.axis import Axis
from asa.sharding.collectives.direct import directly
from asa.sharding.gradients.compression import REDUCED
from asa.sharding.gradients.replicated import replicated

_GATHERED_ONCE = "asa_gathered_once"
"""Attribute of a unit whose weights stay gathered until a step's last backward."""

_OWNER = "asa_owner"
"""Attribute of a sharded parameter, and of the whole one that it replaces: what gathers it."""

_UNIT = "asa_unit"
"""Attribute of a whole parameter that was sharded: the unit that gathers it."""

UNREACHED = "asa_unreached"
"""Attribute of a module that holds its :class:`Unreached`."""


class Unreached:
    """Parameters of the sharded units under ``root`` that no sample of this rank reached in a backward.

    The gradient of each counts as zero, so that all ranks scatter the same tensors. A parameter that no rank's samples
    reached gets no gradient, as on one device: the zeros are negative, and a sum is negative zero only if all addends
    are.
    """

    def __init__(self, root: nn.Module) -> None:
        self._filled: list[Any] = []
        self._call: Callable[[], None] = lambda: None
        for module in root.modules():
            for group in _groups_of(module):
                group.post_backward = self._filling(group, group.post_backward)

    def at_the_end(self, call: Callable[[], None]) -> None:
        """Set the function that is called at the end of a backward with such parameters. It must call
        :meth:`drop_filled_gradients`."""
        self._call = call

    def _filling(self, group: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def post_backward(*args: Any) -> Any:
            if group.reduce_grads:
                for p in group.fsdp_params:
                    self._fill(p)
            return original(*args)

        return post_backward

    @torch.no_grad()
    def _fill(self, p: Any) -> None:
        full = getattr(p, "_unsharded_param", None)
        if full is None or not full.requires_grad or full.grad is not None:
            return
        if p.sharded_param.grad is None:
            if not self._filled:
                Variable._execution_engine.queue_callback(self._call)
            self._filled.append(p)
        full.grad = torch.full_like(full, -0.0)

    @torch.no_grad()
    def drop_filled_gradients(self) -> None:
        """Remove the gradients of parameters that no rank's samples reached; call after gradients are scattered."""
        filled, self._filled = self._filled, []
        for p in filled:
            gradient = p.sharded_param.grad
            if gradient is not None:
                part = gradient.to_local()
                if not part.numel() or bool(((part == 0) & part.signbit()).all()):
                    p.sharded_param.grad = None


def _groups_of(module: nn.Module) -> list[Any]:
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]


def held_in(parameter: nn.Parameter) -> tuple[FSDPModule, Any] | None:
    """The unit in which a whole ``parameter`` was sharded, and what gathers it there; None if it was not sharded."""
    unit, owner = (parameter.__dict__.get(name) for name in (_UNIT, _OWNER))
    return None if unit is None else (unit, owner)


def gathered_once(unit: Any) -> bool:
    """Whether the weights of ``unit`` stay gathered from the first forward of a step to its last backward."""
    return bool(unit.__dict__.get(_GATHERED_ONCE, False))


def sharded(module: nn.Module, axis: Axis, *, release: bool) -> nn.Module:
    """Shard every component of the segment ``module`` over ``axis`` as one unit, with the segment as their root. If the
    axis has two parts, state is sharded over the inside one and repeated across.

    With ``release``, gathered weights are freed between forward and backward, except those of components that share a
    parameter with others; otherwise they stay until the last backward.
    """
    if axis.size == 1 or axis.group is None or next(module.parameters(), None) is None:
        return module
    # Traced components do not change their input in place, so views are harmless.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    device = next(module.parameters()).device.type
    mesh = _mesh(axis, device)
    policy = MixedPrecisionPolicy(reduce_dtype=REDUCED.get(axis.compression))
    _without_sparse_gradients(module)
    for p in module.parameters():
        if not p.is_contiguous():  # channels last: a part of it would not be contiguous
            p.data = p.data.contiguous()
    components = list(module.get_submodule("components").children())
    kept = {p for component in components for p in _kept_whole(component)}
    before = {(id(m), name): p for m in module.modules() for name, p in m._parameters.items()}
    for component in components:
        if not kept.issuperset(component.parameters()):
            freed = release and not getattr(component, "ties", None)
            fully_shard(component, mesh=mesh, reshard_after_forward=freed, mp_policy=policy, ignored_params=kept)
            directly(component)
            component.__dict__[_GATHERED_ONCE] = not freed
    fully_shard(module, mesh=mesh, reshard_after_forward=release, mp_policy=policy, ignored_params=kept)
    module.__dict__[_GATHERED_ONCE] = not release
    module.__dict__[UNREACHED] = Unreached(module)
    for unit in module.modules():
        for group in _groups_of(unit):
            for p in group.fsdp_params:
                p.sharded_param.__dict__[_OWNER] = p
                if getattr(unit, "ties", None):  # other components refer to what was there before
                    whole = before[id(p._module_info.module), p._module_info.param_name]
                    whole.__dict__[_OWNER] = p  # type: ignore[union-attr]
                    whole.__dict__[_UNIT] = unit
    return replicated(module, replace(axis, alike=True), only=kept) if kept else module


def _kept_whole(component: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that every rank keeps whole: those without a dimension to shard (temperatures, gains), and those of
    another floating type than most of the component (complex weights, a head in float32), which FSDP refuses."""
    sizes = Counter[torch.dtype]()
    for p in component.parameters():
        sizes[p.dtype] += p.nbytes if p.dtype.is_floating_point or p.dtype.is_complex else 0
    usual = max(sizes, key=lambda kind: sizes[kind], default=None)
    for p in component.parameters():
        if not p.dim() or (sizes[p.dtype] and p.dtype != usual):
            yield p


@torch.no_grad()
def place_local(parameter: DTensor, part: Tensor) -> None:
    """Let ``part`` be this rank's part of a sharded ``parameter``: from here on it is what ranks gather. The memory of
    the part before is left as it is."""
    owner = parameter.__dict__.get(_OWNER)
    if owner is not None:
        size, dim = owner.padded_sharded_param_size, owner.fsdp_placement.dim
        if part.size() != size or not part.is_contiguous():
            padded, length = part.new_zeros(size), part.size(dim) if part.numel() else 0
            if length:
                padded.narrow(dim, 0, length).copy_(part)
            part = padded.narrow(dim, 0, length)
            owner._sharded_param_data = padded.view(-1)
        else:
            owner._sharded_param_data = part.view(-1)
    parameter._local_tensor = part  # type: ignore[misc]


def _without_sparse_gradients(module: nn.Module) -> None:
    """Let the embedding tables in ``module`` have dense gradients, because sparse ones cannot be scattered."""
    for table in module.modules():
        if isinstance(table, nn.Embedding | nn.EmbeddingBag) and table.sparse:
            table.sparse = False
            warnings.warn(
                f"an {type(table).__name__} with sparse=True is sharded, so its gradients are dense; "
                "strategies=('ddp',) keeps them sparse",
                stacklevel=2,
            )


def _mesh(axis: Axis, device: str) -> DeviceMesh:
    """A device mesh for ``axis``. Torch caches meshes by ranks and names, together with their groups, which are gone
    after a change of plan. So the group is part of the mesh's name here."""
    assert axis.group is not None
    name = axis.group.group_name
    if axis.parts is None:
        return DeviceMesh.from_group(axis.group, device, mesh_dim_names=(f"shard-{name}",))
    inside, across = axis.parts
    assert inside.group is not None
    assert across.group is not None
    ranks = torch.tensor(get_process_group_ranks(axis.group)).view(across.size, inside.size)
    return DeviceMesh.from_group(
        [across.group, inside.group], device, mesh=ranks, mesh_dim_names=(f"replicate-{name}", f"shard-{name}")
    )
