"""What a run really took, and what the scheduler makes of it."""

from __future__ import annotations

from typing import Literal

from asa.ir.codec import noun
from asa.ir.profile import Stat


@noun
class Measurements:
    """Timing and memory of training steps under one plan.

    ``peak_memory_bytes`` per rank is the active peak, by the same count as the prediction; None where it was
    not tracked. ``communication_s`` is the exposed part; ``data_wait_s`` the wait for input, both per step.
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
