"""Randomness that does not depend on the strategy.

A dropout mask is a function of seed, step, site (the module's path), *global sample index* and element. So a sample
gets the same mask on any rank, in any microbatch, under any layout, and training under a plan can be compared with
training on one device. The function is that of :mod:`asa.zoo.data.draws`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from asa.sharding.randomness.depth import drops_samples
from asa.sharding.stock import stock
from asa.zoo.data import draws


@dataclass
class SampleContext:
    """The samples that are being computed. The executor sets it before every microbatch and component.

    Attributes:
        samples: global indices of the rows that this rank computes.
        total: number of rows of the microbatch on all ranks.
        rows: which of these rows are this rank's.
        start: global index of the microbatch's first sample.
        silent: whether nothing is dropped, and random slopes have their mean value.
    """

    seed: int = 0
    step: int = 0
    samples: Tensor | None = None
    total: int = 0
    rows: slice = field(default_factory=lambda: slice(0, 0))
    start: int = 0
    silent: bool = False
    _calls: Counter[str] = field(default_factory=Counter)
    _counted: tuple[int, Tensor | None] = (0, None)
    """Step and samples for which ``_calls`` was counted."""

    def copy(self) -> SampleContext:
        """A copy of the current context."""
        return replace(self, _calls=self._calls.copy())

    def become(self, other: SampleContext) -> None:
        """Take the values of ``other``, in place."""
        self.seed, self.step, self.samples, self.total = other.seed, other.step, other.samples, other.total
        self.rows, self.start = other.rows, other.start
        self.silent = other.silent
        self._calls, self._counted = other._calls.copy(), other._counted

    def call(self, site: str) -> int:
        """Number of earlier calls with ``site`` for the current samples in this step."""
        if self._counted[0] != self.step or self._counted[1] is not self.samples:
            self._calls, self._counted = Counter(), (self.step, self.samples)
        count = self._calls[site]
        self._calls[site] += 1
        return count


def named(site: str) -> int:
    """Number of a site, equal in every process."""
    return zlib.crc32(site.encode())


def uniform(context: SampleContext, site: int, elements: Tensor) -> Tensor:
    """Uniform integers below 2**53, int64 [samples, ...], for element indices ``elements`` (int64 [...])."""
    assert context.samples is not None
    key = draws.key(context.seed, context.step, site)
    streams = draws.words(key, context.samples.to(elements.device))
    return draws.words(key, streams.view(-1, *(1,) * elements.dim()) + elements) & ((1 << 53) - 1)


class BySample(nn.Module):
    """Base of modules that draw for every element of a batch-first tensor, or for whole channels or samples.

    ``whole_from`` is the first dimension that shares one decision: None for ordinary dropout, 2 for Dropout2d, 1 for
    stochastic depth by row. ``shard`` is (dimension, offset, total) if the input is a shard. ``original`` is the module
    that it replaces, if there is one.
    """

    original: nn.Module | None

    def __init__(self, *, site: str, context: SampleContext, whole_from: int | None = None) -> None:
        super().__init__()
        self.site = named(site)
        self.context = context
        self.whole_from = whole_from
        self.shard: tuple[int, int, int] | None = None
        self.__dict__["original"] = None
        self._elements: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Class of the module that it replaces, because programs look for dropout by ``isinstance``, to draw in
        evaluation or to change its rate."""
        return type(self.__dict__.get("original") or self)

    def as_original(self) -> nn.Module | None:
        """The module that it replaces, in its mode and with its numbers; None if there is none."""
        original = self.original
        if original is not None:
            original.train(self.training)
            for name in ("p", "lower", "upper"):
                if stock(original) and name in vars(original):
                    setattr(original, name, getattr(self, name))
        return original

    def _element_indices(self, x: Tensor) -> Tensor:
        shape = tuple(x.shape[1 : self.whole_from])
        key = (shape, x.device)
        if key not in self._elements:
            total = list(shape)
            offsets = [0] * len(shape)
            if self.shard is not None:
                dim, offset, length = self.shard
                if dim - 1 < len(shape):
                    total[dim - 1], offsets[dim - 1] = length, offset
            index = torch.zeros(shape, dtype=torch.int64)
            for d, size in enumerate(shape):
                view = [1] * len(shape)
                view[d] = size
                index = index * total[d] + (torch.arange(size) + offsets[d]).view(view)
            self._elements = {key: index.to(x.device)}
        return self._elements[key]

    def has_rows(self, x: Tensor) -> bool:
        """Whether the rows of ``x`` are the samples of the context."""
        return self.context.samples is not None and self.context.samples.numel() == x.shape[0]

    def draw(self, x: Tensor) -> Tensor:
        """Uniform integers below 2**53 for the elements of ``x``, or for those that share a decision: int64 [samples,
        ...]."""
        return uniform(self.context, self.site, self._element_indices(x))


class SampleDropout(BySample):
    """Drops elements, channels or samples. In ``eval()``, or if the context does not know the samples, it does what the
    stock module does.

    With ``scaled`` the rest is divided by the probability of being kept, which preserves the expectation. With
    ``inplace`` the result also replaces the input.
    """

    def __init__(
        self, p: float, *, site: str, context: SampleContext, whole_from: int | None = None, scaled: bool = True
    ) -> None:
        super().__init__(site=site, context=context, whole_from=whole_from)
        self.p, self.scaled = p, scaled
        self.inplace = False

    def forward(self, x: Tensor) -> Tensor:
        """``x`` after dropout, in the same shape."""
        if not self.training or self.p == 0 or self.context.silent:
            return x
        return x.copy_(self.dropped(x)) if self.inplace else self.dropped(x)

    def dropped(self, x: Tensor) -> Tensor:
        """``x`` after dropout, in new memory."""
        if self.p >= 1:
            return x * 0
        if not self.has_rows(x):
            return self.by_generator(x)
        mask = self.draw(x) < int((1 - self.p) * (1 << 53))
        return self.masked(x, mask.view(*mask.shape, *(1,) * (x.dim() - mask.dim())))

    def by_generator(self, x: Tensor) -> Tensor:
        """``x`` after dropout with the stock function's random numbers."""
        if self.whole_from is None:
            return nn.functional.dropout(x, self.p, True)
        shared = (1,) * (x.dim() - self.whole_from)
        return self.masked(x, torch.rand(*x.shape[: self.whole_from], *shared, device=x.device) >= self.p)

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x`` with elements that are not ``mask`` set to zero."""
        return x * (mask.to(x.dtype).div_(1 - self.p) if self.scaled else mask)

    def extra_repr(self) -> str:
        """Text for ``print(module)``."""
        return f"p={self.p}, whole_from={self.whole_from}"


_SATURATION = 1.7580993408473766
"""Negative of the value with which alpha dropout replaces a dropped element, from SELU."""


class SampleAlphaDropout(SampleDropout):
    """Alpha dropout (Klambauer et al. 2017, "Self-Normalizing Neural Networks", section 2) of elements or channels."""

    def by_generator(self, x: Tensor) -> Tensor:
        """``x`` after the stock function."""
        function = nn.functional.alpha_dropout if self.whole_from is None else nn.functional.feature_alpha_dropout
        return function(x, self.p, True)

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x`` with dropped elements replaced by a constant, and scaled such that a standard normal input keeps its
        mean and variance."""
        scale = ((_SATURATION**2 * self.p + 1) * (1 - self.p)) ** -0.5
        return scale * (torch.where(mask, x, -_SATURATION) + _SATURATION * self.p)


class SampleRReLU(BySample):
    """A leaky ReLU whose slope is drawn for every element, between ``lower`` and ``upper``."""

    def __init__(self, lower: float, upper: float, *, site: str, context: SampleContext, inplace: bool = False) -> None:
        super().__init__(site=site, context=context)
        self.lower, self.upper, self.inplace = lower, upper, inplace

    def forward(self, x: Tensor) -> Tensor:
        """``x`` after the activation, in the same shape."""
        if self.training and self.context.silent:
            return nn.functional.leaky_relu(x, (self.lower + self.upper) / 2, self.inplace)
        if not (self.training and self.has_rows(x)):
            return nn.functional.rrelu(x, self.lower, self.upper, self.training, self.inplace)
        slope = self.lower + (self.upper - self.lower) * (self.draw(x).double() / (1 << 53))
        factor = torch.where(x < 0, slope.to(x.dtype), 1.0)
        return x.mul_(factor) if self.inplace else x * factor


def replacement(module: nn.Module, site: str, context: SampleContext) -> BySample | None:
    """The strategy-independent form of a stock module that draws, or of any module with stochastic depth; None for
    other modules."""
    new = None if isinstance(module, BySample) else _form_of(module, site, context)
    if new is not None:
        new.__dict__["original"] = module
    return new


def _form_of(module: nn.Module, site: str, context: SampleContext) -> BySample | None:
    if not stock(module):
        dropped = drops_samples(module)
        return (
            None
            if dropped is None
            else SampleDropout(dropped[0], site=site, context=context, whole_from=1, scaled=dropped[1])
        )
    if isinstance(module, nn.Dropout):
        return SampleDropout(module.p, site=site, context=context)
    if isinstance(module, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
        return SampleDropout(module.p, site=site, context=context, whole_from=2)
    if isinstance(module, nn.AlphaDropout):
        return SampleAlphaDropout(module.p, site=site, context=context)
    if isinstance(module, nn.FeatureAlphaDropout):
        return SampleAlphaDropout(module.p, site=site, context=context, whole_from=2)
    if isinstance(module, nn.RReLU):
        return SampleRReLU(module.lower, module.upper, site=site, context=context, inplace=module.inplace)
    if type(module).__name__ == "StochasticDepth" and getattr(module, "mode", "") == "row":
        return SampleDropout(float(module.p), site=site, context=context, whole_from=1)  # type: ignore[arg-type]
    return None
