"""The adaptive loop against an executor that only pretends: what it decides, in what order, and what it takes back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import training

from asa.errors import InfeasibleError, PreemptedError, WorkersFailedError
from asa.interfaces.executor import EpochOutcome, Executor, Look, Placement
from asa.ir.codec import fingerprint
from asa.ir.measurements import EpochRecord, Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Stat
from asa.scheduler import Calibration, Policy, Replan, adapt, describe, judge
from asa.scheduler.judge import worthwhile

STEPS = 20


def _plan(step_s: float, *, strategy: str = "asa", bound: float | None = None, ranks: int = 2) -> Plan:
    base = training.plan(ranks=ranks)
    prediction = dataclasses.replace(
        base.prediction,
        step_time_s=step_s,
        step_time_low_s=0.95 * step_s,
        step_time_high_s=1.05 * step_s,
        memory_bytes_per_rank=(1000,) * ranks,
    )
    certificate = dataclasses.replace(base.certificate, lower_bound_s=step_s if bound is None else bound)
    return dataclasses.replace(base, strategy=strategy, prediction=prediction, certificate=certificate)


def _measured(plan: Plan, step_s: float, *, n: int = STEPS, memory: tuple[int, ...] | None = None) -> Measurements:
    return Measurements(
        plan_fingerprint=fingerprint(plan),
        strategy=plan.strategy,
        num_ranks=plan.num_ranks,
        global_batch=plan.global_batch,
        step_time=Stat(median=step_s, p10=0.99 * step_s, p90=1.01 * step_s, n=n),
        predicted_step_time_s=plan.prediction.step_time_s,
        communication_s=None,
        data_wait_s=0.0,
        peak_memory_bytes=memory,
        predicted_memory_bytes=plan.prediction.memory_bytes_per_rank,
    )


class Pretender(Executor):
    """Takes the seconds per step that ``truth`` says for the strategy in force. ``calls`` is what was asked of it."""

    def __init__(self, plan: Plan, truth: dict[str, float], *, stuck: bool = False, leader: Pretender | None = None):
        self._plan, self._truth, self._stuck, self._leader = plan, truth, stuck, leader
        self.calls: list[tuple[str, Any]] = []
        self.told: list[Placement | None] = []
        self._step = 0

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def leads(self) -> bool:
        return self._leader is None

    def run_epoch(self, epoch: int, look: Look | None = None) -> EpochOutcome:
        self.calls.append(("run", epoch))
        self._step += STEPS
        step_s = self._truth[self._plan.strategy]
        return EpochOutcome(
            step=self._step,
            seconds=STEPS * step_s,
            train_loss=1.0,
            validation_loss=1.0,
            validation_accuracy=0.5,
            learning_rate=0.1,
            measurements=_measured(self._plan, step_s),
        )

    def save(self, epoch: int) -> None:
        self.calls.append(("save", epoch))

    def migrate(self, plan: Plan, processes: tuple[int, ...] | None = None) -> None:
        if self._stuck:
            raise WorkersFailedError("rank 1 has no memory left", rank=1)
        self.calls.append(("migrate", plan.strategy))
        self._plan = plan

    def agree(self, target: Placement | None) -> Placement | None:
        decided = target
        if self._leader is not None:
            assert target is None or target in self._leader.told, "only the leader searches"
            decided = self._leader.told[len(self.told)]
        self.told.append(decided)
        return decided


def _run(
    executor: Executor, epochs: int, replan: Replan | None, policy: Policy | None = None
) -> tuple[list[EpochRecord], list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    records = list(adapt(executor, range(epochs), events.append, replan=replan, policy=policy))
    assert [e["epoch"] for e in events if e["event"] == "epoch"] == list(range(epochs))
    return records, [e for e in events if e["event"] != "epoch"]


def _always(plan: Plan) -> Callable[[Plan, Measurements, float], Plan]:
    return lambda old, measured, factor: plan


def test_a_plan_that_keeps_its_promise_is_kept_and_every_epoch_saved() -> None:
    executor = Pretender(_plan(1.0), {"asa": 1.04})
    records, events = _run(executor, 3, _always(_plan(0.1, strategy="ddp")))
    assert executor.calls == [(what, e) for e in range(3) for what in ("run", "save")]
    assert [r.verdict.action for r in records] == ["keep"] * 3
    assert records[0].verdict.reason == "predicted 1 s/step, measured 1.04 s (-3.8 %)"
    assert events == []
    assert records[-1].step == 3 * STEPS


def test_a_broken_promise_leads_to_another_plan_and_the_gain_is_measured() -> None:
    old, new = _plan(1.0, bound=0.9), _plan(1.2, strategy="ddp")
    executor = Pretender(old, {"asa": 2.0, "ddp": 1.25})
    records, events = _run(executor, 3, _always(new), Policy(migration_s=1.0))
    assert executor.calls == [
        ("run", 0), ("save", 0), ("migrate", "ddp"), ("run", 1), ("save", 1), ("run", 2), ("save", 2),
    ]  # fmt: skip
    assert [r.verdict.action for r in records] == ["replan", "keep", "keep"]
    switch, outcome = events
    assert (switch["kind"], switch["old"], switch["new"]) == ("switch", fingerprint(old), fingerprint(new))
    assert switch["predicted_gain"] == pytest.approx(0.4)
    assert (outcome["kind"], outcome["epoch"]) == ("outcome", 1)
    assert outcome["measured_gain"] == pytest.approx(1 - 1.25 / 2)


def test_a_change_that_makes_it_worse_is_rolled_back_and_rests_ever_longer() -> None:
    old, new = _plan(1.0), _plan(1.2, strategy="ddp")
    executor = Pretender(old, {"asa": 2.0, "ddp": 2.5})
    records, events = _run(executor, 10, _always(new), Policy(migration_s=1.0))
    moves = [(e["epoch"], e["kind"]) for e in events if e["kind"] != "outcome"]
    # Tried after 0, back after 1, quiet for 1 epoch, tried after 3, back after 4, quiet for 2, tried after 7 ...
    assert moves == [(0, "switch"), (1, "rollback"), (3, "switch"), (4, "rollback"), (7, "switch"), (8, "rollback")]
    assert "rolled back: 2.5 s/step after the change, 2 s before" in records[1].verdict.reason
    assert executor.plan == old


def test_the_last_epoch_changes_nothing() -> None:
    executor = Pretender(_plan(1.0), {"asa": 2.0})
    records, _ = _run(executor, 1, _always(_plan(1.0, strategy="ddp")))
    assert executor.calls == [("run", 0), ("save", 0)]
    assert "no steps are left" in records[0].verdict.reason


@pytest.mark.parametrize(
    ("replan", "words"),
    [
        (None, "re-planning is off"),
        (lambda *_: None, "stays the best"),
        (lambda old, *_: old, "stays the best"),
        (_always(_plan(1.97, strategy="ddp")), "would take 1.97 s/step against 2 s"),
        (_always(_plan(1.0, strategy="ddp", ranks=4)), "uses 4 ranks, this run has 2"),
        (_always(_plan(1.5, strategy="ddp")), "10 s to gain for a change of 1000 s"),
    ],
)
def test_a_change_must_pay(replan: Replan | None, words: str) -> None:
    executor = Pretender(_plan(1.0, bound=0.5), {"asa": 2.0, "ddp": 1.0})
    records, _ = _run(executor, 2, replan, Policy(migration_s=1000.0))
    assert words in records[0].verdict.reason
    assert records[0].verdict.action == "keep"
    assert ("migrate", "ddp") not in executor.calls


def test_a_search_or_a_migration_that_fails_leaves_the_plan_in_force() -> None:
    def infeasible(*_: object) -> Plan:
        raise InfeasibleError("nothing fits any more")

    records, _ = _run(Pretender(_plan(1.0), {"asa": 2.0}), 2, infeasible)
    assert "no other plan: nothing fits any more" in records[0].verdict.reason
    stuck = Pretender(_plan(1.0), {"asa": 2.0}, stuck=True)
    records, events = _run(stuck, 3, _always(_plan(1.0, strategy="ddp")), Policy(migration_s=0.0))
    assert "could not change the plan: rank 1 has no memory left" in records[0].verdict.reason
    assert [c for c in stuck.calls if c[0] == "save"] == [("save", e) for e in range(3)]
    assert {e["event"] for e in events} == {"note"}


def test_other_ranks_follow_the_leader_without_searching() -> None:
    truth = {"asa": 2.0, "ddp": 2.5}
    policy = Policy(migration_s=0.0)
    leader = Pretender(_plan(1.0), truth)
    _run(leader, 8, _always(_plan(1.2, strategy="ddp")), policy)

    def never(*_: object) -> Plan:
        raise AssertionError("a follower searched")

    follower = Pretender(_plan(1.0), truth, leader=leader)
    _run(follower, 8, never, policy)
    assert follower.calls == leader.calls
    assert ("migrate", "ddp") in follower.calls


def test_pre_emption_passes_through() -> None:
    class Stopped(Pretender):
        def run_epoch(self, epoch: int, look: Look | None = None) -> EpochOutcome:
            if epoch == 1:
                raise PreemptedError("saved")
            return super().run_epoch(epoch)

    executor = Stopped(_plan(1.0), {"asa": 1.0})
    with pytest.raises(PreemptedError):
        _run(executor, 3, None)
    assert executor.calls == [("run", 0), ("save", 0)]


def test_the_verdict_weighs_error_noise_and_what_is_left_to_gain() -> None:
    policy = Policy()
    assert judge(_measured(_plan(1.0), 1.09), _plan(1.0), policy).action == "keep"
    slow = judge(_measured(_plan(1.0, bound=0.8), 1.3), _plan(1.0, bound=0.8), policy)
    assert slow.action == "replan"
    assert slow.best_possible_gain == pytest.approx(1 - 0.8 / 1.3)
    few = judge(_measured(_plan(1.0), 1.3, n=3), _plan(1.0), policy)
    assert (few.action, "too few steps to tell (3 of 5)" in few.reason) == ("keep", True)
    # Faster than promised, and already at the bound: nothing to be had.
    fast = judge(_measured(_plan(1.0, bound=0.99), 0.7), _plan(1.0, bound=0.99), policy)
    assert (fast.action, fast.best_possible_gain) == ("keep", 0.0)
    assert "at most 0.0 %" in fast.reason
    fat = judge(_measured(_plan(1.0), 1.0, memory=(900, 1100)), _plan(1.0), policy)
    assert fat.action == "replan"
    assert "rank 1 needs" in fat.reason
    wide = _measured(_plan(1.0), 1.3)
    wide = dataclasses.replace(wide, step_time=Stat(median=1.3, p10=0.9, p90=2.0, n=STEPS))
    assert judge(wide, _plan(1.0), policy).action == "keep", "the promise lies within the spread of the steps"


def test_the_line_of_an_epoch() -> None:
    line = describe(_measured(_plan(0.742), 0.751))
    assert line == "predicted 0.742 s/step, measured 0.751 s (-1.2 %)"
    assert describe(_measured(_plan(0.0001), 0.00005)) == "predicted 0.0001 s/step, measured 0.00005 s (+100.0 %)"


def test_calibration_remembers_but_newer_epochs_count_more() -> None:
    plan = _plan(1.0)
    once = Calibration().updated(_measured(plan, 2.0))
    assert once.factor == pytest.approx(2.0)
    twice = once.updated(_measured(plan, 8.0))
    assert twice.factor == pytest.approx(math.exp((0.5 * math.log(2) + math.log(8)) / 1.5))
    steady = once
    for _ in range(5):
        steady = steady.updated(_measured(plan, 2.0))
    assert steady.factor == pytest.approx(2.0)
    assert Calibration().updated(_measured(_plan(0.0), 2.0)) == Calibration()


def test_worth_grows_with_the_steps_left() -> None:
    measured, candidate = _measured(_plan(1.0), 2.0), _plan(1.0)
    assert worthwhile(candidate, measured, steps_left=5, cost_s=10.0, policy=Policy())
    assert worthwhile(candidate, measured, steps_left=11, cost_s=10.0, policy=Policy()) == ""
