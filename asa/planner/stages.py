"""Every way of running a stage that could matter: labels front to back over its components, for all stops at once.

A label is a partial choice, reduced to what the rest can see: forward and backward of a microbatch, the clocks of
gradient synchronisation (:mod:`asa.planner.dp` derives them; here without the work that is done per microbatch), the
memory held and its peak. One that is no better in anything than another with the same entry degree and layout is
dropped, and so is one whose best completion is beyond what a stage may take there. Where labels get too many, their
numbers are rounded down a little, so that more of them beat each other; where that is not enough, similar ones are
merged, the least of each number standing for all of them. What comes out is still a bound.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asa.planner import lattice as at
from asa.planner.lattice import INF, Numbers, Priced, Table, priced_memory, rows_of, unit, weights_of
from asa.planner.pareto import efficient
from asa.planner.problem import Choice

_CLOSE = 1 + 1e-12
MOST, UTMOST = 200, 12_000
"""Labels kept per component, beyond which they are rounded, and similar ones merged."""
_ROUNDED, _ROUNDED_MEMORY = 5e-4, 2e-4
"""By what part of a stage's time, and of the memory, all its components together are rounded down at most."""

# Columns of a label.
FWD, BWD, BKT, V, C, P, PEAK, LAST, HELD, SUM = range(10)


@dataclass(frozen=True, kw_only=True)
class Points:
    """Ways to run one stage, none better in everything: one entry of each array per way, ms.

    ``least`` holds forward, backward, what lengthens the last backward, and all that comes once per step (that length
    included), never more than in truth; ``exact`` says whether they are the truth. ``entry`` and ``exit`` are data
    degrees by number. ``picks`` leads back to the choices.
    """

    least: Any
    entry: Any
    exit: Any
    exact: bool
    extra: Any
    origin: Any
    stop: int
    history: list[tuple[Any, Any]]

    def __len__(self) -> int:
        return len(self.entry)

    def within(self, m: int, steady: float, whole: float) -> Points | None:
        """Those that take no longer."""
        forward, backward, _, once = self.least
        good = forward + backward <= steady * (1 + 1e-9)
        good &= m * (forward + backward) + once <= whole * (1 + 1e-9)
        if good.all():
            return self
        if not good.any():
            return None
        kept = np.flatnonzero(good)
        return replace(
            self, least=self.least[:, kept], entry=self.entry[kept], exit=self.exit[kept], extra=self.extra[kept],
            origin=self.origin[kept],
        )  # fmt: skip

    def choice(self, index: int) -> Choice:
        """The choice behind a point."""
        found: list[int] = []
        label = int(self.origin[index])
        for parents, configs in reversed(self.history):
            found.append(int(configs[label]))
            label = int(parents[label])
        return tuple(reversed(found))


class OutOfTimeError(Exception):
    """Nothing can be said in time."""


class Completions:
    """Least cost of what lies behind a component, under several objectives."""

    def __init__(self, numbers: Numbers, table: Table, in_flight: int, tight: bool) -> None:
        n, m = numbers.n, numbers.m
        rows = rows_of(n, m) + (priced_memory(n, m, unit(numbers, table)) if tight else [])
        self.rows = np.array(rows)
        weights = weights_of(rows, n)
        self.hidden = weights.hidden
        priced = Priced(numbers, weights, in_flight)
        self.behind = priced.completions()
        self.inner = np.minimum(priced.inner, priced.last)
        self.capacity = numbers.capacity if tight else 0.0

    def limits(self, steady: float, whole: float) -> Any:
        """What each objective may come to, where a stage may take that long."""
        base = np.where(self.rows[:, 2] > 0, whole, np.where(self.rows[:, 0] > 0, steady, 0.0))
        return base * (1 + 1e-9) + self.rows[:, 3] * self.capacity * _CLOSE + 1e-9

    def values(self, labels: Any, i: int) -> Any:
        """Objectives of labels behind component i so far: label x objective."""
        steady = labels[:, FWD] + labels[:, BWD]
        once = np.maximum(labels[:, V], labels[:, C])
        hidden = self.hidden[:, i]
        once = once[:, None] * hidden + labels[:, P][:, None] * (1 - hidden)
        return steady[:, None] * self.rows[:, 0] + once * self.rows[:, 2] + labels[:, HELD][:, None] * self.rows[:, 3]


class _Front:
    """Labels behind one component."""

    def __init__(self, labels: Any, entry: Any, layout: Any, parent: Any, config: Any) -> None:
        self.labels, self.entry, self.layout, self.parent, self.config = labels, entry, layout, parent, config

    def taken(self, index: Any) -> _Front:
        return _Front(
            self.labels[index], self.entry[index], self.layout[index], self.parent[index], self.config[index]
        )  # fmt: skip


class Explorer:
    """Stages of one chain with one number of microbatches in flight."""

    def __init__(self, numbers: Numbers, table: Table, in_flight: int) -> None:
        self.numbers, self.in_flight = numbers, in_flight
        self.tight = not numbers.roomy(in_flight)
        self.bounds = Completions(numbers, table, in_flight, self.tight)
        x = numbers
        self.slowed = x.saving > 0 and x.sp > 1
        self.bucket = any(r[:, at.BUCKET].any() for r in x.rows)
        self.by_layout: list[list[tuple[int, Any, Any]]] = []
        known: dict[int, list[tuple[int, Any, Any]]] = {}
        for i in range(x.n):
            key = id(x.chain.configs[i])
            if key not in known:
                known[key] = self._undominated(i)
            self.by_layout.append(known[key])
        ends = np.where(np.isfinite(x.outlets), x.outlets, 0.0)
        self.outlets_hold = bool(ends[:, at.ESTATE :].any())

    def _undominated(self, i: int) -> list[tuple[int, Any, Any]]:
        """Per layout, the configurations that no other one beats in everything."""
        x, row = self.numbers, self.numbers.rows[i]
        columns = [at.F, at.B, at.BUCKET, at.ONCE, at.PROMPT, at.LATE]
        values = [row[:, columns], -row[:, [at.WINDOW]]]
        if self.tight:
            values.append(row[:, [at.STATE, at.ACT, at.GRAD, at.TRANS]])
        if self.slowed:
            values.append(row[:, [at.WINDOW]])
        kept = np.sort(efficient(np.concatenate(values, axis=1), x.layout[i]))
        return [
            (int(layout), kept[x.layout[i][kept] == layout], row[kept[x.layout[i][kept] == layout]])
            for layout in np.unique(x.layout[i][kept])
        ]

    def explore(
        self, start: int, caps: Mapping[int, tuple[float, float]], most: int = MOST, *, hurry: bool = False,
        ends: float = INF,
    ) -> dict[int, Points]:  # fmt: skip
        """Points of the stages from ``start`` to each stop in ``caps``, up to the steady and whole ms named there.

        ``most`` labels are kept per component, others merged with them; in a ``hurry`` they are forgotten, so that
        the points are true ones, and not all.

        Raises:
            OutOfTimeError: the clock has passed ``ends``.
        """
        stops = sorted(caps)
        limits = np.stack([self.bounds.limits(*caps[b]) for b in stops], axis=1)
        grain = self._grain(start, caps)
        exact = True
        history: list[tuple[Any, Any]] = []
        found: dict[int, Points] = {}
        front: _Front | None = None
        for i in range(start, stops[-1]):
            if time.monotonic() > ends:
                raise OutOfTimeError
            later = [k for k, b in enumerate(stops) if b > i]
            # Per objective and layout, what a label may have come to.
            room = limits[:, later, None] - self.bounds.behind[i][:, [stops[k] for k in later], :]
            room = np.where(np.isnan(room), -INF, room).max(axis=1)
            front = self._begin(i) if front is None else self._over(front, i, room)
            if front is not None:
                front = self._through(front, i, start, room)
            if front is None or not len(front.labels):
                break
            front, merged = self._thinned(front, i + 1 in caps, most, None if hurry else grain)
            exact = exact and not merged
            history.append((front.parent, front.config))
            if i + 1 in caps:
                points = self._ended(front, i, caps[i + 1], exact, history)
                if points is not None:
                    found[i + 1] = points
        return found

    def _begin(self, i: int) -> _Front | None:
        """Layouts in which component i can begin a stage; the configuration comes next."""
        x, more = self.numbers, self.in_flight - 1
        inlet = x.inlets[i]
        layouts = np.flatnonzero(np.isfinite(inlet[at.EF]))
        inlet = inlet[:, layouts]
        labels = np.zeros((len(layouts), 12))
        labels[:, FWD], labels[:, BWD] = inlet[at.EF], inlet[at.EB]
        labels[:, V] = labels[:, C] = -INF
        labels[:, P] = labels[:, SUM] = inlet[at.EONCE]
        held = inlet[at.ESTATE] + more * inlet[at.EACT]
        labels[:, PEAK] = 0.0
        labels[:, HELD] = held + inlet[at.EACT]
        labels[:, 10] = labels[:, HELD] + inlet[at.ETRANS]
        none = np.zeros(len(layouts), dtype=np.int64)
        return _Front(labels, x.degree[layouts], layouts, none, none)

    def _over(self, front: _Front, i: int, room: Any) -> _Front | None:
        """What arrives in each layout of component i, before its configuration."""
        x, more = self.numbers, self.in_flight - 1
        edges = x.edges[i - 1][:, front.layout, :]
        possible = np.isfinite(edges[at.EF])
        base = self.bounds.values(front.labels, i - 1)
        costs = [
            edges[at.EF] + edges[at.EB], edges[at.EONCE], edges[at.ESTATE] + self.in_flight * edges[at.EACT],
        ]  # fmt: skip
        rows = self.bounds.rows
        for q in range(len(rows)):
            there = base[:, q][:, None] + self.bounds.inner[i][q][None, :]
            for weight, cost in zip((rows[q, 0], rows[q, 2], rows[q, 3]), costs, strict=True):
                if weight:
                    there = there + weight * cost
            possible &= there <= room[q][None, :]
        source, layout = np.nonzero(possible)
        if not len(source):
            return None
        e = edges[:, source, layout]
        labels = front.labels[source]
        labels = np.concatenate([labels[:, :10], np.zeros((len(source), 2))], axis=1)
        labels[:, FWD] += e[at.EF]
        labels[:, BWD] += e[at.EB]
        for column in (V, C, P, SUM):
            labels[:, column] += e[at.EONCE]
        held = e[at.ESTATE] + more * e[at.EACT]
        labels[:, PEAK] = np.maximum(labels[:, PEAK], labels[:, LAST]) + held
        labels[:, HELD] += held + e[at.EACT]
        labels[:, 10] = labels[:, HELD] + e[at.ETRANS]
        arrived = _Front(labels, front.entry[source], layout, source, np.zeros(len(source), dtype=np.int64))
        if len(source) > 40:
            kept = self._best(labels, arrived.entry * x.count + layout, arriving=True)
            arrived = arrived.taken(kept)
        return arrived

    def _through(self, front: _Front, i: int, start: int, room: Any) -> _Front | None:
        """With every configuration of component i."""
        x, more = self.numbers, self.in_flight - 1
        picked, config, rows = [], [], []
        for layout, numbers, row in self.by_layout[i]:
            there = np.flatnonzero(front.layout == layout)
            if len(there):
                picked.append(np.repeat(there, len(numbers)))
                config.append(np.tile(numbers, len(there)))
                rows.append(np.tile(row, (len(there), 1)))
        if not picked:
            return None
        index, chosen, row = np.concatenate(picked), np.concatenate(config), np.concatenate(rows)
        labels = front.labels[index]
        moving = labels[:, 10]
        labels = labels[:, :10].copy()
        labels[:, FWD] += row[:, at.F]
        labels[:, BWD] += row[:, at.B]
        labels[:, BKT] += row[:, at.BUCKET]
        sync = row[:, at.PROMPT] + row[:, at.LATE]
        paid = row[:, at.ONCE] + sync
        prompt = x.saving * x.sc * row[:, at.PROMPT]
        v = labels[:, V] + paid - prompt - x.saving * x.sc * row[:, at.LATE]
        c = labels[:, C] + paid - prompt
        p = labels[:, P] + paid
        if i + 1 >= x.n or max(x.release[i + 1], start) >= i:  # no bucket reaches across this component
            v, c = np.maximum(v, c), p.copy()
        else:
            c = np.maximum(c, p)
        labels[:, V], labels[:, C], labels[:, P] = v, c, p - x.saving * x.sp * row[:, at.WINDOW]
        labels[:, SUM] += paid
        state = row[:, at.STATE] + more * row[:, at.ACT]
        grown = state + row[:, at.ACT]
        labels[:, PEAK] += state + row[:, at.GRAD]
        labels[:, LAST] = moving + grown + row[:, at.GRAD] + row[:, at.TRANS]
        labels[:, HELD] += grown
        layout = front.layout[index]
        good = (self.bounds.values(labels, i) <= room[:, layout].T).all(axis=1)
        if self.tight:
            good &= np.maximum(labels[:, PEAK], labels[:, LAST]) <= x.capacity * _CLOSE
        return _Front(labels[good], front.entry[index][good], layout[good], front.parent[index][good], chosen[good])

    def _best(self, labels: Any, group: Any, *, arriving: bool, ending: bool = False) -> Any:
        columns = [labels[:, FWD], labels[:, BWD], labels[:, V], labels[:, C], labels[:, P]]
        columns = [np.where(np.isfinite(c), c, 0.0) for c in columns]
        if self.bucket:
            columns.append(labels[:, BKT])
        if self.slowed:
            columns += [np.where(np.isfinite(labels[:, k]), labels[:, SUM] - labels[:, k], 0.0) for k in (V, C, P)]
        if self.tight:
            if arriving:
                columns += [labels[:, PEAK], labels[:, HELD], labels[:, 10]]
            elif ending and self.outlets_hold:
                columns += [labels[:, PEAK], labels[:, LAST], labels[:, HELD]]
            else:
                columns += [np.maximum(labels[:, PEAK], labels[:, LAST]), labels[:, HELD]]
        return efficient(np.stack(columns, axis=1), group)

    def _grain(self, start: int, caps: Mapping[int, tuple[float, float]]) -> Any:
        """What each number of a label may be rounded by behind each component, in stages from ``start``."""
        found = np.full(10, _ROUNDED * max(1e-9, min(whole / (b - start) for b, (_, whole) in caps.items())))
        found[[FWD, BWD]] = _ROUNDED * max(1e-9, min(steady / (b - start) for b, (steady, _) in caps.items())) / 2
        found[[PEAK, LAST, HELD]] = _ROUNDED_MEMORY * self.numbers.capacity / self.numbers.n if self.tight else 1.0
        return found

    def _thinned(self, front: _Front, ending: bool, most: int, grain: Any) -> tuple[_Front, bool]:
        """At most so many labels, and whether they are less than the truth; without a ``grain`` some are forgotten."""
        group = front.entry * self.numbers.count + front.layout
        if len(front.labels) > 1:
            front = front.taken(self._best(front.labels, group, arriving=False, ending=ending))
        if len(front.labels) <= most:
            return front, False
        if grain is not None:
            total = front.labels[:, SUM].copy()
            front.labels = (np.floor(front.labels / grain) - 1e-9) * grain
            front.labels[:, SUM] = total
            group = front.entry * self.numbers.count + front.layout
            front = front.taken(self._best(front.labels, group, arriving=False, ending=ending))
            if len(front.labels) <= most:
                return front, True
        return self._merged(front, most, grain is None), grain is not None

    def _merged(self, front: _Front, most: int, hurry: bool) -> _Front:
        """Similar labels become one: the least of each number, and one of their choices."""
        group = front.entry * self.numbers.count + front.layout
        labels = front.labels
        steady = labels[:, FWD] + labels[:, BWD]
        keys = np.stack([self.numbers.m * steady + np.maximum(labels[:, V], labels[:, C]),
                         labels[:, HELD] if self.tight else steady], axis=1)  # fmt: skip
        low, span = keys.min(axis=0), np.maximum(np.ptp(keys, axis=0), 1e-12)
        cells = 64
        while True:
            cell = ((keys - low) / span * (cells - 1e-6)).astype(np.int64)
            code = (group * cells + cell[:, 0]) * cells + cell[:, 1]
            order = np.lexsort((keys[:, 1 if self.tight and not hurry else 0], code))
            begins = np.flatnonzero(np.r_[True, np.diff(code[order]) != 0])
            if len(begins) <= most or cells == 1:
                break
            cells = max(1, cells * 2 // 3)
        merged = front.taken(order[begins])
        if hurry:
            return merged
        merged.labels = np.minimum.reduceat(labels[order], begins, axis=0)
        merged.labels[:, SUM] = labels[order[begins], SUM]
        return merged

    def _ended(
        self, front: _Front, i: int, caps: tuple[float, float], exact: bool, history: list[tuple[Any, Any]]
    ) -> Points | None:
        """The stage stops behind component i."""
        x, more = self.numbers, self.in_flight - 1
        e = x.outlets[i][:, front.layout]
        labels = front.labels
        forward, backward = labels[:, FWD] + e[at.EF], labels[:, BWD] + e[at.EB]
        once = np.maximum(labels[:, V], labels[:, C]) + e[at.EONCE]
        held = e[at.ESTATE] + more * e[at.EACT]
        peak = np.maximum(labels[:, PEAK], labels[:, LAST] + e[at.EACT] + e[at.ETRANS]) + held
        good = np.isfinite(forward) & (forward + backward <= caps[0] * (1 + 1e-9))
        good &= x.m * (forward + backward) + once <= caps[1] * (1 + 1e-9)
        if self.tight:
            good &= peak <= x.capacity * _CLOSE
        if not good.any():
            return None
        extra = labels[:, BKT].copy()
        if self.slowed:
            both = (labels[:, SUM] + e[at.EONCE] - once) / x.saving
            extra += np.maximum(0.0, both) * (1 - 1 / x.sp)
        least = np.stack([forward, backward, labels[:, BKT] if not exact else extra, once])
        index = np.flatnonzero(good)
        leaving = x.degree[front.layout]
        kept = index[efficient(least[:, index].T, front.entry[index] * x.degrees + leaving[index])]
        return Points(
            least=least[:, kept],
            entry=front.entry[kept],
            exit=leaving[kept],
            exact=exact,
            extra=extra[kept],
            origin=kept,
            stop=i + 1,
            history=list(history),
        )
