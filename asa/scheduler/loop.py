"""The loop over epochs: train, observe, agree on a plan, change it if that saves time, save. A change without effect is
undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from asa.errors import AsaError, PreemptedError
from asa.interfaces.executor import Executor, Placement
from asa.ir import codec
from asa.ir.codec import fingerprint
from asa.ir.measurements import EpochRecord, Measurements, Verdict
from asa.scheduler.costs import Slowness
from asa.scheduler.decide import Change, Decider
from asa.scheduler.findings import Finding, finite
from asa.scheduler.model import Model
from asa.scheduler.policy import Policy, describe
from asa.scheduler.relative import Compared, shares

Announce = Callable[[dict[str, Any]], None]


class Loop:
    """The loop over epochs on one process; see :func:`adapt`. The leading process decides, the others follow. Several
    calls of :meth:`run` continue one run: what was learnt in one counts in the next."""

    def __init__(self, executor: Executor, announce: Announce, model: Model | None, policy: Policy) -> None:
        if executor.rebuild_s is not None:  # what was timed here is better than what is taken for granted
            policy = replace(policy, rebuild_s=executor.rebuild_s)
        self.executor, self.announce, self.policy = executor, announce, policy
        self.decider = Decider(model, executor.num_processes, policy) if model and executor.leads else None
        able = model is not None and not policy.keep_plan
        # Other processes may lack the model's files. Under a discipline one may enter later, when nobody else votes.
        self.may_change = executor.tell(able) if executor.plan.consistency is None else able
        of_ranks = shares(executor.plan) if policy.keep_plan and executor.leads else None
        self.compared = None if of_ranks is None else Compared(len(of_ranks), of_ranks)
        self.epoch = self.epochs_left = self.looks = self.step = 0
        self.total: int | None = None
        self.steps_done: int | None = None
        """Steps since the start of the run at the end of the last epoch."""
        self.levels: set[int] = set()
        """Levels of links of which transfers were timed under some plan."""
        self.trained_s = self.probe_s = 0.0
        """Seconds of training since the last probe, and of that probe."""
        self.moved = self.looked = False
        self.changed = False
        self.change: Change | None = None

    def begin(self, epoch: int, epochs: range) -> None:
        """Begin an epoch of ``epochs``."""
        self.epoch, self.looked, self.changed = epoch, False, False
        self.epochs_left = epochs.stop - epoch - 1
        if self.executor.steps_per_epoch is not None:
            self.total = self.executor.steps_per_epoch * epochs.stop
        elif self.steps_done is not None:
            self.total = self.steps_done * epochs.stop // max(1, epoch)
        if self.decider is not None:
            self.decider.reason = ""

    def look(self, measured: Measurements, step: int) -> None:
        """Between two steps, on every process: judge the measurements, and change the plan if that is agreed."""
        self.looked = True
        agreed = self.judge(measured, step)
        if agreed is not None:
            self.move(agreed)

    def judge(self, measured: Measurements, step: int) -> Placement | None:
        """The placement that all processes change to, if any (collective)."""
        steps, self.step = step - self.step, step
        self.looks += 1
        executor = self.executor
        if self.decider is None and self.compared is not None:
            self._report(self.compared.window(measured, steps))
        if self.decider is None and not self.may_change:
            return None
        current = Placement(plan=executor.plan, processes=executor.processes)
        idle = len(current.processes) < executor.num_processes
        timed = {t.level for t in measured.links}
        untimed = not timed or not self.levels <= timed  # no transfer says how fast some links are now
        self.levels |= timed
        self.trained_s += steps * measured.step_time.median
        probe = executor.probe(compute=idle) if self.moved and (idle or untimed) and self._due() else None
        if probe is not None:
            self.trained_s, self.probe_s = 0.0, probe.took_s
        self.change = None
        if self.decider is not None:
            self.change = self.decider.window(current, measured, steps=steps, left=self._left(step), probe=probe)
            self._report(self.decider.found)
            for event in self.decider.events:
                self.announce({**event, "epoch": self.epoch, "step": step})
        return executor.agree(None if self.change is None else self.change.target) if self.may_change else None

    def _left(self, step: int) -> int | None:
        """Steps that are left after ``step``; None if that is not known."""
        here, each = self.executor.steps_left(self.epoch), self.executor.steps_per_epoch
        if here is not None and each is not None:
            return here + each * self.epochs_left
        return None if self.total is None else max(0, self.total - step)

    def memory(self, measured: Measurements) -> None:
        """Report what the steps of an epoch needed more memory than promised."""
        if self.decider is not None:
            current = Placement(plan=self.executor.plan, processes=self.executor.processes)
            self._report(self.decider.memory(current, measured))

    def _report(self, findings: list[Finding]) -> None:
        """Announce ``findings``."""
        for finding in findings:
            self.announce({"event": "finding", "epoch": self.epoch, "step": self.step, **codec.to_data(finding)})

    def _due(self) -> bool:
        """Whether a probe is due; the same on all processes."""
        if self.trained_s < self.probe_s / self.policy.most_probing:
            return False
        return not self.looked or self.looks % self.policy.probe_every == 0

    def move(self, target: Placement) -> bool:
        """Change to ``target`` (collective); returns whether it succeeded."""
        old, change = self.executor.plan, self.change
        began = self.executor.clock()
        try:
            self.executor.migrate(target.plan, target.processes)
        except PreemptedError:
            raise
        except AsaError as error:
            if self.decider is not None:
                self.decider.failed()
                self.announce({"event": "note", "message": f"could not change the plan: {error}"})
            return False
        took_s, self.changed, self.moved = self.executor.clock() - began, True, True
        self.looks = 0
        if self.decider is None or change is None:
            return True
        self.decider.moved(change, took_s, self.executor.state_s)
        self.announce(
            {
                "event": "replan",
                "kind": change.kind,
                "epoch": self.epoch,
                "step": self.step,
                "old": fingerprint(old),
                "new": fingerprint(target.plan),
                "outline": target.plan.outline,
                "why": change.why,
                "rung": change.rung,
                "processes": list(target.processes),
                "predicted_gain": change.gain if change.kind == "switch" else None,
                "predicted_seconds": change.cost_s,
                "seconds": took_s,
                "batch_norm": change.batch_norm or None,
            }
        )
        return True

    def verdict(self, measured: Measurements) -> Verdict:
        """Verdict of an epoch: prediction and measurement at its end, and the decisions in it."""
        decider = self.decider
        predicted = measured.predicted_step_time_s
        if decider is not None and decider.predicted_s is not None:
            predicted = decider.predicted_s
        why = "" if decider is None else decider.reason
        return Verdict(
            action="replan" if self.changed else "keep",
            reason=describe(measured, predicted) + (f"; {why}" if why else ""),
            measured_s=measured.step_time.median,
            predicted_s=predicted,
            best_possible_gain=0.0 if decider is None else decider.bound,
        )

    def run(self, epochs: range, keep: Callable[[Slowness], None] | None = None) -> Iterator[EpochRecord]:
        """Train ``epochs``; see :func:`adapt`."""
        executor = self.executor
        try:
            for epoch in epochs:
                self.begin(epoch, epochs)
                outcome = executor.run_epoch(epoch, self.look)
                # Steps count from the start of the run, also after a resume.
                self.steps_done, self.total = outcome.step, outcome.step * epochs.stop // (epoch + 1)
                if self.looked:
                    self.memory(outcome.measurements)
                agreed = None if self.looked else self.judge(outcome.measurements, outcome.step)
                self.changed = self.changed or agreed is not None
                record = EpochRecord(
                    epoch=epoch,
                    step=outcome.step,
                    seconds=outcome.seconds,
                    train_loss=outcome.train_loss,
                    validation_loss=outcome.validation_loss,
                    validation_accuracy=outcome.validation_accuracy,
                    learning_rate=outcome.learning_rate,
                    measurements=finite(outcome.measurements),
                    verdict=self.verdict(outcome.measurements),
                )
                # Order: first the record, because after the checkpoint a resumed run skips this epoch; then the
                # checkpoint, before a change of plan. So nothing is lost if the run ends in between.
                self.announce({"event": "epoch", **codec.to_data(record), "line": record.verdict.reason})
                executor.save(epoch)
                if agreed is not None and not self.move(agreed):
                    record = replace(record, verdict=replace(record.verdict, action="keep"))
                if keep is not None and self.decider is not None:
                    current = Placement(plan=executor.plan, processes=executor.processes)
                    keep(self.decider.corrected(current))
                yield record
        finally:
            if self.decider is not None:
                self.decider.close()


def adapt(
    executor: Executor,
    epochs: range,
    announce: Announce,
    *,
    model: Model | None = None,
    policy: Policy | None = None,
    keep: Callable[[Slowness], None] | None = None,
) -> Iterator[EpochRecord]:
    """Train ``epochs`` and yield a record after each, when its checkpoint is committed. Every process runs this loop.

    If the executor can be observed between steps, the leading rank does so about once per line of its log, otherwise
    after every epoch: it corrects ``model`` by the measurements, reports what is slow, and all processes change to a
    plan that is faster under the corrected costs if this pays for the change. If the next steps are not faster, the
    change is undone, and no other is made for a while. Without a ``model`` on the leading rank the plan never changes;
    with ``policy.keep_plan``, ranks with about equal shares are compared with each other then. ``keep``: called with
    the estimated costs after every epoch, on the leading rank.
    """
    yield from Loop(executor, announce, model, policy or Policy()).run(epochs, keep)


__all__ = ["Announce", "Loop", "adapt"]
