"""What a simulated step did, when, and on which stream."""

from __future__ import annotations

from typing import Literal

from asa.ir.codec import noun

Stream = Literal["compute", "communication"]
EventKind = Literal["forward", "backward", "boundary", "inside", "gradient", "update"]


@noun
class Event:
    """One piece of work: ``start_s`` and ``end_s`` since the step began; ``microbatch`` counts from 0."""

    name: str
    kind: EventKind
    stream: Stream
    microbatch: int
    start_s: float
    end_s: float


@noun
class Timeline:
    """One step. Every rank of a stage does what the busiest one does, so one list of events stands for all."""

    model: str
    ranks: int
    step_time_s: float
    events: tuple[Event, ...]

    def busy(self, stream: Stream) -> float:
        """Seconds in which ``stream`` had work."""
        return sum(e.end_s - e.start_s for e in self.events if e.stream == stream)
