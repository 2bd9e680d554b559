"""Local search around a choice that fits, as long as the stage gets faster.

Prices of memory (:mod:`asa.planner.stage.dual`) find choices that leave some memory unused: at one price, every
component that may give up memory for time does so, even if it need not. Here the unused memory goes to the change that
gains most. Exchanges of memory between components follow at the end (:mod:`asa.planner.answer.canonical`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asa.planner.budget import ROUNDING
from asa.planner.stage import dual
from asa.planner.stage.dual import ACT, COST, EACT, ESTATE, ETRANS, GRAD, INF, LATE, PROMPT, STATE, TRANS, WINDOW, WORK


class Descent:
    """A choice that fits: ``picked``, rows of ``x``."""

    def __init__(self, x: dual.Arrays, picked: list[int]) -> None:
        self.x, self.picked, self._chosen = x, picked, x.evaluate(picked)

    @property
    def value(self) -> float:
        """Ms of a step under the choice."""
        return self._chosen.value

    def by_one(self) -> None:
        """Apply the change of one component that gains most, until none gains."""
        while (picked := self._best_change()) is not None:
            self.picked, self._chosen = picked, self.x.evaluate(picked)

    def _best_change(self) -> list[int] | None:
        """The choice with one change that fits in the least ms; None if no change gains."""
        least, changed = self.value - ROUNDING * abs(self.value), None
        for i in range(self.x.n):
            values, fits = self.alternatives(i)
            values = np.where(fits, values, INF)
            row = int(values.argmin())
            if values[row] < least:
                least, changed = float(values[row]), [*self.picked[:i], row, *self.picked[i + 1 :]]
        return changed

    def alternatives(self, i: int) -> tuple[Any, Any]:
        """(ms, fits) for each row of component i in place of its own: ms of a step, and whether it fits."""
        x, n, chosen = self.x, self.x.n, self._chosen
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
