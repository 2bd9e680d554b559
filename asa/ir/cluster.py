"""The devices and the links between them, as tables of measured times."""

from __future__ import annotations

from typing import Literal

from asa.errors import InvalidInputError
from asa.ir.codec import noun
from asa.ir.traffic import CollectiveOp
from asa.ir.units import MOST_AMOUNT, MOST_SECONDS

MOST_SLOWDOWN = 1e6

Status = Literal["measured", "measured-plateau-only", "derived", "rule", "measured-hearsay", "estimated"]
"""How a figure came about, from a benchmark on the machine down to a guess from its data sheet."""


@noun
class Device:
    """One kind of device. Peaks are per second at dense arithmetic; zero where unknown."""

    name: str
    type: Literal["cpu", "cuda"]
    memory_bytes: int
    peak_fp32_flops: float = 0.0
    peak_bf16_flops: float = 0.0
    memory_bandwidth: float = 0.0

    def __post_init__(self) -> None:
        rates = (self.peak_fp32_flops, self.peak_bf16_flops, self.memory_bandwidth)
        if self.memory_bytes < 1 or min(rates) < 0 or max(rates) > MOST_AMOUNT:
            raise ValueError(f"device {self.name} needs memory of at least 1 byte, and peaks of 0 to {MOST_AMOUNT:g}")


@noun
class CollectiveTable:
    """Seconds of one collective over message bytes (sizes as in :class:`asa.ir.traffic.Collective`).

    ``points`` is sorted by bytes; between points times are interpolated log-log.
    """

    op: CollectiveOp
    ranks: int
    points: tuple[tuple[int, float], ...]
    status: Status
    source: str

    def __post_init__(self) -> None:
        sizes = [p[0] for p in self.points]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1 or min(p[1] for p in self.points) <= 0:
            raise ValueError(f"{self.op} table of {self.ranks} ranks needs points of rising bytes and times above zero")
        if self.ranks < 2:
            raise ValueError(f"{self.op} table for {self.ranks} ranks: a collective has at least 2")
        if max(p[1] for p in self.points) > MOST_SECONDS:
            raise ValueError(f"{self.op} table of {self.ranks} ranks holds a time above {MOST_SECONDS:g} s")


@noun
class Level:
    """Links that join up to ``devices`` neighbours (ranks k*devices ... (k+1)*devices - 1)."""

    name: str
    devices: int
    tables: tuple[CollectiveTable, ...]


@noun
class Contention:
    """How much longer a rank takes when ``ranks`` of them work at once on this machine.

    ``slowdown`` is of arithmetic (convolutions, matrix products), ``memory_slowdown`` of what only moves memory, as an
    optimizer step does; the same where it was not measured apart.
    """

    ranks: int
    slowdown: float
    memory_slowdown: float | None = None

    @property
    def of_memory(self) -> float:
        """``memory_slowdown``, or ``slowdown`` where there is none."""
        return self.slowdown if self.memory_slowdown is None else self.memory_slowdown


@noun
class Overlap:
    """How much computation and communication slow each other down while both run (1: not at all)."""

    compute_slowdown: float = 1.0
    communication_slowdown: float = 1.0

    @property
    def saving(self) -> float:
        """Seconds saved per second of overlap: 1/compute + 1/communication - 1, at most 1; may be negative."""
        return 1 / self.communication_slowdown + 1 / self.compute_slowdown - 1


@noun
class Cluster:
    """Devices, one per rank, and the levels of links between them, innermost first.

    The last level joins all devices. ``backend`` is what its tables were measured with.
    """

    name: str
    backend: Literal["gloo", "nccl"]
    device: Device
    num_devices: int
    levels: tuple[Level, ...]
    contention: tuple[Contention, ...]
    overlap: Overlap
    status: Status
    source: str

    def hop(self, offset: int) -> int:
        """Index of the level that joins rank ``offset`` to the one in front: the innermost of which it is no border."""
        return next((i for i, level in enumerate(self.levels) if offset % level.devices), len(self.levels) - 1)

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise InvalidInputError(f"cluster {self.name} has {self.num_devices} devices", where="$.num_devices")
        widths = [level.devices for level in self.levels]
        if self.num_devices > 1 and (not widths or widths[-1] < self.num_devices):
            raise InvalidInputError(f"no level of cluster {self.name} joins all its devices", where="$.levels")
        if widths != sorted(set(widths)):
            raise InvalidInputError(f"levels of cluster {self.name} must widen", where="$.levels")
        for i, c in enumerate(self.contention):
            if min(c.slowdown, c.of_memory) < 1 or c.ranks < 1:
                raise InvalidInputError("contention needs ranks >= 1 and slowdown >= 1", where=f"$.contention[{i}]")
            if max(c.slowdown, c.of_memory) > MOST_SLOWDOWN:
                raise InvalidInputError(f"a slowdown above {MOST_SLOWDOWN:g}", where=f"$.contention[{i}]")
        if min(self.overlap.compute_slowdown, self.overlap.communication_slowdown) < 1:
            raise InvalidInputError("overlap cannot speed anything up", where="$.overlap")
        if max(self.overlap.compute_slowdown, self.overlap.communication_slowdown) > MOST_SLOWDOWN:
            raise InvalidInputError(f"a slowdown above {MOST_SLOWDOWN:g}", where="$.overlap")
