"""A stage of one width and number of microbatches, formulated and solved."""

from __future__ import annotations

from collections.abc import Callable

from asa.planner.budget import USUAL
from asa.planner.stage import exhaustive, labels, memory
from asa.planner.stage.formulate import Formulation
from asa.planner.stage.problem import Choice, Problem, Solution

_OPEN = Solution(choice=None, value=float("inf"), bound=0.0, solver="dp")


class FormulatedStage:
    """The formulation of a stage of one width and number of microbatches, and its results with and without the memory
    limit. Where the formulation is None nothing fits. ``fits_exactly``: whether a choice fits by its full price; where
    None, the formulation decides."""

    def __init__(
        self, formulation: Formulation | None, fits_exactly: Callable[[Choice], bool] | None = None,
        ilp_ways: int = USUAL.effort.ilp_ways,
    ) -> None:  # fmt: skip
        self._formulation, self._fits_exactly, self._ilp_ways = formulation, fits_exactly, ilp_ways
        self.unlimited, self.fits, self.decided = _OPEN, False, True
        self._solver: labels.Solver | None = None
        self._unlimited_solver: labels.Solver | None = None
        self._possible = self.all_fit = False
        if formulation is None:
            return
        self.problem = formulation.problem
        self._possible = memory.memory_floor(self.problem) <= self.problem.capacity
        self.decided = not self._possible
        self.all_fit = self._possible and (
            memory.memory_ceiling(self.problem) + self.problem.over <= self.problem.capacity
        )
        """Whether every choice fits."""

    def fits_exactly(self, choice: Choice) -> bool:
        """Whether a choice fits."""
        if self._fits_exactly is not None:
            return self._fits_exactly(choice)
        return exhaustive.peak(self.problem, choice) <= self.problem.capacity

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
    def is_small(self) -> bool:
        """Whether the ILP is likely to prove the optimum quickly."""
        return self.fits or sum(map(len, self.problem.configs)) <= self._ilp_ways

    @property
    def active_problem(self) -> Problem:
        """The problem to solve; without the memory limit where the fastest choice fits anyway."""
        return self.problem.without_memory_limit() if self.fits else self.problem

    def decide(self, cutoff: float, ends: float) -> None:
        """Determine whether the fastest choice fits, and store it in ``unlimited``. This stays open where no choice is
        below ``cutoff``, or where time is up."""
        if self.decided or self.solver is None:
            return
        self.solver.price(cutoff)
        if self.solver.binds:
            self.decided = True
            return
        if self._unlimited_solver is None:
            self._unlimited_solver = labels.Solver(self.problem.without_memory_limit())
        self._unlimited_solver.price(cutoff)
        self._unlimited_solver.run(cutoff, ends)
        self.unlimited = self._unlimited_solver.answer(cutoff)
        self.decided = self._unlimited_solver.done or (self.unlimited.choice is not None and self.unlimited.proved)
        if self.unlimited.choice is not None:
            self.fits = self.unlimited.proved and self.fits_exactly(self.unlimited.choice)
