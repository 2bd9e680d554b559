"""A reference measured beside everything else: the current speed of the machine, and times converted to its mean speed.

The speed of a shared machine changes by some per cent within ten seconds, so components measured one after the other
see different machines. The same piece of work is therefore timed between them, and each time is converted to the mean
speed of the whole measurement (the mean of logarithms, because errors are relative):

    time * (mean reference / reference around it) ** trust,    trust = drift^2 / (drift^2 + noise^2 / 2)

The reference around it is the mean of two readings, which have noise of their own: on a machine without drift, nothing
is corrected.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from math import exp, log, sqrt
from statistics import fmean, median

from asa.ir.drift import Drift

_REPEATS = 3
_EFFICIENCY = 1.2533
"""Standard error of a normal's median over that of its mean."""


class Reference:
    """Readings of ``work``, which runs once and returns its seconds.

    Read at most once in ``every_s`` seconds, unless told otherwise. ``now``: the clock for the times of readings and
    measurements.
    """

    def __init__(
        self, work: Callable[[], float], *, every_s: float = 0.0, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._work, self.every_s, self.now = work, every_s, now
        self._began = now()
        self._at: list[float] = []
        self._seconds: list[float] = []
        self._squares: list[float] = []

    def read(self, *, due: bool = False) -> None:
        """Take a reading; with ``due``, only if the last one is old enough. The first run of the work is a warm-up."""
        if due and self._at and self.now() - self._began - self._at[-1] < self.every_s:
            return
        self._work()
        begun = self.now()
        runs = [max(self._work(), 1e-12) for _ in range(_REPEATS)]
        self._at.append((begun + self.now()) / 2 - self._began)
        self._seconds.append(median(runs))
        logs = [log(s) for s in runs]
        self._squares.append(sum((x - fmean(logs)) ** 2 for x in logs) / (_REPEATS - 1))

    @property
    def drift(self) -> Drift | None:
        """Summary of all readings; None if there are none."""
        if not self._at:
            return None
        noise = _EFFICIENCY * sqrt(fmean(self._squares) / _REPEATS)
        return Drift(readings=tuple(zip(self._at, self._seconds, strict=True)), noise=min(1.0, noise))

    def factor(self, begun: float, ended: float) -> float:
        """Factor for times measured between two moments of ``now``, which converts them to the mean speed."""
        drift = self.drift
        if drift is None or drift.deviation == 0:
            return 1.0
        trust = drift.deviation**2 / (drift.deviation**2 + drift.noise**2 / 2)
        around = self._around((begun + ended) / 2 - self._began)
        return exp(trust * (fmean(log(s) for s in self._seconds) - around))

    def _around(self, at: float) -> float:
        """Logarithm of the reference at a moment, interpolated between the readings before and after it."""
        logs = [log(s) for s in self._seconds]
        after = bisect_left(self._at, at)
        if after == 0 or after == len(logs):
            return logs[0 if after == 0 else -1]
        first, last = self._at[after - 1], self._at[after]
        share = (at - first) / (last - first) if last > first else 0.5
        return logs[after - 1] + share * (logs[after] - logs[after - 1])
