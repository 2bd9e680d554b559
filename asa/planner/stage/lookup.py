"""Stages by width and number of microbatches, formulated on demand, and the results known for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from asa.ir.units import GIB
from asa.planner import clock
from asa.planner.budget import USUAL, Budget
from asa.planner.space.candidate import Prices
from asa.planner.space.space import TOLERANCE_GIB, Allowed, widths
from asa.planner.stage import exhaustive, labels, memory
from asa.planner.stage.floor import Floor, floor
from asa.planner.stage.formulate import Formulation, formulate
from asa.planner.stage.problem import MS, Choice, Problem, Solution
from asa.planner.stage.runs import Runs

_OPEN = Solution(choice=None, value=float("inf"), bound=0.0, solver="dp")


class FormulatedStage:
    """The formulation of a stage of one width and number of microbatches, and its results with and without the memory
    limit. Where the formulation is None nothing fits. ``fitting``: whether a choice fits by its full price; where None,
    the formulation decides."""

    def __init__(
        self, formulation: Formulation | None, fitting: Callable[[Choice], bool] | None = None,
        handy: int = USUAL.effort.handy,
    ) -> None:  # fmt: skip
        self._formulation, self._fitting, self._handy = formulation, fitting, handy
        self.free, self.fits, self.settled, self._looked = _OPEN, False, True, False
        self._solver: labels.Solver | None = None
        self._roomy: labels.Solver | None = None
        self._possible = self.roomy = False
        if formulation is None:
            return
        self.problem = formulation.problem
        self._limit = self.problem.capacity + TOLERANCE_GIB
        self._possible = memory.memory_floor(self.problem) <= self._limit
        self.settled = not self._possible
        self.roomy = self._possible and (
            memory.memory_ceiling(self.problem) + self.problem.over <= self.problem.capacity
        )
        """Whether every choice fits."""

    def fitting(self, choice: Choice) -> bool:
        """Whether a choice fits."""
        if self._fitting is not None:
            return self._fitting(choice)
        return exhaustive.peak(self.problem, choice) <= self._limit

    @property
    def solver(self) -> labels.Solver | None:
        """The label solver with the memory limit; None where nothing fits."""
        if self._solver is None and self._possible:
            self._solver = labels.Solver(self.problem)
        return self._solver

    @property
    def formulation(self) -> Formulation:
        """The formulation, where something fits."""
        assert self._formulation is not None
        return self._formulation

    @property
    def handy(self) -> bool:
        """Whether the ILP is likely to prove the optimum quickly."""
        return self.fits or sum(map(len, self.problem.configs)) <= self._handy

    @property
    def asked(self) -> Problem:
        """The problem to solve; without the memory limit where the fastest choice fits anyway."""
        return self.problem.without_memory_limit() if self.fits else self.problem

    def look(self, cutoff: float) -> None:
        """Compute good Lagrangian prices, at the first call only."""
        if self.solver is not None and not self._looked:
            self._looked = True
            self.solver.price(cutoff)

    def settle(self, cutoff: float, ends: float) -> None:
        """Determine whether the fastest choice fits, and store it in ``free``. This stays open where no choice is below
        ``cutoff``, or where time is up."""
        if self.settled or self.solver is None:
            return
        self.look(cutoff)
        if self.solver.binds:
            self.settled = True
            return
        if self._roomy is None:
            self._roomy = labels.Solver(self.problem.without_memory_limit())
            self._roomy.price(cutoff)
        self._roomy.run(cutoff, ends)
        self.free = self._roomy.answer(cutoff)
        self.settled = self._roomy.done or (self.free.choice is not None and self.free.proved)
        if self.free.choice is not None:
            self.fits = self.free.proved and self.fitting(self.free.choice)


class StageLookup:
    """All widths and numbers of microbatches of a space, formulated on demand."""

    def __init__(
        self, prices: Prices, allowed: Allowed, among: tuple[int, ...] | None = None, budget: Budget = USUAL
    ) -> None:
        self._prices, self._allowed, self.budget = prices, allowed, budget
        self._among = widths(prices.space.request.gpus) if among is None else among
        self._known: dict[tuple[int, int], FormulatedStage | None] = {}
        self._variants: dict[tuple[object, ...], FormulatedStage] = {}
        self._floors: dict[tuple[int, int], Floor] = {}
        self.took: dict[tuple[int, int], float] = {}
        """CPU seconds that :meth:`floor` took, by width and number of microbatches."""

    def weights(self, width: int) -> tuple[int, ...]:
        """Batch weights of a stage of that width; empty for equal shares."""
        return self._prices.space.weights.get(width, ())

    def bounds(self) -> Iterator[tuple[float, int, int]]:
        """Ms of compute alone, width and number of microbatches of each stage that can run."""
        self._prices.prepare(self._among)
        for w in (w for w in self._among if self._prices.space.capacity(w) > 0):
            for m in self._prices.space.microbatches():
                alone = m * sum(self._prices.compute(w, m)) * MS
                if alone < float("inf"):
                    yield alone, w, m

    @property
    def asked_for(self) -> bool:
        """Whether the request fixes the number of microbatches."""
        return self._prices.space.request.microbatches is not None

    def floor(self, width: int, num_microbatches: int) -> Floor:
        """Lower bounds on a stage before it is formulated."""
        key = (width, num_microbatches)
        if key not in self._floors:
            began = clock.now()
            self._floors[key] = floor(self._prices, *key, self._allowed)
            self.took[key] = clock.now() - began
        return self._floors[key]

    def apart(self, width: int, num_microbatches: int, alone_ms: float) -> float:
        """Lower bound in ms from each component alone, with gradient synchronisation and memory. With several
        microbatches, only once-per-step work is added to compute; it is the same as with one microbatch.

        Synchronisation is hidden at most behind the backward of one microbatch, which the bound counts with its
        compute.
        """
        m, one = num_microbatches, self.floor(width, 1)
        if m == 1:
            return one.whole
        return max(alone_ms, alone_ms * (1 - 1 / m) + (one.once if one.once < float("inf") else 0.0))

    def get(self, width: int, num_microbatches: int) -> FormulatedStage | None:
        """The formulated stage; None where some component cannot run in it."""
        key = (width, num_microbatches)
        if key not in self._known:
            self._known[key] = self._made(width, num_microbatches)
        return self._known[key]

    def counted(self, width: int, num_microbatches: int) -> FormulatedStage:
        """The stage with the memory of each component as if its neighbours ran alike; what fits there usually fits."""
        return self._variant(width, num_microbatches, counted=True)

    def wrapped(self, width: int, num_microbatches: int) -> FormulatedStage:
        """The stage with all configurations that may hold less memory where neighbours run alike."""
        return self._variant(width, num_microbatches, wrapped=True)

    def _variant(self, width: int, num_microbatches: int, **how: bool) -> FormulatedStage:
        key = (width, num_microbatches, *how)
        if key not in self._variants:
            crowded = self.floor(width, num_microbatches).crowded
            formulation = formulate(self._prices, width, num_microbatches, self._allowed, crowded=crowded, **how)
            self._variants[key] = self._formulated(formulation)
        return self._variants[key]

    def runs(self, stage: FormulatedStage) -> Runs:
        """Memory of runs of equal choices beyond the sum over components."""
        return Runs(self._prices, stage.formulation)

    def _formulated(self, formulation: Formulation | None) -> FormulatedStage:
        if formulation is None:
            return FormulatedStage(None)
        return FormulatedStage(
            formulation, lambda choice: self._prices.fits(formulation.candidate(choice)), self.budget.effort.handy
        )

    def enough(self, width: int, num_microbatches: int, cutoff: float, ends: float) -> bool | None:
        """Whether the fastest choice with fewer microbatches fits, which excludes this number; None where that is
        open."""
        if num_microbatches == 1 or self.asked_for:
            return False
        fewer = self.get(width, num_microbatches // 2)
        if fewer is None:
            return True
        if not fewer.roomy:
            fewer.settle(cutoff, ends)
        if fewer.roomy or fewer.fits:
            return True
        before = self.enough(width, num_microbatches // 2, cutoff, ends)
        return before if before or fewer.settled else None

    def possible(self, width: int, known: Floor) -> bool:
        """Whether any choice may fit."""
        return known.memory <= self._prices.space.capacity(width) / GIB + TOLERANCE_GIB

    def _made(self, width: int, num_microbatches: int) -> FormulatedStage | None:
        known = self.floor(width, num_microbatches)
        if not self.possible(width, known):
            return FormulatedStage(None)
        formulation = formulate(self._prices, width, num_microbatches, self._allowed, crowded=known.crowded)
        return None if formulation is None else self._formulated(formulation)
