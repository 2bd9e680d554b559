"""State of GPUs from NVIDIA's management library (NVML). Only queries: no setting of a card is changed.

Without a driver or the library, nothing is reported (``asa doctor`` says which of them is missing).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_REASONS = {0x04: "the power limit", 0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "the power brake"}
"""Bits of nvmlClocksEventReasons that mean reduced clocks under load."""
_USUAL = {"the power limit"}
"""Reasons that are normal for a card in good order, in training as in a profile."""
_OFTEN = 0.1
"""Fraction of the readings from which on a reason counts."""
_EVERY_S = 0.25
_SM_CLOCK = 1
"""NVML_CLOCK_SM."""
_MOST_LINKS = 18
_PATHS = {0: "one board", 10: "one PCIe switch", 20: "PCIe switches", 30: "the host bridge", 40: "one NUMA node"}
"""Names of NVML's levels that connect two GPUs (nvmlGpuTopologyLevel_t); any other level is the link between CPU
sockets."""


@contextmanager
def opened() -> Iterator[Any]:
    """Context with ``pynvml`` initialized; None without a driver or the library."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # any reason for which NVML does not start
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def query(n: Any, default: Any, ask: str, *about: Any) -> Any:
    """Result of NVML's function ``ask``; ``default`` if the GPU, or this version of NVML, does not support it."""
    try:
        return getattr(n, ask)(*about)
    except (n.NVMLError, AttributeError):
        return default


def handles(n: Any) -> list[Any]:
    """Handles of all GPUs of this machine, whether this process may use them or not."""
    return [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def names(count: int) -> list[str]:
    """Names of the first ``count`` GPUs visible to this process, without starting CUDA; empty without NVML."""
    with opened() as n:
        if n is None:
            return []
        every = handles(n)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            chosen = [_named(n, every, name.strip()) for name in visible.split(",")]
            every = [h for h in chosen if h is not None]
        return [_text(query(n, "a GPU", "nvmlDeviceGetName", h)) for h in every[:count]]


def _named(n: Any, every: Sequence[Any], name: str) -> Any:
    """Handle of the GPU, or part of one, that an entry of ``CUDA_VISIBLE_DEVICES`` names; None if unknown."""
    if name.isdecimal():
        return every[int(name)] if int(name) < len(every) else None
    return query(n, None, "nvmlDeviceGetHandleByUUID", name.encode())


def joined(n: Any, every: Sequence[Any]) -> dict[str, int]:
    """Number of pairs of GPUs by their connection: NVLink, or the PCIe level that connects them."""
    counts: Counter[str] = Counter()
    for a, b in combinations(every, 2):
        nvlink = query(n, None, "nvmlDeviceGetP2PStatus", a, b, n.NVML_P2P_CAPS_INDEX_NVLINK) == 0
        level = query(n, None, "nvmlDeviceGetTopologyCommonAncestor", a, b)
        counts["NVLink" if nvlink else "unknown" if level is None else _PATHS.get(level, "several NUMA nodes")] += 1
    return dict(counts)


def links(n: Any, gpu: Any) -> int:
    """Number of a GPU's NVLink links that are up."""
    return sum(query(n, 0, "nvmlDeviceGetNvLinkState", gpu, link) == 1 for link in range(_MOST_LINKS))


def topology() -> str:
    """Description of the connections between this machine's GPUs; empty with fewer than two, or without NVML."""
    with opened() as n:
        every = [] if n is None else handles(n)
        pairs = joined(n, every)
        counts = sorted({links(n, h) for h in every} - {0})
    if not pairs:
        return ""
    listing = ", ".join(f"{count} over {where}" for where, count in sorted(pairs.items()))
    each = f" ({' or '.join(map(str, counts))} links each)" if counts else ""
    return f"pairs of GPUs: {listing}{each}"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """State of a card at one moment. ``held_by``: bits of the reasons for reduced clocks; ``others``: number of other
    processes on it; ``energy_j``: joules since the driver was loaded."""

    clock_mhz: int | None
    most_mhz: int | None
    utilisation: float | None
    energy_j: float | None
    held_by: int
    others: int

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons for reduced clocks, in words."""
        return reasons(self.held_by)


def reasons(held_by: int) -> tuple[str, ...]:
    """Reasons for reduced clocks, in words, from those of NVML's bits that mean a reduction under load."""
    return tuple(dict.fromkeys(name for bit, name in _REASONS.items() if held_by & bit))


class Card:
    """One GPU, by its identifier: ``GPU-...`` or ``MIG-...``."""

    def __init__(self, n: Any, handle: Any) -> None:
        self._n, self._handle = n, handle
        # Clocks are those of the whole card; energy is not counted for a part of one.
        self._clocked = query(n, handle, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)

    def read(self) -> Reading:
        """Current state of the card."""
        n, gpu, whole = self._n, self._handle, self._clocked
        rates = query(n, None, "nvmlDeviceGetUtilizationRates", gpu)
        energy = query(n, None, "nvmlDeviceGetTotalEnergyConsumption", gpu)
        bits = query(n, None, "nvmlDeviceGetCurrentClocksEventReasons", whole)
        if bits is None:  # the name in drivers before 535
            bits = query(n, 0, "nvmlDeviceGetCurrentClocksThrottleReasons", whole)
        pids = {p.pid for p in query(n, (), "nvmlDeviceGetComputeRunningProcesses", gpu)}
        # In a container NVML reports process numbers of the host: one of the unknown ones is this process.
        others = len(pids - {os.getpid()}) if os.getpid() in pids or not _in_container() else max(0, len(pids) - 1)
        return Reading(
            clock_mhz=query(n, None, "nvmlDeviceGetClockInfo", whole, _SM_CLOCK),
            most_mhz=query(n, None, "nvmlDeviceGetMaxClockInfo", whole, _SM_CLOCK),
            utilisation=None if rates is None else rates.gpu / 100,
            energy_j=None if energy is None else energy / 1e3,
            held_by=bits & sum(_REASONS),
            others=others,
        )


def _in_container() -> bool:
    """Whether this process has another process number outside its container."""
    try:
        with open("/proc/self/status") as status:
            numbers = next((line.split()[1:] for line in status if line.startswith("NSpid:")), [])
            return len(numbers) > 1 or os.path.exists("/.dockerenv")
    except OSError:
        return False


def card_of(device: torch.device) -> Card | None:
    """The card of a CUDA ``device``; None for other devices, and without NVML.

    Starts CUDA, and keeps NVML open for the rest of the process.
    """
    if device.type != "cuda":
        return None
    import torch

    uuid = torch.cuda.get_device_properties(device).uuid  # without saying of which kind the device is
    return card(f"GPU-{uuid}") or card(f"MIG-{uuid}")


def card(uuid: str) -> Card | None:
    """The card with the identifier ``uuid``; None without NVML, or if it is unknown. NVML stays open."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return Card(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()))
    except Exception:  # no library, no driver, or an unknown device
        return None


class Meter:
    """Energy and state of a card between two calls; reports nothing if there is no card."""

    def __init__(self, card: Card | None) -> None:
        self._card = card
        self._last = None if card is None else card.read()
        self._rates: list[float] = []

    @property
    def utilisation(self) -> float | None:
        """Mean utilization, 0 to 1, over the calls so far; None if unknown."""
        return sum(self._rates) / len(self._rates) if self._rates else None

    def joules(self) -> float | None:
        """Joules since the previous call of any method; None if the card does not count energy."""
        if self._card is None or self._last is None:
            return None
        before, self._last = self._last.energy_j, self._card.read()
        self._rates += [] if self._last.utilisation is None else [self._last.utilisation]
        return None if before is None or self._last.energy_j is None else self._last.energy_j - before

    def line(self, seconds: float) -> dict[str, Any]:
        """Log entry for the ``seconds`` since the last call: ``gpu`` with what is known of utilization (0 to 1,
        current), clock, power, and reasons for reduced clocks; empty if nothing is known."""
        joules = self.joules()
        if self._last is None:
            return {}
        values = {
            "utilisation": self._last.utilisation,
            "clock_mhz": self._last.clock_mhz,
            "watts": None if joules is None or seconds <= 0 else joules / seconds,
            "held_back": list(self._last.reasons) or None,
            "others": self._last.others or None,
        }
        return {"gpu": {name: value for name, value in values.items() if value is not None}}


@dataclass
class Watched:
    """Readings of a card over a period of time."""

    readings: list[Reading] = field(default_factory=list)

    @property
    def held_back(self) -> tuple[str, ...]:
        """Reasons for reduced clocks that appear in a large part of the readings."""
        counts = Counter(reason for r in self.readings for reason in r.reasons)
        return tuple(reason for reason, count in counts.items() if count >= _OFTEN * len(self.readings))

    @property
    def others(self) -> int:
        """Number of other processes on the card; 0 if they are in few of the readings only."""
        often = sum(r.others > 0 for r in self.readings) >= max(1.0, _OFTEN * len(self.readings))
        return max((r.others for r in self.readings), default=0) if often else 0

    @property
    def disturbed(self) -> str:
        """Why measurements in this period are not representative of the card, in words; empty if they are."""
        causes = []
        if slowed := [r for r in self.held_back if r not in _USUAL]:
            causes.append(f"the GPU's clocks were held back by {' and '.join(slowed)}")
        if self.others:
            causes.append(f"{self.others} other process{'es were' if self.others > 1 else ' was'} on the GPU")
        return ", and ".join(causes)

    @property
    def clocks(self) -> str:
        """Median clock and largest clock, in words; empty if unknown."""
        clocks = [r.clock_mhz for r in self.readings if r.clock_mhz is not None]
        most = next((r.most_mhz for r in self.readings if r.most_mhz is not None), None)
        if not clocks or most is None:
            return ""
        usual = [r for r in self.held_back if r in _USUAL]
        return f"GPU clock {median(clocks):.0f} of {most} MHz" + (f" (held by {usual[0]})" if usual else "")

    @property
    def energy_j(self) -> float | None:
        """Joules between the first and the last reading; None if the card does not count energy."""
        counted = [r.energy_j for r in self.readings if r.energy_j is not None]
        return counted[-1] - counted[0] if len(counted) > 1 else None

    @property
    def utilisation(self) -> float | None:
        """Mean fraction of time in which a kernel ran, 0 to 1; None if unknown."""
        rates = [r.utilisation for r in self.readings if r.utilisation is not None]
        return sum(rates) / len(rates) if rates else None


@contextmanager
def watching(card: Card | None) -> Iterator[Watched]:
    """Context that reads ``card`` a few times a second in a thread; no readings if None."""
    watched = Watched()
    if card is None:
        yield watched
        return
    over = threading.Event()

    def look() -> None:
        while not over.wait(_EVERY_S):
            watched.readings.append(card.read())

    watched.readings.append(card.read())
    thread = threading.Thread(target=look, name="asa-nvml", daemon=True)
    thread.start()
    try:
        yield watched
    finally:
        over.set()
        thread.join()
        watched.readings.append(card.read())
