"""The device of a rank, and how busy devices are: from NVML for GPUs, from a rank's processor time for CPUs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from asa.instruments.nvml import Card, watching


def device_of_rank(kind: str, local_rank: int) -> torch.device:
    """Device of a rank: for ``cuda``, the GPU with its local number; otherwise the CPU."""
    return torch.device("cuda", local_rank) if kind == "cuda" else torch.device("cpu")


class ProcessorUse:
    """Use of the cores by this process since it was made."""

    def __init__(self) -> None:
        self._began, self._processor = time.monotonic(), time.process_time()

    @property
    def busy(self) -> float:
        """Processor time over wall time and over the threads that torch computes with, 0 to 1."""
        available = (time.monotonic() - self._began) * torch.get_num_threads()
        return min(1.0, (time.process_time() - self._processor) / max(available, 1e-9))


@dataclass
class Usage:
    """Use of a device inside :func:`watched`.

    ``busy``: fraction of the time, 0 to 1, in which it computed; None if unknown. Only for GPUs: ``energy_j`` in
    joules, ``clock_mhz``, and ``throttled``, the bits of the reasons for reduced clocks
    (:func:`asa.instruments.nvml.reasons`).
    """

    seconds: float = 0.0
    busy: float | None = None
    energy_j: float | None = None
    clock_mhz: float | None = None
    throttled: int = 0


@contextmanager
def watched(card: Card | None = None) -> Iterator[Usage]:
    """Context that yields a :class:`Usage` and fills it at its end: for the GPU ``card``, or for this process if
    None."""
    usage = Usage()
    began, cores = time.monotonic(), ProcessorUse()
    with watching(card) as looks:
        try:
            yield usage
        finally:
            usage.seconds = time.monotonic() - began
            if card is None:
                usage.busy = cores.busy
    if card is not None:
        clocks = [r.clock_mhz for r in looks.readings if r.clock_mhz is not None]
        usage.busy, usage.energy_j = looks.utilisation, looks.energy_j
        usage.clock_mhz = statistics.median(clocks) if clocks else None
        for reading in looks.readings:
            usage.throttled |= reading.held_by
