"""What ``asa train`` hands to the loop over epochs: how to solve again with costs corrected by what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from asa.cli.choose import origins
from asa.cli.console import Console
from asa.cost.machine.slower import slower_links, slower_profile
from asa.errors import AsaError
from asa.ir.cluster import Cluster
from asa.ir.measurements import EpochRecord, Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.shortage import Shortage

if TYPE_CHECKING:
    from collections.abc import Callable

    from asa.executor.recovery import Relieve
    from asa.interfaces.executor import Executor

    Announce = Callable[[dict[str, Any]], None]
    Adapt = Callable[[Executor, range, Announce], Iterator[EpochRecord]]


def adapting(plan: Plan, console: Console, *, replan: bool) -> tuple[Adapt, Relieve | None]:
    """The loop over epochs, and what makes another plan when memory runs out. Without the profile and cluster the plan
    was made from nothing is ever planned again, and it is said."""
    from asa.scheduler.loop import adapt

    if not replan:
        return adapt, None
    try:
        profile, cluster = origins(plan, console)
    except AsaError as error:
        console.say(f"asa: no re-planning: {error}")
        return adapt, None
    return partial(adapt, replan=partial(solve_again, profile, cluster)), partial(relieve, profile, cluster)


def solve_again(profile: Profile, cluster: Cluster, plan: Plan, measured: Measurements, factor: float) -> Plan | None:
    """The best plan for the same ranks if everything takes ``factor`` times as long as it was measured to, and as much
    memory as it was seen to take.

    One number for a whole step cannot tell slow links from slow cores, so both are scaled.
    """
    from asa.launch import faults
    from asa.scheduler.memory import observed, plan_again
    from asa.strategies import offered

    faults.reached("replan.solve")
    correction = observed(plan, measured, profile, cluster, offered())
    slow, links = slower_profile(profile, factor), slower_links(cluster, factor)
    return plan_again(plan, correction, plan.num_ranks, slow, links, offered())


def regroup(console: Console, plan: Plan, ranks: int) -> Plan:
    """The best plan for at most ``ranks`` ranks of the model, batch and memory of ``plan``.

    Raises:
        InvalidInputError: the profile or the cluster it was made from is gone. InfeasibleError: nothing fits.
    """
    from asa.scheduler.memory import Correction, plan_again
    from asa.strategies import offered

    profile, cluster = origins(plan, console)
    as_before = Correction(scale=plan.memory_scale, memory_bytes=plan.memory_bytes)
    return plan_again(plan, as_before, ranks, profile, cluster, offered())


def relieve(profile: Profile, cluster: Cluster, shortage: Shortage, attempt: int, gpus: int) -> Plan:
    """The best plan for at most ``gpus`` ranks that a memory model corrected by ``shortage`` allows.

    Raises:
        InfeasibleError: none; names the number that binds.
    """
    from asa.scheduler.memory import corrected, plan_again
    from asa.strategies import offered

    correction = corrected(shortage, attempt, profile, cluster, offered())
    return plan_again(shortage.plan, correction, gpus, profile, cluster, offered())
