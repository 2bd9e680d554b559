"""Pareto fronts: rows of numbers that no other row equals or beats in every column."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from asa.planner import clock

_LARGE, _MOST_PAIRS = 200, 300_000
"""Rows from which on a group is processed by itself; pairs of rows from which on all groups are."""
_BLOCK, _FIRST = 256, 64
"""Rows of a large group processed together; number of rows before them with which they are compared first."""
_IN_FRONT = np.triu(np.ones((_BLOCK, _BLOCK), dtype=bool), 1)


class OutOfTimeError(Exception):
    """Time was up before there was any result."""


def efficient(values: Any, group: Any, ends: float = float("inf")) -> Any:
    """Indices of rows that no other row of the same group equals or beats in every column.

    Raises:
        OutOfTimeError: the clock has passed ``ends``, and there are many rows.
    """
    # A row that beats another has a smaller sum; of equal rows the first one stays.
    order = np.lexsort((values.sum(axis=1), group))
    values, group = values[order], group[order]
    kept = np.ones(len(values), dtype=bool)
    sizes = np.diff(np.r_[0, np.flatnonzero(np.diff(group)) + 1, len(group)])
    if sizes.max(initial=0) <= _LARGE and int((sizes * (sizes - 1)).sum()) // 2 <= _MOST_PAIRS:
        kept[_beaten(values, sizes)] = False
        return order[kept]
    for a, b in pairwise([0, *np.cumsum(sizes).tolist()]):
        if b - a > _LARGE:
            kept[a:b] = _swept(values[a:b], ends)
        else:
            kept[a + _beaten(values[a:b], np.array([b - a]))] = False
    return order[kept]


def begins(*keys: Any) -> Any:
    """Indices at which a new group begins, in rows that are sorted by these keys."""
    return np.flatnonzero(np.r_[True, np.any([np.diff(key) != 0 for key in keys], axis=0)])


def lowest(bounds: Any, most: int) -> tuple[Any, float]:
    """Indices of the ``most`` lowest bounds (in order, if these are all), and the least bound of the rest."""
    if len(bounds) <= most:
        return np.arange(len(bounds)), float("inf")
    order = np.argpartition(bounds, most)
    return order[:most], float(bounds[order[most:]].min())


def _beaten(values: Any, sizes: Any) -> Any:
    """Indices of rows that an earlier row of their group beats; ``sizes`` are those of the groups."""
    begin = np.repeat(np.cumsum(sizes) - sizes, sizes)
    row = np.arange(len(begin))
    before = row - begin
    behind = np.repeat(row, before)
    front = np.arange(len(behind)) - np.repeat(np.cumsum(before) - before - begin, before)
    for column in np.ascontiguousarray(values.T):
        good = column[front] <= column[behind]
        front, behind = front[good], behind[good]
    return behind


def _swept(x: Any, ends: float) -> Any:
    """A mask of the undominated rows of one large group, in order of their sums: only an earlier undominated row can
    beat one."""
    kept = np.zeros(len(x), dtype=bool)
    columns, count = np.empty((x.shape[1], len(x))), 0
    for begin in range(0, len(x), _BLOCK):
        if clock.now() > ends:
            raise OutOfTimeError
        left = np.arange(begin, min(begin + _BLOCK, len(x)))
        at, size = 0, _FIRST
        while at < count and len(left):  # most rows are beaten by some of the first
            some = columns[:, at : min(at + size, count), None]
            beaten = np.ones((some.shape[1], len(left)), dtype=bool)
            for front, column in zip(some, x[left].T, strict=True):
                beaten &= front <= column
            left, at, size = left[~beaten.any(axis=0)], at + size, 4 * size
        beaten = _IN_FRONT[: len(left), : len(left)].copy()
        for column in x[left].T:
            beaten &= column[:, None] <= column[None, :]
        left = left[~beaten.any(axis=0)]
        kept[left] = True
        columns[:, count : count + len(left)] = x[left].T
        count += len(left)
    return kept
