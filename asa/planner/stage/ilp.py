"""The problem inside a stage as an integer linear program, solved by HiGHS through PuLP.

Variables, for component i, configuration c, layouts a and b:

    x[i,c]   in {0,1}   component i runs in configuration c
    y[i,a,b] in [0,1]   component i has layout a and component i+1 layout b   (integral where x is)
    tau      >= 0       ms during which backward and gradient synchronisation run side by side
    B[k]                sum of windows of the components before k (ms)
    G[k]                synchronisation released behind k (ms)
    S                   all state;  A[k] activations up to k;  D[k] gradients from k on (GiB)

    minimise  sum_i,c work[i,c] x[i,c]  +  sum_i,a,b edge[i,a,b] y[i,a,b]  -  saving tau          (_objective)
    sum_c x[i,c] = 1                                                    for every i               (_choose)
    sum_b y[i,a,b] = sum_{c in layout a} x[i,c]                         for every i, a            (_flow)
    sum_a y[i,a,b] = sum_{c in layout b} x[i+1,c]                       for every i, b            (_flow)
    tau <= sp B[k] + sc G[k]                                            for every k               (_overlap)
    S + A[k] + D[k] + transient[k] + sum_r more[r,k] z[r] <= capacity   for every k               (_memory)
    z[r] >= 1 where run r is chosen from its first component to its last, and no further          (_runs)

The flow *equalities* are the tight linearisation: without overlap and memory the relaxation is a shortest path and
integral. B, G, S, A, D are running sums, which keeps the rows short.

The result is checked: HiGHS through PuLP reports "Optimal" after a time-out, so HiGHS itself is asked how it ended,
the choice is read from x, and the caller computes its value again.

PuLP 3 and PuLP 4 both work. They differ in how terms become a sum (:func:`_sum`) and in how a solve reports its end
(:func:`_ending`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from asa.errors import UnavailableError
from asa.planner import clock
from asa.planner.stage.problem import Choice, Problem, Solution
from asa.planner.stage.runs import RunCharge

Ending = Literal["optimal", "feasible", "infeasible", "nothing"]
"""How a solve ended: with a proved choice, with a choice, with a proof that there is none, or with neither."""

_NAME, _GAP = "ilp (HiGHS)", 0.0
_HAS_SOLUTION = 2
"""HiGHS's number for a solution that is feasible."""


@dataclass
class _Model:
    problem: Problem
    lp: Any
    x: list[list[Any]] = field(default_factory=list)
    y: list[dict[tuple[int, int], Any]] = field(default_factory=list)

    def picked(self, i: int, attribute: str) -> list[tuple[Any, float]]:
        """Terms of the value of ``attribute`` that component i contributes."""
        return [
            (x, getattr(c, attribute)) for x, c in zip(self.x[i], self.problem.configs[i], strict=True)
            if getattr(c, attribute)
        ]  # fmt: skip

    def passed(self, i: int, attribute: str) -> list[tuple[Any, float]]:
        """Terms of the value of ``attribute`` that the edge before component i contributes."""
        if i == 0:
            return []
        edges = self.problem.edges[i - 1]
        return [(y, getattr(edges[ab], attribute)) for ab, y in self.y[i - 1].items() if getattr(edges[ab], attribute)]


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    forbidden: tuple[Choice, ...] = (),
    charges: Sequence[RunCharge] = (),
) -> Solution:
    """The best choice, solved by HiGHS.

    ``forbidden`` choices are excluded, to enumerate the best plans one after the other. ``charges`` are what some runs
    of components hold beyond the sum.

    Raises:
        UnavailableError: PuLP or HiGHS is not installed.
    """
    pulp = _pulp()
    model = _Model(problem, pulp.LpProblem("stage", pulp.LpMinimize))
    _choose(model, pulp)
    _flow(model, pulp)
    tau = _overlap(model, pulp)
    if problem.capacity < float("inf"):
        _memory(model, pulp, _runs(model, pulp, charges))
    for choice in forbidden:
        model.lp += pulp.lpSum(model.x[i][c] for i, c in enumerate(choice)) <= len(choice) - 1
    _objective(model, pulp, tau)
    solver = _solver(pulp, time_limit_s)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = model.lp.solve(solver)
    return _solution(model, pulp, _ending(model.lp, outcome, pulp))


def _choose(model: _Model, pulp: Any) -> None:
    for i, configs in enumerate(model.problem.configs):
        model.x.append([model.lp.add_variable(f"x_{i}_{c}", cat="Binary") for c in range(len(configs))])
        model.lp += pulp.lpSum(model.x[i]) == 1


def _flow(model: _Model, pulp: Any) -> None:
    problem = model.problem
    for i, edges in enumerate(problem.edges):
        y = {ab: model.lp.add_variable(f"y_{i}_{ab[0]}_{ab[1]}", lowBound=0, upBound=1) for ab in edges}
        model.y.append(y)
        for side, j in ((0, i), (1, i + 1)):
            for layout in sorted({c.layout for c in problem.configs[j]} | {ab[side] for ab in edges}):
                flows = [v for ab, v in y.items() if ab[side] == layout]
                chosen = [x for x, c in zip(model.x[j], problem.configs[j], strict=True) if c.layout == layout]
                model.lp += pulp.lpSum(flows) == pulp.lpSum(chosen)


def _overlap(model: _Model, pulp: Any) -> Any:
    problem, n = model.problem, len(model.problem)
    tau = model.lp.add_variable("tau", lowBound=0)
    if problem.saving == 0:
        return tau
    leaving: list[list[tuple[Any, float]]] = [[] for _ in range(n)]
    for i in range(n):
        leaving[i] += model.picked(i, "prompt")
        leaving[problem.release[i]] += model.picked(i, "late")
    before = [model.lp.add_variable(f"B_{k}", lowBound=0) for k in range(n)]
    behind = [model.lp.add_variable(f"G_{k}", lowBound=0) for k in range(n)]
    for k in range(n):
        earlier = [(before[k - 1], 1.0), *model.picked(k - 1, "window")] if k else []
        model.lp += before[k] == _sum(pulp, earlier)
        later = [(behind[k + 1], 1.0), *leaving[k + 1]] if k + 1 < n else []
        model.lp += behind[k] == _sum(pulp, later)
        model.lp += tau <= problem.sp * before[k] + problem.sc * behind[k]
    return tau


def _runs(model: _Model, pulp: Any, charges: Sequence[RunCharge]) -> list[tuple[Any, RunCharge]]:
    """Each run with an expression that is 1 if it is chosen: all of its members, and no way like theirs next to it."""
    indicators, n = [], len(model.problem)
    for r, charge in enumerate(charges):
        z, stop = model.lp.add_variable(f"z_{r}", lowBound=0, upBound=1), charge.start + len(charge.members)
        inside = [(model.x[charge.start + i][c], 1.0) for i, row in enumerate(charge.members) for c in sorted(row)]
        outside = [(model.x[charge.start - 1][c], -1.0) for c in sorted(charge.front)] if charge.start else []
        outside += [(model.x[stop][c], -1.0) for c in sorted(charge.behind)] if stop < n else []
        model.lp += z >= _sum(pulp, [*inside, *outside]) - (len(charge.members) - 1)
        indicators.append((z, charge))
    return indicators


def _memory(model: _Model, pulp: Any, runs: Sequence[tuple[Any, RunCharge]]) -> None:
    problem, n = model.problem, len(model.problem)
    state = model.lp.add_variable("S", lowBound=0)
    standing = [t for i in range(n) for t in (*model.picked(i, "state"), *model.passed(i, "state"))]
    model.lp += state == _sum(pulp, standing)
    activations = [model.lp.add_variable(f"A_{k}", lowBound=0) for k in range(n)]
    gradients = [model.lp.add_variable(f"D_{k}", lowBound=0) for k in range(n)]
    for k in range(n):
        added = [*model.picked(k, "activations"), *model.passed(k, "activations")]
        model.lp += activations[k] == _sum(pulp, [*([(activations[k - 1], 1.0)] if k else []), *added])
        grads = [*([(gradients[k + 1], 1.0)] if k + 1 < n else []), *model.picked(k, "gradients")]
        model.lp += gradients[k] == _sum(pulp, grads)
        moving = _sum(pulp, [*model.picked(k, "transient"), *model.passed(k, "transient")])
        more = _sum(pulp, [(z, charge.more[k]) for z, charge in runs if charge.more[k]])
        model.lp += state + activations[k] + gradients[k] + moving + more <= problem.capacity


def _objective(model: _Model, pulp: Any, tau: Any) -> None:
    terms = [t for i in range(len(model.problem)) for t in (*model.picked(i, "work"), *model.passed(i, "cost"))]
    model.lp.setObjective(_sum(pulp, [*terms, (tau, -model.problem.saving)]))


def _sum(pulp: Any, terms: list[tuple[Any, float]]) -> Any:
    """The sum of coefficient times variable. Adding a term at a time would take n^2 operations for n terms."""
    expression = getattr(pulp.LpAffineExpression, "from_list", pulp.LpAffineExpression)  # PuLP 4, PuLP 3
    return expression(terms)


def _solution(model: _Model, pulp: Any, ending: Ending) -> Solution:
    if ending == "infeasible":
        return Solution(choice=None, value=float("inf"), bound=float("inf"), solver=_NAME)
    if ending == "nothing":
        return Solution(choice=None, value=float("inf"), bound=_dual_bound(model.lp), solver=_NAME)
    choice = tuple(max(range(len(row)), key=lambda c: row[c].value() or 0.0) for row in model.x)
    value = pulp.value(model.lp.objective)
    bound = value if ending == "optimal" else _dual_bound(model.lp)
    return Solution(choice=choice, value=value, bound=bound, solver=_NAME)


def _ending(lp: Any, outcome: Any, pulp: Any) -> Ending:
    """How a solve ended. ``outcome`` is what ``solve`` returned: statistics from PuLP 4, a number from PuLP 3."""
    if hasattr(outcome, "has_solution"):
        has_solution = outcome.has_solution
        infeasible, optimal = (outcome.status == pulp.LpSolveStatus[s] for s in ("Infeasible", "Optimal"))
    else:
        has_solution = lp.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        infeasible, optimal = lp.sol_status == pulp.LpSolutionInfeasible, lp.sol_status == pulp.LpSolutionOptimal
    model_status = getattr(getattr(lp, "solverModel", None), "getModelStatus", None)
    if model_status is not None:
        # What HiGHS calls "unbounded or infeasible" is infeasible here: every variable is bounded below.
        status = str(model_status())
        infeasible, optimal = status.endswith("Infeasible"), status.endswith("kOptimal")
        if status.endswith("kInterrupt"):  # which PuLP reports as a solution
            has_solution = lp.solverModel.getInfo().primal_solution_status == _HAS_SOLUTION
    return "infeasible" if infeasible else "nothing" if not has_solution else "optimal" if optimal else "feasible"


def _dual_bound(lp: Any) -> float:
    """The bound that a solver had proved when it was stopped; minus infinity if it does not report one."""
    info = getattr(getattr(lp, "solverModel", None), "getInfo", None)
    bound = float(info().mip_dual_bound) if info is not None else -float("inf")
    return bound if abs(bound) < 1e20 else -float("inf")


def _pulp() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pulp
    except ImportError as error:  # pragma: no cover - a dependency of the package
        raise UnavailableError(f"the ILP needs PuLP ({error}); pip install pulp highspy, or --solver dp") from None
    return pulp


def _silent(pulp: Any, seconds: float) -> Any:
    """PuLP's HiGHS, stopped after ``seconds`` of work (its own limit counts wall time), without its greeting. highspy
    1.16 prints that when a solver is made, before any option can forbid it, into the output of a command."""

    class Silent(pulp.HiGHS):  # type: ignore[misc]
        def createAndConfigureSolver(self, lp: Any) -> None:
            with _muted(1):
                super().createAndConfigureSolver(lp)
            _limited(lp.solverModel, seconds)

    return Silent


def _limited(highs: Any, seconds: float) -> None:
    """Make ``highs`` stop after ``seconds`` on the clock of the search, if it can be interrupted."""
    import highspy

    ends = clock.now() + seconds

    def stop(_kind: Any, _message: str, _out: Any, answer: Any, _data: Any) -> None:
        if answer is not None and clock.now() > ends:
            answer.user_interrupt = True

    highs.setCallback(stop, None)
    highs.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)


@contextmanager
def _muted(descriptor: int) -> Iterator[None]:
    """Context in which output of C code to ``descriptor`` is discarded."""
    try:
        original, nowhere = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # closed, so there is no output anyway
        yield
        return
    try:
        os.dup2(nowhere, descriptor)
        yield
    finally:
        os.dup2(original, descriptor)
        os.close(original)
        os.close(nowhere)


def _solver(pulp: Any, time_limit_s: float) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Always one thread: a second solve with another number returns "Not Solved".
        solver = _silent(pulp, time_limit_s)(
            msg=False, gapRel=_GAP, timeLimit=clock.PATIENCE * time_limit_s, threads=1, mip_abs_gap=_GAP
        )
        if not solver.available():
            raise UnavailableError("the ILP needs HiGHS, which is not installed; pip install highspy, or --solver dp")
    return solver
