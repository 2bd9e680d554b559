"""Heartbeats: every rank counts the points it passes, in memory shared with the process that started it.

If no rank waits for a hanging one (a single rank, or all ranks hang), no collective times out. The process that started
the ranks therefore watches the counters, and knows which rank has had no heartbeat for the longest time.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import BaseContext
from typing import Any

_SLACK_S = 1.5
"""Seconds beyond the timeout: ranks that wait for a hanging one give up first, and report more."""
_LONGEST = 3.0
"""A rank may be silent for this multiple of its longest silence so far, because a step may be longer than the
timeout."""


NOT_BEGUN = 2**64 - 1
"""Number of the step of a rank that has not begun one."""


class _Own:
    counters: Any = None
    steps: Any = None
    rank = 0


def shared_counters(context: BaseContext, num_ranks: int) -> Any:
    """One counter per rank, initially 0, shared by this process and those that ``context`` starts."""
    return context.RawArray(ctypes.c_uint64, num_ranks)


def count_in(counters: Any, rank: int, steps: Any = None) -> None:
    """Let :func:`beat` count as ``rank`` in ``counters`` from now on, and :func:`at_step` write to ``steps``, unless
    None."""
    _Own.counters, _Own.steps, _Own.rank = counters, steps, rank


def beat() -> None:
    """Record that this rank is alive and has made progress."""
    if _Own.counters is not None:
        _Own.counters[_Own.rank] += 1


def at_step(step: int) -> None:
    """Record that this rank begins ``step``."""
    if _Own.steps is not None:
        _Own.steps[_Own.rank] = step


class Watch:
    """Measures the silence of each rank, in seconds during which this process itself was running: time in which it was
    stopped (Ctrl-Z, a laptop that sleeps) does not count. A rank is watched from its first heartbeat on. ``together``:
    silence counts only while all ranks are silent."""

    def __init__(
        self,
        counters: Sequence[int],
        timeout_s: float,
        *,
        together: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters, self._timeout_s, self._together, self._clock = counters, timeout_s, together, clock
        self.interval_s = min(1.0, max(0.05, timeout_s / 20))
        self._counts = list(counters)
        self._silent_s = [0.0] * len(self._counts)
        self._longest_s = [0.0] * len(self._counts)
        self._looked = clock()

    def late(self, ranks: Sequence[int]) -> tuple[int, float] | None:
        """The one of ``ranks`` that has been silent longest, and for how many seconds; None if that is not too long."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, 2 * self.interval_s), now
        for rank, count in enumerate(self._counters):
            if count != self._counts[rank]:
                if self._counts[rank]:
                    self._longest_s[rank] = max(self._longest_s[rank], self._silent_s[rank])
                self._counts[rank], self._silent_s[rank] = count, 0.0
            elif count:
                self._silent_s[rank] += passed
        longest = max(ranks, key=lambda rank: self._silent_s[rank], default=None)
        if longest is None or self._silent_s[longest] <= self._allowed_s(longest):
            return None
        if self._together and any(self._silent_s[rank] <= self._timeout_s for rank in ranks):
            return None
        return longest, self._silent_s[longest]

    def _allowed_s(self, rank: int) -> float:
        return max(self._timeout_s + _SLACK_S, _LONGEST * self._longest_s[rank])
