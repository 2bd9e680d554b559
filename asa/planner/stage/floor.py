"""Lower bound on a single stage before it is formulated: every component at its best, whatever its neighbours do.

If memory may bind, it has a price, and each component minimises time plus the price of the memory that it holds. The
price with the highest bound is searched for. Without boundaries between components this is the optimum of the linear
relaxation of a multiple-choice knapsack: the least cost of each GiB above the limit, in recomputation, gathers and
smaller shards. Stages of a pipeline are bounded in the same way, all of one width at once (:func:`limited_stages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asa.cost.memory.peak import peaks
from asa.cost.menu import Menu, PricedWays
from asa.cost.pricing import Pricer
from asa.ir.cluster import Overlap
from asa.ir.units import GIB
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Allowed
from asa.planner.stage.pareto import begins
from asa.planner.stage.problem import MS

INF = float("inf")
_PRICES, _FINER = 24, 8
_LOWEST, _HIGHEST = 1e-3, 1e2
"""Range of prices of memory, in units of a step's time over the capacity; then finer around the best price."""
_EXAMINED = np.geomspace(_LOWEST, _HIGHEST, 28)
_STEADY, _WHOLE = 5, 3
"""Most prices of memory in bounds of pipelines, by the time of a microbatch and by that of a step."""
_PIVOTS = 4
"""Number of components, spread over the chain, in whose backward memory is bounded."""


@dataclass(frozen=True)
class Floor:
    """Bounds on a single stage: ms of a step, ms that are paid once per step besides compute on gradients in the last
    backward, and GiB that any choice holds.
    ``may_bind``: some choices hold more than there is. ``ways``: number of ways of all different components priced for
    it."""

    whole: float
    once: float
    memory: float
    may_bind: bool
    ways: int


def floor(prices: Prices, width: int, num_microbatches: int, allowed: Allowed) -> Floor:
    """Lower bounds on the time and memory of stages of that width."""
    space, overlap = prices.space, prices.space.cluster.overlap
    pricer = prices.pricer(width, num_microbatches)
    menu, offered, which, begin = _offered(prices, pricer, allowed)
    if len(begin) < len(space.profile.graph):
        return Floor(INF, INF, 0.0, False, int(menu.first[which].sum()))
    x, capacity = menu.priced(pricer, which), space.room(0, width, width) / GIB
    largest = np.maximum.reduceat(x.state + x.activations + x.gradients, begin).sum() + x.transient.max()
    may_bind = bool(largest / GIB > capacity)
    if may_bind:
        which = np.flatnonzero(offered)
        begin = begins(menu.component[which])
        x = menu.priced(pricer, which)
    ways = int(menu.first[which].sum())
    late, sides = _sides(x, num_microbatches, overlap)
    step_ms = float(np.minimum.reduceat(sides, begin, axis=1).sum(axis=1).max())
    once = float(np.minimum.reduceat(late - x.bucket, begin).sum()) * MS
    if not may_bind:
        return Floor(step_ms, once, 0.0, False, ways)
    memory, pivots = _least_memory(x, begin)
    bounds = [_dearer(side, largest, begin, capacity - transient) for side in sides for largest, transient in pivots]
    return Floor(max(step_ms, *bounds), once, memory, True, ways)


@dataclass(frozen=True)
class StageBounds:
    """Lower bounds in ms on all stages of one width, by their components ``start`` to ``stop - 1``: the greatest of
    ``first[row, start] + sums[row, stop] - sums[row, start] + last[row, stop - 1] - rent[row]`` over the rows."""

    sums: Any
    first: Any
    last: Any
    rent: Any

    def of_stages(self) -> Any:
        """The bounds, by ``start`` and ``stop``."""
        zero = np.zeros((len(self.sums), 1))
        start = np.concatenate([self.first, zero], axis=1) - self.sums - self.rent[:, None]
        stop = np.concatenate([zero, self.last], axis=1) + self.sums
        return (start[:, :, None] + stop[:, None, :]).max(axis=0)


@dataclass(frozen=True)
class LimitedStages:
    """Bounds on stages of one width in a pipeline, with the memory limit: ``steady`` on the time of one microbatch,
    ``whole`` on that of a step."""

    steady: StageBounds
    whole: StageBounds


def limited_stages(
    prices: Prices, ranks: range, num_microbatches: int, busy: int, allowed: Allowed, in_flight: Sequence[int],
    likely_tight: bool,
) -> list[LimitedStages]:  # fmt: skip
    """Bounds on stages of such ``ranks``, while ``busy`` ranks work, that hold the activations of so many microbatches,
    one for each number ``in_flight``: without memory and, where it may bind, at several prices of memory
    (:func:`rates`). Empty where some component cannot run. ``likely_tight``: memory is likely to bind."""
    m, space, width = num_microbatches, prices.space, len(ranks)
    pricer = prices.pricer(width, m, busy, ranks.start)
    menu, offered, which, begin = _offered(prices, pricer, allowed)
    if len(begin) < len(prices.fewest):
        return []
    place = np.unique(menu.twin, return_inverse=True)[1]  # a component is priced for all that are equal
    count, capacity, may_bind = np.bincount(place), space.room(ranks.start, width, busy) / GIB, likely_tight
    if not may_bind:
        which = which[menu.first[which]]
        begin, x = begins(menu.component[which]), menu.priced(pricer, which)
        held = x.state + max(in_flight) * x.activations + x.gradients
        may_bind = bool((np.maximum.reduceat(held, begin) @ count + x.transient.max()) / GIB > capacity)
    if may_bind:
        which = np.flatnonzero(offered & menu.first)
        begin, x = begins(menu.component[which]), menu.priced(pricer, which)
    steady, sides = [(x.forward + x.backward) * MS], _sides(x, m, space.cluster.overlap)[1]

    layouts, every = space.layouts(width, m), range(len(prices.fewest))
    edges = [e(every, layouts).transpose(1, 0, 2) for e in (pricer.edges.inlets, pricer.edges.outlets)]
    edge_ms = [[(e[0] + e[1]) * MS for e in edges], [(m * (e[0] + e[1]) + e[2]) * MS for e in edges]]

    def bounds(times: Any, ends_ms: Sequence[Any], flight: int, price: Sequence[float]) -> StageBounds:
        """A row for each of ``times`` and each price of a GiB. A first component also has the inlet of its stage, and a
        last one the outlet, and what it holds in backward alone."""
        each, count = np.array(price, dtype=float)[:, None] / GIB, len(times)
        held, moving = x.least_state + flight * x.activations, x.gradients + x.least_transient
        cost = np.concatenate([t + each * held for t in times])
        with_moving = np.concatenate([t + each * (held + moving) for t in times])
        cost, last = (np.minimum.reduceat(c, begin, axis=1)[:, place] for c in (cost, with_moving))
        first, behind = (
            np.tile((ms + each[:, :, None] * (e[3] + flight * e[4] + moved * e[5])).min(axis=2), (count, 1))
            for ms, e, moved in zip(ends_ms, edges, (0, 1), strict=True)
        )
        sums = np.concatenate([np.zeros((len(cost), 1)), np.cumsum(cost, axis=1)], axis=1)
        return StageBounds(sums, first, last - cost + behind, np.tile(each[:, 0] * GIB * capacity, count))

    def limited(flight: int) -> LimitedStages:
        held, by_pass, by_step = (x.least_state + flight * x.activations) / GIB, [0.0], [0.0]
        if may_bind:
            by_pass += rates(steady[0], held, begin, count, capacity, _STEADY)
            by_step += rates(sides.min(axis=0), held, begin, count, capacity, _WHOLE)
        return LimitedStages(bounds(steady, edge_ms[0], flight, by_pass), bounds(sides, edge_ms[1], flight, by_step))

    found = {flight: limited(flight) for flight in (dict.fromkeys(in_flight) if may_bind else in_flight[:1])}
    return [found[flight if may_bind else in_flight[0]] for flight in in_flight]


def rates(time: Any, held: Any, begin: Any, count: Any, capacity: float, most: int) -> list[float]:
    """Ms for each GiB saved: at most ``most`` slopes of the lower hull of ``time`` over memory ``held``, where each
    component takes its best way at a price. Arrays have an entry for each way; those of a component start at ``begin``,
    and ``count`` such components are in the chain. Where there are more slopes, neighbours with the least memory
    between them are merged."""
    unit = max(1e-12, float(np.minimum.reduceat(time, begin) @ count)) / max(1e-9, capacity)
    price = unit * _EXAMINED
    step = 1e-6
    prices = np.r_[price, price * (1 + step)]
    cost = np.minimum.reduceat(time + prices[:, None] * held, begin, axis=1) @ count
    memory = np.minimum.accumulate((cost[len(price) :] - cost[: len(price)]) / (step * price))
    time_of = cost[: len(price)] - price * memory
    longer, saved = np.diff(time_of), -np.diff(memory)
    some = saved > 1e-4 * max(1e-12, float(memory[0]))
    longer, saved = longer[some].tolist(), saved[some].tolist()
    while len(saved) > most:
        k = min(range(len(saved) - 1), key=lambda j: saved[j] + saved[j + 1])
        longer[k : k + 2], saved[k : k + 2] = [longer[k] + longer[k + 1]], [saved[k] + saved[k + 1]]
    return [max(0.0, a / b) for a, b in zip(longer, saved, strict=True)]


def _offered(prices: Prices, pricer: Pricer, allowed: Allowed) -> tuple[Menu, Any, Any, Any]:
    """The menu of stages, which of its ways have samples enough, the indices of those without a checkpoint that saves
    no time, and where those of each component begin."""
    menu, m = prices.menu(pricer, allowed), pricer.num_microbatches
    offered = menu.enough([prices.space.samples(layout, m) for layout in menu.layouts], prices.fewest)
    which = np.flatnonzero(offered & ~menu.saving)
    return menu, offered, which, begins(menu.component[which])


def _sides(x: PricedWays, num_microbatches: int, overlap: Overlap) -> tuple[Any, Any]:
    """Seconds of each way that are paid once per step, and its least ms of a step: where as much as can be of its own
    backward, or of its own synchronisation, is hidden. Sums over components of either are bounds."""
    sync = x.prompt + x.late
    late = x.once + sync * (1 + max(0.0, -overlap.saving) * overlap.communication_slowdown)
    work, saving = num_microbatches * (x.forward + x.backward) + late, max(0.0, overlap.saving)
    hidden = saving * np.stack([overlap.compute_slowdown * x.window, overlap.communication_slowdown * sync])
    return late, (work - hidden) * MS


def _least_memory(x: PricedWays, begin: Any) -> tuple[float, list[tuple[Any, float]]]:
    """GiB below which no choice peaks, with every component at its least in each respect, whether or not at once; and,
    for some components in whose backward the peak may be, what each way of each component holds then, with the
    transient memory of that component."""
    n, count = len(begin), np.diff(np.r_[begin, len(x.state)])
    component = np.repeat(np.arange(n), count)
    columns = [v / GIB for v in (x.least_state, x.activations, x.gradients, x.least_transient)]
    state, activations, gradients, transient = (np.minimum.reduceat(v, begin) for v in columns)
    memory = float(peaks(state, activations, gradients, transient).max())
    some = [n - 1] if not x.gradients.any() else sorted({n * k // (_PIVOTS - 1) for k in range(_PIVOTS - 1)} | {n - 1})
    moments = []
    for k in some:
        bytes_held = columns[0] + np.where(component <= k, columns[1], 0.0) + np.where(component >= k, columns[2], 0.0)
        moments.append((bytes_held, float(transient[k])))
    return memory, moments


def _dearer(time: Any, held: Any, begin: Any, capacity: float) -> float:
    """The best bound in ms over prices of a GiB: the least sum of ``time`` and of the price of memory ``held`` above
    the capacity."""
    unit = max(1e-9, abs(float(np.minimum.reduceat(time, begin).sum()))) / max(1e-9, capacity)
    price = unit * np.geomspace(_LOWEST, _HIGHEST, _PRICES)
    for _ in range(2):
        cost = np.minimum.reduceat(time + price[:, None] * held, begin, axis=1).sum(axis=1) - price * capacity
        at = int(cost.argmax())
        best = float(cost[at])
        low, high = price[max(0, at - 1)], price[min(len(price) - 1, at + 1)]
        price = np.geomspace(low, high, _FINER)
    return best
