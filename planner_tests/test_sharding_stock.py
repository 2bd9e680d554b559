"""Only what computes as torch's own layers do is split or replaced: a subclass's forward must not be lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from asa.sharding.layers.dropout import make_reproducible
from asa.sharding.layers.tensor import plan_split
from asa.sharding.randomness.samples import SampleContext, SampleDropout
from asa.sharding.stock import stock
from asa.tracing import trace


class Small(nn.Linear):
    """Other initial weights, and nothing else."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        nn.init.normal_(self.weight, std=0.02)


class Standardised(nn.Conv2d):
    """What several networks normalise their weights by."""

    def forward(self, x: Tensor) -> Tensor:
        """With weights of mean zero."""
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


class Always(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        """In evaluation, too."""
        return nn.functional.dropout(x, self.p, True)


def hooked() -> nn.Module:
    layer = nn.Linear(4, 6)
    layer.register_forward_hook(lambda _m, _args, output: output * 2)
    return layer


def patched() -> nn.Module:
    layer = nn.ReLU()
    layer.forward = lambda x: x.softmax(1)  # type: ignore[method-assign]
    return layer


def test_what_is_stock() -> None:
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(4, 6))
    changed = [Standardised(3, 4, 3), Always(), hooked(), patched(), old]
    changed.append(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)))
    assert not any(map(stock, changed))
    lazy = nn.LazyLinear(3)
    lazy(torch.ones(2, 4))
    assert all(map(stock, (nn.Linear(4, 6), Small(4, 6), nn.Dropout(), nn.BatchNorm2d(3), lazy)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = Standardised(3, 8, 3), nn.ReLU()
        self.drop = Always(0.5)
        self.small, self.head = Small(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Of convolutions and linear layers."""
        return self.head(self.drop(self.act(self.small(self.act(self.conv(x)).mean((2, 3))))))


def test_only_stock_layers_are_split_and_replaced() -> None:
    traced = trace(Net(), torch.randn(2, 3, 8, 8), name="net")
    split = {path for c in traced.components for path in plan_split(c)[0].actions}
    assert {"small", "head"} == split
    make_reproducible(traced.components, SampleContext(seed=0))
    modules = [m for c in traced.components for m in c.modules()]
    assert any(isinstance(m, Always) for m in modules)
    assert not any(isinstance(m, SampleDropout) for m in modules)
