"""Text of clusters, in the columns of nccl-tests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rich.console import RenderableType

from asa.ir.cluster import Cluster, CollectiveTable
from asa.ir.drift import Drift
from asa.report.text.tables import folded, line, table
from asa.report.units import percent, seconds, size


def bus_factor(op: str, ranks: int) -> float:
    """Factor from algorithm bandwidth (bytes / time) to bus bandwidth, as defined by nccl-tests.

    All-reduce moves 2 (n - 1) / n of its bytes over each link, gathers, scatters and all-to-all (n - 1) / n, the others
    all of them. Source: nccl-tests, doc/PERFORMANCE.md.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("send_recv", 2)
    (1.5, 0.75, 1.0)
    """
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}.get(op, 1.0)


_MAKER = re.compile(r"^NVIDIA |GeForce |Tesla ")
"""Parts of a device's name that are left out in a list."""


def overview(clusters: Sequence[tuple[str, Cluster]]) -> RenderableType:
    """A table with one line for each (origin, cluster), of 80 columns, with the least memory of its devices. The origin
    is a file's name or ``preset``."""
    result = table("Clusters", ("name", "devices", "memory", "status"), left=1)
    result.columns[1].justify, result.columns[3].justify = "left", "left"
    for origin, c in clusters:
        kinds = Counter(d.name for d in c.devices or ()) or {c.device.name: c.num_devices}
        origin_note = "" if origin == "preset" else ", shipped" if origin.endswith("(shipped)") else ", here"
        short = {name: _MAKER.sub("", name).partition("-" if len(kinds) > 1 else "\0")[0] for name in kinds}
        devices = " + ".join(f"{count} x {short[name]}" for name, count in kinds.items())
        result.add_row(c.name, devices, size(min(c.memories())), f"{c.status}{origin_note}")
    return result


_STATUS = {
    "measured-plateau-only": "only large messages were measured, small ones are estimated",
    "measured-hearsay": "published without its method",
    "derived": "computed from measured parts",
    "rule": "rule of thumb",
    "estimated": "from data sheets and rules of thumb",
}


def legend(clusters: Sequence[tuple[str, Cluster]]) -> RenderableType:
    """What the statuses in :func:`overview` mean, and the command that shows one cluster."""
    shown = {c.status for _, c in clusters}
    texts = [f"{status}: {text}" for status, text in _STATUS.items() if status in shown]
    return line("; ".join([*texts, "`asa cluster show NAME` has the figures and their source"]), "dim")


def drifted(drift: Drift) -> str:
    """One line on the change of the machine's speed during the measurement."""
    return (
        f"the machine's speed changed by {percent(drift.deviation)} (standard deviation of {len(drift.readings)} "
        "readings) while this was measured; times are at its mean"
    )


def render(cluster: Cluster) -> list[RenderableType]:
    """Text of a cluster: device, contention, and a bandwidth table per level."""
    d = cluster.device
    lines: list[RenderableType] = [
        line(f"{cluster.name}: {cluster.num_devices} x {d.name} ({d.type}, {size(d.memory_bytes)}), {cluster.backend}"),
        line(f"status {cluster.status}; source: {cluster.source}"),
        line(
            f"during overlap, computation takes {cluster.overlap.compute_slowdown:.2f} times as long, communication "
            f"{cluster.overlap.communication_slowdown:.2f} times"
        ),
    ]
    if cluster.drift is not None:
        lines.append(line(folded(drifted(cluster.drift))))
    if cluster.devices is not None:
        result = table("Devices", ("device", "ranks", "speed", "memory"), left=2)
        for (name, speed, memory), ranks in unequal(cluster).items():
            result.add_row(name, ranks, f"{speed:.3g}", size(memory))
        lines += [result, line("")]
    several = [c for c in cluster.contention if c.ranks > 1]
    if several:
        factors = (
            f"{c.slowdown:.2f} with {c.ranks}"
            + (f" ({c.of_memory:.2f} if limited by memory)" if c.of_memory != c.slowdown else "")
            for c in several
        )
        lines.append(line(f"several ranks at once compute slower, by a factor of {', '.join(factors)}"))
    for level in cluster.levels:
        result = table(
            f"Level {level.name}, up to {level.devices} devices",
            ("collective", "status", "ranks", "size", "time", "algbw GB/s", "busbw GB/s"),
            left=2,
        )
        for t in level.tables:
            for row in rows(t):
                result.add_row(*row)
        lines += [line(""), result]
    return lines


def unequal(cluster: Cluster) -> dict[tuple[str, float, int], str]:
    """Kinds of devices (name, speed, bytes of memory), each with a short list of the ranks that have it."""
    runs_by_kind: dict[tuple[str, float, int], list[list[int]]] = {}
    for rank, (d, memory) in enumerate(zip(cluster.devices or (), cluster.memories(), strict=False)):
        runs = runs_by_kind.setdefault((d.name, d.speed, memory), [])
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return {
        kind: ", ".join(f"{r[0]}" if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs)
        for kind, runs in runs_by_kind.items()
    }


def rows(t: CollectiveTable) -> list[tuple[str, ...]]:
    """The points of one table in the form of nccl-tests."""
    cells: list[tuple[str, ...]] = []
    for i, (count, time) in enumerate(t.points):
        bandwidth = count / time / 1e9
        cells.append(
            (
                t.op if i == 0 else "",
                t.status if i == 0 else "",
                str(t.ranks) if i == 0 else "",
                size(count),
                seconds(time),
                f"{bandwidth:.3g}",
                f"{bandwidth * bus_factor(t.op, t.ranks):.3g}",
            )
        )
    return cells
