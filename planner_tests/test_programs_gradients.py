"""Programs whose parameters do not all get a gradient, on all ranks, once a step: the numbers of one process all the
same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner_tests.programs import (
    LAYOUTS,
    Program,
    State,
    assert_as_alone,
    classes,
    cross_entropy,
    epochs,
    numbers,
    sgd,
)

X, Y = numbers(20, 8), classes(20, 4)


def usual(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
    return epochs(net, opt, batches, cross_entropy)


class Experts(nn.Module):
    """One of three computes a sample; the third none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.idle = nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)
        self.gain, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        h, k, out = F.gelu(self.first(x)), x[:, 0] > 0, x.new_zeros(len(x), 4)
        for expert, chosen in ((self.a, k), (self.b, ~k), (self.idle, k & ~k)):
            if chosen.any():
                more = expert(h[chosen]) * self.gain if expert is self.a else expert(h[chosen]) + self.shift
                out = out.index_put((chosen.nonzero()[:, 0],), more)
        return out


def test_experts_that_some_samples_use() -> None:
    assert_as_alone(Program(model=Experts, x=X, y=Y, batch=2, loop=usual))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(self.first(x))
        return self.a(h), self.b(h)


def one_head(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
    return epochs(net, opt, batches, lambda m, x, y: F.cross_entropy(m(x)[0], y))


def heads_in_turn(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
    for i, (x, y) in enumerate(batches):
        opt.zero_grad()
        F.cross_entropy(net(x)[i % 2], y).backward()
        opt.step()
    return dict(net.state_dict())


def two_backwards(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        a, b = net(x)
        F.cross_entropy(a, y).backward(retain_graph=True)
        F.cross_entropy(b, y).backward()
        opt.step()
    return dict(net.state_dict())


def several_forwards(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad(set_to_none=False)
        first = F.cross_entropy(net(x)[0], y)
        second = F.mse_loss(net(x * 2)[1], net(x)[0].detach())
        (first + 0.3 * second).backward()
        F.cross_entropy(net(-x)[1], y).backward()
        opt.step()
    return dict(net.state_dict())


def kept_gradients(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
    """Two losses one after the other, the gradients of the first kept meanwhile."""
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x)[0], y).backward()
        first = [p.grad for p in net.parameters()]
        opt.zero_grad()
        F.cross_entropy(net(x)[1], y).backward()
        for p, g in zip(net.parameters(), first, strict=True):
            if g is not None:
                p.grad = g * 0.5 if p.grad is None else p.grad + g * 0.5
        opt.step()
    return dict(net.state_dict())


GRADIENTS = ["ddp", "zero2", "mixed-sharded"]
"""Every way in which gradients are reduced: whole, to one rank's share, and by shards; the last between layouts."""


def test_one_head_under_every_plan() -> None:
    assert_as_alone(Program(model=Heads, x=X, y=Y, loop=one_head))


@pytest.mark.parametrize("loop", [heads_in_turn, two_backwards, several_forwards, kept_gradients])
def test_heads(loop: Any) -> None:
    assert_as_alone(Program(model=Heads, x=X, y=Y, loop=loop), GRADIENTS)


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 4))


def thawing(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
    first, *others = net.parameters()
    for epoch in range(3):
        first.requires_grad_(epoch == 1)
        others[-1].requires_grad_(epoch != 1)
        epochs(net, opt, batches, cross_entropy)
    return dict(net.state_dict())


def thawing_all(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
    for epoch in range(2):
        for p in list(net.parameters())[:-1]:
            p.requires_grad_(epoch == 1)
        epochs(net, opt, batches, cross_entropy)
    return dict(net.state_dict())


@pytest.mark.parametrize("loop", [thawing, thawing_all])
def test_what_is_trained_changes(loop: Any) -> None:
    def frozen() -> nn.Module:
        net = chain()
        for p in list(net.parameters())[:-1] if loop is thawing_all else [next(net.parameters())]:
            p.requires_grad_(False)
        return net

    assert_as_alone(Program(model=frozen, x=X, y=Y, loop=loop), GRADIENTS)


TOKENS = torch.randint(30, (20, 5), generator=torch.Generator().manual_seed(2))


def table() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(30, 8, sparse=True), nn.Linear(8, 4))


def plain_sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def test_sparse_gradients() -> None:
    assert_as_alone(
        Program(model=table, x=TOKENS, y=Y, optimizer=plain_sgd, loop=usual), ["ddp", "zero1", "fsdp", "tensor"]
    )


def lazily(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam([net[0].weight], lr=0.01)  # type: ignore[index]


def test_sparse_gradients_stay_sparse_where_an_optimizer_wants_them_so() -> None:
    assert_as_alone(Program(model=table, x=TOKENS, y=Y, optimizer=lazily, loop=usual), ["ddp"])


def test_names_of_plans() -> None:
    assert {"ddp", "zero1", "zero2", "fsdp", "tensor", "mixed"} <= set(LAYOUTS)
    assert sgd(chain()).defaults["weight_decay"]
