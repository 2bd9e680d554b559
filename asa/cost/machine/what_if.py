"""What-if profiles and clusters: all times longer, or activations larger, by a factor; links that take no time."""

from __future__ import annotations

import math
from dataclasses import replace

from asa.ir.cluster import Cluster, Level
from asa.ir.profile import Profile, Stat, Timing


def slower_profile(profile: Profile, factor: float) -> Profile:
    """A copy in which every time is ``factor`` times as long."""

    def scaled(s: Stat) -> Stat:
        return Stat(median=factor * s.median, p10=factor * s.p10, p90=factor * s.p90, n=s.n)

    def slowed(timings: tuple[Timing, ...]) -> tuple[Timing, ...]:
        return tuple(
            replace(t, forward=scaled(t.forward), backward=scaled(t.backward), spared_s=factor * t.spared_s)
            for t in timings
        )

    return replace(
        profile,
        timings=slowed(profile.timings),
        by_tokens=None if profile.by_tokens is None else slowed(profile.by_tokens),
        updates=tuple(replace(u, step=scaled(u.step)) for u in profile.updates),
        dispatch_floor_s=factor * profile.dispatch_floor_s,
    )


def heavier_profile(profile: Profile, factor: float) -> Profile:
    """A copy with ``factor`` times the saved and transient bytes. Parameters, gradients and optimizer state are known
    exactly, so they stay."""
    if factor == 1.0:
        return profile
    return replace(
        profile,
        timings=tuple(
            replace(
                t,
                saved_bytes=math.ceil(factor * t.saved_bytes),
                transient_bytes=math.ceil(factor * t.transient_bytes),
                unmade_bytes=math.floor(min(1.0, factor) * t.unmade_bytes),
            )
            for t in profile.timings
        ),
    )


def linked_at_once(cluster: Cluster) -> Cluster:
    """A copy whose links take next to no time."""

    def at_once(level: Level) -> Level:
        tables = (replace(t, points=tuple((size, 1e-9 * s) for size, s in t.points)) for t in level.tables)
        return replace(level, tables=tuple(tables))

    return replace(cluster, levels=tuple(at_once(level) for level in cluster.levels))
