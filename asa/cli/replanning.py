"""What ``asa train`` hands to the loop over epochs: how to solve again with costs corrected by what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from asa.cli.choose import origins
from asa.cli.console import Console
from asa.cost.slower import slower_links, slower_profile
from asa.errors import AsaError
from asa.ir.cluster import Cluster
from asa.ir.measurements import EpochRecord, Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Profile

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
    from asa.launch import faults
    from asa.planner import Request
    from asa.planner import plan as solve
    from asa.strategies import offered

    faults.reached("replan.solve")
    request = Request(
        gpus=plan.num_ranks, global_batch=plan.global_batch, optimizer=plan.optimizer, compression=plan.compression
    )
    return solve(slower_profile(profile, factor), slower_links(cluster, factor), offered(), request)[0]
