"""How busy devices are while something runs on them: by NVML for GPUs, by the processor time of a rank for CPUs.

Nothing here ever changes a setting of a device.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

EVERY_S = 0.05
"""Between two looks at a GPU; NVML's own figure is a mean over a sixth of a second or more."""

REASONS = (
    (0x0000000000000004, "power cap"),
    (0x0000000000000008, "hardware slowdown"),
    (0x0000000000000020, "software thermal slowdown"),
    (0x0000000000000040, "hardware thermal slowdown"),
    (0x0000000000000080, "power brake"),
)
"""Bits of NVML's reasons for a clock below what is possible; an idle device and a clock that was set are not here."""


@dataclass
class Usage:
    """What a device did from the beginning to the end of :func:`watched`.

    ``busy``: the share of time, 0 to 1, in which it computed; None where nobody tells. ``energy_j`` in joules,
    ``clock_mhz`` and ``most_clock_mhz`` of its processors, ``throttled`` the bits of :data:`REASONS` that were set:
    all of GPUs alone.
    """

    seconds: float = 0.0
    busy: float | None = None
    energy_j: float | None = None
    clock_mhz: float | None = None
    most_clock_mhz: float | None = None
    throttled: int = 0


def reasons(bits: int) -> tuple[str, ...]:
    """``bits`` in words."""
    return tuple(name for bit, name in REASONS if bits & bit)


@contextmanager
def watched(uuid: str | None = None) -> Iterator[Usage]:
    """Fills in a :class:`Usage` until the end of the block: of the GPU of that ``uuid``, of this process where None."""
    usage = Usage()
    began, processor = time.monotonic(), time.process_time()
    looks = None if uuid is None else _Looks.at(uuid)
    try:
        yield usage
    finally:
        usage.seconds = time.monotonic() - began
        if uuid is None:
            usage.busy = min(1.0, (time.process_time() - processor) / max(usage.seconds, 1e-9))
        if looks is not None:
            looks.end(usage)


@dataclass
class _Looks:
    """A thread that looks at one GPU now and then."""

    nvml: Any
    handle: Any
    energy_mj: float | None
    utilisation: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    throttled: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    @classmethod
    def at(cls, uuid: str) -> _Looks | None:
        """Begins to look; None where NVML or the device is not there."""
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:  # no driver, another vendor's device, a container without the library
            return None
        found = cls(pynvml, handle, _told(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle))
        found.thread = threading.Thread(target=found._look, daemon=True)
        found.thread.start()
        return found

    def _look(self) -> None:
        while True:
            rates = _told(self.nvml.nvmlDeviceGetUtilizationRates, self.handle)
            if rates is not None:
                self.utilisation.append(float(rates.gpu) / 100)
            clock = _told(self.nvml.nvmlDeviceGetClockInfo, self.handle, self.nvml.NVML_CLOCK_SM)
            if clock is not None:
                self.clocks.append(float(clock))
            self.throttled |= int(_told(self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons, self.handle) or 0)
            if self.done.wait(EVERY_S):
                return

    def end(self, usage: Usage) -> None:
        """Stops looking, and writes down what was seen."""
        self.done.set()
        if self.thread is not None:
            self.thread.join()
        energy = _told(self.nvml.nvmlDeviceGetTotalEnergyConsumption, self.handle)
        if energy is not None and self.energy_mj is not None:
            usage.energy_j = (energy - self.energy_mj) / 1e3
        usage.busy = statistics.mean(self.utilisation) if self.utilisation else None
        usage.clock_mhz = statistics.median(self.clocks) if self.clocks else None
        usage.most_clock_mhz = _told(self.nvml.nvmlDeviceGetMaxClockInfo, self.handle, self.nvml.NVML_CLOCK_SM)
        usage.throttled = sum(bit for bit, _ in REASONS if self.throttled & bit)
        _told(self.nvml.nvmlShutdown)


def _told(ask: Any, *about: Any) -> Any:
    """What NVML answers; None where this device does not."""
    try:
        return ask(*about)
    except Exception:  # pynvml raises one class per error code
        return None
