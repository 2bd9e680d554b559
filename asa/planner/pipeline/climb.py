"""First plans of several stages, improved one change at a time.

A change moves a cut, hands a rank to another stage, runs a stage in another manner, joins two stages or halves one,
doubles or halves the microbatches, or takes another schedule. Stages are priced once; a plan is then a clock away.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from asa.cost.pipeline import StageTimes, lower_bound, makespan
from asa.cost.pricing import Way
from asa.ir.layout import Layout
from asa.planner.pipeline.sketch import INF, Manner, Outline, Sketch
from asa.planner.pipeline.uniform import Uniform
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import MOST_IN_A_PIPELINE, Allowed, widths

_BEST = 2
"""Plans of each number of microbatches that are climbed from."""
_STEADY = 16
"""Microbatches after which a pipeline is taken to be in its steady state; what is answered is timed in full."""
_LONG = 40
"""Stages beyond which only cuts beside each other are moved."""


class Climber:
    """Prices outlines of one space, stage by stage."""

    def __init__(self, sketch: Sketch) -> None:
        self.sketch, self.prices, self.space = sketch, sketch.prices, sketch.space
        self.n, self.gpus = sketch.n, sketch.gpus
        self._stages: dict[tuple[object, ...], tuple[StageTimes, Layout, Layout] | None] = {}
        self._ways: dict[tuple[object, ...], list[Way]] = {}
        self._manners: dict[tuple[int, int], list[Manner]] = {}
        self._sent: dict[tuple[object, ...], tuple[float, float]] = {}
        self._values: dict[Outline, float] = {}
        self.widths = tuple(w for w in widths(self.gpus) if w < self.gpus)

    def seconds(self, x: Outline, below: float = INF) -> float:
        """Of a step, infinite where it does not fit or is no plan; ``below``: or if it cannot be less than that."""
        if x not in self._values:
            found = self._seconds(x, below)
            if found == INF and below < INF:
                return INF
            self._values[x] = found
        return self._values[x]

    def _seconds(self, x: Outline, below: float) -> float:
        m, p = x.num_microbatches, len(x.starts)
        schedule = self.space.strategies.schedules[x.schedule]
        if p < 2 or sum(x.widths) > self.gpus or schedule.refusal(p, m):
            return INF
        stops, offset, times, moves = (*x.starts[1:], self.n), 0, [], []
        left: Layout | None = None
        for s, (a, b, w, manner) in enumerate(zip(x.starts, stops, x.widths, x.manners, strict=True)):
            first = self._alike(offset, w)
            if first is None or not self.space.placed(offset, w):
                return INF
            found = self._stage(a, b, w, manner, m, schedule.in_flight(s, p, m), first)
            if found is None:
                return INF
            own, entry, leaving = found
            if left is not None:
                moves.append(self._handover(a, m, left, entry, offset))
            times.append(own)
            left, offset = leaving, offset + w
        if below < INF and lower_bound(times, moves, schedule, m) >= below:
            return INF
        if m <= 2 * _STEADY:
            return makespan(times, moves, schedule, m)
        # In the steady state every further microbatch takes as long.
        some, more = (makespan(times, moves, schedule, k * _STEADY) for k in (1, 2))
        return more + (m / _STEADY - 2) * (more - some)

    def _alike(self, offset: int, w: int) -> int | None:
        """Where stages of ``w`` ranks have devices like those from ``offset`` on first; None where these differ among
        themselves."""
        cluster = self.space.cluster
        if not cluster.unequal:
            return 0
        kinds = list(zip(map(cluster.speed, range(self.gpus)), cluster.memories(), strict=False))
        own = set(kinds[offset : offset + w])
        return next((k for k in range(self.gpus) if set(kinds[k : k + w]) == own), None) if len(own) == 1 else None

    def _stage(
        self, a: int, b: int, w: int, manner: Manner, m: int, flight: int, first: int
    ) -> tuple[StageTimes, Layout, Layout] | None:
        key = (a, b, w, manner, m, flight, first)
        if key not in self._stages:
            self._stages[key] = self._priced(a, b, w, manner, m, flight, first)
        return self._stages[key]

    def _priced(
        self, a: int, b: int, w: int, manner: Manner, m: int, flight: int, first: int
    ) -> tuple[StageTimes, Layout, Layout] | None:
        if not self.sketch.possible(w, m, manner)[a:b].all():
            return None
        uniform, room = self.sketch.uniform(w, m, manner, first), self.space.room(first, w, self.gpus)
        times, peak = uniform.stage(a, b, flight)
        if peak > room:
            return None
        if manner.checkpoint:
            plain = self.sketch.uniform(w, m, replace(manner, checkpoint=False), first)
            kept = self._kept(uniform, plain, a, b, flight, room - peak)
            while kept:
                some = uniform.mixed(plain, kept)
                better, peak = some.stage(a, b, flight)
                if peak <= room:
                    times, uniform = better, some
                    break
                kept = kept[: -1 - len(kept) // 8]
        self._ways[a, b, w, manner, m, flight, first] = list(uniform.ways[a:b])
        return times, uniform.ways[a].layout, uniform.ways[b - 1].layout

    def _kept(self, again: Uniform, plain: Uniform, start: int, stop: int, flight: int, room: float) -> list[int]:
        """Components that need not be computed again: those that gain most time for their memory, as many as there is
        ``room`` for."""
        own = slice(start, stop)
        more = np.maximum(1.0, flight * (plain.priced.activations[own] - again.priced.activations[own]))
        gain = (again.priced.backward[own] - plain.priced.backward[own]) / more
        allowed = [self.sketch.allowed(i, plain.ways[i]) for i in range(start, stop)]
        kept = []
        for i in np.argsort(-gain, kind="stable").tolist():
            if again.ways[start + i].checkpoint and allowed[i] and more[i] <= room:
                kept.append(start + i)
                room -= float(more[i])
        return kept

    def candidate(self, x: Outline) -> Candidate:
        """The plan that a priced outline stands for."""
        p, schedule = len(x.starts), self.space.strategies.schedules[x.schedule]
        ways: list[Way] = []
        offset = 0
        for s, (a, b, w, manner) in enumerate(zip(x.starts, (*x.starts[1:], self.n), x.widths, x.manners, strict=True)):
            flight = schedule.in_flight(s, p, x.num_microbatches)
            ways += self._ways[a, b, w, manner, x.num_microbatches, flight, self._alike(offset, w)]
            offset += w
        return Candidate(
            origin="asa", num_microbatches=x.num_microbatches, ways=tuple(ways), widths=x.widths, starts=x.starts,
            schedule=x.schedule,  # type: ignore[arg-type]
        )  # fmt: skip

    def _handover(self, cut: int, m: int, source: Layout, target: Layout, offset: int) -> tuple[float, float]:
        hop = self.space.cluster.hop(offset)
        size = self.space.profile.graph.components[cut - 1].output_bytes_per_sample
        key = (size, m, source.width, source.data, target.width, target.data, hop)
        if key not in self._sent:
            self._sent[key] = self.prices.pricer(source.width, m, self.gpus).handover(cut, source, target, offset)
        return self._sent[key]

    def climbed(self, x: Outline, ends: float) -> Outline:
        """Changed as long as that helps."""
        value, moved = self.seconds(x), True
        while moved:
            moved = False
            for other in self._beside(x):
                if time.monotonic() > ends:
                    return x
                found = self.seconds(other, value * (1 - 1e-6))
                if found < value * (1 - 1e-6):
                    x, value, moved = other, found, True
                    break
        return x

    def _beside(self, x: Outline) -> Iterator[Outline]:
        p = len(x.starts)
        yield from self._cut_elsewhere(x, 1)
        for name in self.space.schedules:
            if name != x.schedule:
                yield replace(x, schedule=name)
        for m in (x.num_microbatches // 2, 2 * x.num_microbatches):
            if 1 <= m <= min(self.space.request.global_batch, MOST_IN_A_PIPELINE):
                yield replace(x, num_microbatches=m)
        yield from self._otherwise(x)
        if p <= _LONG:
            yield from self._other_widths(x)
            yield from self._joined(x)
            yield from self._halved(x)
            yield from self._cut_elsewhere(x, 2)

    def _cut_elsewhere(self, x: Outline, far: int) -> Iterator[Outline]:
        ends = (*x.starts, self.n)
        for s in range(1, len(x.starts)):
            for start in (x.starts[s] - far, x.starts[s] + far):
                if ends[s - 1] < start < ends[s + 1] and self.space.profile.graph.cuttable(start):
                    yield replace(x, starts=(*x.starts[:s], start, *x.starts[s + 1 :]))

    def _offered(self, w: int, m: int) -> list[Manner]:
        if (w, m) not in self._manners:
            self._manners[w, m] = self.sketch.manners(w, m, lean=True)
        return self._manners[w, m]

    def _otherwise(self, x: Outline) -> Iterator[Outline]:
        for s, w in enumerate(x.widths):
            for manner in self._offered(w, x.num_microbatches):
                if manner != x.manners[s]:
                    yield replace(x, manners=(*x.manners[:s], manner, *x.manners[s + 1 :]))

    def _resized(self, x: Outline, s: int, w: int) -> Outline | None:
        """With another width of one stage, in the manner most like its own."""
        if w not in self.widths:
            return None
        old = x.manners[s]
        manner = min(
            self._offered(w, x.num_microbatches),
            key=lambda y: (y.strategy != old.strategy, y.checkpoint != old.checkpoint,
                           abs(y.tensor - old.tensor) if old.tensor < x.widths[s] or old.tensor == 1 else -y.tensor),
        )  # fmt: skip
        return replace(
            x, widths=(*x.widths[:s], w, *x.widths[s + 1 :]), manners=(*x.manners[:s], manner, *x.manners[s + 1 :])
        )

    def _other_widths(self, x: Outline) -> Iterator[Outline]:
        """A rank (or a node) from one stage to another, or to one that had none."""
        for s, w in enumerate(x.widths):
            for up in (v for v in (w + 1, w + 8) if v in self.widths):
                grown = self._resized(x, s, up)
                if grown is None:
                    continue
                yield grown
                for k, v in enumerate(x.widths):
                    if k != s and (shrunk := self._resized(grown, k, v - (up - w))) is not None:
                        yield shrunk
            for down in (v for v in (w - 1, w - 8) if v in self.widths):
                less = self._resized(x, s, down)
                if less is not None:
                    yield less

    def _joined(self, x: Outline) -> Iterator[Outline]:
        for s in range(1, len(x.starts)):
            fewer = Outline(
                x.starts[:s] + x.starts[s + 1 :], x.widths[:s] + x.widths[s + 1 :], x.manners[:s] + x.manners[s + 1 :],
                x.num_microbatches, x.schedule,
            )  # fmt: skip
            if len(fewer.starts) < 2:
                return
            yield fewer
            for k in {0, s - 1, len(fewer.starts) - 1}:
                if (found := self._resized(fewer, k, fewer.widths[k] + x.widths[s])) is not None:
                    yield found

    def _halved(self, x: Outline) -> Iterator[Outline]:
        ends = (*x.starts, self.n)
        for s, w in enumerate(x.widths):
            middle = (ends[s] + ends[s + 1]) // 2
            if w < 2 or not ends[s] < middle < ends[s + 1] or not self.space.profile.graph.cuttable(middle):
                continue
            more = Outline(
                (*x.starts[: s + 1], middle, *x.starts[s + 1 :]), (*x.widths[: s + 1], w, *x.widths[s + 1 :]),
                (*x.manners[: s + 1], x.manners[s], *x.manners[s + 1 :]), x.num_microbatches, x.schedule,
            )  # fmt: skip
            first = self._resized(more, s, w - w // 2)
            found = None if first is None else self._resized(first, s + 1, w // 2)
            if found is not None:
                yield found


def first_plans(
    prices: Prices, allowed: Allowed, best_s: float, ends: float, near: int | None = None
) -> Candidate | None:
    """The best plan of several stages that is found until ``ends``, if it is faster than ``best_s``.

    ``near``: microbatches to begin with; about as many as stages where None.
    """
    sketch = Sketch(prices, allowed, ends)
    if sketch.most < 2:
        return None
    climber, limit_s = Climber(sketch), best_s
    batch = min(prices.space.request.global_batch, MOST_IN_A_PIPELINE)
    several = (2**k for k in range(1, batch.bit_length()))
    likely = [1, *sorted(several, key=lambda m: abs(np.log2(m / (near or sketch.most))))]
    found: dict[Outline, float] = {}
    for m in likely:
        if time.monotonic() > ends:
            break
        if prices.space.strategies.schedules[sketch.schedule].refusal(2, m) or not _worth(prices, m, best_s):
            continue
        drawn = {x: climber.seconds(x) for x in sketch.plans(m)}
        for x in sorted((x for x in drawn if drawn[x] < INF), key=drawn.__getitem__)[:_BEST]:
            better = climber.climbed(x, ends)
            found[better] = climber.seconds(better)
            best_s = min(best_s, found[better])
    if not found:
        return None
    candidate = climber.candidate(min(found, key=found.__getitem__))
    price = prices.of(candidate)
    m = candidate.num_microbatches
    possible = all(w in set(prices.space.ways(i, w.layout.width, m, allowed)) for i, w in enumerate(candidate.ways))
    fits = possible and price.peak.total <= prices.capacity(candidate)
    return candidate if fits and price.cost.total_s < limit_s else None


def _worth(prices: Prices, num_microbatches: int, best_s: float) -> bool:
    """Whether compute alone leaves room below the best plan."""
    gpus = prices.space.request.gpus
    rows = [
        w * np.array(prices.compute(w, num_microbatches, gpus)) for w in widths(gpus) if w < gpus
    ]  # fmt: skip
    return num_microbatches * float(np.min(rows, axis=0).sum()) / gpus < best_s
