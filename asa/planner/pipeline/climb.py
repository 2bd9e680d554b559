"""Local search from the first pipeline plans: one change at a time, as long as it helps.

The changes are those of :mod:`asa.planner.pipeline.neighbours`. Each stage is priced once, so that a further plan costs
one evaluation of the pipeline's clock (:mod:`asa.cost.pipeline`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from asa.cost.pipeline import StageTimes, lower_bound, makespan
from asa.cost.pricing import Way
from asa.ir.layout import Layout
from asa.planner import clock
from asa.planner.pipeline.neighbours import Neighbours
from asa.planner.pipeline.sketch import INF, PipelineOutline, Sketch, StageStyle
from asa.planner.pipeline.uniform import Uniform
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import MOST_IN_A_PIPELINE, Allowed, widths

_BEST = 2
"""Starting plans of the local search for each number of microbatches."""
_STEADY = 16
"""Microbatches after which a pipeline is taken to be in its steady state. The plan that is returned is timed in full.
"""


class Climber:
    """Prices plan outlines of one space, stage by stage."""

    def __init__(self, sketch: Sketch) -> None:
        self.sketch, self.prices, self.space = sketch, sketch.prices, sketch.space
        self.n, self.gpus = sketch.n, sketch.gpus
        self._stages: dict[tuple[object, ...], tuple[StageTimes, Layout, Layout] | None] = {}
        self._ways: dict[tuple[object, ...], list[Way]] = {}
        self._sent: dict[tuple[object, ...], tuple[float, float]] = {}
        self._values: dict[PipelineOutline, float] = {}
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
            stage = self._stage(a, b, w, style, m, schedule.in_flight(s, p, m), first)
            if stage is None:
                return INF
            stage_times, entry, leaving = stage
            if source is not None:
                moves.append(self._handover(a, m, source, entry, offset))
            times.append(stage_times)
            source, offset = leaving, offset + w
        if below < INF and lower_bound(times, moves, schedule, m) >= below:
            return INF
        clock.count("action", p * min(m, 3 * _STEADY))
        if m <= 2 * _STEADY:
            return makespan(times, moves, schedule, m)
        # In the steady state every further microbatch takes the same time.
        shorter, longer = (makespan(times, moves, schedule, k * _STEADY) for k in (1, 2))
        return longer + (m / _STEADY - 2) * (longer - shorter)

    def _alike(self, offset: int, w: int) -> int | None:
        """First rank from which ``w`` ranks have devices like those from ``offset`` on; None where these differ."""
        cluster = self.space.cluster
        if not cluster.unequal:
            return 0
        kinds = list(zip(map(cluster.speed, range(self.gpus)), cluster.memories(), strict=False))
        kind = set(kinds[offset : offset + w])
        return next((k for k in range(self.gpus) if set(kinds[k : k + w]) == kind), None) if len(kind) == 1 else None

    def _stage(
        self, a: int, b: int, w: int, style: StageStyle, m: int, flight: int, first: int
    ) -> tuple[StageTimes, Layout, Layout] | None:
        key = (a, b, w, style, m, flight, first)
        if key not in self._stages:
            self._stages[key] = self._price_stage(a, b, w, style, m, flight, first)
        return self._stages[key]

    def _price_stage(
        self, a: int, b: int, w: int, style: StageStyle, m: int, flight: int, first: int
    ) -> tuple[StageTimes, Layout, Layout] | None:
        if not self.sketch.possible(w, m, style)[a:b].all():
            return None
        uniform, room = self.sketch.uniform(w, m, style, first), self.space.room(first, w, self.gpus)
        times, peak = uniform.stage(a, b, flight)
        if peak > room:
            return None
        if style.checkpoint:
            stored = self.sketch.uniform(w, m, replace(style, checkpoint=False), first)
            spared = self._spared(uniform, stored, a, b, flight, room - peak)
            while spared:
                mixed = uniform.mixed(stored, spared)
                better, peak = mixed.stage(a, b, flight)
                if peak <= room:
                    times, uniform = better, mixed
                    break
                spared = spared[: -1 - len(spared) // 8]
        self._ways[a, b, w, style, m, flight, first] = list(uniform.ways[a:b])
        return times, uniform.ways[a].layout, uniform.ways[b - 1].layout

    def _spared(self, full: Uniform, stored: Uniform, start: int, stop: int, flight: int, room: float) -> list[int]:
        """Components that need no recomputation, by time gained per byte, as many as ``room`` bytes allow."""
        stage = slice(start, stop)
        more = np.maximum(1.0, flight * (stored.priced.activations[stage] - full.priced.activations[stage]))
        gain = (full.priced.backward[stage] - stored.priced.backward[stage]) / more
        allowed = [self.sketch.allowed(i, stored.ways[i]) for i in range(start, stop)]
        spared = []
        for i in np.argsort(-gain, kind="stable").tolist():
            if full.ways[start + i].checkpoint and allowed[i] and more[i] <= room:
                spared.append(start + i)
                room -= float(more[i])
        return spared

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
        while moved:
            moved = False
            for other in self.neighbours.of(x):
                if clock.counted() > ends:
                    return x
                seconds = self.seconds(other, value * (1 - 1e-6))
                if seconds < value * (1 - 1e-6):
                    x, value, moved = other, seconds, True
                    break
        return x


def first_plans(
    prices: Prices, allowed: Allowed, best_s: float, ends: float, begin_with: int | None = None
) -> Candidate | None:
    """The best pipeline plan found until ``ends``, or None. Numbers of microbatches whose compute takes ``best_s``
    seconds or more are skipped. ``begin_with``: the one to begin with; where None, about the number of stages, and then
    one."""
    sketch = Sketch(prices, allowed, ends)
    if sketch.most_stages < 2:
        return None
    climber = Climber(sketch)
    counts = [m for m in prices.space.microbatches() if m <= MOST_IN_A_PIPELINE]
    likely = sorted(counts, key=lambda m: abs(np.log2(m / (begin_with or sketch.most_stages))))
    if begin_with is None and 1 in counts:  # one microbatch, best for whole strategies, comes second at the latest
        likely = list(dict.fromkeys((likely[0], 1, *likely)))
    optima: dict[PipelineOutline, float] = {}
    for m in likely:
        if clock.counted() > ends:
            break
        if prices.space.strategies.schedules[sketch.schedule].refusal(2, m) or not _may_win(prices, m, best_s):
            continue
        outlines = {x: climber.seconds(x) for x in sketch.plans(m)}
        for x in sorted((x for x in outlines if outlines[x] < INF), key=outlines.__getitem__)[:_BEST]:
            optimum = climber.climb(x, ends)
            optima[optimum] = climber.seconds(optimum)
            best_s = min(best_s, optima[optimum])
    if not optima:
        return None
    candidate = climber.candidate(min(optima, key=optima.__getitem__))
    m = candidate.num_microbatches
    possible = all(w in set(prices.space.ways(i, w.layout.width, m, allowed)) for i, w in enumerate(candidate.ways))
    return candidate if possible and prices.fits(candidate) else None


def _may_win(prices: Prices, num_microbatches: int, best_s: float) -> bool:
    """Whether compute time alone is below ``best_s`` seconds."""
    gpus = prices.space.request.gpus
    rows = [
        w * np.array(prices.compute(w, num_microbatches, gpus)) for w in widths(gpus) if w < gpus
    ]  # fmt: skip
    return num_microbatches * float(np.min(rows, axis=0).sum()) / gpus < best_s
