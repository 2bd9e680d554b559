"""How a tensor is cut over ranks, and what these tell each other of it, forward and backward.

A value of the whole is the same on all ranks, and so must be its gradient: every rank then differentiates it by its own
part. What each rank brings together with its part gets the sum of the gradients by all parts.
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
from asa.sharding import direct
from asa.sharding.axis import Axis
from asa.sharding.modules import ParameterShard

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Split:
    """How a tensor is cut over ``axis``, whose collectives are on ``device``."""

    axis: Axis
    shard: ParameterShard
    device: torch.device

    @property
    def dim(self) -> int:
        """The dimension that is cut."""
        return self.shard.dim

    @property
    def length(self) -> int:
        """Length of the whole along that dimension."""
        return self.shard.blocks * self.shard.units * self.shard.unit

    def at(self, dim: int) -> Split:
        """This cut along another dimension."""
        return self if dim == self.dim else replace(self, shard=replace(self.shard, dim=dim))

    def alike(self, other: Split) -> bool:
        """Whether the same ranks hold the same positions, whatever the dimension."""
        mine, theirs = self.axis, other.axis
        return mine.group is theirs.group and mine.size == theirs.size and self.shard == other.at(self.dim).shard

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        return self.shard.cut(full, self.axis.index)


def whole(x: Tensor) -> Tensor:
    """The tensor that ranks which share a part have together."""
    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.no_grad()
def summed(x: Tensor, split: Split) -> Tensor:
    """The sum over the ranks (collective), a tensor of its own."""
    x = whole(x)
    sent = x.detach().to(split.device, torch.float32 if x.dtype in HALF else x.dtype, copy=True).contiguous()
    direct.all_reduce(sent, group=split.axis.group)
    return sent.to(x.device, x.dtype)


@torch.no_grad()
def largest(x: Tensor, split: Split) -> Tensor:
    """The largest over the ranks (collective); not a number where any is none, which the wire forgets."""
    strange = x.detach().isnan()
    sent = torch.stack([x.detach().masked_fill(strange, -math.inf if x.is_floating_point() else 0), strange.to(x)])
    sent = sent.to(split.device, torch.float32 if x.dtype in HALF else x.dtype)
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=split.axis.group)
    value, none = sent.to(x.device, x.dtype)
    return value.masked_fill(none > 0, math.nan) if x.is_floating_point() else value


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, contribution: Tensor, value: Tensor, split: Split) -> Tensor:
        ctx.parted = split
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        gradient = whole(gradient)
        least, most = largest(torch.stack([-gradient, gradient]), ctx.parted)
        if bool(((most + least) > 1e-3 * most.abs()).any()):
            raise UsageError(
                "a norm (or sum) of parameters that ranks hold in parts counts more on one rank than on another: add "
                "it to the loss, of which every rank has its own, and do not multiply the two"
            )
        return gradient, None, None


def known(contribution: Tensor, value: Tensor, split: Split) -> Tensor:
    """``value`` of the whole, which this rank differentiates by its ``contribution``. Its backward is collective, and
    raises a UsageError where ranks have different gradients of it."""
    if not (contribution.requires_grad and torch.is_grad_enabled()):
        return value
    return _Known.apply(contribution, value, split)  # type: ignore[no-any-return]


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
    """``x``, whole on every rank, before it is brought together with parts (collective, as is its backward)."""
    return _Averaged.apply(x, split)  # type: ignore[no-any-return]
