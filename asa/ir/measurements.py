"""What a run really took, and what the scheduler makes of it."""

from __future__ import annotations

from typing import Literal

from asa.ir.codec import later, noun
from asa.ir.profile import Stat


@noun
class RankTiming:
    """Medians of one rank over the measured steps, in seconds per step.

    ``own_s``: the step less every wait, i.e. computing and preparing. ``waiting_s``: waiting in collectives for a
    rank that came later, without the transfer itself. ``data_wait_s``: waiting for input. ``stolen_share``: share
    of the step in which this rank was ready to run while other processes had its core, 0 to 1; None where the
    system does not tell. ``mean_own_s``: the mean beside the median ``own_s``, which some slow steps move and the
    median does not; None where it was not taken. ``core``: number of the only core that the rank's process may use,
    those of every host apart; None where it may use several.
    """

    own_s: float
    waiting_s: float
    data_wait_s: float
    stolen_share: float | None = None
    mean_own_s: float | None = later()
    core: int | None = later()


@noun
class Transfer:
    """Seconds that one kind of communication took from the last rank's arrival on: a median over ``n`` of them.

    ``op``: the collective, by the names of the cluster's tables, or ``send``. ``level``: index of the level of links
    that the group crosses. ``group_size``: ranks that take part. ``num_bytes``: payload, counted as in those tables.
    """

    op: str
    level: int
    group_size: int
    num_bytes: float
    seconds: float
    n: int


@noun
class Measurements:
    """Timing and memory of training steps under one plan.

    ``peak_memory_bytes`` by rank of the plan is the active peak, by the same count as the prediction; None where it was
    not tracked. ``communication_s`` is the exposed part; ``data_wait_s`` the wait for input, both per step.
    ``per_rank``: by process of the run, idle ones included with an ``own_s`` of 0; empty where ranks were not observed;
    ``links``: likewise. ``mean_step_s``: the mean beside the median of ``step_time``; None where it was not taken.
    ``energy_j``: joules that the plan's GPUs spent in the epoch; None where they do not count them.
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
        """The process that takes longest for what is its own to do, input included, and the share of a step, 0 to 1,
        that the others wait at most. None where ranks were not observed, or there is only one."""
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
        """Predicted over measured step time, minus one."""
        return self.predicted_step_time_s / self.step_time.median - 1


@noun
class Verdict:
    """Keep the plan or solve again, why, and the figures the decision rests on."""

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
