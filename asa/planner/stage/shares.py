"""Plans of a single stage of unequal devices, however its batch is divided among them.

Weights of ranks are whole numbers, and there are too many to search them one by one. Instead the number of samples
that devices like the first one have together lies in a range. A range has a quick lower bound: compute of the slowest
device, synchronisation that cannot be hidden, the update, and traffic of even shards between layouts. The range with
the lowest bound is halved. Where it is narrow, its stage is formulated with the fewest samples that the range leaves to
devices of each kind, and solved as any stage (decision 0205). The ways that are fastest there, with these weights, are
a plan.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import count, product
from typing import Any

import numpy as np

from asa.ir.layout import Layout, lowest_terms
from asa.planner import clock
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import NARROW, Allowed, layouts
from asa.planner.stage.formulate import formulate
from asa.planner.stage.formulated import FormulatedStage
from asa.planner.stage.pareto import begins
from asa.planner.stage.problem import MS

INF = float("inf")
BySamples = Callable[[int, int], tuple[Any, Any, Any]]
_POINTS = 192
"""Largest number of sample counts that are tried; between two of them the smaller one counts."""
_HALVINGS = 14
_WIDE, _NARROW = 1 / 16, 1 / 512
"""Width of a range of samples, as a share of them, from which on its stage is formulated, and not halved any more."""
_SOLVED = 16
"""Samples of a rank from which on stages of ranges are formulated; with fewer, weights are searched one by one."""
_FIRST_S = 0.1
"""Seconds of the first search of such a stage; four times as long each time it continues."""


class DividedBounds:
    """Plans of one stage with devices of several speeds, and lower bounds on them in ms; each stage is priced once."""

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

    def least(self, width: int, num_microbatches: int) -> float:
        """The bound by compute alone on plans that divide the batch in any way; 0 if all devices are alike."""
        several = self._has_several_speeds(width)
        return self._stage(width, num_microbatches).compute_alone() * MS if several else 0.0

    def divisions(self) -> list[Divisions]:
        """All plans of one stage with such devices, a part for each width and number of microbatches. None if batches
        are divided evenly."""
        space = self._prices.space
        if not space.cluster.unequal or not space.request.uneven:
            return []
        some = [w for w in space.single_widths() if self._has_several_speeds(w)]
        return [Divisions(self._stage(w, m)) for w, m in product(some, space.microbatches())]

    def solved(self, width: int) -> bool:
        """Whether divisions among that many devices are searched, not only bounded."""
        return self._has_several_speeds(width) and self._stage(width, 1).solvable

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
    and the others. In layouts in which a shard has devices of both, each component takes the least time of any
    division.
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
        groups = [range(i, i + y.inner) for y in whole if y.data > 1 for i in range(0, width, y.inner)]
        pure = all(len({kinds[r] for r in group}) == 1 for group in groups)
        enough = _SOLVED * max(prices.fewest) * width
        self.solvable = pure and len(set(kinds)) == 2 and width <= NARROW and self.samples >= enough
        """Whether devices of both kinds never have a part of the batch in common, and samples are many."""
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

    def parts(self, between: _Range | None) -> list[_Range]:
        """Ranges that are bounded next: halves of ``between``, none where it is narrow."""
        if between is None:
            return [_Range(self, 0.0, float(self.samples))]
        if between.narrow:
            return []
        middle = (between.low + between.high) / 2
        return [_Range(self, between.low, middle), _Range(self, middle, between.high)]

    def relaxed(self, low: float, high: float) -> FormulatedStage | None:
        """A stage that takes no longer than any division in which the first devices have from ``low`` to ``high``
        samples together: they have ``low`` of them, and the others what is left of ``high``. None where devices of both
        kinds have a part of the batch in common, or where a rank might have too few samples.

        Less time for compute hides less communication, but no plan gets longer by it, because a second of compute hides
        less than a second.
        """
        if not self.solvable:
            return None
        # which of them a run of ranks has is rounded to a sample
        first, others = math.ceil(low) - self._runs, self.samples - math.floor(high) - self._runs
        counts = len(self._members), len(self._others)
        if min(first // counts[0], others // max(1, counts[1])) < max(self._prices.fewest):
            return None
        width = len(self._speeds)
        weights = [others * counts[0]] * width
        for r in self._members:
            weights[r] = first * counts[1]
        prices = self._prices.at_least_on(self._m * (first + others), {width: lowest_terms(tuple(weights))})
        return FormulatedStage(formulate(prices, width, self._m, self._allowed, likely_tight=True))

    def ms(self, plan: Candidate) -> float:
        """Milliseconds of a step of a plan; infinite if it does not fit."""
        return self._prices.of(plan).cost.total_s * MS if self._prices.fits(plan) else INF

    def by_weights(self, weights: tuple[int, ...]) -> float:
        """The bound where ranks have samples in proportion to these weights."""
        share = sum(weights[r] for r in self._members) / sum(weights) * self.samples
        return self.bound((share, share))

    def bound(self, between: tuple[float, float]) -> float:
        """The bound where the first devices have between so many samples together: compute, what is paid once, and
        traffic between layouts."""
        if self._between_s is None:
            self._collect()
        assert self._between_s is not None
        # which of them a run of ranks has is rounded to a sample
        seconds = self._divided(between[0] - self._runs, between[1] + self._runs)
        sides = (seconds[self._layout, self._component] * self._passes + self._more_s)[:, self._order]
        cost = np.full((2, self._least_s.size), INF)
        cost[:, self._cells] = np.minimum.reduceat(sides, self._begin, axis=1)
        return float(_through(cost.reshape(2, *self._least_s.shape)[:, :, self._twin], self._between_s).max())

    def _divided(self, low: float, high: float) -> Any:
        """For each layout the least seconds of each component, where the first devices have at least ``low`` samples
        and the others what is left of ``high``."""
        seconds = self._least_s.copy()
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
            if others:
                least = np.maximum(least, longest(max(1.0, (self.samples - high) / len(others)), others))
            seconds[k] = np.maximum(seconds[k], self._m * self._pricer.slow * least)
        return seconds

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


class Divisions:
    """All plans of one stage of a width with a number of microbatches, whatever the weights of its ranks, for the queue
    of :mod:`asa.planner.pipeline.joint`.

    The range of samples with the lowest bound is solved a step further, or halved. ``plan`` is the fastest plan that
    came up.
    """

    def __init__(self, stage: _DividedStage) -> None:
        self._stage, self.level, self.stuck = stage, 0, False
        self.bound, self.value = stage.compute_alone() * MS, INF
        self.plan: Candidate | None = None
        self._number, self._queue = count(), list[tuple[float, int, _Range]]()

    def step(self, best: float, ends: float) -> None:
        """Raise the bound. Plans from ``best`` ms on do not count."""
        self.level += 1
        most = min(best, self.value)
        if self.level == 1:
            self._add(self._stage.parts(None))
        elif self.bound < most:
            self.stuck = not self._raise(self._queue[0][2], most, ends)
        self.bound = max(self.bound, self._queue[0][0])

    def _raise(self, some: _Range, best: float, ends: float) -> bool:
        """Raise the bound of the first range of the queue; returns whether that can be done."""
        if some.solve(best, ends):
            heapq.heapreplace(self._queue, (max(self.bound, some.bound), next(self._number), some))
            if some.plan is not None and some.value < self.value:
                self.plan, self.value = some.plan, some.value
        elif not some.narrow:
            heapq.heappop(self._queue)
            self._add(self._stage.parts(some))
        else:
            return False
        return True

    def _add(self, parts: Sequence[_Range]) -> None:
        for part in parts:
            heapq.heappush(self._queue, (max(self.bound, part.bound), next(self._number), part))


class _Range:
    """Divisions of a stage's batch in which the devices like the first one have from ``low`` to ``high`` samples
    together. ``bound``: ms that each of them takes at least; ``plan``: the fastest plan that came up."""

    def __init__(self, stage: _DividedStage, low: float, high: float) -> None:
        self._stage, self.low, self.high = stage, low, high
        self.bound, self.value = stage.bound((low, high)) * MS, INF
        self.plan: Candidate | None = None
        self._formulated: FormulatedStage | None = None
        self._begun, self._slice_s = False, _FIRST_S

    @property
    def narrow(self) -> bool:
        """Whether it is not halved any more."""
        return self.high - self.low <= max(1.0, _NARROW * self.high)

    def solve(self, best: float, ends: float) -> bool:
        """Solve the stage a step further, and raise the bound; returns whether anything was done. Plans of ``best`` ms
        or more do not count."""
        if self.high - self.low > max(1.0, _WIDE * self.high):
            return False
        if not self._begun:
            self._begun, self._formulated = True, self._stage.relaxed(self.low, self.high)
            if self._formulated is None:
                return False
            if self._formulated.solver is not None:
                self._formulated.solver.price(best)
            self._take(best)
            return True
        solver = None if self._formulated is None else self._formulated.solver
        if not self.narrow or self._formulated is None or solver is None or self._formulated.fits or solver.done:
            return False
        until, self._slice_s = min(ends, clock.now() + self._slice_s), 4 * self._slice_s
        if self._formulated.decided:
            solver.run(best, until)
        else:
            self._formulated.decide(best, until)
        self._take(best)
        return True

    def _take(self, best: float) -> None:
        """Take the bound of the solver, and its plan if that is faster than ``best`` ms."""
        x = self._formulated
        assert x is not None
        if x.solver is None:
            self.bound = INF
            return
        for solution in (x.solver.answer(best), x.unlimited):
            self.bound = max(self.bound, solution.bound)
            if solution.choice is not None and solution.value < best:
                plan = x.formulation.candidate(solution.choice)
                value = self._stage.ms(plan)
                if value < min(best, self.value):
                    self.plan, self.value = plan, value


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
        for speed, number in shards.items():
            reached = (seconds <= middle * speed).sum(axis=0)
            covered += number * np.where(reached > 0, beyond[np.maximum(0, reached - 1)], 0)
        enough = covered >= samples
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(can, low, INF)
