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
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from asa.planner import clock
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Allowed, layouts
from asa.planner.stage.pareto import begins
from asa.planner.stage.problem import MS

INF = float("inf")
_POINTS = 192
"""Largest number of sample counts that are tried; between two of them the smaller one counts."""
_HALVINGS = 26
_NARROW = 1 / 512
"""Width of a range of samples, as a share of them, that is not halved any more."""
_PRICES, _FINER = 16, 8
_LOWEST, _HIGHEST = 1e-3, 1e2
"""Numbers of prices of memory, and their range in units of a step's time over the capacity; then around the best."""


def free_bound(prices: Prices, allowed: Allowed, ends: float = INF, enough: float = INF) -> float:
    """Lower bound in ms on every plan of one stage with devices of several speeds, whatever its weights. Infinite if no
    stage has such devices, or if batches are divided evenly. The lowest bound is raised first, until it is ``enough``
    ms or until the time ``ends``."""
    space = prices.space
    if not space.cluster.unequal or not space.request.uneven:
        return INF
    some = [w for w in space.single_widths() if len(set(space.cluster.speeds(range(w)) or (1.0,))) > 1]
    queue: list[tuple[float, int, _DividedStage, tuple[float, float] | None]] = []
    for number, (w, m) in enumerate(product(some, space.microbatches())):
        stage = _DividedStage(prices, allowed, w, m)
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


class _DividedStage:
    """Lower bounds in seconds on stages of one width and number of microbatches, by the samples of a microbatch that
    the devices like the first one have together.

    All components of a stage divide the batch alike. A component takes at least the time of the slower of those devices
    and the others, and both hold at least the activations of their samples, for which memory has a price. In layouts in
    which a shard has devices of both, each component takes the least time of any division.
    """

    def __init__(self, prices: Prices, allowed: Allowed, width: int, m: int) -> None:
        space = prices.space
        self._prices, self._allowed, self._m = prices, allowed, m
        self._pricer, self._some = prices.pricer(width, m), layouts(width)
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
                self._least_s[k] = _longest(prices, layout.tensor, self.samples, shards)
        self._least_s *= m * self._pricer.slow
        self._between_s: list[Any] = []

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

    def bound(self, between: tuple[float, float]) -> float:
        """The bound where the first devices have between so many samples together: compute, what is paid once, traffic
        between layouts, and memory."""
        if between == (0.0, float(self.samples)):
            self._collect()
        # which of them a run of ranks has is rounded to a sample
        rows, other_rows, seconds = self._divided(between[0] - self._runs, between[1] + self._runs)
        at = (self._layout, self._component)
        slower = seconds[at] * (1 + self._again * self._repeated[at]) + self._more_s
        best, prices = 0.0, np.geomspace(_LOWEST, _HIGHEST, _PRICES) * self.compute_alone()
        for each_rows, room in ((rows, self._room[0]), (other_rows, self._room[1])):
            held = self._state + self._each * each_rows[self._layout]
            price = np.r_[0.0, prices / max(1.0, room)]
            for _ in range(2):
                cost = np.full((len(price), self._least_s.size), INF)
                each = (slower + price[:, None] * held)[:, self._order]
                cost[:, self._cells] = np.minimum.reduceat(each, self._begin, axis=1)
                steps = cost.reshape(len(price), *self._least_s.shape)[:, :, self._twin]
                bounds = _through(steps, self._between_s) - price * room
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
            holders = len({r // y.inner for r in self._members})
            if holders * y.inner != len(self._members) or y.data > self.samples:
                continue
            grid, table, _ = self._tables[y.tensor]
            rows[k] = max(1.0, low / holders)
            own = table[np.searchsorted(grid, math.ceil(rows[k] - 1e-9), side="right") - 1]
            longest = own / min(self._speeds[r] for r in self._members)
            if rest := y.data - holders:
                other_rows[k] = max(1.0, (self.samples - high) / rest)
                theirs = table[np.searchsorted(grid, math.ceil(other_rows[k] - 1e-9), side="right") - 1]
                longest = np.maximum(longest, theirs / max(self._speeds[r] for r in self._others))
            seconds[k] = np.maximum(seconds[k], self._m * self._pricer.slow * longest)
        return rows, other_rows, seconds

    def _collect(self) -> None:
        """Collect what does not depend on the division of the batch."""
        pricer, some, m, n = self._pricer, self._some, self._m, len(self._prices.fewest)
        menu = self._prices.menu(pricer, self._allowed)
        number_of = np.array([some.index(replace(y, weights=(), sequence=False)) for y in menu.layouts])
        which = np.flatnonzero(menu.first & np.isfinite(self._least_s[number_of[menu.layout], menu.component]))
        x = menu.priced(pricer, which)
        self._twin, self._again = np.array(menu.twin), menu.checkpoint[which]
        self._component, self._layout = menu.component[which], number_of[menu.layout[which]]
        cells = self._layout * n + self._component
        self._order = np.argsort(cells, kind="stable")
        self._begin = begins(cells[self._order])
        self._cells = cells[self._order][self._begin]
        # what a way takes beyond the cheapest with the same compute does not depend on the division
        both, alike = x.forward + x.backward, (n * menu.layout[which] + self._component) * 2 + self._again
        least = np.full(2 * n * len(menu.layouts), INF)
        np.minimum.at(least, alike, both)
        overlap = self._prices.space.cluster.overlap
        once = x.once + (x.prompt + x.late) * (1 - overlap.communication_slowdown * overlap.saving)
        self._more_s = m * (both - least[alike]) + np.maximum(0.0, once)  # what no backward hides
        even = np.array([pricer.shards.largest(y) for y in some])
        self._state, self._each = x.least_state, x.activations / even[self._layout]
        self._tables = {t: _by_samples(self._prices, t, self.samples) for t in {y.tensor for y in some}}
        self._repeated = np.stack([self._tables[y.tensor][2] for y in some])
        if self._prices.space.by_tokens:  # other layouts lie between these
            self._between_s, self._repeated = [np.zeros((len(some), len(some)))] * (n - 1), 0.0 * self._repeated
            return
        # uneven shards send more between layouts, because the largest has more than an even one
        for size, ends in pricer.states.forms[1:n]:
            between = pricer.states.between(ends, some, some)
            sent = between.priced(pricer.edges.links, [pricer.microbatch * size], pricer.edges.keeping.part)
            self._between_s.append(m * (sent.forward + sent.backward).reshape(len(some), -1))


def _through(step_s: Any, between_s: Sequence[Any]) -> Any:
    """The least sum through layouts, for each row of ``step_s`` (row x layout x component)."""
    front = step_s[:, :, 0]
    for i, each in enumerate(between_s, 1):
        front = (front[:, :, None] + each).min(axis=1) + step_s[:, :, i]
    return front.min(axis=1)


def _by_samples(prices: Prices, tensor: int, samples: int) -> tuple[Any, Any, Any]:
    """Numbers of samples of a shard; for each, seconds of the components with as many samples or more; and the least
    share of forward in them."""
    grid = np.unique(np.geomspace(1, max(1, samples), _POINTS).astype(np.int64))
    seconds = np.stack([prices.compute_on(int(n), tensor) for n in grid])
    repeated = np.stack([prices.repeated(int(n), tensor) for n in grid]).min(axis=0)
    return grid, np.minimum.accumulate(seconds[::-1])[::-1], repeated


def _longest(prices: Prices, tensor: int, samples: int, shards: Counter[float]) -> Any:
    """The least seconds, for each component, of the slowest shard in forward and backward of ``samples`` samples."""
    grid, seconds, _ = _by_samples(prices, tensor, samples)
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
