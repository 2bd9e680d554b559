"""Every rank knows what it computes and whom it waits for: a rank that is slowed down is named, whatever the plan."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import training
from stage_plans import staged

from asa.executor.model.materialize import materialize
from asa.executor.model.votes import Votes
from asa.executor.running import outdir
from asa.executor.running.loop import TrainingExecutor
from asa.executor.running.prepare import open_images
from asa.executor.training.clock import StepTimes
from asa.executor.training.rank_times import RankTimes, packed
from asa.executor.training.stopping import StopRequest
from asa.ir.measurements import Measurements
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.sharding.collectives import direct, segment
from asa.sharding.collectives.waits import Kind, level_of
from asa.strategies import offered
from asa.zoo.models import build

DDP = training.plan(ranks=2)
MIXED = training.plan(ranks=2, split=("features.2.conv", "classifier"))
STAGES = staged(training.plan(ranks=2), [1, 1])


def _burn() -> None:
    """A piece of work of a fixed size, some tens of steps of the tiny model."""
    total = 0
    for i in range(1_000_000):
        total += i


def _measured(
    out: Path, plan: Plan, slow: int | None, *, messages: bool = False, before: int = 0, **settings: Any
) -> list[Any]:
    """One epoch on two ranks, after an exchange of ``before`` numbers for something else; (measurements, events) of
    each."""
    images = open_images(plan, training.settings(out))

    def body(rank: int) -> tuple[Measurements, list[dict[str, Any]]]:
        segment._Switch.on = not messages
        if before:
            direct.all_reduce(torch.zeros(before))

        def parallel(wanted: Plan, _processes: tuple[int, ...]) -> Any:
            model = build("cnn", num_classes=10, input_shape=(1, 8, 8), seed=0)
            made = materialize(
                wanted, model, torch.zeros(2, 1, 8, 8), rank=rank, strategies=offered(), device=torch.device("cpu")
            )
            if rank == slow:
                made.components[0].register_forward_pre_hook(lambda *_: _burn())
            return made

        events: list[dict[str, Any]] = []
        executor = TrainingExecutor(
            plan, parallel, training.settings(out, steps_per_epoch=10, **settings), train=images[0], test=images[1],
            votes=Votes(120), stop=StopRequest(), announce=events.append, folder=out / outdir.CHECKPOINTS, run="test",
        )  # fmt: skip
        return executor.run_epoch(0).measurements, events

    return run_ranks(2, body, threads=1, timeout_s=120)


@pytest.mark.parametrize(
    ("plan", "slow", "messages"),
    [(DDP, 1, False), (MIXED, 1, True), (STAGES, 0, False), (STAGES, 1, False)],
    ids=["replicas", "mixed by messages", "stages, first", "stages, last"],
)
def test_the_slow_rank_is_named(tmp_path: Path, plan: Plan, slow: int, messages: bool) -> None:
    one, two = _measured(tmp_path, plan, slow, messages=messages)
    measured = one[0]
    assert measured == two[0]
    late, other = measured.per_rank[slow], measured.per_rank[1 - slow]
    assert late.own_s > 1.5 * other.own_s
    assert other.waiting_s > 3 * late.waiting_s
    assert measured.slowest is not None
    assert measured.slowest[0] == slow
    assert measured.slowest[1] > 0.2
    assert measured.communication_s is not None
    assert measured.communication_s < other.waiting_s
    lines = [event for event in one[1] if event["event"] == "steps"]
    named = [line["slowest_rank"] for line in lines if line["slowest_rank"] is not None]
    assert named.count(slow) > len(named) / 2, "a machine that stops for a moment does so in one of these windows"
    assert 0.2 < median(line["waiting_share"] for line in lines if line["slowest_rank"] is not None) <= 1


def test_transfers_are_told_by_kind(tmp_path: Path) -> None:
    measured = _measured(tmp_path, MIXED, None, before=12345)[0][0]
    assert {t.op for t in measured.links} <= {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}
    assert measured.links
    for t in measured.links:
        assert (t.level, t.group_size) == (0, 2)
        assert t.n > 0
        assert 0 < t.seconds < measured.step_time.p90
        assert t.num_bytes not in (0, 4 * 12345), "only what the plan's steps exchange"


def test_nothing_is_observed_where_that_is_not_wanted(tmp_path: Path) -> None:
    measured, events = _measured(tmp_path, DDP, 1, before=12345, observe=False)[0]
    assert measured.per_rank == measured.links == ()
    assert measured.communication_s is None
    assert measured.slowest is None
    line = [event for event in events if event["event"] == "steps"][-1]
    assert line["slowest_rank"] is line["waiting_share"] is None
    json.dumps(events, allow_nan=False)


def test_waiting_for_messages_is_told_from_their_transfer_by_comparing_ranks() -> None:
    """Rank 1 comes last: it waits for nobody, so what it waits is the transfer. Process 2 is idle."""
    times = RankTimes((0, 1))
    for _ in range(3):
        times.step([StepTimes(0.1, 10.0, 7.0, 0.0, 7.0), StepTimes(0.2, 10.0, 1.0, 0.0, 1.0), StepTimes(0.0, 0.5)])
    first, second, idle = times.timings()
    assert (first.own_s, first.waiting_s, first.data_wait_s) == (3.0, 6.0, 0.1)
    assert (second.own_s, second.waiting_s) == (9.0, 0.0)
    assert (idle.own_s, idle.waiting_s, idle.stolen_share) == (0.0, 0.0, None)
    assert times.communication_s() == 1.0


def test_transfers_of_all_ranks_and_intervals_come_together() -> None:
    kind, other = Kind("all_gather", 0, 2, 1 << 20), Kind("send_recv", 1, 2, 8)
    times = RankTimes((0, 1))
    times.interval([packed([(kind, 0.5, 4)]), packed([(kind, 0.2, 4), (other, 0.1, 1)])], [0.5, -1.0])
    times.interval([packed([(kind, 0.9, 9)]), packed([(kind, 0.8, 9)])], [0.25, -1.0])
    times.step([StepTimes(0.0, 1.0)] * 2)
    found = {t.op: (t.level, t.num_bytes, t.seconds, t.n) for t in times.transfers()}
    assert found == {"all_gather": (0, float(1 << 20), 0.8, 13), "send_recv": (1, 8.0, 0.1, 1)}
    assert [t.stolen_share for t in times.timings()] == [0.375, None]


def test_levels_are_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [level_of(ranks) for ranks in ([0, 3], [4, 5, 7], [3, 4], [0, 4])] == [0, 0, 1, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert level_of([0, 1]) == 0
