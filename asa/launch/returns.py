"""When a lost rank is started again: at once, then after ever longer pauses, in the end no more."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

MOST_STARTS = 8
"""Largest number of restarts of one rank, each of which did not last :data:`_STABLE_S`."""
_STABLE_S = 60.0
_PAUSE_S = 0.5


@dataclass
class Return:
    """The restarts of one rank. ``starts``: how many there were since it last worked for long."""

    starts: int = 0
    _began: float = field(default_factory=time.monotonic)
    _due: float | None = None

    @property
    def possible(self) -> bool:
        """Whether the rank is started again if it is lost now, or was lost just now."""
        return self.starts < MOST_STARTS or self._due is not None

    def due(self, now: float) -> float | None:
        """When the rank that was found lost ``now`` or before is started again; None if it is not.

        >>> back = Return()
        >>> dues = [(back.due(float(n)), back.started(float(n)))[0] for n in range(9)]
        >>> dues[:3], dues[-1]
        ([0.0, 1.5, 3.5], None)
        """
        if self._due is None:
            if now - self._began > _STABLE_S:
                self.starts = 0
            if self.starts >= MOST_STARTS:
                return None
            self._due = now + _PAUSE_S * (2**self.starts - 1)
        return self._due

    def started(self, now: float) -> None:
        """Record that the rank is started."""
        self.starts, self._began, self._due = self.starts + 1, now, None
