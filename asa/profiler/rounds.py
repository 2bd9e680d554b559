"""Measurements on several ranks at once: agreed numbers, common start, time of the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from asa.profiler.clock import Clock

_SAMPLE_S = 2e-3
"""Seconds of the shortest sample. Shorter operations are repeated inside one sample, because ranks leave a barrier up
to 0.1 ms apart."""
_MOST_INNER = 20
_MOST_SAMPLES = 75
LEAST_SAMPLES = 3


def agree(*values: float, group: dist.ProcessGroup | None = None) -> list[float]:
    """Maximum of each value over ``group``, on all its ranks. Also a barrier (on the host, never on a device)."""
    tensor = torch.tensor(values or (0.0,), dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return [float(v) for v in tensor]


def slowest(samples: Sequence[float], group: dist.ProcessGroup | None = None) -> float:
    """Median over samples of the slowest rank's time. Every rank passes the same number of samples."""
    return median(agree(*samples, group=group))


def time_together(
    work: Callable[[], object], clock: Clock, *, slice_s: float, group: dist.ProcessGroup | None = None
) -> float:
    """Seconds of ``work()`` on the slowest rank, when all ranks of ``group`` run it at once.

    The number of repeats follows from a first estimate on which all ranks agree, so that all run the same number.
    """
    guess = float("inf")
    for _ in range(2):  # the first call connects, allocates and pages in
        agree(group=group)
        started = time.perf_counter()
        work()
        clock.synchronize()
        guess = min(guess, agree(time.perf_counter() - started, group=group)[0])
    inner = max(1, min(_MOST_INNER, int(_SAMPLE_S / max(guess, 1e-7))))
    count = max(LEAST_SAMPLES, min(_MOST_SAMPLES, int(slice_s / max(guess * inner, 1e-7))))
    samples = []
    for _ in range(count):
        agree(group=group)
        samples.append(clock.timed(work, inner))
    return slowest(samples, group)
