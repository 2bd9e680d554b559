"""The label program for one stage: exact, front to back, with prices that show early which labels cannot be completed.

A label is a partial choice for components 0..i, reduced to what the others can see: the layout of component i and

* ``p``: its time, if all its backward windows overlapped with synchronisation still to come,
* ``c``: its time, if the communication stream stays busy to the end from a component of the bucket now open,
* ``v``: the same, from a component in front of that bucket,
* ``u``: the peak so far, in a step that ended here;  ``w``: state and activations held so far.

Times are in ms, memory in GiB. Adding a component with time d (its work and the edge before it), own release a =
saving*sc*prompt, late release l = saving*sc*late:

    v <- v + d - a - l,   c <- c + d - a,   p <- p + d     (a release behind a busy stretch's start is hidden)
    a bucket begins here:  v <- max(v, c), c <- p;   else  c <- max(c, p)
    p <- p - saving*sp*window
    u <- max(u + state + gradients, w + state + activations + gradients + transient),   w <- w + state + activations

All five are monotone, so a label that is no better in any of them than another with the same layout is dropped. The
value at the end, ``max(v, c)`` with ``u <= capacity``, is exact.

For each of a few sets of prices of memory and overlap (:mod:`asa.planner.stage.dual`), a label also carries the cost of
its components. With the least cost of all that follows, that is a bound on every completion. A pass searches for
choices below a limit. If there are too many labels, those with the highest bounds are dropped, and the pass proves no
more than the least of these bounds. Limits rise from just above the bound of the relaxation, so that the first passes
are short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from asa.planner import clock
from asa.planner.budget import ROUNDING
from asa.planner.stage import dual
from asa.planner.stage.descent import Descent
from asa.planner.stage.dual import ACT, COST, EACT, ESTATE, ETRANS, GRAD, INF, LATE, PROMPT, STATE, TRANS, WINDOW, WORK
from asa.planner.stage.pareto import OutOfTimeError, efficient, lowest
from asa.planner.stage.problem import Problem, Solution

_FEW, _MANY, _MOST = 250, 2_000, 20_000
"""Number of labels kept behind a component: in the first pass, which searches; then in passes that prove."""
_STEPS, _ROUNDS, _GAINED = 60, 4, 1e-3
"""Subgradient steps before the first pass; how often they begin again; relative gain below which they do not."""
_SMALL, _FAR = 100, 1.03
"""Components up to which a choice is improved locally; value over bound from which on by two changes at a time."""
V, C, P, U, W, MOVING = range(6)


@dataclass
class _Labels:
    """Labels behind one component: ``columns`` as in this module's docstring, and ``costs`` under each set of
    prices."""

    columns: Any
    costs: Any
    layout: Any
    parent: Any
    config: Any

    def select(self, index: Any) -> _Labels:
        return _Labels(*(a[index] for a in (self.columns, self.costs, self.layout, self.parent, self.config)))


class _Pass:
    """Data that all passes over one problem share."""

    def __init__(self, x: dual.Arrays, prices: dual.Search) -> None:
        self.x = x
        self.width = U if x.capacity == INF else MOVING
        """Columns of a label that count behind a component; over an edge there is one more."""
        n = x.n
        pivots, memories = [prices.best[0]], [prices.best[1]]
        for k in sorted({0, n // 2, n - 1}):  # the overlap from one side alone
            pivots.append(np.eye(n)[k])
            memories.append(prices.best[1])
        for share in (0.5, 1.6):
            pivots.append(prices.best[0])
            memories.append(share * prices.best[1])
        self.priced = dual.PricedStage(x, dual.weigh(x, np.array(pivots), np.array(memories)))
        self.standing = self._least_memory(GRAD)
        self.working = self._least_memory(ACT)

    def _least_memory(self, column: int) -> Any:
        """GiB for each component and layout: the least state behind it plus the least of ``column``."""
        x, n = self.x, self.x.n
        behind = np.zeros((n, x.count))
        for i in range(n - 1, 0, -1):
            least = np.full(x.count, INF)
            memory = x.rows[i][:, STATE] + x.rows[i][:, column]
            least[x.layouts_of[i]] = np.minimum.reduceat(memory, x.begins[i])
            e = x.edges[i - 1]
            between = np.where(np.isfinite(e[COST]), e[ESTATE] + (e[EACT] if column == ACT else 0.0), INF)
            behind[i - 1] = (between + (least + behind[i])[None, :]).min(axis=1)
        return behind

    def run(self, limit: float, most: int, ends: float) -> tuple[float, list[int], float]:
        """(value, choice, proved): the value of the best choice below ``limit`` that was met, the choice, and a value
        below which there is no other.

        Raises:
            OutOfTimeError: time is up.
        """
        n = self.x.n
        history: list[tuple[Any, Any]] = []
        proved = limit
        front: _Labels | None = None
        for i in range(n):
            if clock.now() > ends:
                raise OutOfTimeError
            arrived = self._begin() if front is None else self._cross_edge(front, i, limit, ends)
            front = self._run_component(arrived, i, limit)
            if not len(front.layout):
                return INF, [], proved
            front = front.select(_efficient(front.columns[:, : self.width], front.layout, ends))
            if len(front.layout) > most:
                keep, dropped = lowest(self._bounds(front, i), most)
                front, proved = front.select(keep), min(proved, dropped)
            history.append((front.parent, front.config))
        assert front is not None
        values = np.maximum(front.columns[:, V], front.columns[:, C])
        at = int(values.argmin())
        value, picked = float(values[at]), []
        for parents, configs in reversed(history):
            picked.append(int(configs[at]))
            at = int(parents[at])
        return value, picked[::-1], min(proved, value)

    def _begin(self) -> _Labels:
        count = self.x.count
        columns = np.zeros((count, 6))
        columns[:, V] = columns[:, C] = -INF
        none = np.zeros(count, dtype=np.int64)
        return _Labels(columns, np.zeros((count, len(self.priced.weights))), np.arange(count), none, none)

    def _cross_edge(self, front: _Labels, i: int, limit: float, ends: float) -> _Labels:
        """Labels that arrive in each layout of component i, before its configuration."""
        x, p = self.x, self.priced
        onward = p.edges[i] + (p.least[i] + p.behind[i])[:, None, :] + p.weights.offset[:, None, None]
        possible = np.ones((len(front.layout), x.count), dtype=bool)
        for j in range(len(p.weights)):
            possible &= front.costs[:, j, None] + onward[j][front.layout] < limit
        source, layout = np.nonzero(possible)
        e = x.edges[i - 1][:, front.layout[source], layout]
        columns = front.columns[source]
        columns[:, :U] += e[COST][:, None]
        columns[:, U] += e[ESTATE]
        columns[:, W] += e[ESTATE] + e[EACT]
        columns[:, MOVING] = columns[:, W] + e[ETRANS]
        costs = front.costs[source] + p.edges[i][:, front.layout[source], layout].T
        arrived = _Labels(columns, costs, layout, source, np.zeros(len(source), dtype=np.int64))
        return arrived.select(_efficient(columns[:, : self.width + 1], layout, ends)) if len(source) > 40 else arrived

    def _run_component(self, front: _Labels, i: int, limit: float) -> _Labels:
        """Labels with every configuration of component i."""
        x, p = self.x, self.priced
        begins, ends = x.begins[i], np.r_[x.begins[i][1:], len(x.layout[i])]
        picked, config = [], []
        for layout, a, b in zip(x.layouts_of[i], begins, ends, strict=True):
            arriving = np.flatnonzero(front.layout == layout)
            picked.append(np.repeat(arriving, b - a))
            config.append(np.tile(np.arange(a, b), len(arriving)))
        index, chosen = np.concatenate(picked), np.concatenate(config)
        costs = front.costs[index] + p.configs[i][:, chosen].T
        layout = front.layout[index]
        mask = (costs + p.behind[i][:, layout].T + p.weights.offset < limit).all(axis=1)
        index, chosen, costs, layout = index[mask], chosen[mask], costs[mask], layout[mask]
        r, columns = x.rows[i][chosen], front.columns[index]
        d, prompt, late = r[:, WORK], x.saving * x.sc * r[:, PROMPT], x.saving * x.sc * r[:, LATE]
        v, c, pp = columns[:, V] + d - prompt - late, columns[:, C] + d - prompt, columns[:, P] + d
        if i + 1 == x.n or x.release[i + 1] >= i:  # no bucket extends over this component
            v, c = np.maximum(v, c), pp.copy()
        else:
            c = np.maximum(c, pp)
        pp = pp - x.saving * x.sp * r[:, WINDOW]
        grown = r[:, STATE] + r[:, ACT]
        u = np.maximum(columns[:, U] + r[:, STATE] + r[:, GRAD], columns[:, MOVING] + grown + r[:, GRAD] + r[:, TRANS])
        w = columns[:, W] + grown
        mask = (u + self.standing[i][layout] <= x.capacity) & (w + self.working[i][layout] <= x.capacity)
        mask &= np.maximum(v, c) < limit
        columns = np.stack([v, c, pp, u, w, w], axis=1)[mask]
        return _Labels(columns, costs[mask], layout[mask], front.parent[index][mask], chosen[mask])

    def _bounds(self, front: _Labels, i: int) -> Any:
        p = self.priced
        return (front.costs + p.behind[i][:, front.layout].T + p.weights.offset).max(axis=1)


def _efficient(columns: Any, layout: Any, ends: float) -> Any:
    """Indices of undominated labels. A time of minus infinity is so for all labels of a layout, and counts as 0."""
    return efficient(np.where(np.isfinite(columns), columns, 0.0), layout, ends)


class Solver:
    """A solver of one problem that can be continued.

    ``bound`` holds for every choice that fits; ``value`` and ``picked`` are the best choice so far. ``done`` says that
    this solver can prove no more.
    """

    def __init__(self, problem: Problem) -> None:
        self.x = dual.Arrays(problem)
        self.prices = dual.Search(self.x)
        self.bound = self.prices.bound
        self.value, self.picked = INF, list[int]()
        self.done = self.bound == INF
        self._passes: _Pass | None = None
        self._share, self._most, self._has_searched = 0.002, _FEW, False

    @property
    def binds(self) -> bool:
        """Whether the fastest choice is known not to fit: one that does not fit has a value below the bound."""
        return self.prices.loose < self.bound * (1 - ROUNDING)

    def price(self, cutoff: float = INF, gap: float = 0.0) -> None:
        """Search for good prices of memory and of overlap; with a thousand components, only for a short time."""
        steps = max(_STEPS // 6, min(_STEPS, 100 * _STEPS // self.x.n))
        for _ in range(_ROUNDS):
            before = self.prices.bound
            self.prices.run(steps, cutoff=cutoff, gap=gap)
            if self.prices.bound <= before + _GAINED * abs(before):
                break
        if self.prices.value < self.value:
            self.value, self.picked = self.prices.value, self.prices.picked
        self._raise(self.prices.bound)
        if self.x.capacity < INF and self.x.n <= _SMALL and self.picked and self.bound < min(cutoff, self.value):
            self._descend()

    def _descend(self) -> None:
        """Improve the choice that was met; by two changes at a time if it is far from the bound."""
        descent = Descent(self.x, self.picked)
        descent.by_one()
        if descent.value > self.bound * _FAR:
            descent.by_two()
        if descent.value < self.value:
            self.value, self.picked = descent.value, descent.picked

    def run(self, cutoff: float, ends: float, gap: float = 0.0) -> None:
        """Run passes until nothing is left below ``cutoff`` and the best choice, or time is up."""
        while not self.done:
            best = min(cutoff, self.value)
            if self.bound >= best * (1 - 2 * ROUNDING) and not best == INF > self.bound:
                self._raise(best)  # but for rounding
            if self.bound >= best * (1 - gap) and not best == INF > self.bound:
                return
            if self._passes is None:
                self._passes = _Pass(self.x, self.prices)
            limit = best * (1 - ROUNDING)
            if self._has_searched:
                limit = min(limit, self.bound + self._share * max(abs(self.bound), 1e-9))
            try:
                value, choice, proved = self._passes.run(limit, self._most, ends)
            except OutOfTimeError:
                return
            if value < self.value:
                self.value, self.picked = value, choice
            self._raise(proved)
            if not self._has_searched:
                self._has_searched, self._most = True, _MANY
            elif proved < limit and proved < value:  # labels were dropped
                self.done = self._most >= _MOST
                self._most = min(_MOST, 3 * self._most)
            else:
                self._share *= 4

    def _raise(self, bound: float) -> None:
        self.bound = max(self.bound, bound)
        self.done = self.done or self.bound == INF

    def answer(self, cutoff: float = INF) -> Solution:
        """The solution known so far. Choices of ``cutoff`` ms or more do not count."""
        if not self.picked or self.value >= cutoff:
            return Solution(choice=None, value=INF, bound=min(self.bound, cutoff), solver="dp")
        choice = self.x.choice(self.picked)
        return Solution(choice=choice, value=self.value, bound=min(self.bound, self.value), solver="dp")
