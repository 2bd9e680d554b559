"""What plans of several stages take at least if nothing but computation took time: quickly, for any number of ranks.

Of one number of microbatches: every rank always busy; one microbatch through all components; and the slowest stage,
which has all microbatches to do, at the cuts and widths that make it fastest.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from asa.planner.lattice import INF
from asa.planner.pipelines import Pipelines

_NEVER = 1e18
_STEPS = 12


def floors(pipelines: Pipelines, best: float = INF, ends: float = INF) -> dict[int, float]:
    """Ms per number of microbatches, a bound on every plan of several stages; ``best`` where it is no less.

    What is not reached until ``ends`` has a bound of 0.
    """
    found = dict.fromkeys(pipelines.microbatches(), 0.0)
    gpus = pipelines.gpus
    for m in found:
        if time.monotonic() > ends:
            break
        rows = {w: row for w in pipelines.widths() if w < gpus and (row := pipelines.compute(w, m)) is not None}
        if not rows:
            found[m] = best
            continue
        own = np.minimum(np.array(list(rows.values()), dtype=float), _NEVER)
        widths = np.array(list(rows), dtype=np.int64)
        area = m * float((own * widths[:, None]).min(axis=0).sum()) / gpus
        low = max(area, float(own.min(axis=0).sum()))
        if low >= min(best, _NEVER / 2):
            found[m] = best
            continue
        found[m] = max(low, m * _slowest(own, widths, gpus, low / m, best / m))
    return found


def _slowest(own: Any, widths: Any, gpus: int, low: float, high: float) -> float:
    """A bound on the slowest stage, from ``low`` to ``high``; ``own``: ms by width and component."""
    sums = np.concatenate([np.zeros((len(widths), 1)), np.cumsum(own, axis=1)], axis=1)
    if high < INF and not _possible(sums, widths, gpus, high):
        return high
    high = min(high, float(sums[:, -1].min()))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _possible(sums, widths, gpus, middle):
            high = middle
        else:
            low = middle
    return low


def _possible(sums: Any, widths: Any, gpus: int, most: float) -> bool:
    """Whether stages of at most ``most`` ms need no more than the ranks there are."""
    n = sums.shape[1] - 1
    reach = np.array([np.searchsorted(row, row[:-1] + most * (1 + 1e-12), side="right") - 1 for row in sums])
    fewest = np.full(n + 1, 1 << 40)
    fewest[n] = 0
    for i in range(n - 1, -1, -1):
        stop = reach[:, i]
        fewest[i] = np.where(stop > i, widths + fewest[stop], 1 << 40).min()
    return bool(fewest[0] <= gpus)
