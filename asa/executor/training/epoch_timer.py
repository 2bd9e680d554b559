"""Step times and sums of losses over an epoch, gathered from all ranks in one small collective per line of the log."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import compress

from asa.errors import WorkersFailedError
from asa.executor.model.votes import Votes
from asa.executor.training.clock import StepClock, StepTimes
from asa.executor.training.rank_times import TRANSFER_FIGURES, RankTimes, Stolen, packed, pinned_core
from asa.executor.training.stopping import VOTE_EVERY_S
from asa.executor.training.worker import LossCounter
from asa.ir.codec import fingerprint
from asa.ir.measurements import Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Stat
from asa.sharding.collectives.waits import waits

WARM_UP_STEPS = 3
"""Number of steps after a change of plan that are not measured. They allocate memory, tune kernels, and let DDP rebuild
its buckets."""

_LOOK_STEPS = 20
"""Largest number of steps between two exchanges whose cost is negligible. A slow rank is found after about as many."""
_LOOK_SHARE = 0.002
"""Largest fraction of training that exchanges may take before they are made less often."""
_HEAD = 11
"""Number of values of a process before those of its transfers and of the times of its steps."""
_PER_STEP = len(StepTimes._fields)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Figures of all ranks since the previous interval, equal on every rank.

    ``full`` is the fraction of memory in use on the rank with least memory left, if ranks observe it. ``enough`` says
    whether memory suffices for an earlier plan again, on every rank. ``measured`` are the measurements so far; None if
    no step counts for them.
    """

    steps: int
    loss: float
    accuracy: float
    seconds: float
    data_wait_s: float
    stopping: bool
    full: float = 0.0
    enough: bool = False
    measured: Measurements | None = None


def who_is_late(measured: Measurements | None) -> dict[str, float | int | None]:
    """Fields of an event: the rank with the longest computation, and the largest fraction of a step for which others
    wait for it. They are None if ranks were not observed."""
    slowest = None if measured is None else measured.slowest
    return {
        "slowest_rank": None if slowest is None else slowest[0],
        "waiting_share": None if slowest is None else slowest[1],
    }


@dataclass
class EpochTimer:
    """Record of one epoch.

    ``warm`` is the number of steps since the current plan took effect; ``processes`` run its ranks. ``every_s`` is
    about the longest time between two exchanges, in seconds of training.
    """

    plan: Plan
    processes: tuple[int, ...]
    votes: Votes
    clock: StepClock
    log_every: int
    warm: int
    interval: int = 1
    every_s: float = VOTE_EVERY_S
    _exchange_began: float = 0.0
    _cost_s: tuple[float, float] = (0.0, 0.0)
    _measured: list[bool] = field(default_factory=list)
    _times: list[tuple[float, float]] = field(default_factory=list)
    _cold: list[tuple[float, float]] = field(default_factory=list)
    _sums: tuple[float, float, float] = (0.0, 0.0, 0.0)
    _before: Measurements | None = None
    _stolen: Stolen = field(default_factory=Stolen)

    def __post_init__(self) -> None:
        self._ranks = RankTimes(self.processes)

    def under(self, plan: Plan, processes: tuple[int, ...], clock: StepClock) -> None:
        """Switch to another plan. Step times are measured anew from here on, while losses continue to add up."""
        self._before = self.measurements(None)
        self.plan, self.processes, self.clock, self.warm, self.interval = plan, processes, clock, 0, 1
        self._times, self._cold = [], []
        self._ranks = RankTimes(processes)

    def follow(self, before: EpochTimer) -> None:
        """Continue after the last exchange of ``before``, without its figures."""
        self.warm, self.interval, self._cost_s = before.warm, before.interval, before._cost_s

    def stepped(self, *, full: bool, disturbed: bool = False) -> bool:
        """Record one more step. Returns whether it is time to :meth:`exchange`.

        ``full`` says that the step had the plan's whole batch. ``disturbed`` says that it was slowed down by being
        observed.
        """
        self.warm += 1
        self._measured.append(full and not disturbed and self.warm > WARM_UP_STEPS)
        return len(self._measured) >= self.interval

    def resume(self) -> None:
        """Record that training goes on after an exchange and what was decided from it, whose cost this ends."""
        self._cost_s = self._cost_s[1], time.perf_counter() - self._exchange_began

    @property
    def pending(self) -> bool:
        """Whether there were steps since the last exchange."""
        return bool(self._measured)

    def exchange(
        self, counter: LossCounter, *, step: int, stop: bool, full: float = 0.0, enough: bool = False
    ) -> Interval:
        """Combine the figures of all ranks since the last exchange (collective).

        Raises:
            WorkersFailedError: ranks are at different steps or under different plans, or the loss is not finite.
        """
        self._exchange_began = time.perf_counter()
        times = self.clock.collect()
        loss, hits, rows = counter.take()
        # 48 bits of the plan's fingerprint, which a float64 represents exactly.
        plan = float(int(fingerprint(self.plan)[:12], 16))
        head = [
            loss, hits, rows, float(stop), float(step), plan, full, self._stolen.share(), pinned_core(self.votes.rank),
            max(self._cost_s), float(enough),
        ]  # fmt: skip
        flat = [figure for each in times for figure in each]
        figures = self.votes.gather(
            [*head, *packed(waits.transfers()), *flat, *([0.0] * (_PER_STEP * self.log_every - len(flat)))]
        )
        self._check(figures, step)
        first = _HEAD + TRANSFER_FIGURES
        window, pairs = RankTimes(self.processes), []
        measured, self._measured = self._measured, []
        for i, counts in enumerate(measured):
            at = first + _PER_STEP * i
            every = [StepTimes(*rank[at : at + _PER_STEP]) for rank in figures]
            # A synchronous step takes as long as its slowest rank, for whose data others wait while they work. Who
            # reports what cannot be is named later.
            possible = [t for t in every if t.possible]
            waited = max((t.data for t in possible), default=0.0)
            pairs.append((waited, max((t.data + t.work for t in possible), default=waited) - waited))
            (self._times if counts else self._cold).append(pairs[-1])
            for record in (window, self._ranks) if waits.on else ():
                record.step(every, counts=counts)
        for record in (window, self._ranks):
            record.interval(
                [rank[_HEAD:first] for rank in figures], [rank[7] for rank in figures], [rank[8] for rank in figures]
            )  # fmt: skip
        steps = len(measured)
        data, work = ([pair[i] for pair in pairs] for i in range(2))
        loss, hits, rows = (math.fsum(rank[i] for rank in figures) for i in range(3))
        if not math.isfinite(loss):
            raise WorkersFailedError(
                f"the loss is no longer finite at step {step}; lower the learning rate with --lr, or train in fp32"
            )
        self._sums = (self._sums[0] + loss, self._sums[1] + hits, self._sums[2] + rows)
        # The last rank to arrive does not wait for others, so the smallest cost is that of the exchange itself.
        cost_s = min(figures[rank][9] for rank in self.votes.live)
        self.interval = self._steps_until_exchange(max(*work, 1e-6), cost_s)
        return Interval(
            steps=steps,
            loss=loss / max(1.0, rows),
            accuracy=hits / max(1.0, rows),
            seconds=max(1e-9, math.fsum(data) + math.fsum(work)),
            data_wait_s=math.fsum(data),
            stopping=any(rank[3] > 0 for rank in figures),
            full=max(rank[6] for rank in figures),
            enough=all(figures[rank][10] > 0 for rank in self.votes.live),
            measured=self._measurements(counted, window) if (counted := list(compress(pairs, measured))) else None,
        )

    def _steps_until_exchange(self, step_s: float, cost_s: float) -> int:
        """Number of steps of ``step_s`` seconds until the next exchange, if one costs ``cost_s`` seconds."""
        few = max(_LOOK_STEPS, math.ceil(cost_s / (_LOOK_SHARE * step_s)))
        return max(1, min(self.log_every, int(self.every_s / step_s), few))

    def _check(self, figures_of_ranks: list[list[float]], step: int) -> None:
        for rank in self.votes.live:
            figures = figures_of_ranks[rank]
            if len(figures) != len(figures_of_ranks[0]):
                raise WorkersFailedError(
                    f"rank {rank} is elsewhere in its loop than rank 0, which is at step {step}", rank=rank
                )
            if figures[4:6] != figures_of_ranks[0][4:6]:
                raise WorkersFailedError(
                    f"rank {rank} is at step {figures[4]:.0f} where rank 0 is at {figures_of_ranks[0][4]:.0f}, or "
                    f"under another plan (this is step {step})",
                    rank=rank,
                )

    @property
    def train_loss(self) -> float:
        """Mean loss over all samples of the epoch so far."""
        return self._sums[0] / max(1.0, self._sums[2])

    def measurements(self, peak_memory_bytes: tuple[int, ...] | None) -> Measurements:
        """Measurements of the steps under the current plan: of whole batches after warm-up; of the last other step if
        there are none; of the steps under the plan before if no step was taken under this one."""
        if not self._times and not self._cold and self._before is not None:
            return self._before
        return self._measurements(self._times or self._cold[-1:], self._ranks, peak_memory_bytes)

    def _measurements(
        self, times: list[tuple[float, float]], ranks: RankTimes, peak_memory_bytes: tuple[int, ...] | None = None
    ) -> Measurements:
        return Measurements(
            plan_fingerprint=fingerprint(self.plan),
            strategy=self.plan.strategy,
            num_ranks=self.plan.num_processes,
            global_batch=self.plan.global_batch,
            step_time=Stat.of(work for _, work in times),
            predicted_step_time_s=self.plan.prediction.step_time_s,
            communication_s=ranks.communication_s(),
            data_wait_s=math.fsum(data for data, _ in times) / len(times),
            peak_memory_bytes=peak_memory_bytes,
            predicted_memory_bytes=self.plan.prediction.memory_bytes_per_rank,
            per_rank=ranks.timings(),
            links=ranks.transfers(),
            mean_step_s=math.fsum(work for _, work in times) / len(times),
        )
