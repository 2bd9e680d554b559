"""Step times of the ranks in the user's own loop: which one is slow, and what another plan would gain.

The loop keeps its plan, so the only result is a line on standard error. A step is counted when a backward has averaged
gradients: all ranks take part in that, whatever the loop looks like.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asa.api.messages import say
from asa.api.rank_context import RankContext
from asa.executor.model.votes import Votes
from asa.executor.training.clock import StepClock, StepTimes
from asa.executor.training.epoch_timer import EpochTimer
from asa.executor.training.worker import LossCounter
from asa.interfaces.executor import Placement
from asa.ir.measurements import Measurements
from asa.ir.plan import Plan
from asa.ir.units import seconds
from asa.scheduler import Model, Policy
from asa.scheduler.decide import Change, Decider
from asa.scheduler.findings import Finding
from asa.scheduler.relative import Compared, shares
from asa.sharding.collectives.waits import waits

_LOOK_EVERY = 50
"""Largest number of steps between two observations; with long steps there is one about every second."""

_watches = 0
"""Number of models observed in this process; with several, steps cannot be attributed."""


class _LoopClock(StepClock):
    """Measures seconds from one backward to the next. Waiting for the loader is not part of a step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.data_s = 0.0
        self._data: list[float] = []

    def tick(self) -> None:
        """End a step and begin the next."""
        if self._marks:
            self.mark()
            self._data.append(self.data_s)
        self.data_s = 0.0
        self.mark()
        self.mark()

    def collect(self) -> list[StepTimes]:
        """Times of all steps since the last call."""
        times, waited = super().collect(), self._data
        self._data = []
        return [
            t._replace(data=data, work=max(t.work - data, t.blocked)) for t, data in zip(times, waited, strict=True)
        ]


class StepWatch:
    """Observes one model's steps under ``plan``. ``model``: on rank 0, the cost model of the plan, if there is one;
    without it ranks are only compared with each other, if they have about equal shares."""

    def __init__(self, context: RankContext, plan: Plan, model: Model | None) -> None:
        global _watches
        _watches += 1
        self._number = _watches
        self._context = context
        self._placement = Placement(plan=plan, processes=tuple(range(plan.num_ranks)))
        self._decider = None if model is None else Decider(model, context.ranks, Policy())
        of_ranks = shares(plan) if model is None else None
        self._compared = None if of_ranks is None else Compared(len(of_ranks), of_ranks)
        if self._number == 1:
            waits.start(on=True)
        self._clock = _LoopClock(context.device)
        self._loss_counter = LossCounter(context.device)
        self._timer = self._timer_of(context.votes, plan)
        self._steps = 0
        self._alike = False

    @staticmethod
    def applies(context: RankContext, plan: Plan) -> bool:
        """Whether a step involves all ranks together; not if each computes independently."""
        return context.ranks > 1 and any(layout.data * layout.tensor > 1 for layout in plan.layouts())

    def _timer_of(self, votes: Votes, plan: Plan, before: EpochTimer | None = None) -> EpochTimer:
        """A timer for one observation, which is not used afterwards."""
        timer = EpochTimer(plan, self._placement.processes, votes, self._clock, _LOOK_EVERY, 0)
        if before is not None:
            timer.follow(before)
        return timer

    def loaded(self, seconds: float) -> None:
        """Record ``seconds`` of waiting for the loader."""
        self._clock.data_s += seconds

    def odd(self) -> None:
        """Mark the next step as unusual, because an epoch begins or ends in it."""
        self._alike = False

    def stepped(self, *, full: bool) -> None:
        """Record that a backward has averaged gradients (collective); ``full``: the batch has the plan's size."""
        if self._number != _watches:
            return
        first, alike = self._steps == 0, self._alike
        self._alike, self._steps = True, self._steps + 1
        self._clock.tick()
        if first or not self._timer.stepped(full=full and alike):
            return
        timer = self._timer
        interval = timer.exchange(self._loss_counter, step=self._steps, stop=False)
        if self._context.rank == 0 and interval.measured is not None:
            for line in self._lines(interval.measured, interval.steps):
                say(self._context, line)
        timer.resume()
        self._timer = self._timer_of(self._context.votes, timer.plan, timer)

    def _lines(self, measured: Measurements, steps: int) -> Sequence[str]:
        """Lines about a window of ``steps`` steps."""
        decider, change, findings = self._decider, None, list[Finding]()
        if decider is not None:
            change = decider.window(self._placement, measured, steps=steps, left=None)
            findings = decider.found
        elif self._compared is not None:
            findings = self._compared.window(measured, steps)
        lines = [f"{'over' if f.ended else 'slow'}: {f.line}" for f in findings if f.where is not None]
        return lines + ([] if change is None else [offer(change)])


def offer(change: Change) -> str:
    """Description of the gain of another plan, in one line."""
    target, ranks = change.target, sorted(change.target.processes)
    stage = target.plan.stages[0]
    named = ", ".join(map(str, ranks))
    how = f"{target.plan.strategy} on {len(ranks)} of {change.before.plan.num_ranks} ranks ({named})"
    if stage.weights is not None and len(target.plan.stages) == 1:
        how += f", samples shared {':'.join(map(str, stage.weights))}"
    return (
        f"another plan ({how}) would take {seconds(change.promised_s)} a step instead of {seconds(change.step_s)}: "
        "asa.Job changes to it while it runs; a loop of one's own keeps its plan"
    )
