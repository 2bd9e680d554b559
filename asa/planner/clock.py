"""The clock of the search. It counts seconds of work, so that a busy machine gets the same answer, only later.

It counts the processor time of the thread that searches, not wall time, of which other programs take their share. Where
next to nothing is left of a processor somebody still waits for the answer, so a wall second counts for a part of a
second at least.
"""

from __future__ import annotations

import os
import threading
import time

PATIENCE = 4
"""Seconds on the wall for a second of work, at most."""


class _WorkClock:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.forget()

    def advance(self) -> float:
        """Add the work since the last call."""
        thread, worked, wall = self._thread, self._worked, self._wall
        self.forget()
        own = self._worked - worked if thread == self._thread else 0.0
        self.seconds += max(own, (self._wall - wall) / PATIENCE)
        return self.seconds

    def forget(self) -> None:
        """Count from here on: in a copy of the process and in another thread, processor time begins anew."""
        self._thread = threading.get_ident()
        self._worked, self._wall = time.thread_time(), time.monotonic()


_CLOCK = _WorkClock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_CLOCK.advance, after_in_child=_CLOCK.forget)


_COSTS = {
    "way": 1e-5, "menu": 3e-5, "stage": 1.5e-4, "action": 3e-6, "entry": 1.2e-8, "component": 3e-5, "plan": 2.5e-5,
    "pricer": 2e-3,
}  # fmt: skip
"""About how many seconds each thing that is counted takes."""
_counted = 0.0


def count(what: str, times: float = 1) -> None:
    """Note that something was done so many times."""
    global _counted
    _counted += times * _COSTS[what]


def counted() -> float:
    """Seconds of what was counted: the same in every run."""
    return _counted


def now() -> float:
    """Seconds of work, counted from some moment in the past. They go on in a copy of the process."""
    return _CLOCK.advance()
