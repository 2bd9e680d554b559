"""Best-first search over the cuts and widths of a case's plans.

Stages, as far as they are known, are put together to all plans below a limit (:mod:`asa.planner.pipeline.skeletons`),
which rises step by step. These have only a few different cuts and widths. Each is examined by itself: by prices of
memory at weights of the clock, then by labels (:mod:`asa.planner.pipeline.column_generation`), and where weights give
no better bound, by all ways to run its stages. One step at a time, always where the bound is lowest: plans come up
early, and what cannot be better than these is not examined further.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from asa.planner import clock
from asa.planner.pipeline.case import Case
from asa.planner.pipeline.column_generation import ColumnGeneration, Cuts
from asa.planner.pipeline.explored import Explored, Key, Tables
from asa.planner.pipeline.skeletons import FEW, Leaves, Options, plans
from asa.planner.stage.lattice import INF
from asa.planner.stage.pareto import OutOfTimeError

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


class OpenList(Case):
    """A case with its cuts and widths. Its tables at the end of the first bounds are bounds on stages that are not
    explored."""

    def __init__(self, *case: Any, **options: Any) -> None:
        super().__init__(*case, **options)
        self._base: Tables = {}
        self._effort = self.cache.effort
        self._explored = Explored(self.cache, self.m, self.in_flight)
        self._share, self._fully_listed = _SHARE, False
        self._queue: list[tuple[float, Cuts]] = []
        self._leaves: dict[Cuts, tuple[Leaves, Any, bool]] = {}
        self._columns_of = dict[Cuts, ColumnGeneration]()
        self._final_bounds = dict[Cuts, float]()
        self._listed, self._floor = 0.0, INF

    def _by_plans(self, best: float, ends: float) -> None:
        """Raise the bound by single combinations of cuts and widths. Plans of ``best`` ms or more do not count.

        Raises:
            OutOfTimeError: time is up.
        """
        self._base = self._base or dict(self.tables)
        if not self._queue or self._queue[0][0] >= min(best, self._listed):
            self._list(best, ends)
            return
        for _ in range(_AT_ONCE):
            if not self._queue or self._queue[0][0] >= min(best, self._listed) or clock.now() > ends:
                break
            low, cuts = self._queue[0]
            bound, value = self._examine(low, cuts, best, ends)
            best = min(best, value)
            heapq.heappop(self._queue)
            if bound < best:
                heapq.heappush(self._queue, (bound, cuts))
            else:
                self._final_bounds[cuts] = bound
                self._columns_of.pop(cuts, None)
        self._note(best)

    @property
    def ended(self) -> bool:
        """Whether the bound rises no further, because the fastest plan does not fit."""
        return self.stuck or self._floor <= self.bound

    def _note(self, best: float) -> None:
        low = min(self._queue[0][0] if self._queue else INF, self._listed, self._floor)
        self._bound = max(self.bound, INF if low >= min(best, _FOREVER) else low)

    def _examine(self, low: float, cuts: Cuts, best: float, ends: float) -> tuple[float, float]:
        """Examine one set of cuts and widths a step further; returns a bound on it, and the ms of a plan where a better
        one came up."""
        leaf, rows, exact = self._leaves[cuts]
        if exact:
            value, accepted = self._propose_leaf(leaf, int(rows[0]), self._options)
            if not accepted and value < best:  # it does not fit, but others of these cuts may
                self._floor = min(self._floor, low)
            return INF, value if accepted else INF
        if cuts not in self._columns_of:
            self._columns_of[cuts] = ColumnGeneration(self, cuts, low, self._known_times(leaf, rows[:_SEEN]))
        columns = self._columns_of[cuts]
        low = max(low, columns.bound)
        if low >= min(best, self._listed):
            return low, INF
        if columns.done:
            return self._explore_fully(columns, best, ends)
        before, value = columns.value, INF
        columns.step(best, ends)
        while columns.value < min(before, _NEAR * best):
            if columns.value < best:
                starts, widths = tuple(a for _, a, _ in cuts), tuple(w for w, _, _ in cuts)
                plan_ms, accepted = self.propose(starts, widths, columns.choices)
                best, value = (plan_ms, plan_ms) if accepted else (best, value)
            before = columns.value
            if not columns.done:
                columns.step(best, ends)
        return max(low, columns.bound), value

    def _explore_fully(self, columns: ColumnGeneration, best: float, ends: float) -> tuple[float, float]:
        """Explore all ways to run the stages of these cuts and widths that may be part of a better plan; returns as
        :meth:`_examine`."""
        limit, frame, schedule = min(best, self._limit), self._bounds, self.schedule
        keys = keys_of(columns.cuts)
        new = {key for key in keys if not self._explored.known(key, limit)}
        if not new:
            new = {key for key in keys if not self._explored.exact(key, limit) and self._explored.refine(key)}
        if new:
            self._explored.explore(frame, limit, ends, new)
            if not all(self._explored.known(key, limit) for key in keys if key in new):
                raise OutOfTimeError
        options = self._explored.options(frame, limit, set(keys))
        leaves, bound = plans(frame, options, [len(keys)], schedule, limit)
        value = INF
        for leaf in leaves:
            k = int(leaf.values.argmin())
            bound = min(bound, float(leaf.values[k]))
            if leaf.values[k] < best:
                plan_ms, accepted = self._propose_leaf(leaf, k, options)
                value = plan_ms if accepted else value
        if not new and bound <= columns.bound:
            self._floor = min(self._floor, columns.bound)
            return INF, value
        columns.bound = max(columns.bound, bound)
        return columns.bound, value

    def _list(self, best: float, ends: float) -> None:
        """List all cuts and widths of plans below a limit that is a little higher than the last time. Where there are
        many, the first few of them say how high that limit must be, and stages are explored in full."""
        cap = _FOREVER
        while True:
            share = self._next(best)
            limit = self._limit = min(best, cap, self.bound * (1 + share) if share < _ALL else INF)
            self.tables = self._explored.tightened(self._base, limit)
            frame = self._bounds = self.framed()
            bound = frame.value(self.stages)
            if bound >= limit:
                self._queue, self._listed = [], limit
                break
            self._bound = max(self.bound, bound)
            frame.look_ahead(self.stages)
            options = self._options = self._explored.options(frame, limit)
            leaves, proved = plans(frame, options, self.stages, self.schedule, limit, FEW)
            self._queue_cuts(leaves, min(proved, limit))
            keys = [key for _, cuts in self._queue for key in keys_of(cuts)]
            vague, slots = {key for key in keys if not self._explored.known(key, limit)}, len(keys)
            few = len(vague) * self._effort.shared >= slots and len(self._queue) <= self._effort.listed
            if few and (proved >= limit or proved > self.bound * (1 + _SHARE)):
                break
            if self._tight and self.bound * (1 + _SHARE) < proved < limit:
                cap = proved
                continue
            if (proved >= limit and not vague) or not self._explored.explore(
                frame, limit, ends, vague if proved >= limit else None
            ):
                if proved < limit:
                    leaves, proved = plans(frame, options, self.stages, self.schedule, limit)
                    self._queue_cuts(leaves, min(proved, limit))
                    self._fully_listed = True
                break
            if clock.now() > ends:
                return
        self._share = share * self._effort.wider
        if not self._queue:
            self.stuck = self._floor < best if self._listed >= min(best, _FOREVER) else self._listed <= self.bound
        self._note(best)

    def _next(self, best: float) -> float:
        """The share of the bound by which the limit lies above it; far from the best plan it grows faster."""
        if self.bound <= 0 or best >= _FOREVER or self._fully_listed:
            return self._share
        distance = best / self.bound - 1
        leap = self._effort.leap_tight if self._tight else self._effort.leap
        return max(self._share, distance if distance <= leap else distance * self._effort.stride)

    def _queue_cuts(self, leaves: Sequence[Leaves], limit: float) -> None:
        """Queue the cuts and widths below ``limit`` among the leaves."""
        self._queue, self._leaves, self._listed = [], {}, limit
        for low, leaf, rows in alike(leaves, self._options):
            cuts = tuple((w, a, b) for (w, _, a, b), _, _ in ways(leaf, int(rows[0]), self._options))
            bound = self._columns_of[cuts].bound if cuts in self._columns_of else self._final_bounds.get(cuts, 0.0)
            if max(low, bound) < limit:
                self._queue.append((max(low, bound), cuts))
                self._leaves[cuts] = leaf, rows, self._exact(leaf, int(rows[0]))
        heapq.heapify(self._queue)

    def _exact(self, leaf: Leaves, i: int) -> bool:
        """Whether a leaf is made of true ways to run its stages."""
        stages = ways(leaf, i, self._options)
        return all(x.point[k] >= 0 and self._explored.exact(key, self._limit) for key, x, k in stages)

    def _known_times(self, leaf: Leaves, rows: Any) -> list[Any]:
        """Known times of plans, as :func:`asa.planner.pipeline.column_generation.longest` takes them."""
        times, links = [], self.links
        assert links is not None
        for i in rows.tolist():
            column, offset, before = list[float](), 0, 0
            moves = list[float]()
            for s, ((w, _, start, _), x, k) in enumerate(ways(leaf, i, self._options)):
                forward, _, longer, once = x.times[:, k].tolist()
                steady, whole, _ = x.least[:, k].tolist()
                if x.point[k] < 0:
                    once = max(0.0, whole - self.m * steady)
                column += [forward, max(0.0, steady - forward), max(0.0, longer), max(0.0, once - max(0.0, longer))]
                if s:
                    where = (links.hops[offset], start, before, int(x.entry[k]))
                    moves += [float(links.ahead[where]), float(links.back[where])]
                offset += w
                before = int(x.exit[k])
            times.append(np.array(column + moves))
        return times

    def _propose_leaf(self, leaf: Leaves, i: int, options: dict[tuple[int, int], Options]) -> tuple[float, bool]:
        """The ms of the plan that a leaf stands for, and whether it was taken."""
        stages = ways(leaf, i, options)
        choices = tuple(self._explored.points(key).choice(int(x.point[k])) for key, x, k in stages)
        return self.propose(tuple(key[2] for key, _, _ in stages), tuple(key[0] for key, _, _ in stages), choices)


def alike(leaves: Sequence[Leaves], options: dict[tuple[int, int], Options]) -> list[tuple[float, Leaves, Any]]:
    """Leaves grouped by cuts and widths: a group's lowest value in ms, its leaves, and its rows in order of values."""
    groups = []
    for x in leaves:
        widths = np.zeros_like(x.starts)
        p = x.starts.shape[1]
        for s in range(p):
            for a in np.unique(x.starts[:, s]).tolist():
                rows_here = x.starts[:, s] == a
                widths[rows_here, s] = options[p - s, a].width[x.options[rows_here, s]]
        _, of = np.unique(np.concatenate([x.starts, widths], axis=1), axis=0, return_inverse=True)
        of = of.reshape(-1)
        order = np.lexsort((x.values, of))
        for rows in np.split(order, np.flatnonzero(np.diff(of[order])) + 1):
            groups.append((float(x.values[rows[0]]), x, rows))
    return groups


def ways(leaf: Leaves, i: int, options: dict[tuple[int, int], Options]) -> list[tuple[Key, Options, int]]:
    """The stages of row ``i`` of a leaf, each with its options and the index of the one it takes."""
    p, stages = leaf.starts.shape[1], []
    for s, (start, k) in enumerate(zip(leaf.starts[i].tolist(), leaf.options[i].tolist(), strict=True)):
        x = options[p - s, start]
        stages.append(((int(x.width[k]), p - s, start, int(x.stop[k])), x, k))
    return stages


def keys_of(cuts: Cuts) -> list[Key]:
    """The stages of these cuts."""
    return [(w, len(cuts) - s, a, b) for s, (w, a, b) in enumerate(cuts)]
