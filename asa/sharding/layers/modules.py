"""Shards of stock layers. Parameters keep their names, so checkpoint keys stay the same; only shapes are smaller."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asa.ir.layout import bounds
from asa.sharding.collectives.along_axis import (
    gather,
    gather_for_partial,
    reduce_gradient,
    reduce_partial,
    scatter_partial,
    shard_sizes,
    sum_gradients,
)
from asa.sharding.collectives.axis import Axis
from asa.sharding.layers.propagate import Action, Cut
from asa.sharding.randomness.samples import SampleDropout


@dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """The parts of a full parameter that the indices of an axis hold.

    Along ``dim`` the parameter consists of ``blocks`` equal runs (3 for fused query, key, value). Each run has
    ``units`` units of ``unit`` elements. Index i of ``degree`` holds units ``bounds(units, degree, i)`` of every run.
    """

    dim: int
    units: int
    unit: int
    degree: int
    blocks: int = 1

    def index(self, i: int) -> Tensor:
        """Positions along ``dim`` that index ``i`` holds; int64, ascending."""
        start, stop = (u * self.unit for u in bounds(self.units, self.degree, i))
        run = self.units * self.unit
        return torch.cat([torch.arange(b * run + start, b * run + stop) for b in range(self.blocks)])

    def cut(self, full: Tensor, i: int) -> Tensor:
        """The part of ``full`` that index ``i`` holds, copied."""
        return full.index_select(self.dim, self.index(i).to(full.device)).contiguous()

    def paste(self, full: Tensor, part: Tensor, i: int) -> None:
        """Write the part of index ``i`` into ``full``."""
        full.index_copy_(self.dim, self.index(i).to(full.device), part.to(full.device, full.dtype))


SHARDS = "asa_shards"
"""Attribute of a sharded module: a dict from the name of a parameter or buffer to its :class:`ParameterShard`."""


def shards_of(module: nn.Module) -> dict[str, ParameterShard]:
    """Shards of all parameters and buffers below ``module``, by full name."""
    shards: dict[str, ParameterShard] = {}
    for path, child in module.named_modules():
        for name, shard in getattr(child, SHARDS, {}).items():
            shards[f"{path}.{name}" if path else name] = shard
    return shards


def _adopt(module: nn.Module, source: nn.Module, shards: dict[str, ParameterShard], index: int) -> None:
    """Give ``module`` the parameters and buffers of ``source`` under their names, cut by ``shards``."""
    for name, p in source.named_parameters(recurse=False):
        data = shards[name].cut(p.detach(), index) if name in shards else p.detach()
        fresh = nn.Parameter(data, requires_grad=p.requires_grad) if name in shards else p
        setattr(module, name, fresh)
    for name, b in source.named_buffers(recurse=False):
        setattr(module, name, shards[name].cut(b, index) if name in shards else b)
    setattr(module, SHARDS, shards)


class ReduceGradient(nn.Module):
    """Identity whose gradient is summed over the axis."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """``x`` as a new value for autograd."""
        return reduce_gradient(x, self.axis)


class Gather(nn.Module):
    """Gathers a value that is sharded along ``cut.dim``."""

    def __init__(self, cut: Cut, axis: Axis) -> None:
        super().__init__()
        edges = [bounds(cut.units, axis.size, i) for i in range(axis.size)]
        self.sizes = [(stop - start) * cut.unit for start, stop in edges]
        self.dim = cut.dim
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """The whole tensor, equal on all ranks of the axis."""
        return gather(x, self.dim, self.sizes, self.axis)


class GatherTokens(nn.Module):
    """Gathers a value that is split by tokens, for layers that each compute a part of the result for all tokens."""

    def __init__(self, tokens: int, axis: Axis) -> None:
        super().__init__()
        self.sizes, self.axis = shard_sizes(tokens, axis), axis

    def forward(self, x: Tensor) -> Tensor:
        """The whole tensor [samples, all tokens, width]; its partial gradient is reduce-scattered."""
        return gather_for_partial(x, 1, self.sizes, self.axis)


class ScatterTokens(nn.Module):
    """Reduce-scatters a partial result by tokens."""

    def __init__(self, tokens: int, axis: Axis) -> None:
        super().__init__()
        self.sizes, self.axis = shard_sizes(tokens, axis), axis

    def forward(self, x: Tensor) -> Tensor:
        """This rank's tokens, [samples, tokens of this rank, width]."""
        return scatter_partial(x, 1, self.sizes, self.axis)


class SumGradients(nn.Module):
    """Passes parameters through. Their gradients are summed over the axis, because each rank has those of its own
    tokens only."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """``parameters`` as new values for autograd."""
        return sum_gradients(parameters, self.axis)


class RowParallel(nn.Module):
    """A linear layer or convolution that reads a shard of its inputs.

    With ``partial`` the output stays a partial sum, which the boundary reduces. Each rank then adds its share of the
    bias, and the bias gets its complete gradient on all ranks.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, source: nn.Linear | nn.Conv2d | RowParallel, cut: Cut, axis: Axis, *, partial: bool) -> None:
        super().__init__()
        self.axis, self.partial = axis, partial
        self.__dict__["_source"] = source.__class__
        self.convolution = isinstance(source, nn.Conv2d)
        if isinstance(source, nn.Conv2d):
            self.options: Any = (source.stride, source.padding, source.dilation)
        if source.bias is None:
            self.register_parameter("bias", None)
        shard = ParameterShard(dim=1, units=cut.units, unit=cut.unit, degree=axis.size)
        _adopt(self, source, {"weight": shard}, axis.index)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Class of the layer that it replaces, because programs look for linear layers and convolutions by
        ``isinstance``."""
        source: type = self.__dict__.get("_source", type(self))
        return source

    def reset_parameters(self) -> None:
        """Draw weights like those of a new layer."""
        (nn.Conv2d if self.convolution else nn.Linear).reset_parameters(self)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """The whole output, or this rank's addend of it, from a shard of the input."""
        if self.convolution:
            y = F.conv2d(x, self.weight, None, *self.options)
        else:
            y = F.linear(x, self.weight)
        bias: Tensor | None = self.bias
        if self.partial:
            if bias is not None:
                bias = bias - (bias * (1 - 1 / self.axis.size)).detach()
        else:
            y = reduce_partial(y, self.axis)
        if bias is None:
            return y
        return y.add_(bias.view(-1, 1, 1) if self.convolution else bias)


class HeadParallelAttention(nn.Module):
    """Self-attention over this rank's share of the heads. The input is whole. So is the output, unless ``scatter`` cuts
    it."""

    head_parallel = True
    in_proj_weight: nn.Parameter
    in_proj_bias: nn.Parameter | None
    out_proj: RowParallel
    batch_first: bool

    def __init__(
        self, source: nn.MultiheadAttention | HeadParallelAttention, cut: Cut, axis: Axis,
        dropout: SampleDropout | None, scatter: ScatterTokens | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.axis, self.scatter = axis, scatter
        self.batch_first = source.batch_first
        self.head_dim, self.num_heads = cut.unit, cut.units
        start, stop = bounds(cut.units, axis.size, axis.index)
        self.heads = stop - start
        self.weight_dropout = dropout
        if dropout is not None:
            dropout.shard = (1, start, cut.units)
        rows = ParameterShard(dim=0, units=cut.units, unit=cut.unit, degree=axis.size, blocks=3)
        shards = {"in_proj_weight": rows}
        if source.in_proj_bias is None:
            self.register_parameter("in_proj_bias", None)
        else:
            shards["in_proj_bias"] = rows
        _adopt(self, source, shards, axis.index)
        self.out_proj = RowParallel(source.out_proj, cut, axis, partial=scatter is not None)

    def forward(self, x: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        """Output, and None in place of the attention weights. ``x`` is [samples, length, width], or length first, as in
        the stock module."""
        if not self.batch_first:
            x = x.transpose(0, 1)
        n, length, _width = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.view(n, length, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        if self.weight_dropout is not None and self.training:
            weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.head_dim), dim=-1)
            mixed = self.weight_dropout(weights) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        y = self.out_proj(mixed.transpose(1, 2).reshape(n, length, self.heads * self.head_dim))
        if self.scatter is not None:
            y = self.scatter(y)
        return (y if self.batch_first else y.transpose(0, 1)), None


def _column(source: nn.Linear | nn.Conv2d, cut: Cut, axis: Axis) -> nn.Module:
    shard = ParameterShard(dim=0, units=cut.units, unit=cut.unit, degree=axis.size)
    shards = {"weight": shard} | ({"bias": shard} if source.bias is not None else {})
    size = int(shard.index(axis.index).numel())
    module: nn.Module
    if isinstance(source, nn.Linear):
        module = nn.Linear(source.in_features, size, bias=source.bias is not None, device="meta")
    else:
        module = nn.Conv2d(
            source.in_channels, size, source.kernel_size, source.stride, source.padding, source.dilation,  # type: ignore[arg-type]
            bias=source.bias is not None, device="meta",
        )  # fmt: skip
    _adopt(module, source, shards, axis.index)
    return module


def _depthwise(source: nn.Conv2d, cut: Cut, axis: Axis) -> nn.Module:
    multiplier = source.out_channels // source.in_channels
    shard = ParameterShard(dim=0, units=cut.units, unit=cut.unit * multiplier, degree=axis.size)
    start, stop = bounds(cut.units, axis.size, axis.index)
    channels = (stop - start) * cut.unit
    module = nn.Conv2d(
        channels, channels * multiplier, source.kernel_size, source.stride, source.padding, source.dilation,  # type: ignore[arg-type]
        groups=channels, bias=source.bias is not None, device="meta",
    )  # fmt: skip
    _adopt(module, source, {"weight": shard} | ({"bias": shard} if source.bias is not None else {}), axis.index)
    return module


def _local_norm(source: nn.BatchNorm1d | nn.BatchNorm2d, cut: Cut, axis: Axis) -> nn.Module:
    shard = ParameterShard(dim=0, units=cut.units, unit=cut.unit, degree=axis.size)
    size = int(shard.index(axis.index).numel())
    module = type(source)(size, source.eps, source.momentum, source.affine, source.track_running_stats, device="meta")
    for name in [n for n, p in source._parameters.items() if p is None]:
        module.register_parameter(name, None)
    names = ("weight", "bias", "running_mean", "running_var")
    _adopt(module, source, {n: shard for n in names if getattr(source, n) is not None}, axis.index)
    return module


def shard_module(
    source: nn.Module, action: Action, cut: Cut, axis: Axis, *, partial: bool = False,
    scatter: ScatterTokens | None = None,
) -> nn.Module:  # fmt: skip
    """The shard of ``source`` for ``axis.index``, in the same mode and with the same parameter names.

    With ``partial`` the output of a ``row`` shard is not reduced. ``scatter`` reduce-scatters the output of ``heads``.
    """
    module: nn.Module
    if action == "row":
        assert isinstance(source, nn.Linear | nn.Conv2d)
        module = RowParallel(source, cut, axis, partial=partial)
    elif action == "heads":
        assert isinstance(source, nn.MultiheadAttention | HeadParallelAttention)
        module = HeadParallelAttention(source, cut, axis, getattr(source, "weight_dropout", None), scatter)
    elif action == "column":
        assert isinstance(source, nn.Linear | nn.Conv2d)
        module = _column(source, cut, axis)
    elif action == "depthwise":
        assert isinstance(source, nn.Conv2d)
        module = _depthwise(source, cut, axis)
    else:
        assert isinstance(source, nn.BatchNorm1d | nn.BatchNorm2d)
        module = _local_norm(source, cut, axis)
    return module.train(source.training)
