"""Times of each rank over many steps: its computation, its waiting for later ranks, and the speed of transfers."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean, median

from asa.executor.training.clock import StepTimes
from asa.ir.measurements import RankTiming, Transfer
from asa.ir.traffic import COLLECTIVE_OPS
from asa.sharding.collectives.waits import Kind

_KINDS = 6
"""Number of kinds of transfers that a rank reports per line of the log: those that took most of its time."""
_PER_KIND = 6
TRANSFER_FIGURES = _KINDS * _PER_KIND
"""Number of values that :func:`packed` returns."""

_MOST_STEPS = 1024
"""Number of newest steps whose times are kept for each rank."""


def packed(transfers: Sequence[tuple[Kind, float, int]]) -> list[float]:
    """The first kinds of transfers, with seconds and count, as a list of numbers. Its length is fixed, as a gather
    requires."""
    flat: list[float] = []
    for kind, seconds, n in transfers[:_KINDS]:
        flat += [COLLECTIVE_OPS.index(kind.op), kind.level, kind.group_size, kind.num_bytes, seconds, n]
    return flat + [0.0] * (TRANSFER_FIGURES - len(flat))


def _unpacked(figures: Sequence[float]) -> list[tuple[Kind, float, int]]:
    transfers = []
    for i in range(0, TRANSFER_FIGURES, _PER_KIND):
        op, level, size, num_bytes, seconds, n = figures[i : i + _PER_KIND]
        if n:
            transfers.append((Kind(COLLECTIVE_OPS[int(op)], int(level), int(size), int(num_bytes)), seconds, int(n)))
    return transfers


@dataclass
class RankTimes:
    """Times of every process of a run, step by step, under one plan. ``processes`` are those that run its ranks."""

    processes: tuple[int, ...]
    _steps: deque[list[StepTimes]] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))
    _cold: list[StepTimes] | None = None
    _transfers: dict[Kind, list[tuple[float, int]]] = field(default_factory=dict)
    _stolen: list[list[float]] = field(default_factory=list)
    _cores: Sequence[float] = ()

    def step(self, times: list[StepTimes], *, counts: bool = True) -> None:
        """Add one step's times, by process. A step that does not count is used only while there is no step that
        does."""
        if counts:
            self._steps.append(times)
        else:
            self._cold = times

    @property
    def _counted_steps(self) -> Sequence[list[StepTimes]]:
        return self._steps or ([] if self._cold is None else [self._cold])

    def interval(
        self, transfers: Sequence[Sequence[float]], stolen: list[float], cores: Sequence[float] = ()
    ) -> None:  # fmt: skip
        """Add the values of every process since the last call: its :func:`packed` transfers; the fraction of time in
        which other programs had its core (negative if unknown); and its :func:`pinned_core`."""
        self._stolen.append(stolen)
        self._cores = cores
        by_kind: dict[Kind, list[tuple[float, int]]] = {}
        for figures in transfers:
            for kind, seconds, n in _unpacked(figures):
                by_kind.setdefault(kind, []).append((seconds, n))
        for kind, every in by_kind.items():
            # A rank may be unable to tell a transfer from waiting for a later rank; the last to arrive waited for none.
            self._transfers.setdefault(kind, []).append((min(s for s, _ in every), max(n for _, n in every)))

    def timings(self) -> tuple[RankTiming, ...]:
        """Medians over the steps, by process; zeros for an idle process; times that cannot be, as they were reported.
        Empty without steps."""
        steps = self._counted_steps
        if not steps:
            return ()
        waiting = [self._waiting(step) for step in steps]
        medians = []
        for process in range(len(steps[0])):
            core = int(self._cores[process]) if self._cores and self._cores[process] >= 0 else None
            if process not in self.processes:
                medians.append(RankTiming(own_s=0.0, waiting_s=0.0, data_wait_s=0.0, core=core))
                continue
            step_times = [step[process] for step in steps]
            computing = [max(0.0, t.work - t.blocked) for t in step_times]
            wrong = next((t for t in step_times if not t.possible), None)  # shown, not hidden in a median
            shares = [interval[process] for interval in self._stolen if interval[process] >= 0]
            medians.append(
                RankTiming(
                    own_s=median(computing) if wrong is None else wrong.work,
                    mean_own_s=fmean(computing) if wrong is None else None,
                    waiting_s=median(each[process] for each in waiting),
                    data_wait_s=median(t.data for t in step_times) if wrong is None else wrong.data,
                    stolen_share=sum(shares) / len(shares) if shares else None,
                    core=core,
                )
            )
        return tuple(medians)

    def _waiting(self, step: list[StepTimes]) -> list[float]:
        """Seconds for which each process waited for a later one, in one step."""
        nobody = min(step[p].unsplit for p in self.processes)
        return [t.late + max(0.0, t.unsplit - nobody) for t in step]

    def communication_s(self) -> float | None:
        """Median of the seconds that communication adds to a step. None for one rank alone, or without steps.

        In each step it is the blocked time of the rank with the longest computation, less its waiting for others.
        """
        if len(self.processes) < 2 or not self._counted_steps:
            return None
        seconds = []
        for step in self._counted_steps:
            last = max(self.processes, key=lambda p: step[p].work - step[p].blocked)
            seconds.append(max(0.0, step[last].blocked - self._waiting(step)[last]))
        return median(seconds)

    def transfers(self) -> tuple[Transfer, ...]:
        """Median time of every kind of transfer, weighted by how often it occurred."""
        medians = []
        for kind, every in sorted(self._transfers.items()):
            n = sum(count for _, count in every)
            medians.append(
                Transfer(
                    op=kind.op, level=kind.level, group_size=kind.group_size, num_bytes=float(kind.num_bytes),
                    seconds=_middle(every, n), n=n,
                )
            )  # fmt: skip
        return tuple(medians)


def _middle(every: Sequence[tuple[float, int]], n: int) -> float:
    """Weighted median of (value, count) pairs; ``n`` is the sum of counts."""
    ordered = sorted(every)
    reached = list(accumulate(count for _, count in ordered))
    return ordered[bisect_left(reached, n / 2)][0]


_MOST_CORES = 1 << 16


def pinned_core(rank: int) -> int:
    """The only core that this thread of process ``rank`` may use, numbered over all hosts. It is -1 if the thread may
    use several, or if the system does not report it."""
    if not hasattr(os, "sched_getaffinity"):
        return -1
    cores = os.sched_getaffinity(0)
    host = rank // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1 << 30))
    return host * _MOST_CORES + min(cores) if len(cores) == 1 else -1


class Stolen:
    """Fraction of time in which this thread was ready to run while other threads had its core, as reported by the
    kernel's scheduler."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1
        self._last = self._read()

    def _read(self) -> tuple[float, float] | None:
        if self._file < 0:
            return None
        try:
            return time.perf_counter(), int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return None

    def share(self) -> float:
        """Fraction of the time since the last call, 0 to 1; -1 if the system does not report it."""
        before, self._last = self._last, self._read()
        if before is None or self._last is None:
            return -1.0
        return min(1.0, max(0.0, (self._last[1] - before[1]) / max(1e-9, self._last[0] - before[0])))

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
