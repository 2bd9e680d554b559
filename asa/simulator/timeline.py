"""Events of a simulated step: what happened, when, and on which stream."""

from __future__ import annotations

from typing import Literal

from asa.ir.codec import noun
from asa.ir.streams import Stream

EventKind = Literal["forward", "backward", "boundary", "inside", "gradient", "update", "transfer"]


@noun
class Event:
    """One piece of work. ``start_s`` and ``end_s`` are seconds since the step began; ``microbatch`` and ``stage`` count
    from 0."""

    name: str
    kind: EventKind
    stream: Stream
    microbatch: int
    start_s: float
    end_s: float
    stage: int = 0


@noun
class Timeline:
    """One simulated step. All ranks of a stage behave like its busiest rank, so each stage has one list of events.
    ``stages`` are the ranks of every stage."""

    model: str
    ranks: int
    step_time_s: float
    events: tuple[Event, ...]
    stages: tuple[tuple[int, ...], ...] = ()

    def busy(self, stream: Stream, stage: int = 0) -> float:
        """Seconds in which ``stream`` of ``stage`` had work."""
        return sum(e.end_s - e.start_s for e in self.events if e.stream == stream and e.stage == stage)

    def stage_of(self, rank: int) -> int:
        """The stage of ``rank``."""
        return next((s for s, ranks in enumerate(self.stages) if rank in ranks), 0)
