"""What a job plans anew while it runs: ranks that do not pay may idle, and what was wished for still holds."""

from __future__ import annotations

import dataclasses

import nouns
import pytest

from asa.api.plans.planned import PlanOptions, on_all_ranks, on_ranks_that_pay
from asa.errors import InfeasibleError
from asa.ir.cluster import Cluster, RankDevice

PROFILE = nouns.profile()


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
