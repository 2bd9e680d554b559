"""The adaptive loop against an executor that only pretends: what it decides, in what order, and what it takes back."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import training
from promising import Promising

from asa.errors import InfeasibleError, PreemptedError, UnavailableError, WorkersFailedError
from asa.interfaces.executor import EpochOutcome, Executor, Look, Placement
from asa.ir.codec import fingerprint
from asa.ir.measurements import EpochRecord, Measurements, RankTiming
from asa.ir.plan import Plan
from asa.ir.profile import Stat
from asa.scheduler import Model, Policy, adapt, describe
from asa.scheduler.costs import Slowness
from asa.scheduler.decide import Change, Decider, _Option
from asa.scheduler.model import Answer

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
    microbatches = 1 if strategy == "asa" else 2  # another layout, not only another name
    return dataclasses.replace(
        base, strategy=strategy, prediction=prediction, certificate=certificate, num_microbatches=microbatches
    )


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
        self._step, self._able = 0, False

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

    def tell(self, value: bool) -> bool:
        self._able = value if self._leader is None else self._leader._able
        return self._able

    def agree(self, target: Placement | None) -> Placement | None:
        decided = target
        if self._leader is not None:
            assert target is None or target in self._leader.told, "only the leader searches"
            decided = self._leader.told[len(self.told)]
        self.told.append(decided)
        return decided


def _run(
    executor: Executor, epochs: int, model: Model | None, policy: Policy | None = None
) -> tuple[list[EpochRecord], list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    made = adapt(executor, range(epochs), events.append, model=model, policy=policy)
    records = list(made)
    assert [e["epoch"] for e in events if e["event"] == "epoch"] == list(range(epochs))
    return records, [e for e in events if e["event"] not in ("epoch", "finding")]


def test_a_plan_that_keeps_its_promise_is_kept_and_every_epoch_saved() -> None:
    executor = Pretender(_plan(1.0), {"asa": 1.04})
    model = Promising(_plan(0.1, strategy="ddp"))
    records, events = _run(executor, 3, model)
    assert executor.calls == [(what, e) for e in range(3) for what in ("run", "save")]
    assert [r.verdict.action for r in records] == ["keep"] * 3
    assert records[0].verdict.reason == "predicted 1.00 s a step, measured 1.04 s (-3.8 %)"
    assert records[1].verdict.reason == "predicted 1.04 s a step, measured 1.04 s (+0.0 %)", "it has learnt"
    assert (events, model.asked) == ([], [])
    assert records[-1].step == 3 * STEPS


def test_a_broken_promise_leads_to_another_plan_and_the_gain_is_measured() -> None:
    old, new = _plan(1.0), _plan(0.6, strategy="ddp")
    executor = Pretender(old, {"asa": 2.0, "ddp": 1.25})
    records, events = _run(executor, 3, Promising(new))
    assert executor.calls == [
        ("run", 0), ("save", 0), ("migrate", "ddp"), ("run", 1), ("save", 1), ("run", 2), ("save", 2),
    ]  # fmt: skip
    assert [r.verdict.action for r in records] == ["replan", "keep", "keep"]
    switch, outcome = events[:2]
    assert (switch["kind"], switch["old"], switch["new"]) == ("switch", fingerprint(old), fingerprint(new))
    assert switch["predicted_gain"] == pytest.approx(0.4)
    assert "a step takes 2 times as long as predicted" in switch["why"]
    assert (outcome["kind"], outcome["epoch"]) == ("outcome", 1)
    assert outcome["measured_gain"] == pytest.approx(1 - 1.25 / 2)


def test_a_change_that_makes_it_worse_is_rolled_back_and_rests_ever_longer() -> None:
    old, new = _plan(1.0), _plan(0.1, strategy="ddp")

    class Restless(Pretender):
        """Every epoch takes half as long again as the one before: there is always something to find."""

        def run_epoch(self, epoch: int, look: Look | None = None) -> EpochOutcome:
            self._truth = {"asa": 2.0 * 1.5**epoch, "ddp": 2.5 * 1.5**epoch}
            return super().run_epoch(epoch, look)

    executor = Restless(old, {})
    _, events = _run(executor, 20, Promising(new), Policy(cool_down=STEPS))
    moves = [(e["epoch"], e["kind"]) for e in events if e["kind"] in ("switch", "rollback")]
    assert [kind for _, kind in moves[:4]] == ["switch", "rollback"] * 2, "each is taken back in the next epoch"
    tried, back = ([epoch for epoch, kind in moves if kind == wanted] for wanted in ("switch", "rollback"))
    rests = [after - before for before, after in zip(back, tried[1:], strict=False)]
    assert all(b == t + 1 for t, b in zip(tried, back, strict=False))
    assert rests[0] >= 2
    assert rests == sorted(rests)
    assert rests[-1] > rests[0]
    assert "3.75 s a step after the change, 2.00 s before" in next(e["why"] for e in events if e["kind"] == "rollback")
    assert executor.plan == old


def test_the_last_epoch_changes_nothing() -> None:
    executor = Pretender(_plan(1.0), {"asa": 2.0})
    records, events = _run(executor, 1, Promising(_plan(0.5, strategy="ddp")))
    assert executor.calls == [("run", 0), ("save", 0)]
    assert (records[0].verdict.action, events) == ("keep", [])


@pytest.mark.parametrize(
    ("answer", "move_s", "words"),
    [
        (_plan(1.0), 0.0, "stays the best"),
        (dataclasses.replace(_plan(1.0), notes=("solved again",)), 0.0, "stays the best"),
        (_plan(0.98, strategy="ddp"), 0.0, "stays the best"),
        (_plan(0.5, strategy="ddp"), 999.0, "20.0 s to gain for a change of 16.7 min"),
        (InfeasibleError("nothing fits any more"), 0.0, "no other plan: nothing fits any more"),
        (ValueError("a fault"), 0.0, "no other plan: the search broke with ValueError: a fault"),
    ],
)
def test_a_change_must_pay(answer: Plan | Exception, move_s: float, words: str) -> None:
    executor = Pretender(_plan(1.0), {"asa": 2.0, "ddp": 1.0})
    records, events = _run(executor, 2, Promising(answer, move_s=move_s))
    assert words in records[0].verdict.reason
    assert words in events[0]["why"]
    assert [r.verdict.action for r in records] == ["keep", "keep"]
    assert ("migrate", "ddp") not in executor.calls


def test_a_change_waits_until_what_was_lost_would_have_paid_for_it() -> None:
    executor = Pretender(_plan(1.0), {"asa": 2.0, "ddp": 1.0})
    _, events = _run(executor, 9, Promising(_plan(0.5, strategy="ddp"), move_s=49.0))
    # 20 s are lost in an epoch, 10 s before another plan was looked for, and a change costs 50.
    assert [(e["kind"], e["epoch"]) for e in events] == [("wait", 0), ("switch", 1), ("outcome", 2)]
    assert "a change costs 50.0 s, 30.0 s were lost so far" in events[0]["why"]


def test_a_migration_that_fails_leaves_the_plan_in_force() -> None:
    stuck = Pretender(_plan(1.0), {"asa": 2.0}, stuck=True)
    records, events = _run(stuck, 3, Promising(_plan(0.5, strategy="ddp")))
    assert events[0] == {"event": "note", "message": "could not change the plan: rank 1 has no memory left"}
    assert [r.verdict.action for r in records] == ["keep"] * 3
    assert [c for c in stuck.calls if c[0] == "save"] == [("save", e) for e in range(3)]
    assert len(events) == 1


def test_other_ranks_follow_the_leader_without_searching() -> None:
    truth = {"asa": 2.0, "ddp": 2.5}
    leader = Pretender(_plan(1.0), truth)
    _run(leader, 8, Promising(_plan(0.2, strategy="ddp")))
    model = Promising(_plan(0.2, strategy="ddp"))
    follower = Pretender(_plan(1.0), truth, leader=leader)
    _run(follower, 8, model)
    without = Pretender(_plan(1.0), truth, leader=leader)
    _run(without, 8, None)
    assert model.asked == []
    assert follower.calls == leader.calls == without.calls
    assert ("migrate", "ddp") in follower.calls


def test_ranks_do_not_vote_where_the_leader_has_no_model() -> None:
    leader = Pretender(_plan(1.0), {"asa": 2.0})
    _run(leader, 3, None)
    follower = Pretender(_plan(1.0), {"asa": 2.0}, leader=leader)
    _run(follower, 3, Promising(_plan(0.2, strategy="ddp")))
    assert leader.told == follower.told == [], "a vote of one rank alone would meet another collective"


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


def test_more_memory_than_promised_is_said_once_and_solved_for() -> None:
    class Fat(Pretender):
        def run_epoch(self, epoch: int, look: Look | None = None) -> EpochOutcome:
            found = super().run_epoch(epoch)
            return dataclasses.replace(found, measurements=_measured(self.plan, 1.0, memory=(900, 1100)))

    model, events = Promising(_plan(1.0)), []
    list(adapt(Fat(_plan(1.0), {"asa": 1.0}), range(4), events.append, model=model))
    found = [e["line"] for e in events if e["event"] == "finding"]
    assert found == ["rank 1 needs 1.07 KiB where 1000 B were promised"]
    assert len(model.asked) == 1


def test_memory_is_compared_also_where_windows_were_looked_at() -> None:
    class Watched(Pretender):
        def run_epoch(self, epoch: int, look: Look | None = None) -> EpochOutcome:
            outcome = super().run_epoch(epoch)
            look(_measured(self.plan, 1.0), self._step)
            return dataclasses.replace(outcome, measurements=_measured(self.plan, 1.0, memory=(900, 1100)))

    class Remembering(Promising):
        def best(self, placement: Placement, measured: Measurements, slowness: Any) -> list[Placement]:
            peaks.append(measured.peak_memory_bytes)
            return super().best(placement, measured, slowness)

    peaks, events = [], []
    list(adapt(Watched(_plan(1.0), {"asa": 1.0}), range(4), events.append, model=Remembering(_plan(1.0))))
    found = [e["line"] for e in events if e["event"] == "finding"]
    assert found == ["rank 1 needs 1.07 KiB where 1000 B were promised"]
    assert peaks == [(900, 1100)]


@pytest.mark.parametrize(("left", "back"), [(3, False), (40, True)])
def test_a_change_is_taken_back_only_if_the_steps_left_make_up_for_it(left: int, back: bool) -> None:
    class Ending(Pretender):
        """Knows how many steps are left: many until the change, ``left`` once it was made."""

        steps_per_epoch = 0

        def steps_left(self, epoch: int) -> int:
            return 1000 if self.plan.strategy == "asa" else left

    executor = Ending(_plan(1.0), {"asa": 2.0, "ddp": 2.5})
    _, events = _run(executor, 3, Promising(_plan(0.1, strategy="ddp"), move_s=8.0))
    kinds = [e["kind"] for e in events if e["kind"] in ("switch", "rollback")]
    assert kinds[:2] == (["switch", "rollback"] if back else ["switch"]), events


def test_steps_left_are_counted_from_where_the_run_stands() -> None:
    class Resumed(Pretender):
        """Goes on after 5,000 steps of longer epochs."""

        steps_per_epoch = STEPS

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._step = 5000

        def run_epoch(self, epoch: int, look: Look | None = None) -> EpochOutcome:
            outcome = super().run_epoch(epoch)
            look(outcome.measurements, self._step)
            return outcome

        def steps_left(self, epoch: int) -> int:
            return 1

    executor = Resumed(_plan(1.0), {"asa": 2.0, "ddp": 1.0})
    events: list[dict[str, Any]] = []
    list(adapt(executor, range(5, 9), events.append, model=Promising(_plan(0.5, strategy="ddp"))))
    assert ("migrate", "ddp") in executor.calls


def test_a_change_that_helps_ends_the_pause_after_one_that_did_not() -> None:
    decider = Decider(Promising(_plan(1.0)), 2, Policy(cool_down=100))
    placements = [Placement(plan=p, processes=(0, 1)) for p in (_plan(1.0), _plan(0.5, strategy="ddp"))]

    def change(kind: str) -> Change:
        return Change(
            target=placements[1], before=placements[0], kind=kind, why="", rung="layout", step_s=2.0, promised_s=1.0,
            cost_s=0.0,
        )  # fmt: skip

    for _ in range(9):
        decider.moved(change("rollback"), 1.0)
    assert decider._quiet <= 1600, "pauses do not grow for ever"
    decider.moved(change("switch"), 1.0)
    events = []
    for _ in range(3):
        decider.window(placements[1], _measured(placements[1].plan, 1.0), steps=STEPS, left=None)
        events += decider.events
    assert [e["measured_gain"] for e in events if e["kind"] == "outcome"] == [0.5]
    assert decider._quiet == 0


def test_a_search_that_fails_does_not_keep_the_run_from_a_plan_that_ran_before() -> None:
    class Failing:
        """A search in the background that finds nothing, at once."""

        def __init__(self, question: Any) -> None:
            asked.append(question)

        def result(self) -> None:
            raise UnavailableError("the search broke (exit status -9)")

    asked: list[Any] = []
    first, second = (Placement(plan=p, processes=(0, 1)) for p in (_plan(1.0), _plan(2.0, strategy="ddp")))
    model = Promising(_plan(1.0))
    decider = Decider(model, 2, Policy())
    model.__dict__["background"] = Failing
    decider._experience.add(first)
    decider._experience.add(second)
    change = None
    for _ in range(12):  # it runs twice as slow as promised under the second plan
        change = change or decider.window(second, _measured(second.plan, 4.0), steps=STEPS, left=None)
    assert len(asked) == 1
    assert change is not None
    assert change.target == first


@pytest.mark.parametrize(("batch", "slow", "found"), [(8, None, []), (8, 3, [3]), (5, None, []), (5, 3, [])])
def test_ranks_are_compared_only_where_their_shares_are_about_equal(
    batch: int, slow: int | None, found: list[int]
) -> None:
    """Of five samples one of four ranks has two."""
    plan = training.plan(ranks=4, batch=batch)
    (layout,) = set(plan.layouts())
    own = [0.1 * (stop - start) for start, stop in (layout.rows_of(batch, r) for r in range(4))]
    own = [s * (2.0 if r == slow else 1.0) for r, s in enumerate(own)]

    class Shared(Pretender):
        def run_epoch(self, epoch: int, look: Look | None = None) -> EpochOutcome:
            outcome = super().run_epoch(epoch)
            ranks = tuple(RankTiming(own_s=s, waiting_s=max(own) - s, data_wait_s=0.0) for s in own)
            measured = dataclasses.replace(outcome.measurements, per_rank=ranks)
            return dataclasses.replace(outcome, measurements=measured)

    events: list[dict[str, Any]] = []
    executor = Shared(plan, {plan.strategy: max(own)})
    list(adapt(executor, range(4), events.append, policy=Policy(keep_plan=True)))
    assert [e["where"] for e in events if e["event"] == "finding"] == found


def test_a_change_is_judged_by_draws_of_the_factors_that_they_were_made_for() -> None:
    """Much was to be gained when another plan was looked for, nothing since."""
    model, (first, second) = Promising(_plan(1.0)), (_plan(1.0), _plan(0.5, strategy="ddp"))
    current, other = (Placement(plan=p, processes=(0, 1)) for p in (first, second))
    before, now = (Slowness(common=0.0, ranks=(0.0, log), levels=(0.0,)) for log in (1.0, 0.0))
    model.__dict__["step_s"] = lambda p, slowness: 1.0 if p is current else 0.5 if slowness == before else 1.2
    decider, option = Decider(model, 2, Policy()), _Option(target=other, ratio=1.2, cost_s=0.0)
    decider._answer = Answer(found=[other], placements=[current, other], draws=[(1.0, 0.5)] * 20), before
    saved_s, lost_s = decider._stakes(current, option, now, 1.0, 100)
    assert saved_s == 0
    assert lost_s > 0


def test_the_line_of_an_epoch() -> None:
    line = describe(_measured(_plan(0.742), 0.751))
    assert line == "predicted 742 ms a step, measured 751 ms (-1.2 %)"
    assert describe(_measured(_plan(0.0001), 0.00005)) == "predicted 100 us a step, measured 50.0 us (+100.0 %)"
    assert describe(_measured(_plan(1.0), 2.0), 1.9) == "predicted 1.90 s a step, measured 2.00 s (-5.0 %)"


def test_a_machine_that_alternates_is_not_followed_where_that_loses_time() -> None:
    shares = {"asa": (0.5, 0.5), "ddp": (0.8, 0.2)}
    places = {k: Placement(plan=_plan(max(s), strategy=k), processes=(0, 1)) for k, s in shares.items()}

    def step_s(placement: Placement, slowness: Slowness) -> float:
        own = shares[placement.plan.strategy]
        return max(s * math.exp(log) for s, log in zip(own, slowness.ranks, strict=True))

    def expected(plan: Plan, _processes: Any) -> Any:
        own_s = shares[plan.strategy]
        return SimpleNamespace(step_s=max(own_s), own_s=own_s, message=lambda _: None, levels=frozenset())

    def best(_placement: Placement, _measured: Measurements, slowness: Slowness) -> list[Placement]:
        return [min(places.values(), key=lambda p: step_s(p, slowness))]

    model = Promising(places["asa"].plan)
    model.__dict__.update(step_s=step_s, expected=expected, best=best)
    decider, current, changes = Decider(model, 2, Policy(rebuild_s=1.0)), places["asa"], 0
    for window in range(80):
        slow = window >= 6 and window % 4 < 2  # rank 1 is 4 times as slow in 20 of 40 steps
        own = [share * (4.0 if slow and rank else 1.0) for rank, share in enumerate(shares[current.plan.strategy])]
        ranks = tuple(RankTiming(own_s=s, waiting_s=0.0, data_wait_s=0.0) for s in own)
        measured = dataclasses.replace(_measured(current.plan, max(own), n=10), per_rank=ranks)
        change = decider.window(current, measured, steps=10, left=10 * (80 - window))
        if change is not None:
            current, changes = change.target, changes + 1
            decider.moved(change, 1.0, 0.0)
    assert current == places["ddp"]  # 0.8 s in all steps, and not 0.5 s in half of them and 2 s in the other half
    assert changes <= 5
