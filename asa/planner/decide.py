"""``plan``: prices the baselines, searches the space, and returns plans with certificates."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from asa.cost.constants import constant
from asa.cost.machine.estimate import on_device
from asa.errors import InfeasibleError
from asa.interfaces.strategy import Strategies
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.plan import KEPT_OUT, Certificate, CurvePoint, Plan
from asa.ir.profile import Profile
from asa.planner import clock
from asa.planner.answer import disciplines, infeasible
from asa.planner.answer.canonical import improved
from asa.planner.answer.confidence import faster
from asa.planner.answer.prediction import noise
from asa.planner.answer.written import circumstances, pins_allow, plan_of
from asa.planner.budget import PROVED, ROUNDING, USUAL, Budget
from asa.planner.pipeline.whole import StrategyRow, table
from asa.planner.search import Outcome, next_best, search
from asa.planner.space import baselines
from asa.planner.space.baselines import check_request, requested_discipline
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.nearest import retied, single_changes, start
from asa.planner.space.request import Request
from asa.planner.space.space import Space
from asa.planner.stage.problem import MS

_WORTH = 0.02
"""Gap above which a note suggests a longer search."""
_LEAST = 0.5
"""Least share of the time limit for the search, whatever the whole strategies took."""
_AGAIN = 0.5
"""Share of the time limit for improving a plan with a low peak, where the search found none."""
_BUSY, _SHORT_S = 2.0, 0.1
"""Wall seconds per second of work above which a machine counts as busy, and the least seconds of work to divide by."""
_TIE = 1 + ROUNDING
"""Factor up to which a time counts as equal to the fastest, because of rounding."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off inside, and on again afterwards if it was on. A search makes hundreds of
    thousands of objects that stay, and each pass over them takes as long as pricing all plans with one number of
    microbatches. In a forked process it also copies every shared page."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@uncollected()
def plan(
    profile: Profile, cluster: Cluster, strategies: Strategies, request: Request, *, known: Prices | None = None,
    budget: Budget = USUAL,
) -> list[Plan]:  # fmt: skip
    """The best ``request.top_k`` plans, best first. ``known`` as for :class:`asa.planner.space.candidate.Prices`.

    The answer is never predicted to be slower than a whole strategy that fits, with one exception: on a measured
    machine plain data parallelism is the answer unless a plan is faster with enough probability (decision 0038). A
    mixed plan that beats the best whole strategy by less than the noise is replaced by it. In both cases the
    certificate shows the gap; ``request.prefer_simple`` false turns off both.

    Raises:
        UsageError: unknown strategies, contradictory pins, more devices than the cluster has.
        InfeasibleError: nothing fits; names what does not fit and a remedy.
        UnavailableError: the solver is not installed.
    """
    order = cluster.fastest_first()
    if order is not None:
        plans = plan(profile, cluster.ordered(order), strategies, request, known=known, budget=budget)
        return [_on_devices(p, cluster, order) for p in plans]
    discipline = requested_discipline(request)
    if discipline is not None:
        check_request(cluster, strategies, request)
        anything = Request(
            gpus=request.gpus, global_batch=request.global_batch, memory_bytes=request.memory_bytes,
            optimizer=request.optimizer,
        )  # fmt: skip
        return disciplines.planned(
            discipline,
            request,
            lambda plain: plan(profile, cluster, strategies, plain, known=known, budget=budget),
            Prices(Space(on_device(profile, cluster), cluster, strategies, anything)),
        )
    started = clock.now()
    names = tuple(dict.fromkeys(request.strategies or ("asa",)))
    check_request(cluster, strategies, request)
    used = on_device(profile, cluster) if known is None else known.space.profile
    prices = Prices(Space(used, cluster, strategies, request), known)
    if "asa" in names and infeasible.overfull(prices.space):
        raise infeasible.explain(prices, prices.space.pinned)
    rows = table(prices, names)
    eligible = [r for r in rows if r.fits and r.candidate is not None and pins_allow(prices.space, r.candidate)]
    if "asa" not in names:
        return _whole(profile, prices, names, rows, eligible, started)
    if not eligible and infeasible.hopeless(prices, prices.space.pinned):
        raise infeasible.explain(prices, prices.space.pinned)
    fastest_s, pins = min((r.seconds for r in eligible), default=0.0), prices.space.pinned
    simplest = next((r for r in eligible if r.seconds <= fastest_s * _TIE), None)  # most like training on one device
    uniform = [r.candidate for r in sorted(eligible, key=lambda r: r.seconds)]
    fitting = [r.candidate for r in sorted(rows, key=lambda r: r.seconds) if r.fits]
    begin = start(prices, fitting, pins) if request.pins else None
    outcome = search(
        prices,
        solver=request.solver,
        time_limit_s=max(_LEAST * request.time_limit_s, request.time_limit_s - (clock.now() - started)),
        allowed=pins,
        incumbent_s=simplest.seconds if simplest else float("inf"),
        baselines=[c for c in (*uniform, begin) if c is not None],
        start=begin,
        budget=budget,
    )
    found, first = outcome, outcome.best or (simplest.candidate if simplest else None)
    if first is not None and (other := retied(prices, first, pins)).key != first.key:
        outcome = replace(outcome, best=other)
    chosen, notes = _choose(prices, outcome, simplest)
    replicas = next((r for r in eligible if r.name == "ddp"), None)
    if chosen is None:
        chosen, notes = _least(prices, proved=outcome.lower_bound_s == float("inf"))
    fastest_s = min([prices.of(chosen).cost.total_s, *([prices.of(outcome.best).cost.total_s] if outcome.best else [])])
    chosen, notes = _surely(prices, chosen, notes, replicas)
    notes = (*notes, *circumstances(prices, chosen))
    candidates = [chosen, *([outcome.best] if outcome.best else []), *(r.candidate for r in eligible if r.candidate)]
    unlike = sorted({c.key: c for c in candidates}.values(), key=lambda c: prices.of(c).cost.total_s)
    if request.top_k > 1:
        candidates += next_best(prices, found, request.top_k - 1, request.time_limit_s)
        candidates += single_changes(prices, chosen, pins, request.top_k - 1, clock.now() + request.time_limit_s)
    distinct = list({c.key: c for c in reversed(candidates)}.values())
    others = sorted((c for c in distinct if c.key != chosen.key), key=lambda c: prices.of(c).cost.total_s)
    answers = []
    for i, candidate in enumerate((chosen, *others[: request.top_k - 1])):
        certificate = _certificate(prices, candidate, outcome, clock.now() - started)
        strategy = "asa" if i == 0 else candidate.origin
        rivals = [c for c in unlike if c.key != candidate.key]  # near copies of a plan are no alternatives (0201)
        all_notes = (*notes, *_unfinished(fastest_s, outcome)) if i == 0 else ()
        answers.append(plan_of(profile, prices, candidate, strategy, certificate, rows, all_notes, rivals))
    return answers


def _on_devices(plan: Plan, cluster: Cluster, order: tuple[int, ...]) -> Plan:
    """``plan`` as a plan for ``cluster``, of which rank i has device ``order[i]``, with a note on that."""
    devices = ",".join(map(str, order[: plan.num_ranks]))
    visible = len(cluster.levels) == 1 and plan.device_type == "cuda"
    how = f"; start it with CUDA_VISIBLE_DEVICES={devices}" if visible else ""
    note = f"devices are taken fastest first, then by memory: the ranks run on devices {devices}, in this order{how}"
    return replace(plan, cluster_fingerprint=codec.fingerprint(cluster), devices=order, notes=(*plan.notes, note))


def _below(bound_s: float, seconds: float) -> float:
    """The share by which ``bound_s`` is below ``seconds``; 0 where it is not, or ``seconds`` is 0."""
    return max(0.0, 1 - bound_s / seconds) if seconds > 0 else 0.0


def _unfinished(fastest_s: float, outcome: Outcome) -> tuple[str, ...]:
    """Notes on a search that was not finished: a longer one may find a faster plan; the machine was busy."""
    gap = _below(outcome.lower_bound_s, fastest_s)
    notes: list[str] = []
    if gap > _WORTH:
        notes.append(
            f"the search was stopped after {outcome.seconds:.2g} s, its bound is {100 * gap:.2g} % lower: a longer "
            "--time-limit may find a faster plan"
        )
    if gap > PROVED and outcome.wall_s > _BUSY * max(outcome.seconds, _SHORT_S):
        notes.append(
            f"this machine was busy: {outcome.seconds:.2g} s of search took {outcome.wall_s:.2g} s, and less may have "
            "been tried than on a quiet one"
        )
    return tuple(notes)


def _whole(
    profile: Profile, prices: Prices, wanted: Sequence[str], rows: list[StrategyRow], eligible: list[StrategyRow],
    started: float,
) -> list[Plan]:  # fmt: skip
    """The plans where only whole strategies were asked for: those that fit, fastest first."""
    space = prices.space
    asked_for = {m: w for w in reversed(wanted) for m in baselines.members(w, space.strategies, space.request.gpus)}
    among = sorted((r for r in eligible if r.name in asked_for), key=lambda r: r.seconds)
    if not among:
        reasons = {r.name: r.why_not or KEPT_OUT for r in rows if r.name in asked_for}
        message = f"none of {', '.join(wanted)} fits: " + "; ".join(f"{name}: {why}" for name, why in reasons.items())
        if len(reasons) == 1:
            message = f"{wanted[0]} cannot be had: {reasons.popitem()[1]}"
        raise InfeasibleError(f"{message}; {infeasible.remedy(prices, sorted(asked_for))}")
    plans, bound_s = [], min(among[0].seconds, *(r.bound_s for r in rows if r.name in asked_for))
    for row in among[: prices.space.request.top_k]:
        assert row.candidate is not None
        gap = _below(bound_s, row.seconds)
        certificate = Certificate(
            solver="enumeration", status="optimal" if gap <= 0 else "feasible", lower_bound_s=bound_s, gap=gap,
            space=f"the whole strategies {', '.join(sorted(asked_for))}", solve_s=clock.now() - started,
        )  # fmt: skip
        name, notes = row.name if row.name in wanted else asked_for[row.name], circumstances(prices, row.candidate)
        rivals = [r.candidate for r in among if r.candidate is not None and r.candidate.key != row.candidate.key]
        plans.append(plan_of(profile, prices, row.candidate, name, certificate, rows, notes, rivals))
    return plans


def _choose(prices: Prices, outcome: Outcome, simplest: StrategyRow | None) -> tuple[Candidate | None, tuple[str, ...]]:
    """The answer (None where nothing fits) and its notes. ``simplest``: the best whole strategy."""
    best = outcome.best
    if simplest is None or simplest.price is None or simplest.candidate is None:
        return best, ()
    stay_note = f"stay with {simplest.name}: {_open(_below(outcome.lower_bound_s, simplest.seconds))}"
    gain = 0.0 if best is None else simplest.seconds - prices.of(best).cost.total_s
    if best is None or best.key == simplest.candidate.key or gain <= 0:
        return simplest.candidate, (stay_note,)
    unclear = noise(prices.of(best), simplest.price)
    if prices.space.request.prefer_simple and gain < unclear:
        gain_share, noise_share = (100 * x / simplest.seconds for x in (gain, unclear))
        note = f"{stay_note}, the best plan found gains {gain_share:.2g} %, below the noise of {noise_share:.2g} %"
        return simplest.candidate, (note,)
    note = f"{100 * gain / simplest.seconds:.3g} % faster than the best whole strategy, {simplest.name}"
    return best, (note,)


def _open(possible: float) -> str:
    """A note on the share ``possible`` by which plans may be faster. Only a small one is called a possible gain."""
    if possible <= _WORTH:
        return f"the best possible gain is {100 * possible if possible > PROVED else 0:.2g} %"
    return f"nothing was found that is surely faster; up to {100 * possible:.2g} % are not ruled out"


def _surely(
    prices: Prices, chosen: Candidate, notes: tuple[str, ...], replicas: StrategyRow | None
) -> tuple[Candidate, tuple[str, ...]]:
    """The answer and its notes, after comparing it with plain data parallelism. That replaces a plan that is not faster
    with enough probability on a measured machine; with ``request.prefer_simple`` off, a note says so instead."""
    space = prices.space
    if replicas is None or replicas.candidate is None or replicas.price is None or not space.measured:
        return chosen, notes
    ddp, answer = (replicas.candidate, replicas.price), (chosen, prices.of(chosen))
    if ddp[0].key == chosen.key:
        return chosen, notes
    sure = faster(answer, ddp, space.profile, space.strategies, space.cluster.overlap)
    if sure >= constant("sure_enough"):
        return chosen, notes
    likely = f"with a probability of {100 * sure:.0f} % only: `asa plan --verify 3` measures both"
    if not space.request.prefer_simple:
        return chosen, (*notes, f"faster than ddp {likely}")
    won = 100 * _below(answer[1].cost.total_s, replicas.seconds)
    what = "the best plan found" if chosen.origin == "asa" else chosen.origin
    note = f"stay with ddp: {what} is predicted to be {won:.2g} % faster, {likely}"
    return ddp[0], (note,)


def _least(prices: Prices, *, proved: bool) -> tuple[Candidate, tuple[str, ...]]:
    """The fastest of the plans with low peaks that fit, as far as local search improves it, and its notes, where the
    search found no plan in its time.

    Raises:
        InfeasibleError: none of them fits, or it is ``proved`` that nothing does.
    """
    tried, ends = list[infeasible.Leanest](), clock.now() + prices.space.request.time_limit_s
    for x in () if proved else infeasible.low_peak_plans(prices, prices.space.pinned):
        tried.append(x)
        if clock.now() > ends and any(t.excess <= 0 for t in tried):
            break
    best = min((t for t in tried if t.excess <= 0), key=lambda t: t.price.cost.total_s, default=None)
    if best is None:
        smallest = min(tried, key=lambda t: t.excess, default=None)
        raise infeasible.explain(prices, prices.space.pinned, proved=proved, smallest=smallest)
    until = clock.counted() + _AGAIN * prices.space.request.time_limit_s
    note = "found around one of those that need least memory: the search found none in its time"
    return improved(prices, best.candidate, prices.space.pinned, until), (note,)


def _certificate(prices: Prices, candidate: Candidate, outcome: Outcome, seconds: float) -> Certificate:
    answer = prices.of(candidate).cost.total_s
    bound = min(outcome.lower_bound_s, answer)
    gap = _below(bound, answer)
    return Certificate(
        solver=outcome.solver,
        status="optimal" if gap <= PROVED else "feasible",
        lower_bound_s=bound,
        gap=0.0 if gap <= PROVED else gap,
        space=prices.space.describe(),
        solve_s=seconds,
        curve=_curve(outcome),
    )


def _curve(outcome: Outcome) -> tuple[CurvePoint, ...] | None:
    """The search's curve in a few points, at each of which the gap is at most 3/4 of that before, and the last one."""
    points: list[CurvePoint] = []
    last = float("inf")
    for i, (seconds, best, bound) in enumerate(outcome.curve):
        gap = 1 - bound / best if 0 < best < float("inf") else 1.0
        if gap <= 0.75 * last or i + 1 == len(outcome.curve):
            last = gap
            point = CurvePoint(
                seconds=seconds, best_s=best / MS if best < float("inf") else None, lower_bound_s=max(0.0, bound) / MS
            )
            points.append(point)
    return tuple(points) or None
