"""Rows of numbers of which no other is better in everything."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from asa.planner import clock

_IN_FRONT = np.triu(np.ones((600, 600), dtype=bool), 1)
"""Rows come in order of their sums: what beats a row has a smaller one, and of equals the first one stays."""

_SPARSE, _MOST_PAIRS = 8, 300_000
"""Where so few of all pairs of rows are of one group, these are compared, and no others."""


_BLOCK, _FIRST = 256, 64
"""Rows looked at together where there are many, and against how many of those in front first."""


class OutOfTimeError(Exception):
    """Nothing can be said in time."""


def efficient(values: Any, group: Any, ends: float = float("inf")) -> Any:
    """Indices of rows that no other row of the same group beats or equals in everything.

    Raises:
        OutOfTimeError: the clock has passed ``ends``, and there are many.
    """
    order = np.lexsort((values.sum(axis=1), group))
    values, group = values[order], group[order]
    kept = np.ones(len(values), dtype=bool)
    edges = np.flatnonzero(np.diff(group)) + 1
    sizes = np.diff(np.r_[0, edges, len(group)])
    pairs = int((sizes * (sizes - 1)).sum()) // 2
    if _SPARSE * pairs <= len(group) ** 2 and pairs <= _MOST_PAIRS:
        kept[_beaten(values, sizes)] = False
        return order[kept]
    begins = [0, *edges.tolist(), len(group)]
    if len(group) <= 250 or len(begins) == 2:
        begins = [0, len(group)]
        several = True
    else:
        several = False
    for a, b in pairwise(begins):
        if b - a < 2:
            continue
        x = values[a:b]
        if b - a > 600:
            kept[a:b] = _swept(x, group[a:b], ends)
            continue
        beaten = _IN_FRONT[: b - a, : b - a].copy()
        if several:
            beaten &= group[a:b, None] == group[None, a:b]
        for d in range(x.shape[1]):
            column = x[:, d]
            beaten &= column[:, None] <= column[None, :]
        kept[a:b] = ~beaten.any(axis=0)
    return order[kept]


def lowest(bounds: Any, most: int) -> tuple[Any, float]:
    """Indices of so many with the lowest bounds (in order, where that is all), and the least bound of the rest."""
    if len(bounds) <= most:
        return np.arange(len(bounds)), float("inf")
    order = np.argpartition(bounds, most)
    return order[:most], float(bounds[order[most:]].min())


def _beaten(values: Any, sizes: Any) -> Any:
    """Rows that one in front beats, in groups of these ``sizes``."""
    begin = np.repeat(np.cumsum(sizes) - sizes, sizes)
    row = np.arange(len(begin))
    before = row - begin
    behind = np.repeat(row, before)
    front = np.arange(len(behind)) - np.repeat(np.cumsum(before) - before - begin, before)
    for column in np.ascontiguousarray(values.T):
        good = column[front] <= column[behind]
        front, behind = front[good], behind[good]
    return behind


def _swept(x: Any, group: Any, ends: float) -> Any:
    """Undominated rows of many, in order of their sums: only a kept row in front can beat one."""
    kept = np.zeros(len(x), dtype=bool)
    columns, owners, count = np.empty((x.shape[1] + 1, len(x))), group.astype(float), 0
    for begin in range(0, len(x), _BLOCK):
        if clock.now() > ends:
            raise OutOfTimeError
        left = np.arange(begin, min(begin + _BLOCK, len(x)))
        at, size = 0, _FIRST
        while at < count and len(left):  # most rows are beaten by some of the first
            some = columns[:, at : min(at + size, count), None]
            beaten = some[-1] == owners[left]
            for front, column in zip(some, x[left].T, strict=False):
                beaten &= front <= column
            left, at, size = left[~beaten.any(axis=0)], at + size, 4 * size
        beaten = _IN_FRONT[: len(left), : len(left)] & (owners[left, None] == owners[None, left])
        for column in x[left].T:
            beaten &= column[:, None] <= column[None, :]
        left = left[~beaten.any(axis=0)]
        kept[left] = True
        columns[:-1, count : count + len(left)], columns[-1, count : count + len(left)] = x[left].T, owners[left]
        count += len(left)
    return kept
