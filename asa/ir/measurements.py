"""Measurements of a run, and the scheduler's verdict on them."""

from __future__ import annotations

from typing import Literal

from asa.ir.codec import later, noun
from asa.ir.profile import Stat


@noun
class RankTiming:
    """Medians of one rank over the measured steps, in seconds per step.

    Attributes:
        own_s: the step without any waiting: computing and preparing.
        waiting_s: waiting in collectives for a later rank, without the transfer itself.
        data_wait_s: waiting for input.
        stolen_share: fraction of the step, 0 to 1, in which this rank was ready to run while other processes used its
            core; None if the system does not report it.
        mean_own_s: mean of what ``own_s`` is the median of; a few slow steps change only the mean. None if not
            measured.
        core: number of the only core that the rank's process may use, counted over all hosts; None if it may use
            several.
    """

    own_s: float
    waiting_s: float
    data_wait_s: float
    stolen_share: float | None = None
    mean_own_s: float | None = later()
    core: int | None = later()


@noun
class Transfer:
    """Median seconds of ``n`` transfers of one kind, each from the arrival of the last rank on.

    ``op`` is the collective, named as in the cluster's tables, or ``send``. ``level`` is the index of the level of
    links that the group of ``group_size`` ranks crosses. ``num_bytes`` is the payload, counted as in those tables.
    """

    op: str
    level: int
    group_size: int
    num_bytes: float
    seconds: float
    n: int


@noun
class Measurements:
    """Times and memory of training steps under one plan.

    Attributes:
        peak_memory_bytes: peak of active memory by rank of the plan, counted like the prediction; None if not measured.
        communication_s: exposed communication per step; None if not measured.
        data_wait_s: wait for input per step, on the rank that waits longest; not part of ``step_time``.
        per_rank: timings by process of the run; idle processes have an ``own_s`` of 0. Empty if ranks were not
            observed.
        links: measured transfers; empty if ranks were not observed.
        mean_step_s: mean of what ``step_time`` has the median of; None if not measured.
        energy_j: joules of the plan's GPUs in the epoch; None if they do not count energy.
        utilisation: mean over the plan's devices of the fraction of the epoch, 0 to 1, in which a kernel ran (GPUs), or
            of processor time over wall time and threads while training (CPUs); None if unknown.
    """

    plan_fingerprint: str
    strategy: str
    num_ranks: int
    global_batch: int
    step_time: Stat
    predicted_step_time_s: float
    communication_s: float | None
    data_wait_s: float
    peak_memory_bytes: tuple[int, ...] | None
    predicted_memory_bytes: tuple[int, ...]
    per_rank: tuple[RankTiming, ...] = ()
    links: tuple[Transfer, ...] = ()
    mean_step_s: float | None = later()
    energy_j: float | None = later()
    utilisation: float | None = later()

    @property
    def slowest(self) -> tuple[int, float] | None:
        """(process, fraction): the process with the longest own work, and the largest fraction of a step, 0 to 1, for
        which any process waits for another; both with waiting for input. None if ranks were not observed, or there is
        only one."""
        if not self.per_rank or self.num_ranks < 2 or self.step_time.median <= 0:
            return None
        own = [rank.own_s + rank.data_wait_s for rank in self.per_rank]
        waiting = max(rank.waiting_s for rank in self.per_rank)
        return own.index(max(own)), min(1.0, waiting / (self.step_time.median + max(0.0, self.data_wait_s)))

    @property
    def samples_per_s(self) -> float:
        """Samples per second at the median step time, with the wait for data."""
        return self.global_batch / (self.step_time.median + self.data_wait_s)


@noun
class Verdict:
    """Decision to keep the plan or to plan again, its reason, and the numbers behind it."""

    action: Literal["keep", "replan"]
    reason: str
    measured_s: float
    predicted_s: float
    best_possible_gain: float


@noun
class EpochRecord:
    """One epoch of a run, as logged. Figures of the validation are None in files if unknown (NaN in a program)."""

    epoch: int
    step: int
    seconds: float
    train_loss: float
    validation_loss: float | None
    validation_accuracy: float | None
    learning_rate: float
    measurements: Measurements
    verdict: Verdict
