"""What a program requires of its plans, and the plans that meet it. Searches during a run import this without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from asa.errors import InfeasibleError, UsageError
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.consistency import is_discipline, parse
from asa.ir.measurements import Measurements
from asa.ir.plan import OptimizerName, Plan
from asa.ir.profile import Precision, Profile
from asa.planner import Request, parse_pin
from asa.planner import plan as solve
from asa.scheduler.background import SOLVE_S
from asa.strategies import offered


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Requirements on a plan."""

    global_batch: int
    optimizer: OptimizerName
    pipelines: bool
    strategies: tuple[str, ...] | None = None
    pins: tuple[str, ...] = ()
    memory_bytes: int | None = None
    cluster: Cluster | Path | str | None = None
    precision: Precision = "fp32"
    time_limit_s: float = 75.0
    cache: Path | None = None
    no_shards_because: str = ""
    """Why every parameter must stay whole; empty if ranks may hold shards."""
    at_once: bool = False
    """Whether a batch must be computed as a whole, without microbatches."""


def request_of(ranks: int, options: PlanOptions, limit_s: float) -> tuple[Strategies, Request]:
    """Strategies and request for the planner."""
    # The user's optimizer determines where its state is.
    strategies: Strategies = replace(offered(), offload=False)
    if not options.pipelines:
        strategies = replace(strategies, schedules={})
    names = options.strategies if not options.no_shards_because else _unsharded(options)
    request = Request(
        gpus=ranks,
        global_batch=options.global_batch,
        memory_bytes=options.memory_bytes,
        strategies=names,
        pins=tuple(parse_pin(text) for text in options.pins),
        optimizer=options.optimizer,
        time_limit_s=limit_s,
        top_k=8,
        uneven=options.pipelines,
    )
    return strategies, request


def runnable(plans: list[Plan], options: PlanOptions) -> list[Plan]:
    """Plans, out of ``plans``, that compute a batch as a whole, if that is required; otherwise all of them."""
    any_parts = options.pipelines and not options.at_once
    return [plan for plan in plans if any_parts or plan.num_microbatches == 1]


def on_ranks_that_pay(profile: Profile, cluster: Cluster, ranks: int, options: PlanOptions, limit_s: float) -> Plan:
    """The best plan for at most ``ranks`` ranks; others may be idle. The search takes at most ``limit_s`` seconds.

    Raises:
        InfeasibleError: no plan fits.
    """
    plans = runnable(solve(profile, cluster, *request_of(ranks, options, limit_s)), options)
    if not plans:
        raise InfeasibleError("every plan that fits computes a batch in several parts")
    return plans[0]


def plan_again(
    options: PlanOptions, _plan: Plan, _measured: Measurements, profile: Profile, cluster: Cluster, ranks: int
) -> Plan:  # fmt: skip
    """A new plan for ``ranks`` ranks within ``SOLVE_S`` seconds; the solver of a :class:`asa.scheduler.Model`."""
    return on_ranks_that_pay(profile, cluster, ranks, options, SOLVE_S)


_UNSHARDED = ("single", "ddp")
"""Strategies that keep every parameter whole on every rank."""


def _unsharded(options: PlanOptions) -> tuple[str, ...]:
    """Requested strategies that keep parameters whole.

    Raises:
        UsageError: there are none.
    """
    requested = options.strategies or _UNSHARDED
    allowed = tuple(s for s in requested if s in _UNSHARDED or (is_discipline(s) and not parse(s).served))
    if not allowed:
        raise UsageError(
            f"{options.no_shards_because}, so parameters stay whole: strategies=('ddp',) does that, but none of those "
            f"asked for ({', '.join(requested)})"
        )
    return allowed
