"""Numbers drawn in forward: other draws for other samples, and the same under every plan."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asa.tracing import trace
from planner_tests.programs import LAYOUTS, Program, State, classes, cross_entropy, distance, epochs, numbers

X, Y = numbers(20, 8), classes(20, 4)


def usual(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
    return epochs(net, opt, batches, cross_entropy)


def noise(x: Tensor) -> Tensor:
    return torch.randn_like(x)


def noise_by_shape(x: Tensor) -> Tensor:
    return torch.rand(x.shape, dtype=x.dtype) + torch.randn(x.size(0), 1, dtype=x.dtype)


def gumbel(x: Tensor) -> Tensor:
    return F.gumbel_softmax(x, hard=False)


def filled(x: Tensor) -> Tensor:
    return torch.empty_like(x).normal_(0.5, 2.0) + torch.bernoulli(torch.sigmoid(x))


class Drawing(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.first, self.last, self.draw = nn.Linear(8, 6), nn.Linear(6, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(F.gelu(h + 0.3 * self.draw(h)) if self.training else F.gelu(h))


class Skipping(nn.Module):
    """Blocks left out by a coin."""

    def __init__(self, coin: Any) -> None:
        super().__init__()
        self.first, self.last, self.coin = nn.Linear(8, 8), nn.Linear(8, 4), coin
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if not self.training or self.coin() > 0.5:
                x = x + F.gelu(block(x))
        return self.last(x)


def by_torch() -> Tensor:
    return torch.rand(())


def alike(program: Program, names: list[str]) -> None:
    """Every plan leaves the same, which is not what no noise would leave."""
    found = program.spread(names)
    first = found["ddp"][0]
    assert not isinstance(first, str), first
    for name, states in found.items():
        for state in states:
            assert not isinstance(state, str), f"{name}: {state}"
            assert distance(state, first) < 1e-11, name


@pytest.mark.parametrize("draw", [noise, noise_by_shape, gumbel, filled])
def test_noise_in_forward(draw: Any) -> None:
    names = list(LAYOUTS) if draw is noise else ["ddp", "mixed-sharded"]
    alike(Program(model=lambda: Drawing(draw), x=X, y=Y, loop=usual), names)


@pytest.mark.parametrize("coin", [by_torch, random.random, np.random.rand])
def test_a_coin_in_forward(coin: Any) -> None:
    names = list(LAYOUTS) if coin is by_torch else ["ddp", "mixed-sharded"]
    alike(Program(model=lambda: Skipping(coin), x=X, y=Y, loop=usual), names)


def outputs(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
    net.train()
    return {str(i): net(x).detach() for i, (x, _) in enumerate(batches)}


class Same(nn.Module):
    """Gives back its noise, beside nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn_like(x)[:, :4] + 0 * self.last(x)


def test_other_samples_get_other_noise_and_other_steps_too() -> None:
    first, second = Program(model=Same, x=X, y=Y, loop=outputs).spread(["ddp"])["ddp"]
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    rows = torch.cat([*first.values(), *second.values()])
    assert len(rows) == 20
    assert len(torch.unique(rows, dim=0)) == 20


@pytest.mark.parametrize("coin", [random.random, np.random.rand])
def test_a_trace_never_trips_over_a_coin(coin: Any) -> None:
    made = Skipping(coin)
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.rand()
    np.random.seed(1)
    prints = set()
    for _ in range(6):
        found = trace(made, torch.zeros(2, 8), name="model")
        prints.add(found.model_fingerprint)
        assert "draws from Python's or numpy's generators" in found.note
        assert all(f.flops >= 0 for f in found.facts) if hasattr(found.facts[0], "flops") else True
    assert len(prints) == 1
    assert (random.getstate(), np.random.rand()) == before
