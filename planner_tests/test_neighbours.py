"""Weights are gathered one component ahead across segments, once, and nothing else changes."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from asa.executor.measuring.equivalence import _batch, _step
from asa.executor.model.materialize import materialize
from asa.executor.model.parallel import ParallelModel
from asa.launch import run_ranks
from asa.sharding.collectives import direct
from asa.strategies import offered
from asa.tracing import TracedModel
from asa.tracing.component import TracedComponent
from planner_tests.hand_plans import hand_plan, traced, uniform
from planner_tests.verified import of_copies

INPUT, CLASSES = (8, 1, 1), 4


class Tower(nn.Module):
    """Five layers, each a component of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        x = x.flatten(1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


@cache
def _traced() -> TracedModel:
    torch.manual_seed(5)
    return traced(Tower(), INPUT)


def build() -> TracedModel:
    """A copy of one trace."""
    return copy.deepcopy(_traced())


def plan_of(*strategies: str, microbatches: int = 1) -> Any:
    return hand_plan(
        build(), 2, uniform(2, 1), input_shape=INPUT, num_classes=CLASSES, global_batch=8,
        data_strategy=lambda i: strategies[i % len(strategies)], num_microbatches=microbatches,
    )  # fmt: skip


def _events(_rank: int, plan: Any, ahead: bool) -> list[str]:
    """What the second step computes and gathers, in that order."""
    seen: list[str] = []
    gather, compute = direct.all_gather_into_tensor, TracedComponent.forward

    def gathers(whole: torch.Tensor, part: torch.Tensor, **options: Any) -> Any:
        seen.append(f"gather {whole.numel()}")
        return gather(whole, part, **options)

    def computes(self: TracedComponent, x: torch.Tensor) -> Any:
        seen.append(self.name)
        found = compute(self, x)
        if found[0].requires_grad:  # a trace is compared with its model without gradients
            found[0].register_hook(lambda _: seen.append(f"back into {self.name}"))
        return found

    direct.all_gather_into_tensor, TracedComponent.forward = gathers, computes  # type: ignore[method-assign]
    model = materialize(
        plan, build(), torch.zeros((2, *INPUT)), rank=_rank, strategies=offered(), device=torch.device("cpu")
    )
    if ahead:
        model.gather_across()
    model.train()
    for step in range(2):
        seen.clear()
        model.zero_grad()
        _step(model, *_batch(plan, 8, step, torch.float32), step, False)
    return seen


def test_it_begins_while_the_component_beside_it_computes() -> None:
    plan = plan_of("replicate", "zero3")
    names = [c.name for c in plan.components]
    assert len(names) >= 4
    for ahead in (False, True):
        first, _ = run_ranks(2, _events, plan, ahead, threads=1, timeout_s=120)
        forward = first[: first.index(names[-1])]
        gathered = [i for i, e in enumerate(forward) if e.startswith("gather")]
        behind = [forward[i + 1] for i in gathered]  # computed next
        odd = names[1::2]
        assert behind == ([names[names.index(n) - 1] for n in odd] if ahead else odd), forward
        back = first[first.index(names[-1]) :]
        total = sum(e.startswith("gather") for e in back)
        assert total == len(odd), "each once"
        # Of one that was let go of: when it is its turn in backward, or that of the one behind it.
        at = back.index(f"back into {names[1]}")
        before = sum(e.startswith("gather") for e in back[:at])
        after = sum(n in odd for n in names[3:])
        assert before == (after + 1 if ahead else after), back


@pytest.mark.parametrize(
    ("strategies", "microbatches"),
    [(("replicate", "zero3"), 2), (("zero2", "zero3", "replicate"), 1), (("zero2", "zero3"), 2)],
)
def test_training_is_as_before(strategies: tuple[str, ...], microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ParallelModel.__init__

    def acquainted(self: ParallelModel, *args: Any, **options: Any) -> None:
        honest(self, *args, **options)
        self.gather_across()

    monkeypatch.setattr(ParallelModel, "__init__", acquainted)
    found = of_copies(plan_of(*strategies, microbatches=microbatches), _traced())
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9
