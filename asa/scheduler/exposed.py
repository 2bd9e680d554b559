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


def _own(current: Placement, expected: Expected, known: Slowness) -> float:
    """Seconds of computation of the slowest rank."""
    logs = [known.common + known.ranks[p] for p in current.processes]
    return max(s * math.exp(log) for s, log in zip(expected.own_s, logs, strict=True))


class Exposed:
    """Estimates the slow-down of links from exposed communication. Caches the last result, because pricing whole steps
    is expensive."""

    def __init__(self, price: Callable[[Placement, Slowness], float]) -> None:
        self._price = price
        self._last: tuple[Placement, Slowness, float, float] | None = None

    def level(
        self, current: Placement, measured: Measurements, expected: Expected, known: Slowness, steps: int
    ) -> tuple[int, float] | None:
        """The outermost level that ``current`` uses, and the logarithm of the slowdown of its transfers relative to the
        tables, in a window of ``steps`` steps with the slowness ``known``. None if single transfers that were timed
        account for most of it, or nothing is unusual."""
        seen = measured.communication_s
        if seen is None or not expected.levels or not measured.per_rank:
            return None
        level = max(expected.levels)
        timed = sum(t.seconds * t.n for t in measured.links) / max(1, steps)
        own = _own(current, expected, known)
        slow = known.levels[level] > LIKE
        usual = expected.step_s - max(expected.own_s)
        if timed > seen / 2 or not (slow or seen - usual > _WORTH * (own + seen)):
            return None
        if self._last is not None:
            plan, slowness, before, result = self._last
            if plan is current and slowness.distance(known) < _NEAR and abs(seen / before - 1) < _NEAR:
                return level, result
        found = self._inverted(current, level, known, own, max(seen, 1e-9))
        self._last = current, known, max(seen, 1e-9), found
        return level, found

    def clearly_closer(
        self, current: Placement, measured: Measurements, expected: Expected, one: Slowness, other: Slowness
    ) -> bool | None:
        """Whether exposed communication is clearly closer to its prediction under ``one`` than under ``other``; None if
        it is unknown."""
        seen = measured.communication_s
        if not seen or not measured.per_rank:
            return None
        far = []
        for slowness in (one, other):
            added = max(1e-9, self._price(current, slowness) - _own(current, expected, slowness))
            far.append(abs(math.log(seen / added)))
        return far[0] + _CLEARLY < far[1]

    def _inverted(self, current: Placement, level: int, known: Slowness, own: float, seen: float) -> float:
        """The logarithm under which the predicted step has ``seen`` seconds beyond ``own``."""

        def added(log: float) -> float:
            levels = tuple(log if i == level else old for i, old in enumerate(known.levels))
            return max(1e-9, self._price(current, replace(known, levels=levels)) - own)

        low, high = 0.0, None
        log, add = 0.0, added(0.0)
        if add >= seen:
            return 0.0
        for _ in range(_LOOKS):
            step = math.log(seen / add)
            log = min(_MOST, log + step) if high is None else (low + high) / 2
            add = added(log)
            if abs(math.log(add / seen)) < _NEAR:
                break
            if add < seen:
                low = log
            else:
                high = log
        return log
