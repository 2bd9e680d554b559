"""Stock ``fully_shard`` (FSDP2) as the strategies use it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from asa.sharding.axis import Axis
from asa.sharding.compression import REDUCED
from asa.sharding.direct import directly
from asa.sharding.waits import waits

GATHERED_ONCE = "asa_gathered_once"
"""Attribute of a module whose weights stay gathered until a step's last backward."""

SCALARS = "asa_scalars"
"""Attribute of a module: its :class:`Scalars`."""


@dataclass
class Scalars:
    """Parameters without a dimension to shard (temperatures, gains): whole on every rank, their gradients averaged as
    they are made. ``reduce``: whether the backward to come does that; one that does makes up for those before it."""

    group: dist.ProcessGroup
    reduce: bool = True

    def average(self, parameter: Tensor) -> None:
        """Make ``parameter``'s gradient the mean over the group (collective)."""
        if self.reduce and parameter.grad is not None:
            mark = waits.begin(cuda=parameter.grad.is_cuda)
            dist.all_reduce(parameter.grad, group=self.group)
            waits.end(mark)
            parameter.grad /= dist.get_world_size(self.group)


def sharded(module: nn.Module, axis: Axis, *, release: bool) -> nn.Module:
    """Shard every component of the segment ``module`` over ``axis`` as one unit, the segment as their root; over its
    inside where it has two parts, repeated across.

    ``release``: let go of gathered weights between forward and backward; otherwise they stay until the last backward.
    """
    if axis.size == 1 or axis.group is None or not any(p.requires_grad for p in module.parameters()):
        return module
    # What crosses from one component to the next is never written to behind the cut: tracing sees to that.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    device = next(module.parameters()).device.type
    mesh = _mesh(axis, device)
    policy = MixedPrecisionPolicy(reduce_dtype=REDUCED.get(axis.compression))
    scalars = {p for p in module.parameters() if not p.dim()}
    for component in module.get_submodule("components").children():
        if any(p.dim() for p in component.parameters()):
            fully_shard(component, mesh=mesh, reshard_after_forward=release, mp_policy=policy, ignored_params=scalars)
            directly(component)
    fully_shard(module, mesh=mesh, reshard_after_forward=release, mp_policy=policy, ignored_params=scalars)
    module.__dict__[GATHERED_ONCE] = not release
    module.__dict__[SCALARS] = Scalars(axis.group)
    for p in scalars:
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(module.__dict__[SCALARS].average)
    return module


def _mesh(axis: Axis, device: str) -> DeviceMesh:
    """Torch remembers meshes by their ranks and names, with the groups they had: after a change of plan those are gone.
    So the group is part of the name."""
    assert axis.group is not None
    own = axis.group.group_name
    if axis.parts is None:
        return DeviceMesh.from_group(axis.group, device, mesh_dim_names=(f"shard-{own}",))
    inside, across = axis.parts
    assert inside.group is not None
    assert across.group is not None
    ranks = torch.tensor(get_process_group_ranks(axis.group)).view(across.size, inside.size)
    return DeviceMesh.from_group(
        [across.group, inside.group], device, mesh=ranks, mesh_dim_names=(f"replicate-{own}", f"shard-{own}")
    )
