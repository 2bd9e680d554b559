"""Lower bounds on all stages of a chain, from weighted objectives, in one pass over the components.

Where memory binds, it has a Lagrangian price: no choice that fits takes less than the least sum of time and priced
memory, minus the price of the capacity. Good prices are marginal costs of memory: ms of time for each GiB saved, over a
microbatch (fewer activations) or over a step (less state). They are the slopes of the lower hull of time over memory,
where each component takes its best configuration at a price (:func:`rates`). Where configurations differ little, as in
repeated blocks, no other prices matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asa.planner.budget import ROUNDING
from asa.planner.stage import lattice as at
from asa.planner.stage.floor import rates as slopes
from asa.planner.stage.lattice import INF, ChainWeights, Numbers, PricedChain, Table

Objective = tuple[float, float, float, float, float, float, float]
"""Weights of steady time, of forward alone, of once-per-step time and of memory; microbatches in flight; ``hidden``;
and the component in whose backward memory is counted (``OWN_LAST``: a stage's last one)."""
OWN_LAST = -1.0

_STEADY, _WHOLE = 5, 3
"""Most prices of memory, by the time of a microbatch and by that of a step."""
_ENTRIES = 6_000_000
"""Array entries of one pass (about), which covers several numbers of microbatches in flight."""


def weights_of(rows: Sequence[Objective], n: int) -> ChainWeights:
    """Weights of these objectives; ``hidden`` beyond 1 is 2 + k for the pivot k."""
    a = np.array(rows, dtype=float)
    pivot = np.where(a[:, 5] > 1, a[:, 5] - 2, -1).astype(np.int64)
    behind = (np.arange(n)[None, :] >= pivot[:, None]).astype(float)
    hidden = np.where(pivot[:, None] >= 0, behind, a[:, 5:6])
    return ChainWeights(
        steady=a[:, 0], ahead=a[:, 1], once=a[:, 2], memory=a[:, 3], flight=a[:, 4], hidden=hidden, pivot=pivot,
        moments=(np.arange(n)[None, :] == a[:, 6:7]).astype(float),
    )  # fmt: skip


def pivots(n: int, count: int) -> list[float]:
    """Components at equal distances along the chain, as values of ``hidden``."""
    return sorted({2.0 + n * (k + 1) // (count + 1) for k in range(count)})


def rows_of(n: int, m: int) -> list[Objective]:
    """Objectives without memory: steady time, and several lower bounds on a whole step."""
    once = [1.0, 0.5, 0.0, *pivots(n, 5)]
    return [(1.0, 0.0, 0.0, 0.0, 1.0, 1.0, OWN_LAST)] + [(float(m), 0.0, 1.0, 0.0, 1.0, h, OWN_LAST) for h in once]


def rates(numbers: Numbers, in_flight: int, most: int, *, per_step: bool) -> list[float]:
    """Ms of a microbatch (of a step where ``per_step``) for each GiB saved (:func:`asa.planner.stage.floor.rates`)."""
    x, (row, groups, kind_of) = numbers, numbers.distinct
    count = np.bincount(kind_of)
    memory_of = row[:, at.STATE] + in_flight * row[:, at.ACT]
    time = row[:, at.F] + row[:, at.B]
    if per_step:
        time = x.m * time + row[:, at.ONCE] + max(0.0, 1 - x.saving * x.sc) * (row[:, at.PROMPT] + row[:, at.LATE])
    return slopes(time, memory_of, groups, count, x.capacity, most)


def priced_memory(numbers: Numbers, in_flight: int) -> list[Objective]:
    """Objectives with prices of memory: first memory alone, then for each price steady time, then a whole step. Memory
    counts in the backward of a stage's last component; with one microbatch also in that of the chain's second to last
    component, if it holds more."""
    n, m, flight = numbers.n, numbers.m, float(in_flight)
    steady, whole = rates(numbers, in_flight, _STEADY, per_step=False), rates(numbers, in_flight, _WHOLE, per_step=True)
    rows: list[Objective] = [(0.0, 0.0, 0.0, 1.0, flight, 1.0, OWN_LAST)]
    held = [float((row[:, at.GRAD] + row[:, at.TRANS]).mean()) for row in numbers.rows[-2:]]
    for moment in (OWN_LAST, n - 2.0) if m == 1 and held[0] > held[-1] else (OWN_LAST,):
        rows += [(1.0, 0.0, 0.0, p, flight, 1.0, moment) for p in steady]
        rows += [(float(m), 0.0, 1.0, p, flight, h, moment) for p in whole for h in (1.0, *pivots(n, 2))]
    return rows


def relaxed(numbers: Numbers) -> Table:
    """The table without the memory limit."""
    n, m = numbers.n, numbers.m
    rows = [(0.0, 1.0, 0.0, 0.0, 1.0, 1.0, OWN_LAST), *rows_of(n, m)]
    k = len(rows)
    rows += [(1.0, -1.0, 0.0, 0.0, 1.0, 1.0, OWN_LAST)]
    rows += [(1.0, 0.0, 1.0, 0.0, 1.0, r[5], OWN_LAST) for r in rows[2:k]]
    least = PricedChain(numbers, weights_of(rows, n)).intervals()
    return Table(
        steady=least[1], forward=least[0], whole=least[2:k].max(axis=0), single=least[k + 1 :].max(axis=0),
        backward=least[k],
    )  # fmt: skip


def limited(numbers: Numbers, table: Table, in_flight: Sequence[int]) -> list[Table]:
    """Tables with the memory limit, one for each number in ``in_flight``; infinite where a stage cannot fit."""
    x, tables = numbers, list[Table]()
    priced = [priced_memory(x, f) for f in in_flight]  # and backward alone at the prices of steady time
    rows = [some + [(1.0, -1.0, *r[2:]) for r in some if r[0] == 1.0 and not r[2]] for some in priced]
    if not rows:
        return []
    entries = max(len(r) for r in rows) * x.n * x.degrees * max((x.n + 1) * x.degrees, x.count**2)
    at_once = max(1, _ENTRIES // entries)
    for begin in range(0, len(rows), at_once):
        batch = rows[begin : begin + at_once]
        values = PricedChain(x, weights_of([r for part in batch for r in part], x.n)).intervals()
        for part in batch:
            tables.append(_dearer(x, table, part, values[: len(part)]))
            values = values[len(part) :]
    return tables


def _dearer(x: Numbers, table: Table, rows: list[Objective], values: Any) -> Table:
    never = values[0] > x.capacity * (1 + ROUNDING)
    steady, whole, backward = table.steady, table.whole, table.backward
    for row, value in zip(rows[1:], values[1:], strict=True):
        bound = value - row[3] * x.capacity
        if row[2]:
            whole = np.maximum(whole, bound)
        elif row[1]:
            backward = np.maximum(backward, bound)
        else:
            steady = np.maximum(steady, bound)
    return _walled(never, x.m, Table(steady, table.forward, whole, table.single, backward))


def _walled(never: Any, m: int, table: Table) -> Table:
    """The table with infinity for stages ``never``; ``whole`` and ``single`` are at least what steady time says."""
    whole, single = np.maximum(table.whole, m * table.steady), np.maximum(table.single, table.steady)
    values = (table.steady, table.forward, whole, whole if m == 1 else single, table.backward)
    return Table(*(None if x is None else np.where(never, INF, x) for x in values))
