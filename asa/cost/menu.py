"""Prices of all ways to run all components on stages of one width: arrays with an entry for each way.

The formulas are those of :meth:`asa.cost.pricing.Pricer.price`; this module collects their inputs (:class:`Figures`).
Inputs that do not depend on the number of microbatches are computed once, and so are the memory and traffic that
strategies declare. Equal components with the same ways, such as repeated blocks, share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from asa.cost.memory.peak import margin
from asa.cost.pricing import Pricer
from asa.cost.states import StateCost, States
from asa.cost.traffic.prefetch import Gathers
from asa.cost.way import Figures, Upkeep, Way
from asa.cost.work.compute import Times
from asa.interfaces.strategy import DataStrategy
from asa.ir.graph import LayerGraph, firsts
from asa.ir.layout import Layout
from asa.ir.plan import OptimizerName


@dataclass
class PricedWays:
    """Prices as arrays with an entry for each way; seconds and bytes as in :class:`asa.cost.step.ComponentCost`.

    ``forward`` and ``backward`` include the communication that blocks in them. ``window`` is the backward compute of
    the last microbatch. ``once`` is paid once per step: it includes ``bucket``, but no gradient synchronisation.
    ``least_state`` and ``least_transient`` are lower bounds on ``state`` and ``transient`` for any choice of the
    neighbours' ways (:mod:`asa.cost.memory.together`). ``added``: bytes of accumulated gradients in ``state``.
    """

    forward: Any
    backward: Any
    bucket: Any
    once: Any
    prompt: Any
    late: Any
    window: Any
    state: Any
    activations: Any
    gradients: Any
    transient: Any
    least_state: Any
    least_transient: Any
    added: Any


class Menu:
    """All ways of all components in one list: ``ways[i]`` are those of component i. For each way, ``component`` is the
    index of its component, and ``layout`` that of its layout in ``layouts``. ``twin``: for each component the first one
    that is equal, with the same ways and equal neighbours. ``saving`` marks ways with a checkpoint that differ from
    another way in nothing else: where ``forgetting(component, way)`` is true; all if it is None."""

    def __init__(
        self, graph: LayerGraph, states: States, times: Times, optimizer: OptimizerName,
        ways: Sequence[Sequence[Way]], forgetting: Callable[[int, Way], bool] | None,
    ) -> None:  # fmt: skip
        self._graph, self._states, self._times = graph, states, times
        self.ways = [w for row in ways for w in row]
        self.component = np.repeat(np.arange(len(ways)), [len(row) for row in ways])
        rows = [tuple(map(id, row)) for row in ways]
        tensors = {w.tensor for row in dict(zip(rows, ways, strict=True)).values() for w in row}
        holders = {states.largest(t)[0] for t in tensors}
        self.twin = firsts((k, row, i in holders) for i, (k, row) in enumerate(zip(states.kinds, rows, strict=True)))
        distinct, pair, self.checkpoint, self.offload = _distinct_states(ways, self.twin)
        self.layouts: tuple[Layout, ...] = tuple(dict.fromkeys(w.layout for _, w in distinct))
        number = {layout: k for k, layout in enumerate(self.layouts)}
        self.layout = np.array([number[w.layout] for _, w in distinct], dtype=np.int64)[pair]
        self.saving = self.checkpoint.copy()
        if forgetting is not None:
            for at in np.flatnonzero(self.checkpoint).tolist():
                self.saving[at] = forgetting(int(self.component[at]), self.ways[at])
        self.first = np.array(self.twin)[self.component] == self.component
        """The ways of the first of all equal components, which are priced for all of them."""
        self._prices: dict[tuple[Pricer, bytes], PricedWays] = {}
        self._cells = {(i, number[way.layout]): way for i, way in reversed(distinct)}
        if distinct:
            self._price_states(distinct, pair, optimizer)

    def _price_states(self, pairs: list[tuple[int, Way]], pair: Any, optimizer: OptimizerName) -> None:
        """Compute the costs of keeping state, once for each distinct state; arguments from :func:`_distinct_states`."""
        self._pair, self._held = pair, [self._states.state_cost(i, w) for i, w in pairs]
        states, ahead = self._held, [self._states.gathers(i, w) for i, w in pairs]
        self._costs: Upkeep = _selected(_stacked([k.costs for k in states]), pair)
        update, fixed, varies, joint, repeated = [], [], [], [], []
        bucketed = [k.memory.buckets > 0 for k in states]
        for (i, way), k in zip(pairs, states, strict=True):
            update.append(self._states.update(i, way.tensor))
            varies.append(type(k.page).transient is not DataStrategy.transient)
            fixed.append(0.0 if varies[-1] else k.memory.transient)
            joint.append(way.data.degree > 1 and k.page.joint)
            repeated.append(k.memory.optimizer - self._least(i, way, k, optimizer) if joint[-1] else 0.0)
        self._update, self._fixed, self._repeated = (np.array(x, dtype=float)[pair] for x in (update, fixed, repeated))
        self._varies, self._joint, self._bucketed = (np.array(x, dtype=bool)[pair] for x in (varies, joint, bucketed))
        self._repeated = np.where(self.offload, 0.0, self._repeated)
        none = Gathers(0.0, 0.0, 0.0, 0.0)
        self._gathers: Gathers | None = _selected(_stacked([x or none for x in ahead]), pair) if any(ahead) else None

    @cached_property
    def wrapping(self) -> Any:
        """A number for each way: neighbouring components with equal numbers can be wrapped as one unit. -1 for ways
        whose memory does not depend on their neighbours."""
        return np.where(self._joint, firsts((w.layout, w.data, w.tensor, w.offload) for w in self.ways), -1)

    def _least(self, index: int, way: Way, state: StateCost, optimizer: OptimizerName) -> float:
        """Lower bound on the bytes of a component's optimizer state. All other components may be neighbours of the one
        with the largest parameter (:meth:`asa.interfaces.strategy.DataStrategy.least`)."""
        holder, others = self._states.largest(way.tensor)
        return state.page.least(state.share, way.layout.data, optimizer, others if index == holder else float("inf"))

    def enough(self, samples: Sequence[int], fewest: Any) -> Any:
        """Whether each way gives its component enough samples: an array of booleans. ``samples``: samples of a rank in
        each layout; ``fewest``: the minimum of each component."""
        return np.array(samples)[self.layout] >= np.asarray(fewest)[self.component]

    def priced(self, pricer: Pricer, which: Any) -> PricedWays:
        """Prices of the ways ``which`` (indices) on the stages of ``pricer``. Arrays are shared between calls: do not
        change them."""
        key = (pricer, which.tobytes())
        if key not in self._prices:
            self._prices[key] = self._price(pricer, which)
        return self._prices[key]

    def _price(self, pricer: Pricer, which: Any) -> PricedWays:
        if not len(which):
            return PricedWays(*[np.zeros(0)] * len(fields(PricedWays)))
        i, k = self.component[which], self.layout[which]
        cells, checkpoint = self._in_cells(pricer, which), self.checkpoint[which]
        saved, transient = (np.where(checkpoint, cells[b][k, i], cells[a][k, i]) for a, b in ((9, 11), (10, 12)))
        buffers, gathers = self._transient(pricer, which, saved), self._gathers
        x = Figures(
            upkeep=_selected(self._costs, which), gathers=None if gathers is None else _selected(gathers, which),
            forward=cells[0][k, i], backward=cells[1][k, i], again=cells[2][k, i], ahead=0.0, behind=0.0,
            update=self._update[which], floor=self._times.launches[i], inner_s=[c[k, i] for c in cells[3:5]],
            count=[c[k, i] for c in cells[5:9]], saved=saved, transient=transient, buffers=buffers,
            checkpoint=checkpoint, offload=self.offload[which],
            split=np.array([x.tensor > 1 for x in self.layouts])[k],
            single_rank=np.array([x.data == 1 for x in self.layouts])[k],
        )  # fmt: skip
        if x.gathers is not None:
            x.ahead, x.behind = self._neighbour_seconds(pricer, which, cells[:3], x.gathers)
        c = pricer.price(x)
        footprint, own = c.footprint, transient * margin()
        least = own + (buffers if pricer.states.prefetching else self._transient(pricer, which, saved, isolated=True))
        least = np.minimum(least, own + buffers) + pricer.fresh(x) - self._unmade(pricer, which)
        return PricedWays(
            forward=c.forward_s + c.forward_communication_s,
            backward=c.backward_s + c.backward_communication_s,
            bucket=c.bucket_s,
            once=c.bucket_s + c.update_s + c.update_communication_s,
            prompt=c.prompt_sync_s,
            late=c.late_sync_s,
            window=c.window_s,
            state=footprint.state,
            activations=footprint.activations,
            gradients=footprint.gradients,
            transient=footprint.transient,
            least_state=footprint.state - self._repeated[which],
            least_transient=np.maximum(least, x.upkeep.updating),
            added=(pricer.num_microbatches > 1) * x.upkeep.added,
        )

    def _unmade(self, pricer: Pricer, which: Any) -> Any:
        """For each way, the bytes of gradients that do not exist yet at the peak of the component's backward
        (:meth:`asa.cost.pricing.Pricer.without_unmade`)."""
        if pricer.num_microbatches > 1 or not pricer.times.unmade:
            return np.zeros(len(which))
        each = np.stack([pricer.keeping.unmade(x) for x in self.layouts])
        return np.where(self._bucketed[which], 0.0, each[self.layout[which], self.component[which]])

    def _neighbour_seconds(self, pricer: Pricer, which: Any, passes: Any, gathers: Gathers) -> tuple[Any, Any]:
        """For each way, the compute seconds that can hide its gathers: the forward of the component in front, and the
        backward of the one behind. ``passes``: seconds of compute, shape (pass, layout, component)."""
        i, k, last = self.component[which], self.layout[which], len(self._graph) - 1
        front, back = np.maximum(0, i - 1), np.minimum(last, i + 1)
        ahead = passes[0][k, front]
        behind = passes[1][k, back] + self.checkpoint[which] * passes[2][k, back]
        alone = np.array([self._is_priced_alone(pricer, x) for x in self.layouts])[k]
        for at in np.flatnonzero(alone * (gathers.forward + gathers.once + gathers.backward)).tolist():
            way = self.ways[int(which[at])]
            ahead[at], behind[at] = pricer.neighbour_seconds(int(i[at]), way, _selected(gathers, at))
        return ahead, behind

    @staticmethod
    def _is_priced_alone(pricer: Pricer, layout: Layout) -> bool:
        """Whether components must be priced one at a time: ranks differ in shard or speed, or tokens are split."""
        return bool(layout.weights or layout.sequence or pricer.shards.speeds)

    def _transient(self, pricer: Pricer, which: Any, saved: Any, *, isolated: bool = False) -> Any:
        """For each way, transient bytes as its strategy declares them, buffers of neighbours included. ``isolated``: as
        if no neighbour of a joint strategy ran the same way."""
        transient = self._fixed[which]
        varying = np.flatnonzero(self._varies[which])
        kinds = 2 * self._pair[which[varying]] + self.checkpoint[which[varying]]  # whether or not state is on the host
        _, first, kind = np.unique(kinds, return_index=True, return_inverse=True)
        each = np.zeros(len(first))
        for k, at in enumerate(varying[first].tolist()):
            w = int(which[at])
            way, i, state = self.ways[w], int(self.component[w]), self._held[self._pair[w]]
            same_ways = range(i, i + 1) if isolated and self._joint[w] else None
            neighbours = pricer.around.of(i, way.tensor, float(saved[at]), same_ways)
            each[k] = state.page.transient(state.share, way.layout.data, neighbours)
        transient[varying] = each[kind]
        return transient

    def _in_cells(self, pricer: Pricer, which: Any) -> Any:
        """Figures of each component in each layout that do not depend on the data strategy: shape (13, layout,
        component). Rows 0-8 are those of :meth:`asa.cost.pricing.Pricer.cell`; rows 9 and 10 are bytes saved and
        transient without a checkpoint, rows 11 and 12 with one."""
        n = len(self._graph)
        figures = np.zeros((13, len(self.layouts), n))
        used = np.zeros((len(self.layouts), n), dtype=bool)
        used[self.layout[which], self.component[which]] = True
        outputs = np.array([c.output_bytes_per_sample for c in self._graph.components])
        for k, layout in enumerate(self.layouts):
            if not used[k].any():
                continue
            one_by_one = self._is_priced_alone(pricer, layout)
            first: dict[int, int] = {}
            for i in np.flatnonzero(used[k]).tolist() if one_by_one or layout.tensor > 1 else ():
                if (twin := first.setdefault(self._states.timed[i], i)) != i:
                    figures[:, k, i] = figures[:, k, twin]
                    continue
                figures[:9, k, i] = pricer.cell(i, self._cells[self.twin[i], k])
                if one_by_one:
                    component = self._graph.components[i]
                    for at, checkpoint in ((9, False), (11, True)):
                        figures[at : at + 2, k, i] = pricer.keeping.component(component, layout, checkpoint=checkpoint)
            if not one_by_one:
                samples = pricer.local(layout)
                seconds = (*self._times.passes(samples, layout.tensor), self._times.again(samples, layout.tensor))
                figures[:3, k] = np.stack(seconds) * pricer.slowed(samples)
                saved, transient = self._times.sizes(samples, layout.tensor)
                checkpointed = np.minimum(saved, samples * outputs)
                figures[9:, k] = saved, transient, checkpointed, transient + saved - checkpointed
        return figures


def _stacked(objects: Sequence[Any]) -> Any:
    """One object of arrays for several objects of numbers, with an entry for each."""
    columns = zip(*(vars(x).values() for x in objects), strict=True)
    return type(objects[0])(*(np.array(column, dtype=float).T for column in columns))


def _selected(figures: Any, which: Any) -> Any:
    """The entries ``which`` of an object of arrays."""
    return type(figures)(*(values[..., which] for values in vars(figures).values()))


def _distinct_states(
    ways: Sequence[Sequence[Way]], twins: Sequence[int]
) -> tuple[list[tuple[int, Way]], Any, Any, Any]:  # fmt: skip
    """The distinct pairs (component, way) by how they keep state; and for each way the index of its pair, whether it
    has a checkpoint, and whether its optimizer state is on the host. Consecutive ways that differ in nothing else share
    a pair, and so do those of a component and of its twin, which comes first."""
    pairs: list[tuple[int, Way]] = []
    rows: list[Any] = []
    for i, (row, twin) in enumerate(zip(ways, twins, strict=True)):
        last: Way | None = None
        own: list[tuple[int, bool, bool]] = []
        for way in row if twin == i else ():
            if last is None or not (way.layout is last.layout and way.tensor is last.tensor and way.data is last.data):
                pairs.append((i, way))
                last = way
            own.append((len(pairs) - 1, way.checkpoint, way.offload))
        rows.append(np.array(own, dtype=np.int64).reshape(-1, 3) if twin == i else rows[twin])
    pair, checkpoint, offload = np.concatenate(rows).T
    return pairs, pair.copy(), checkpoint > 0, offload > 0
