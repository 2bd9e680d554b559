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
    keep = np.ones(len(values), dtype=bool)
    sizes = np.diff(np.r_[0, np.flatnonzero(np.diff(group)) + 1, len(group)])
    if sizes.max(initial=0) <= _LARGE and int((sizes * (sizes - 1)).sum()) // 2 <= _MOST_PAIRS:
        keep[_beaten(values, sizes)] = False
        return order[keep]
    for a, b in pairwise([0, *np.cumsum(sizes).tolist()]):
        if b - a > _LARGE:
            keep[a:b] = _swept(values[a:b], ends)
        else:
            keep[a + _beaten(values[a:b], np.array([b - a]))] = False
    return order[keep]


def begins(*keys: Any) -> Any:
    """Indices at which a new group begins, in rows that are sorted by these keys; none where there are no rows."""
    return np.flatnonzero(np.r_[True, np.any([np.diff(key) != 0 for key in keys], axis=0)])[: len(keys[0])]


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
    earlier = row - begin
    behind = np.repeat(row, earlier)
    front = np.arange(len(behind)) - np.repeat(np.cumsum(earlier) - earlier - begin, earlier)
    for column in np.ascontiguousarray(values.T):
        beats = column[front] <= column[behind]
        front, behind = front[beats], behind[beats]
    return behind


def _swept(x: Any, ends: float) -> Any:
    """A mask of the undominated rows of one large group, in order of their sums: only an earlier undominated row can
    beat one."""
    keep = np.zeros(len(x), dtype=bool)
    columns, count = np.empty((x.shape[1], len(x))), 0
    for begin in range(0, len(x), _BLOCK):
        if clock.now() > ends:
            raise OutOfTimeError
        remaining = np.arange(begin, min(begin + _BLOCK, len(x)))
        at, size = 0, _FIRST
        while at < count and len(remaining):  # most rows are beaten by some of the first
            front_rows = columns[:, at : min(at + size, count), None]
            beaten = np.ones((front_rows.shape[1], len(remaining)), dtype=bool)
            for front, column in zip(front_rows, x[remaining].T, strict=True):
                beaten &= front <= column
            remaining, at, size = remaining[~beaten.any(axis=0)], at + size, 4 * size
        beaten = _IN_FRONT[: len(remaining), : len(remaining)].copy()
        for column in x[remaining].T:
            beaten &= column[:, None] <= column[None, :]
        remaining = remaining[~beaten.any(axis=0)]
        keep[remaining] = True
        columns[:, count : count + len(remaining)] = x[remaining].T
        count += len(remaining)
    return keep
