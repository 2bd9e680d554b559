"""Which stages a case has explored, up to plans of how many ms, and what is known of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from asa.planner.pipeline.bounds import Frame, Keys
from asa.planner.pipeline.lattice import INF, Table
from asa.planner.pipeline.points import Points, Room
from asa.planner.pipeline.shop import Shop
from asa.planner.pipeline.skeletons import Options
from asa.planner.pipeline.stages import MOST, UTMOST

FINER = 4
"""Times as many labels, for stages whose labels turned out to be too rough."""
_CLOSE = 1e-9

Key = tuple[int, int, int, int]
"""A stage: width, place (1 is the last), start, stop."""
Tables = Mapping[tuple[int, int], Table | None]
"""Bounds on stages by width and place; None where none can be part of a plan."""


@dataclass
class _Known:
    """A stage explored up to plans of ``limit`` ms; ``asked``: up to which that was to be, with so many labels."""

    limit: float
    points: Points | None
    asked: float
    most: int


@dataclass(frozen=True)
class _Wanted:
    """A stage (start, stop) with ``place`` stages to the last, to be explored as far as there is ``room``, by way of an
    equal one that stops at ``stop``."""

    place: int
    stage: tuple[int, int]
    stop: int
    room: Room
    most: int


class Explored:
    """The stages of one number of microbatches; ``in_flight``: of these, by place."""

    def __init__(self, shop: Shop, m: int, in_flight: Mapping[int, int]) -> None:
        self._shop, self._m, self._in_flight = shop, m, in_flight
        self._stages: dict[Key, _Known] = {}
        self._detail: dict[Key, int] = {}

    def points(self, key: Key) -> Points:
        """Of a stage that is part of a plan."""
        points = self._stages[key].points
        assert points is not None
        return points

    def detailed(self, key: Key) -> bool:
        """Whether it has been refined."""
        return key in self._detail

    def refine(self, key: Key) -> bool:
        """Explore it again with more labels; False where those are more than can be."""
        self._stages[key].limit = 0.0
        self._detail[key] = FINER * self._detail.get(key, MOST)
        return self._detail[key] <= UTMOST

    def forget_rough(self) -> None:
        """Explore again what is not known exactly."""
        for known in self._stages.values():
            if known.points is not None and not known.points.exact:
                known.limit = 0.0

    def explore(
        self, frame: Frame, base: Tables, widths: Collection[int], limit: float, ends: float, finest: int,
        merged: Collection[int],
    ) -> tuple[bool, float]:  # fmt: skip
        """Explore the stages that a plan below ``limit`` could have; whether there were new ones, and up to which limit
        all of them are known: perhaps a lower one, but for ``merged`` widths, in whose stages labels are merged. More
        labels than were not enough are taken up to ``finest``. ``base``: tables of what may be part of a plan."""
        wanted: dict[tuple[int, int, int], dict[int, list[_Wanted]]] = {}
        reached = limit
        for r in self._in_flight:
            for w in widths:
                if base.get((w, r)) is None:
                    continue
                rooms: Any = None
                for a, b in np.argwhere(frame.through(w, r) < limit).tolist():
                    known = self._stages.get((w, r, a, b))
                    if known is not None and known.limit >= limit * (1 - _CLOSE):
                        continue
                    most = self._detail.get((w, r, a, b), MOST)
                    if known is not None and 0.0 < known.limit < known.asked:
                        most = max(most, known.most)
                        if known.asked >= limit * (1 - _CLOSE) and w not in merged:
                            if most >= finest:
                                reached = min(reached, known.limit)
                                continue
                            most = finest
                    rooms = frame.room(w, r, limit) if rooms is None else rooms
                    place = self._shop.place(w, self._m, self._in_flight[r])
                    twin = self._shop.twin(w, self._m, a, b)
                    wanted.setdefault(place, {}).setdefault(twin[0], []).append(
                        _Wanted(r, (a, b), twin[1], Room(*rooms[:, a, b].tolist()), most)
                    )
        for place, starts in wanted.items():
            for start, some in starts.items():
                asked: dict[int, tuple[Room, int]] = {}
                for x in some:
                    room, most = asked.get(x.stop, (x.room, 0))
                    asked[x.stop] = (room.joined(x.room), max(most, x.most))
                found = self._shop.explored(place, start, asked, ends, merging=place[0] in merged)
                for x in some:
                    room, points = found[x.stop]
                    short = room.short(self._m, x.room)
                    points = None if points is None else points.within(self._m, x.room)
                    self._stages[place[0], x.place, *x.stage] = _Known(limit - short, points, limit, x.most)
                if time.monotonic() > ends:
                    return True, limit
        return bool(wanted), reached

    def tightened(self, base: Tables, limit: float) -> dict[tuple[int, int], Table | None]:
        """``base`` with what was explored up to ``limit``, as far as plans below it are concerned."""
        tables = dict(base)
        copied: set[tuple[int, int]] = set()
        for (w, r, a, b), known in self._stages.items():
            if known.limit < limit * (1 - _CLOSE):
                continue
            table = tables[w, r]
            assert table is not None
            if (w, r) not in copied:
                copied.add((w, r))
                table = tables[w, r] = Table(
                    steady=table.steady.copy(),
                    forward=table.forward.copy(),
                    whole=table.whole.copy(),
                    single=table.single.copy(),
                )
            arrays = (table.steady, table.forward, table.whole, table.single)
            for x in arrays:
                x[a, b] = INF
            if known.points is not None:
                f, back, _, once = known.points.least
                steady = f + back
                at = (known.points.entry, known.points.exit)
                for x, values in zip(arrays, (steady, f, self._m * steady + once, steady + once), strict=True):
                    np.minimum.at(x[a, b], at, values)
        return tables

    def options(self, keys: Keys, most: int, limit: float) -> dict[tuple[int, int], Options]:
        """What stages explored up to ``limit`` may do, by place (1 is the last) and start."""
        return {(r, a): x for r in range(1, most + 1) for a, x in self._options(keys, r, limit).items()}

    def _options(self, keys: Keys, r: int, limit: float) -> dict[int, Options]:
        parts: dict[int, list[Any]] = {}
        for (w, rank, a, b), known in self._stages.items():
            if rank != r or known.points is None or known.limit < limit * (1 - _CLOSE):
                continue
            x, k = known.points, keys.of[w].start
            size = np.full(len(x), 1)
            parts.setdefault(a, []).append((size * w, size * b, x.entry + k, x.exit + k, x.least, np.arange(len(x))))
        found = {}
        for a, some in parts.items():
            width, stop, entry, leaving, times, point = (np.concatenate(x, axis=-1) for x in zip(*some, strict=True))
            found[a] = Options(width, stop, entry, leaving, times, point, point)
        return found
