"""What an in-place dropout drops is gone for whoever reads its input later, whether or not they use its result."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asa.sharding.layers.dropout import make_reproducible
from asa.sharding.randomness.samples import SampleContext
from asa.tracing import trace


class Between(nn.Module):
    """Two linear layers and a dropout between them; ``used``: it returns what the other leaves in its input.

    Both read both, so that no cut comes between: masks are those of a place in a component.
    """

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.used = used
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.5, inplace=not used)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.first(x)
        y = self.drop(x)
        return self.last(y + 0 * x if self.used else x + 0 * y)


class Residual(Between):
    def forward(self, x: Tensor) -> Tensor:
        """Reads both."""
        x = self.first(x)
        y = self.drop(x)
        return self.last(y + (y if self.used else x))


class Function(Between):
    def forward(self, x: Tensor) -> Tensor:
        """A function drops."""
        x = self.first(x)
        y = F.dropout(x, 0.5, self.training, not self.used)
        return self.last(y + 0 * x if self.used else x + 0 * y)


class Opaque(Between):
    def forward(self, x: Tensor) -> Tensor:
        """A branch on data, so that no graph is made of it."""
        x = self.first(x)
        if x.sum() > 1e9:
            x = x + 1
        y = self.drop(x)
        return self.last(y if self.used else x)


def trained(kind: type[Between], used: bool, x: Tensor, *, training: bool = True) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients, masks drawn by sample."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        traced = trace(kind(used).double(), x, name="between")
    make_reproducible(traced.components, SampleContext(seed=1, samples=torch.arange(len(x))))
    y = x
    for component in traced.components:
        left = component.train(training)(y)
        y = left[0] if isinstance(left, tuple) else left
    y.square().sum().backward()
    return y.detach(), [p.grad for c in traced.components for p in c.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", [Between, Residual, Function, Opaque])
def test_the_input_is_what_was_left(kind: type[Between]) -> None:
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    used, in_place = trained(kind, True, x), trained(kind, False, x)
    whole = trained(kind, True, x, training=False)
    assert len(used[1]) == 4
    assert not torch.allclose(used[0], whole[0])  # something was dropped
    torch.testing.assert_close(in_place, used)
    torch.testing.assert_close(trained(kind, False, x, training=False), whole)
