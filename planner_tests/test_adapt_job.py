"""What a job plans anew while it runs: ranks that do not pay may idle, and what was wished for still holds."""

from __future__ import annotations

import dataclasses
import time

import nouns
import pytest
from test_adapt_laws import _silent, _slowness, _world

from asa.api.plans.planned import Origins, cost_model, on_all_ranks
from asa.api.plans.requests import PlanOptions, on_ranks_that_pay
from asa.errors import InfeasibleError
from asa.interfaces.executor import Placement
from asa.ir.cluster import Cluster, RankDevice
from asa.scheduler.model import Question

PROFILE = nouns.profile()


def test_ranks_of_a_job_do_not_wait_for_a_search() -> None:
    """It is made in another process, which finds what this one would."""
    cluster, wishes = nouns.cluster(2), PlanOptions(global_batch=8, optimizer="sgd", pipelines=True)
    model = cost_model(Origins(profile=PROFILE, cluster=cluster), wishes)
    truth = _slowness(2, rank=1, by=8.0)
    now = Placement(plan=on_all_ranks(PROFILE, cluster, 2, wishes), processes=(0, 1))
    question = Question(
        current=now, known=(), measured=_silent(_world(2, truth)), deviations=((0.01, 0.01), (0.05,)), draws=4,
        slowness=truth, seed=1,
    )  # fmt: skip
    assert model.background is not None
    search = model.background(question)
    here = model.answer(question)
    while (there := search.result()) is None:
        time.sleep(0.02)
    assert [p.plan.num_ranks for p in there.found] == [p.plan.num_ranks for p in here.found]
    assert 1 in [p.plan.num_ranks for p in there.found]
    assert len(there.draws) == 4


def _slow(ranks: int, by: float) -> Cluster:
    """The last rank takes ``by`` times as long."""
    cluster = nouns.cluster(ranks)
    every = [RankDevice(name=cluster.device.name, speed=1.0 if r < ranks - 1 else 1 / by) for r in range(ranks)]
    return dataclasses.replace(cluster, devices=tuple(every))


@pytest.mark.parametrize("pipelines", [True, False])
def test_a_rank_that_is_too_slow_may_idle(pipelines: bool) -> None:
    wishes = PlanOptions(global_batch=8, optimizer="sgd", pipelines=pipelines)
    assert on_all_ranks(PROFILE, _slow(2, 8.0), 2, wishes).num_ranks == 2, "a loop that starts gives work to all"
    assert on_ranks_that_pay(PROFILE, _slow(2, 8.0), 2, wishes, 1.0).num_ranks == 1
    assert on_ranks_that_pay(PROFILE, _slow(2, 1.0), 2, wishes, 1.0).num_ranks == 2, "two are faster where both are"


def test_what_was_wished_for_holds_under_a_new_plan_too() -> None:
    wishes = PlanOptions(global_batch=8, optimizer="adamw", pipelines=True, strategies=("ddp", "single"), at_once=True)
    found = on_ranks_that_pay(PROFILE, _slow(4, 4.0), 4, wishes, 1.0)
    assert (found.optimizer, found.num_microbatches) == ("adamw", 1)
    assert {c.data.strategy for c in found.components} == {"replicate"}
    with pytest.raises(InfeasibleError):
        on_ranks_that_pay(PROFILE, _slow(2, 4.0), 2, dataclasses.replace(wishes, memory_bytes=1 << 20), 1.0)
