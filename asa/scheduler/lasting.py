"""Decides whether a difference lasts long enough to be reported; machines vary for a second or two at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from asa.ir.measurements import Measurements
from asa.scheduler.costs import LIKE, STOLEN_SHARE

_LOOKS, _STEPS, _SECONDS = 2, 5, 3.0
"""Further observations, steps and seconds for which a difference must last without other evidence."""
ALL_ALIKE = 4
"""Factor on that duration if all ranks are affected equally, for which no plan helps."""
_LONG = 4
"""Factor on that duration after which a difference within the usual variation counts, too."""
_WINDOWS = 80
_FEW = 20
"""Smallest number of differences from which the usual variation is learned: the tenth left out contains a change."""
_SURE = 3.0
_NORMAL_P90 = 1.6449
"""90th percentile of the absolute value of a normal variable, in standard deviations."""


def disturbed(measured: Measurements, processes: Sequence[int]) -> list[int] | None:
    """The ``processes`` that had to share their cores for a part of the time; None if the system does not report it."""
    shares = {p: measured.per_rank[p].stolen_share for p in processes if p < len(measured.per_rank)}
    if not shares or any(s is None for s in shares.values()):
        return None
    return [p for p, s in shares.items() if s is not None and s >= STOLEN_SHARE]


@dataclass
class UsualVariation:
    """Usual variation of the ranks' own times between successive windows. It is learned from the 90th percentile, so
    that real changes are excluded."""

    _last: dict[int, float] = field(default_factory=dict)
    _differences: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOWS))

    def window(self, measured: Measurements, processes: Sequence[int]) -> None:
        """Record the computation of ranks in a window."""
        for p in processes:
            compute_s = measured.per_rank[p].own_s if p < len(measured.per_rank) else 0.0
            if compute_s > 0 and math.isfinite(compute_s):
                log = math.log(compute_s)
                if p in self._last:
                    self._differences.append(abs(log - self._last[p]))
                self._last[p] = log

    @property
    def like(self) -> float:
        """The smallest difference of logarithms that exceeds the usual variation."""
        if len(self._differences) < _FEW:
            return LIKE
        return max(LIKE, _SURE * quantiles(self._differences, n=10)[-1] / (_NORMAL_P90 * math.sqrt(2)))


@dataclass
class Lasting:
    """Tracks for how long differences have lasted, by subject. ``patience`` is that of the policy."""

    patience: float = 1.0
    _since: dict[Hashable, list[float]] = field(default_factory=dict)

    def exceeds(
        self, key: Hashable, difference: float, like: float, *, steps: int, seconds: float, borne_out: bool
    ) -> bool:
        """Whether ``difference`` has been larger than ``like``, the usual variation, for long enough; see
        :meth:`holds`. One larger than :data:`asa.scheduler.costs.LIKE` counts if it lasts much longer: then it is no
        part of the variation."""
        long = self.holds(
            ("long", key), differs=difference > LIKE, steps=steps, seconds=seconds, borne_out=False, times=_LONG
        )
        return self.holds(key, differs=difference > like, steps=steps, seconds=seconds, borne_out=borne_out) or long

    def holds(
        self, key: Hashable, *, differs: bool, steps: int, seconds: float, borne_out: bool, times: int = 1
    ) -> bool:
        """Whether ``key`` has differed for long enough, after another window of ``steps`` steps and ``seconds``
        seconds. ``borne_out``: other evidence confirms it. ``times``: factor on the usual duration."""
        if not differs:
            self._since.pop(key, None)
            return False
        since = self._since.setdefault(key, [-1.0, -float(steps), -seconds])
        for i, more in enumerate((1.0, float(steps), seconds)):
            since[i] += more
        lasts = all(a >= times * self.patience * b for a, b in zip(since, (_LOOKS, _STEPS, _SECONDS), strict=True))
        if borne_out or lasts:
            del self._since[key]
            return True
        return False
