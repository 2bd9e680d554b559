"""Efficient choices of a stage, enumerated by labels over its components from front to back.

A label is a partial choice, reduced to what affects the rest of the plan: forward and backward of a microbatch, the
clocks of gradient synchronisation (derived in :mod:`asa.planner.stage.labels`; here without work per microbatch), the
memory held, and its peak. A label is dropped if another with the same entry degree and layout dominates it, or if its
best completion exceeds the limits on the stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from asa.planner import clock
from asa.planner.budget import ROUNDING, USUAL
from asa.planner.pipeline import lattice as at
from asa.planner.pipeline.lattice import INF, Numbers, PricedChain
from asa.planner.pipeline.tables import OWN_LAST, Objective, priced_memory, rows_of, weights_of
from asa.planner.stage.pareto import OutOfTimeError, efficient
from asa.planner.stage.problem import Choice

_CLOSE = 1 + 1e-12
_ANY = 1e15
"""Ms that no stage takes."""

# Columns of a label. Over an edge there is one more: memory held including what only the edge holds.
FWD, BWD, BKT, V, C, P, PEAK, LAST, HELD, SUM, MOVING = range(11)


class TooManyError(Exception):
    """A stage has more labels than are allowed."""


class Room(NamedTuple):
    """Most ms of a stage: a microbatch forward and backward; a whole step; one microbatch with once-per-step work."""

    steady: float
    whole: float
    single: float = _ANY

    def holds(self, other: Room) -> bool:
        """Whether no limit is lower than the other's."""
        return all(a >= b for a, b in zip(self, other, strict=True))


@dataclass(frozen=True, kw_only=True)
class Points:
    """Choices for one stage of which none dominates another: arrays with an entry for each choice, in ms.

    ``times``: forward, backward, extension of the last backward, and once-per-step work with that extension (4 x
    choice). ``entry`` and ``exit`` are data degrees by number. ``origin`` and ``history`` trace back the choices.
    """

    times: Any
    entry: Any
    exit: Any
    origin: Any
    history: list[tuple[Any, Any]]

    def __len__(self) -> int:
        return len(self.entry)

    def choice(self, index: int) -> Choice:
        """The choice of a point."""
        found: list[int] = []
        label = int(self.origin[index])
        for parents, configs in reversed(self.history):
            found.append(int(configs[label]))
            label = int(parents[label])
        return tuple(reversed(found))


@dataclass
class _StageLabels:
    """Labels behind one component."""

    own: Any
    entry: Any
    layout: Any
    parent: Any
    config: Any

    def taken(self, index: Any) -> _StageLabels:
        return _StageLabels(*(x[index] for x in self.__dict__.values()))


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
        seen = np.stack([labels[:, FWD] + labels[:, BWD], once, labels[:, P], labels[:, HELD]], axis=1)
        return seen @ self.weights[i]


class Explorer:
    """Enumerates the stages of one chain with one number of microbatches in flight."""

    def __init__(self, numbers: Numbers, in_flight: int) -> None:
        self.numbers, self.in_flight = numbers, in_flight
        self.tight = not numbers.roomy(in_flight)
        self.bounds = Completions(numbers, in_flight, self.tight)
        x = numbers
        self.slowed = x.saving > 0 and x.sp > 1
        ends = np.where(np.isfinite(x.outlets), x.outlets, 0.0)
        self.outlets_hold = bool(ends[:, at.ESTATE :].any())
        self.by_layout: list[list[tuple[int, Any, Any]]] = []
        known: dict[int, list[tuple[int, Any, Any]]] = {}
        for i in range(x.n):
            key = x.kinds[i]
            if key not in known:
                known[key] = self._undominated(i)
            self.by_layout.append(known[key])

    def _undominated(self, i: int) -> list[tuple[int, Any, Any]]:
        """Undominated configurations of component i for each layout, by all that they add to a label."""
        x, row = self.numbers, self.numbers.rows[i]
        both, sync = row[:, at.F] + row[:, at.B], row[:, at.PROMPT] + row[:, at.LATE]
        late, prompt, window = x.sc * sync, x.sc * row[:, at.PROMPT], x.sp * row[:, at.WINDOW]
        hidden = (0.0, late, prompt, window)
        seen = [row[:, at.F]] + ([row[:, at.B]] if x.m > 1 else [])
        seen += [both + row[:, at.ONCE] + sync - x.saving * h for h in hidden]
        seen += [both + row[:, at.BUCKET] + (1 - 1 / x.sp) * h for h in (hidden if self.slowed else (0.0,))]
        if self.tight:
            held = row[:, at.STATE] + self.in_flight * row[:, at.ACT]
            seen += [held, held - row[:, at.ACT] + row[:, at.GRAD], held + row[:, at.GRAD] + row[:, at.TRANS]]
        kept = np.sort(efficient(np.stack(seen, axis=1), x.layout[i]))
        return [
            (int(layout), kept[x.layout[i][kept] == layout], row[kept[x.layout[i][kept] == layout]])
            for layout in np.unique(x.layout[i][kept])
        ]

    def explore(
        self, start: int, stop: int, room: Room, most: int = USUAL.effort.labels, ends: float = INF
    ) -> Points | None:
        """Points of the stage from ``start`` to ``stop`` within ``room``; None where there are none.

        Raises:
            OutOfTimeError: the clock has passed ``ends``.
            TooManyError: there are more than ``most`` labels behind some component.
        """
        limits = self.bounds.limits(room)
        history: list[tuple[Any, Any]] = []
        front: _StageLabels | None = None
        for i in range(start, stop):
            if clock.now() > ends:
                raise OutOfTimeError
            # The largest value that a label may have: objective x layout.
            left = limits[:, None] - self.bounds.behind[i][:, stop, :]
            left = np.where(np.isnan(left), -INF, left)
            stage = (start, stop)
            front = self._begin(i) if front is None else self._over(front, i, stage, left, ends)
            front = None if front is None else self._through(front, i, start, left)
            if front is None or not len(front.layout):
                return None
            group = front.entry * self.numbers.count + front.layout
            front = front.taken(self._best(front.own, group, stage, ends, ending=i + 1 == stop))
            if len(front.layout) > most:
                raise TooManyError
            history.append((front.parent, front.config))
        assert front is not None
        return self._ended(front, stop - 1, room, history)

    def _best(
        self, labels: Any, group: Any, stage: tuple[int, int], ends: float, *, arriving: bool = False,
        ending: bool = False,
    ) -> Any:  # fmt: skip
        """Indices of each group's undominated labels. ``arriving``: behind an edge; ``ending``: at the stage's end."""
        columns = [np.where(np.isfinite(x), x, 0.0) for x in self._paths(labels, stage)]
        if self.tight:
            if arriving:
                columns.append(labels[:, [PEAK, HELD, MOVING]])
            elif ending and self.outlets_hold:
                columns.append(labels[:, [PEAK, LAST, HELD]])
            else:
                columns += [np.maximum(labels[:, PEAK, None], labels[:, LAST, None]), labels[:, HELD, None]]
        return efficient(np.concatenate(columns, axis=1), group, ends)

    def _paths(self, labels: Any, stage: tuple[int, int]) -> list[Any]:
        """The sums of a label's times that affect the rest of a plan, one for each kind of path through the stage.

        A path through the clock of a pipeline that returns through a stage has also gone forward through it. So the
        extension of the last backward counts together with a microbatch's forward and backward, where there are stages
        in front; so does the once-per-step work. Forward and backward also count alone, in paths of several
        microbatches; with a single one only forward does, where there are stages behind.

        The once-per-step work is the largest of the clocks, each plus a value common to all labels of a group. The
        extension of backward grows with the hidden time, which is what the largest clock leaves of the sum.
        """
        x, both, clocks = self.numbers, labels[:, FWD, None] + labels[:, BWD, None], labels[:, [V, C, P]]
        seen = [both + clocks]
        if stage[0]:
            longer = both + labels[:, BKT, None]
            if self.slowed:
                longer = longer + (labels[:, SUM, None] - clocks) * (1 - 1 / x.sp) / x.saving
            seen.append(longer)
        if x.m > 1:
            seen.append(labels[:, [FWD, BWD]])
        elif stage[1] < x.n:
            seen.append(labels[:, FWD, None])
        return seen

    def _begin(self, i: int) -> _StageLabels | None:
        """Labels in each layout in which component i can begin a stage, before its configuration is chosen."""
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
        labels[:, MOVING] = labels[:, HELD] + inlet[at.ETRANS]
        none = np.zeros(len(layouts), dtype=np.int64)
        return _StageLabels(labels, x.degree[layouts], layouts, none, none)

    def _over(
        self, front: _StageLabels, i: int, stage: tuple[int, int], room: Any, ends: float
    ) -> _StageLabels | None:  # fmt: skip
        """Labels that arrive in each layout of component i, before its configuration is chosen."""
        x, more = self.numbers, self.in_flight - 1
        edges = x.edges[i - 1][:, front.layout, :]
        possible = np.isfinite(edges[at.EF])
        base = self.bounds.values(front.own, i - 1).T[:, :, None]
        possible &= (base + self.bounds.over[i - 1][:, front.layout] <= room[:, None, :]).all(axis=0)
        source, layout = np.nonzero(possible)
        if not len(source):
            return None
        e = edges[:, source, layout]
        labels = front.own[source]
        labels = np.concatenate([labels[:, :MOVING], np.zeros((len(source), 2))], axis=1)
        labels[:, FWD] += e[at.EF]
        labels[:, BWD] += e[at.EB]
        for column in (V, C, P, SUM):
            labels[:, column] += e[at.EONCE]
        held = e[at.ESTATE] + more * e[at.EACT]
        labels[:, PEAK] = np.maximum(labels[:, PEAK], labels[:, LAST]) + held
        labels[:, HELD] += held + e[at.EACT]
        labels[:, MOVING] = labels[:, HELD] + e[at.ETRANS]
        arrived = _StageLabels(labels, front.entry[source], layout, source, np.zeros(len(source), dtype=np.int64))
        if len(source) > 40:
            arrived = arrived.taken(self._best(labels, arrived.entry * x.count + layout, stage, ends, arriving=True))
        return arrived

    def _through(self, front: _StageLabels, i: int, start: int, room: Any) -> _StageLabels | None:
        """Labels with every configuration of component i."""
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
        if self.tight:
            here = row[:, at.STATE] + more * row[:, at.ACT] + row[:, at.GRAD]
            last = front.own[index, MOVING] + row[:, at.ACT] + row[:, at.TRANS]
            fits = here + np.maximum(front.own[index, PEAK], last) <= x.capacity * _CLOSE
            index, chosen, row = index[fits], chosen[fits], row[fits]
        labels = front.own[index]
        moving = labels[:, MOVING]
        labels = labels[:, :MOVING].copy()
        labels[:, FWD] += row[:, at.F]
        labels[:, BWD] += row[:, at.B]
        labels[:, BKT] += row[:, at.BUCKET]
        sync = row[:, at.PROMPT] + row[:, at.LATE]
        paid = row[:, at.ONCE] + sync
        prompt = x.saving * x.sc * row[:, at.PROMPT]
        v = labels[:, V] + paid - prompt - x.saving * x.sc * row[:, at.LATE]
        c = labels[:, C] + paid - prompt
        p = labels[:, P] + paid
        if i + 1 >= x.n or max(x.release[i + 1], start) >= i:  # no bucket spans this component
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
        return _StageLabels(
            labels[good], front.entry[index][good], layout[good], front.parent[index][good], chosen[good]
        )

    def _ended(self, front: _StageLabels, i: int, caps: Room, history: list[tuple[Any, Any]]) -> Points | None:
        """The points of the stage that ends with component i; None where there are none."""
        x, more = self.numbers, self.in_flight - 1
        e = x.outlets[i][:, front.layout]
        labels = front.own
        forward, backward = labels[:, FWD] + e[at.EF], labels[:, BWD] + e[at.EB]
        once = np.maximum(labels[:, V], labels[:, C]) + e[at.EONCE]
        held = e[at.ESTATE] + more * e[at.EACT]
        peak = np.maximum(labels[:, PEAK], labels[:, LAST] + e[at.EACT] + e[at.ETRANS]) + held
        good = np.isfinite(forward) & (forward + backward <= caps.steady * (1 + ROUNDING))
        good &= x.m * (forward + backward) + once <= caps.whole * (1 + ROUNDING)
        good &= forward + backward + once <= caps.single * (1 + ROUNDING)
        if self.tight:
            good &= peak <= x.capacity * _CLOSE
        if not good.any():
            return None
        extra = labels[:, BKT].copy()
        if self.slowed:
            both = (labels[:, SUM] + e[at.EONCE] - once) / x.saving
            extra += np.maximum(0.0, both) * (1 - 1 / x.sp)
        index, leaving, there = np.flatnonzero(good), x.degree[front.layout], forward + backward
        seen = [forward, there + extra, there + once, *([backward] if x.m > 1 else [])]
        kept = index[efficient(np.stack(seen, axis=1)[index], front.entry[index] * x.degrees + leaving[index])]
        times = np.stack([forward, backward, extra, once])[:, kept]
        return Points(times=times, entry=front.entry[kept], exit=leaving[kept], origin=kept, history=history)
