"""The device of a rank, and how busy devices are: by NVML for GPUs, by the processor time of a rank for CPUs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from asa.instruments.nvml import Card, watching


def device_of_rank(kind: str, local_rank: int) -> torch.device:
    """A rank's device on its machine: the GPU of its number for ``cuda``, else the processor."""
    return torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")


@dataclass
class Usage:
    """What a device did from the beginning to the end of :func:`watched`.

    ``busy``: the share of time, 0 to 1, in which it computed; None where nobody tells. ``energy_j`` in joules,
    ``clock_mhz`` of its processors, ``throttled`` the bits of what held them back at some time
    (:func:`asa.instruments.nvml.reasons`): all of GPUs alone.
    """

    seconds: float = 0.0
    busy: float | None = None
    energy_j: float | None = None
    clock_mhz: float | None = None
    throttled: int = 0


@contextmanager
def watched(card: Card | None = None) -> Iterator[Usage]:
    """Fills in a :class:`Usage` until the end of the block: of that GPU, or of this process where None."""
    usage = Usage()
    began, processor = time.monotonic(), time.process_time()
    with watching(card) as looks:
        try:
            yield usage
        finally:
            usage.seconds = time.monotonic() - began
            if card is None:
                usage.busy = min(1.0, (time.process_time() - processor) / max(usage.seconds, 1e-9))
    if card is not None:
        clocks = [r.clock_mhz for r in looks.readings if r.clock_mhz is not None]
        usage.busy, usage.energy_j = looks.utilisation, looks.energy_j
        usage.clock_mhz = statistics.median(clocks) if clocks else None
        for reading in looks.readings:
            usage.throttled |= reading.held_by
