"""The search: widths and microbatches best-first by their bounds, a solver inside each, a certificate over all.

Every (width, microbatches) carries a lower bound that rises in steps: compute alone; the exact optimum *without* the
memory limit, by the label DP; where that does not fit, the DP with the limit, for a moment; the solver that was asked
for. Always the one with the lowest bound is taken a step further, until that bound reaches the best plan: what is left
cannot hold a better one. Microbatches double only while memory binds, that is while the fastest plan without a limit
does not fit.

So every answer of the ILP was also found, or bounded, by the DP. Where both have proved an optimum and they differ,
the definition of the problem decides.
"""

from __future__ import annotations

import heapq
import logging
import time
from dataclasses import dataclass, replace

from asa.errors import AsaError
from asa.planner import dp, exhaustive, ilp, joint
from asa.planner.candidate import Candidate, Prices
from asa.planner.formulate import Formulation, formulate
from asa.planner.problem import MS, Choice, Problem, Solution
from asa.planner.request import SolverName
from asa.planner.space import Allowed, anything, widths
from asa.planner.staged import StagedSpace

_LOG = logging.getLogger("asa")
_CLOSE = 1e-9
_CHECK_S = 0.25
_SHARE = 0.7
"""Of the time, at most, that single stages are searched for where there are pipelines too."""
_WIDE = 16
_PATIENCE_S = 0.5
_ENOUGH = 0.005
"""A gap that is not worth searching on for, once patience is over: a tenth of the usual error of a step time."""

TOLERANCE_GIB = 1e-5
"""By how much a solver may overstep the memory limit (10 KiB)."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the search found and proved. Seconds.

    ``choice`` in ``formulation`` is ``best`` where that has one stage; ``best`` is None where nothing fits. ``curve``:
    (seconds, best, bound in ms) of the search over pipelines, as they got better.
    """

    best: Candidate | None
    choice: Choice
    formulation: Formulation | None
    lower_bound_s: float
    solver: str
    solved: int
    pruned: int
    seconds: float
    curve: tuple[tuple[float, float, float], ...] = ()


class _Place:
    """One (width, microbatches): its formulation, and the optimum without the memory limit."""

    def __init__(self, formulation: Formulation, time_limit_s: float) -> None:
        self.formulation = formulation
        self.problem = formulation.problem
        limit = self.problem.capacity + TOLERANCE_GIB
        if dp.memory_floor(self.problem) > limit:
            self.free = Solution(choice=None, value=float("inf"), bound=float("inf"), solver="dp")
        else:
            self.free = dp.solve(self.problem.without_memory_limit(), time_limit_s=time_limit_s)
        self.fits = self.free.choice is not None and exhaustive.peak(self.problem, self.free.choice) <= limit
        self.checked = self.free

    def check(self, time_limit_s: float, cutoff_ms: float) -> Solution:
        """The DP's answer with the memory limit, as far as it gets in that time."""
        if not self.fits:
            found = dp.solve(self.problem, time_limit_s=time_limit_s, cutoff=cutoff_ms)
            self.checked = replace(found, bound=max(found.bound, self.free.bound))
        return self.checked


class _Places:
    """All (width, microbatches) of a space, formulated when first asked for."""

    def __init__(self, prices: Prices, allowed: Allowed, ends: float) -> None:
        self._prices = prices
        self._allowed = allowed
        self._ends = ends
        self._known: dict[tuple[int, int], _Place | None] = {}
        self._apart: dict[int, tuple[float, float]] = {}

    def bounds(self) -> list[tuple[float, int, int]]:
        """(ms of compute alone, width, microbatches) of each that could run."""
        request = self._prices.space.request
        counts = [2**k for k in range(request.global_batch.bit_length())]
        found = [(self._prices.compute_alone(w, m) * MS, w, m) for w in widths(request.gpus) for m in counts]
        return [f for f in found if f[0] < float("inf")]

    def apart(self, width: int, num_microbatches: int, alone_ms: float) -> float:
        """A bound in ms that also counts gradient synchronisation, every component by itself; only of wide stages,
        where it saves more than it takes.

        Synchronisation hides behind backward at most, which is a part of one microbatch's computation.
        """
        if width <= _WIDE:
            return alone_ms
        if width not in self._apart:
            self._apart[width] = self._synchronised(width)
        whole, once = self._apart[width]
        m = num_microbatches
        return whole if m == 1 else max(alone_ms, alone_ms * (1 - 1 / m) + once)

    def _synchronised(self, width: int) -> tuple[float, float]:
        """In ms: a bound on a step of one microbatch, and on what comes once per step."""
        space, pricer = self._prices.space, self._prices.pricer(width, 1)
        hidden = max(0.0, space.cluster.overlap.saving) * space.cluster.overlap.compute_slowdown
        whole = once = 0.0
        for i in range(len(space.profile.graph)):
            ways = (w for w in space.ways(i, width, 1, self._allowed) if not w.checkpoint)
            costs = [pricer.component(i, way) for way in ways]
            late = [c.sync_s + c.update_s + c.update_communication_s for c in costs]
            whole += min(
                (x + c.compute_s + c.blocking_s - hidden * c.window_s for x, c in zip(late, costs, strict=True)),
                default=float("inf"),
            )
            once += min(late, default=float("inf"))
        return whole * MS, once * MS

    def get(self, width: int, num_microbatches: int) -> _Place | None:
        """The place, or None where it is not in the space: it cannot run, or fewer microbatches are enough."""
        key = (width, num_microbatches)
        if key not in self._known:
            self._known[key] = None
            fewer = self.get(width, num_microbatches // 2) if num_microbatches > 1 else None
            if num_microbatches == 1 or (fewer is not None and not fewer.fits):
                formulation = formulate(self._prices, width, num_microbatches, self._allowed)
                if formulation is not None:
                    self._known[key] = _Place(formulation, max(0.1, self._ends - time.monotonic()))
        return self._known[key]


def search(
    prices: Prices,
    *,
    solver: SolverName,
    time_limit_s: float,
    allowed: Allowed = anything,
    incumbent_s: float = float("inf"),
) -> Outcome:
    """The fastest plan in the space, among those that ``allowed`` lets through: one stage first, then several.

    As :func:`search_stage`; the best single stage is the incumbent of the search over pipelines.
    """
    started = time.monotonic()
    space = prices.space
    piping = space.schedules and space.request.gpus > 1 and len(space.profile.graph) > 1
    found = search_stage(
        prices,
        solver=solver,
        time_limit_s=time_limit_s * (_SHARE if piping else 1.0),
        allowed=allowed,
        incumbent_s=incumbent_s,
    )
    if not piping:
        return found
    staged = StagedSpace(prices, allowed)
    best_s = min(incumbent_s, prices.of(found.best).cost.total_s if found.best else float("inf"))
    left = max(0.1, time_limit_s - (time.monotonic() - started))
    piped = joint.search(
        staged, incumbent_ms=best_s * MS, time_limit_s=left, gap=_ENOUGH, patience_s=_PATIENCE_S
    )  # fmt: skip
    bound_s = min(found.lower_bound_s, piped.bound / MS)
    seconds = time.monotonic() - started
    if piped.skeleton is None:
        return replace(found, lower_bound_s=bound_s, seconds=seconds, curve=piped.curve)
    return replace(
        found,
        best=staged.candidate(piped.skeleton, piped.choices),
        choice=(),
        formulation=None,
        lower_bound_s=bound_s,
        solver=f"{found.solver}; pipelines by dp",
        seconds=seconds,
        curve=piped.curve,
    )


def search_stage(
    prices: Prices,
    *,
    solver: SolverName,
    time_limit_s: float,
    allowed: Allowed = anything,
    incumbent_s: float = float("inf"),
) -> Outcome:
    """The fastest plan of a single stage, among those that ``allowed`` lets through.

    ``incumbent_s`` is the time of a plan already known (a whole strategy that fits): a search that ends without a
    ``best`` has proved that nothing is faster.

    Raises:
        UsageError: too many plans for ``exhaustive``.
        UnavailableError: the solver is not installed.
    """
    started = time.monotonic()
    ends = started + time_limit_s
    places = _Places(prices, allowed, ends)
    formulation: Formulation | None = None
    choice: Choice = ()
    best_ms, lowest_ms = incumbent_s * MS, float("inf")
    names: set[str] = set()
    solved = 0
    queue = [(bound, -1, w, m) for bound, w, m in places.bounds()]
    heapq.heapify(queue)
    while queue and queue[0][0] < best_ms * (1 - _CLOSE):
        if time.monotonic() > ends and best_ms < float("inf"):
            lowest_ms = min(lowest_ms, queue[0][0])
            break
        bound_ms, steps, width, m = heapq.heappop(queue)
        if steps < 0:
            heapq.heappush(queue, (max(bound_ms, places.apart(width, m, bound_ms)), 0, width, m))
            continue
        place = places.get(width, m)
        if place is None:
            continue
        left = max(0.1, ends - time.monotonic())
        if steps < 2:
            check_s = left if solver == "dp" else min(left, _CHECK_S)
            bound = place.free.bound if steps == 0 else place.check(check_s, best_ms).bound
            heapq.heappush(queue, (max(bound_ms, bound), steps + 1, width, m))
            continue
        found = _solve(place, solver, best_ms, left)
        names.add(found.solver)
        solved += 1
        lowest_ms = min(lowest_ms, max(found.bound, bound_ms))
        if found.choice is not None and found.value < best_ms:
            best_ms, formulation, choice = found.value, place.formulation, found.choice
    bound_s = min(lowest_ms, best_ms) / MS
    return Outcome(
        best=None if formulation is None else formulation.candidate(choice),
        choice=choice,
        formulation=formulation,
        lower_bound_s=bound_s,
        solver=_solvers(names),
        solved=solved,
        pruned=len(queue),
        seconds=time.monotonic() - started,
    )


def _solvers(names: set[str]) -> str:
    """Who found and proved the answer; nobody had to solve anything where the bounds alone were enough."""
    if not names:
        return "dp, as bounds"
    return " and ".join(sorted(names)) + (", checked by dp" if names != {"dp"} else "")


def _solve(place: _Place, solver: SolverName, cutoff_ms: float, time_limit_s: float) -> Solution:
    """The problem in full. Where the fastest plan without a limit fits, the limit is left out."""
    problem: Problem = place.problem.without_memory_limit() if place.fits else place.problem
    known = place.checked
    if solver == "dp":
        return known
    if solver == "exhaustive":
        found = exhaustive.solve(problem)
    else:
        found = ilp.solve(problem, time_limit_s=time_limit_s, cutoff=min(cutoff_ms, known.value * (1 + 1e-6)))
    return _arbitrate(known, found, cutoff_ms, problem)


def _arbitrate(known: Solution, found: Solution, cutoff_ms: float, problem: Problem) -> Solution:
    """Two proved optima that differ: what the definition says of each choice decides, and the log says so.

    A solver may overstep a limit by its tolerance, so a choice counts only if it fits exactly.

    Raises:
        AsaError: a choice is not worth what its solver says. That is a bug.
    """
    if not (known.proved and found.proved) or known.value >= cutoff_ms * (1 - 1e-5):
        return found
    if abs(found.value - known.value) <= 1e-5 * known.value:
        return found
    for s in (known, found):
        if s.choice is not None and abs(exhaustive.value(problem, s.choice) - s.value) > 1e-5 * s.value:
            raise AsaError(
                f"{s.solver} prices its plan at {s.value:.9g} ms, which takes "
                f"{exhaustive.value(problem, s.choice):.9g} ms; please report this"
            )
    chosen = [(s, s.choice) for s in (known, found) if s.choice is not None]
    fits = [s for s, choice in chosen if exhaustive.peak(problem, choice) <= problem.capacity]
    _LOG.warning("%s finds %.9g ms and %s %.9g ms", found.solver, found.value, known.solver, known.value)
    return min(fits, key=lambda s: s.value, default=known)


def next_best(outcome: Outcome, count: int, time_limit_s: float) -> list[Candidate]:
    """Up to ``count`` more candidates of the width and microbatches of the best one, in order of their time; as many
    as are found in ``time_limit_s``."""
    if outcome.formulation is None or outcome.best is None:
        return []
    problem, found = outcome.formulation.problem, [outcome.choice]
    ends = time.monotonic() + time_limit_s
    while len(found) <= count and (left := ends - time.monotonic()) > 0:
        solution = ilp.solve(problem, time_limit_s=left, forbidden=tuple(found))
        if solution.choice is None or solution.choice in found:
            break
        found.append(solution.choice)
    return [outcome.formulation.candidate(c) for c in found[1:]]
