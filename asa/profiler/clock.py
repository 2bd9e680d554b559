"""Clocks with one interface for the host and for CUDA events, and the number of repeats of a measurement.

A clock sets *marks* (time stamps) on the timeline of its device and afterwards reads the seconds between consecutive
marks. On the host a mark is a reading of ``perf_counter_ns``, or of the thread's processor time if other processes must
not count. On CUDA it is an event in the current stream. The interval between two events contains the kernels between
them *and* the time for which the device waits for the host to launch them; a training step takes both. The host's clock
is recorded as well, and shows which of the two dominates.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from asa.ir.profile import Stat

_JUDGED = 5
_TOLERANCE = 0.01


class Clock(ABC):
    """Sets marks on the timeline of one device."""

    @abstractmethod
    def mark(self) -> Any:
        """Set a mark after all work issued so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all issued work is done."""

    @abstractmethod
    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Device seconds between consecutive marks (one fewer than ``marks``); waits for the last one."""

    @abstractmethod
    def host_seconds(self, marks: Sequence[Any]) -> list[float]:
        """Host seconds between the calls that set consecutive marks."""

    def timed(self, work: Callable[[], object], times: int = 1) -> float:
        """Device seconds of ``work()``: the mean of ``times`` calls in a row, after all earlier work is done."""
        self.synchronize()
        start = self.mark()
        for _ in range(times):
            work()
        return self.seconds([start, self.mark()])[0] / times


class HostClock(Clock):
    """Wall clock of a device whose operations are finished when they return."""

    def mark(self) -> int:
        """Nanoseconds of the host's monotonic clock."""
        return time.perf_counter_ns()

    def synchronize(self) -> None:
        """Do nothing, because no work is outstanding."""

    def seconds(self, marks: Sequence[int]) -> list[float]:
        """Seconds between consecutive marks."""
        return [(b - a) / 1e9 for a, b in pairwise(marks)]

    def host_seconds(self, marks: Sequence[int]) -> list[float]:
        """Seconds between consecutive marks; host and device are the same."""
        return self.seconds(marks)


class CoreClock(HostClock):
    """Processor time of this thread, including page faults. Time of other processes is not counted.

    It is for a thread that computes alone and never waits. On an idle machine it equals :class:`HostClock`. On a busy
    one it still shows the device's own speed.
    """

    def mark(self) -> int:
        """Nanoseconds of processor time of this thread."""
        return time.thread_time_ns()


class CudaClock(Clock):
    """Clock made of events in the current stream of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> tuple[torch.cuda.Event, int]:
        """An event recorded now, and the host's clock."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event, time.perf_counter_ns()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def seconds(self, marks: Sequence[tuple[torch.cuda.Event, int]]) -> list[float]:
        """Seconds between consecutive events on the device."""
        if marks:
            marks[-1][0].synchronize()
        return [a[0].elapsed_time(b[0]) / 1e3 for a, b in pairwise(marks)]

    def host_seconds(self, marks: Sequence[tuple[torch.cuda.Event, int]]) -> list[float]:
        """Seconds in which the host issued the work between consecutive marks."""
        return [(b[1] - a[1]) / 1e9 for a, b in pairwise(marks)]


def clock_of(device: torch.device) -> Clock:
    """A wall clock of ``device``, for work that may wait for other ranks."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


def solo_clock_of(device: torch.device) -> Clock:
    """A clock of ``device`` for work that one thread does alone."""
    return CudaClock(device) if device.type == "cuda" else CoreClock()


def relative_error(samples: Sequence[float]) -> float:
    """Standard error of the median divided by the median; infinite for fewer than three samples.

    The standard deviation of a normal distribution is (p90 - p10) / 2.563, and the standard error of the median is
    1.2533 times that of the mean. Percentiles make the estimate robust against one interrupted repeat in ten.
    """
    if len(samples) < 3:
        return float("inf")
    stat = Stat.of(samples)
    if stat.median == 0:
        return 0.0
    return 1.2533 * (stat.p90 - stat.p10) / 2.563 / len(samples) ** 0.5 / stat.median


def scaled(stat: Stat, factor: float) -> Stat:
    """``stat`` with every time multiplied by ``factor``."""
    return Stat(median=stat.median * factor, p10=stat.p10 * factor, p90=stat.p90 * factor, n=stat.n)


class Repeats:
    """Decides whether to measure another round: at least ``least`` rounds, then until the error is small, the time is
    over, or ``most`` rounds are done.

    The error is small if all medians are known to ``_TOLERANCE``. It is judged after at least ``_JUDGED`` samples.
    """

    def __init__(
        self,
        *,
        slice_s: float,
        least: int = 3,
        most: int = 30,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._now = now
        self._least, self._most = least, most
        self._last = now()
        self._end = self._last + slice_s

    def goes_on(self, series: Sequence[Sequence[float]]) -> bool:
        """Whether to measure another round. Call it before each round, with one sequence of samples per measured
        quantity."""
        now, rounds = self._now(), min((len(s) for s in series), default=self._most)
        cost, self._last = now - self._last, now
        if rounds < self._least:
            return True
        if rounds >= self._most or now + cost > self._end:
            return False
        return rounds < _JUDGED or any(relative_error(s) > _TOLERANCE for s in series)


@contextmanager
def quiet() -> Iterator[None]:
    """Context without garbage collection. A step leaves no reference cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Context that computes with one thread on a CPU, where a rank is one core."""
    before = torch.get_num_threads()
    if device.type == "cpu" and before != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def time_repeatedly(
    work: Callable[[], object],
    clock: Clock,
    *,
    slice_s: float,
    warmups: int = 1,
    most: int = 30,
) -> Stat:
    """Statistics of the device seconds of ``work()``, repeated until the spread is small or ``slice_s`` seconds are
    used."""
    for _ in range(warmups):
        work()
    samples: list[float] = []
    repeats = Repeats(slice_s=slice_s, most=most)
    with quiet():
        while repeats.goes_on([samples]):
            samples.append(clock.timed(work))
    return Stat.of(samples)
