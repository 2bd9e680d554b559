"""Stochastic depth of people's own belongs to samples too; what only looks like it is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asa.sharding.layers.dropout import make_reproducible
from asa.sharding.randomness.depth import drops_samples
from asa.sharding.randomness.samples import SampleContext, SampleDropout, replacement
from asa.tracing import trace


class DropPath(nn.Module):
    """A Bernoulli number per sample."""

    def __init__(self, drop_prob: float = 0.2, scale_by_keep: bool = True) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep

    def forward(self, x: Tensor) -> Tensor:
        """As most write it."""
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * (mask.div_(keep) if self.scale_by_keep else mask)


class Floored(nn.Module):
    """The other way to write it, of what is left."""

    def __init__(self, survival: float = 0.7) -> None:
        super().__init__()
        self.survival_rate = survival

    def forward(self, hidden: Tensor) -> Tensor:
        """``floor`` of a uniform number."""
        if not self.training:
            return hidden
        random = self.survival_rate + torch.rand((hidden.shape[0], *(1,) * (hidden.ndim - 1)))
        return hidden.div(self.survival_rate) * random.floor_()


Floored.__name__ = "StochasticDepthRate"


class DropElements(DropPath):
    def forward(self, x: Tensor) -> Tensor:
        """Of every element."""
        return nn.functional.dropout(x, self.drop_prob, self.training)


class DropAndShift(DropPath):
    def forward(self, x: Tensor) -> Tensor:
        """Something else besides."""
        return super().forward(x) + 1e-3


class DropBatch(DropPath):
    def forward(self, x: Tensor) -> Tensor:
        """All samples or none."""
        return x * (torch.rand(()) >= self.drop_prob) if self.training else x


class DropWeighted(DropPath):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))


class DropExpected(DropPath):
    def forward(self, x: Tensor) -> Tensor:
        """Scaled in evaluation, as in the paper."""
        return x * (torch.rand(len(x), *(1,) * (x.dim() - 1)) >= self.drop_prob) if self.training else 0.8 * x


class DropTwice(DropPath):
    def forward(self, x: Tensor) -> Tensor:
        """By a probability that is none of its attributes."""
        return super().forward(super().forward(x))


class DropMaps(DropPath):
    def forward(self, x: Tensor) -> Tensor:
        """Of maps alone."""
        samples, _channels, _height, _width = x.shape
        return super().forward(x) if samples else x


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (DropPath(), (0.2, True)),
        (DropPath(0.05, False), (0.05, False)),
        (Floored(), (pytest.approx(0.3), True)),
        (DropMaps(0.5), (0.5, True)),
        (DropPath(0.0), None),
        (DropElements(), None),
        (DropAndShift(), None),
        (DropBatch(), None),
        (DropWeighted(), None),
        (DropExpected(), None),
        (DropTwice(), None),
        (nn.Identity(), None),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_it_is_known_by_what_it_does(module: nn.Module, found: tuple[float, bool] | None) -> None:
    before = torch.get_rng_state()
    assert drops_samples(module) == found
    assert torch.equal(torch.get_rng_state(), before)
    assert module.training


def test_hooks_are_not_lost() -> None:
    module = DropPath()
    module.register_forward_hook(lambda *_: None)
    assert replacement(module, "here", SampleContext()) is None


class Residual(nn.Module):
    """Two blocks, each dropped now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.drop1, self.drop2 = DropPath(0.5), Floored(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = x + self.drop1(self.first(x))
        return self.head(x + self.drop2(self.second(x)))


def test_a_sample_is_dropped_wherever_it_is_computed() -> None:
    x = torch.randn(16, 8)
    context = SampleContext(seed=3)
    traced = trace(Residual(), x, name="residual")
    make_reproducible(traced.components, context)
    assert sum(isinstance(m, SampleDropout) for c in traced.components for m in c.modules()) == 2

    def rows(samples: Tensor) -> Tensor:
        context.samples, y = samples, x[samples]
        for component in traced.components:
            left = component.train()(y)
            y = left[0] if isinstance(left, tuple) else left
        return y

    whole, halves = rows(torch.arange(16)), [rows(torch.arange(8, 16)), rows(torch.arange(8))]
    torch.testing.assert_close(torch.cat(halves[::-1]), whole)


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.Dropout2d])
def test_channels_are_dropped_whole_where_samples_are_not_known(kind: type[nn.Dropout1d]) -> None:
    x = torch.ones(64, 16, 5) if kind is nn.Dropout1d else torch.ones(64, 16, 5, 5)
    ours = replacement(kind(0.5), "here", SampleContext(samples=torch.arange(8)))  # eight steps of eight samples
    assert ours is not None
    torch.manual_seed(0)
    flat = ours.train()(x).flatten(2)
    assert torch.equal(flat, flat[..., :1].expand_as(flat))
    assert set(flat.unique().tolist()) == {0.0, 2.0}
    assert kind(1.0).train()(x).abs().max() == replacement(kind(1.0), "here", SampleContext()).train()(x).abs().max()  # type: ignore[union-attr]
