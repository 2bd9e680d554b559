"""What an epoch took: step times and sums of all ranks, gathered in one small collective per line of the log."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from asa.errors import WorkersFailedError
from asa.executor.clock import StepClock
from asa.executor.stopping import VOTE_EVERY_S
from asa.executor.votes import Votes
from asa.executor.worker import Tally
from asa.ir.codec import fingerprint
from asa.ir.measurements import Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Stat

WARM_UP_STEPS = 3
"""Steps after a plan took effect that are not measured: allocation, autotuning, DDP's rebuilding of its buckets."""

_HEAD = 7
"""Figures of a rank in front of its times."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """What all ranks did since the last one: the same figures on every rank. ``full``: of the memory of the rank that
    has the least left, the share in use, where they look at it."""

    steps: int
    loss: float
    accuracy: float
    seconds: float
    data_wait_s: float
    stopping: bool
    full: float = 0.0


@dataclass
class Pace:
    """An epoch's record. ``warm``: steps since the plan in force took effect."""

    plan: Plan
    votes: Votes
    clock: StepClock
    log_every: int
    warm: int
    interval: int = 1
    _measured: list[bool] = field(default_factory=list)
    _times: list[tuple[float, float]] = field(default_factory=list)
    _cold: list[tuple[float, float]] = field(default_factory=list)
    _sums: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def stepped(self, *, full: bool, disturbed: bool = False) -> bool:
        """Note one more step (``full``: of the plan's whole batch; ``disturbed``: slowed down by being looked at);
        whether it is time to :meth:`exchange`."""
        self.warm += 1
        self._measured.append(full and not disturbed and self.warm > WARM_UP_STEPS)
        return len(self._measured) >= self.interval

    @property
    def pending(self) -> bool:
        """Whether steps were noted since the last exchange."""
        return bool(self._measured)

    def exchange(self, tally: Tally, *, step: int, stop: bool, full: float = 0.0) -> Interval:
        """Bring the figures of all ranks together. Collective.

        Raises:
            WorkersFailedError: ranks are at different steps or under different plans, or the loss is not finite.
        """
        times = self.clock.collect()
        loss, hits, rows = tally.take()
        # 48 bits of the plan's fingerprint: what a float64 holds exactly.
        head = [loss, hits, rows, float(stop), float(step), float(int(fingerprint(self.plan)[:12], 16)), full]
        flat = [t for pair in times for t in pair]
        found = self.votes.gather([*head, *flat, *([0.0] * (2 * self.log_every - len(flat)))])
        self._check(found, step)
        steps = len(self._measured)
        # A synchronous step takes as long as its slowest rank.
        data = [max(rank[_HEAD + 2 * i] for rank in found) for i in range(steps)]
        work = [max(rank[_HEAD + 1 + 2 * i] for rank in found) for i in range(steps)]
        for measured, pair in zip(self._measured, zip(data, work, strict=True), strict=True):
            (self._times if measured else self._cold).append(pair)
        self._measured = []
        loss, hits, rows = (math.fsum(rank[i] for rank in found) for i in range(3))
        if not math.isfinite(loss):
            raise WorkersFailedError(
                f"the loss is no longer finite at step {step}; lower the learning rate, or train in fp32"
            )
        self._sums = (self._sums[0] + loss, self._sums[1] + hits, self._sums[2] + rows)
        self.interval = max(1, min(self.log_every, int(VOTE_EVERY_S / max(*work, 1e-6))))
        return Interval(
            steps=steps,
            loss=loss / max(1.0, rows),
            accuracy=hits / max(1.0, rows),
            seconds=math.fsum(data) + math.fsum(work),
            data_wait_s=math.fsum(data),
            stopping=any(rank[3] > 0 for rank in found),
            full=max(rank[6] for rank in found),
        )

    def _check(self, found: list[list[float]], step: int) -> None:
        for rank, figures in enumerate(found):
            if figures[4:6] != found[0][4:6]:
                raise WorkersFailedError(
                    f"rank {rank} is at step {figures[4]:.0f} where rank 0 is at {found[0][4]:.0f}, or under another "
                    f"plan (this is step {step})",
                    rank=rank,
                )

    @property
    def train_loss(self) -> float:
        """Mean over all samples of the epoch so far."""
        return self._sums[0] / max(1.0, self._sums[2])

    def measurements(self, peak_memory_bytes: tuple[int, ...] | None) -> Measurements:
        """The epoch as measured: warmed-up steps of whole batches, or what there was where there are none."""
        times = self._times or self._cold[-1:]
        return Measurements(
            plan_fingerprint=fingerprint(self.plan),
            strategy=self.plan.strategy,
            num_ranks=self.plan.num_ranks,
            global_batch=self.plan.global_batch,
            step_time=Stat.of(work for _, work in times),
            predicted_step_time_s=self.plan.prediction.step_time_s,
            communication_s=None,
            data_wait_s=math.fsum(data for data, _ in times) / len(times),
            peak_memory_bytes=peak_memory_bytes,
            predicted_memory_bytes=self.plan.prediction.memory_bytes_per_rank,
        )
