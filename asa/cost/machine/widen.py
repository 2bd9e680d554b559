"""A measured machine with more ranks than were measured on it: what they cost by sharing its cores. CPU only."""

from __future__ import annotations

from dataclasses import replace

from asa.cost.traffic.collectives import carried
from asa.errors import UsageError
from asa.ir.cluster import Cluster, CollectiveTable, Contention

LIMIT = 64
"""Ranks beyond which nothing is said: so many processes share no machine in practice."""


def possible(cluster: Cluster, ranks: int) -> bool:
    """Whether :func:`widened` has an answer: CPU ranks that were measured together, and fewer than asked for."""
    alike = cluster.device.type == "cpu" and len(cluster.levels) == 1 and cluster.devices is None
    return alike and cluster.num_devices < ranks <= LIMIT


def widened(cluster: Cluster, ranks: int) -> Cluster:
    """``cluster`` with ``ranks`` ranks on the same cores, of status ``derived``; the same for the same arguments.

    The largest number of ranks that was measured is taken to keep all cores busy, so with n times as many each
    computes, and moves what it carries, n times as slowly.

    Raises:
        UsageError: it is not :func:`possible`.
    """
    if not possible(cluster, ranks):
        raise UsageError(
            f"{ranks} ranks cannot be derived from cluster {cluster.name} of {cluster.num_devices} "
            f"{cluster.device.type} devices; a CPU cluster of 2 or more can be widened to {LIMIT}"
        )
    known, level = cluster.num_devices, cluster.levels[0]
    more, source = ranks / known, f"{known} ranks of {cluster.name}, sharing its cores with {ranks - known} more"
    tables = tuple(
        CollectiveTable(
            op=t.op,
            ranks=ranks,
            points=tuple((size, s * more * carried(t.op, ranks) / carried(t.op, known)) for size, s in t.points),
            status="derived",
            source=source,
        )
        for t in level.tables
        if t.ranks == known
    )
    busiest = max(cluster.contention, key=lambda c: c.ranks, default=Contention(ranks=1, slowdown=1.0))
    crowd = Contention(ranks=ranks, slowdown=busiest.slowdown * more, memory_slowdown=busiest.of_memory * more)
    return replace(
        cluster,
        name=f"{cluster.name}-as-{ranks}",
        num_devices=ranks,
        levels=(replace(level, devices=ranks, tables=(*level.tables, *tables)),),
        contention=(*cluster.contention, crowd),
        status="derived",
        source=source,
    )
