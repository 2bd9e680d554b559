"""Results of a rehearsal: computation and memory of one rank of a plan, run alone, compared with the prediction."""

from __future__ import annotations

from asa.ir.codec import noun
from asa.ir.profile import Stat


@noun
class ComponentSpan:
    """Measured work of one component in a step on one rank. Seconds are of all its microbatches, bytes of one
    microbatch.

    ``saved_bytes`` are allocated in its forward and still alive after the forward of the whole stage.
    """

    name: str
    forward_s: float
    backward_s: float
    saved_bytes: int


@noun
class Spans:
    """Measured work of one rank in a step, without communication.

    ``update_s`` is the time of the optimizer step. ``step_s`` is the time from a step's first forward to the end of its
    update, without recording. ``peak_memory_bytes`` is the peak of active memory.
    """

    rank: int
    steps: int
    step_s: Stat
    components: tuple[ComponentSpan, ...]
    update_s: float
    peak_memory_bytes: int

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward of all components, and the update."""
        return sum(c.forward_s + c.backward_s for c in self.components) + self.update_s


@noun
class RehearsedComponent:
    """A :class:`ComponentSpan` and its prediction, for a rank that works alone."""

    name: str
    assignment: str
    forward_s: float
    backward_s: float
    saved_bytes: int
    predicted_forward_s: float
    predicted_backward_s: float
    predicted_saved_bytes: int


@noun
class Rehearsal:
    """Results of rank ``rank`` of ``num_ranks``, run on one device.

    Attributes:
        predicted_compute_s: predicted work of the rank in a step, without contention and without waiting for slower
            ranks.
        plan_compute_s, plan_step_time_s: the plan's own predictions, with contention and waiting.
        priced_communication_s: exposed communication in the plan's prediction; it was not run.
    """

    model: str
    plan_fingerprint: str
    rank: int
    num_ranks: int
    stage: int
    device: str
    steps: int
    samples: int
    num_microbatches: int
    step_s: Stat
    compute_s: float
    update_s: float
    predicted_compute_s: float
    predicted_update_s: float
    plan_compute_s: float
    plan_step_time_s: float
    priced_communication_s: float
    peak_memory_bytes: int
    predicted_memory_bytes: int
    components: tuple[RehearsedComponent, ...]
    notes: tuple[str, ...] = ()
