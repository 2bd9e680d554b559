"""Interval between checkpoints inside an epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class SaveClock:
    """Decides when to save. All values are equal on all ranks.

    ``every_s`` is the longest time between two checkpoints, in seconds of training (None: no limit).
    ``between_losses_s`` is the mean time in seconds between losses of a rank (None: there was none). With losses every
    M seconds and checkpoints that take C seconds, the optimal interval is sqrt(2 C M) (Young, 1974).
    """

    every_s: float | None = None
    between_losses_s: float | None = None
    _since_s: float = 0.0
    _write_s: float | None = None

    @property
    def interval_s(self) -> float:
        """Seconds of training between two checkpoints; infinite if there are none inside an epoch."""
        limit = math.inf if self.every_s is None else self.every_s
        if self.between_losses_s is None:
            return limit
        if self._write_s is None:  # the first checkpoint shows how long they take
            return min(limit, self.between_losses_s / 10)
        return min(limit, math.sqrt(2 * self._write_s * self.between_losses_s))

    def trained(self, seconds: float) -> bool:
        """Add ``seconds`` of training. Returns whether a checkpoint is due."""
        self._since_s += seconds
        return self._since_s >= self.interval_s

    def saved(self, write_s: float | None = None) -> None:
        """Record that a checkpoint was written, and how long it took if that is known."""
        self._since_s = 0.0
        self._write_s = write_s if write_s is not None else self._write_s
