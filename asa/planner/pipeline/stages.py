"""All ways to run a stage that could matter: labels over its components from front to back, for all stops at once.

A label is a partial choice, reduced to what the rest can see: forward and backward of a microbatch, the clocks of
gradient synchronisation (:mod:`asa.planner.stage.pricing_problem`; here without work per microbatch), the memory held
and its peak. A label is dropped if another with the same entry degree and layout is at least as good in everything, or
if its best completion exceeds what a stage may take there. Where there are too many labels
(:mod:`asa.planner.pipeline.thinning`), the result is still a bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from asa.planner import clock
from asa.planner.budget import ROUNDING, USUAL
from asa.planner.pipeline.tables import OWN_LAST, Objective, priced_memory, rows_of, weights_of
from asa.planner.pipeline.thinning import BKT, BWD, FWD, HELD, LAST, MOVING, PEAK, SUM, C, P, Points, Room, Thinning, V
from asa.planner.stage import lattice as at
from asa.planner.stage.lattice import INF, Numbers, PricedChain
from asa.planner.stage.pareto import OutOfTimeError, efficient
from asa.planner.stage.pricing_problem import Labels, clocks
from asa.planner.stage.stage_slice import StageSlice

_CLOSE = 1 + 1e-12
UTMOST = 12_000
"""Most labels kept per component; beyond as many as asked for they are rounded, and similar ones merged."""


class Completions:
    """Least cost behind a component, under several objectives."""

    def __init__(self, numbers: Numbers, in_flight: int, tight: bool) -> None:
        n, m = numbers.n, numbers.m
        self.m = m
        single: list[Objective] = [(1.0, 0.0, 1.0, 0.0, 1.0, h, OWN_LAST) for h in (1.0, 0.5, 0.0)] if m > 1 else []
        rows = rows_of(n, m) + (priced_memory(numbers, in_flight) if tight else []) + single
        self.rows = np.array(rows)
        self.single = np.arange(len(rows)) >= len(rows) - len(single)
        weights = weights_of(rows, n)
        hidden, each = weights.hidden.T, np.broadcast_to(self.rows, (n, *self.rows.shape))
        parts = (each[..., 0], each[..., 2] * hidden, each[..., 2] * (1 - hidden), each[..., 3])
        self.weights = np.stack(parts, axis=1)
        """Component x figure of a label in :meth:`values` x objective."""
        priced = PricedChain(numbers, weights)
        self.behind = priced.completions()
        self.over = priced.edges + np.minimum(priced.inner, priced.last)[1:, :, None, :]
        """Cost of an edge and of the component behind it: component in front x objective x layout x layout behind."""
        self.capacity = numbers.capacity if tight else 0.0

    def limits(self, room: Room) -> Any:
        """The largest value of each objective for a stage within ``room``."""
        whole = min(room.whole, room.single) if self.m == 1 else room.whole  # with one microbatch both are the same
        once = np.where(self.single, room.single, whole)
        base = np.where(self.rows[:, 2] > 0, once, np.where(self.rows[:, 0] > 0, room.steady, 0.0))
        return base * (1 + ROUNDING) + self.rows[:, 3] * self.capacity * _CLOSE + 1e-9

    def values(self, labels: Any, i: int) -> Any:
        """Objectives of the labels behind component i, without what follows: label x objective."""
        once = np.maximum(labels[:, V], labels[:, C])
        figures = np.stack([labels[:, FWD] + labels[:, BWD], once, labels[:, P], labels[:, HELD]], axis=1)
        return figures @ self.weights[i]


class Explorer:
    """Enumerates the stages of one chain with one number of microbatches in flight."""

    def __init__(self, numbers: Numbers, in_flight: int) -> None:
        self.numbers, self.in_flight = numbers, in_flight
        self.tight = not numbers.all_fit(in_flight)
        self.bounds = Completions(numbers, in_flight, self.tight)
        x = numbers
        self.thin = Thinning(x, tight=self.tight)
        self.by_layout: list[list[tuple[int, Any, Any]]] = []
        by_kind: dict[int, list[tuple[int, Any, Any]]] = {}
        for i in range(x.n):
            key = x.kinds[i]
            if key not in by_kind:
                by_kind[key] = self._undominated(i)
            self.by_layout.append(by_kind[key])

    def _undominated(self, i: int) -> list[tuple[int, Any, Any]]:
        """For each layout of component i, the configurations that no other one equals or beats in all that they add to
        a label (:meth:`asa.planner.pipeline.thinning.Thinning.best`)."""
        x, row = self.numbers, self.numbers.rows[i]
        both, sync = row[:, at.F] + row[:, at.B], row[:, at.PROMPT] + row[:, at.LATE]
        late, prompt, window = x.sc * sync, x.sc * row[:, at.PROMPT], x.sp * row[:, at.WINDOW]
        hidden = (0.0, late, prompt, window)
        criteria = [row[:, at.F]] + ([row[:, at.B]] if x.m > 1 else [])
        criteria += [both + row[:, at.ONCE] + sync - x.saving * h for h in hidden]
        criteria += [both + row[:, at.BUCKET] + (1 - 1 / x.sp) * h for h in (hidden if self.thin.slowed else (0.0,))]
        if self.tight:
            memory = row[:, at.STATE] + self.in_flight * row[:, at.ACT]
            criteria += [memory, memory - row[:, at.ACT] + row[:, at.GRAD], memory + row[:, at.GRAD] + row[:, at.TRANS]]
        keep = np.sort(efficient(np.stack(criteria, axis=1), x.layout[i]))
        return [
            (int(layout), keep[x.layout[i][keep] == layout], row[keep[x.layout[i][keep] == layout]])
            for layout in np.unique(x.layout[i][keep])
        ]

    def slice(self, start: int, stop: int) -> StageSlice:
        """Components ``start`` to ``stop - 1`` as one stage."""
        x, (layout, config, row) = self.numbers, (list[Any](), list[Any](), list[Any]())
        for configs in self.by_layout[start:stop]:
            layout.append(np.concatenate([np.full(len(c), k) for k, c, _ in configs]))
            config.append(np.concatenate([c for _, c, _ in configs]))
            row.append(np.concatenate([r for _, _, r in configs]))
        for k, end in ((0, x.inlets[start]), (-1, x.outlets[stop - 1])):
            joined = end[:, layout[k]]
            mask = np.isfinite(joined[at.EF])
            layout[k], config[k], joined = layout[k][mask], config[k][mask], joined[:, mask]
            row[k] = row[k][mask]
            for into, added in ((at.F, at.EF), (at.B, at.EB), (at.ONCE, at.EONCE), (at.STATE, at.ESTATE),
                            (at.ACT, at.EACT), (at.TRANS, at.ETRANS)):  # fmt: skip
                row[k][:, into] += joined[added]
        release = [max(r, start) - start for r in x.release[start:stop]]
        edges, more = x.edges[start : stop - 1], self.in_flight - 1
        return StageSlice(x, layout, config, row, edges, release, more=more, tight=self.tight)

    def explore(
        self, start: int, caps: Mapping[int, Room], most: int = USUAL.effort.labels, *, ends: float = INF
    ) -> dict[int, Points]:
        """Points of the stages from ``start`` to each stop in ``caps``, up to the ms stated there.

        ``most`` labels are kept per component; others are merged with them.

        Raises:
            OutOfTimeError: the clock has passed ``ends``.
        """
        self.thin.leading, self.thin.ends = start == 0, ends
        stops = sorted(caps)
        grain = self.thin.grain(start, caps)
        limits = np.stack([self.bounds.limits(caps[b]) for b in stops], axis=1)
        exact = True
        history: list[tuple[Any, Any]] = []
        points_by_stop: dict[int, Points] = {}
        front: Labels | None = None
        for i in range(start, stops[-1]):
            if clock.now() > ends:
                raise OutOfTimeError
            self.thin.last, self.thin.rounded = min(b for b in stops if b > i) == self.numbers.n, not exact
            later = [k for k, b in enumerate(stops) if b > i]
            # Per objective and layout, what a label may have come to.
            room = limits[:, later, None] - self.bounds.behind[i][:, [stops[k] for k in later], :]
            room = np.where(np.isnan(room), -INF, room).max(axis=1)
            front = self._begin(i) if front is None else self._cross_edge(front, i, room)
            if front is not None:
                front = self._run_component(front, i, start, room)
            if front is None or not len(front.columns):
                break
            front, merged = self.thin.thinned(front, i + 1 in caps, most, grain)
            exact = exact and not merged
            history.append((front.parent, front.config))
            if i + 1 in caps:
                points = self._points_at(front, i, caps[i + 1], exact, history)
                if points is not None:
                    points_by_stop[i + 1] = points
        return points_by_stop

    def _begin(self, i: int) -> Labels | None:
        """Labels in each layout in which component i can begin a stage, before its configuration."""
        x, more = self.numbers, self.in_flight - 1
        inlet = x.inlets[i]
        layouts = np.flatnonzero(np.isfinite(inlet[at.EF]))
        inlet = inlet[:, layouts]
        labels = np.zeros((len(layouts), 12))
        labels[:, FWD], labels[:, BWD] = inlet[at.EF], inlet[at.EB]
        labels[:, V] = labels[:, C] = -INF
        labels[:, P] = labels[:, SUM] = inlet[at.EONCE]
        memory = inlet[at.ESTATE] + more * inlet[at.EACT]
        labels[:, PEAK] = 0.0
        labels[:, HELD] = memory + inlet[at.EACT]
        labels[:, MOVING] = labels[:, HELD] + inlet[at.ETRANS]
        none = np.zeros(len(layouts), dtype=np.int64)
        return Labels(labels, x.degree[layouts], layouts, none, none)

    def _cross_edge(self, front: Labels, i: int, room: Any) -> Labels | None:
        """Labels that arrive in each layout of component i, before its configuration."""
        x, more = self.numbers, self.in_flight - 1
        edges = x.edges[i - 1][:, front.layout, :]
        possible = np.isfinite(edges[at.EF])
        base = self.bounds.values(front.columns, i - 1).T[:, :, None]
        possible &= (base + self.bounds.over[i - 1][:, front.layout] <= room[:, None, :]).all(axis=0)
        source, layout = np.nonzero(possible)
        if not len(source):
            return None
        e = edges[:, source, layout]
        labels = front.columns[source]
        labels = np.concatenate([labels[:, :10], np.zeros((len(source), 2))], axis=1)
        labels[:, FWD] += e[at.EF]
        labels[:, BWD] += e[at.EB]
        for column in (V, C, P, SUM):
            labels[:, column] += e[at.EONCE]
        memory = e[at.ESTATE] + more * e[at.EACT]
        labels[:, PEAK] = np.maximum(labels[:, PEAK], labels[:, LAST]) + memory
        labels[:, HELD] += memory + e[at.EACT]
        labels[:, MOVING] = labels[:, HELD] + e[at.ETRANS]
        arrived = Labels(labels, front.entry[source], layout, source, np.zeros(len(source), dtype=np.int64))
        if len(source) > 40:
            keep = self.thin.best(labels, arrived.entry * x.count + layout, arriving=True)
            arrived = arrived.select(keep)
        return arrived

    def _run_component(self, front: Labels, i: int, start: int, room: Any) -> Labels | None:
        """Labels with every configuration of component i."""
        x, more = self.numbers, self.in_flight - 1
        picked, config, rows = [], [], []
        for layout, numbers, row in self.by_layout[i]:
            labels_here = np.flatnonzero(front.layout == layout)
            if len(labels_here):
                picked.append(np.repeat(labels_here, len(numbers)))
                config.append(np.tile(numbers, len(labels_here)))
                rows.append(np.tile(row, (len(labels_here), 1)))
        if not picked:
            return None
        index, chosen, row = np.concatenate(picked), np.concatenate(config), np.concatenate(rows)
        if self.tight:
            at_start = row[:, at.STATE] + more * row[:, at.ACT] + row[:, at.GRAD]
            last = front.columns[index, MOVING] + row[:, at.ACT] + row[:, at.TRANS]
            fitting = at_start + np.maximum(front.columns[index, PEAK], last) <= x.capacity * _CLOSE
            index, chosen, row = index[fitting], chosen[fitting], row[fitting]
        labels = front.columns[index]
        moving = labels[:, MOVING]
        labels = labels[:, :10].copy()
        labels[:, FWD] += row[:, at.F]
        labels[:, BWD] += row[:, at.B]
        labels[:, BKT] += row[:, at.BUCKET]
        sync = row[:, at.PROMPT] + row[:, at.LATE]
        paid = row[:, at.ONCE] + sync
        prompt = x.saving * x.sc * row[:, at.PROMPT]
        bucket, window = paid - prompt, x.saving * x.sp * row[:, at.WINDOW]
        sides = (paid - window, paid, bucket, bucket - x.saving * x.sc * row[:, at.LATE])
        across = i + 1 < x.n and max(x.release[i + 1], start) < i
        labels[:, V : P + 1] = np.stack(clocks(labels[:, V : P + 1].T, sides, across=across), axis=1)
        labels[:, SUM] += paid
        state = row[:, at.STATE] + more * row[:, at.ACT]
        grown = state + row[:, at.ACT]
        labels[:, PEAK] += state + row[:, at.GRAD]
        labels[:, LAST] = moving + grown + row[:, at.GRAD] + row[:, at.TRANS]
        labels[:, HELD] += grown
        layout = front.layout[index]
        good = (self.bounds.values(labels, i) <= room[:, layout].T).all(axis=1)
        return Labels(labels[good], front.entry[index][good], layout[good], front.parent[index][good], chosen[good])

    def _points_at(
        self, front: Labels, i: int, caps: Room, exact: bool, history: list[tuple[Any, Any]]
    ) -> Points | None:
        """The points of the stage that stops behind component i; None where there are none."""
        x, more = self.numbers, self.in_flight - 1
        e = x.outlets[i][:, front.layout]
        labels = front.columns
        forward, backward = labels[:, FWD] + e[at.EF], labels[:, BWD] + e[at.EB]
        once = np.maximum(labels[:, V], labels[:, C]) + e[at.EONCE]
        memory = e[at.ESTATE] + more * e[at.EACT]
        peak = np.maximum(labels[:, PEAK], labels[:, LAST] + e[at.EACT] + e[at.ETRANS]) + memory
        good = np.isfinite(forward) & (forward + backward <= caps.steady * (1 + ROUNDING))
        good &= x.m * (forward + backward) + once <= caps.whole * (1 + ROUNDING)
        good &= forward + backward + once <= caps.single * (1 + ROUNDING)
        if self.tight:
            good &= peak <= x.capacity * _CLOSE
        if not good.any():
            return None
        longer = labels[:, BKT]
        if exact and self.thin.slowed:
            both = (labels[:, SUM] + e[at.EONCE] - once) / x.saving
            longer = longer + np.maximum(0.0, both) * (1 - 1 / x.sp)
        least = np.stack([forward, backward, longer, once])
        index = np.flatnonzero(good)
        leaving = x.degree[front.layout]
        criteria = self.thin.along_paths(*least)[index]
        keep = index[efficient(criteria, front.entry[index] * x.degrees + leaving[index])]
        return Points(
            least=least[:, keep],
            entry=front.entry[keep],
            exit=leaving[keep],
            exact=exact,
            origin=keep,
            stop=i + 1,
            history=list(history),
        )
