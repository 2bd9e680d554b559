"""Clusters with more ranks than were measured: more ranks on the cores of a CPU, or more nodes of the same kind."""

from __future__ import annotations

from dataclasses import replace

from asa.cost.traffic.collectives import carried
from asa.errors import UsageError
from asa.ir.cluster import Cluster, CollectiveTable, Contention
from asa.ir.units import MOST_DEVICES

AS = "-as-"
"""Separator in the name of a widened cluster: between the name of the original and the new size."""
LIMIT = 64
"""The most ranks to which a CPU cluster is widened: in practice no machine runs more processes of one training."""


def possible(cluster: Cluster, ranks: int) -> bool:
    """Whether :func:`widened` can make a cluster of ``ranks`` ranks: it has fewer now, and either CPU ranks were
    measured together, or there are several nodes of equal devices."""
    if cluster.devices is not None or ranks <= cluster.num_devices:
        return False
    if len(cluster.levels) > 1:
        return ranks <= MOST_DEVICES
    return cluster.device.type == "cpu" and len(cluster.levels) == 1 and ranks <= LIMIT


def note(cluster: Cluster, ranks: int) -> str:
    """A description of what :func:`widened` assumes, for a note."""
    if len(cluster.levels) == 1:
        return f"{ranks} ranks on the cores of {cluster.name}, of which {cluster.num_devices} were measured"
    known, nodes = -(-cluster.num_devices // cluster.node), -(-ranks // cluster.node)
    kind = f"{cluster.node} x {cluster.device.name}"
    return f"{cluster.name} has {known} nodes of {kind}: taken as {nodes} of the same kind, joined by the same links"


def widened(cluster: Cluster, ranks: int) -> Cluster:
    """``cluster`` with at least ``ranks`` ranks, of status ``derived``.

    On a CPU the largest measured number of ranks is assumed to keep all cores busy: with n times as many ranks, each
    computes and communicates n times as slowly. Otherwise whole nodes are added; links between nodes keep the bandwidth
    of the largest group that was measured.

    Raises:
        UsageError: :func:`possible` is false.
    """
    if not possible(cluster, ranks):
        raise UsageError(
            f"{ranks} ranks cannot be derived from cluster {cluster.name} of {cluster.num_devices} "
            f"{cluster.device.type} devices; a CPU cluster of 2 or more can be widened to {LIMIT}, one of several "
            f"equal nodes to {MOST_DEVICES}"
        )
    if len(cluster.levels) > 1:
        return _more_nodes(cluster, ranks)
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
        name=f"{cluster.name}{AS}{ranks}",
        num_devices=ranks,
        levels=(replace(level, devices=ranks, tables=(*level.tables, *tables)),),
        contention=(*cluster.contention, crowd),
        status="derived",
        source=source,
    )


def _more_nodes(cluster: Cluster, ranks: int) -> Cluster:
    nodes, outer = -(-ranks // cluster.node), cluster.levels[-1]
    devices = nodes * cluster.node
    busiest = max(cluster.contention, key=lambda c: c.ranks, default=Contention(ranks=1, slowdown=1.0))
    return replace(
        cluster,
        name=f"{cluster.name}{AS}{nodes}x{cluster.node}",
        num_devices=devices,
        levels=(*cluster.levels[:-1], replace(outer, devices=devices)),
        contention=(*cluster.contention, replace(busiest, ranks=devices)),
        status="derived",
        source=note(cluster, ranks),
    )
