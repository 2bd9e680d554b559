"""Description of a tensor's split over ranks, and its collectives, forward and backward.

A value of the whole tensor is the same on all ranks, and so must be its gradient: every rank then differentiates it
with respect to its own part. An argument that each rank combines with its part gets the sum of the gradients over all
parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from asa.errors import UsageError
from asa.sharding.collectives import direct
from asa.sharding.collectives.axis import Axis
from asa.sharding.collectives.reads import reading
from asa.sharding.layers.modules import ParameterShard

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Split:
    """Split of a tensor over ``axis``. Its collectives run on ``device``."""

    axis: Axis
    shard: ParameterShard
    device: torch.device

    @property
    def dim(self) -> int:
        """The sharded dimension."""
        return self.shard.dim

    @property
    def length(self) -> int:
        """Length of the whole tensor along the sharded dimension."""
        return self.shard.blocks * self.shard.units * self.shard.unit

    def at(self, dim: int) -> Split:
        """This split along another dimension."""
        return self if dim == self.dim else replace(self, shard=replace(self.shard, dim=dim))

    def alike(self, other: Split) -> bool:
        """Whether the same ranks hold the same positions, in whichever dimension."""
        first, second = self.axis, other.axis
        return first.group is second.group and first.size == second.size and self.shard == other.at(self.dim).shard

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        return self.shard.cut(full, self.axis.index)


def gathered(x: Tensor) -> Tensor:
    """``x``, gathered if it is a DTensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.no_grad()
def summed(x: Tensor, split: Split) -> Tensor:
    """Sum of ``x`` over the ranks (collective), as a new tensor."""
    x = gathered(x)
    buffer = x.detach().to(split.device, torch.float32 if x.dtype in HALF else x.dtype, copy=True).contiguous()
    with reading():
        direct.all_reduce(buffer, group=split.axis.group)
    return buffer.to(x.device, x.dtype)


def whole(part: Tensor, split: Split) -> Tensor:
    """The whole tensor of which this rank has ``part`` (collective)."""
    part = gathered(part)
    full = part.new_zeros([split.length if dim == split.dim else length for dim, length in enumerate(part.shape)])
    split.shard.paste(full, part.detach(), split.axis.index)
    return summed(full, split)


@torch.no_grad()
def largest(x: Tensor, split: Split) -> Tensor:
    """Maximum of ``x`` over the ranks (collective); NaN if any rank has NaN, which the collective itself would lose."""
    strange = x.detach().isnan()
    buffer = torch.stack([x.detach().masked_fill(strange, -math.inf if x.is_floating_point() else 0), strange.to(x)])
    buffer = buffer.to(split.device, torch.float32 if x.dtype in HALF else x.dtype)
    with reading():
        dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=split.axis.group)
    value, none = buffer.to(x.device, x.dtype)
    return value.masked_fill(none > 0, math.nan) if x.is_floating_point() else value


class _ValueWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, contribution: Tensor, value: Tensor, split: Split) -> Tensor:
        ctx.parted = split
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _alike(gathered(gradient), ctx.parted), None, None


def _alike(gradient: Tensor, split: Split) -> Tensor:
    """``gradient``, which has to be the same on all ranks (collective)."""
    least, most = largest(torch.stack([-gradient, gradient]), split)
    if bool(((most + least) > 1e-3 * most.abs().amax()).any()):
        raise UsageError(
            "a number that is computed of parameters that ranks hold in parts has different gradients on different "
            "ranks: add it to the loss, and do not multiply it by the loss, which differs between ranks; or plan with "
            "strategies=('ddp',)"
        )
    return gradient


class _WholeWithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, split: Split) -> Tensor:
        ctx.parted = split
        return whole(part, split)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.parted.cut(_alike(gradient.contiguous(), ctx.parted)).clone(), None


def whole_with_gradient(part: Tensor, split: Split) -> Tensor:
    """The whole tensor, through which this rank differentiates its ``part``. Its backward is collective, and raises a
    UsageError if ranks have different gradients of it."""
    return _WholeWithGradient.apply(part, split)  # type: ignore[no-any-return]


def value_with_gradient(contribution: Tensor, value: Tensor, split: Split) -> Tensor:
    """``value`` of the whole tensor, which this rank differentiates through its ``contribution``. Its backward is
    collective, and raises a UsageError if ranks have different gradients of it."""
    if not (contribution.requires_grad and torch.is_grad_enabled()):
        return value
    return _ValueWithGradient.apply(contribution, value, split)  # type: ignore[no-any-return]


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.parted = split
        return summed(x, split) / split.axis.size if x.is_floating_point() else x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return summed(gradient, ctx.parted), None


def averaged(x: Tensor, split: Split) -> Tensor:
    """``x``, whole on every rank, prepared for combination with parts (collective, as is its backward)."""
    return _Averaged.apply(x, split)  # type: ignore[no-any-return]
