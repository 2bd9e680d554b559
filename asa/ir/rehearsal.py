"""One rank of a plan, run alone: what it really computed and held, beside what the plan is priced at."""

from __future__ import annotations

from asa.ir.codec import noun
from asa.ir.profile import Stat


@noun
class ComponentSpan:
    """One component in a step on one rank: seconds of all its microbatches, bytes of one.

    ``saved_bytes`` is what was allocated in its forward and still lived when the forward of the whole stage was over.
    """

    name: str
    forward_s: float
    backward_s: float
    saved_bytes: int


@noun
class Spans:
    """What a rank did by itself, communication left out. ``update_s`` is the optimizer's step; ``peak_memory_bytes``
    the active peak; ``step_s`` a step from its first forward to the end of its update, nothing in it recorded."""

    rank: int
    steps: int
    step_s: Stat
    components: tuple[ComponentSpan, ...]
    update_s: float
    peak_memory_bytes: int

    @property
    def compute_s(self) -> float:
        """Forward and backward of every component, and the update."""
        return sum(c.forward_s + c.backward_s for c in self.components) + self.update_s


@noun
class RehearsedComponent:
    """A :class:`ComponentSpan` and what was foreseen, for a rank that works alone."""

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
    """Rank ``rank`` of ``num_ranks``, run on one device.

    ``predicted_compute_s`` is what the rank's own work in a step is priced at without contention and without waiting
    for slower ranks; ``plan_compute_s`` and ``plan_step_time_s`` are the plan's own figures, with both.
    ``priced_communication_s`` is the exposed communication of the plan's price: it was not run.
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
