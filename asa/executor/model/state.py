"""Conversion between a model whose ranks hold shards and full tensors; used by checkpoints, migration and verification.

All tensors have the names of the plain model as keys, so any plan can read what another one wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from asa.errors import UsageError
from asa.executor.model.exchange import united
from asa.executor.model.offload import updated_in
from asa.executor.model.parallel import ParallelModel
from asa.sharding.collectives.axis import Axis
from asa.sharding.collectives.reads import reading
from asa.sharding.layers.modules import ParameterShard, shards_of
from asa.sharding.split.local_parts import as_held, local, state_memory

_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class LocalTensor:
    """One named tensor as this rank holds it: whole (``shard`` is None), or a shard over ``axis``. ``state_source`` is
    the index in the stage of the rank that provides its optimizer state."""

    name: str
    tensor: Tensor
    shard: ParameterShard | None
    axis: Axis
    state_source: int


def local_tensors(model: ParallelModel) -> Iterator[LocalTensor]:
    """Parameters and buffers of ``model``, in the same order on every rank. Shared tensors appear once."""
    visited: set[int] = set()
    for component, axis, layout in zip(model.components, model.tensor_axes, model.layouts, strict=True):
        shards = shards_of(component)
        for name, tensor in (*component.named_parameters(), *component.named_buffers()):
            if id(tensor) not in visited:
                visited.add(id(tensor))
                owner = model.owner.get(tensor, 0) if isinstance(tensor, nn.Parameter) else 0
                yield LocalTensor(name, tensor, shards.get(name), axis, owner * layout.inner)


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of ``model`` with state of their own making beside tensors (``get_extra_state``), by its name in
    ``state_dict``."""
    return {
        f"{path}.{_EXTRA_STATE_KEY_SUFFIX}".removeprefix("."): module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def gather(item: LocalTensor, value: Tensor, *, keep: bool = True, alias: bool = False) -> Tensor:
    """The full form of ``value``, a tensor that is sharded like ``item``: its data, gradient or optimizer state
    (collective).

    Without ``keep``, returns an empty tensor. With ``alias``, a whole tensor on the CPU is not copied; the caller must
    not use it after training continues.
    """
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if item.shard is None or item.axis.size == 1:
        return value.detach().to("cpu", copy=not alias) if keep else _NOTHING
    shard, axis = item.shard, item.axis
    sizes = [int(shard.index(i).numel()) for i in range(axis.size)]
    longest = max(sizes)
    part = value.detach().movedim(shard.dim, 0)
    padded = part.new_zeros((longest, *part.shape[1:]))
    padded[: part.shape[0]] = part
    shards = padded.new_empty((axis.size * longest, *padded.shape[1:]))
    with reading():
        dist.all_gather_into_tensor(shards, padded, group=axis.group)
    if not keep:
        return _NOTHING
    shape = list(value.shape)
    shape[shard.dim] = sum(sizes)
    full = torch.empty(shape, dtype=value.dtype)
    for i, size in enumerate(sizes):
        shard.paste(full, shards[i * longest : i * longest + size].movedim(0, shard.dim).cpu(), i)
    return full


def cut(item: LocalTensor, full: Tensor) -> Tensor:
    """This rank's shard of a full tensor, in the form in which this rank holds ``item``."""
    part = full if item.shard is None or item.axis.size == 1 else item.shard.cut(full, item.axis.index)
    if isinstance(item.tensor, DTensor):
        mesh, placements = item.tensor.device_mesh, item.tensor.placements
        # Every rank has the full tensor: nothing needs to be sent.
        return distribute_tensor(part.to(mesh.device_type), mesh, placements, src_data_rank=None)
    return part


def full_state(model: ParallelModel, *, keep: bool = True, alias: bool = False) -> dict[str, Tensor]:
    """Full parameters and buffers on the CPU, by name, on every rank (collective).

    ``keep`` and ``alias`` are those of :func:`gather`. A rank with ``keep`` False gets names with empty tensors.
    """
    keep = keep or len(model.plan.stages) > 1
    tensors = {item.name: gather(item, item.tensor, keep=keep, alias=alias) for item in local_tensors(model)}
    return _of_all_stages(model, tensors)


def _of_all_stages(model: ParallelModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors of all stages on every rank; ``tensors`` are those of this rank's stage (collective)."""
    if len(model.plan.stages) == 1:
        return tensors
    return united(tensors if model.position.place == 0 else {}, model.state_axis)


def full_gradients(model: ParallelModel, *, zeros: bool = True) -> dict[str, Tensor]:
    """Full gradients of the mean loss over the global batch on every rank, by parameter name (collective); ``zeros``:
    also for parameters that have none."""
    gradients = {}
    for item in local_tensors(model):
        gradient = item.tensor.grad
        if isinstance(item.tensor, nn.Parameter) and item.tensor.requires_grad and (zeros or gradient is not None):
            gradients[item.name] = gather(item, torch.zeros_like(item.tensor) if gradient is None else gradient)
    return _of_all_stages(model, gradients)


@torch.no_grad()
def load_full_state(model: ParallelModel, state: dict[str, Tensor], *, partly: bool = False) -> None:
    """Copy full tensors into the model's parameters and buffers; ``partly``: those that ``state`` has.

    Raises:
        KeyError: a name is missing; nothing has been changed then.
    """
    items = list(local_tensors(model))
    missing = [item.name for item in items if item.name not in state]
    if missing and not partly:
        raise KeyError(missing[0])
    for item in items:
        if item.name in state:
            item.tensor.copy_(cut(item, state[item.name]))


def load_full_gradients(model: ParallelModel, gradients: dict[str, Tensor]) -> None:
    """Make full ``gradients`` those of the model's parameters that they have the names of."""
    for item in local_tensors(model):
        if item.name in gradients:
            item.tensor.grad = cut(item, gradients[item.name].to(item.tensor.device))


_PLAIN: dict[str, Callable[[float], Any]] = {"int": int, "float": float, "bool": bool, "NoneType": lambda _: None}


def stored(key: str, value: object) -> tuple[str, Tensor]:
    """An entry of optimizer state as (key, tensor). For a plain number, the key records its type.

    >>> stored("step", 3)
    ('step:int', tensor(3))

    Raises:
        UsageError: it is neither a tensor nor a number.
    """
    if isinstance(value, Tensor):
        return key, value
    kind = type(value).__name__
    if kind not in _PLAIN:
        raise UsageError(f"the optimizer keeps a {kind} as {key!r}: only tensors and numbers can be saved and moved")
    number: Any = 0 if value is None else value
    return f"{key}:{kind}", torch.tensor(number, dtype=torch.float64 if kind == "float" else torch.int64)


def restored(key: str, tensor: Tensor) -> tuple[str, object]:
    """The inverse of :func:`stored`: the key and the value that it was given."""
    name, _, kind = key.rpartition(":")
    return (name, _PLAIN[kind](tensor.item())) if name and kind in _PLAIN else (key, tensor)


def full_optimizer_state(
    model: ParallelModel, optimizer: torch.optim.Optimizer, *, keep: bool = True, alias: bool = False
) -> dict[str, Tensor]:
    """Optimizer state as full tensors with keys ``name/key``, on every rank (collective). ``keep`` and ``alias`` are
    those of :func:`full_state`."""
    entries, provided = {}, {}
    keep = keep or model.state_axis is not None
    for item in local_tensors(model):
        parameter = updated_in(optimizer, item.tensor)
        for key, value in sorted((stored(*e) for e in optimizer.state.get(parameter, {}).items()), key=lambda e: e[0]):
            shaped_alike = value.shape == parameter.shape
            if shaped_alike and parameter is not item.tensor:
                value = as_held(item.tensor, value)
            full = gather(item, value, keep=keep, alias=alias) if shaped_alike else value.detach().cpu().clone()
            entries[f"{item.name}/{key}"] = full
            if item.state_source == model.position.place:
                provided[f"{item.name}/{key}"] = full
    return entries if model.state_axis is None else united(provided, model.state_axis)


def counted_on_device(optimizer: torch.optim.Optimizer) -> set[int]:
    """Identities of the parameters whose number of steps is on their device, where fused kernels read it; loops read it
    on the host."""
    groups = [g["params"] for g in optimizer.param_groups if g.get("fused") or g.get("capturable")]
    return {id(p) for parameters in groups for p in parameters}


def on_host(key: str, shape: Sequence[int], parameter: Tensor, on_device: Collection[int]) -> bool:
    """Whether the entry ``key`` of this ``shape`` in the optimizer state of ``parameter`` is a number that loops read
    on the host; ``on_device`` is :func:`counted_on_device`. What a parameter of one number (no dimension) has beside
    its steps may have its shape, and is where it is."""
    return not shape and id(parameter) not in on_device and (key == "step" or parameter.dim() > 0)


@torch.no_grad()
def load_full_optimizer_state(model: ParallelModel, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    """Replace the optimizer's state by full tensors, for the parameters that this rank updates. Other parameters get no
    state."""
    shapes = {item.name: item for item in local_tensors(model)}
    updated = {id(p) for p in model.updated}
    on_device = counted_on_device(optimizer)
    optimizer.state.clear()
    for full_key, full in state.items():
        name, key = full_key.rsplit("/", 1)
        if name in model.elsewhere and name not in shapes:
            continue
        item = shapes[name]
        if id(item.tensor) not in updated:
            continue
        parameter = updated_in(optimizer, item.tensor)
        plain_key, number = restored(key, full)
        if plain_key != key:
            optimizer.state[parameter][plain_key] = number
            continue
        # A full tensor of the parameter's own shape is cut like it; scalars (AdamW's step) are the same everywhere.
        value = full if full.dim() == 0 and item.tensor.dim() else cut(item, full)
        if parameter is not item.tensor:
            value = local(value)
        device = value.device if on_host(key, value.shape, parameter, on_device) else parameter.device
        if isinstance(value, DTensor) or value.shape != parameter.shape:
            optimizer.state[parameter][key] = value.to(device, copy=True)
        else:
            optimizer.state[parameter][key] = state_memory(parameter, value.dtype, device).copy_(value)
