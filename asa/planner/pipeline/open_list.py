"""Best-first search over the cuts and widths of a case's plans.

Bounds on stages are combined to all plans below a limit (:mod:`asa.planner.pipeline.skeletons`), and the limit rises
step by step. These plans have only a few different combinations of cuts and widths. Each combination is examined by
column generation (:mod:`asa.planner.pipeline.column_generation`). Where that does not raise its bound any more, all
efficient choices of its stages are enumerated (:mod:`asa.planner.pipeline.stages`). The search always takes the
combination with the lowest bound: good plans come up early, and combinations with bounds above them are not examined.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from asa.planner import clock
from asa.planner.pipeline.bounds import Frame
from asa.planner.pipeline.case import Case
from asa.planner.pipeline.column_generation import ColumnGeneration, Cuts
from asa.planner.pipeline.lattice import INF
from asa.planner.pipeline.skeletons import FEW, Leaves, Options, plans, sums_of
from asa.planner.pipeline.stages import Points, Room, TooManyError

Key = tuple[int, int, int, int]
"""A stage: width, position from the last (1), start, stop."""
_FOREVER = 1e15
"""Ms that no plan takes: a limit where none is known."""
_SHARE = 0.003
"""Share of the bound by which the first limit is above it."""
_ALL = 10.0
"""Share from which on all plans are listed."""
_NEAR = 1.1
"""Plans within this factor of the incumbent trigger another iteration at once, which often finds a better one
(0126)."""
_AT_ONCE = 8
"""Combinations of cuts and widths examined in one step."""
_SEEN = 12
"""Most plans of the same cuts and widths against which the first weights are chosen."""


class OpenList:
    """The cuts and widths of a case. No plan takes less than ``bound`` ms; ``stuck``: the bound rises no further."""

    def __init__(self, case: Case) -> None:
        self._case, self._effort = case, case.shop.effort
        self._share = _SHARE
        self._queue: list[tuple[float, Cuts]] = []
        self._leaves: dict[Cuts, tuple[Leaves, Any]] = {}
        self._fixed = dict[Cuts, ColumnGeneration]()
        self._settled = dict[Cuts, float]()
        self._listed, self._floor = 0.0, INF
        self.bound, self.stuck = case.bound, False

    @cached_property
    def _frame(self) -> Frame:
        frame = self._case.framed()
        frame.look_ahead(self._case.stages)
        return frame

    def step(self, best: float, ends: float) -> None:
        """Raise the bound. Plans of ``best`` ms or more do not count.

        Raises:
            OutOfTimeError: time is up.
        """
        if not self._queue or self._queue[0][0] >= min(best, self._listed):
            self._list(best)
            return
        for _ in range(_AT_ONCE):
            if not self._queue or self._queue[0][0] >= min(best, self._listed) or clock.now() > ends:
                break
            low, cuts = self._queue[0]
            found, value = self._closer(low, cuts, best, ends)
            best = min(best, value)
            heapq.heappop(self._queue)
            if found < best:
                heapq.heappush(self._queue, (found, cuts))
            else:
                self._settled[cuts] = found
                self._fixed.pop(cuts, None)
        self._note(best)

    def _note(self, best: float) -> None:
        low = min(self._queue[0][0] if self._queue else INF, self._listed, self._floor)
        self.bound = max(self.bound, INF if low >= min(best, _FOREVER) else low)

    def _closer(self, low: float, cuts: Cuts, best: float, ends: float) -> tuple[float, float]:
        """Advance one combination of cuts and widths; returns a bound on it, and a new incumbent's time or infinity, in
        ms."""
        leaf, rows = self._leaves[cuts]
        if cuts not in self._fixed:
            self._fixed[cuts] = ColumnGeneration(self._case, cuts, low, self._seen(leaf, rows[:_SEEN]))
        fixed = self._fixed[cuts]
        low = max(low, fixed.bound)
        if low >= min(best, self._listed):
            return low, INF
        if fixed.done:
            return self._in_full(fixed, best, ends)
        before, value = fixed.value, INF
        fixed.step(best, ends)
        while fixed.value < min(before, _NEAR * best):
            if fixed.value < best:
                found, taken = self._case.tell(tuple(a for _, a, _ in cuts), widths_of(cuts), fixed.choices)
                best, value = (found, found) if taken else (best, value)
            before = fixed.value
            if not fixed.done:
                fixed.step(best, ends)
        return max(low, fixed.bound), value

    def _in_full(self, fixed: ColumnGeneration, best: float, ends: float) -> tuple[float, float]:
        """Enumerate the choices of these stages that may be in a better plan; returns the same as :meth:`_closer`."""
        limit, keys, value = min(best, self._limit), keys_of(fixed.cuts), INF
        try:
            points = [self._explored(key, limit, ends) for key in keys]
        except TooManyError:
            self._floor = min(self._floor, fixed.bound)
            return INF, value
        options = {(key[1], key[2]): self._known(key, x) for key, x in zip(keys, points, strict=True) if x is not None}
        leaves, bound = plans(self._frame, options, [len(keys)], self._case.schedule, limit)
        for leaf in leaves:
            k = int(leaf.values.argmin())
            bound = min(bound, float(leaf.values[k]))
            if leaf.values[k] < best:
                picked = zip(points, leaf.options[k].tolist(), strict=True)
                choices = tuple(x.choice(way) for x, way in picked if x is not None)
                found, taken = self._case.tell(tuple(a for _, a, _ in fixed.cuts), widths_of(fixed.cuts), choices)
                value = found if taken else value
        if value == INF and bound <= fixed.bound:  # the best one does not fit; others may
            self._floor = min(self._floor, fixed.bound)
            return INF, value
        fixed.bound = max(fixed.bound, bound)
        return fixed.bound, value

    def _explored(self, key: Key, limit: float, ends: float) -> Points | None:
        """The efficient choices of a stage in plans below ``limit`` ms; None where there are none."""
        (w, r, a, b), case = key, self._case
        if not self._frame.through(w, r)[a, b] < limit:
            return None
        room = Room(*self._frame.room(w, r, limit)[:, a, b].tolist())
        return case.shop.explored(case.shop.place(w, case.m, case.in_flight[r]), a, b, room, ends)

    def _known(self, key: Key, x: Points) -> Options:
        """A stage's points as options."""
        size, first = np.ones_like(x.entry), self._case.keys.of[key[0]].start
        sums = sums_of(x.times, self._case.m)
        return Options(size * key[0], size * key[3], x.entry + first, x.exit + first, x.times, sums)

    def _list(self, best: float) -> None:
        """List all cuts and widths of plans below a limit that is higher than the last one."""
        share, frame, case = self._share, self._frame, self._case
        limit = self._limit = min(best, self.bound * (1 + share) if share < _ALL else INF)
        low = frame.value(case.stages)
        if low >= limit:
            self._queue, self._listed = [], limit
        else:
            self.bound = max(self.bound, low)
            options = self._options = bounded(frame, limit)
            leaves, told = plans(frame, options, case.stages, case.schedule, limit, FEW)
            if told < limit and told <= self.bound * (1 + _SHARE):  # too few to go on
                leaves, told = plans(frame, options, case.stages, case.schedule, limit)
            self._open(leaves, min(told, limit))
        self._share = share * self._effort.wider
        if not self._queue:
            self.stuck = self._floor < best if self._listed >= min(best, _FOREVER) else self._listed <= self.bound
        self._note(best)

    def _open(self, leaves: Sequence[Leaves], limit: float) -> None:
        """Queue the cuts and widths below ``limit`` among the leaves."""
        self._queue, self._leaves, self._listed = [], {}, limit
        for low, leaf, rows in alike(leaves, self._options):
            cuts = tuple((w, a, b) for (w, _, a, b), _, _ in ways(leaf, int(rows[0]), self._options))
            bound = self._fixed[cuts].bound if cuts in self._fixed else self._settled.get(cuts, 0.0)
            if max(low, bound) < limit:
                self._queue.append((max(low, bound), cuts))
                self._leaves[cuts] = leaf, rows
        heapq.heapify(self._queue)

    def _seen(self, leaf: Leaves, rows: Any) -> list[Any]:
        """Bounds on the times of plans, in the order of :func:`asa.planner.pipeline.column_generation.longest`."""
        found, links = [], self._case.links
        assert links is not None
        for i in rows.tolist():
            column, offset, before = list[float](), 0, 0
            moves = list[float]()
            for s, ((w, _, start, _), x, k) in enumerate(ways(leaf, i, self._options)):
                forward, (steady, whole, _) = float(x.times[0, k]), x.least[:, k].tolist()
                column += [forward, max(0.0, steady - forward), 0.0, max(0.0, whole - self._case.m * steady)]
                if s:
                    where = (links.hops[offset], start, before, int(x.entry[k]))
                    moves += [float(links.ahead[where]), float(links.back[where])]
                offset += w
                before = int(x.exit[k])
            found.append(np.array(column + moves))
        return found


def bounded(frame: Frame, limit: float) -> dict[tuple[int, int], Options]:
    """Lower bounds on stages in plans below ``limit`` ms, by position from the last (1) and start."""
    parts: dict[tuple[int, int], list[Any]] = {}
    for (w, r), x in frame.parts.items():
        near, first = frame.through(w, r)[x.start, x.stop] < limit, frame.keys.of[w].start
        for i in np.flatnonzero(near).tolist():
            entry, leaving = np.nonzero(np.isfinite(x.steady[i]))
            ways = np.stack([x.forward[i][entry, leaving], x.backward[i][entry, leaving]])
            sums = np.stack([v[i][entry, leaving] for v in (x.steady, x.whole, x.single)])
            size = np.ones_like(entry)
            parts.setdefault((r, int(x.start[i])), []).append(
                (size * w, size * int(x.stop[i]), entry + first, leaving + first, np.concatenate([ways, 0 * ways]),
                 np.maximum(0.0, sums))
            )  # fmt: skip
    return {
        where: Options(*(np.concatenate(x, axis=-1) for x in zip(*some, strict=True))) for where, some in parts.items()
    }


def alike(leaves: Sequence[Leaves], options: dict[tuple[int, int], Options]) -> list[tuple[float, Leaves, Any]]:
    """Leaves grouped by cuts and widths: a group's lowest value in ms, its leaves, and its rows in order of values."""
    found = []
    for x in leaves:
        widths = np.zeros_like(x.starts)
        p = x.starts.shape[1]
        for s in range(p):
            for a in np.unique(x.starts[:, s]).tolist():
                mine = x.starts[:, s] == a
                widths[mine, s] = options[p - s, a].width[x.options[mine, s]]
        _, of = np.unique(np.concatenate([x.starts, widths], axis=1), axis=0, return_inverse=True)
        of = of.reshape(-1)
        order = np.lexsort((x.values, of))
        for rows in np.split(order, np.flatnonzero(np.diff(of[order])) + 1):
            found.append((float(x.values[rows[0]]), x, rows))
    return found


def ways(leaf: Leaves, i: int, options: dict[tuple[int, int], Options]) -> list[tuple[Key, Options, int]]:
    """The stages of row ``i`` of a leaf, each with its options and the index of the one it takes."""
    p, found = leaf.starts.shape[1], []
    for s, (start, k) in enumerate(zip(leaf.starts[i].tolist(), leaf.options[i].tolist(), strict=True)):
        x = options[p - s, start]
        found.append(((int(x.width[k]), p - s, start, int(x.stop[k])), x, k))
    return found


def keys_of(cuts: Cuts) -> list[Key]:
    """The stages of these cuts."""
    return [(w, len(cuts) - s, a, b) for s, (w, a, b) in enumerate(cuts)]


def widths_of(cuts: Cuts) -> tuple[int, ...]:
    """The widths of the stages of these cuts."""
    return tuple(w for w, _, _ in cuts)
