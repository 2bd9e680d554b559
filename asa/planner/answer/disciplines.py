"""Plans under a discipline of consistency: data parallelism, a pipeline or groups, and which worker waits for which.

Disciplines change what training converges to, so the search never chooses one: it is named, and no other strategy
beside it, except for what runs inside groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from asa.cost.memory.peak import libraries
from asa.cost.planned import Price, disciplined, price_plan
from asa.cost.step import StepCost
from asa.errors import AsaError, InfeasibleError, UsageError
from asa.ir.consistency import CHANGES, WAITS_FOR, Discipline, is_discipline, parse
from asa.ir.plan import Baseline, Plan
from asa.ir.units import binary
from asa.planner.answer.prediction import memory_of
from asa.planner.pipeline.whole import row
from asa.planner.space import consistency
from asa.planner.space.candidate import Prices
from asa.planner.space.request import Request


def planned(
    discipline: Discipline, request: Request, solve: Callable[[Request], list[Plan]], prices: Prices
) -> list[Plan]:
    """Plans for ``request`` under ``discipline``. The workers run what ``solve`` finds for plain data parallelism, a
    ``1f1b`` pipeline or their group; the step time is simulated with ``prices``."""
    discipline.check(request.compression, prices.space.profile.precision)
    if discipline.groups is not None:
        return _grouped(discipline, request, solve, prices)
    workers, staged = discipline.workers(request.gpus), discipline.waiting == "pipelined"
    strategy = "single" if workers < 2 else "1f1b" if staged else "ddp"
    plans = solve(replace(request, strategies=(strategy,), gpus=workers))
    if workers < request.gpus:  # servers have devices of their own, which other strategies would use
        plans = [replace(p, baselines=_baselines(request, solve)) for p in plans]
    ranks = row("ddp", prices).candidate if request.gpus > 1 and not staged else None
    cost = None
    if staged and workers > 1:
        cost = undrained(prices).cost
    elif ranks is not None:
        cost = consistency.disciplined(prices, ranks, discipline).price.cost
    return [_remembering(_plan_under(p, discipline, request.gpus, cost), prices) for p in plans]


def _grouped(
    discipline: Discipline, request: Request, solve: Callable[[Request], list[Plan]], prices: Prices
) -> list[Plan]:
    """Plans for ``request`` with groups of ranks that synchronise as ``discipline`` says. A group runs what ``solve``
    finds for its share of devices and batch, among the other strategies asked for."""
    count, batch = discipline.workers(request.gpus), request.global_batch
    if batch % count:
        raise UsageError(
            f"{discipline}: a global batch of {batch} does not divide over {count} groups; "
            f"take --global-batch {max(1, batch // count) * count}"
        )
    inside = tuple(s for s in request.strategies or () if not is_discipline(s)) or None
    gpus = discipline.group_size(request.gpus, inside)
    baselines, plans = _baselines(request, solve), list[Plan]()
    for plan in solve(replace(request, strategies=inside, gpus=gpus, global_batch=batch // count)):
        cost = consistency.grouped(prices, plan, discipline)
        inner = tuple(f"inside a group, {n}" if n.startswith("stay with") else n for n in plan.notes)
        grouped = _plan_under(replace(plan, notes=inner), discipline, request.gpus, cost)
        group = f"each of the {count} groups of {plan.num_ranks} ranks runs {plan.strategy} on {batch // count} samples"
        prediction = replace(grouped.prediction, samples_per_s=batch / cost.total_s if cost.total_s else 0.0)
        certificate = replace(grouped.certificate, space=f"inside a group; {discipline} was asked for by name")
        grouped = replace(
            grouped, global_batch=batch, prediction=prediction, certificate=certificate, baselines=baselines,
            confidence=None, notes=(*grouped.notes, group),
        )  # fmt: skip
        plans.append(_remembering(grouped, prices))
    return plans


def _baselines(request: Request, solve: Callable[[Request], list[Plan]]) -> tuple[Baseline, ...]:
    """The whole strategies on all devices of ``request``; none where plain data parallelism does not fit."""
    with contextlib.suppress(AsaError):
        return solve(replace(request, strategies=("ddp",)))[0].baselines
    return ()


def _remembering(plan: Plan, prices: Prices) -> Plan:
    """``plan`` with the memory that its discipline takes.

    Raises:
        InfeasibleError: a device has less.
    """
    space = prices.space
    price = price_plan(plan, space.profile, space.cluster, space.strategies)
    free, more = space.capacity(plan.num_processes), libraries(space.cluster.device)
    if price.peak.total > free:
        raise InfeasibleError(
            f"{plan.consistency} needs {binary(price.peak.total + more)} on a rank, and {binary(free + more)} can be "
            "used; take a smaller --global-batch, more devices, or a discipline that holds fewer copies of the weights"
        )
    memory = memory_of(price, space.cluster, [len(s.ranks) for s in plan.stages])
    return replace(plan, prediction=replace(plan.prediction, memory_bytes_per_rank=memory * plan.groups))


def undrained(prices: Prices) -> Price:
    """The price of a ``1f1b`` pipeline that is never drained: a step takes as long as the work of its busiest stage.

    Raises:
        UsageError: a pipeline with a stage on every rank cannot run.
    """
    best = row("1f1b", prices)
    if best.candidate is None or best.price is None:
        raise UsageError(f"pipedream: {best.why_not or 'no pipeline'}")
    candidate, m = best.candidate, best.candidate.num_microbatches
    pricers = [prices.pricer(w, m, candidate.ranks) for w in candidate.widths]
    price = disciplined(parse("pipedream"), best.price, pricers, candidate.ways, prices.space.profile, candidate.ranks)
    return replace(price, cost=max((s.cost for s in price.stages), key=lambda c: c.total_s))


def _plan_under(plan: Plan, discipline: Discipline, gpus: int, cost: StepCost | None) -> Plan:
    """``plan`` as a plan under ``discipline`` on ``gpus`` ranks. ``cost`` is its step; None for a single worker."""
    name = discipline.name
    notes: tuple[str, ...] = (f"{name}: {WAITS_FOR[name]}", f"what changes: {CHANGES[name]}")
    prediction = plan.prediction
    if cost is None:
        notes = (*notes, "the step time is that of one worker: there are no others")
    else:
        plan_s = prediction.step_time_s
        longer = cost.total_s / plan_s if plan_s else 1.0
        prediction = replace(
            prediction, step_time_s=cost.total_s, step_time_low_s=prediction.step_time_low_s * longer,
            step_time_high_s=prediction.step_time_high_s * longer, compute_s=cost.compute_s,
            exposed_communication_s=cost.exposed_s, hidden_communication_s=0.0, update_s=cost.update_s,
            bubble_s=cost.bubble_s, samples_per_s=plan.global_batch / cost.total_s if cost.total_s else 0.0,
        )  # fmt: skip
    certificate = replace(
        plan.certificate, lower_bound_s=prediction.step_time_s * (1 - plan.certificate.gap),
        space=f"{discipline} alone: it was asked for by name",
    )  # fmt: skip
    return replace(
        plan, strategy=str(discipline), gpus=gpus, prediction=prediction, certificate=certificate,
        notes=(*plan.notes, *notes), consistency=discipline,
    )  # fmt: skip
