"""What ``asa train`` hands to the loop over epochs: how to solve again with costs corrected by what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from asa.cli.choose import origins
from asa.cli.console import Console
from asa.errors import AsaError
from asa.ir.cluster import Cluster, Level
from asa.ir.measurements import EpochRecord, Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Profile, Stat

if TYPE_CHECKING:
    from collections.abc import Callable

    from asa.interfaces.executor import Executor

    Announce = Callable[[dict[str, Any]], None]
    Adapt = Callable[[Executor, range, Announce], Iterator[EpochRecord]]


def adapting(plan: Plan, console: Console, *, replan: bool) -> Adapt:
    """The loop over epochs. Without the profile and cluster the plan was made from it never re-plans, and says so."""
    from asa.scheduler.loop import adapt

    if not replan:
        return adapt
    try:
        profile, cluster = origins(plan, console)
    except AsaError as error:
        console.say(f"asa: no re-planning: {error}")
        return adapt
    return partial(adapt, replan=partial(solve_again, profile, cluster))


def solve_again(profile: Profile, cluster: Cluster, plan: Plan, _: Measurements, factor: float) -> Plan | None:
    """The best plan for the same ranks if everything takes ``factor`` times as long as it was measured to.

    One number for a whole step cannot tell slow links from slow cores, so both are scaled.
    """
    from asa.planner import Request
    from asa.planner import plan as solve
    from asa.strategies import offered

    request = Request(gpus=plan.num_ranks, global_batch=plan.global_batch, optimizer=plan.optimizer)
    return solve(slower_profile(profile, factor), slower_links(cluster, factor), offered(), request)[0]


def slower_profile(profile: Profile, factor: float) -> Profile:
    """Every time ``factor`` times as long."""

    def scaled(s: Stat) -> Stat:
        return Stat(median=factor * s.median, p10=factor * s.p10, p90=factor * s.p90, n=s.n)

    return replace(
        profile,
        timings=tuple(replace(t, forward=scaled(t.forward), backward=scaled(t.backward)) for t in profile.timings),
        updates=tuple(replace(u, step=scaled(u.step)) for u in profile.updates),
        dispatch_floor_s=factor * profile.dispatch_floor_s,
    )


def slower_links(cluster: Cluster, factor: float) -> Cluster:
    """Every collective ``factor`` times as long."""
    levels = tuple(
        Level(
            name=level.name,
            devices=level.devices,
            tables=tuple(replace(t, points=tuple((b, factor * s) for b, s in t.points)) for t in level.tables),
        )
        for level in cluster.levels
    )
    return replace(cluster, levels=levels)
