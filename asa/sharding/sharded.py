"""Stock ``fully_shard`` (FSDP2) as the strategies use it."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from asa.sharding.axis import Axis
from asa.sharding.compression import REDUCED
from asa.sharding.direct import directly

GATHERED_ONCE = "asa_gathered_once"
"""Attribute of a module whose weights stay gathered until a step's last backward."""


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
    for component in module.get_submodule("components").children():
        if any(True for _ in component.parameters()):
            fully_shard(component, mesh=mesh, reshard_after_forward=release, mp_policy=policy)
            directly(component)
    fully_shard(module, mesh=mesh, reshard_after_forward=release, mp_policy=policy)
    module.__dict__[GATHERED_ONCE] = not release
    return module


def _mesh(axis: Axis, device: str) -> DeviceMesh:
    assert axis.group is not None
    if axis.parts is None:
        return DeviceMesh.from_group(axis.group, device)
    inside, across = axis.parts
    assert inside.group is not None
    assert across.group is not None
    ranks = torch.tensor(get_process_group_ranks(axis.group)).view(across.size, inside.size)
    return DeviceMesh.from_group(
        [across.group, inside.group], device, mesh=ranks, mesh_dim_names=("replicate", "shard")
    )
