"""A solver of one stage: prices of memory and overlap, then passes of the label program.

Good prices (:mod:`asa.planner.stage.dual`) give a bound and often a choice that fits. A pass
(:mod:`asa.planner.stage.pricing_problem`) searches for choices below a limit. If there are too many labels, those with
the highest bounds are dropped, and the pass proves no more than the least of these bounds. Limits rise from just above
the bound of the prices, so that the first passes are short.

Prices of memory find choices that leave some memory unused: at one price, every component that may give up memory for
time does so, even if it need not. A local search (:func:`descended`) gives it to the change that gains most. Exchanges
of memory between components follow at the end (:mod:`asa.planner.answer.canonical`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asa.planner.budget import ROUNDING
from asa.planner.stage import dual
from asa.planner.stage.dual import ACT, COST, EACT, ESTATE, ETRANS, GRAD, INF, LATE, PROMPT, STATE, TRANS, WINDOW, WORK
from asa.planner.stage.pareto import OutOfTimeError
from asa.planner.stage.pricing_problem import PricingProblem
from asa.planner.stage.problem import Problem, Solution
from asa.planner.stage.stage_slice import StageSlice

_FEW, _MANY, _MOST = 250, 2_000, 20_000
"""Number of labels kept behind a component: in the first pass, which searches; then in passes that prove."""
_STEPS, _ROUNDS, _GAINED = 60, 4, 1e-3
"""Subgradient steps before the first pass; how often they begin again; relative gain below which they do not."""
_SMALL = 100
"""Components up to which a choice is improved locally."""
_ONCE = (0.0, 0.0, 0.0, 1.0)
"""Weights of the times of a stage that is alone: all of its time counts once per step."""


class Solver:
    """A solver of one problem that can be continued.

    ``bound`` holds for every choice that fits; ``value`` and ``picked`` are the best choice so far. ``done`` says that
    this solver can prove no more.
    """

    def __init__(self, problem: Problem) -> None:
        self.x = dual.Arrays(problem)
        self.prices = dual.Search(self.x)
        self.bound = self.prices.bound
        self.value, self.picked = INF, list[int]()
        self.done = self.bound == INF
        self._program: PricingProblem | None = None
        self._share, self._most, self._has_searched, self._has_prices = 0.002, _FEW, False, False

    @property
    def binds(self) -> bool:
        """Whether the fastest choice is known not to fit: one that does not fit has a value below the bound."""
        return self.prices.loose < self.bound * (1 - ROUNDING)

    def price(self, cutoff: float = INF, gap: float = 0.0) -> None:
        """Search for good prices of memory and of overlap, at the first call only; with a thousand components, only for
        a short time."""
        if self._has_prices:
            return
        self._has_prices = True
        steps = max(_STEPS // 6, min(_STEPS, 100 * _STEPS // self.x.n))
        for _ in range(_ROUNDS):
            before = self.prices.bound
            self.prices.run(steps, cutoff=cutoff, gap=gap)
            if self.prices.bound <= before + _GAINED * abs(before):
                break
        if self.prices.value < self.value:
            self.value, self.picked = self.prices.value, self.prices.picked
        self._raise(self.prices.bound)
        if self.x.capacity < INF and self.x.n <= _SMALL and self.picked and self.bound < min(cutoff, self.value):
            self._descend()

    def _descend(self) -> None:
        """Improve the choice that was met."""
        better = descended(self.x, self.picked)
        if better.value < self.value:
            self.value, self.picked = better.value, better.picked

    def run(self, cutoff: float, ends: float, gap: float = 0.0) -> None:
        """Run passes until nothing is left below ``cutoff`` and the best choice, or time is up."""
        while not self.done:
            best = min(cutoff, self.value)
            if self.bound >= best * (1 - 2 * ROUNDING) and not best == INF > self.bound:
                self._raise(best)  # but for rounding
            if self.bound >= best * (1 - gap) and not best == INF > self.bound:
                return
            if self._program is None:
                self._program = PricingProblem(StageSlice.of(self.x), _ONCE, np.zeros(1), self.prices.best)
            limit = best * (1 - ROUNDING)
            if self._has_searched:
                limit = min(limit, self.bound + self._share * max(abs(self.bound), 1e-9))
            try:
                found = self._program.best(np.zeros(1), limit, self._most, ends)
            except OutOfTimeError:
                return
            value, choice = float(found.values[0]), found.choices[0]
            proved = min(found.proved, value)
            if choice is not None and value < self.value:
                self.value, self.picked = value, list(choice)
            self._raise(proved)
            if not self._has_searched:
                self._has_searched, self._most = True, _MANY
            elif proved < limit and proved < value:  # labels were dropped
                self.done = self._most >= _MOST
                self._most = min(_MOST, 3 * self._most)
            else:
                self._share *= 4

    def _raise(self, bound: float) -> None:
        self.bound = max(self.bound, bound)
        self.done = self.done or self.bound == INF

    def answer(self, cutoff: float = INF) -> Solution:
        """The solution known so far. Choices of ``cutoff`` ms or more do not count."""
        if not self.picked or self.value >= cutoff:
            return Solution(choice=None, value=INF, bound=min(self.bound, cutoff), solver="dp")
        choice = self.x.choice(self.picked)
        return Solution(choice=choice, value=self.value, bound=min(self.bound, self.value), solver="dp")


def descended(x: dual.Arrays, picked: list[int]) -> dual.EvaluatedChoice:
    """The choice ``picked``, rows of ``x``, changed in the one component that gains most, again and again until none
    gains."""
    chosen = x.evaluate(picked)
    while True:
        least, changed = chosen.value - ROUNDING * abs(chosen.value), None
        for i in range(x.n):
            values, fits = alternatives(x, chosen, i)
            values = np.where(fits, values, INF)
            row = int(values.argmin())
            if values[row] < least:
                least, changed = float(values[row]), [*chosen.picked[:i], row, *chosen.picked[i + 1 :]]
        if changed is None:
            return chosen
        chosen = x.evaluate(changed)


def alternatives(x: dual.Arrays, chosen: dual.EvaluatedChoice, i: int) -> tuple[Any, Any]:
    """(ms, fits) for each row of component i in place of the chosen one: ms of a step, and whether it fits."""
    n = x.n
    layout, k = x.layout[i], np.arange(n)
    new = x.rows[i] - chosen.rows[i]
    front, back = np.zeros((len(layout), 4)), np.zeros((len(layout), 4))
    if i:
        front = x.edges[i - 1][:, chosen.layout[i - 1], layout].T - chosen.between[i]
    if i + 1 < n:
        back = x.edges[i][:, layout, chosen.layout[i + 1]].T - chosen.between[i + 1]
    hidden = chosen.hidden + x.sp * new[:, WINDOW, None] * (k > i) + x.sc * new[:, PROMPT, None] * (k < i)
    hidden += x.sc * new[:, LATE, None] * (k < x.release[i])
    values = chosen.total + new[:, WORK] + front[:, COST] + back[:, COST] - x.saving * hidden.min(axis=1)
    standing = new[:, STATE] + front[:, ESTATE] + back[:, ESTATE]
    peaks = chosen.peaks + standing[:, None] + (new[:, ACT] + front[:, EACT])[:, None] * (k >= i)
    peaks += back[:, EACT, None] * (k > i) + new[:, GRAD, None] * (k <= i)
    peaks += (new[:, TRANS] + front[:, ETRANS])[:, None] * (k == i) + back[:, ETRANS, None] * (k == i + 1)
    return values, np.isfinite(values) & (peaks.max(axis=1) <= x.capacity)
