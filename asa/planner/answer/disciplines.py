"""Plans under a discipline of consistency that is asked for by name: data parallelism or a pipeline, and who waits for
whom.

Disciplines change what training converges to, so none is ever chosen among other strategies: it must be the only one
asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from asa.cost.planned import Price
from asa.cost.step import StepCost
from asa.errors import AsaError, UsageError
from asa.ir.consistency import CHANGES, WAITS_FOR, Discipline, is_discipline, parse
from asa.ir.plan import Baseline, Plan
from asa.planner.pipeline.whole import row
from asa.planner.space import consistency
from asa.planner.space.candidate import Prices
from asa.planner.space.request import Request


def asked(request: Request) -> Discipline | None:
    """The discipline that is asked for by name, if one is.

    Raises:
        UsageError: it is one of several strategies, or needs more ranks than there are.
    """
    wanted = request.strategies or ()
    named = [s for s in wanted if is_discipline(s)]
    if not named:
        return None
    found = parse(named[0])
    if len(named) > 1 or (len(wanted) > 1 and found.groups is None):
        raise UsageError(
            f"{named[0]} changes what training converges to and is not chosen among {len(wanted)} strategies; ask for "
            f"--strategies {named[0]} alone, or compare them with asa bench"
        )
    return found


def planned(
    discipline: Discipline, request: Request, solve: Callable[[Request], list[Plan]], prices: Prices
) -> list[Plan]:
    """Plans of ``request`` under ``discipline``: the workers run what ``solve`` finds for plain data parallelism, and
    the step time is that of the discipline's clock under ``prices``."""
    if discipline.groups is not None:
        return _grouped(discipline, request, solve, prices)
    workers, staged = discipline.workers(request.gpus), discipline.waiting == "pipelined"
    under = "single" if workers < 2 else "1f1b" if staged else "ddp"
    plain = solve(replace(request, strategies=(under,), gpus=workers))
    ranks = row("ddp", prices).candidate if request.gpus > 1 and not staged else None
    priced = None
    if staged and workers > 1:
        priced = undrained(prices).cost
    elif ranks is not None:
        priced = consistency.disciplined(prices, ranks, discipline).price.cost
    return [_under(p, discipline, request.gpus, priced) for p in plain]


def _grouped(
    discipline: Discipline, request: Request, solve: Callable[[Request], list[Plan]], prices: Prices
) -> list[Plan]:
    """Plans of ``request`` whose groups of ranks each run what ``solve`` finds for their share of devices and batch,
    among the other strategies asked for, and meet as ``discipline`` says."""
    count, batch = discipline.workers(request.gpus), request.global_batch
    if batch % count:
        raise UsageError(
            f"{discipline}: a global batch of {batch} does not divide over {count} groups; "
            f"take --global-batch {max(1, batch // count) * count}"
        )
    inside = tuple(s for s in request.strategies or () if not is_discipline(s)) or None
    gpus = request.gpus // count
    found = solve(replace(request, strategies=inside, gpus=gpus, global_batch=batch // count))
    baselines: tuple[Baseline, ...] = ()
    with contextlib.suppress(AsaError):  # plain data parallelism may not fit
        baselines = solve(replace(request, strategies=("ddp",)))[0].baselines
    made = []
    for plan in found:
        cost, more = consistency.grouped(prices, plan, discipline)
        under = _under(plan, discipline, request.gpus, cost)
        group = f"each of the {count} groups of {plan.num_ranks} ranks runs {plan.strategy} on {batch // count} samples"
        memory = tuple(m + n for m, n in zip(plan.prediction.memory_bytes_per_rank, more, strict=True))
        prediction = replace(
            under.prediction, samples_per_s=batch / cost.total_s if cost.total_s else 0.0,
            memory_bytes_per_rank=memory * count,
        )  # fmt: skip
        certificate = replace(plan.certificate, space=f"inside a group; {discipline} was asked for by name")
        made.append(
            replace(
                under, global_batch=batch, prediction=prediction, certificate=certificate, baselines=baselines,
                confidence=None, notes=(*under.notes, group),
            )
        )  # fmt: skip
    return made


def undrained(prices: Prices) -> Price:
    """A pipeline (``1f1b``) that is never drained: a step is the work of its busiest stage. A stage keeps three copies
    of its weights: the newest, and those that the two batches under way compute with.

    Raises:
        UsageError: there is no pipeline of as many stages as ranks.
    """
    best = row("1f1b", prices)
    if best.candidate is None or best.price is None:
        raise UsageError(f"pipedream: {best.why_not or 'no pipeline'}")
    graph, stages = prices.space.profile.graph, []
    for stage in best.price.stages:
        size = sum(c.parameter_bytes for c in graph.components[stage.start : stage.start + len(stage.components)])
        peak = replace(stage.peak, state=stage.peak.state + 2 * size, total=stage.peak.total + 2 * size)
        stages.append(replace(stage, peak=peak, peaks=()))
    busiest, held = max(stages, key=lambda s: s.cost.total_s), max((s.peak for s in stages), key=lambda p: p.total)
    return replace(best.price, cost=busiest.cost, peak=held, stages=tuple(stages))


def _under(plain: Plan, discipline: Discipline, gpus: int, cost: StepCost | None) -> Plan:
    """``plain`` data parallelism under ``discipline``, with separate ranks for servers that need them."""
    name = discipline.name
    notes: tuple[str, ...] = (f"{name}: {WAITS_FOR[name]}", f"what changes: {CHANGES[name]}")
    prediction = plain.prediction
    if cost is None:
        notes = (*notes, "the step time is that of one worker: there is nobody to wait for")
    else:
        before = prediction.step_time_s
        longer = cost.total_s / before if before else 1.0
        prediction = replace(
            prediction,
            step_time_s=cost.total_s,
            step_time_low_s=prediction.step_time_low_s * longer,
            step_time_high_s=prediction.step_time_high_s * longer,
            compute_s=cost.compute_s,
            exposed_communication_s=cost.exposed_s,
            hidden_communication_s=0.0,
            update_s=cost.update_s,
            bubble_s=cost.bubble_s,
            samples_per_s=plain.global_batch / cost.total_s if cost.total_s else 0.0,
        )
    certificate = replace(plain.certificate, space=f"{discipline} alone: it was asked for by name")
    return replace(
        plain,
        strategy=str(discipline),
        gpus=gpus,
        prediction=prediction,
        certificate=certificate,
        notes=(*plain.notes, *notes),
        consistency=discipline,
    )
