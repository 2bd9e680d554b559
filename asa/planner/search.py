"""The search: single stages and pipelines, best-first by their bounds, with a certificate over all.

Single stages are searched first, alone, for a part of the time (:mod:`asa.planner.stage.singles`), then together with
pipelines (:mod:`asa.planner.pipeline.joint`). Each step refines the part of the space with the lowest bound, until that
bound reaches the time of the best plan: then no part holds a better one.

The label program (:mod:`asa.planner.stage.labels`) finds plans and proves bounds. Where the answer is a single stage
and the ILP was asked for, the ILP solves the same problem again, independently. Where both have proved different
optima, the definition of the problem decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from asa.errors import AsaError
from asa.planner import clock
from asa.planner.answer.canonical import canonical, improved
from asa.planner.budget import PROVED, ROUNDING, USUAL, Budget
from asa.planner.parallel import Exchange, Forked, can_fork
from asa.planner.pipeline import joint
from asa.planner.pipeline.climb import first_plans, mixed_plan
from asa.planner.pipeline.floors import floors
from asa.planner.pipeline.kinds import pipelines, views
from asa.planner.pipeline.practice import on_fewer
from asa.planner.pipeline.staged import Pipelined, StagedSpace
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.request import SolverName
from asa.planner.space.space import MOST_IN_A_PIPELINE, Allowed, anything
from asa.planner.stage import exhaustive, ilp
from asa.planner.stage.formulate import Formulation
from asa.planner.stage.lattice import INF
from asa.planner.stage.lookup import StageLookup
from asa.planner.stage.problem import MS, Choice, Problem, Solution
from asa.planner.stage.shares import DividedBounds, Divisions
from asa.planner.stage.singles import Single, first_plan, likely_tight, singles

_LOG = logging.getLogger("asa")
_SLACK = 1e-7
"""Share added to the time of a uniform plan on fewer devices, so that the search can find the same plan itself."""
_HOPELESS = 1.05
"""A first plan of several stages that takes this multiple of the best plan is not improved (decision 0177)."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a search.

    ``best`` is None where no plan fits or none beats the one already known. If ``best`` has one stage, ``choice`` in
    ``formulation`` is the same plan. ``curve`` has (seconds, best in ms, bound in ms) at each improvement. ``seconds``
    are seconds of work (:mod:`asa.planner.clock`), ``wall_s`` the wall seconds that passed meanwhile.
    """

    best: Candidate | None
    choice: Choice
    formulation: Formulation | None
    lower_bound_s: float
    solver: str
    seconds: float
    curve: tuple[tuple[float, float, float], ...] = ()
    wall_s: float = 0.0


def search(
    prices: Prices,
    *,
    solver: SolverName,
    time_limit_s: float,
    allowed: Allowed = anything,
    incumbent_s: float = float("inf"),
    baselines: Sequence[Candidate] = (),
    start: Candidate | None = None,
    budget: Budget = USUAL,
) -> Outcome:
    """The fastest plan in the space that ``allowed`` permits; of plans that take equally long, the first in an order
    that does not depend on the clock (:mod:`asa.planner.answer.canonical`).

    ``incumbent_s`` is the step time of a plan already known, such as a whole strategy that fits; only faster plans are
    searched for. ``baselines`` are the whole strategies that fit, fastest first, with which the search begins.
    ``start``: a plan that fits and is allowed, which is the answer where nothing is faster.

    Raises:
        UsageError: too many plans for ``exhaustive``.
        UnavailableError: the solver is not installed.
    """
    started, began = clock.now(), time.monotonic()
    polish_s = min(budget.polish_s, budget.polish * time_limit_s)
    ends = started + time_limit_s - polish_s
    outcome = _search(prices, solver, ends, allowed, incumbent_s, baselines, start, budget)
    best_s = incumbent_s if outcome.best is None else prices.of(outcome.best).cost.total_s
    if outcome.lower_bound_s < best_s * (1 - budget.enough):  # where the search ended early, time is left
        polish_s = max(polish_s, (started + time_limit_s - clock.now()) / 2)
        outcome = _with_mixed(prices, outcome, allowed, baselines, clock.counted() + polish_s)
    until = clock.counted() + polish_s
    if outcome.best is None and baselines and outcome.lower_bound_s < incumbent_s * (1 - PROVED):
        improvement = improved(prices, baselines[0], allowed, until)
        if prices.of(improvement).cost.total_s < incumbent_s * (1 - PROVED):
            outcome = replace(outcome, best=replace(improvement, origin="asa"), solver="dp, as bounds")
    if outcome.best is None:
        return replace(outcome, wall_s=time.monotonic() - began)
    before_ms = prices.of(outcome.best).cost.total_s * MS
    proved = outcome.lower_bound_s * MS >= before_ms * (1 - PROVED)
    if proved:
        first = canonical(prices, outcome.best, allowed)
    else:  # which plan was found depends on the clock, so a limit on ties does no harm
        improvement = improved(prices, outcome.best, allowed, until)
        first = canonical(prices, improvement, allowed, until)
    value_ms = prices.of(first).cost.total_s * MS
    used_s = clock.now() - started
    last = ((used_s, value_ms, outcome.lower_bound_s * MS),) if value_ms < before_ms * (1 - ROUNDING) else ()
    wall_s = time.monotonic() - began
    return replace(outcome, best=first, seconds=used_s, wall_s=wall_s, curve=(*outcome.curve, *last))


def _with_mixed(
    prices: Prices, outcome: Outcome, allowed: Allowed, baselines: Sequence[Candidate], until: float
) -> Outcome:
    """The outcome, with a pipeline whose stages differ in width if that is faster than its pipeline."""
    known = outcome.best or next(iter(baselines), None)
    if known is None or len(known.widths) < 2 or prices.space.cluster.unequal:
        return outcome
    mixed = mixed_plan(prices, allowed, known, until)
    return outcome if mixed is None else replace(outcome, best=mixed, solver="dp, as bounds")


def _search(
    prices: Prices, solver: SolverName, ends: float, allowed: Allowed, incumbent_s: float,
    baselines: Sequence[Candidate], start: Candidate | None, budget: Budget,
) -> Outcome:  # fmt: skip
    started = clock.now()
    space = prices.space
    gpus = space.request.gpus
    room = max(space.room(rank, 1, gpus) for rank in range(gpus))
    piping = bool(space.schedules) and gpus > 1 and len(space.profile.graph) > 1 and room > 0
    piping = piping and space.microbatches()[0] <= MOST_IN_A_PIPELINE
    divided = DividedBounds(prices, allowed)
    lookups = [StageLookup(view, allowed, among, budget, divided) for view, among in views(prices, divided.solved)]
    stages, divisions = [s for lookup in lookups for s in singles(lookup, solver)], divided.divisions()
    start_s = float("inf") if start is None else prices.of(start).cost.total_s
    plan = start if start_s < incumbent_s else None
    incumbent_s = min(incumbent_s, start_s)
    best = joint.Incumbent(None, incumbent_s * MS, started)
    run = _Search(prices, allowed, baselines, best, stages, divisions, ends, budget)
    if not piping:
        plan = run.first_of_one_stage() or plan
        joint.best_first([*stages, *divisions], best, ends, patience=started + budget.patience_s, gap=budget.enough)
        bound_ms, limit_ms, curve = best.bound, best.limit, best.curve
    else:
        first, piped = run.search()
        plan = first or plan
        curve = list(piped.curve)
        values = [x.value for x in stages] + [x.value for x in divisions]
        bound_ms, limit_ms = piped.bound, min(best.limit, piped.value, *values)
        if piped.skeleton is not None and piped.value <= limit_ms:
            plan = run.staged.candidate(piped.skeleton, piped.choices)
    division = min(divisions, key=lambda x: x.value, default=None)
    if division is not None and division.value <= limit_ms * (1 + ROUNDING):
        plan = division.plan
    single = min(stages, key=lambda x: x.value, default=None)  # None where the first devices have no memory
    if single is None or single.value > limit_ms * (1 + ROUNDING) or single.value >= incumbent_s * MS:
        return Outcome(
            best=plan, choice=(), formulation=None, lower_bound_s=bound_ms / MS,
            solver="dp" if plan is not None else "dp, as bounds",
            seconds=clock.now() - started, curve=tuple(curve),
        )  # fmt: skip
    assert single.origin is not None
    is_close = bound_ms >= single.value * (1 - budget.enough)
    solution, solver_names = _solve_again(single, solver, ends, is_close=is_close, again_s=budget.again_s)
    assert solution.choice is not None
    return Outcome(
        best=single.origin.formulation.candidate(solution.choice),
        choice=solution.choice,
        formulation=single.origin.formulation,
        lower_bound_s=min(bound_ms, solution.value) / MS,
        solver=solver_names,
        seconds=clock.now() - started,
        curve=tuple(curve),
    )


@dataclass
class _Search:
    """Searches single stages and pipelines of one space, on one core or two. ``best``: the best plan so far;
    ``baselines`` as for :func:`search`."""

    prices: Prices
    allowed: Allowed
    baselines: Sequence[Candidate]
    best: joint.Incumbent
    single_stages: Sequence[Single]
    divisions: Sequence[Divisions]
    ends: float
    budget: Budget

    @cached_property
    def staged(self) -> StagedSpace:
        """The space of pipelines."""
        return pipelines(self.prices, self.allowed)

    def search(self) -> tuple[Candidate | None, Pipelined]:
        """A first plan that is faster than what was known, if one is kept, and the result of the search of pipelines.

        On two cores a forked process makes the first plan of several stages while single stages are searched here, and
        then searches every other number of microbatches. The two exchange their best times once, before that: later
        exchanges would make the answer depend on the clock.
        """
        fork, best, counts = can_fork(), self.best, self.staged.microbatches()
        own_counts, forked_counts = (counts[::2], counts[1::2]) if fork else (counts, ())
        exchange = Exchange()

        def work_in_fork() -> tuple[Candidate | None, float, Pipelined | None]:
            plan, value = self._sketch(exchange if forked_counts else None)
            if not forked_counts:
                return plan, value, None
            best.note_other(value)
            return plan, value, self._search_pipelines((), forked_counts)

        forked = Forked(work_in_fork, fork=fork)
        try:
            narrow = self.first_of_one_stage()
            self._search_singles()
            best.note_other(exchange.exchange(best.limit, forked) if forked_counts else forked.result()[1])
            pipelined = self._search_pipelines([*self.single_stages, *self.divisions], own_counts)
            plan, value, forked_pipelined = forked.result()
            best.note_other(value)
            first = min((x for x in (narrow, plan) if x), key=lambda x: self.prices.of(x).cost.total_s, default=None)
            return first, pipelined if forked_pipelined is None else joint.joined(pipelined, forked_pipelined)
        finally:
            forked.stop()

    def first_of_one_stage(self) -> Candidate | None:
        """A plan on fewer devices that is faster than the best one so far, or None. The likely ones among the single
        stages, which keep their own plans, take a first plan, too."""
        best, until = self.best, clock.counted() + self.budget.narrower_s
        narrow = on_fewer(self.prices, self.allowed, best.limit / MS / (1 + _SLACK), until)
        if narrow is not None:
            best.note_other(self.prices.of(narrow).cost.total_s * MS * (1 + _SLACK))
        uniform = narrow or next((x for x in self.baselines if len(x.widths) == 1), None)
        best.note_other(first_plan(self.single_stages, uniform, best.limit, self.prices.space.request.global_batch))
        return narrow

    def _sketch(self, exchange: Exchange | None) -> tuple[Candidate | None, float]:
        """A first plan of several stages and its step time in ms; None and infinity where it beats nothing."""
        share = self.budget.outlines if joint.searched(self.staged) else self.budget.outlines / 3
        until = clock.counted() + max(self.budget.outlines_s, share * (self.ends - self.best.started))
        first_count = next((x.num_microbatches for x in self.baselines[:1] if x.num_microbatches > 1), None)
        plans = first_plans(self.prices, self.allowed, self.best.limit / MS, until, first_count)
        values = [self.prices.of(x).cost.total_s * MS for x in plans]
        if exchange is not None:
            self.best.note_other(exchange.exchange(min([self.best.limit, *values])))
        share_s = self.budget.polish * (self.ends - self.best.started)
        for plan, value in zip(plans, values, strict=True):
            if value < self.best.limit * _HOPELESS:  # a plan that is the best so far is improved at the end, too
                most_s = self.budget.polish_s * (0.5 if value < self.best.limit else 1.0)
                plan = improved(self.prices, plan, self.allowed, clock.counted() + min(share_s, most_s))
            value = self.prices.of(plan).cost.total_s * MS
            if value < self.best.limit:
                return plan, value
        return None, INF

    def _search_singles(self) -> None:
        """Search single stages for a part of the time."""
        now = clock.now()
        until = now + min(self.budget.singles_s, self.budget.singles * (self.ends - now))
        joint.best_first([*self.single_stages, *self.divisions], self.best, until, patience=now, gap=self.budget.nearly)

    def _search_pipelines(self, others: Sequence[joint.Item], counts: Sequence[int]) -> Pipelined:
        """The result of searching pipelines with ``counts`` microbatches, together with ``others``. Its curve begins
        with that of the search so far."""
        best, staged, budget = self.best, self.staged, self.budget
        staged.likely_tight = likely_tight(self.single_stages)
        floor, paced = floors(staged, best.limit, counts)
        near = {x.m: x for x in paced} if joint.searched(staged) else {}
        floor = {m: bound for m, bound in floor.items() if near or m not in {x.m for x in paced}}
        ends = max(self.ends, clock.now() + budget.rest * (self.ends - best.started))
        pipelined = joint.search(
            staged, incumbent_ms=best.limit, time_limit_s=ends - clock.now(), gap=budget.enough,
            patience_s=max(0.0, best.started + budget.patience_s - clock.now()), started=best.started, floor=floor,
            near=near, others=others if near else [*others, *paced], effort=budget.effort,
        )  # fmt: skip
        lowest_bound = min((b for _, _, b in pipelined.curve), default=0.0)
        curve_so_far = [(t, v, min(b, lowest_bound)) for t, v, b in best.curve]
        return replace(pipelined, curve=(*curve_so_far, *pipelined.curve))


def _solve_again(
    single: Single, solver: SolverName, ends: float, *, is_close: bool, again_s: float = USUAL.again_s
) -> tuple[Solution, str]:
    """The answer of a single stage, and the name of the solvers that found and proved it. If the ILP was asked for, it
    solves the stage again, unless it could not end in time, or the answer is not proved but close to its bound
    (``is_close``), so that more search is not worthwhile."""
    assert single.stage is not None
    known, problem = single.solution, single.stage.active_problem
    known = replace(known, bound=min(known.value, max(known.bound, single.bound)))  # the bound may have risen since
    if single.refused:  # the plan that the ILP would find first does not fit
        return known, known.solver
    if solver == "ilp" and (single.by_ilp or (known.proved and not single.stage.is_small)):
        return known, known.solver
    if solver != "ilp":
        return known, known.solver + (", checked by dp" if solver == "exhaustive" else "")
    remaining_s = min(again_s, ends - clock.now()) if known.proved else ends - clock.now()
    if not known.proved and (is_close or remaining_s <= 0):
        return known, "dp"
    by_ilp = ilp.solve(problem, time_limit_s=max(0.1, remaining_s))
    fits = by_ilp.choice is not None and single.stage.fits_exactly(by_ilp.choice)
    if fits and by_ilp.proved:
        return _arbitrate(known, by_ilp, float("inf"), problem), f"{by_ilp.solver}, checked by dp"
    if fits and by_ilp.value < known.value * (1 - ROUNDING) and not known.proved:
        return by_ilp, f"{by_ilp.solver} and dp"
    return known, "dp"


def _arbitrate(labelled: Solution, by_ilp: Solution, cutoff_ms: float, problem: Problem) -> Solution:
    """The better of two results. Where both are proved and differ, the problem's definition decides, with a warning.

    A solver may exceed a limit by its tolerance, so then a choice counts only if it fits exactly.

    Raises:
        AsaError: a solver's value of its choice is wrong, which is a bug.
    """
    if not (labelled.proved and by_ilp.proved) or labelled.value >= cutoff_ms * (1 - 1e-5):
        return by_ilp
    if abs(by_ilp.value - labelled.value) <= 1e-5 * labelled.value:
        return replace(labelled, solver=by_ilp.solver) if labelled.value <= by_ilp.value * (1 + ROUNDING) else by_ilp
    for s in (labelled, by_ilp):
        if s.choice is not None and abs(exhaustive.value(problem, s.choice) - s.value) > 1e-5 * s.value:
            raise AsaError(
                f"{s.solver} prices its plan at {s.value:.9g} ms, which takes "
                f"{exhaustive.value(problem, s.choice):.9g} ms; please report this"
            )
    chosen = [(s, s.choice) for s in (labelled, by_ilp) if s.choice is not None]
    fitting = [s for s, choice in chosen if exhaustive.peak(problem, choice) <= problem.capacity]
    _LOG.warning("%s finds %.9g ms and %s %.9g ms", by_ilp.solver, by_ilp.value, labelled.solver, labelled.value)
    return min(fitting, key=lambda s: s.value, default=labelled)


def next_best(prices: Prices, outcome: Outcome, count: int, time_limit_s: float) -> list[Candidate]:
    """Up to ``count`` more candidates with the width and microbatches of the best one, fastest first; as many as are
    found in ``time_limit_s``."""
    if outcome.formulation is None or outcome.best is None:
        return []
    problem, choices = outcome.formulation.problem, [outcome.choice]
    ends = clock.now() + time_limit_s
    while len(choices) <= count and (remaining_s := ends - clock.now()) > 0:
        solution = ilp.solve(problem, time_limit_s=remaining_s, forbidden=tuple(choices))
        if solution.choice is None or solution.choice in choices:
            break
        choices.append(solution.choice)
    return [x for x in map(outcome.formulation.candidate, choices[1:]) if prices.fits(x)]
