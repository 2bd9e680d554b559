"""Estimates the slow-down of links from exposed communication, if no single timed transfer shows it. Gradient messages
are not timed one by one, and a link that is fast for small messages may be slow for large ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from asa.interfaces.executor import Placement
from asa.ir.measurements import Measurements
from asa.scheduler.costs import LIKE, Slowness
from asa.scheduler.expected import Expected

_WORTH = 0.1
"""Fraction of a step that communication must add beyond the prediction to be examined."""
_MOST = math.log(1000.0)
_LOOKS = 4
_NEAR = 0.03
_CLEARLY = 0.25
"""Difference of logarithms by which one explanation must be closer than the other."""


def _slowest_compute_s(current: Placement, expected: Expected, slowness: Slowness) -> float:
    """Seconds of computation of the slowest rank."""
    logs = [slowness.common + slowness.ranks[p] for p in current.processes]
    return max(s * math.exp(log) for s, log in zip(expected.own_s, logs, strict=True))


class Exposed:
    """Estimates the slow-down of links from exposed communication. Caches the last result, because pricing whole steps
    is expensive."""

    def __init__(self, price: Callable[[Placement, Slowness], float]) -> None:
        self._price = price
        self._last: tuple[Placement, Slowness, float, float] | None = None

    def level(
        self, current: Placement, measured: Measurements, expected: Expected, slowness: Slowness, steps: int
    ) -> tuple[int, float] | None:
        """The outermost level that ``current`` uses, and the logarithm of the slowdown of its transfers relative to the
        tables, in a window of ``steps`` steps under ``slowness``. None if single transfers that were timed
        account for most of it, or nothing is unusual."""
        exposed_s = measured.communication_s
        if exposed_s is None or not expected.levels or not measured.per_rank:
            return None
        level = max(expected.levels)
        timed = sum(t.seconds * t.n for t in measured.links) / max(1, steps)
        compute_s = _slowest_compute_s(current, expected, slowness)
        slow = slowness.levels[level] > LIKE
        predicted_s = expected.step_s - max(expected.own_s)
        if timed > exposed_s / 2 or not (slow or exposed_s - predicted_s > _WORTH * (compute_s + exposed_s)):
            return None
        if self._last is not None:
            plan, last_slowness, last_s, result = self._last
            if plan is current and last_slowness.distance(slowness) < _NEAR and abs(exposed_s / last_s - 1) < _NEAR:
                return level, result
        log = self._inverted(current, level, slowness, compute_s, max(exposed_s, 1e-9))
        self._last = current, slowness, max(exposed_s, 1e-9), log
        return level, log

    def clearly_closer(
        self, current: Placement, measured: Measurements, expected: Expected, first: Slowness, second: Slowness
    ) -> bool | None:
        """Whether exposed communication is clearly closer to its prediction under ``first`` than under ``second``; None
        if it is unknown."""
        exposed_s = measured.communication_s
        if not exposed_s or not measured.per_rank:
            return None
        distances = []
        for slowness in (first, second):
            added = max(1e-9, self._price(current, slowness) - _slowest_compute_s(current, expected, slowness))
            distances.append(abs(math.log(exposed_s / added)))
        return distances[0] + _CLEARLY < distances[1]

    def _inverted(self, current: Placement, level: int, slowness: Slowness, compute_s: float, target_s: float) -> float:
        """The logarithm under which the predicted step has ``target_s`` seconds beyond ``compute_s``."""

        def added(log: float) -> float:
            levels = tuple(log if i == level else old for i, old in enumerate(slowness.levels))
            return max(1e-9, self._price(current, replace(slowness, levels=levels)) - compute_s)

        low, high = 0.0, None
        log, add = 0.0, added(0.0)
        if add >= target_s:
            return 0.0
        for _ in range(_LOOKS):
            step = math.log(target_s / add)
            log = min(_MOST, log + step) if high is None else (low + high) / 2
            add = added(log)
            if abs(math.log(add / target_s)) < _NEAR:
                break
            if add < target_s:
                low = log
            else:
                high = log
        return log
