"""A chain as arrays, and what intervals of it cost at least: one pass over the components for all of them at once.

A *key* is the width and data degree of a stage at one of its ends: all that a neighbour sees of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from asa.planner.stage.problem import Chain
from asa.planner.stage.rows import COLUMNS, JOINT, Joints, Row

INF = float("inf")

EDGE = JOINT[1:]
_CONFIG = attrgetter(*COLUMNS)
_EDGE = attrgetter(*EDGE)
F, B, BUCKET, ONCE, PROMPT, LATE, WINDOW, STATE, ACT, GRAD, TRANS = range(11)
EF, EB, EONCE, ESTATE, EACT, ETRANS = range(6)

MULTIPLIERS = (0.1, 0.4, 1.5, 6.0)
"""Prices of memory that bounds are tried with, in units of a stage's time over its capacity."""


def divisors(width: int) -> tuple[int, ...]:
    """Data degrees in a stage of that width."""
    return tuple(d for d in range(1, width + 1) if width % d == 0)


class Numbers:
    """The arrays of one chain."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.n, self.width, self.m = len(chain.names), chain.width, chain.num_microbatches
        self.capacity, self.saving, self.sp, self.sc = chain.capacity, chain.saving, chain.sp, chain.sc
        count = self.count = len(chain.layouts)
        degrees = divisors(chain.width)
        self.degrees = len(degrees)
        self.degree = np.array([degrees.index(x.data) for x in chain.layouts])
        self.rows = [
            row.values.copy() if isinstance(row, Row) else np.array([_CONFIG(c) for c in row]) for row in chain.configs
        ]
        for i, row in enumerate(self.rows):
            if chain.release[i] == i:  # what leaves with its own component leaves at once
                row[:, PROMPT] += row[:, LATE]
                row[:, LATE] = 0.0
        self.layout = [
            row.layout if isinstance(row, Row) else np.array([c.layout for c in row]) for row in chain.configs
        ]
        component, layouts = np.repeat(np.arange(self.n), [len(r) for r in self.rows]), np.concatenate(self.layout)
        order = np.lexsort((layouts, component))
        component, self.flat_layout = component[order], layouts[order]
        new = (np.diff(component) != 0) | (np.diff(self.flat_layout) != 0)
        self.flat = (np.concatenate(self.rows)[order], component, np.flatnonzero(np.r_[True, new]))
        """All rows in order of component and layout, the component of each, and where another layout begins."""
        self.edges = np.full((max(0, self.n - 1), len(EDGE), count, count), INF)
        known: dict[int, Any] = {}
        for i, edges in enumerate(chain.edges):
            if id(edges) not in known:
                one = np.full((len(EDGE), count, count), INF)
                if isinstance(edges, Joints):
                    one[:, edges.source, edges.target] = edges.figures[1:]
                elif edges:
                    at = np.array(list(edges))
                    one[:, at[:, 0], at[:, 1]] = np.array([_EDGE(e) for e in edges.values()]).T
                known[id(edges)] = one
            self.edges[i] = known[id(edges)]
        self.inlets = np.full((self.n, len(EDGE), count), INF)
        self.outlets = np.full((self.n, len(EDGE), count), INF)
        for found, ends in ((self.inlets, chain.inlets), (self.outlets, chain.outlets)):
            made: dict[int, Any] = {}
            for i, edges_of in enumerate(ends):
                if id(edges_of) not in made and edges_of:
                    made[id(edges_of)] = np.array([_EDGE(e) for e in edges_of.values()]).T
                if edges_of:
                    found[i][:, list(edges_of)] = made[id(edges_of)]
        self._classes: tuple[int, ...] | None = None
        self.release = chain.release

    def roomy(self, in_flight: int) -> bool:
        """Whether memory cannot bind, whatever is chosen."""
        if self.capacity == INF:
            return True
        if not hasattr(self, "_roomy"):
            state = sum(float((r[:, STATE] + r[:, GRAD]).max()) for r in self.rows)
            held = sum(float(r[:, ACT].max()) for r in self.rows)
            moving = max(float(r[:, TRANS].max()) for r in self.rows)

            def most(a: Any) -> float:
                return float(np.where(np.isfinite(a), a, 0.0).max(initial=0.0))

            for i in range(self.n):
                e = self.edges[i] if i < self.n - 1 else np.zeros((6, 1, 1))
                state += most(e[ESTATE])
                held += most(e[EACT])
            state += most(self.inlets[:, ESTATE]) + most(self.outlets[:, ESTATE])
            held += most(self.inlets[:, EACT]) + most(self.outlets[:, EACT])
            moving += most(self.edges[:, ETRANS]) + most(self.inlets[:, ETRANS]) + most(self.outlets[:, ETRANS])
            self._roomy = (state, held, moving)
        state, held, moving = self._roomy
        return state + in_flight * held + moving <= self.capacity


@dataclass(frozen=True, kw_only=True)
class Weights:
    """One objective per row of a batch: ``steady`` per ms of a microbatch forward and back, ``ahead`` per ms forward
    alone, ``once`` per ms of once-per-step work, ``memory`` per GiB held to the end of forward.

    What synchronisation and backward take side by side is bounded, for every component k of a stage, by the windows in
    front of k and the synchronisation behind it. ``hidden`` is 0 for components in front of k, 1 for those behind (row
    x component), and between for a mean of such bounds; ``pivot`` is k, or -1.
    """

    steady: Any
    ahead: Any
    once: Any
    memory: Any
    hidden: Any
    pivot: Any

    def __len__(self) -> int:
        return len(self.steady)


def _weighed(weights: Weights, f: Any, b: Any, once: Any, memory: Any) -> Any:
    """Batch first, then the shape of the arguments."""
    shape = (-1, *([1] * f.ndim))
    total = weights.steady.reshape(shape) * (f + b) + weights.ahead.reshape(shape) * f
    total = total + weights.once.reshape(shape) * once
    if weights.memory.any():
        total = total + weights.memory.reshape(shape) * memory
    return total


class Priced:
    """A chain under a batch of weights: least cost per component and layout, edges and ends."""

    def __init__(self, numbers: Numbers, weights: Weights, in_flight: int) -> None:
        x, n = numbers, numbers.n
        batch = len(weights)
        self.numbers, self.batch = x, batch
        # Component x batch x layout: inside a stage, at its begin, its end, and alone in it.
        self.inner, self.first, self.last, self.alone = (np.full((n, batch, x.count), INF) for _ in range(4))
        row, component, begins = x.flat
        sync, held = row[:, PROMPT] + row[:, LATE], row[:, STATE] + in_flight * row[:, ACT]
        alone = _weighed(weights, row[:, F], row[:, B], row[:, ONCE] + sync, held)
        hidden = weights.hidden[:, component]
        once = weights.once[:, None] * x.saving * (weights.pivot[:, None] != component)
        behind = alone - once * x.sc * hidden * sync
        seen = once * x.sp * (1 - hidden) * row[:, WINDOW]
        where = (component[begins], slice(None), x.flat_layout[begins])
        for into, cost in (
            (self.inner, behind - seen), (self.first, alone - seen), (self.last, behind), (self.alone, alone),
        ):  # fmt: skip
            into[where] = np.minimum.reduceat(cost, begins, axis=1).T
        with np.errstate(invalid="ignore"):
            e = x.edges
            self.edges = np.nan_to_num(
                _weighed(weights, e[:, EF], e[:, EB], e[:, EONCE], e[:, ESTATE] + in_flight * e[:, EACT]),
                nan=INF, posinf=INF,
            ).swapaxes(0, 1)  # fmt: skip
            ends = []
            for end in (x.inlets, x.outlets):
                held = end[:, ESTATE] + in_flight * end[:, EACT]
                cost = _weighed(weights, end[:, EF], end[:, EB], end[:, EONCE], held)
                ends.append(np.nan_to_num(cost, nan=INF, posinf=INF))
        self.inlets, self.outlets = (e.swapaxes(0, 1) for e in ends)

    def intervals(self) -> Any:
        """Least cost of every stage: batch x start x stop x entry degree x exit degree."""
        x, n = self.numbers, self.numbers.n
        found = np.full((self.batch, n, n + 1, x.degrees, x.degrees), INF)
        state = np.full((self.batch, n, x.degrees, x.count), INF)
        ended = np.full((self.batch, n, x.degrees, x.count), INF)
        layouts = np.arange(x.count)
        for i in range(n):
            if i:
                step = (state[:, :i, :, :, None] + self.edges[i - 1][:, None, None, :, :]).min(axis=3)
                state[:, :i] = step + self.inner[i][:, None, None, :]
                ended[:, :i] = step + (self.last[i] + self.outlets[i])[:, None, None, :]
            state[:, i, x.degree, layouts] = self.inlets[i] + self.first[i]
            ended[:, i, x.degree, layouts] = self.inlets[i] + self.alone[i] + self.outlets[i]
            for d in range(x.degrees):
                there = x.degree == d
                if there.any():
                    found[:, : i + 1, i + 1, :, d] = ended[:, : i + 1][..., there].min(axis=-1)
        return found

    def completions(self) -> Any:
        """Least cost of what lies behind component i in its layout, to the end of a stage that stops at b:
        i x batch x b x layout."""
        x, n = self.numbers, self.numbers.n
        found = np.full((n, self.batch, n + 1, x.count), INF)
        for i in range(n - 1, -1, -1):
            found[i, :, i + 1] = self.outlets[i]
            if i + 1 < n:
                behind = found[i + 1, :, i + 2 :] + self.inner[i + 1][:, None, :]
                behind[:, 0] = self.outlets[i + 1] + self.last[i + 1]
                found[i, :, i + 2 :] = (behind[:, :, None, :] + self.edges[i][:, None, :, :]).min(axis=3)
        return found


@dataclass
class Table:
    """Least values of stages of one width: arrays start x stop x entry degree x exit degree.

    ``steady``: forward and backward of a microbatch; ``forward``: alone; ``whole``: all of a step; ``single``: one
    microbatch and what comes once per step.
    """

    steady: Any
    forward: Any
    whole: Any
    single: Any

    def anyhow(self) -> Table:
        """The least of each value, whatever the degrees at the ends."""
        values = (self.steady, self.forward, self.whole, self.single)
        return Table(*(x.min(axis=(2, 3), keepdims=True) for x in values))


Objective = tuple[float, float, float, float, float]


def weights_of(rows: list[Objective], n: int) -> Weights:
    """From (steady, ahead, once, memory, hidden) per row; ``hidden`` beyond 1 is 2 + k for a pivot at component k."""
    a = np.array(rows, dtype=float)
    pivot = np.where(a[:, 4] > 1, a[:, 4] - 2, -1).astype(np.int64)
    behind = (np.arange(n)[None, :] >= pivot[:, None]).astype(float)
    hidden = np.where(pivot[:, None] >= 0, behind, a[:, 4:5])
    return Weights(steady=a[:, 0], ahead=a[:, 1], once=a[:, 2], memory=a[:, 3], hidden=hidden, pivot=pivot)


def pivots(n: int, count: int) -> list[float]:
    """Some components, spread over the chain, as ``hidden`` of a row."""
    return sorted({2.0 + n * (k + 1) // (count + 1) for k in range(count)})


def rows_of(n: int, m: int) -> list[Objective]:
    """Objectives without memory: steady time, and all of a step from several sides."""
    once = [1.0, 0.5, 0.0, *pivots(n, 5)]
    return [(1.0, 0.0, 0.0, 0.0, 1.0)] + [(float(m), 0.0, 1.0, 0.0, h) for h in once]


def priced_memory(n: int, m: int, one: float) -> list[Objective]:
    """Objectives with prices of memory, of ``one`` ms per GiB and multiples: first its amount alone, then for each
    price steady time and all of a step."""
    rows: list[Objective] = [(0.0, 0.0, 0.0, 1.0, 1.0)]
    for x in MULTIPLIERS:
        rows += [(1.0, 0.0, 0.0, x * one, 1.0)] + [(float(m), 0.0, 1.0, m * x * one, h) for h in (1.0, *pivots(n, 2))]
    return rows


def relaxed(numbers: Numbers) -> Table:
    """Without the memory limit."""
    n, m = numbers.n, numbers.m
    rows = [(0.0, 1.0, 0.0, 0.0, 1.0), *rows_of(n, m)]
    k = len(rows)
    rows += [(1.0, 0.0, 1.0, 0.0, r[4]) for r in rows[2:]]
    found = Priced(numbers, weights_of(rows, n), 1).intervals()
    return Table(steady=found[1], forward=found[0], whole=found[2:k].max(axis=0), single=found[k:].max(axis=0))


def unit(numbers: Numbers, table: Table) -> float:
    """Ms per GiB: a typical price of memory for stages of this chain."""
    whole = table.steady[0, numbers.n]
    time = float(whole.min())
    return time / numbers.capacity if np.isfinite(time) else 1.0


def limited(numbers: Numbers, table: Table, in_flight: int) -> Table:
    """The same with the memory limit, as far as prices of memory tell: no stage without memory, and others dearer."""
    m, capacity = numbers.m, numbers.capacity
    one = unit(numbers, table)
    rows = priced_memory(numbers.n, m, one)
    found = Priced(numbers, weights_of(rows, numbers.n), in_flight).intervals()
    full = found[0] > capacity * (1 + 1e-9)
    steady, whole = table.steady, table.whole
    for row, values in zip(rows[1:], found[1:], strict=True):
        free = values - row[3] * capacity
        if row[2]:
            whole = np.maximum(whole, free)
        else:
            steady = np.maximum(steady, free)
    return Table(
        steady=np.where(full, INF, steady),
        forward=np.where(full, INF, table.forward),
        whole=np.where(full, INF, np.maximum(whole, m * steady)),
        single=np.where(full, INF, np.maximum(table.single, steady)),
    )
