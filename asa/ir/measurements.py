"""Measurements of a run, and the scheduler's verdict on them."""

from __future__ import annotations

from typing import Literal

from asa.ir.codec import later, noun
from asa.ir.profile import Stat


@noun
class RankTiming:
    """Medians of one rank over the measured steps, in seconds per step.

    ``own_s``: the step without any waiting, i.e. computing and preparing. ``waiting_s``: waiting in collectives for a
    later rank, without the transfer itself. ``data_wait_s``: waiting for input. ``stolen_share``: fraction of the step
    in which this rank was ready to run while other processes had its core, 0 to 1; None if the system does not report
    it. ``mean_own_s``: the mean, beside the median ``own_s``; a few slow steps change only the mean; None if not
    measured. ``core``: number of the only core that the rank's process may use, over all hosts; None if it may use
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
    """Median seconds of one kind of communication, from the last rank's arrival on, over ``n`` transfers.

    ``op``: the collective, by the names of the cluster's tables, or ``send``. ``level``: index of the level of links
    that the group crosses. ``group_size``: number of ranks. ``num_bytes``: payload, counted as in those tables.
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

    ``peak_memory_bytes``: peak of active memory by rank of the plan, counted like the prediction; None if not measured.
    ``communication_s``: exposed communication; ``data_wait_s``: wait for input, both per step. ``per_rank``: by process
    of the run; idle ones have an ``own_s`` of 0; empty if ranks were not observed, and so is ``links``.
    ``mean_step_s``: the mean, beside the median of ``step_time``; None if not measured. ``energy_j``: joules of the
    plan's GPUs in the epoch; None if they do not count energy.
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

    @property
    def slowest(self) -> tuple[int, float] | None:
        """The process with the longest own work, input included, and the largest fraction of a step, 0 to 1, that
        others wait. None if ranks were not observed, or there is only one."""
        if not self.per_rank or self.num_ranks < 2 or self.step_time.median <= 0:
            return None
        own = [rank.own_s + rank.data_wait_s for rank in self.per_rank]
        waiting = max(rank.waiting_s for rank in self.per_rank)
        return own.index(max(own)), min(1.0, waiting / self.step_time.median)

    @property
    def samples_per_s(self) -> float:
        """Throughput at the median step."""
        return self.global_batch / self.step_time.median

    @property
    def step_error(self) -> float:
        """Predicted over measured step time, minus 1."""
        return self.predicted_step_time_s / self.step_time.median - 1


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
    """One epoch of a run, as logged."""

    epoch: int
    step: int
    seconds: float
    train_loss: float
    validation_loss: float
    validation_accuracy: float
    learning_rate: float
    measurements: Measurements
    verdict: Verdict
