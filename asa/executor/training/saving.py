"""How often a checkpoint inside an epoch is worth its time."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class SaveClock:
    """``every_s``: seconds of training between two checkpoints at most (None: no such limit); ``between_losses_s``: how
    long ranks ran before one was lost, on average (None: none was). All figures are the same on all ranks.

    With losses every M seconds and checkpoints that take C, what is lost to both is least where they lie
    sqrt(2 C M) apart (Young, 1974).
    """

    every_s: float | None = None
    between_losses_s: float | None = None
    _since_s: float = 0.0
    _took_s: float | None = None

    @property
    def interval_s(self) -> float:
        """Seconds of training between two checkpoints; infinite where there are none inside an epoch."""
        limit = math.inf if self.every_s is None else self.every_s
        if self.between_losses_s is None:
            return limit
        if self._took_s is None:  # the first one tells how long they take
            return min(limit, self.between_losses_s / 10)
        return min(limit, math.sqrt(2 * self._took_s * self.between_losses_s))

    def trained(self, seconds: float) -> bool:
        """So many seconds of training more; whether a checkpoint is due."""
        self._since_s += seconds
        return self._since_s >= self.interval_s

    def saved(self, took_s: float | None = None) -> None:
        """There is a new one, which took so long where that is known."""
        self._since_s = 0.0
        self._took_s = took_s if took_s is not None else self._took_s
