"""Regions of tensors that ranks hold, and the transfers needed when ranks are to hold other regions.

A *region* is a set of elements. Along every dimension it has some ascending runs of indices, and an element belongs to
it if each of its indices lies in a run. Shards of one dimension have that form, also those of fused query, key and
value, and shards of shards. A rank holds the region's elements in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from math import prod

Run = tuple[int, int]
"""Range of indices: the first, and one past the last."""
Region = tuple[tuple[Run, ...], ...]
Box = tuple[Run, ...]
"""One run for every dimension."""


def everything(shape: Sequence[int]) -> Region:
    """The region of a whole tensor.

    >>> everything((2, 3))
    (((0, 2),), ((0, 3),))
    """
    return tuple(((0, size),) for size in shape)


def as_region(dims: Iterable[Iterable[Iterable[int]]]) -> Region:
    """The region described by ``dims``, as read from JSON: lists in place of tuples."""
    return tuple(tuple((start, stop) for start, stop in runs) for runs in dims)


def extent(region: Region) -> tuple[int, ...]:
    """Number of indices in every dimension: the shape in which the region is held."""
    return tuple(sum(stop - start for start, stop in runs) for runs in region)


def size(box: Box) -> int:
    """Number of elements in ``box``."""
    return prod(stop - start for start, stop in box)


def narrowed(runs: Sequence[Run], first: int, last: int) -> tuple[Run, ...]:
    """The indices at positions ``first`` up to, but without, ``last`` of ``runs``, as when a shard is cut again.

    >>> narrowed(((0, 4), (8, 12)), 2, 6)
    ((2, 4), (8, 10))
    """
    selected, before = [], 0
    for start, stop in runs:
        low, high = max(first - before, 0), min(last - before, stop - start)
        if low < high:
            selected.append((start + low, start + high))
        before += stop - start
    return tuple(selected)


def places(region: Region, box: Box) -> Box:
    """Position of ``box`` in the held tensor of ``region``; along every dimension it must lie within one run.

    >>> places((((0, 4), (8, 12)),), ((9, 12),))
    ((5, 8),)
    """
    box_inside = []
    for runs, (first, last) in zip(region, box, strict=True):
        before = 0
        for start, stop in runs:
            if start <= first and last <= stop:
                box_inside.append((before + first - start, before + last - start))
                break
            before += stop - start
        else:
            raise ValueError(f"{first} to {last} is not in one run of {list(runs)}")
    return tuple(box_inside)


def within(region: Region, box: Box) -> bool:
    """Whether ``region`` contains ``box``, in one run along every dimension."""
    return all(
        any(start <= first and last <= stop for start, stop in runs)
        for runs, (first, last) in zip(region, box, strict=True)
    )


def transfers(
    current: Mapping[int, Region], requested: Mapping[int, Region], sent: dict[int, int], weight: int = 1
) -> list[tuple[int, int, Box]]:
    """(source, target, box) of every part that ranks need for ``requested``, from ranks that have it in ``current``.

    A rank takes what it already holds from itself. Otherwise the holder that has sent least so far sends. ``sent``
    counts what each rank has sent over all tensors, in elements times ``weight``, and is updated.

    >>> halves = {0: (((0, 2),),), 1: (((2, 4),),)}
    >>> transfers(halves, {1: (((0, 4),),)}, {0: 0, 1: 0})
    [(0, 1, ((0, 2),)), (1, 1, ((2, 4),))]

    Raises:
        ValueError: no rank holds a wanted part.
    """
    parts: list[tuple[int, int, Box]] = []
    for target, region in requested.items():
        own_region = current.get(target)
        if own_region == region:
            parts += [(target, target, box) for box in product(*region)]
            continue
        cut = [_cut(runs, [other[d] for other in current.values()]) for d, runs in enumerate(region)]
        for box in product(*cut):
            if own_region is not None and within(own_region, box):
                parts.append((target, target, box))
                continue
            holders = [rank for rank, other in current.items() if within(other, box)]
            if not holders:
                raise ValueError(f"no rank holds {list(box)}")
            source = min(holders, key=lambda rank: (sent[rank], rank))
            sent[source] += size(box) * weight
            parts.append((source, target, box))
    return parts


def _cut(runs: Sequence[Run], others: Sequence[Sequence[Run]]) -> list[Run]:
    """``runs`` cut into pieces, none of which crosses the edge of a run in ``others``."""
    edges = sorted({edge for other in others for run in other for edge in run})
    parts = []
    for start, stop in runs:
        inside = [start, *(edge for edge in edges if start < edge < stop), stop]
        parts += [(a, b) for a, b in pairwise(inside) if a < b]
    return parts
