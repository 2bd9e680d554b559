"""The clock of the search. It counts seconds of work, so that a busy machine gives the same answer, only later.

It counts the processor time of the searching thread, not wall time, which other programs share. On a machine that is so
busy that a search gets hardly any processor time, a wall second counts at least ``1 / PATIENCE`` seconds of work.
"""

from __future__ import annotations

import os
import threading
import time

PATIENCE = 4
"""Most wall seconds per second of work."""


class _WorkClock:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.forget()

    def advance(self) -> float:
        """Add the work since the last call, and return all seconds so far."""
        thread, worked, wall = self._thread, self._worked, self._wall
        self.forget()
        own = self._worked - worked if thread == self._thread else 0.0
        self.seconds += max(own, (self._wall - wall) / PATIENCE)
        return self.seconds

    def forget(self) -> None:
        """Count from now on. A forked process and another thread have a processor time of their own."""
        self._thread = threading.get_ident()
        self._worked, self._wall = time.thread_time(), time.monotonic()


_CLOCK = _WorkClock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_CLOCK.advance, after_in_child=_CLOCK.forget)


_COSTS = {
    "way": 1e-5, "menu": 3e-5, "stage": 1.5e-4, "action": 1e-6, "entry": 1.2e-8, "component": 3e-5, "plan": 2.5e-5,
    "pricer": 2e-3,
}  # fmt: skip
"""Approximate seconds of each operation that is counted."""
_counted = 0.0


def count(what: str, times: float = 1) -> None:
    """Record that an operation was done ``times`` times; ``what`` is a key of ``_COSTS``."""
    global _counted
    _counted += times * _COSTS[what]


def counted() -> float:
    """Approximate seconds of all counted operations, which are the same in every run."""
    return _counted


def now() -> float:
    """Seconds of work since this process began. A forked process continues from its parent's value."""
    return _CLOCK.advance()
