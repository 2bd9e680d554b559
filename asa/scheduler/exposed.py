"""How slow links are by what communication adds to a step, where no single transfer tells: gradients that travel by
messages are seen as that alone, and a link that lets small messages through at once may be full of large ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from asa.interfaces.executor import Placement
from asa.ir.measurements import Measurements
from asa.scheduler.costs import LIKE, Slowness
from asa.scheduler.expected import Expected

_WORTH = 0.1
"""Share of a step that communication must add beyond what is expected, to be looked into."""
_MOST = math.log(1000.0)
_LOOKS = 4
_NEAR = 0.03
_CLEARLY = 0.25
"""By how much, in logarithms, one explanation must be nearer than the other."""


def _own(current: Placement, expected: Expected, known: Slowness) -> float:
    """Seconds that the slowest rank computes."""
    logs = [known.common + known.ranks[p] for p in current.processes]
    return max(s * math.exp(log) for s, log in zip(expected.own_s, logs, strict=True))


class Exposed:
    """Remembers the last answer, which prices of whole steps had to be asked for."""

    def __init__(self, price: Callable[[Placement, Slowness], float]) -> None:
        self._price = price
        self._last: tuple[Placement, Slowness, float, float] | None = None

    def level(
        self, current: Placement, measured: Measurements, expected: Expected, known: Slowness, steps: int
    ) -> tuple[int, float] | None:
        """The outermost level that ``current`` sends over, and the logarithm of how many times as long as in the tables
        its transfers take, in a window of ``steps`` whose ranks are ``known``. None where the transfers that were timed
        one by one are most of it, or nothing is out of the ordinary."""
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
        last = self._last
        if last is not None and last[0] is current and last[1].apart(known) < _NEAR and abs(seen / last[2] - 1) < _NEAR:
            return level, last[3]
        found = self._inverted(current, level, known, own, max(seen, 1e-9))
        self._last = current, known, max(seen, 1e-9), found
        return level, found

    def told_apart(
        self, current: Placement, measured: Measurements, expected: Expected, one: Slowness, other: Slowness
    ) -> bool | None:
        """Whether what communication adds to a step is clearly nearer to what it would under ``one`` than under
        ``other``; None where it is not known."""
        seen = measured.communication_s
        if not seen or not measured.per_rank:
            return None
        far = []
        for slowness in (one, other):
            added = max(1e-9, self._price(current, slowness) - _own(current, expected, slowness))
            far.append(abs(math.log(seen / added)))
        return far[0] + _CLEARLY < far[1]

    def _inverted(self, current: Placement, level: int, known: Slowness, own: float, seen: float) -> float:
        """The logarithm under which a step's price has ``seen`` beyond ``own``."""

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
