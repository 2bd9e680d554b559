"""Conversion of activations between two layouts, as :class:`asa.ir.layout.Boundary` declares it, exact in forward and
backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asa.errors import UsageError
from asa.ir.layout import Boundary, Layout, gather_group
from asa.sharding.collectives.along_axis import all_gather, all_reduce, own_slice, reduce_scatter, shard_sizes
from asa.sharding.collectives.axis import Axis

AxisOf = Callable[[tuple[int, ...]], Axis]
"""Function from the ranks of a group (in order) to this rank's axis."""


def _rows(total: int, layout: Layout, ranks: tuple[int, ...]) -> list[int]:
    """Number of rows of a batch of ``total`` that each of ``ranks`` holds in ``layout``."""
    edges = [layout.rows_of(total, r) for r in ranks]
    return [stop - start for start, stop in edges]


def _check_rows(x: Tensor, samples: int) -> None:
    """Check that ``x``, of which ranks take the rows of their samples, has a row for each.

    Raises:
        UsageError: it has not.
    """
    if len(x) != samples:
        raise UsageError(
            f"a part of the model returns {len(x)} rows for {samples} samples, and ranks take their own from them "
            "under this plan: return one row for each sample (out.view(len(x), -1)), or plan with strategies=('ddp',)"
        )


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One rank's part of a boundary. Calling it converts a batch-first activation from source to target layout."""

    boundary: Boundary
    reduce_axis: Axis
    scatter_axis: Axis
    gather_axis: Axis
    slice_axis: Axis
    gather_ranks: tuple[int, ...]
    slice_ranks: tuple[int, ...]

    @staticmethod
    def build(boundary: Boundary, rank: int, axis_of: AxisOf) -> Crossing:
        """The crossing for ``rank``. Every rank of the stage must build the same crossings in the same order."""
        source, target = boundary.source, boundary.target
        gather_ranks = gather_group(source.width, source.data, boundary.meeting, rank)
        slice_ranks = gather_group(target.width, target.data, boundary.meeting, rank)
        return Crossing(
            boundary=boundary,
            reduce_axis=axis_of(source.tensor_group(rank)),
            scatter_axis=axis_of(target.tensor_group(rank)),
            gather_axis=axis_of(gather_ranks),
            slice_axis=axis_of(slice_ranks),
            gather_ranks=gather_ranks,
            slice_ranks=slice_ranks,
        )

    @property
    def silent(self) -> bool:
        """Whether no conversion is needed."""
        return self.boundary.silent

    def __call__(self, x: Tensor, samples: int) -> Tensor:
        """Convert ``x``, this rank's rows of a microbatch of ``samples`` rows in all."""
        return x if self.silent else _Cross.apply(x, self, samples)

    def leave(self, x: Tensor, samples: int, dim: int | None) -> Tensor:
        """Convert an output of the model whose batch is dimension ``dim``. With ``dim`` None it has no batch dimension,
        and is a mean over samples."""
        if dim == 0 or self.boundary.reduces_exit:
            return self(x, samples)
        if dim is not None:
            return self(x.movedim(dim, 0), samples).movedim(0, dim)
        return x if self.silent or not x.is_floating_point() else _Average.apply(x, self, samples)

    def forward(self, x: Tensor, samples: int) -> Tensor:
        """Conversion in forward, without autograd."""
        b = self.boundary
        slice_sizes = _rows(samples, b.target, self.slice_ranks)
        if b.gathers_tokens:
            x = all_gather(x, 1, shard_sizes(b.exit_tokens, self.reduce_axis), self.reduce_axis)
        if b.fused_exit:
            _check_rows(x, sum(slice_sizes))
            x = reduce_scatter(x, 0, slice_sizes, self.slice_axis)
        else:
            if b.reduces_exit:
                x = all_reduce(x.clone(memory_format=torch.contiguous_format), self.reduce_axis)
            if b.gathers > 1:
                x = all_gather(x, 0, _rows(samples, b.source, self.gather_ranks), self.gather_axis)
            if b.slices > 1:
                _check_rows(x, sum(slice_sizes))
                x = own_slice(x, 0, slice_sizes, self.slice_axis)
        if b.cuts_tokens:
            x = own_slice(x, 1, shard_sizes(b.entry_tokens, self.scatter_axis), self.scatter_axis)
        return x

    def backward(self, gradient: Tensor, samples: int) -> Tensor:
        """Convert the gradient at the target to the source layout."""
        b = self.boundary
        scale = b.source.data / b.target.data
        gather_sizes = _rows(samples, b.source, self.gather_ranks)
        if b.cuts_tokens:
            gradient = all_gather(gradient, 1, shard_sizes(b.entry_tokens, self.scatter_axis), self.scatter_axis)
        if b.fused_entry:
            gradient = reduce_scatter(gradient, 0, gather_sizes, self.gather_axis)
        else:
            if b.reduces_entry:
                gradient = all_reduce(gradient.clone(memory_format=torch.contiguous_format), self.scatter_axis)
            if b.slices > 1:
                gradient = all_gather(gradient, 0, _rows(samples, b.target, self.slice_ranks), self.slice_axis)
            if b.gathers > 1:
                gradient = own_slice(gradient, 0, gather_sizes, self.gather_axis)
        if b.gathers_tokens:
            gradient = own_slice(gradient, 1, shard_sizes(b.exit_tokens, self.reduce_axis), self.reduce_axis)
        return gradient if scale == 1 else gradient * scale


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: Crossing, samples: int) -> Tensor:
        ctx.crossing, ctx.samples = crossing, samples
        y = crossing.forward(x, samples)
        # An identity in forward (only the gradient is converted) must still be a new tensor to autograd.
        return y.view_as(y) if y is x else y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.crossing.backward(gradient, ctx.samples), None, None


class _Average(torch.autograd.Function):
    """Converts a mean over each source shard's samples to the mean over the samples of all shards that are joined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, crossing: Crossing, samples: int) -> Tensor:
        rows = _rows(samples, crossing.boundary.source, crossing.gather_ranks)
        ctx.crossing, ctx.share = crossing, rows[crossing.gather_axis.index] / max(1, sum(rows))
        if crossing.boundary.gathers == 1:
            return x.view_as(x)
        return all_reduce(x * ctx.share, crossing.gather_axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        b = ctx.crossing.boundary
        if b.slices > 1:
            gradient = all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.crossing.slice_axis)
        return gradient * (ctx.share * b.source.data / b.target.data), None, None
