"""The search: widths and microbatches best-first by their bounds, a solver inside each, a certificate over all.

Every (width, microbatches) is first solved exactly *without* the memory limit by the label DP, which takes
milliseconds and gives a lower bound. In the order of these bounds each is solved in full, until the next bound
passes the best plan: what is left cannot hold a better one. Microbatches double only while memory binds, that is
while the fastest plan without a limit does not fit.
"""

from __future__ import annotations

import heapq
import time

from asa.ir.codec import noun
from asa.planner import dp, exhaustive, ilp
from asa.planner.candidate import Candidate, Prices
from asa.planner.formulate import Formulation, formulate
from asa.planner.problem import MS, Problem, Solution
from asa.planner.request import SolverName
from asa.planner.space import Allowed, anything, widths

TOLERANCE_GIB = 1e-5
"""By how much a solver may overstep the memory limit (10 KiB)."""


@noun
class Outcome:
    """What the search found and proved. ``best`` is None where nothing fits. Seconds."""

    best: Candidate | None
    lower_bound_s: float
    proved: bool
    solver: str
    checked_by: str
    solved: int
    pruned: int
    seconds: float


class _Place:
    """One (width, microbatches), its formulation and what is known without the memory limit."""

    def __init__(self, formulation: Formulation, time_limit_s: float) -> None:
        self.formulation = formulation
        self.problem = formulation.problem
        self.free = dp.solve(self.problem.without_memory_limit(), time_limit_s=time_limit_s)
        self.fits = (
            self.free.choice is not None
            and exhaustive.peak(self.problem, self.free.choice) <= self.problem.capacity + TOLERANCE_GIB
        )


def search(
    prices: Prices,
    *,
    solver: SolverName,
    time_limit_s: float,
    allowed: Allowed = anything,
    incumbent_s: float = float("inf"),
) -> Outcome:
    """The fastest plan in the space, among those that ``allowed`` lets through.

    ``incumbent_s`` is the time of a plan already known (a whole strategy that fits): bounds above it end the search.

    Raises:
        UsageError: too many plans for ``exhaustive``.
        UnavailableError: the solver is not installed.
    """
    started = time.monotonic()
    ends = started + time_limit_s
    best: Candidate | None = None
    best_ms, lowest_ms = incumbent_s * MS, float("inf")
    names: set[str] = set()
    solved = pruned = order = 0
    queue: list[tuple[float, int, _Place]] = []

    def place(width: int, num_microbatches: int) -> None:
        """Queue a width and, while memory binds there, all doublings of its microbatches."""
        nonlocal order
        while num_microbatches <= prices.space.request.global_batch:
            formulation = formulate(prices, width, num_microbatches, allowed)
            if formulation is None:
                return
            found = _Place(formulation, max(0.1, ends - time.monotonic()))
            order += 1
            heapq.heappush(queue, (found.free.bound, order, found))
            if found.fits:
                return
            num_microbatches *= 2

    for width in widths(prices.space.request.gpus):
        place(width, 1)
    while queue:
        bound_ms, _, at = heapq.heappop(queue)
        if bound_ms >= best_ms * (1 - 1e-12) and best is not None:
            lowest_ms = min(lowest_ms, bound_ms)
            pruned += 1 + len(queue)
            break
        found = _solve(at, solver, max(0.1, ends - time.monotonic()))
        names.add(found.solver)
        solved += 1
        lowest_ms = min(lowest_ms, max(found.bound, bound_ms))
        if found.choice is not None and found.value < best_ms * (1 + 1e-12):
            best, best_ms = at.formulation.candidate(found.choice), found.value
        elif found.choice is not None and best is None and found.value <= best_ms * (1 + 1e-9):
            best = at.formulation.candidate(found.choice)
    bound_s = min(lowest_ms, best_ms) / MS
    return Outcome(
        best=best,
        lower_bound_s=bound_s,
        proved=best is not None and best_ms / MS - bound_s <= 1e-6 * max(bound_s, 1e-9),
        solver=" and ".join(sorted(names)) or "dp",
        checked_by="dp",
        solved=solved,
        pruned=pruned,
        seconds=time.monotonic() - started,
    )


def _solve(at: _Place, solver: SolverName, time_limit_s: float) -> Solution:
    """The problem in full. Where the fastest plan without a limit fits, the limit is left out."""
    problem: Problem = at.problem.without_memory_limit() if at.fits else at.problem
    if solver == "dp":
        return at.free if at.fits else dp.solve(problem, time_limit_s=time_limit_s)
    if solver == "exhaustive":
        return exhaustive.solve(problem)
    return ilp.solve(problem, time_limit_s=time_limit_s)
