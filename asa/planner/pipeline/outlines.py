"""What a stage takes at least with the memory limit, value by value, where all labels of it are too many to follow.

Labels are compared by one value at a time: of those few are left, even where memory binds.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from functools import reduce
from typing import Any

import numpy as np

from asa.planner.pipeline.bounds import Frame
from asa.planner.pipeline.lattice import INF
from asa.planner.pipeline.points import Room
from asa.planner.pipeline.shop import Shop

Key = tuple[int, int, int, int]
"""A stage: width, place (1 is the last), start, stop."""

_CLOSE = 1e-9
_LABELS = 400
"""Kept per component."""
_APART, _PARTS = 0.01, 5
"""By what part of its least a microbatch must be able to take longer for a bound to be made into so many."""


class Outlines:
    """Of stages of one number of microbatches; ``in_flight``: of these, by place."""

    def __init__(self, shop: Shop, m: int, in_flight: Mapping[int, int]) -> None:
        self._shop, self._m, self._in_flight = shop, m, in_flight
        self._least: dict[Key, tuple[float, Any]] = {}

    def known(self, key: Key, limit: float) -> bool:
        """Whether there is one, for plans below ``limit``."""
        return key in self._least and self._least[key][0] >= limit * (1 - _CLOSE)

    def all(self, limit: float) -> Iterator[tuple[Key, Any]]:
        """Those for plans below ``limit``: arrays entry x exit, in the order of
        :meth:`asa.planner.pipeline.lattice.Table.values`."""
        return ((key, least) for key, (far, least) in self._least.items() if far >= limit * (1 - _CLOSE))

    def draw(self, frame: Frame, keys: Collection[Key], limit: float, ends: float) -> None:
        """Those of ``keys``, for plans below ``limit``; as many as there is time for until ``ends``."""
        rooms: dict[tuple[int, int], Any] = {}
        wanted: dict[tuple[int, int, int], dict[int, dict[int, list[tuple[Key, Room]]]]] = {}
        for w, r, a, b in keys:
            if (w, r) not in rooms:
                rooms[w, r] = frame.room(w, r, limit)
            place = self._shop.place(w, self._m, self._in_flight[r])
            start, stop = self._shop.twin(w, self._m, a, b)
            room = Room(*rooms[w, r][:, a, b].tolist())
            wanted.setdefault(place, {}).setdefault(start, {}).setdefault(stop, []).append(((w, r, a, b), room))
        for place, starts in wanted.items():
            for start, stops in starts.items():
                caps = {b: reduce(Room.joined, (room for _, room in some)) for b, some in stops.items()}
                least = self._of(place, start, caps, ends)
                if least is None:
                    return
                for b, some in stops.items():
                    for key, _ in some:
                        self._least[key] = (limit, least[b])

    def _of(self, place: tuple[int, int, int], start: int, caps: dict[int, Room], ends: float) -> dict[int, Any] | None:
        explorer, m = self._shop.explorer(place), self._m
        degrees = explorer.numbers.degrees
        least = {b: np.full((5, degrees, degrees), INF) for b in caps}
        for k, value in ((0, (1, 1, 0)), (2, (m, m, 1)), (3, (1, 1, 1)), (4, (0, 1, 0))):
            if time.monotonic() > ends:
                return None
            for b, points in explorer.explore(start, caps, _LABELS, ends=ends, along=value).items():
                forward, backward, _, once = points.least
                found = value[0] * forward + value[1] * backward + value[2] * once
                np.minimum.at(least[b][k], (points.entry, points.exit), found)
        for values in least.values():
            values[1] = 0.0  # nothing is said of forward alone
            values[:, np.isinf(values).any(axis=0)] = INF
        return least


def apart(times: Any, sums: Any, m: int) -> tuple[Any, Any, Any]:
    """Bounds on ways to run a stage, each made into several: where a microbatch takes no more than so long, the rest of
    the whole comes once per step.

    ``times`` and ``sums``: as ``times`` and ``least`` of :class:`asa.planner.pipeline.skeletons.Options`. Returns of
    which bound each is made, its times and its sums.
    """
    steady, whole, single = sums
    longest = (whole - times[3]) / m  # from there on, what comes once is all of the rest
    several = longest > steady * (1 + _APART)
    step = np.where(several, (longest - steady) / _PARTS, 0.0)
    of, least, most = [], [], []
    for k in range(_PARTS + 1):
        which = np.flatnonzero(several) if k < _PARTS else np.arange(len(steady))
        of.append(which)
        least.append((steady + k * step)[which])
        most.append((steady + (k + 1) * step)[which] if k < _PARTS else np.full(len(steady), INF))
    origin, shortest, until = np.concatenate(of), np.concatenate(least), np.concatenate(most)
    once = np.maximum(times[3, origin], np.maximum(whole[origin] - m * until, single[origin] - until))
    sums = np.stack(
        [shortest, np.maximum(whole[origin], m * shortest + once), np.maximum(single[origin], shortest + once)]
    )
    return origin, np.concatenate([times[:3, origin], once[None]]), sums
