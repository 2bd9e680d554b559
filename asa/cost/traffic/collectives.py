"""Seconds of a collective, from the measured tables of a cluster.

A table is interpolated log-log between its points. Above the last point the bandwidth is that of this point; below the
first point the time is that of this point. If a table is missing, another one is used, in this order:

1. another operation among the same number of ranks, at equal bus bandwidth (bytes that every link carries per byte of
   buffer, n ranks: all_reduce 2 (n-1)/n; all_gather, reduce_scatter, all_to_all (n-1)/n; broadcast, send_recv 1;
   https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md);
2. neighbouring group sizes: the time per byte carried, interpolated log-log in the number of ranks;
3. an outer level of the cluster (never faster), then an inner one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from functools import lru_cache

from asa.errors import InvalidInputError
from asa.ir.cluster import Cluster, Status
from asa.ir.traffic import Collective, CollectiveOp

_Curve = tuple[tuple[float, float], ...]

_LARGE = 2.0**30  # bytes of a message whose time is all bandwidth

_ASSUMED: frozenset[Status] = frozenset({"derived", "rule", "measured-hearsay", "estimated"})


def carried(op: CollectiveOp, ranks: int) -> float:
    """Bytes each link carries per byte of buffer: nccl-tests' factor from algorithm to bus bandwidth.

    >>> carried("all_reduce", 4)
    1.5
    """
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def interpolate(points: tuple[tuple[float, float], ...], size: float) -> float:
    """Seconds for ``size`` bytes, interpolated in ``points`` (bytes, seconds; sorted) as this module describes."""
    if size <= points[0][0]:
        return points[0][1]
    if size >= points[-1][0]:
        return points[-1][1] * size / points[-1][0]
    at = bisect_right(points, size, key=lambda p: p[0])
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    share = math.log(size / x0) / math.log(x1 / x0)
    return float(y0 * (y1 / y0) ** share)


@lru_cache(maxsize=1024)
def _rising(table: tuple[tuple[int, float], ...]) -> _Curve:
    """The points of a table, each at most as slow as any larger message (which could be sent in its place)."""
    points: list[tuple[float, float]] = []
    for size, seconds in reversed(table):
        points.append((float(size), min(seconds, points[-1][1]) if points else seconds))
    return tuple(reversed(points))


class Links:
    """A cluster's tables, indexed to price many collectives.

    ``width``: ranks 0 to width - 1 are the stage; ``busy``: the number of ranks of all stages. Both None: all devices.
    """

    def __init__(self, cluster: Cluster, width: int | None = None, busy: int | None = None) -> None:
        self._cluster = cluster
        self._width = cluster.num_devices if width is None else width
        self._busy = self._width if busy is None else busy
        self._tables: list[dict[tuple[CollectiveOp, int], _Curve]] = [
            {(t.op, t.ranks): _rising(t.points) for t in level.tables} for level in cluster.levels
        ]
        self._statuses: list[dict[int, list[Status]]] = [{} for _ in cluster.levels]
        for statuses, level in zip(self._statuses, cluster.levels, strict=True):
            for t in level.tables:
                statuses.setdefault(t.ranks, []).append(t.status)
        self._slowdowns: dict[tuple[CollectiveOp, int, int, int], float] = {}
        self._seconds: dict[tuple[CollectiveOp, float, int, int], float] = {}
        self._groups: dict[tuple[CollectiveOp, int, int], tuple[int, int, float]] = {}
        self._sizes: dict[tuple[int, CollectiveOp], list[tuple[int, _Curve, float]]] = {}

    def seconds(self, collective: Collective) -> float:
        """Seconds of one ``collective``, while all other groups of its shape do the same; 0 for a group of one rank or
        an empty message.

        Raises:
            InvalidInputError: the cluster has no table from which this group could be priced.
        """
        c = collective
        return self.time(c.op, c.bytes, c.ranks, c.stride)

    def time(self, op: CollectiveOp, size: float, ranks: int, stride: int) -> float:
        """Seconds of operation ``op`` on ``size`` bytes among ``ranks`` ranks that are ``stride`` apart.

        Raises:
            InvalidInputError: as for :meth:`seconds`.
        """
        if ranks <= 1 or size <= 0:
            return 0.0
        key = (op, size, ranks, stride)
        if key not in self._seconds:
            group = (op, ranks, stride)
            if group not in self._groups:
                level = self.level(ranks, stride)
                self._groups[group] = (level, self._sharing(level, stride), self._crowding(level, op, ranks))
            level, sharing, crowding = self._groups[group]
            self._seconds[key] = self._interpolate(level, op, ranks, size * sharing * crowding)
        return self._seconds[key]

    def handover(self, size: float, offset: int, flows: int) -> float:
        """Seconds to send ``size`` bytes from a rank below ``offset`` to one at or above it, with ``flows`` such
        transfers at once.

        They use the links of the innermost level that has no border at ``offset``. Inside a node each flow has its own
        link; between nodes the flows of a node share its link.
        """
        if size <= 0:
            return 0.0
        key: tuple[CollectiveOp, float, int, int] = ("send_recv", size, -flows, offset)
        if key not in self._seconds:
            levels, level = self._cluster.levels, self._cluster.hop(offset)
            sharing = 1 if level == 0 else min(flows, levels[level - 1].devices)
            concurrent = min(2 * flows, levels[level].devices)
            crowding = self._slower(level, "send_recv", 2, concurrent) if level == 0 else 1.0
            self._seconds[key] = self._interpolate(level, "send_recv", 2, size * sharing * crowding)
        return self._seconds[key]

    def assumed(self, ranks: int, stride: int = 1) -> bool:
        """Whether the times of this group come from tables that were not, or not completely, measured."""
        if ranks <= 1:
            return False
        statuses = self._statuses[self.level(ranks, stride)].get(ranks, [])
        return not statuses or any(s in _ASSUMED for s in statuses)

    def level(self, ranks: int, stride: int) -> int:
        """Index of the innermost level whose blocks contain every group of ``ranks`` ranks that are ``stride`` apart.

        Raises:
            InvalidInputError: no level is large enough.
        """
        block = ranks * stride
        levels = self._cluster.levels
        for i, level in enumerate(levels):
            if level.devices >= self._width or (block <= level.devices and level.devices % block == 0):
                return i
        if not levels or block > levels[-1].devices:
            raise InvalidInputError(
                f"cluster {self._cluster.name} joins {levels[-1].devices if levels else 1} devices, a group of "
                f"{ranks} ranks {stride} apart needs {block}"
            )
        return len(levels) - 1

    def _sharing(self, level: int, stride: int) -> int:
        """The number of groups that share the same links: all strided groups of an inner block leave it by one link."""
        return 1 if level == 0 else min(stride, self._cluster.levels[level - 1].devices)

    def _crowding(self, level: int, op: CollectiveOp, ranks: int) -> float:
        """The factor by which concurrent groups slow each other down, read from the tables.

        All ranks of a stage work at once, so no links are idle. A link then has at most the bandwidth that it has in
        one group of all these ranks (with PCIe a fraction of the bandwidth of a pair; with a switch the same).
        """
        concurrent = min(self._busy, self._cluster.levels[level].devices)
        return self._slower(level, op, ranks, concurrent)

    def _slower(self, level: int, op: CollectiveOp, ranks: int, concurrent: int) -> float:
        if ranks >= concurrent:
            return 1.0
        key = (op, ranks, level, concurrent)
        if key not in self._slowdowns:
            one_group = self._interpolate(level, op, ranks, _LARGE) / carried(op, ranks)
            all_at_once = self._interpolate(level, op, concurrent, _LARGE) / carried(op, concurrent)
            self._slowdowns[key] = max(1.0, all_at_once / one_group)
        return self._slowdowns[key]

    def _interpolate(self, level: int, op: CollectiveOp, ranks: int, size: float) -> float:
        for i in range(level, len(self._tables)):  # a narrower level has faster links
            seconds = self._at_level(i, op, ranks, size)
            if seconds is not None:
                return seconds
        raise InvalidInputError(
            f"cluster {self._cluster.name} has no table for {op} among {ranks} ranks; level "
            f"{self._cluster.levels[level].name!r}, which joins them, needs one",
            where=f"$.levels[{level}].tables",
        )

    def _at_level(self, level: int, op: CollectiveOp, ranks: int, size: float) -> float | None:
        if (level, op) not in self._sizes:
            self._sizes[level, op] = _curves(self._tables[level], op)
        curves = self._sizes[level, op]
        if not curves:
            return None
        at = min(bisect_left(curves, ranks, key=lambda k: k[0]), len(curves) - 1)
        n, curve, factor = curves[at]
        rate = interpolate(curve, size) / factor
        if ranks < n and at:
            fewer, curve, factor = curves[at - 1]
            rate = interpolate(((float(fewer), interpolate(curve, size) / factor), (float(n), rate)), float(ranks))
        return rate * carried(op, ranks)


def _curves(tables: dict[tuple[CollectiveOp, int], _Curve], op: CollectiveOp) -> list[tuple[int, _Curve, float]]:
    """For each group size, in rising order: (size, table, bytes that a link carries per byte of buffer). If ``op`` has
    no table, that of another operation is used, at equal bus bandwidth for the same buffer."""
    operations: tuple[CollectiveOp, ...] = (
        op, "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv",
    )  # fmt: skip
    curves = []
    for n in sorted({n for _, n in tables}):
        operation = next((o for o in operations if (o, n) in tables), None)
        if operation is not None:
            curves.append((n, tables[operation, n], carried(operation, n)))
    return curves
