"""Uneven batches: ranks with weights train as one device does, and the check that says so fails when it should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from asa.errors import UsageError
from asa.executor.model.loss import loss_of
from asa.executor.model.materialize import materialize
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.step import microbatch_rows, microbatches_of
from asa.ir.equivalence import Equivalence
from asa.ir.layout import Layout
from asa.ir.plan import Plan, Stage
from asa.launch import run_ranks
from asa.strategies import offered
from planner_tests.hand_plans import Choose, alternating, hand_plan, model_of, uniform
from planner_tests.small_models import CLASSES, INPUT, build
from planner_tests.stage_plans import staged
from planner_tests.test_api_job import in_float64, plan_of, reference, run, user
from planner_tests.verified import verified


def uneven(name: str, weights: tuple[int, ...], choose: Choose | None = None, **options: Any) -> Plan:
    width = len(weights)
    made = hand_plan(
        model_of(name), width, choose or uniform(width, 1), input_shape=INPUT, num_classes=CLASSES[name], **options
    )
    return replace(made, stages=(Stage(ranks=tuple(range(width)), weights=weights),))


def check(name: str, plan: Plan, samples: int | None = None) -> Equivalence:
    return verified(plan, name, samples=samples)


@pytest.mark.parametrize(
    ("name", "weights", "choose", "samples"),
    [
        ("blocks", (3, 1), None, 13),
        ("perceptron", (2, 1, 1), None, 17),
        ("perceptron", (5, 3, 2, 2), alternating(4), 14),
    ],
    ids=["ddp", "three", "mixed"],
)
def test_uneven_shards_train_as_one_device_does(
    name: str, weights: tuple[int, ...], choose: Choose | None, samples: int
) -> None:
    found = check(name, uneven(name, weights, choose), samples)
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9


def test_sharded_states_do_not_care_for_weights() -> None:
    kept = ("zero3", "zero1", "zero2")
    made = uneven("plain", (3, 1), data_strategy=lambda i: kept[i % 3], num_microbatches=2)
    assert {c.data.strategy for c in made.components} == set(kept)
    assert check("plain", made, 11).equivalent


def test_a_pipeline_with_an_uneven_stage() -> None:
    base = hand_plan(model_of("blocks"), 2, uniform(1, 2), input_shape=INPUT, num_classes=10, global_batch=24)
    made = staged(base, [1, 2], microbatches=3)
    made = replace(made, stages=(made.stages[0], replace(made.stages[1], weights=(3, 1))))
    found = check("blocks", made, 13)
    assert found.equivalent
    assert found.max_rel_error < 1e-9


def test_means_of_uneven_shards_are_no_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelModel, "loss_scale", lambda _self, _batch: 1.0)
    assert not check("perceptron", uneven("perceptron", (3, 1))).equivalent


class Seen(nn.Module):
    """Keeps the mean of what it saw, as BatchNorm does with momentum 1."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=1.0, affine=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(x))
        return y


def _statistics(rank: int, plan: Plan) -> tuple[list[float], list[tuple[int, int]], list[bool]]:
    model = materialize(
        plan, Seen(), torch.zeros(2, 4), rank=rank, strategies=offered(), device=torch.device("cpu")
    )  # fmt: skip
    model.train()
    x = torch.arange(32.0).view(8, 4)
    rows = [(part.read.start, part.read.stop) for part in microbatch_rows(model, 8)]
    start, stop = model.input_rows(8)
    with model.no_sync():
        loss_of(model(x[start:stop], torch.arange(8), 0), torch.zeros(stop - start, dtype=torch.int64)).backward()
    model.average_buffers()
    mean = next(b for n, b in model.components[0].named_buffers() if n.endswith("running_mean")).tolist()
    fits = [plan.fewest(n) >= 1 for n in (1, 3, 4, 8)]
    model.close()
    return mean, rows, fits


def test_running_statistics_count_samples_and_not_ranks() -> None:
    base = hand_plan(Seen(), 2, uniform(2, 1), input_shape=(4,), num_classes=3, global_batch=8)
    made = replace(base, stages=(Stage(ranks=(0, 1), weights=(3, 1)),))
    found = run_ranks(2, _statistics, made, backend="gloo", threads=1, timeout_s=120)
    assert found[0][0] == found[1][0] == pytest.approx(torch.arange(32.0).view(8, 4).mean(0).tolist())
    assert [f[1] for f in found] == [[(0, 6)], [(6, 8)]]
    assert found[0][2] == [False, True, True, True]


def test_a_loop_of_one_s_own_hands_out_equal_batches() -> None:
    plan = uneven("plain", (3, 1))
    with pytest.raises(UsageError, match=r"in proportion \[3, 1\]"):
        materialize(
            plan, build("plain"), torch.zeros(2, *INPUT), rank=0, strategies=offered(), device=torch.device("cpu"),
            outer=Layout(width=2, data=2, tensor=1),
        )  # fmt: skip


def test_a_job_under_weights_trains_as_one_device_does() -> None:
    base = in_float64(plan_of(uniform(2, 1), "zero1"))
    made = replace(base, num_microbatches=2, stages=(Stage(ranks=(0, 1), weights=(3, 1)),))
    weights = reference()
    for ((state, _, _, validation, _),) in run_ranks(2, run, [made], threads=1, timeout_s=120):
        assert user.distance(state, weights) < 1e-11
        assert validation > 0


def test_a_short_batch_has_fewer_microbatches() -> None:
    made = uneven("plain", (7, 1), num_microbatches=3)
    assert [microbatches_of(made, n) for n in (1, 8, 16, 24, 40)] == [1, 1, 2, 3, 3]
    assert [made.fewest(n, microbatches_of(made, n)) for n in (8, 16, 23, 48)] == [1, 1, 2, 2]
    assert made.fewest(3) == 0
