"""Step times by the host's clock on a CPU, and by events on a CUDA device."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch

from asa.sharding.collectives.waits import Held, held_by, waits


class StepTimes(NamedTuple):
    """Seconds of one step on this rank: waiting for data (``data``), then computing and communicating (``work``). The
    others are the parts of ``work`` that :class:`asa.sharding.collectives.waits.Held` records."""

    data: float
    work: float
    blocked: float = 0.0
    late: float = 0.0
    unsplit: float = 0.0

    @property
    def possible(self) -> bool:
        """Whether the two times are such as a step can take: neither negative nor infinite, and numbers."""
        return 0 <= self.data < math.inf and 0 <= self.work < math.inf


class StepClock:
    """Measures seconds per step: waiting for data, then computing and communicating. Timing never synchronizes a step.

    On CUDA it records events in the stream. They are read in :meth:`collect`, the only method that synchronizes.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[object] = []
        self._steps: list[tuple[object, object, object, Any]] = []

    def mark(self) -> None:
        """Record a time. Call this three times per step: at its start, when its data has arrived, and at its end."""
        self._marks.append(time_mark(self._cuda))
        if len(self._marks) == 1:
            waits.take()  # discard waiting between steps
        elif len(self._marks) == 3:
            start, ready, end = self._marks
            self._steps.append((start, ready, end, waits.take()))
            self._marks = []

    def collect(self) -> list[StepTimes]:
        """Times of all steps since the last call."""
        if self._cuda and self._steps:
            torch.cuda.synchronize()
        times = [
            StepTimes(
                seconds_between(s, r), seconds_between(r, e), *(waited if isinstance(waited, Held) else held_by(waited))
            )
            for s, r, e, waited in self._steps
        ]
        self._steps = []
        return times


def time_mark(cuda: bool) -> object:
    """The current time, for :func:`seconds_between`: a recorded event with ``cuda``, otherwise seconds of the host's
    clock."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: object, second: object) -> float:
    """Seconds from one :func:`time_mark` to another. Events must have been reached."""
    if isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event):
        return float(first.elapsed_time(second)) / 1e3
    assert isinstance(first, float)
    assert isinstance(second, float)
    return second - first
