"""Lower bound on a single stage of unequal devices, however its batch is divided among them.

Weights of ranks are whole numbers, and there are too many to search them one by one. This bound holds for all of them.
The devices of each speed have some number of samples, which add up to the batch, and the slowest device determines the
time. First each component has the best division of its own. Then ranges of the number of samples on one kind of devices
are bounded, and halved where the bound is least. Synchronisation that cannot be hidden, the update, traffic of even
shards between layouts, and a price of memory are added.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np

from asa.ir.layout import Layout
from asa.planner import clock
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Allowed, layouts
from asa.planner.stage.pareto import begins
from asa.planner.stage.problem import MS

INF = float("inf")
BySamples = Callable[[int, int], tuple[Any, Any, Any]]
_POINTS = 192
"""Largest number of sample counts that are tried; between two of them the smaller one counts."""
_HALVINGS = 26
_NARROW = 1 / 512
"""Width of a range of samples, as a share of them, that is not halved any more."""
_PIVOTS = 4
"""Number of components, spread over the chain, in whose backward memory is bounded."""
_PRICES, _FINER = 16, 8
_LOWEST, _HIGHEST = 1e-3, 1e2
"""Numbers of prices of memory, and their range in units of a step's time over the capacity; then around the best."""


class DividedBounds:
    """Lower bounds in ms on plans of one stage with devices of several speeds; each stage is looked at once."""

    def __init__(self, prices: Prices, allowed: Allowed) -> None:
        self._prices, self._allowed = prices, allowed
        self._by_samples = cache(partial(_by_samples, prices))
        self._stages: dict[tuple[int, int], _DividedStage] = {}

    def given(self, width: int, num_microbatches: int, weights: tuple[int, ...]) -> float:
        """The bound on plans that divide the batch by these weights, evenly if they are empty; 0 if all devices of the
        stage are alike."""
        if not self._has_several_speeds(width):
            return 0.0
        return self._stage(width, num_microbatches).by_weights(weights or (1,) * width) * MS

    def free(self, ends: float = INF, enough: float = INF) -> float:
        """The bound on plans with any weights. Infinite if no stage has such devices, or if batches are divided evenly.
        The lowest bound is raised first, until it is ``enough`` ms or until the time ``ends``."""
        space = self._prices.space
        if not space.cluster.unequal or not space.request.uneven:
            return INF
        some = [w for w in space.single_widths() if self._has_several_speeds(w)]
        queue: list[tuple[float, int, _DividedStage, tuple[float, float] | None]] = []
        for number, (w, m) in enumerate(product(some, space.microbatches())):
            stage = self._stage(w, m)
            queue.append((stage.compute_alone(), number, stage, None))
        heapq.heapify(queue)
        while queue:
            bound_s, number, stage, between = heapq.heappop(queue)
            parts = stage.parts(between)
            if not parts or bound_s * MS >= enough or clock.now() > ends:
                return bound_s * MS
            for part in parts:
                heapq.heappush(queue, (max(bound_s, stage.bound(part)), number, stage, part))
        return INF

    def _has_several_speeds(self, width: int) -> bool:
        return len(set(self._prices.space.cluster.speeds(range(width)) or (1.0,))) > 1

    def _stage(self, width: int, num_microbatches: int) -> _DividedStage:
        key = (width, num_microbatches)
        if key not in self._stages:
            self._stages[key] = _DividedStage(self._prices, self._allowed, *key, self._by_samples)
        return self._stages[key]


class _DividedStage:
    """Lower bounds in seconds on stages of one width and number of microbatches, by the samples of a microbatch that
    the devices like the first one have together.

    All components of a stage divide the batch alike. A component takes at least the time of the slower of those devices
    and the others, and both hold at least the activations of their samples, for which memory has a price. In layouts in
    which a shard has devices of both, each component takes the least time of any division.
    """

    def __init__(self, prices: Prices, allowed: Allowed, width: int, m: int, by_samples: BySamples) -> None:
        space = prices.space
        self._prices, self._allowed, self._m = prices, allowed, m
        self._pricer, whole = prices.pricer(width, m), layouts(width)
        by_tokens = [replace(y, sequence=True) for y in whole if y.tensor > 1 and space.by_tokens]
        self._some = (*whole, *by_tokens)
        self.samples = space.request.global_batch // m
        self._speeds = space.cluster.speeds(range(width))
        rooms = [space.room(r, 1, width) for r in range(width)]
        kinds = list(zip(self._speeds, rooms, strict=True))
        self._members = [r for r in range(width) if kinds[r] == kinds[0]]
        self._others = [r for r in range(width) if kinds[r] != kinds[0]]
        self._runs = sum(r - 1 not in self._members for r in self._members)
        self._room = rooms[0], sum(rooms[r] for r in self._others) / max(1, len(self._others))
        self._least_s = np.full((len(self._some), len(prices.fewest)), INF)
        for k, layout in enumerate(self._some):
            if layout.data <= self.samples:
                shards = Counter(min(self._speeds[i : i + layout.inner]) for i in range(0, width, layout.inner))
                self._least_s[k] = _longest(*by_samples(layout.tensor, self.samples)[:2], self.samples, shards)
        self._by_samples = by_samples
        self._least_s *= m * self._pricer.slow
        self._between_s: list[Any] | None = None

    def compute_alone(self) -> float:
        """The least time of compute, component by component."""
        return float(self._least_s.min(axis=0).sum())

    def parts(self, between: tuple[float, float] | None) -> list[tuple[float, float]]:
        """Ranges of samples that are bounded next: halves of ``between``, none where it is narrow."""
        if between is None:
            return [(0.0, float(self.samples))]
        low, high = between
        middle = (low + high) / 2
        return [] if high - low <= max(1.0, _NARROW * high) else [(low, middle), (middle, high)]

    def by_weights(self, weights: tuple[int, ...]) -> float:
        """The bound where ranks have samples in proportion to these weights."""
        share = sum(weights[r] for r in self._members) / sum(weights) * self.samples
        return self.bound((share, share))

    def bound(self, between: tuple[float, float]) -> float:
        """The bound where the first devices have between so many samples together: compute, what is paid once, traffic
        between layouts, and memory."""
        if self._between_s is None:
            self._collect()
        assert self._between_s is not None
        # which of them a run of ranks has is rounded to a sample
        rows, other_rows, seconds = self._divided(between[0] - self._runs, between[1] + self._runs)
        sides = seconds[self._layout, self._component] * self._passes + self._more_s
        best, prices = 0.0, np.geomspace(_LOWEST, _HIGHEST, _PRICES) * self.compute_alone()
        kinds = (rows, self._room[0]), (other_rows, self._room[1])
        for side, (each_rows, room), pivot in product(sides, kinds, self._pivots):
            # held in the backward of the component ``pivot``: by components in front of it, by itself, and behind it
            shard = each_rows[self._layout]
            forward = self._state + self._each * shard
            moving = self._gradients + self._transient * np.minimum(1.0, shard / self._even)
            held = np.stack([forward, forward + moving, self._state + self._gradients])
            where = np.sign(np.arange(len(self._twin)) - pivot) + 1
            price = np.r_[0.0, prices / max(1.0, room)]
            for _ in range(2):
                cost = np.full((len(price), 3, self._least_s.size), INF)
                each = (side + price[:, None, None] * held)[:, :, self._order]
                cost[:, :, self._cells] = np.minimum.reduceat(each, self._begin, axis=2)
                steps = cost.reshape(len(price), 3, *self._least_s.shape)[:, where, :, self._twin]
                bounds = _through(np.moveaxis(steps, 0, -1), self._between_s) - price * room
                top = int(bounds.argmax())
                best = max(best, float(bounds[top]))
                if not top:
                    break
                price = np.geomspace(price[max(1, top - 1)], price[min(len(price) - 1, top + 1)], _FINER)
        return best

    def _divided(self, low: float, high: float) -> tuple[Any, Any, Any]:
        """For each layout: samples that a shard of the first devices has at least on average, and one of the others;
        and the least seconds of each component."""
        rows, other_rows, seconds = np.ones(len(self._some)), np.ones(len(self._some)), self._least_s.copy()
        for k, y in enumerate(self._some):
            if y.data > self.samples:
                continue
            holders = Counter(r // y.inner for r in self._members)
            others = Counter(r // y.inner for r in self._others)
            grid, table, _ = self._tables[y.tensor]

            def longest(each: float, shards: Counter[int], grid: Any = grid, table: Any = table, y: Layout = y) -> Any:
                speed = max(min(self._speeds[i * y.inner : (i + 1) * y.inner]) for i in shards)
                return table[np.searchsorted(grid, math.ceil(each - 1e-9), side="right") - 1] / speed

            least = longest(max(1.0, low / len(holders)), holders)
            rows[k] = max(1.0, low * min(holders.values()) / len(self._members))
            if others:
                least = np.maximum(least, longest(max(1.0, (self.samples - high) / len(others)), others))
                other_rows[k] = max(1.0, (self.samples - high) * min(others.values()) / len(self._others))
            seconds[k] = np.maximum(seconds[k], self._m * self._pricer.slow * least)
        return rows, other_rows, seconds

    def _collect(self) -> None:
        """Collect what does not depend on the division of the batch."""
        pricer, some, m, n = self._pricer, self._some, self._m, len(self._prices.fewest)
        menu = self._prices.menu(pricer, self._allowed)
        number_of = np.array([some.index(replace(y, weights=())) for y in menu.layouts])
        which = np.flatnonzero(menu.first & np.isfinite(self._least_s[number_of[menu.layout], menu.component]))
        x = menu.priced(pricer, which)
        self._twin, self._again = np.array(menu.twin), menu.checkpoint[which]
        self._component, self._layout = menu.component[which], number_of[menu.layout[which]]
        cells = self._layout * n + self._component
        self._order = np.argsort(cells, kind="stable")
        self._begin = begins(cells[self._order])
        self._cells = cells[self._order][self._begin]
        self._even = np.array([pricer.shards.largest(y) for y in some])[self._layout]
        self._state, self._each = x.least_state, x.activations / self._even
        self._gradients, self._transient = x.gradients, x.least_transient
        self._pivots = sorted({n * k // (_PIVOTS - 1) for k in range(_PIVOTS - 1)} | {n - 1})
        self._tables = {t: self._by_samples(t, self.samples) for t in {y.tensor for y in some}}
        # where as much as can be of the last backward, or of the synchronisation, is hidden: sums of either are bounds
        overlap, sync = self._prices.space.cluster.overlap, x.prompt + x.late
        saving = max(0.0, overlap.saving)
        share = np.stack([self._tables[y.tensor][2] for y in some])[self._layout, self._component]
        window = saving * overlap.compute_slowdown / m * np.where(self._again, 1.0, 1.0 - share)
        passes = 1 + self._again * share
        self._passes = np.stack([passes - window, passes])
        late = x.once + sync * (1 + max(0.0, -overlap.saving) * overlap.communication_slowdown)
        blocked = np.maximum(0.0, x.forward + x.backward - self._compute_alike())
        more_s = m * blocked + late
        self._more_s = np.stack([more_s, more_s - saving * overlap.communication_slowdown * sync])
        # uneven shards send more between layouts, because the largest has more than an even one
        self._between_s = []
        for size, ends in pricer.states.forms[1:n]:
            between = pricer.states.between(ends, some, some)
            sent = between.priced(pricer.edges.links, [pricer.microbatch * size], pricer.edges.keeping.part)
            self._between_s.append(m * (sent.forward + sent.backward).reshape(len(some), -1))

    def _compute_alike(self) -> Any:
        """Seconds of compute of a microbatch that is divided evenly, for each way. What a way takes beyond it, such as
        collectives, is no less with another division."""
        pricer, seconds = self._pricer, np.zeros((2, *self._least_s.shape))
        for k, y in enumerate(self._some):
            if y.data <= self.samples:
                samples = pricer.shards.largest(y)
                passes = pricer.times.passes(samples, y.tensor, by_tokens=y.sequence).sum(axis=0)
                again = pricer.times.again(samples, y.tensor, by_tokens=y.sequence)
                seconds[:, k] = np.stack([passes, passes + again]) * pricer.slowed(samples, min(self._speeds))
        return seconds[self._again.astype(int), self._layout, self._component]


def _through(step_s: Any, between_s: Sequence[Any]) -> Any:
    """The least sum through layouts, for each row of ``step_s`` (row x layout x component)."""
    front = step_s[:, :, 0]
    for i, each in enumerate(between_s, 1):
        front = (front[:, :, None] + each).min(axis=1) + step_s[:, :, i]
    return front.min(axis=1)


def _by_samples(prices: Prices, tensor: int, samples: int) -> tuple[Any, Any, Any]:
    """Numbers of samples of a shard; for each, seconds of the components with as many samples or more; and the least
    share of a second forward in them."""
    grid = np.unique(np.geomspace(1, max(1, samples), _POINTS).astype(np.int64))
    prices.prepare_on(grid.tolist(), tensor)
    seconds = np.stack([prices.compute_on(int(n), tensor) for n in grid])
    repeated = np.stack([prices.repeated(int(n), tensor) for n in grid]).min(axis=0)
    return grid, np.minimum.accumulate(seconds[::-1])[::-1], repeated


def _longest(grid: Any, seconds: Any, samples: int, shards: Counter[float]) -> Any:
    """The least seconds, for each component, of the slowest shard in forward and backward of ``samples`` samples.
    Other arguments as :func:`_by_samples` returns them."""
    beyond = np.r_[grid[1:] - 1, samples]
    low, high = seconds[0] / min(shards), seconds[-1] / min(shards)  # each shard has at least one sample
    can = np.isfinite(high)
    low, high = np.where(can, low, 0.0), np.where(can, high, 0.0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        covered = np.zeros(seconds.shape[1])
        for speed, count in shards.items():
            reached = (seconds <= middle * speed).sum(axis=0)
            covered += count * np.where(reached > 0, beyond[np.maximum(0, reached - 1)], 0)
        enough = covered >= samples
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(can, low, INF)
