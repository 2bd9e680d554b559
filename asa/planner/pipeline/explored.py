"""The stages that a case has explored, each up to plans of a number of ms, and what is known of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from asa.planner import clock
from asa.planner.budget import ROUNDING
from asa.planner.pipeline.bounds import Frame, Stages
from asa.planner.pipeline.skeletons import Options, sums_of
from asa.planner.pipeline.stage_cache import StageCache
from asa.planner.pipeline.stages import UTMOST
from asa.planner.pipeline.thinning import Points, Room
from asa.planner.stage.lattice import INF, Table

Key = tuple[int, int, int, int]
"""A stage: width, place (1 is the last), start, stop."""
FINER, FINER_ALONE = 4, 16
"""Times as many labels, for stages whose labels turned out to be too rough; of a single microbatch, where they have
fewer numbers."""

Tables = Mapping[tuple[int, int], Table | None]
"""Bounds on stages by width and place; None where none can be part of a plan."""


class Explored:
    """The explored stages of one number of microbatches. ``in_flight``: how many of these are, by place."""

    def __init__(self, cache: StageCache, m: int, in_flight: Mapping[int, int]) -> None:
        self._cache, self._m, self._in_flight = cache, m, in_flight
        self._stages: dict[Key, tuple[float, Points | None]] = {}
        """For each stage the ms of plans up to which it is explored, and its points; None where it has none."""
        self._detail: dict[Key, int] = {}

    def points(self, key: Key) -> Points:
        """The points of a stage that is part of a plan."""
        points = self._stages[key][1]
        assert points is not None
        return points

    def known(self, key: Key, limit: float) -> bool:
        """Whether a stage was explored as far as plans below ``limit`` ms need it."""
        return key in self._stages and self._stages[key][0] >= limit * (1 - ROUNDING)

    def exact(self, key: Key, limit: float) -> bool:
        """Whether a stage is known up to ``limit`` ms and its points are true ways to run it."""
        points = self._stages[key][1] if self.known(key, limit) else None
        return self.known(key, limit) and (points is None or points.exact)

    def refine(self, key: Key) -> bool:
        """Have a stage explored again with more labels; False where it already was with the most."""
        most = self._detail.get(key, self._cache.effort.labels)
        if most >= UTMOST:
            return False
        self._stages[key] = (0.0, self._stages[key][1])
        self._detail[key] = min(UTMOST, most * (FINER if self._m > 1 else FINER_ALONE))
        return True

    def explore(self, frame: Frame, limit: float, ends: float, only: Collection[Key] | None) -> bool:
        """Explore the stages (``only`` these, if not None) that a plan below ``limit`` ms could have; returns whether
        there were any left."""
        wanted: dict[tuple[int, int, int], dict[int, list[tuple[Key, int, Room, int]]]] = {}
        for w, r in frame.parts:
            rooms: Any = None
            for a, b in np.argwhere(frame.through(w, r) < limit).tolist():
                key = (w, r, a, b)
                if (only is not None and key not in only) or self.known(key, limit):
                    continue
                rooms = frame.room(w, r, limit) if rooms is None else rooms
                stage_key = self._cache.key_of(w, self._m, self._in_flight[r])
                start, stop = self._cache.twin(w, self._m, a, b)
                most = self._detail.get(key, self._cache.effort.labels)
                wanted.setdefault(stage_key, {}).setdefault(start, []).append(
                    (key, stop, Room(*rooms[:, a, b].tolist()), most)
                )
        for stage_key, starts in wanted.items():
            for start, items in starts.items():
                limits: dict[int, tuple[Room, int]] = {}
                for _, stop, room, most in items:
                    widest, labels = limits.get(stop, (room, 0))
                    limits[stop] = (widest.union(room), max(labels, most))
                explored = self._cache.explored(stage_key, start, limits, ends)
                for key, stop, room, _ in items:
                    points = explored[stop]
                    self._stages[key] = (limit, None if points is None else points.within(self._m, room))
                if clock.now() > ends:
                    return True
        return bool(wanted)

    def tightened(self, base: Tables, limit: float) -> dict[tuple[int, int], Table | None]:
        """The tables ``base``, raised by what was explored up to ``limit`` ms."""
        tables = dict(base)
        copied: set[tuple[int, int]] = set()

        def copied_values(w: int, r: int) -> Iterable[Any]:
            table = tables[w, r]
            assert table is not None
            if (w, r) not in copied:
                copied.add((w, r))
                table = tables[w, r] = Table(*(x.copy() for x in table.values()))
            return table.values()

        for (w, r, a, b), (known, points) in self._stages.items():
            if known < limit * (1 - ROUNDING):
                continue
            for x, values in zip(copied_values(w, r), self._least(points), strict=True):
                raised = np.full_like(x[a, b], INF)
                if points is not None:
                    np.minimum.at(raised, (points.entry, points.exit), values)
                np.maximum(x[a, b], raised, out=x[a, b])  # of merged labels, what was known before may say more
        return tables

    def _least(self, points: Points | None) -> Sequence[Any]:
        """The least times of each point, in the order of :meth:`asa.planner.stage.lattice.Table.values`."""
        if points is None:
            return (None,) * 5
        steady, whole, single = sums_of(points.least, self._m)
        return steady, points.least[0], whole, single, points.least[1]

    def options(
        self, frame: Frame, limit: float, only: Collection[Key] | None = None
    ) -> dict[tuple[int, int], Options]:
        """What stages (``only`` these, if not None) may do in plans below ``limit`` ms, by place (1 is the last) and
        start: the points of explored stages, and bounds on the others."""
        parts: dict[tuple[int, int], list[Any]] = {}
        for (w, r), part in frame.parts.items():
            mask, first = frame.through(w, r)[part.start, part.stop] < limit, frame.keys.of[w].start
            for i in np.flatnonzero(mask).tolist():
                a, b = int(part.start[i]), int(part.stop[i])
                if only is not None and (w, r, a, b) not in only:
                    continue
                known = self.known((w, r, a, b), limit)
                points = self._stages[w, r, a, b][1] if known else None
                if known and points is None:
                    continue
                entry, leaving, times, sums, point = self._some(part, i, points)
                if points is None or not points.exact:
                    bounds = [x[i][entry, leaving] for x in (part.steady, part.whole, part.single)]
                    sums = np.maximum(sums, np.stack(bounds))
                size = np.ones_like(point)
                parts.setdefault((r, a), []).append(
                    (size * w, size * b, entry + first, leaving + first, times, sums, point)
                )
        return {
            where: Options(*(np.concatenate(x, axis=-1) for x in zip(*rows, strict=True)))
            for where, rows in parts.items()
        }

    def _some(self, part: Stages, i: int, points: Points | None) -> tuple[Any, ...]:
        """Entry, exit, times, sums and point of each known way, or of each bound."""
        if points is not None:
            return points.entry, points.exit, points.least, sums_of(points.least, self._m), np.arange(len(points))
        entry, leaving = np.nonzero(np.isfinite(part.steady[i]))
        ways = np.stack([part.forward[i][entry, leaving], part.backward[i][entry, leaving]])
        return entry, leaving, np.concatenate([ways, 0 * ways]), np.zeros((3, len(entry))), np.full(len(entry), -1)
