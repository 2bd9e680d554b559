"""Devices and the links between them, as tables of measured times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from asa.errors import InvalidInputError
from asa.ir.codec import later, noun
from asa.ir.drift import Drift
from asa.ir.traffic import CollectiveOp
from asa.ir.units import LEAST_RATE, MOST_AMOUNT, MOST_DEVICES, MOST_SECONDS

MOST_SLOWDOWN = 1e6
MOST_SPEED = 1e6
_BEFORE_AMPERE = re.compile(r"\b(K80|P100|P40|P4|V100|TITAN|T4|RTX 20\d\d|GTX)\b", re.IGNORECASE)
_SINCE_AMPERE = ("tf32", "bf16")

Status = Literal["measured", "measured-plateau-only", "derived", "rule", "measured-hearsay", "estimated"]
"""How a value was obtained, from a benchmark on the machine to an estimate from its data sheet."""


@noun
class Device:
    """One kind of device. Peak rates are per second of dense arithmetic, and 0 if unknown.

    ``host_bandwidth`` is the rate in bytes/s between a device and the memory of its host, in each direction, while all
    devices of the host copy at once. ``product_share``: the part of ``peak_bf16_flops`` that products reach in
    training, where that was measured; 0 if unknown.
    """

    name: str
    type: Literal["cpu", "cuda"]
    memory_bytes: int
    peak_fp32_flops: float = 0.0
    peak_bf16_flops: float = 0.0
    memory_bandwidth: float = 0.0
    host_bandwidth: float = later(0.0)
    product_share: float = later(0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.product_share <= 1:
            raise ValueError(f"device {self.name} has a product_share of {self.product_share:g}, not 0 to 1")
        rates = (self.peak_fp32_flops, self.peak_bf16_flops, self.memory_bandwidth, self.host_bandwidth)
        if self.memory_bytes < 1 or any(r and not LEAST_RATE <= r <= MOST_AMOUNT for r in rates):
            raise ValueError(
                f"device {self.name} needs memory of at least 1 byte, and peaks (FLOPs and bytes per second) of "
                f"{LEAST_RATE:g} to {MOST_AMOUNT:g}, or 0 where unknown"
            )

    def peak_flops(self, precision: str) -> float:
        """Peak FLOP/s at ``precision``; 0 if unknown.

        For TF32 it is half the rate of bf16, as in the data sheets of NVIDIA's GPUs from Ampere on. Earlier GPUs have
        neither; what they state as that of bf16 is that of fp16.
        """
        old = self.type == "cuda" and _BEFORE_AMPERE.search(self.name) is not None
        if old and precision in _SINCE_AMPERE:
            return 0.0
        if precision == "tf32":
            return 0.0 if self.type == "cpu" else max(self.peak_fp32_flops, self.peak_bf16_flops / 2)
        return self.peak_fp32_flops if precision == "fp32" else self.peak_bf16_flops


@noun
class RankDevice:
    """The device of one rank in a cluster of unequal devices.

    ``speed`` is relative to the cluster's ``device``: work that takes that device one second takes this one ``1 /
    speed`` seconds. ``memory_bytes`` is None if it equals that device's.
    """

    name: str
    speed: float
    memory_bytes: int | None = None


@noun
class CollectiveTable:
    """Measured seconds of one collective by message size in bytes (counted as in :class:`asa.ir.traffic.Collective`).

    ``points`` are (bytes, seconds) in ascending order of bytes. Between points, times are interpolated linearly in the
    logarithms of both.
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
    """Links inside groups of ``devices`` consecutive ranks: group k has ranks ``k * devices`` to ``(k + 1) * devices -
    1``."""

    name: str
    devices: int
    tables: tuple[CollectiveTable, ...]


@noun
class Contention:
    """Factor by which a rank gets slower while ``ranks`` ranks compute at once on this machine.

    ``slowdown`` is that of arithmetic (convolutions, matrix products). ``memory_slowdown`` is that of work limited by
    memory bandwidth, such as an optimizer step; None if it was not measured separately, and then equal to ``slowdown``.
    """

    ranks: int
    slowdown: float
    memory_slowdown: float | None = None

    @property
    def of_memory(self) -> float:
        """``memory_slowdown``, or ``slowdown`` if there is none."""
        return self.slowdown if self.memory_slowdown is None else self.memory_slowdown


@noun
class Waiting:
    """Factor by which a stretch of work gets longer if ``ranks`` ranks synchronize at its end, relative to one rank's
    median.

    ``points`` are (seconds of the stretch, factor), in ascending order of seconds. Short stretches get longer by a
    larger factor, because a disturbance then affects only one rank.
    """

    ranks: int
    points: tuple[tuple[float, float], ...]


@noun
class Sharding:
    """Cost of torch's ``fully_shard`` on a rank in addition to its collectives, in seconds.

    Attributes:
        unit_s: per unit that is gathered or scattered.
        byte_s: per byte of the whole message, for copies into and out of it.
        tensor_s: per tensor in an optimizer step on sharded tensors.
        moved_tensor_s: per tensor in a unit that is gathered or scattered.
    """

    unit_s: float
    byte_s: float
    tensor_s: float = later(0.0)
    moved_tensor_s: float = later(0.0)

    def __post_init__(self) -> None:
        seconds = (self.unit_s, self.byte_s, self.tensor_s, self.moved_tensor_s)
        if not min(seconds) >= 0:
            raise InvalidInputError("seconds of sharding are at least 0", where="$.sharding")
        if max(seconds) > MOST_SECONDS:
            raise InvalidInputError(f"seconds of sharding above {MOST_SECONDS:g}", where="$.sharding")


@noun
class Overlap:
    """Factors by which computation and communication get slower while both run; 1 means no slowdown."""

    compute_slowdown: float = 1.0
    communication_slowdown: float = 1.0

    @property
    def saving(self) -> float:
        """Seconds saved per second of overlap: 1 / compute_slowdown + 1 / communication_slowdown - 1. At most 1; may be
        negative."""
        return 1 / self.communication_slowdown + 1 / self.compute_slowdown - 1


@noun
class Cluster:
    """Devices, one per rank, and the levels of links between them, innermost first. The last level connects all
    devices.

    Attributes:
        backend: backend with which the tables were measured.
        device: the device of all ranks. If ranks have unequal devices, the one that profiles are for, with speed 1.
        devices: the device of each rank if they are unequal; None otherwise.
        waiting, sharding: measured costs; None if not measured.
        devices_per_host: number of devices of a host, if the innermost level is not one host.
        drift: changes of the machine's speed during the measurement. Times in the tables are at its mean speed.
        shared_memory: whether ranks run collectives through memory that all of them map. Their own processors do that
            work, so none of it overlaps with computation.
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
    devices: tuple[RankDevice, ...] | None = later()
    waiting: tuple[Waiting, ...] | None = later()
    sharding: Sharding | None = later()
    devices_per_host: int | None = later()
    drift: Drift | None = later()
    shared_memory: bool = later(False)

    @property
    def unequal(self) -> bool:
        """Whether ranks differ in speed or memory."""
        if self.devices is None:
            return False
        return len({self.speed(r) for r in range(self.num_devices)}) > 1 or len(set(self.memories())) > 1

    def speed(self, rank: int) -> float:
        """Speed of the device of ``rank``, relative to ``device``."""
        return 1.0 if self.devices is None else self.devices[rank].speed

    def peak_flops(self, precision: str, ranks: int) -> float:
        """Peak FLOP/s of the devices of the first ``ranks`` ranks together, each in proportion to its speed; 0 if
        unknown."""
        return self.device.peak_flops(precision) * sum(self.speed(min(r, self.num_devices - 1)) for r in range(ranks))

    def without(self, precision: str, ranks: int) -> str:
        """Name of one of the ``ranks`` fastest unequal devices that lacks ``precision``; empty if none does."""
        devices = self.ordered(self.fastest_first()).devices or ()
        old = (d.name for d in devices[:ranks] if _BEFORE_AMPERE.search(d.name))
        return next(old, "") if self.device.type == "cuda" and precision in _SINCE_AMPERE else ""

    def speeds(self, ranks: Sequence[int]) -> tuple[float, ...]:
        """Speeds of ``ranks``; empty if all have the speed of ``device``.

        Raises:
            InvalidInputError: there are fewer ranks.
        """
        if self.devices is None:
            return ()
        if max(ranks) >= self.num_devices:
            raise InvalidInputError(
                f"cluster {self.name} has {self.num_devices} unequal devices and does not describe rank {max(ranks)}",
                where="$.devices",
            )
        of_ranks = tuple(self.speed(r) for r in ranks)
        return () if all(s == 1.0 for s in of_ranks) else of_ranks

    def fastest_first(self) -> tuple[int, ...] | None:
        """An order of the devices in which every node has its faster devices first, of equally fast ones those with
        more memory, and nodes are sorted by the total speed, then memory, of their devices; with several levels of
        links, in the same way inside every block of a level. None if the devices are in such an order already, or are
        equal."""
        if self.devices is None:
            return None
        kinds = [(-speed, -memory) for speed, memory in self.kinds(self.num_devices)]
        blocks, inner = [[rank] for rank in range(self.num_devices)], 1
        for width in (*(level.devices for level in self.levels[:-1]), self.num_devices):
            fast = sorted((len(b) < inner, sum(kinds[r][0] for r in b), sum(kinds[r][1] for r in b), b) for b in blocks)
            count = -(-self.num_devices // width)
            blocks = [[r for *_, b in fast if b[0] // width == k for r in b] for k in range(count)]
            inner = width
        order = tuple(blocks[0])
        return None if order == tuple(range(self.num_devices)) else order

    def ordered(self, order: tuple[int, ...] | None) -> Cluster:
        """A cluster with the same devices, in which rank r has device ``order[r]``; this cluster if ``order`` is None.

        Raises:
            InvalidInputError: ``order`` is not a permutation of the devices.
        """
        if order is None or self.devices is None:
            return self
        if sorted(order) != list(range(self.num_devices)):
            raise InvalidInputError(
                f"the plan puts its ranks on {len(order)} devices, cluster {self.name} has {self.num_devices}",
                where="$.devices",
            )
        return replace(self, devices=tuple(self.devices[r] for r in order))

    def memories(self) -> tuple[int, ...]:
        """Bytes of memory of every rank's device."""
        default = self.device.memory_bytes
        return tuple(d.memory_bytes or default for d in self.devices) if self.devices else (default,) * self.num_devices

    def kinds(self, ranks: int) -> list[tuple[float, int]]:
        """Speed and bytes of memory of the devices of the first ``ranks`` ranks."""
        return [(self.speed(r), memory) for r, memory in enumerate(self.memories()[:ranks])]

    @property
    def host(self) -> int:
        """Number of devices that share a host and its memory."""
        return self.devices_per_host or self.node

    @property
    def node(self) -> int:
        """Number of devices that the innermost level connects; all of them if there is one level."""
        return self.levels[0].devices if len(self.levels) > 1 else self.num_devices

    def hop(self, offset: int) -> int:
        """Index of the innermost level that connects rank ``offset`` with rank ``offset - 1``."""
        return next((i for i, level in enumerate(self.levels) if offset % level.devices), len(self.levels) - 1)

    def placed(self, offset: int, width: int) -> bool:
        """Whether a stage of ``width`` ranks may begin at rank ``offset``: it must be inside one node, or consist of
        whole nodes."""
        return all(
            offset // each == (offset + width - 1) // each or not (offset % each or width % each)
            for each in (level.devices for level in self.levels[:-1])
        )

    def check_stages(self, stages: Sequence[Sequence[int]]) -> None:
        """Check that each of several stages is inside one node or consists of whole nodes. The collectives of any other
        stage would be priced as if they stayed in one node.

        Raises:
            InvalidInputError: a stage is neither; names it.
        """
        for s, ranks in enumerate(stages if len(stages) > 1 else ()):
            if not self.placed(ranks[0], len(ranks)):
                raise InvalidInputError(
                    f"the plan cannot be priced: stage {s} (ranks {ranks[0]} to {ranks[-1]}) is neither inside a node "
                    f"nor in whole nodes",
                    where=f"$.stages[{s}]",
                )

    def __post_init__(self) -> None:
        if not 1 <= self.num_devices <= MOST_DEVICES:
            message = f"cluster {self.name} has {self.num_devices} devices, not 1 to {MOST_DEVICES}"
            raise InvalidInputError(message, where="$.num_devices")
        widths = [level.devices for level in self.levels]
        if self.num_devices > 1 and (not widths or widths[-1] < self.num_devices):
            raise InvalidInputError(f"no level of cluster {self.name} connects all its devices", where="$.levels")
        if widths != sorted(set(widths)):
            raise InvalidInputError(f"levels of cluster {self.name} must widen", where="$.levels")
        for i, level in enumerate(self.levels):
            pairs: set[tuple[str, int]] = set()
            for j, t in enumerate(level.tables):
                if (t.op, t.ranks) in pairs:
                    raise InvalidInputError(
                        f"level {level.name} has two tables of {t.op} among {t.ranks} ranks",
                        where=f"$.levels[{i}].tables[{j}]",
                    )
                pairs.add((t.op, t.ranks))
        if self.devices_per_host is not None and self.devices_per_host < 1:
            raise InvalidInputError(
                f"a host has at least 1 device, not {self.devices_per_host}", where="$.devices_per_host"
            )
        for name, measured in (("contention", self.contention), ("waiting", self.waiting or ())):
            counts = [m.ranks for m in measured]
            twice = next((i for i, n in enumerate(counts) if n in counts[:i]), None)
            if twice is not None:
                raise InvalidInputError(f"two entries of {name} for {counts[twice]} ranks", where=f"$.{name}[{twice}]")
        for i, c in enumerate(self.contention):
            if min(c.slowdown, c.of_memory) < 1 or c.ranks < 1:
                raise InvalidInputError("contention needs ranks >= 1 and slowdown >= 1", where=f"$.contention[{i}]")
            if max(c.slowdown, c.of_memory) > MOST_SLOWDOWN:
                raise InvalidInputError(f"a slowdown above {MOST_SLOWDOWN:g}", where=f"$.contention[{i}]")
        self._check_devices()
        for i, w in enumerate(self.waiting or ()):
            seconds = [p[0] for p in w.points]
            if w.ranks < 2 or not seconds or seconds != sorted(set(seconds)) or seconds[0] <= 0:
                raise InvalidInputError("waiting needs ranks >= 2 and rising seconds", where=f"$.waiting[{i}]")
            if not all(1 <= factor <= MOST_SLOWDOWN for _, factor in w.points):
                raise InvalidInputError(f"a factor is 1 to {MOST_SLOWDOWN:g}", where=f"$.waiting[{i}].points")
        if min(self.overlap.compute_slowdown, self.overlap.communication_slowdown) < 1:
            raise InvalidInputError("overlap cannot speed anything up", where="$.overlap")
        if max(self.overlap.compute_slowdown, self.overlap.communication_slowdown) > MOST_SLOWDOWN:
            raise InvalidInputError(f"a slowdown above {MOST_SLOWDOWN:g}", where="$.overlap")

    def _check_devices(self) -> None:
        if self.devices is None:
            return
        if len(self.devices) != self.num_devices:
            raise InvalidInputError(
                f"cluster {self.name} has {self.num_devices} devices and describes {len(self.devices)}: one for every "
                "rank, or none",
                where="$.devices",
            )
        for i, d in enumerate(self.devices):
            if not 1 / MOST_SPEED <= d.speed <= MOST_SPEED:
                raise InvalidInputError(
                    f"device {d.name} of rank {i} has speed {d.speed:g}, relative to {self.device.name}: it lies "
                    f"between {1 / MOST_SPEED:g} and {MOST_SPEED:g}",
                    where=f"$.devices[{i}].speed",
                )
            if d.memory_bytes is not None and d.memory_bytes < 1:
                raise InvalidInputError(
                    f"device {d.name} of rank {i} needs memory of at least 1 byte",
                    where=f"$.devices[{i}].memory_bytes",
                )


def alone(device: Device) -> Cluster:
    """A cluster of one device, without links."""
    return Cluster(
        name="alone",
        backend="nccl" if device.type == "cuda" else "gloo",
        device=device,
        num_devices=1,
        levels=(),
        contention=(Contention(ranks=1, slowdown=1.0),),
        overlap=Overlap(),
        status="derived",
        source="one device, nothing to communicate with",
    )
