"""A choice among plans that take equally long: a total order, and the first plan in it around the answer.

Stages that wait for the slowest one can be cut and run in many ways that take equally long. Which of these a search
meets first depends on its clock. So the answer is changed, one thing at a time, as long as that gives a plan that takes
no longer and comes first in this order:

1. fewer ranks, 2. fewer stages, 3. fewer microbatches: less to run;
4. work, the sum over stages of ranks x (seconds of its own work)^2: less of it, and spread evenly, so that a stage that
   turns out slower than predicted is less likely to hold up the others;
5. the lower peak of memory;
6. strategies in the order in which they are offered, the schedule by name, then earlier cuts, narrower stages first.

Times, work and peaks count as equal within one part in a billion: they are sums of many floating-point numbers. A
change moves one cut or several in a row, takes another schedule or half as many microbatches, runs a stage in another
style or on fewer ranks, or runs one component otherwise in its layout; many of a stage at once where that is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, chain, combinations, pairwise, permutations
from math import lcm
from typing import Any

import numpy as np

from asa.cost.pipeline import lower_bound, makespan
from asa.cost.planned import StagePrice, price_stage
from asa.cost.pricing import Way
from asa.ir.codec import hashed
from asa.ir.layout import lowest_terms
from asa.planner import clock
from asa.planner.budget import ROUNDING as TIE
from asa.planner.pipeline.sketch import INF, Sketch
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.nearest import difference, similar
from asa.planner.space.space import Allowed

_SAMPLES = (16, 4, 1)
"""Numbers of samples by which the share of an unequal device is changed."""
_MOST = 60
"""Most components of an answer that is changed without a limit of time: in longer chains ties are rare and changes
expensive."""
_CHANGES = 200
"""Most changes made to one answer."""
_FRONT, _TRIED, _SLIGHTLY = 100, 20, 0.01
"""Combinations kept behind a component, and tried; weight of a stage's own time where others decide the step."""


def canonical(prices: Prices, candidate: Candidate, allowed: Allowed, ends: float = INF) -> Candidate:
    """The plan itself, or a plan that takes no longer and comes before it in the order. If there is time until
    ``ends``, no single change leads to an earlier one."""
    return _changed(prices, candidate, allowed, _Around.earlier, ends, _CHANGES)


def improved(prices: Prices, candidate: Candidate, allowed: Allowed, ends: float = INF) -> Candidate:
    """A plan that is no slower. If there is time until ``ends``, no single change makes it faster. A plan that is not
    proved optimal is often not even a local optimum."""
    return _changed(prices, candidate, allowed, _Around.faster, ends)


def _changed(
    prices: Prices, before: Candidate, allowed: Allowed,
    better: Callable[[_Around, Candidate, float], Candidate | None], ends: float, most: float = INF,
) -> Candidate:  # fmt: skip
    """The plan after at most ``most`` changes to a neighbour that is ``better``, if its full price is no worse."""
    if len(before.ways) > _MOST and ends == INF:
        return before
    around, after, count = _Around(prices, before, allowed), before, 0
    while count < most and (other := better(around, after, ends)) is not None:
        after, count = other, count + 1
    if after is before:
        return before
    price, limit_s = prices.of(after), prices.of(before).cost.total_s * (1 + 2 * TIE)
    return after if price.cost.total_s <= limit_s and prices.fits(after) else before


def _even(number: float) -> float:
    """The number rounded to nine digits."""
    return float(f"{number:.9g}")


@hashed
@dataclass(frozen=True)
class _Stage:
    """A stage of a candidate: everything its price depends on."""

    first: int
    width: int
    start: int
    num_microbatches: int
    busy: int
    in_flight: int
    ways: tuple[Way, ...]


class _Around:
    """The neighbourhood of a plan (all plans one change away), and the order of plans."""

    def __init__(self, prices: Prices, candidate: Candidate, allowed: Allowed) -> None:
        self.prices, self.space, self.allowed = prices, prices.space, allowed
        self.limit_s = prices.of(candidate).cost.total_s * (1 + TIE)
        """Longest step time of a plan, in seconds."""
        self.n = len(candidate.ways)
        self.sketch = Sketch(prices, allowed, INF)
        self._stages: dict[_Stage, StagePrice] = {}
        self._orders: dict[object, tuple[float, ...]] = {}
        self._possible: dict[tuple[int, Way, int], bool] = {}
        self._widths, self._turn = set[tuple[int, int]](), 0
        self._data = {name: k for k, name in enumerate(self.space.strategies.data)}
        self._tensor = {name: k for k, name in enumerate(self.space.strategies.tensor)}

    def before(self, x: Candidate, y: Candidate) -> bool:
        """Whether ``x`` comes before ``y``, fits, and takes no longer than the limit."""
        if (x.ranks, len(x.widths), x.num_microbatches) > (y.ranks, len(y.widths), y.num_microbatches):
            return False
        a, b = self._needs(x), self._needs(y)
        first = a < b or (a == b and self._tie_break(x) < self._tie_break(y))
        return first and self.seconds(x, self.limit_s) <= self.limit_s

    def earlier(self, x: Candidate, until: float) -> Candidate | None:
        """A neighbour of ``x`` that comes before it; None where there is none, or time is up."""
        for other in self.changes(x):
            if clock.counted() > until:
                return None
            if self.before(other, x):
                return other
        return None

    def faster(self, x: Candidate, until: float) -> Candidate | None:
        """A neighbour of ``x`` that is faster; its time becomes the limit. None where there is none, or time is up."""
        less_s = self.limit_s / (1 + TIE) * (1 - 2 * TIE)
        moves = (self._packed, self._relaid, self._recut, self._private, self._partly, self._coarse, self._fewer)
        last = moves[self._turn]  # the kind that helped last comes first, then those that are likely to help soon
        for move in (last, *(x for x in moves if x != last)):
            for other in move(x):
                if clock.counted() > until:
                    return None
                taken_s = self.seconds(other, less_s)
                if taken_s < less_s:
                    self._turn, self.limit_s = moves.index(move), taken_s * (1 + TIE)
                    return other
        return None

    def _stages_of(self, x: Candidate) -> list[_Stage]:
        m, busy, p = x.num_microbatches, self.prices.busy(x), len(x.widths)
        firsts = [0, *accumulate(x.widths[:-1])]
        schedule = self.space.strategies.schedules[x.schedule] if p > 1 else None
        return [
            _Stage(first, w, a, m, busy, schedule.in_flight(s, p, m) if schedule else 1, x.ways[a:b])
            for s, (first, w, a, b) in enumerate(
                zip(firsts, x.widths, x.starts, (*x.starts[1:], self.n), strict=True)
            )
        ]  # fmt: skip

    def _price_of(self, x: _Stage) -> StagePrice:
        price = self._stages.get(x)
        if price is None:
            pricer = self.prices.pricer(x.width, x.num_microbatches, x.busy, x.first)
            if (x.width, x.num_microbatches) not in self._widths:
                self._widths.add((x.width, x.num_microbatches))
                clock.count("pricer")
            clock.count("component", len(x.ways) * (3 if x.ways[0].layout.weights else 1))
            price = price_stage(pricer, x.start, x.ways, self.space.cluster.overlap, x.in_flight)
            self._stages[x] = price
        return price

    def _needs(self, x: Candidate) -> tuple[float, ...]:
        """The first part of the order: ranks, stages, microbatches, work and peak of memory."""
        key = x.key
        if key not in self._orders:
            stages = [self._price_of(s) for s in self._stages_of(x)]
            work = sum(w * s.cost.total_s**2 for w, s in zip(x.widths, stages, strict=True))
            peak = max(s.peak.total for s in stages)
            self._orders[key] = (x.ranks, len(x.widths), x.num_microbatches, _even(work), _even(peak))
        return self._orders[key]

    def _tie_break(self, x: Candidate) -> tuple[Any, ...]:
        """The last part of the order: schedule, cuts, widths and strategies."""
        return x.schedule, x.starts, x.widths, tuple(map(self._rank, x.ways))

    def _rank(self, way: Way) -> tuple[Any, ...]:
        return (
            self._data[way.data.strategy], way.data.degree, way.data.shards or 0, self._tensor[way.tensor.strategy],
            way.tensor.degree, way.checkpoint, way.offload, way.layout.weights,
        )  # fmt: skip

    def seconds(self, x: Candidate, most_s: float) -> float:
        """Seconds of a step; infinite where the plan does not fit, or a lower bound exceeds ``most_s``."""
        parts = self._stages_of(x)
        clock.count("plan", len(parts) + len(x.ways) / 4)
        if any(self._room(part) < 0 for part in parts):
            return INF
        return self._step_s(x, parts, most_s)

    def _room(self, x: _Stage) -> float:
        """Bytes that the ranks of a stage may hold beyond what they do; negative where it does not fit."""
        return -self.prices.excess(self._price_of(x), x.first, x.width, x.busy)

    def _step_s(self, x: Candidate, parts: Sequence[_Stage], most_s: float = INF) -> float:
        """Seconds of a step of ``x`` with the stages ``parts``, whether or not they fit; infinite over ``most_s``."""
        stages = [self._price_of(s) for s in parts]
        if len(stages) == 1:
            return stages[0].cost.total_s
        m, schedule = x.num_microbatches, self.space.strategies.schedules[x.schedule]
        times = [s.times for s in stages]
        moves = [self._moved(a, b) for a, b in pairwise(parts)]
        if lower_bound(times, moves, schedule, m) > most_s:
            return INF
        clock.count("action", m * len(parts))
        return makespan(times, moves, schedule, m)

    def _moved(self, a: _Stage, b: _Stage) -> tuple[float, float]:
        pricer = self.prices.pricer(a.width, a.num_microbatches, a.busy, a.first)
        return pricer.handover(b.start, a.ways[-1].layout, b.ways[0].layout, b.first)

    def changes(self, x: Candidate) -> Iterator[Candidate]:
        """All neighbours of ``x``, those with less to run first."""
        return chain(self._fewer(x), self._coarse(x), self._private(x))

    def _coarse(self, x: Candidate) -> Iterator[Candidate]:
        if len(x.widths) > 1:
            for s, w in enumerate(x.widths):
                yield from self._in_styles(x, s, w)
            yield from self._cut_elsewhere(x)
            for name, schedule in self.space.schedules.items():
                if name != x.schedule and not schedule.refusal(len(x.widths), x.num_microbatches):
                    yield replace(x, schedule=name)  # type: ignore[arg-type]
        yield from self._cut_otherwise(x)

    def _able(self, i: int, way: Way, m: int) -> bool:
        """Whether component ``i`` may run in this way with ``m`` microbatches."""
        key = (i, way, m)
        if key not in self._possible:
            even = replace(way.layout, weights=()) if way.layout.weights else way.layout
            self._possible[key] = (
                even in self.space.layouts(even.width, m)
                and self.space.enough(i, way.layout, m)
                and way in self.space.ways_in(i, way.layout, m)
                and self.allowed(i, way)
            )
        return self._possible[key]

    def _cut_otherwise(self, x: Candidate) -> Iterator[Candidate]:
        """Plans of a single stage of unequal devices with other batch weights: each device of one speed gets some more
        samples, and the devices of another speed together get as many fewer."""
        if len(x.widths) > 1 or not self.space.cluster.unequal or not self.space.request.uneven:
            return
        width, batch = x.widths[0], self.space.request.global_batch
        weights = x.ways[0].layout.weights or (1,) * width
        speeds = [self.space.cluster.speed(r) for r in range(width)]
        rows = [Fraction(batch * w, sum(weights)) for w in weights]
        for step in _SAMPLES:
            for more, less in permutations(dict.fromkeys(speeds), 2):
                samples, other_samples = rows[speeds.index(more)], rows[speeds.index(less)]
                raised = Fraction(round(samples) + step)  # of a device that gets more; the others share the rest
                lowered = other_samples - (raised - samples) * speeds.count(more) / speeds.count(less)
                if raised < 1 or lowered < 1:
                    continue
                new = [raised if s == more else lowered if s == less else r for r, s in zip(rows, speeds, strict=True)]
                scale = lcm(*(x.denominator for x in new))
                cut = lowest_terms(tuple(int(x * scale) for x in new))
                ways = tuple(replace(w, layout=replace(w.layout, weights=cut)) for w in x.ways)
                if all(self.space.enough(i, w.layout, x.num_microbatches) for i, w in enumerate(ways)):
                    yield replace(x, ways=ways)

    def _fewer(self, x: Candidate) -> Iterator[Candidate]:
        m = x.num_microbatches
        if len(x.widths) == 1:
            return
        # On unequal devices a stage has devices of one kind, so its width stays.
        for s, w in enumerate(() if self.space.cluster.unequal else x.widths):
            for less in sorted(v for v in self.space.several(self.space.request.gpus) if v < w):
                yield from self._in_styles(x, s, less)
        if m // 2 not in self.space.microbatches():
            return
        if self.space.strategies.schedules[x.schedule].refusal(len(x.widths), m // 2):
            return
        if all(self._able(i, w, m // 2) for i, w in enumerate(x.ways)):
            yield replace(x, num_microbatches=m // 2)

    def _in_styles(self, x: Candidate, s: int, w: int) -> Iterator[Candidate]:
        """Plans whose stage ``s`` has ``w`` ranks and runs all its components in one style."""
        m, a, b = x.num_microbatches, x.starts[s], (*x.starts[1:], self.n)[s]
        widths = (*x.widths[:s], w, *x.widths[s + 1 :])
        if not all(self.space.placed(o, v) for o, v in zip((0, *accumulate(widths[:-1])), widths, strict=True)):
            return
        for style in self.sketch.styles(w, m, save_memory=True):
            if self.sketch.possible(w, m, style)[a:b].all():
                ways = tuple(self.sketch.way(i, w, style) for i in range(a, b))
                if all(self._able(i, way, m) for i, way in enumerate(ways, a)):
                    yield replace(x, widths=widths, ways=(*x.ways[:a], *ways, *x.ways[b:]))

    def _partly(self, x: Candidate) -> Iterator[Candidate]:
        """Plans in which the first or the last components of a stage run in one style, plain styles first."""
        m, stages = x.num_microbatches, zip(x.starts, (*x.starts[1:], self.n), x.widths, strict=True)
        runs = [(stage, style) for stage in stages for style in self.sketch.styles(stage[2], m, save_memory=True)]
        for (a, b, w), style in sorted(runs, key=lambda r: r[1].checkpoint or r[1].strategy != "replicate"):
            cut = x.ways[a].layout.weights
            ways = [self.sketch.way(i, w, style) for i in range(a, b)]
            ways = [replace(v, layout=replace(v.layout, weights=cut)) for v in ways] if cut else ways
            able = [self._able(i, way, m) for i, way in enumerate(ways, a)]
            for i in range(a + 1, b):
                if all(able[: i - a]):
                    yield replace(x, ways=(*x.ways[:a], *ways[: i - a], *x.ways[i:]))
                if all(able[i - a :]):
                    yield replace(x, ways=(*x.ways[:i], *ways[i - a :], *x.ways[b:]))

    def _cut_elsewhere(self, x: Candidate) -> Iterator[Candidate]:
        """Plans with one cut moved to any place between its neighbours, or with several cuts in a row moved by one
        component. For equal components in stages of equal width these changes suffice to reach the least work, which is
        L-natural convex in the cuts."""
        ends = (*x.starts, self.n)
        for s in range(1, len(x.starts)):
            for start in range(ends[s - 1] + 1, ends[s + 1]):
                if start != x.starts[s]:
                    yield from self._cut(x, (*x.starts[:s], start, *x.starts[s + 1 :]))
        for s, t in combinations(range(1, len(x.starts) + 1), 2):
            if t > s + 1:
                for by in (-1, 1):
                    yield from self._cut(x, (*x.starts[:s], *(c + by for c in x.starts[s:t]), *x.starts[t:]))

    def _cut(self, x: Candidate, starts: tuple[int, ...]) -> Iterator[Candidate]:
        """The plan with other cuts. A component that moves to another stage keeps its way if possible, else it takes
        the one most like its neighbour's there."""
        if not all(a < b for a, b in pairwise((*starts, self.n))) or not all(
            map(self.space.profile.graph.cuttable, starts[1:])
        ):
            return
        m, ways, cut = x.num_microbatches, list(x.ways), replace(x, starts=starts)
        for i in range(self.n):
            s, old_stage = cut.stage(i), x.stage(i)
            if s != old_stage:
                neighbour = x.ways[x.starts[s] if s > old_stage else (*x.starts[1:], self.n)[s] - 1]
                kept = ways[i].layout.width == x.widths[s] and self._able(i, ways[i], m)
                new_way = ways[i] if kept else similar(self.space, i, neighbour, m, self.allowed)
                if new_way is None:
                    return
                ways[i] = new_way
        yield replace(cut, ways=tuple(ways))

    def _private(self, x: Candidate) -> Iterator[Candidate]:
        """Plans in which one component has another way with the same layout."""
        for i, way in enumerate(x.ways):
            for other in self.space.ways_in(i, way.layout, x.num_microbatches):
                if other != way and self._able(i, other, x.num_microbatches):
                    yield x.with_way(i, other)

    def _packed(self, x: Candidate) -> Iterator[Candidate]:
        """Plans in which many components of a stage have other ways with the same layouts, to save time."""
        for s in range(len(x.widths)):
            yield from self._combined(x, s, least_s=0.0)

    def _recut(self, x: Candidate) -> Iterator[Candidate]:
        """Plans with other cuts, in which each stage that does not fit has other ways with the same layouts."""
        for other in self._cut_elsewhere(x):
            parts, new = self._stages_of(other), other
            if self._step_s(other, parts, self.limit_s) < self.limit_s:
                for s in (s for s, part in enumerate(parts) if self._room(part) < 0):
                    new = next((y for y in self._combined(new, s, -INF) if self._room(self._stages_of(y)[s]) >= 0), new)
                yield new

    def _combined(self, x: Candidate, s: int, least_s: float) -> Iterator[Candidate]:
        """Plans in which components of stage ``s`` have other ways with the same layouts: those that save most time,
        over ``least_s`` seconds, in the memory there is, as in a knapsack, if what changes save and hold adds up."""
        parts = self._stages_of(x)
        part, offered = parts[s], list[list[Way]]()
        saved_s, held, picked = np.zeros(1), np.zeros(1), np.zeros((1, 0), dtype=np.int64)
        for k, way in enumerate(part.ways):
            i, m = part.start + k, x.num_microbatches
            some = [way, *(w for w in self.space.ways_in(i, way.layout, m) if w != way and self._able(i, w, m))]
            stages = [replace(part, ways=(*part.ways[:k], w, *part.ways[k + 1 :])) for w in some]
            slower_s = np.array([self._step_s(x, [*parts[:s], y, *parts[s + 1 :]]) for y in stages])
            slower_s += _SLIGHTLY * np.array([self._price_of(y).cost.total_s for y in stages])
            more = np.array([self._price_of(y).most for y in stages])
            saved_s = np.add.outer(saved_s, slower_s[0] - slower_s).ravel()
            held = np.add.outer(held, more - more[0]).ravel()
            order = np.lexsort((held, -saved_s))
            front = order[np.r_[True, held[order][1:] < np.minimum.accumulate(held[order])[:-1]]]
            front = front[np.linspace(0, len(front) - 1, min(len(front), _FRONT)).astype(np.int64)]
            picked = np.column_stack([picked[front // len(some)], front % len(some)])
            saved_s, held = saved_s[front], held[front]
            offered.append(some)
            clock.count("stage")
        for row in picked[(saved_s > least_s) & (held <= self._room(part))][:_TRIED].tolist():
            ways = (some[j] for some, j in zip(offered, row, strict=True))
            yield replace(x, ways=(*x.ways[: part.start], *ways, *x.ways[part.start + len(row) :]))

    def _relaid(self, x: Candidate) -> Iterator[Candidate]:
        """Plans in which one component has another layout, and the way there that is most like its own: first those
        with most parameters, in the layouts with fewest copies of them."""
        m, components = x.num_microbatches, self.space.profile.graph.components
        for i in sorted(range(self.n), key=lambda i: -components[i].parameter_bytes):
            way = x.ways[i]
            for layout in sorted(self.space.layouts(way.layout.width, m), key=lambda y: (y.data, -y.tensor)):
                some = self.space.ways_in(i, replace(layout, weights=way.layout.weights), m)
                other = min((v for v in some if self._able(i, v, m)), key=partial(difference, way), default=None)
                if other is not None and other.layout != way.layout:
                    yield x.with_way(i, other)
