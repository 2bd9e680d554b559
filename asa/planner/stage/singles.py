"""Plans of a single stage: each width and number of microbatches has a lower bound that rises in steps.

The first bound is compute alone. The second counts every component independently, memory included
(:mod:`asa.planner.stage.floor`). The third comes from prices of memory and overlap (:mod:`asa.planner.stage.dual`),
which also give a first plan. Unless these show that memory binds, the label program searches for the optimum *without*
the limit; if that does not fit, for the optimum with it, for as long as it takes. Microbatches are doubled only while
memory binds, which means that the fastest plan without a limit does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asa.planner import clock
from asa.planner.budget import ROUNDING
from asa.planner.space.candidate import Candidate
from asa.planner.space.request import SolverName
from asa.planner.stage import dual, exhaustive, ilp
from asa.planner.stage.formulated import FormulatedStage
from asa.planner.stage.labels import alternatives
from asa.planner.stage.lookup import StageLookup
from asa.planner.stage.problem import Choice, Solution
from asa.planner.stage.runs import RunCharge, Runs

_FIRST_S = 0.15
"""Seconds for the label program under a memory limit at first; four times as long each time it continues."""
_LONG, _FORMULATED = 10_000, 1.0
"""Ways of all components from which on formulating takes long: this multiple of the time for pricing them."""
_MORE = 5_000
"""Largest number of ways priced with several microbatches for a first plan; a thousand take a dozen ms."""
_LEAST = 3
"""Widths with least compute that have a first plan where no width is sure to be best."""
_LONGEST, _NEAR = 60, 60
"""Components up to which plans near a refused one are tried, and how many of these, the fastest ones."""
_REFUSED = 60
"""Number of searches by the ILP beyond choices that do not fit, although their components' least memory does."""
_BEYOND_S = 2.0
"""Seconds of each such search; it usually takes that long for a dozen or two of components."""
_NOTHING = Solution(choice=None, value=float("inf"), bound=float("inf"), solver="dp")


class Single:
    """All plans of one stage of that width with that many microbatches, for the queue of
    :mod:`asa.planner.pipeline.joint`.

    ``bound`` holds for all of them; ``solution`` is the best one so far, a choice of the stage ``origin``. ``stuck``
    says that nothing more can be proved, ``by_ilp`` that the ILP has proved it. ``refused`` are choices of
    :attr:`stage` that do not fit, although the least memory of their components does.
    """

    def __init__(
        self, stages: StageLookup, compute_ms: float, width: int, num_microbatches: int, solver: SolverName
    ) -> None:
        self._stages, self.width, self.num_microbatches, self._solver = stages, width, num_microbatches, solver
        self.bound, self.level, self.stuck = compute_ms, 0, False
        self.stage: FormulatedStage | None = None
        self._decided: bool | None = None
        self.solution = _NOTHING
        self._turns, self._labelled, self.by_ilp = 0, False, False
        self.origin: FormulatedStage | None = None
        self.refused: list[Choice] = []
        self._forbidden, self._charges = list[Choice](), dict[RunCharge, None]()
        self._charged_solves = 0
        self._runs: Runs | None = None

    @property
    def weights(self) -> tuple[int, ...]:
        """Weights by which batches are divided among ranks."""
        return self._stages.weights(self.width)

    @property
    def value(self) -> float:
        """Ms of the best plan so far."""
        return self.solution.value

    @property
    def pricing_s(self) -> float:
        """CPU seconds for pricing one microbatch; 0 before it is known."""
        return self._stages.pricing_s.get((self.width, 1), 0.0)

    @property
    def slow(self) -> bool:
        """Whether formulating is known to take long."""
        return self.pricing_s > 0 and self._stages.floor(self.width, 1).ways > _LONG

    @property
    def ways(self) -> int:
        """Number of ways of all components together that are priced for :attr:`least`."""
        return self._stages.floor(self.width, self.num_microbatches).ways

    @property
    def likely_tight(self) -> bool:
        """Whether some plans of one microbatch hold more than there is."""
        return self._stages.floor(self.width, 1).may_bind

    @property
    def least(self) -> float:
        """Lower bound in ms on all plans, memory included; infinite if none fits."""
        floor = self._stages.floor(self.width, self.num_microbatches)
        return floor.whole if self._stages.possible(self.width, floor) else float("inf")

    def begin(self, best: float) -> None:
        """Take a plan below ``best`` that the search for prices meets, if this part is known to be in the space."""
        m = self.num_microbatches
        if self._solver == "exhaustive" or (m > 1 and self._stages.is_excluded(self.width, m, best, 0.0) is not False):
            return
        stage = self._stages.get(self.width, m)
        if stage is not None and stage.solver is not None:
            self.stage = stage
            stage.solver.price(best)
            self._accept(stage.solver.answer(min(best, self.value)))

    def step(self, best: float, ends: float) -> None:
        """Raise the bound. Plans from ``best`` ms on do not count."""
        self.level += 1
        self.stuck = False
        began = clock.now()
        if self.level == 1:
            self._raise(self._stages.divided_bound(self.width, self.num_microbatches))
            if self.bound < best:
                self._raise(self._stages.independent_bound(self.width, self.num_microbatches, self.bound))
        elif self.level == 2 and self.stage is None and self.slow and began + _FORMULATED * self.pricing_s > ends:
            self.level, self.stuck = 1, True  # would not be done in time, in this search
        elif self.level == 2 and self.num_microbatches > 1 and not self._stages.fixed_microbatches:
            self._check_several(best, min(ends, began + _FIRST_S))
        elif self.stage is None:
            self._bound_by_prices(best)
        elif self._decided is None:
            self._decide(best, ends)
        else:
            self._solve(best, ends)

    def _raise(self, bound: float) -> None:
        self.bound = max(self.bound, bound)

    def _check_several(self, best: float, until: float) -> None:
        """Decide whether several microbatches are in the space, which they are not if one is enough. Otherwise bound
        them by their prices."""
        if self._stages.floor(self.width, 1).may_bind:
            self._raise(self._stages.floor(self.width, self.num_microbatches).whole)
            if self.bound >= best:
                return
        unsplit = self._stages.get(self.width, 1)
        if unsplit is None or unsplit.all_fit:
            self.bound = float("inf")
            return
        self._raise(self._stages.floor(self.width, self.num_microbatches).whole)
        if self.bound < best:
            unsplit.decide(float("inf"), until)
            self.bound = float("inf") if unsplit.fits else self.bound

    def _bound_by_prices(self, best: float) -> None:
        """Bound by prices of memory and overlap."""
        stage = self.stage = self._stages.get(self.width, self.num_microbatches)
        if stage is None or stage.solver is None:
            self.bound = float("inf")
            return
        stage.solver.price(best)
        self._raise(stage.solver.bound)
        if self.num_microbatches == 1 and self._solver != "exhaustive":
            self._accept(stage.solver.answer(min(best, self.value)))

    def _decide(self, best: float, ends: float) -> None:
        """Determine whether this part is in the space, and what would be fastest without the memory limit."""
        stage, until = self.stage, min(ends, clock.now() + _FIRST_S * 4 ** min(8, max(0, self.level - 4)))
        assert stage is not None
        excluded = self._stages.is_excluded(self.width, self.num_microbatches, best, until)
        if excluded:
            self.bound = float("inf")
            return
        stage.decide(best, until)
        self._decided = stage.decided and excluded is not None
        if stage.fits and self._solver != "exhaustive":
            self._accept(stage.unlimited)
        self._raise(stage.unlimited.bound)

    def _solve(self, best: float, ends: float) -> None:
        """Solve with the memory limit as far as possible, by labels and by the ILP in turn, because where one takes
        long, the other often does not. The best plan so far limits the search."""
        assert self.stage is not None
        if self._solver == "exhaustive":
            self._accept(exhaustive.solve(self.stage.active_problem, ends))
            self.stuck = self.bound < min(best, self.value) * (1 - ROUNDING)  # time was up
            return
        slice_s = min(max(0.05, ends - clock.now()), _FIRST_S * 4 ** min(8, max(0, self.level - 4)))
        if not self._decided:
            self._decide(best, clock.now() + slice_s)
        if self.stage.fits or self.bound >= best:  # solved as far as it can be
            self.stuck = self.bound < min(best, self.value) * (1 - ROUNDING)
            return
        assert self.stage.solver is not None
        cutoff, solver = min(best, self.value), self.stage.solver
        self._turns += 1
        ilp_too = self._solver == "ilp"
        beyond = ilp_too and self._charged_solves < _REFUSED and ends - clock.now() > self._stages.budget.ilp_s
        if self.refused and beyond:
            self._charged_solves += 1
            self._solve_by_charges(cutoff, min(ends, clock.now() + max(slice_s, self._charged_solves * _BEYOND_S)))
            return
        if self.refused and self.bound >= self._relaxed:
            self.stuck = True
            return
        first = 2 if self.stage.is_small else 3
        turn = ilp_too and self._turns >= first and slice_s >= self._stages.budget.ilp_s
        self._labelled = not (turn and self._labelled)
        if not self._labelled:
            self._by_ilp(slice_s)
            return
        solver.run(cutoff, clock.now() + slice_s)
        self._accept(solver.answer(cutoff))
        self.stuck = solver.done and not ilp_too and self.bound < min(best, self.value) * (1 - ROUNDING)

    @property
    def _relaxed(self) -> float:
        """Ms of the first choice that does not fit."""
        assert self.stage is not None
        return exhaustive.value(self.stage.active_problem, self.refused[0])

    def _solve_by_charges(self, cutoff: float, until: float) -> None:
        """Search for the fastest choice, except for those that were refused and those that hold as much for the same
        reason."""
        stage = self._stages.get(self.width, self.num_microbatches, wrapped=True)
        assert stage is not None
        self._runs = self._runs or self._stages.runs(stage)
        if not self._forbidden:
            assert self.stage is not None
            rows = [{w: c for c, w in enumerate(row)} for row in stage.formulation.ways]
            for refused in self.refused:
                ways = self.stage.formulation.picked(0, refused)
                self._exclude(tuple(row[w] for row, w in zip(rows, ways, strict=True)))
        solution = ilp.solve(
            stage.problem, time_limit_s=max(0.05, until - clock.now()), forbidden=tuple(self._forbidden),
            charges=tuple(self._charges),
        )  # fmt: skip
        choice = solution.choice
        if choice is not None and stage.fits_exactly(choice):
            value = exhaustive.value(stage.problem, choice)
            if value < self.value:
                self.solution, self.origin = replace(solution, value=value, bound=min(solution.bound, value)), stage
        elif choice is not None:
            self._exclude(choice)
            self._accept_near(choice, stage)
        low = self.bound
        self._accept_bound(solution)
        self.stuck = choice is None and self.bound <= low and self.bound < min(cutoff, self.value) * (1 - ROUNDING)

    def _exclude(self, choice: Choice) -> None:
        assert self._runs is not None
        self._forbidden.append(choice)
        self._charges.update(dict.fromkeys(self._runs.of(choice)))

    def _by_ilp(self, slice_s: float) -> None:
        """Solve by the ILP, for problems with too many labels. Its bound counts; its choice is priced again."""
        assert self.stage is not None
        problem = self.stage.active_problem
        solution = ilp.solve(problem, time_limit_s=slice_s)
        if solution.choice is not None and exhaustive.peak(problem, solution.choice) <= problem.capacity:
            self._accept(replace(solution, value=exhaustive.value(problem, solution.choice), bound=0.0))
        self._accept_bound(solution)

    def _accept_bound(self, solution: Solution) -> None:
        """Take the ILP's bound, which may prove the solution."""
        self._raise(min(solution.bound, self.value))
        if self.bound >= self.value * (1 - ROUNDING):
            self.bound, self.by_ilp = self.value, True
            self.solution = replace(self.solution, bound=self.value, solver=f"{solution.solver} and dp")

    def _accept(self, solution: Solution, stage: FormulatedStage | None = None) -> None:
        """Take a solution, which is a choice of ``stage``, or of :attr:`stage` if that is None."""
        stage = stage or self.stage
        self._raise(solution.bound)
        if solution.value < self.value and solution.choice is not None and stage is not None:
            if stage.fits_exactly(solution.choice):
                self.solution, self.origin = replace(solution, bound=min(solution.bound, solution.value)), stage
            elif stage is self.stage and solution.choice not in self.refused:
                self.refused.append(solution.choice)
                if self._solver != "exhaustive":
                    self._accept_near(solution.choice, stage)

    def _accept_near(self, refused: Choice, stage: FormulatedStage) -> None:
        """Take the fastest plan that fits among those that run one component of a refused choice of ``stage`` in
        another way."""
        x, changes = dual.Arrays(stage.problem), list[tuple[float, int, int]]()
        chosen = x.evaluate(x.picked(refused))
        for i in range(x.n if x.n <= _LONGEST else 0):
            ms, fits = alternatives(x, chosen, i)
            changes += [(ms[row], i, int(x.index[i][row])) for row in np.flatnonzero(fits).tolist()]
        for ms, i, c in sorted(changes)[:_NEAR]:
            choice = (*refused[:i], c, *refused[i + 1 :])
            if ms < self.value and stage.fits_exactly(choice):
                self._accept(Solution(choice=choice, value=float(ms), bound=0.0, solver="dp"), stage)
                break
        if self.value <= self.bound:
            self.bound = self.value
            self.solution = replace(self.solution, bound=self.value)


def singles(stages: StageLookup, solver: SolverName) -> list[Single]:
    """A :class:`Single` for every width and number of microbatches that could run."""
    return [Single(stages, compute_ms, w, m, solver) for compute_ms, w, m in stages.bounds()]


def likely_tight(some: Sequence[Single]) -> bool:
    """Whether memory may bind in the widest stage; then it is also likely to in pipelines."""
    return bool(some) and max(some, key=lambda x: x.width).likely_tight


def first_plan(stages: Sequence[Single], uniform: Candidate | None, best: float, batch: int) -> float:
    """Ms of a first plan, which is kept; infinite if none below ``best`` ms was met. If memory binds, stages of all
    ranks are tried. Stages of the width of ``uniform``, the best whole strategy, are tried with at most as many
    microbatches; if all ranks do not divide ``batch``, the widest that do, and the widest that it divides, with one,
    and there and on unequal ranks the widths with least compute."""
    widths = {x.width for x in stages}
    kinds: list[tuple[int, tuple[int, ...], float]] = [(max(widths, default=0), (), float("inf"))]
    if widths and batch % max(widths):
        some = [w for w in widths if batch % w == 0], [w for w in widths if w % batch == 0]
        kinds += [(max(x), (), 1) for x in some if x]
    if widths and (batch % max(widths) or any(x.weights for x in stages)):
        least = {x.width: x for x in sorted(stages, key=lambda x: -x.bound)}.values()
        kinds += [(x.width, x.weights, x.num_microbatches) for x in sorted(least, key=lambda x: x.bound)[:_LEAST]]
    if uniform is not None:
        kinds.append((uniform.ranks, uniform.ways[0].layout.weights, uniform.num_microbatches))
    value = float("inf")
    for width, weights, most in kinds:
        candidates, ways = list[Single](), 0
        for single in sorted(stages, key=lambda x: x.num_microbatches):
            if (single.width, single.weights) != (width, weights) or single.num_microbatches > most:
                continue
            if single.bound >= best or single.slow or not (single.likely_tight or most < float("inf")):
                break
            if (ways := ways + (single.ways if single.num_microbatches > 1 else 0)) > _MORE:
                break
            candidates.append(single)
        for single in sorted(candidates, key=lambda x: x.least):
            if single.least < best:
                single.begin(best)
                value = single.value if single.value < best else value
                best = min(best, value)
    return value
