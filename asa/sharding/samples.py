"""Randomness that does not depend on the strategy.

A dropout mask is a function of seed, step, site (the module's path), *global sample index* and element, so the
same sample is masked alike on any rank, in any microbatch, under any layout: what makes training under a plan
comparable with training on one device. The function is that of :mod:`asa.zoo.data.draws`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from asa.sharding.stock import stock
from asa.zoo.data import draws


@dataclass
class SampleContext:
    """Which samples are being computed: set by the executor before every microbatch and component.

    ``samples``: global indices of the rows this rank computes; ``total``: rows of the microbatch on all ranks.
    """

    seed: int = 0
    step: int = 0
    samples: Tensor | None = None
    total: int = 0

    def copy(self) -> SampleContext:
        """As it is now."""
        return replace(self)

    def become(self, other: SampleContext) -> None:
        """Take over what ``other`` says; whoever refers to this one sees it."""
        self.seed, self.step, self.samples, self.total = other.seed, other.step, other.samples, other.total


def uniform(context: SampleContext, site: int, elements: Tensor) -> Tensor:
    """Uniform integers below 2**53, int64 [samples, ...], for element indices ``elements`` (int64 [...])."""
    assert context.samples is not None
    key = draws.key(context.seed, context.step, site)
    streams = draws.words(key, context.samples.to(elements.device))
    return draws.words(key, streams.view(-1, *(1,) * elements.dim()) + elements) & ((1 << 53) - 1)


class SampleDropout(nn.Module):
    """Drop elements (or, with ``whole_from``, whole channels or samples) of a batch-first tensor.

    ``whole_from`` is the first dimension that shares one decision: None for ordinary dropout, 2 for Dropout2d,
    1 for stochastic depth by row. ``shard`` is (dimension, offset, total) where the input is a shard.
    Outside a :class:`SampleContext` with samples, or in ``eval()``, it does what the stock module does.
    """

    def __init__(self, p: float, *, site: str, context: SampleContext, whole_from: int | None = None) -> None:
        super().__init__()
        self.p = p
        self.site = zlib.crc32(site.encode())
        self.context = context
        self.whole_from = whole_from
        self.shard: tuple[int, int, int] | None = None
        self._elements: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    def _element_indices(self, x: Tensor) -> Tensor:
        shape = tuple(x.shape[1 : self.whole_from])
        key = (shape, x.device)
        if key not in self._elements:
            total = list(shape)
            offsets = [0] * len(shape)
            if self.shard is not None:
                dim, offset, whole = self.shard
                if dim - 1 < len(shape):
                    total[dim - 1], offsets[dim - 1] = whole, offset
            index = torch.zeros(shape, dtype=torch.int64)
            for d, size in enumerate(shape):
                view = [1] * len(shape)
                view[d] = size
                index = index * total[d] + (torch.arange(size) + offsets[d]).view(view)
            self._elements = {key: index.to(x.device)}
        return self._elements[key]

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as ``x``."""
        if not self.training or self.p == 0:
            return x
        samples = self.context.samples
        if samples is None or samples.numel() != x.shape[0]:
            return nn.functional.dropout(x, self.p, True)
        if self.p >= 1:
            return x * 0
        draw = uniform(self.context, self.site, self._element_indices(x))
        keep = (draw < int((1 - self.p) * (1 << 53))).to(x.dtype).div_(1 - self.p)
        return x * keep.view(*keep.shape, *(1,) * (x.dim() - keep.dim()))

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"p={self.p}, whole_from={self.whole_from}"


def replacement(module: nn.Module, site: str, context: SampleContext) -> SampleDropout | None:
    """The strategy-independent form of a stock dropout module; None for every other module."""
    if not stock(module):
        return None
    if isinstance(module, nn.Dropout):
        return SampleDropout(module.p, site=site, context=context)
    if isinstance(module, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
        return SampleDropout(module.p, site=site, context=context, whole_from=2)
    if type(module).__name__ == "StochasticDepth" and getattr(module, "mode", "") == "row":
        return SampleDropout(float(module.p), site=site, context=context, whole_from=1)  # type: ignore[arg-type]
    return None
