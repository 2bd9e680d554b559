"""A chain of components as arrays, and lower bounds on all its intervals in one pass over the components.

A *key* is the width and data degree of a stage at one of its ends. A neighbouring stage depends on nothing else of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from asa.planner.space.space import divisors
from asa.planner.stage.pareto import begins
from asa.planner.stage.problem import COLUMNS, JOINT, Chain, Edge, all_ahead, column, tabulated

INF = float("inf")

EDGE = JOINT[1:]
F, B, BUCKET, ONCE, PROMPT, LATE, WINDOW, STATE, ACT, GRAD, TRANS, ADDED = range(12)
EF, EB, EONCE, ESTATE, EACT, ETRANS = range(6)


def _fill(arrays: Any, costs: Sequence[Mapping[Any, Edge]]) -> None:
    """Write figures of boundaries or ends into ``arrays``, one for each of ``costs``; equal ones are read once."""
    known: dict[int, Any] = {}
    for array, some in zip(arrays, costs, strict=True):
        if some and id(some) not in known:
            layouts, figures = tabulated(some)
            array[(slice(None), *layouts)] = figures[1:]
        array[:] = known.setdefault(id(some), array)


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
        self.rows = [np.stack([column(row, name) for name in COLUMNS], axis=1) for row in chain.configs]
        for i, row in enumerate(self.rows):
            if chain.release[i] == i:  # a bucket that closes with its own component is sent at once
                row[:, PROMPT] += row[:, LATE]
                row[:, LATE] = 0.0
        self.layout = [column(row, "layout") for row in chain.configs]
        component, layouts = np.repeat(np.arange(self.n), [len(r) for r in self.rows]), np.concatenate(self.layout)
        order = np.lexsort((layouts, component))
        component, self.flat_layout = component[order], layouts[order]
        self.flat = (np.concatenate(self.rows)[order], component, begins(component, self.flat_layout))
        """All rows in order of component and layout, the component of each, and the index at which each layout begins.
        """
        self.edges = np.full((max(0, self.n - 1), len(EDGE), count, count), INF)
        self.inlets, self.outlets = (np.full((self.n, len(EDGE), count), INF) for _ in range(2))
        _fill(self.edges, chain.edges)
        _fill(self.inlets, chain.inlets)
        _fill(self.outlets, chain.outlets)
        self.release = chain.release

    def flying(self, in_flight: int) -> Numbers:
        """The arrays for ``in_flight`` microbatches in flight. They differ where all microbatches are in flight
        (:func:`asa.planner.stage.problem.all_ahead`)."""
        return self._ahead if all_ahead(self.m, in_flight) else self

    def without_memory_limit(self) -> Numbers:
        """A copy without the memory limit."""
        numbers = copy(self)
        numbers.capacity = INF
        numbers.__dict__.pop("_ahead", None)
        return numbers

    @cached_property
    def _ahead(self) -> Numbers:
        numbers = copy(self)
        numbers.rows = [row.copy() for row in self.rows]
        rows, component, groups = self.flat
        numbers.flat = (rows.copy(), component, groups)
        for row in (*numbers.rows, numbers.flat[0]):
            row[:, STATE] -= row[:, ADDED]
            row[:, GRAD], row[:, ADDED] = row[:, GRAD] + row[:, ADDED], 0.0
        numbers.edges, numbers.inlets = self.edges.copy(), self.inlets.copy()
        for state in (numbers.edges[:, ESTATE], numbers.inlets[1:, ESTATE]):
            state[np.isfinite(state)] = 0.0
        for name in ("kinds", "distinct", "_twins", "_ahead", "_upper_bounds"):
            numbers.__dict__.pop(name, None)
        return numbers

    @cached_property
    def kinds(self) -> list[int]:
        """A number for each component; equal ones, such as repeated blocks, have the same number."""
        return _numbered((row.tobytes(), at.tobytes()) for row, at in zip(self.rows, self.layout, strict=True))

    @cached_property
    def distinct(self) -> tuple[Any, Any, Any]:
        """Configurations of the distinct components, the index at which each of these begins, and the number of each
        component."""
        rows = [self.rows[self.kinds.index(k)] for k in range(len(set(self.kinds)))]
        groups = np.cumsum([0, *(len(r) for r in rows[:-1])])
        return np.concatenate(rows), groups, np.array(self.kinds)

    def twin(self, start: int, stop: int) -> tuple[int, int]:
        """The first stage that has equal components and equal edges between them."""
        return self._twins[start, stop]

    @cached_property
    def _twins(self) -> dict[tuple[int, int], tuple[int, int]]:
        edges, inlets, outlets = (
            _numbered(x.tobytes() for x in values) for values in (self.edges, self.inlets, self.outlets)
        )
        stage_of: dict[tuple[int, int], tuple[int, int]] = {}
        numbers_of: dict[tuple[int, ...], int] = {}
        twins: dict[tuple[int, int], tuple[int, int]] = {}
        for a in range(self.n):
            at = numbers_of.setdefault((inlets[a], self.kinds[a], a == 0), len(numbers_of))  # the first stage differs
            for b in range(a + 1, self.n + 1):
                if b > a + 1:
                    across = b - 2 > a and self.release[b - 1] < b - 2  # a bucket spans component b - 2
                    at = numbers_of.setdefault((at, edges[b - 2], self.kinds[b - 1], across), len(numbers_of))
                twins[a, b] = stage_of.setdefault((at, outlets[b - 1]), (a, b))
        return twins

    def all_fit(self, in_flight: int) -> bool:
        """Whether every choice fits in memory."""
        state, activations, moving = self._upper_bounds
        return state + in_flight * activations + moving + self.chain.over <= self.capacity

    @cached_property
    def _upper_bounds(self) -> tuple[float, float, float]:
        """Upper bounds in GiB over all choices: permanent memory, activations of one microbatch, transient memory."""

        def most(*arrays: Any) -> list[float]:
            return [float(np.where(np.isfinite(a), a, 0.0).max(initial=0.0)) for a in arrays]

        rows, ends = self.rows, (self.inlets, self.outlets)
        state = sum(float((r[:, STATE] + r[:, GRAD]).max()) for r in rows)
        state += sum(most(*self.edges[:, ESTATE], *(e[:, ESTATE] for e in ends)))
        acts = sum(float(r[:, ACT].max()) for r in rows) + sum(most(*self.edges[:, EACT], *(e[:, EACT] for e in ends)))
        moving = max(float(r[:, TRANS].max()) for r in rows)
        return state, acts, moving + sum(most(self.edges[:, ETRANS], *(e[:, ETRANS] for e in ends)))


def _numbered(values: Iterable[object]) -> list[int]:
    """A number for each value; equal values have the same number."""
    number_of: dict[object, int] = {}
    return [number_of.setdefault(x, len(number_of)) for x in values]


@dataclass(frozen=True, kw_only=True)
class ChainWeights:
    """A batch of objectives, one for each row: weights of ``steady`` (ms of a microbatch forward and backward),
    ``ahead`` (ms of its forward alone), ``once`` (ms of once-per-step work) and ``memory`` (GiB held with the
    activations of ``flight`` microbatches). Memory counts in the backward of each component by its share in ``moments``
    (row x component); what these lack of 1 counts in the backward of the stage's last component. (In the backward of a
    component of another stage, the memory that counts is a lower bound: what this stage holds throughout, or holds in
    the backward of its nearest component.)

    The overlap of synchronisation with backward is bounded, for every component k of a stage, by the windows in front
    of k and the synchronisation behind it. ``hidden`` (row x component) is 0 for components in front of k, 1 for those
    behind it, and between 0 and 1 for a mean of such bounds; ``pivot`` is k, or -1.
    """

    steady: Any
    ahead: Any
    once: Any
    memory: Any
    flight: Any
    hidden: Any
    pivot: Any
    moments: Any

    def __len__(self) -> int:
        return len(self.steady)

    @cached_property
    def activations(self) -> Any:
        """Weight of a GiB of a microbatch's activations, row x component; its own backward frees them."""
        behind = self.moments.sum(axis=1, keepdims=True) - np.cumsum(self.moments, axis=1) + self.moments
        return self.memory[:, None] * (self.flight[:, None] - self.moments.sum(axis=1, keepdims=True) + behind)

    @cached_property
    def gradients(self) -> Any:
        """Weight of a GiB of gradients, which exist from the component's backward on: row x component."""
        return self.memory[:, None] * np.cumsum(self.moments, axis=1)

    @cached_property
    def transient(self) -> Any:
        """Weight of a GiB that is held only in the component's own backward: row x component."""
        return self.memory[:, None] * self.moments

    @cached_property
    def ending(self) -> Any:
        """Additional weight of a GiB that is held only in the backward of a stage's last component, for each row."""
        return self.memory * (1 - self.moments.sum(axis=1))


def _weighed(weights: ChainWeights, f: Any, b: Any, once: Any) -> Any:
    """Weighted sum of forward, backward and once-per-step ms: batch first, then the shape of the arguments."""
    shape = (-1, *([1] * f.ndim))
    total = weights.steady.reshape(shape) * (f + b) + weights.ahead.reshape(shape) * f
    return total + weights.once.reshape(shape) * once


class PricedChain:
    """A chain under a batch of weights: the least cost of each component and layout, of edges and of the two ends."""

    def __init__(self, numbers: Numbers, weights: ChainWeights) -> None:
        x, n = numbers, numbers.n
        batch = len(weights)
        self.numbers, self.batch = x, batch
        # component x batch x layout: inside a stage, first in it, last in it, alone in it
        self.inner, self.first, self.last, self.only = (np.full((n, batch, x.count), INF) for _ in range(4))
        row, component, groups = x.flat
        sync, once_ = row[:, PROMPT] + row[:, LATE], row[:, ONCE]
        inside = _weighed(weights, row[:, F], row[:, B], once_ + sync)
        ending, with_memory = inside, weights.memory.any()
        if with_memory:
            inside = inside + weights.memory[:, None] * row[:, STATE]
            inside = inside + weights.activations[:, component] * row[:, ACT]
            if weights.moments.any():
                inside = inside + weights.gradients[:, component] * row[:, GRAD]
                inside = inside + weights.transient[:, component] * row[:, TRANS]
            # in its backward, the last component holds more
            ending = inside + weights.ending[:, None] * (row[:, GRAD] + row[:, TRANS])
        hidden = weights.hidden[:, component]
        once = weights.once[:, None] * x.saving * (weights.pivot[:, None] != component)
        behind = once * x.sc * hidden * sync
        in_window = once * x.sp * (1 - hidden) * row[:, WINDOW]
        where = (component[groups], slice(None), x.flat_layout[groups])
        for into, cost in (
            (self.inner, inside - behind - in_window), (self.first, inside - in_window), (self.last, ending - behind),
            (self.only, ending),
        ):  # fmt: skip
            into[where] = np.minimum.reduceat(cost, groups, axis=1).T
        with np.errstate(invalid="ignore"):
            costs = []
            for e, first, last in ((x.edges, 1, False), (x.inlets, 0, False), (x.outlets, 0, True)):
                cost = _weighed(weights, e[:, EF], e[:, EB], e[:, EONCE])
                if with_memory:
                    shape = (batch, len(e), *([1] * (e.ndim - 2)))
                    moving = weights.transient[:, first:] + (weights.ending[:, None] if last else 0.0)
                    cost = cost + weights.memory.reshape(-1, *([1] * (e.ndim - 1))) * e[:, ESTATE]
                    cost = cost + weights.activations[:, first:].reshape(shape) * e[:, EACT]
                    cost = cost + moving.reshape(shape) * e[:, ETRANS]
                costs.append(np.nan_to_num(cost, nan=INF, posinf=INF).swapaxes(0, 1))
        self.edges, self.inlets, self.outlets = costs

    def intervals(self) -> Any:
        """Least cost of every stage: batch x start x stop x entry degree x exit degree."""
        x, n = self.numbers, self.numbers.n
        least = np.full((self.batch, n, n + 1, x.degrees, x.degrees), INF)
        state = np.full((self.batch, n, x.degrees, x.count), INF)
        ended = np.full((self.batch, n, x.degrees, x.count), INF)
        layouts = np.arange(x.count)
        for i in range(n):
            if i:
                step = (state[:, :i, :, :, None] + self.edges[i - 1][:, None, None, :, :]).min(axis=3)
                state[:, :i] = step + self.inner[i][:, None, None, :]
                ended[:, :i] = step + (self.last[i] + self.outlets[i])[:, None, None, :]
            state[:, i, x.degree, layouts] = self.inlets[i] + self.first[i]
            ended[:, i, x.degree, layouts] = self.inlets[i] + self.only[i] + self.outlets[i]
            for d in range(x.degrees):
                mask = x.degree == d
                if mask.any():
                    least[:, : i + 1, i + 1, :, d] = ended[:, : i + 1][..., mask].min(axis=-1)
        return least

    def completions(self) -> Any:
        """Least cost behind component i in its layout, for stages that stop at b: i x batch x b x layout."""
        x, n = self.numbers, self.numbers.n
        least = np.full((n, self.batch, n + 1, x.count), INF)
        for i in range(n - 1, -1, -1):
            least[i, :, i + 1] = self.outlets[i]
            if i + 1 < n:
                behind = least[i + 1, :, i + 2 :] + self.inner[i + 1][:, None, :]
                behind[:, 0] = self.outlets[i + 1] + self.last[i + 1]
                least[i, :, i + 2 :] = (behind[:, :, None, :] + self.edges[i][:, None, :, :]).min(axis=3)
        return least


@dataclass
class Table:
    """Lower bounds in ms on stages of one width: arrays start x stop x entry degree x exit degree.

    ``steady``: forward and backward of a microbatch; ``forward`` and ``backward``: each alone; ``whole``: a whole step;
    ``single``: one microbatch and the once-per-step work.
    """

    steady: Any
    forward: Any
    whole: Any
    single: Any
    backward: Any = None

    def values(self) -> tuple[Any, ...]:
        """The arrays."""
        return self.steady, self.forward, self.whole, self.single, self.backward
