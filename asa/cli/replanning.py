"""Functions that ``asa train`` passes to the loop over epochs: correcting costs, planning again, storing corrected
files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asa.cli.choose import origins
from asa.cli.console import Console
from asa.errors import AsaError, InfeasibleError, UnavailableError, UsageError
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.measurements import EpochRecord, Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.shortage import Shortage
from asa.strategies import offered

if TYPE_CHECKING:
    from collections.abc import Callable

    from asa.executor.running.recovery import Relieve
    from asa.interfaces.executor import Executor
    from asa.scheduler import Model
    from asa.scheduler.costs import Slowness
    from asa.scheduler.model import Asked, Question

    Announce = Callable[[dict[str, Any]], None]
    Adapt = Callable[[Executor, range, Announce], Iterator[EpochRecord]]

CORRECTED_PROFILE = "corrected.profile.json"
CORRECTED_CLUSTER = "corrected.cluster.json"


def adapting(plan: Plan, console: Console, *, replan: bool, correct: bool, out: Path) -> tuple[Adapt, Relieve | None]:
    """The loop over epochs, and the function that makes another plan after a shortage of memory (None without
    ``replan``). If the profile or cluster of the plan is missing, the plan never changes, and a note says so.
    ``correct``: correct their costs during the run, to report what is slow, also without ``replan``. Corrected files
    are stored in the folder ``out``."""
    from asa.scheduler import Model, Policy, adapt

    if not (replan or correct):
        return adapt, None
    try:
        profile, cluster = origins(plan, console)
    except AsaError as error:
        if replan:
            console.say(f"asa: no re-planning: {error}")
        return partial(adapt, policy=Policy(keep_plan=True)), None
    model = Model(profile=profile, cluster=cluster, strategies=offered(), solve=solve_again)
    model = replace(model, background=partial(_search, model))
    policy = Policy(keep_plan=not replan)
    loop = partial(adapt, model=model, policy=policy, keep=partial(keep_corrected, model, out))
    return loop, partial(relieve, profile, cluster) if replan else None


def _search(model: Model, question: Question) -> Asked:
    from asa.launch import faults
    from asa.scheduler.background import BackgroundSearch

    faults.reached("replan.solve")
    return BackgroundSearch(model, question)


def solve_again(plan: Plan, measured: Measurements, profile: Profile, cluster: Cluster, gpus: int) -> Plan:
    """The best plan for at most ``gpus`` ranks on a corrected profile and cluster, with the memory use observed under
    ``plan``.

    Raises:
        InfeasibleError: none fits; names the limiting quantity.
    """
    from asa.scheduler.background import SOLVE_S
    from asa.scheduler.memory import observed, plan_again

    correction = observed(plan, measured, profile, cluster, offered())
    return plan_again(plan, correction, gpus, profile, cluster, offered(), time_limit_s=SOLVE_S)


def regroup(console: Console, plan: Plan, ranks: int) -> Plan:
    """The best plan for at most ``ranks`` ranks with the model, batch and memory of ``plan``.

    Raises:
        InvalidInputError: the profile or the cluster of the plan no longer exists. InfeasibleError: nothing fits.
        UsageError: the plan has a discipline that was requested by name: another plan would train differently.
    """
    from asa.scheduler.memory import Correction, plan_again

    if plan.consistency is not None:
        raise UsageError(f"{plan.consistency} was asked for by name, for {plan.num_processes} ranks")
    profile, cluster = origins(plan, console)
    as_before = Correction(scale=plan.memory_scale, memory_bytes=plan.memory_bytes)
    return plan_again(plan, as_before, ranks, profile, cluster, offered())


def relieve(profile: Profile, cluster: Cluster, shortage: Shortage, attempt: int, gpus: int) -> Plan:
    """The best plan for at most ``gpus`` ranks under the memory model corrected by ``shortage``. If none fits as many
    ranks as before, the best plan for fewer, each of which has a larger part of the host's memory.

    Raises:
        InfeasibleError: there is none; names the limiting quantity.
    """
    from asa.scheduler.memory import among, corrected, plan_again

    correction = corrected(shortage, attempt, profile, cluster, offered())
    try:
        return plan_again(shortage.plan, correction, gpus, profile, cluster, offered())
    except InfeasibleError:
        for ranks in range(shortage.plan.num_ranks - 1, 0, -1):
            more = among(ranks, correction, shortage, attempt)
            if more is not None:
                with contextlib.suppress(InfeasibleError):
                    return plan_again(shortage.plan, more, ranks, profile, cluster, offered())
        raise


def keep_corrected(model: Model, out: Path, slowness: Slowness) -> None:
    """Write the profile and cluster, as corrected by the run and with the fastest device first, to the run's folder for
    ``asa plan --from-run``. Failure to write is ignored here; checkpoints report it."""
    profile, cluster = model.corrected(slowness, model.order(slowness, ()))
    with contextlib.suppress(UnavailableError, OSError):
        codec.save(profile, out / CORRECTED_PROFILE)
        codec.save(cluster, out / CORRECTED_CLUSTER)
