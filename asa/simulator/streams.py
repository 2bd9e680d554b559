"""Two streams of one rank of a stage: computation in program order, and the reduction of gradients beside it.

Work is given in the seconds that it would take alone. While a computation and a reduction run at once, both are slowed
down (the cluster's :class:`~asa.ir.cluster.Overlap`). A blocking collective is in program order, too. It has the links
for itself: computation and reduction wait until it ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from asa.ir.cluster import Overlap
from asa.ir.streams import Stream
from asa.simulator.timeline import Event, EventKind

_NOTHING = 1e-15


@dataclass
class _Sync:
    name: str
    remaining_s: float
    microbatch: int
    started: float | None = None


class Streams:
    """A clock that advances over work given in program order; ``events`` records the work."""

    def __init__(self, overlap: Overlap, stage: int = 0) -> None:
        self._overlap = overlap
        self._stage = stage
        self._waiting: deque[_Sync] = deque()
        self.now = 0.0
        self.events: list[Event] = []

    def compute(self, name: str, kind: EventKind, seconds: float, microbatch: int, covered: float = 0.0) -> None:
        """Run a computation of ``seconds``. Waiting reductions run beside it, after its first ``covered`` seconds."""
        start, remaining_s = self.now, seconds - covered
        self.now += covered
        while remaining_s > _NOTHING:
            if not self._waiting:
                self.now += remaining_s
                remaining_s = 0.0
                break
            sync = self._waiting[0]
            sp, sc = self._overlap.compute_slowdown, self._overlap.communication_slowdown
            together = min(remaining_s * sp, sync.remaining_s * sc)
            remaining_s -= together / sp
            self._communicate(sync, together, together / sc)
        self.record(name, kind, "compute", start, microbatch)

    def block(self, name: str, kind: EventKind, seconds: float, microbatch: int) -> None:
        """Run a collective that computation waits for."""
        if seconds <= 0:
            return
        start = self.now
        self.now += seconds
        self.record(name, kind, "communication", start, microbatch)

    def rest_until(self, seconds: float) -> None:
        """Compute nothing until the clock is at ``seconds``; waiting reductions go on."""
        while self.now < seconds and self._waiting:
            sync = self._waiting[0]
            wall = min(sync.remaining_s, seconds - self.now)
            self._communicate(sync, wall, wall)
        self.now = max(self.now, seconds)

    def release(self, name: str, seconds: float, microbatch: int) -> None:
        """Queue the reduction of gradients that are ready now, after those queued before."""
        if seconds > 0:
            self._waiting.append(_Sync(name, seconds, microbatch))

    def drain(self) -> None:
        """Wait for all reductions."""
        while self._waiting:
            sync = self._waiting[0]
            self._communicate(sync, sync.remaining_s, sync.remaining_s)

    def _communicate(self, sync: _Sync, wall: float, progress: float) -> None:
        if sync.started is None:
            sync.started = self.now
        self.now += wall
        sync.remaining_s -= progress
        if sync.remaining_s <= _NOTHING:
            self._waiting.popleft()
            self.record(sync.name, "gradient", "communication", sync.started, sync.microbatch)

    def record(
        self, name: str, kind: EventKind, stream: Stream, start: float, microbatch: int, end: float | None = None
    ) -> None:
        """Record work from ``start`` to ``end`` (None: now), unless it has no duration."""
        end = self.now if end is None else end
        if end > start:
            self.events.append(
                Event(
                    name=name,
                    kind=kind,
                    stream=stream,
                    microbatch=microbatch,
                    start_s=start,
                    end_s=end,
                    stage=self._stage,
                )
            )
