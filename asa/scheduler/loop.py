"""Epoch by epoch: run, judge, agree, perhaps change the plan, save. A change that does not help is taken back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from asa.errors import AsaError, PreemptedError
from asa.interfaces.executor import EpochOutcome, Executor, Placement
from asa.ir import codec
from asa.ir.codec import fingerprint, noun
from asa.ir.measurements import EpochRecord, Measurements, Verdict
from asa.ir.plan import Plan
from asa.scheduler.judge import Policy, describe, judge, worthwhile

Announce = Callable[[dict[str, Any]], None]
Replan = Callable[[Plan, Measurements, float], Plan | None]
"""Solve again: the plan in force, what was measured under it, and by what factor steps were longer than predicted
(:class:`Calibration`). The plan returned must predict under costs so corrected; None where nothing better is known."""


@noun
class Calibration:
    """Measured over predicted step time, remembered over epochs and plans: newer epochs count for more."""

    factor: float = 1.0
    weight: float = 0.0

    def updated(self, measured: Measurements) -> Calibration:
        """With one more epoch; ratios are averaged as logarithms, older ones at half their weight.

        >>> # measured 2x, then 8x: exp((0.5 log 2 + log 8) / 1.5)
        """
        actual, predicted = measured.step_time.median, measured.predicted_step_time_s
        if actual <= 0 or predicted <= 0:
            return self
        old = self.weight / 2
        mean = (old * math.log(self.factor) + math.log(actual / predicted)) / (old + 1)
        return Calibration(factor=math.exp(mean), weight=old + 1)


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A change of plan that is on probation: where it came from, and what a step took there."""

    before: Plan
    step_s: float
    promised_s: float


@dataclass(frozen=True, kw_only=True)
class _Decision:
    """What rank 0 makes of an epoch: the verdict, and the plan to change to, if any."""

    verdict: Verdict
    target: Plan | None = None
    back: bool = False


class _Judgement:
    """The memory of the loop. Everything in it follows from figures all ranks share, but the search for a plan."""

    def __init__(self, policy: Policy, replan: Replan | None, announce: Announce) -> None:
        self.policy, self.replan, self.announce = policy, replan, announce
        self.calibration = Calibration()
        self.probation: _Change | None = None
        self.quiet = 0
        self.next_quiet = policy.cool_down
        self.cost_s = policy.migration_s

    def decide(self, executor: Executor, outcome: EpochOutcome, *, epoch: int, steps_left: int) -> _Decision:
        measured = outcome.measurements
        self.calibration = self.calibration.updated(measured)
        verdict = judge(measured, executor.plan, self.policy)
        if self.probation is not None:
            return self._review(self.probation, verdict, epoch, steps_left)
        if verdict.action == "keep":
            self.quiet = max(0, self.quiet - 1)
            return _Decision(verdict=verdict)
        if not steps_left:
            return _Decision(verdict=_with(verdict, "keep", "no steps are left"))
        return self._search(executor, measured, verdict, steps_left)

    def _review(self, change: _Change, verdict: Verdict, epoch: int, steps_left: int) -> _Decision:
        """The first epoch after a change: did it help?"""
        self.probation = None
        gain = 1 - verdict.measured_s / change.step_s
        self.announce(
            {
                "event": "replan",
                "kind": "outcome",
                "epoch": epoch,
                "predicted_gain": 1 - change.promised_s / change.step_s,
                "measured_gain": gain,
            }
        )
        if verdict.measured_s <= change.step_s:
            return _Decision(verdict=_with(verdict, "keep", f"the new plan saves {100 * gain:.1f} % of a step"))
        slower = f"{verdict.measured_s:.3g} s/step after the change, {change.step_s:.3g} s before"
        if not steps_left:
            return _Decision(verdict=_with(verdict, "keep", f"{slower}, and no steps are left"))
        why = f"rolled back: {slower}"
        return _Decision(verdict=_with(verdict, "replan", why), target=change.before, back=True)

    def _search(self, executor: Executor, measured: Measurements, verdict: Verdict, steps_left: int) -> _Decision:
        if self.replan is None:
            return _Decision(verdict=_with(verdict, "keep", "re-planning is off"))
        if self.quiet:
            self.quiet -= 1
            return _Decision(verdict=_with(verdict, "keep", "waiting after a change that did not help"))
        if not executor.leads:
            return _Decision(verdict=verdict)
        try:
            found = self.replan(executor.plan, measured, self.calibration.factor)
        except AsaError as error:
            return _Decision(verdict=_with(verdict, "keep", f"no other plan: {error}"))
        if found is None or fingerprint(found) == fingerprint(executor.plan):
            return _Decision(verdict=_with(verdict, "keep", "solved again: this plan stays the best"))
        why_not = worthwhile(found, measured, steps_left=steps_left, cost_s=self.cost_s, policy=self.policy)
        if why_not:
            return _Decision(verdict=_with(verdict, "keep", why_not))
        return _Decision(verdict=verdict, target=found)

    def change(self, executor: Executor, plan: Plan, decision: _Decision, *, epoch: int) -> Verdict:
        """Move to ``plan`` (on all ranks); the verdict says if that failed."""
        old, step_s = executor.plan, decision.verdict.measured_s
        began = time.monotonic()
        try:
            executor.migrate(plan)
        except PreemptedError:
            raise
        except AsaError as error:
            self._rest()
            return _with(decision.verdict, "keep", f"could not change the plan: {error}")
        self.cost_s = time.monotonic() - began
        if decision.back:
            self._rest()
        else:
            self.probation = _Change(before=old, step_s=step_s, promised_s=plan.prediction.step_time_s)
        self.announce(
            {
                "event": "replan",
                "kind": "rollback" if decision.back else "switch",
                "epoch": epoch,
                "old": fingerprint(old),
                "new": fingerprint(plan),
                "why": decision.verdict.reason,
                "predicted_gain": None if decision.back else 1 - plan.prediction.step_time_s / step_s,
                "seconds": self.cost_s,
            }
        )
        return decision.verdict

    def _rest(self) -> None:
        self.quiet, self.next_quiet = self.next_quiet, 2 * self.next_quiet


def _with(verdict: Verdict, action: str, why: str) -> Verdict:
    return Verdict(
        action="replan" if action == "replan" else "keep",
        reason=f"{verdict.reason}; {why}",
        measured_s=verdict.measured_s,
        predicted_s=verdict.predicted_s,
        best_possible_gain=verdict.best_possible_gain,
    )


def placed(plan: Plan) -> Placement:
    """The plan on the first processes, in order."""
    return Placement(plan=plan, processes=tuple(range(plan.num_ranks)))


def adapt(
    executor: Executor,
    epochs: range,
    announce: Announce,
    *,
    replan: Replan | None = None,
    policy: Policy | None = None,
) -> Iterator[EpochRecord]:
    """Train ``epochs`` and yield a record after each, its checkpoint committed. Every rank runs this loop.

    After an epoch outside its plan's promise, the rank that leads solves again (``replan``; None: never), all ranks
    move to its answer if that pays over the steps left, and the next epoch shows whether it did: a slower one is
    taken back, and nothing is tried for a while.
    """
    judgement = _Judgement(policy or Policy(), replan, announce)
    for epoch in epochs:
        outcome = executor.run_epoch(epoch)
        # Steps count from the start of the run, also after a resume.
        steps_left = outcome.step * (epochs.stop - epoch - 1) // (epoch + 1)
        decision = judgement.decide(executor, outcome, epoch=epoch, steps_left=steps_left)
        placement = executor.agree(None if decision.target is None else placed(decision.target))
        target = None if placement is None else placement.plan
        record = EpochRecord(
            epoch=epoch,
            step=outcome.step,
            seconds=outcome.seconds,
            train_loss=outcome.train_loss,
            validation_loss=outcome.validation_loss,
            validation_accuracy=outcome.validation_accuracy,
            learning_rate=outcome.learning_rate,
            measurements=outcome.measurements,
            verdict=decision.verdict,
        )
        # The record before the checkpoint that makes a run go on behind this epoch, the checkpoint before a change of
        # plan: whatever ends the run in between, nothing is lost.
        announce({"event": "epoch", **codec.to_data(record), "line": record.verdict.reason})
        executor.save(epoch)
        if target is not None:
            verdict = judgement.change(executor, target, decision, epoch=epoch)
            if verdict != record.verdict:
                announce({"event": "note", "message": verdict.reason})
                record = replace(record, verdict=verdict)
        yield record


__all__ = ["Announce", "Calibration", "Replan", "adapt", "describe"]
