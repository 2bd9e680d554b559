"""Local search from the first pipeline plans: one change at a time, as long as it helps.

A change moves one cut, or one rank to another stage or out of use, gives a stage another style, joins two stages or
halves one, takes twice or half the microbatches, or another schedule. Each stage is priced once, so that a further plan
costs one evaluation of the pipeline's clock (:mod:`asa.cost.pipeline`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np

from asa.cost.pipeline import StageTimes, lower_bound, makespan
from asa.cost.pricing import Way
from asa.ir.layout import Layout
from asa.planner import clock
from asa.planner.pipeline.sketch import INF, PipelineOutline, Sketch, StageStyle
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import MOST_IN_A_PIPELINE, Allowed

_BEST = 2
"""Starting plans of the local search for each number of microbatches, and plans that are returned."""
_CUTS = 100
"""Most cuts of plans whose stages differ in width, on many ranks."""
_LONG = 40
"""Stages beyond which widths and the number of stages stay, and a cut moves by one component only."""


class Climber:
    """Prices plan outlines of one space, stage by stage."""

    def __init__(self, sketch: Sketch) -> None:
        self.sketch, self.prices, self.space = sketch, sketch.prices, sketch.space
        self.n, self.gpus = sketch.n, sketch.gpus
        self._stages: dict[tuple[object, ...], tuple[StageTimes, Layout, Layout] | None] = {}
        self._ways: dict[tuple[object, ...], list[Way]] = {}
        self._sent: dict[tuple[object, ...], tuple[float, float]] = {}
        self._values: dict[PipelineOutline, float] = {}
        self._optima = set[PipelineOutline]()
        self.neighbours = Neighbours(sketch)

    def seconds(self, x: PipelineOutline, below: float = INF) -> float:
        """Seconds of a step; infinite where the plan is invalid or does not fit, or where its bound is not below
        ``below``."""
        if x not in self._values:
            seconds = self._seconds(x, below)
            if seconds == INF and below < INF:
                return INF
            self._values[x] = seconds
        return self._values[x]

    def _seconds(self, x: PipelineOutline, below: float) -> float:
        m, p = x.num_microbatches, len(x.starts)
        clock.count("plan", p)
        schedule = self.space.strategies.schedules[x.schedule]
        if p < 2 or sum(x.widths) > self.gpus or schedule.refusal(p, m):
            return INF
        stops, offset, times, moves = (*x.starts[1:], self.n), 0, [], []
        source: Layout | None = None
        for s, (a, b, w, style) in enumerate(zip(x.starts, stops, x.widths, x.styles, strict=True)):
            first = self._alike(offset, w)
            if first is None or not self.space.placed(offset, w):
                return INF
            key = (a, b, w, style, m, schedule.in_flight(s, p, m), first)
            if key not in self._stages:
                self._stages[key] = self._price_stage(*key)
            stage = self._stages[key]
            if stage is None:
                return INF
            stage_times, entry, leaving = stage
            if source is not None:
                moves.append(self._handover(a, m, source, entry, offset))
            times.append(stage_times)
            source, offset = leaving, offset + w
        if below < INF and lower_bound(times, moves, schedule, m) >= below:
            return INF
        clock.count("action", p * m)
        return makespan(times, moves, schedule, m)

    def _alike(self, offset: int, w: int) -> int | None:
        """First rank from which ``w`` ranks have devices like those from ``offset`` on; None where these differ."""
        if not self.space.cluster.unequal:
            return 0
        kinds = self.space.cluster.kinds(self.gpus)
        kind = set(kinds[offset : offset + w])
        return next((k for k in range(self.gpus) if set(kinds[k : k + w]) == kind), None) if len(kind) == 1 else None

    def _price_stage(
        self, a: int, b: int, w: int, style: StageStyle, m: int, flight: int, first: int
    ) -> tuple[StageTimes, Layout, Layout] | None:
        priced = self.sketch.stage(a, b, w, style, m, flight, first)
        if priced is None:
            return None
        times, uniform = priced
        self._ways[a, b, w, style, m, flight, first] = list(uniform.ways[a:b])
        return times, uniform.ways[a].layout, uniform.ways[b - 1].layout

    def candidate(self, x: PipelineOutline) -> Candidate:
        """The full plan of an outline that was priced."""
        p, schedule = len(x.starts), self.space.strategies.schedules[x.schedule]
        ways: list[Way] = []
        offset = 0
        for s, (a, b, w, style) in enumerate(zip(x.starts, (*x.starts[1:], self.n), x.widths, x.styles, strict=True)):
            flight = schedule.in_flight(s, p, x.num_microbatches)
            ways += self._ways[a, b, w, style, x.num_microbatches, flight, self._alike(offset, w)]
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

    def climb(self, x: PipelineOutline, ends: float) -> PipelineOutline:
        """A local optimum: neighbours of ``x`` are taken as long as one is faster."""
        value, moved = self.seconds(x), True
        while moved and x not in self._optima:
            moved = False
            for other in self.neighbours.of(x):
                if clock.counted() > ends:
                    return x
                seconds = self.seconds(other, value * (1 - 1e-6))
                if seconds < value * (1 - 1e-6):
                    x, value, moved = other, seconds, True
                    break
        self._optima.add(x)
        return x


class Neighbours:
    """Outlines that differ from a given one in one change, whether they fit or not."""

    def __init__(self, sketch: Sketch) -> None:
        self.sketch, self.space, self.n = sketch, sketch.space, sketch.n
        self.widths = tuple(w for w in sketch.space.several(sketch.gpus) if w < sketch.gpus)

    def of(self, x: PipelineOutline) -> Iterator[PipelineOutline]:
        """Neighbours of ``x``, the most promising first."""
        p = len(x.starts)
        yield from self._cut_elsewhere(x, 1)
        for name in self.space.schedules:
            if name != x.schedule:
                yield replace(x, schedule=name)
        for m in (x.num_microbatches // 2, 2 * x.num_microbatches):
            if m <= MOST_IN_A_PIPELINE and m in self.space.microbatches():
                yield replace(x, num_microbatches=m)
        for s, w in enumerate(x.widths):
            for style in (y for y in self._offered(w, x.num_microbatches) if y != x.styles[s]):
                yield replace(x, styles=(*x.styles[:s], style, *x.styles[s + 1 :]))
        if p <= _LONG:
            yield from self._other_widths(x)
            yield from self._joined(x)
            yield from self._halved(x)
            yield from self._cut_elsewhere(x, 2)
            yield from self._cuts_in_a_row(x)

    def _cut_elsewhere(self, x: PipelineOutline, far: int) -> Iterator[PipelineOutline]:
        ends = (*x.starts, self.n)
        for s in range(1, len(x.starts)):
            for start in (x.starts[s] - far, x.starts[s] + far):
                if ends[s - 1] < start < ends[s + 1] and self.space.profile.graph.cuttable(start):
                    yield replace(x, starts=(*x.starts[:s], start, *x.starts[s + 1 :]))

    def _cuts_in_a_row(self, x: PipelineOutline) -> Iterator[PipelineOutline]:
        """Outlines with several cuts in a row moved by one component."""
        ends, able = (*x.starts, self.n), self.space.profile.graph.cuttable
        for s, t in combinations(range(1, len(ends)), 2):
            for by in (-1, 1) if t > s + 1 else ():
                moved = [c + by for c in x.starts[s:t]]
                if ends[s - 1] < moved[0] and moved[-1] < ends[t] and all(map(able, moved)):
                    yield replace(x, starts=(*x.starts[:s], *moved, *x.starts[t:]))

    def _offered(self, w: int, m: int) -> list[StageStyle]:
        return [x for x in self.sketch.styles(w, m, save_memory=True) if not x.checkpoint]

    def _resized(self, x: PipelineOutline, s: int, w: int) -> PipelineOutline | None:
        """The outline with width ``w`` for stage ``s``, in the style most like its own; None for an impossible
        width."""
        if w not in self.widths:
            return None
        old = x.styles[s]
        style = min(
            self._offered(w, x.num_microbatches),
            key=lambda y: (y.strategy != old.strategy,
                           abs(y.tensor - old.tensor) if old.tensor < x.widths[s] or old.tensor == 1 else -y.tensor),
        )  # fmt: skip
        return replace(
            x, widths=(*x.widths[:s], w, *x.widths[s + 1 :]), styles=(*x.styles[:s], style, *x.styles[s + 1 :])
        )

    def _other_widths(self, x: PipelineOutline) -> Iterator[PipelineOutline]:
        """Outlines with one rank (or one node) moved from one stage to another, or from or to the idle ranks."""
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

    def _joined(self, x: PipelineOutline) -> Iterator[PipelineOutline]:
        for s in range(1, len(x.starts)):
            fewer = PipelineOutline(
                x.starts[:s] + x.starts[s + 1 :], x.widths[:s] + x.widths[s + 1 :], x.styles[:s] + x.styles[s + 1 :],
                x.num_microbatches, x.schedule,
            )  # fmt: skip
            if len(fewer.starts) < 2:
                return
            yield fewer
            for k in {0, s - 1, len(fewer.starts) - 1}:
                if (resized := self._resized(fewer, k, fewer.widths[k] + x.widths[s])) is not None:
                    yield resized

    def _halved(self, x: PipelineOutline) -> Iterator[PipelineOutline]:
        ends = (*x.starts, self.n)
        for s, w in enumerate(x.widths):
            middle = (ends[s] + ends[s + 1]) // 2
            if w < 2 or not ends[s] < middle < ends[s + 1] or not self.space.profile.graph.cuttable(middle):
                continue
            more = PipelineOutline(
                (*x.starts[: s + 1], middle, *x.starts[s + 1 :]), (*x.widths[: s + 1], w, *x.widths[s + 1 :]),
                (*x.styles[: s + 1], x.styles[s], *x.styles[s + 1 :]), x.num_microbatches, x.schedule,
            )  # fmt: skip
            first = self._resized(more, s, w - w // 2)
            resized = None if first is None else self._resized(first, s + 1, w // 2)
            if resized is not None:
                yield resized


def first_plans(
    prices: Prices, allowed: Allowed, best_s: float, ends: float, begin_with: int | None = None
) -> list[Candidate]:
    """The best pipeline plans found until ``ends``, fastest first. Numbers of microbatches whose compute takes
    ``best_s`` seconds or more are skipped. ``begin_with``: the one to begin with; where None, about half as many as
    stages are possible, and then one."""
    sketch = Sketch(prices, allowed, ends)
    if sketch.most_stages < 2:
        return []
    climber = Climber(sketch)
    counts = [m for m in prices.space.microbatches() if m <= MOST_IN_A_PIPELINE]
    likely = sorted(counts, key=lambda m: abs(np.log2(m / (begin_with or sketch.most_stages / 2))))
    if begin_with is None and 1 in counts:  # one microbatch, best for whole strategies, comes second at the latest
        likely = list(dict.fromkeys((likely[0], 1, *likely)))
    optima: dict[PipelineOutline, float] = {}
    for m in likely:
        if clock.counted() > ends:
            break
        rows = [w * np.array(prices.compute(w, m, sketch.gpus)) for w in climber.neighbours.widths]
        least_s = m * float(np.min(rows, axis=0).sum()) / sketch.gpus
        if prices.space.strategies.schedules[sketch.schedule].refusal(2, m) or least_s >= best_s:
            continue
        outlines = {x: climber.seconds(x) for x in sketch.plans(m)}
        for x in sorted((x for x in outlines if outlines[x] < INF), key=outlines.__getitem__)[:_BEST]:
            optimum = climber.climb(x, ends)
            optima[optimum] = climber.seconds(optimum)
            best_s = min(best_s, optima[optimum])
    plans = [climber.candidate(x) for x in sorted(optima, key=optima.__getitem__)[:_BEST]]
    return [x for x in plans if _is_possible(prices, x, allowed)]


def _is_possible(prices: Prices, x: Candidate, allowed: Allowed) -> bool:
    """Whether a plan fits, and all its ways are in the space."""
    ways = enumerate(x.ways)
    return prices.fits(x) and all(
        w in prices.space.ways(i, w.layout.width, x.num_microbatches, allowed) for i, w in ways
    )


def mixed_plan(prices: Prices, allowed: Allowed, known: Candidate, ends: float) -> Candidate | None:
    """A pipeline whose stages differ in width that is faster than the pipeline ``known``, found until ``ends``; None
    where there is none. It has as many microbatches as that, or half or twice as many."""
    sketch = Sketch(prices, allowed, ends, most_cuts=_CUTS)
    climber, best, best_s = Climber(sketch), None, prices.of(known).cost.total_s
    m = known.num_microbatches
    for count in (x for x in (m, 2 * m, m // 2) if x in prices.space.microbatches() and x <= MOST_IN_A_PIPELINE):
        outlines = {x: climber.seconds(x) for x in sketch.mixed(count)} if clock.counted() < ends else {}
        for x in sorted((x for x in outlines if outlines[x] < 1.1 * best_s), key=outlines.__getitem__)[:_BEST]:
            x = climber.climb(x, ends)
            if climber.seconds(x) < best_s:
                best, best_s = x, climber.seconds(x)
    plan = None if best is None else climber.candidate(best)
    return plan if plan is not None and _is_possible(prices, plan, allowed) else None
