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
