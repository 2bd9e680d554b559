"""Local search around a choice that fits, as long as the stage gets faster.

Prices of memory (:mod:`asa.planner.stage.dual`) find choices that leave some memory unused: at one price, every
component that may give up memory for time does so, even if it need not. Here the unused memory goes to the change that
gains most. If a larger gain does not fit, another component gives up memory for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asa.planner.budget import ROUNDING
from asa.planner.stage import dual
from asa.planner.stage.dual import ACT, COST, EACT, ESTATE, ETRANS, GRAD, INF, LATE, PROMPT, STATE, TRANS, WINDOW, WORK

_TRIED = 3
"""Number of a component's changes that do not fit, the fastest ones, for which memory is freed elsewhere."""


class Descent:
    """A choice that fits: ``picked``, rows of ``x``, and its ``value``, ms of a step."""

    def __init__(self, x: dual.Arrays, picked: list[int]) -> None:
        self.x = x
        self._set_choice(picked)

    def _set_choice(self, picked: list[int]) -> None:
        """Replace the choice, with its peak and overlap at each component."""
        self.picked, chosen = picked, self.x.evaluate(picked)
        self._rows, self._layout, self._between = chosen.rows, chosen.layout, chosen.between
        self._hidden, self._peaks, self._total, self.value = chosen.hidden, chosen.peaks, chosen.total, chosen.value

    def by_one(self) -> None:
        """Apply the change of one component that gains most, until none gains."""
        while (change := self._best_change()) is not None:
            self._set_choice(self._with(*change))

    def by_two(self) -> None:
        """Also apply changes of two components: a fast one that does not fit, and one that frees memory for it."""
        self.by_one()
        while (picked := self._best_pair()) is not None:
            self._set_choice(picked)
            self.by_one()

    @property
    def _gaining(self) -> float:
        return self.value - ROUNDING * abs(self.value)

    def _with(self, i: int, row: int) -> list[int]:
        return [*self.picked[:i], row, *self.picked[i + 1 :]]

    def _best_change(self, least: float | None = None, but: int = -1) -> tuple[int, int] | None:
        """(component, row) of the change, in a component other than ``but``, after which everything fits in the least
        ms, below ``least`` or what gains at all; None if there is none."""
        least, change = self._gaining if least is None else least, None
        for i in (i for i in range(self.x.n) if i != but):
            values, fits = self.alternatives(i)
            values = np.where(fits, values, INF)
            row = int(values.argmin())
            if values[row] < least:
                least, change = float(values[row]), (i, row)
        return change

    def _best_pair(self) -> list[int] | None:
        """A choice with two changes that gain together; None if there is none."""
        least = self._gaining
        for i in range(self.x.n):
            values, fits = self.alternatives(i)
            values = np.where(fits, INF, values)
            for row in np.argsort(values)[:_TRIED].tolist():
                if values[row] >= least:
                    break
                overfull = Descent(self.x, self._with(i, row))
                change = overfull._best_change(least, i)
                if change is not None:
                    return overfull._with(*change)
        return None

    def alternatives(self, i: int) -> tuple[Any, Any]:
        """(ms, fits) for each row of component i in place of its own: ms of a step, and whether it fits."""
        x, n = self.x, self.x.n
        layout, k = x.layout[i], np.arange(n)
        new = x.rows[i] - self._rows[i]
        front, back = np.zeros((len(layout), 4)), np.zeros((len(layout), 4))
        if i:
            front = x.edges[i - 1][:, self._layout[i - 1], layout].T - self._between[i]
        if i + 1 < n:
            back = x.edges[i][:, layout, self._layout[i + 1]].T - self._between[i + 1]
        hidden = self._hidden + x.sp * new[:, WINDOW, None] * (k > i) + x.sc * new[:, PROMPT, None] * (k < i)
        hidden += x.sc * new[:, LATE, None] * (k < x.release[i])
        values = self._total + new[:, WORK] + front[:, COST] + back[:, COST] - x.saving * hidden.min(axis=1)
        standing = new[:, STATE] + front[:, ESTATE] + back[:, ESTATE]
        peaks = self._peaks + standing[:, None] + (new[:, ACT] + front[:, EACT])[:, None] * (k >= i)
        peaks += back[:, EACT, None] * (k > i) + new[:, GRAD, None] * (k <= i)
        peaks += (new[:, TRANS] + front[:, ETRANS])[:, None] * (k == i) + back[:, ETRANS, None] * (k == i + 1)
        return values, np.isfinite(values) & (peaks.max(axis=1) <= x.capacity)
