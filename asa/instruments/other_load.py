"""Number of cores that other processes keep busy during a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


class OthersCores:
    """``cores``: mean number of cores that other processes kept busy; None before the end of :func:`watching`."""

    cores: float | None = None


@contextmanager
def watching() -> Iterator[OthersCores]:
    """Context that measures until its end. Time of this process, and of its children that have ended, is not
    counted."""
    usage = OthersCores()
    busy, own_s, began = _busy_s(), _own_s(), time.monotonic()
    yield usage
    seconds = time.monotonic() - began
    if seconds > 0:
        usage.cores = max(0.0, (_busy_s() - busy) - (_own_s() - own_s)) / seconds


def _busy_s() -> float:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # On Linux, time of guests is within that of user and nice.
    return float(sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
