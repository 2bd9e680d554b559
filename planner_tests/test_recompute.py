"""Components that compute their forward twice train as if they had not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from asa.executor.model.materialize import materialize
from asa.executor.model.step import played
from asa.ir.equivalence import Equivalence
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.sharding.layers.recompute import recompute
from asa.sharding.randomness.samples import SampleContext, SampleDropout
from asa.strategies import offered
from asa.tracing import trace
from planner_tests.hand_plans import copy_of, hand_plan, model_of, uniform
from planner_tests.small_models import CLASSES, INPUT
from planner_tests.stage_plans import Degrees, in_turn, split_where_possible, staged
from planner_tests.verified import verified


def always(_index: int) -> bool:
    return True


def plan_of(name: str, widths: list[int], **options: Any) -> Plan:
    base = hand_plan(model_of(name), 2, uniform(1, 2), input_shape=INPUT, num_classes=CLASSES[name], global_batch=24)
    return staged(base, widths, **({"checkpoint": always, "microbatches": 2} | options))


def check(name: str, widths: list[int], **options: Any) -> Equivalence:
    return verified(plan_of(name, widths, **options), name)


@pytest.mark.parametrize(
    ("name", "widths", "options"),
    [
        ("blocks", [2], {"degrees": in_turn, "checkpoint": lambda i: i % 2 == 0}),
        ("blocks", [2], {"strategy": lambda _i: "zero3"}),
        ("vision_transformer", [2], {"degrees": split_where_possible}),
        ("plain", [2], {"degrees": split_where_possible, "strategy": lambda _i: "zero3"}),
        ("blocks", [1, 1], {"microbatches": 4}),
        ("vision_transformer", [2, 1], {"schedule": "gpipe", "checkpoint": lambda i: i % 2 == 1}),
    ],
    ids=["mixed", "sharded", "heads", "tensor", "stages", "uneven-stages"],
)
def test_computing_twice_changes_nothing(name: str, widths: list[int], options: dict[str, Any]) -> None:
    found = check(name, widths, **options)
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9
    assert "running_mean" in "".join(t.name for t in found.tensors) or name != "blocks"


def _one_step(rank: int, plan: Plan, name: str) -> tuple[dict[str, int], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Calls of every leaf module in a step of two microbatches; buffers, gradients."""
    torch.manual_seed(0)
    model = materialize(
        plan, copy_of(name), torch.zeros((2, *INPUT)), rank=rank, strategies=offered(), device=torch.device("cpu")
    )
    model.train()
    calls: dict[str, int] = {}
    for component in model.components:
        for path, module in component.named_modules():
            if path and next(module.children(), None) is None:

                def count(_m: nn.Module, _args: Any, path: str = path) -> None:
                    calls[path] = calls.get(path, 0) + 1

                module.register_forward_pre_hook(count)
    x = torch.randn(8, *INPUT)
    played(model, torch.arange(8), 0, lambda rows: x[rows], lambda rows: torch.zeros(4, dtype=torch.int64))
    buffers = {n: b.clone() for c in model.components for n, b in c.named_buffers()}
    return calls, buffers, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("degrees", [split_where_possible, lambda _i, _w: (1, 1)], ids=["tensor", "whole"])
def test_every_layer_runs_twice_and_statistics_move_once(degrees: Degrees) -> None:
    twice = run_ranks(2, _one_step, plan_of("blocks", [2], degrees=degrees), "blocks", threads=1, timeout_s=120)
    plan = plan_of("blocks", [2], degrees=degrees, checkpoint=lambda _i: False)
    once = run_ranks(2, _one_step, plan, "blocks", threads=1, timeout_s=120)
    for (calls2, buffers2, gradients2), (calls1, buffers1, gradients1) in zip(twice, once, strict=True):
        assert calls1["conv"] == calls1["blocks.1.norm3"] == 2
        for path, count in calls1.items():
            assert calls2[path] == 2 * count, path
        for name, value in buffers1.items():
            assert torch.equal(buffers2[name], value), name
        assert buffers1["norm.num_batches_tracked"] == 2
        assert all(torch.equal(a, b) for a, b in zip(gradients1, gradients2, strict=True))


def test_masks_of_an_earlier_microbatch_come_back() -> None:
    """Another microbatch has gone forward, and its samples are the current ones, when the first is computed again."""
    context = SampleContext(seed=1, samples=torch.arange(4), total=4)
    drop = SampleDropout(0.5, site="here", context=context)
    before = context.copy()
    first = drop(torch.ones(4, 50))
    context.samples = torch.arange(4, 8)
    assert not torch.equal(drop(torch.ones(4, 50)), first)
    context.become(before)
    assert torch.equal(drop(torch.ones(4, 50)), first)


class _InPlace(nn.Module):
    """Changes its input in place, returns a view, draws from torch's generator, and has a parameter it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(6, 6), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x.relu_())
        return (hidden + torch.rand_like(hidden)).view(-1, 2, 3).transpose(1, 2)


class _Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 6), _InPlace(), nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)).relu_())


def _twice(recomputed: bool, use: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model, x = _Ends().double(), torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    traced, context = trace(model, x.detach(), name="ends"), SampleContext(samples=torch.arange(4), total=4)
    for component in traced.components if recomputed else ():
        recompute(component, context)
    torch.manual_seed(5)
    value: Any = x
    for component in traced.components:
        value = component(value)[0]
    use(value, x)
    assert model.middle.unused.grad is None
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def _once(y: torch.Tensor, _x: torch.Tensor) -> None:
    y.square().sum().backward()


def _again(y: torch.Tensor, _x: torch.Tensor) -> None:
    y.square().sum().backward(retain_graph=True)
    y.cos().sum().backward()


def _penalised(y: torch.Tensor, x: torch.Tensor) -> None:
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (y.sum() + gradient.square().sum()).backward()


@pytest.mark.parametrize("use", [_once, _again, _penalised])
def test_gradients_are_those_without_a_checkpoint(use: Any) -> None:
    for once, twice in zip(_twice(False, use), _twice(True, use), strict=True):
        assert torch.equal(once, twice)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def test_a_shared_weight_in_bf16_gets_the_gradient_of_both_components() -> None:
    found = []
    for recomputed in ((), (0,), (1,), (0, 1)):
        torch.manual_seed(0)
        model, context = _Tied(), SampleContext(samples=torch.arange(4), total=4)
        x = torch.randn(4, 8)
        first, second = components = trace(model, x, name="tied").components
        for index in recomputed:
            recompute(components[index], context)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = second(first(x)[0])[0]
        value.float().square().sum().backward()
        assert model.first.weight.grad is not None
        found.append(model.first.weight.grad)
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0], rtol=0.02, atol=0.02)
