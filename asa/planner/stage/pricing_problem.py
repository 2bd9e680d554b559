"""The label program for one stage under weights of its times: a lower bound with the memory limit, and the best choice.

A path through the clock of a pipeline contains a stage's forward and backward a number of times, the extension of its
last backward, and its once-per-step work; a weighted mean of paths contains fractions of them. Under such weights a
stage is a :class:`asa.planner.stage.problem.Problem` with costs at its two ends: the stages in front have a cost for
each data degree at its start, and those behind have a least cost for each data degree at its end. This is the pricing
problem of column generation. A stage that is alone has weight 1 for its once-per-step work, which is all it does.

A label is a partial choice for components 0..i, reduced to what the others can see: the layout of component i and

* ``P``: its cost, if all its backward windows overlapped with synchronisation still to come,
* ``C``: its cost, if the communication stream stays busy to the end from a component of the bucket now open,
* ``V``: the same, from a component in front of that bucket,
* ``U``: the peak so far, in a step that ended here;  ``W``: state and activations held so far.

Adding a component with cost d (its work and the edge before it), own release a = saving*sc*prompt, late release l =
saving*sc*late:

    V <- V + d - a - l,   C <- C + d - a,   P <- P + d     (a release behind a busy stretch's start is hidden)
    a bucket begins here:  V <- max(V, C), C <- P;   else  C <- max(C, P)
    P <- P - saving*sp*window
    U <- max(U + state + gradients, W + state + activations + gradients + transient),   W <- W + state + activations

All five are monotone, so a label that is no better in any of them than another with the same layout is dropped. The
value at the end, ``max(V, C)`` with ``U <= capacity``, is exact. Lagrangian prices of memory in the backward of some
components, and weights of the components at which the overlap is counted (:mod:`asa.planner.stage.dual`), bound every
completion of a label.

A ms of overlap of synchronisation with backward saves ``saving`` ms. Where the path continues in another stage, overlap
only lengthens backward, and ``saving`` is negative. Clocks and bounds are then combined with min instead of max.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asa.planner import clock
from asa.planner.stage import lattice as at
from asa.planner.stage.lattice import INF
from asa.planner.stage.pareto import OutOfTimeError, begins, efficient, lowest
from asa.planner.stage.stage_slice import StageSlice

_CLOSE = 1 + 1e-12
_COARSE, _WIDE = 10, (2e-3, 30.0)
"""Number and range of the first prices of memory, in units of a stage's time over the capacity."""
_FINER = (-0.7, -0.35, -0.15, 0.15, 0.35, 0.7)
"""Exponents for finer prices around the best one, of the ratio of neighbouring prices; used twice, with less ratio."""
_BESIDE = (0.5, 1.6)
"""Multiples of the best price that bound labels, too."""
_NEVER = 1e30
"""Value of a clock that has not begun; finite, so that it can be added to infinity."""
V, C, P, U, W, MOVING = range(6)


@dataclass
class Labels:
    """Labels behind one component: ``columns``, label x clocks (ms) and GiB; ``entry`` and ``layout`` of each, the
    label it comes from (``parent``) and its configuration; ``priced``, label x memory prices."""

    columns: Any
    entry: Any
    layout: Any
    parent: Any
    config: Any
    priced: Any = None

    def select(self, index: Any) -> Labels:
        """The labels ``index``."""
        return Labels(*(None if x is None else x[index] for x in self.__dict__.values()))


def traced(history: Sequence[tuple[Any, Any]], label: int) -> list[int]:
    """The configuration of each component in a label. ``history``: parents and configurations behind each."""
    picked: list[int] = []
    for parents, configs in reversed(history):
        picked.append(int(configs[label]))
        label = int(parents[label])
    return picked[::-1]


@dataclass(frozen=True)
class PricedChoice:
    """Result of one pass, by number of the data degree at the end: the least value (infinite where none is below the
    limit) and its choice. ``proved``: no plan with a dropped label takes less."""

    values: Any
    choices: Sequence[tuple[int, ...] | None]
    entries: Sequence[int]
    proved: float


class PricingProblem:
    """A stage under weights of its forward, of its backward, of the extension of its last backward (where the path
    continues), and of its once-per-step work (where the path ends). ``behind``: least cost of the later stages, for
    each data degree at the end. ``prices``: good weights of the components at which the overlap may be counted, and
    prices of memory (:class:`asa.planner.stage.dual.Search`); searched for where None."""

    def __init__(
        self, stage: StageSlice, weights: Sequence[float], behind: Any, prices: tuple[Any, Any] | None = None
    ) -> None:
        forward, backward, longer, once = weights
        x, n = stage.numbers, stage.n
        self.stage, self.after = stage, behind[x.degree]
        self.saving = 0.0
        if x.saving > 0:
            self.saving = once * x.saving - longer * (1 - 1 / x.sp if x.sp > 1 else 0.0)
        r = stage.row
        work = forward * r[:, at.F] + backward * r[:, at.B] + longer * r[:, at.BUCKET]
        work = work + once * (r[:, at.ONCE] + r[:, at.PROMPT] + r[:, at.LATE])
        e = stage.edges
        edge_cost = forward * e[:, at.EF] + backward * e[:, at.EB] + once * e[:, at.EONCE]
        self.edges = np.where(stage.has_edge, edge_cost, INF)
        s = self.saving
        prompt, late = s * x.sc * r[:, at.PROMPT], s * x.sc * r[:, at.LATE]
        # Cost in front of the component at which the overlap is counted, at it, behind it in the same bucket, and
        # behind that.
        sides = [work - s * x.sp * r[:, at.WINDOW], work, work - prompt, work - prompt - late]
        keep = self._undominated(np.stack(sides, axis=1) if s else work[:, None])
        self.rows, self.layout, self.component = r[keep], stage.layout[keep], stage.component[keep]
        self.config = stage.config[keep]
        self.sides = np.stack([v[keep] for v in sides])
        self.begins = begins(self.component, self.layout)
        self.of = np.searchsorted(self.component, np.arange(n + 1))
        ks = sorted({0, n // 2, n - 1}) if s > 0 else [0]
        self.pivots = np.zeros((len(ks), n))
        self.pivots[np.arange(len(ks)), ks] = 1.0
        if prices is not None and s > 0:
            self.pivots = np.concatenate([self.pivots, prices[0][None]])
        self.passed = np.clip(np.cumsum(self.pivots, axis=1), 0.0, 1.0)
        if prices is None:
            self._price()
        else:
            self._set_memory_prices(np.outer((1.0, *_BESIDE) if prices[1].any() else (1.0,), prices[1]))

    def _undominated(self, times: Any) -> Any:
        r, stage = self.stage.row, self.stage
        criteria = [times]
        if stage.tight:
            memory = r[:, at.STATE] + r[:, at.ACT]
            # Memory behind the component, from its own backward on, and in its backward.
            criteria += [memory[:, None], (r[:, at.STATE] + r[:, at.GRAD])[:, None],
                     (memory + r[:, at.GRAD] + r[:, at.TRANS])[:, None]]  # fmt: skip
        group = stage.component * stage.numbers.count + stage.layout
        return np.sort(efficient(np.concatenate(criteria, axis=1), group))

    def _price(self) -> None:
        """Find the price of memory with the best bound, and keep a few prices around it."""
        stage, n = self.stage, self.stage.n
        last = np.eye(n)[n - 1]
        self._set_memory_prices(np.zeros((1, n)))
        if not stage.tight:
            return
        moments = [last] + ([np.eye(n)[n - 2]] if n > 1 and stage.numbers.m == 1 else [])
        unit = max(1e-9, abs(float(self.root.max(axis=0).min()))) / stage.numbers.capacity
        prices = unit * np.geomspace(*_WIDE, _COARSE)
        ratio = float(prices[1] / prices[0])
        which, candidates = 0, [(0.0, 0)] + [(float(p), k) for k in range(len(moments)) for p in prices]
        best, price, which = -INF, 0.0, 0
        for _ in range(3):
            self._set_memory_prices(np.array([p * moments[k] for p, k in candidates]))
            values = self.root.min(axis=1)
            j = int(values.argmax())
            if values[j] > best:
                best, (price, which) = float(values[j]), candidates[j]
            if not price:
                break
            candidates = [(price * ratio**step, which) for step in _FINER]
            ratio **= 0.3
        chosen = [price * moments[which]] + [f * price * moments[which] for f in _BESIDE if price]
        chosen += [price * sum(moments) / 2] if len(moments) > 1 and price else []
        self._set_memory_prices(np.array(chosen))

    def _set_memory_prices(self, memory: Any) -> None:
        """Set the prices of memory: price set x component."""
        stage, x, n = self.stage, self.stage.numbers, self.stage.n
        self.memory = memory
        upto = np.cumsum(memory, axis=1)
        total = upto[:, -1:]
        at_work = total - upto + memory
        r, k = self.rows, self.component
        self.priced = total * r[:, at.STATE] + at_work[:, k] * r[:, at.ACT]
        self.priced = self.priced + upto[:, k] * r[:, at.GRAD] + memory[:, k] * r[:, at.TRANS]
        e = stage.edges
        moved = total[..., None, None] * e[None, :, at.ESTATE] + at_work[:, 1:, None, None] * e[None, :, at.EACT]
        self.edge_costs = moved + memory[:, 1:, None, None] * e[None, :, at.ETRANS]
        self.offset = -total[:, 0] * x.capacity if stage.tight else 0.0 * total[:, 0]
        cost = np.minimum.reduceat(self.sides[:, None, :] + self.priced[None], self.begins, axis=2)
        least = np.full((n, 4, len(memory), x.count), INF)
        least[self.component[self.begins], :, :, self.layout[self.begins]] = np.moveaxis(cost, 2, 0)
        self.least = least
        self._bound_behind()
        from_first = self._cost_from(0, self.behind[0])
        # price set x layout
        self.root = self.offset[:, None] + (from_first[:-1].max(axis=0) if self.saving >= 0 else from_first[P])

    def _bound_behind(self) -> None:
        """Compute the least cost behind each component: component x case x price set x layout. Where ``saving`` is not
        negative, the cases are the pivots and one behind all pivots; otherwise they are the clocks V, C and P."""
        stage, n = self.stage, self.stage.n
        sets, count = len(self.memory), stage.numbers.count
        ways = len(self.pivots) + 1 if self.saving >= 0 else 3
        behind = np.zeros((n, ways, sets, count))
        behind[n - 1] = self.after
        if self.saving < 0:
            behind[n - 1, P] = INF
        for i in range(n - 1, 0, -1):
            from_here = self._cost_from(i, behind[i])
            edge = self.edges[i - 1] + self.edge_costs[:, i - 1]
            behind[i - 1] = (edge[None] + from_here[:, :, None, :]).min(axis=3)
        self.behind = behind

    def _cost_from(self, i: int, behind: Any) -> Any:
        """The least cost of component i and all behind it: case x price set x layout."""
        front, pivot, bucket, beyond = self.least[i]
        if self.saving >= 0:
            own, passed = self.pivots[:, i].tolist(), self.passed[:, i].tolist()
            shares = [((front, 1 - b), (pivot, a), (beyond, max(0.0, b - a))) for a, b in zip(own, passed, strict=True)]
            return np.stack([*(sum(share * x for x, share in some if share) for some in shares), beyond]) + behind
        if self.stage.across[i]:
            c = bucket + behind[C]
        else:
            c = bucket + behind[V]
        p = np.minimum(pivot + behind[C], front + behind[P])
        return np.stack([beyond + behind[V], c, p])

    def entry_bounds(self) -> Any:
        """Lower bound for each data degree at the start, by its number."""
        bounds = np.full(self.stage.numbers.degrees, INF)
        np.minimum.at(bounds, self.stage.numbers.degree, self.root.max(axis=0))
        return bounds

    def best(self, entry: Any, limit: float, most: int, ends: float) -> PricedChoice:
        """The best choices below ``limit``. ``entry``: cost of all stages in front, by data degree at the start. At
        most ``most`` labels, those with the lowest bounds, stay behind each component.

        Raises:
            OutOfTimeError: time is up.
        """
        stage, n, degrees = self.stage, self.stage.n, self.stage.numbers.degrees
        history: list[tuple[Any, Any]] = []
        proved = limit
        none = PricedChoice(np.full(degrees, INF), [None] * degrees, [0] * degrees, proved)
        front: Labels | None = None
        for i in range(n):
            if clock.now() > ends:
                raise OutOfTimeError
            arrived = self._begin(entry) if front is None else self._cross_edge(front, i, limit, ends)
            front = self._configured(arrived, i, limit)
            if not len(front.layout):
                return PricedChoice(none.values, none.choices, none.entries, proved)
            front = front.select(self._efficient(front, front.columns[:, : U + 2 if stage.tight else U], ends))
            if len(front.layout) > most:
                keep, dropped = lowest(self._bounds(front, i), most)
                front, proved = front.select(keep), min(proved, dropped)
            history.append((front.parent, front.config))
        assert front is not None
        return self._by_degree(front, history, proved)

    def _by_degree(self, front: Labels, history: list[tuple[Any, Any]], proved: float) -> PricedChoice:
        x = self.stage.numbers
        values, choices = np.full(x.degrees, INF), list[tuple[int, ...] | None]([None] * x.degrees)
        entries = [0] * x.degrees
        total = (np.maximum if self.saving >= 0 else np.minimum)(front.columns[:, V], front.columns[:, C])
        for label in np.argsort(total, kind="stable").tolist():
            degree = int(x.degree[front.layout[label]])
            if choices[degree] is not None:
                continue
            values[degree] = total[label]
            choices[degree] = tuple(int(self.config[row]) for row in traced(history, label))
            entries[degree] = int(front.entry[label])
        return PricedChoice(values, choices, entries, proved)

    def _begin(self, entry: Any) -> Labels:
        x = self.stage.numbers
        layout = np.flatnonzero(np.isfinite(entry[x.degree]))
        columns = np.zeros((len(layout), 6))
        columns[:, V] = columns[:, C] = -_NEVER if self.saving >= 0 else _NEVER
        columns[:, P] = entry[x.degree[layout]]
        none = np.zeros(len(layout), dtype=np.int64)
        return Labels(columns, x.degree[layout], layout, none, none, np.zeros((len(layout), len(self.memory))))

    def _efficient(self, front: Labels, columns: Any, ends: float) -> Any:
        """Indices of the undominated labels. All labels of a layout agree on which clocks have begun."""
        if not self.saving:
            columns = columns[:, P:]
        return efficient(np.where(np.abs(columns) < _NEVER / 2, columns, 0.0), front.layout, ends)

    def _cross_edge(self, front: Labels, i: int, limit: float, ends: float) -> Labels:
        """Labels that arrive in each layout of component i, before its configuration is chosen."""
        e = self.stage.edges[i - 1]
        from_here = self._cost_from(i, self.behind[i])
        cost = self.edges[i - 1][front.layout]  # label x layout
        clocks = front.columns[:, None, :3] + cost[:, :, None]
        value = self._completed(clocks, from_here[:, :, None, :], i - 1)  # price set x label x layout
        priced = front.priced.T[:, :, None] + self.edge_costs[:, i - 1][:, front.layout]
        possible = (value + priced + self.offset[:, None, None] < limit).all(axis=0)
        source, layout = np.nonzero(possible)
        columns = front.columns[source]
        columns[:, :U] += cost[source, layout][:, None]
        pair = (front.layout[source], layout)
        columns[:, U] += e[at.ESTATE][pair]
        columns[:, W] += e[at.ESTATE][pair] + e[at.EACT][pair]
        columns[:, MOVING] = columns[:, W] + e[at.ETRANS][pair]
        arrived = Labels(columns, front.entry[source], layout, source, 0 * source, priced[:, source, layout].T)
        if len(source) <= 40:
            return arrived
        return arrived.select(self._efficient(arrived, columns if self.stage.tight else columns[:, :U], ends))

    def _completed(self, clocks: Any, behind: Any, i: int) -> Any:
        """Lower bounds on the final value without the cost of memory: price set x label. ``clocks``: label x clock;
        ``behind``: the least cost behind component i, case x price set x label."""
        if self.saving >= 0:
            begun = np.maximum(clocks[..., V], clocks[..., C])
            bound = begun[None] + behind[-1]
            for k, share in enumerate(self.passed[:, i].tolist()):
                if share < 1:
                    so_far = share * begun + (1 - share) * clocks[..., P] if share else clocks[..., P]
                    bound = np.maximum(bound, so_far[None] + behind[k])
            return bound
        bound = np.minimum(clocks[..., V][None] + behind[V], clocks[..., C][None] + behind[C])
        return np.minimum(bound, clocks[..., P][None] + behind[P])

    def _bounds(self, front: Labels, i: int) -> Any:
        """Lower bounds on the final value, one for each label."""
        bound = self._completed(front.columns[:, :3], self.behind[i][:, :, front.layout], i)
        return (bound + front.priced.T + self.offset[:, None]).max(axis=0)

    def _configured(self, front: Labels, i: int, limit: float) -> Labels:
        """Labels with every configuration of component i."""
        stage, x = self.stage, self.stage.numbers
        a, b = self.of[i], self.of[i + 1]
        source, chosen = np.nonzero(front.layout[:, None] == self.layout[None, a:b])
        chosen = chosen + a
        layout, columns = front.layout[source], front.columns[source]
        r = self.rows[chosen]
        if stage.tight:
            grown = r[:, at.STATE] + r[:, at.ACT]
            u = np.maximum(columns[:, U] + r[:, at.STATE] + r[:, at.GRAD],
                           columns[:, MOVING] + grown + r[:, at.GRAD] + r[:, at.TRANS])  # fmt: skip
            w = columns[:, W] + grown
            fits = u + stage.standing[i][layout] <= x.capacity * _CLOSE
            fits &= w + stage.working[i][layout] <= x.capacity * _CLOSE
            source, chosen, layout, columns, u, w = (v[fits] for v in (source, chosen, layout, columns, u, w))
        else:
            u = w = np.zeros(len(source))
        tighter = np.maximum if self.saving >= 0 else np.minimum
        v, c, p = clocks(columns[:, :U].T, self.sides[:, chosen], across=stage.across[i], tighter=tighter)
        grown_front = Labels(
            np.stack([v, c, p, u, w, w], axis=1), front.entry[source], layout, front.parent[source], chosen,
            front.priced[source] + self.priced[:, chosen].T,
        )  # fmt: skip
        return grown_front.select(np.flatnonzero(self._bounds(grown_front, i) < limit))


def clocks(before: Any, sides: Any, *, across: bool, tighter: Any = np.maximum) -> tuple[Any, Any, Any]:
    """The clocks V, C and P of labels behind one more component. ``sides``: its cost in front of the component at which
    the overlap is counted, at it, behind it in the same bucket, and behind that; ``across``: a bucket spans it."""
    (v, c, p), (windowed, at_it, bucket, beyond) = before, sides
    v, c, now = v + beyond, c + bucket, p + at_it
    return (v, tighter(c, now), p + windowed) if across else (tighter(v, c), now, p + windowed)
