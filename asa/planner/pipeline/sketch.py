"""Outlines of the first pipeline plans: every stage runs all its components in one style, except that with
recomputation some components need none.

For each number of microbatches and each of several limits on the slowest stage, a dynamic program over stages, from the
last to the first, finds the cuts and widths with the least round trip of a microbatch. The most promising outlines are
priced in full and improved (:mod:`asa.planner.pipeline.climb`). A best-first search needs good plans early; a plan that
is missed here costs time, but does not weaken the proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asa.cost.menu import Menu, PricedWays
from asa.cost.pipeline import StageTimes
from asa.cost.pricing import Pricer, Way
from asa.ir.layout import Layout
from asa.ir.plan import DataDegree, DataStrategyName, TensorDegree
from asa.planner import clock
from asa.planner.pipeline.uniform import Uniform
from asa.planner.space.candidate import Prices
from asa.planner.space.nearest import similar
from asa.planner.space.space import Allowed, anything

INF = float("inf")
_LEVELS = 8
"""Limits on the slowest stage that are tried."""
_MOST_CUTS = 48
"""Most cuts; of more components, those that divide the computation most evenly."""
_MOST_STAGES = 32
_FREE = 16
"""Ranks up to which the stages of a plan may differ in width; beyond, all have the same width."""
_SINGLE = 128
"""Ranks up to which a stage may begin at any rank, where widths differ."""
_HALVINGS, _ABOVE = 6, (1.01, 1.15)
"""Tests for the lowest level that is possible, and the range of those tried above it."""
_PRICED = 6
"""Outlines for each number of microbatches that are priced in full."""
_SEVERAL = 64
_SHARDED: tuple[DataStrategyName, ...] = ("zero1", "zero2", "zero3")
"""Data strategies of styles that save memory. The first takes as long as the second and holds more, so it counts only
where that is not offered."""
_AT_ONCE = 1000
"""Most pairs of a component and a style that are priced at once."""


@dataclass(frozen=True)
class StageStyle:
    """The configuration of all components of a stage."""

    data: int
    tensor: int
    strategy: DataStrategyName
    checkpoint: bool
    sequence: bool = False
    """Whether split components also split their tokens, where they can."""


@dataclass(frozen=True)
class PipelineOutline:
    """A plan in which stage s runs all its components in the style ``styles[s]``."""

    starts: tuple[int, ...]
    widths: tuple[int, ...]
    styles: tuple[StageStyle, ...]
    num_microbatches: int
    schedule: str


@dataclass
class _Stages:
    """Stages of one width: least steady seconds, once-per-step seconds, and the style that has them; arrays number of
    later stages x start x stop (indices of cuts)."""

    steady: Any
    once: Any
    style: Any
    styles: list[StageStyle]


class Sketch:
    """Outlines of one space."""

    def __init__(
        self, prices: Prices, allowed: Allowed, ends: float, gpus: int | None = None, most_cuts: int = _MOST_CUTS
    ) -> None:
        self.prices, self.allowed, self.ends = prices, allowed, ends
        space = prices.space
        self.space, self.gpus, self.graph = space, gpus or space.request.gpus, space.profile.graph
        self.n = len(self.graph)
        self.cuts = self._cuts(most_cuts)
        """First components of possible stages, and finally the number of components."""
        self.schedule = "1f1b" if "1f1b" in space.schedules else next(iter(space.schedules), "")
        self.tight = False
        """Whether memory was found to bind: styles that save memory are then tried from the start."""
        speeds = np.array(space.cluster.speeds(range(self.gpus)) or (1.0,))
        self.slower = speeds[0] / speeds
        """How many times as long each rank takes as the first; one entry if all are alike."""
        self.most_stages = min(self.gpus, len(self.cuts) - 1, _MOST_STAGES)
        self._uniforms: dict[tuple[int, int, StageStyle, int], Uniform] = {}
        self._menus: dict[tuple[object, ...], Menu] = {}
        self._ways: dict[tuple[int, int, StageStyle], Way] = {}
        self._allowed: dict[tuple[int, StageStyle], tuple[Any, tuple[Layout, ...], Any]] = {}

    def _cuts(self, most: int) -> list[int]:
        inside = [i for i in range(1, self.n) if self.graph.cuttable(i)]
        if len(inside) >= most:
            flops = np.cumsum([c.flops_per_sample + 1.0 for c in self.graph.components])
            targets = np.searchsorted(flops, flops[-1] * np.arange(1, most) / most)
            inside = sorted({min(inside, key=lambda i: abs(i - int(k))) for k in targets})
        return [0, *inside, self.n]

    def plans(self, m: int) -> Iterator[PipelineOutline]:
        """Promising plans with ``m`` microbatches, the most promising first."""
        sizes = [w for w in self.space.several(self.gpus) if w < self.gpus]
        if self.gpus <= _FREE:
            yield from self._free(m, sizes)
            return
        for w in sizes:
            if self.gpus // w <= self.most_stages and (w <= 8 or self.gpus % w == 0) and clock.counted() < self.ends:
                yield from self._free(m, [w])

    def mixed(self, m: int) -> Iterator[PipelineOutline]:
        """Promising plans with ``m`` microbatches whose stages differ in width, the most promising first, on any number
        of ranks. On many, stages are of whole nodes."""
        node = self.space.cluster.node
        unit = 1 if self.gpus <= _SINGLE or self.gpus % node else node
        sizes = [w for w in self.space.several(self.gpus) if w < self.gpus and self.gpus % w == 0 and w % unit == 0]
        yield from self._free(m, sizes, unit)

    def _free(self, m: int, sizes: Sequence[int], unit: int = 0) -> Iterator[PipelineOutline]:
        """Plans with stages of these widths, which begin at multiples of ``unit`` ranks if it is given."""
        stages = {w: s for w in sizes if (s := self._stages(w, m)) is not None}
        if not stages:
            return
        closer, unit = unit > 0, unit or (1 if self.gpus <= _FREE else next(iter(stages)))
        ranks = self.gpus // unit
        kinds, firsts = self.space.cluster.kinds(self.gpus), range(0, ranks * unit, unit)
        allowed = {
            w: np.array([o + w <= self.gpus and len(set(kinds[o : o + w])) == 1 and self.space.placed(o, w)
                         for o in firsts]) for w in stages
        }  # fmt: skip
        links = {w: self._links(w, m) for w in stages}
        first_s = np.array([s.steady[0] for s in stages.values()])
        possible_s = first_s[np.isfinite(first_s)]
        longest = min(float(first_s[:, 0, -1].min()), float(possible_s.max(initial=0.0)))
        if longest <= 0:
            return  # nothing fits, or components take no time: one stage is as fast as any number
        cuts = np.arange(len(self.cuts) - 1)
        shortest = float(first_s[:, cuts, cuts + 1].min(axis=0).max())
        shortest = max(shortest if np.isfinite(shortest) else 0.0, longest / (2 * ranks))
        outlines: dict[Any, tuple[float, PipelineOutline]] = {}

        def add(level: float) -> bool:
            """Collect the plans below a level; whether there are some."""
            several = list(self._below(m, level, stages, links, allowed, unit, ranks))
            for value, candidate in several:
                outlines.setdefault((candidate.starts, candidate.widths), (value, candidate))
            return bool(several)

        levels = np.geomspace(shortest * 1.001, max(longest, shortest * 1.01), _LEVELS)
        if closer:  # just above the lowest level at which there are plans
            busy = np.array(list(stages))[:, None] * first_s[:, cuts, cuts + 1]
            low, high = max(shortest, float(busy.min(axis=0).sum()) / self.gpus), longest
            for _ in range(_HALVINGS):
                middle = (low * high) ** 0.5
                low, high = (low, middle) if add(middle) else (middle, high)
            levels = high * np.geomspace(*_ABOVE, _LEVELS // 2)
        for level in levels:
            add(float(level))
            if clock.counted() > self.ends:
                break
        for _, candidate in sorted(outlines.values(), key=lambda x: x[0])[:_PRICED]:
            yield candidate

    def _below(
        self, m: int, level: float, stages: dict[int, _Stages], links: dict[int, Any], allowed: dict[int, Any],
        unit: int, ranks: int,
    ) -> Iterator[tuple[float, PipelineOutline]]:  # fmt: skip
        """For each number of stages the plan with the least round trip and no stage slower than ``level`` seconds."""
        count, slower = len(self.cuts), self.slower[::unit][:ranks]
        behind = np.full((count, ranks + 1), INF)
        behind[-1] = 0.0
        turns: list[Any] = []
        spans = {w: _span(s, level / float(slower.min())) for w, s in stages.items()}
        clock.count("entry", min(self.most_stages, ranks) * count * ranks * sum(spans.values()))
        for r in range(min(self.most_stages, ranks)):
            best, turn = np.full((count, ranks + 1), INF), np.full((count, ranks + 1, 2), -1)
            for w, s in stages.items():
                k, start = w // unit, np.arange(count)[:, None]
                stop = np.minimum(start + 1 + np.arange(spans[w]), count - 1)
                steady = s.steady[r][start, stop, None] * slower
                stage_s = np.where(steady <= level, steady + s.once[r][start, stop, None] / m * slower, INF)
                if r == 0:
                    stage_s[stop < count - 1] = INF
                behind_s = np.full((count, ranks), INF)
                behind_s[:, : ranks - k + 1] = behind[:, k:] if r == 0 else behind[:, k:] + links[w][:, None]
                total = stage_s + np.where(allowed[w], behind_s, INF)[stop]
                far = total.argmin(axis=1)
                value = np.take_along_axis(total, far[:, None, :], axis=1)[:, 0]
                better = value < best[:count, :ranks]
                best[:, :ranks] = np.where(better, value, best[:, :ranks])
                turn[:, :ranks, 0] = np.where(better, np.minimum(start + 1 + far, count - 1), turn[:, :ranks, 0])
                turn[:, :ranks, 1] = np.where(better, w, turn[:, :ranks, 1])
            turns.append(turn)
            behind = best
            if r and np.isfinite(best[0, 0]):
                yield self._outline_of(m, r, float(best[0, 0]), stages, links, turns, unit)

    def _outline_of(
        self, m: int, r: int, trip: float, stages: dict[int, _Stages], links: dict[int, Any], turns: list[Any],
        unit: int,
    ) -> tuple[float, PipelineOutline]:  # fmt: skip
        starts, sizes, styles = [], [], []
        at = offset = 0
        slowest = longest = 0.0
        for k in range(r, -1, -1):
            stop, w = (int(x) for x in turns[k][at, offset])
            s = stages[w]
            starts.append(self.cuts[at])
            sizes.append(w)
            styles.append(s.styles[int(s.style[k, at, stop])])
            slower = self.slower[min(offset * unit, len(self.slower) - 1)]
            slowest = max(slowest, float(s.steady[k, at, stop] * slower), float(links[w][at]) / 2 if at else 0.0)
            longest = max(longest, float(s.once[k, at, stop] * slower))
            at, offset = stop, offset + w // unit
        # With slow links, the round trip of a microbatch limits the steady state.
        period = max(slowest, trip / (r + 1))
        return (m - 1) * period + trip + longest, PipelineOutline(
            tuple(starts), tuple(sizes), tuple(styles), m, self.schedule
        )

    def _links(self, w: int, m: int) -> Any:
        """Seconds of a microbatch over each cut, forward and backward, between stages of ``w`` ranks."""
        layout = Layout(width=w, data=self._degree(w, m), tensor=1)
        pricer = self.prices.pricer(w, m, self.gpus)
        by_size: dict[float, float] = {}
        link_s = np.zeros(len(self.cuts))
        for k, cut in enumerate(self.cuts[1:-1], 1):
            size = float(self.graph.components[cut - 1].output_bytes_per_sample)
            if size not in by_size:
                by_size[size] = sum(pricer.handover(cut, layout, layout, w))
            link_s[k] = by_size[size]
        return link_s

    def _degree(self, w: int, m: int) -> int:
        fewest = max(self.space.fewest_samples(i) for i in range(self.n))
        samples = self.space.request.global_batch // m // fewest
        return max((d for d in range(1, w + 1) if w % d == 0 and d <= samples), default=1)

    def styles(self, w: int, m: int, *, save_memory: bool) -> list[StageStyle]:
        """Candidate styles; with ``save_memory`` also those that save memory."""
        most = self._degree(w, m)
        styles = []
        for d in (d for d in range(1, most + 1) if w % d == 0):
            t = w // d
            if t > 1 and ("tensor" not in self.space.strategies.tensor or t > _SEVERAL or (w > 8 and d != most)):
                continue
            kinds: list[DataStrategyName] = ["replicate"]
            if save_memory and d > 1:
                offered = [k for k in _SHARDED if k in self.space.strategies.data]
                kinds += offered[1:] if offered[:2] == list(_SHARDED[:2]) else offered
            checkpoints = (False, True) if save_memory and self.space.strategies.checkpoint else (False,)
            by_tokens = (True, False) if t > 1 and self.space.by_tokens else (False,)
            styles += [StageStyle(d, t, kind, c, s) for s in by_tokens for kind in kinds for c in checkpoints]
        if not any(x.data == most for x in styles):
            styles.append(StageStyle(most, 1, "replicate", False))
        return styles

    def way(self, i: int, w: int, x: StageStyle) -> Way:
        """Component ``i`` in that style, or in the most similar way that is allowed. Where it cannot be split, it is
        replicated over the tensor ranks."""
        i = self.prices.like[i] if self.allowed is anything else i
        if (i, w, x) not in self._ways:
            way = self._way(i, w, x)
            other = None if self.allowed(i, way) else similar(self.space, i, way, 1, self.allowed)
            self._ways[i, w, x] = other or way
        return self._ways[i, w, x]

    def _way(self, i: int, w: int, x: StageStyle) -> Way:
        component, strategy = self.graph.components[i], x.strategy
        able = [] if x.tensor == 1 or component.tied else self.space.splitting(i, x.tensor, x.sequence)
        if x.sequence and not component.tied:
            able = able or self.space.splitting(i, x.tensor)
        split, tensor = (able[0], x.tensor) if able else ("none", 1)
        data = w if component.tied else x.data  # what shares a parameter is spread over all ranks of its stage
        refused = self.space.strategies.data[strategy].refusal(component, data)
        if component.parameter_bytes == 0 or refused:
            strategy = "replicate"
        forgets = x.checkpoint and component.saved_bytes_per_sample > component.output_bytes_per_sample
        return Way(
            layout=self._layout(w, data, tensor, split == "sequence"),
            data=DataDegree(strategy=strategy, degree=data),
            tensor=TensorDegree(strategy=split, degree=tensor),
            checkpoint=forgets,
            offload=self.space.offloads(component.parameter_bytes > 0)[0],
        )

    def uniform(self, w: int, m: int, x: StageStyle, first: int = 0) -> Uniform:
        """All components in that style, on stages of ``w`` ranks from the rank ``first`` on."""
        if (w, m, x, first) not in self._uniforms:
            pricer = self.prices.pricer(w, m, self.gpus, first)
            styles = self.styles(w, m, save_memory=x not in self.styles(w, m, save_memory=False))
            styles = styles if x in styles and self.n * len(styles) <= _AT_ONCE else [x]
            menu, n = self._menu(pricer, styles), len(styles)
            priced = menu.priced(pricer, np.arange(len(menu.ways)))
            clock.count("way", len(menu.ways))
            for k, style in enumerate(styles):
                prices = PricedWays(**{name: values[k::n] for name, values in vars(priced).items()})
                uniform = Uniform(pricer, self.space.cluster.overlap, menu.ways[k::n], prices)
                self._uniforms[w, m, style, first] = uniform
        return self._uniforms[w, m, x, first]

    def stage(
        self, start: int, stop: int, w: int, x: StageStyle, m: int, in_flight: int, first: int = 0
    ) -> tuple[StageTimes, Uniform] | None:
        """Times and configuration of a stage of ``w`` ranks from the rank ``first`` on that runs its components in a
        style with as few of them recomputed as fit; None where none fits or some cannot run."""
        plain, full = (replace(x, checkpoint=c) for c in (False, True))
        stored, room = self.uniform(w, m, plain, first), self.space.room(first, w, self.gpus)
        if self.possible(w, m, plain)[start:stop].all():
            times, peak = stored.stage(start, stop, in_flight)
            if peak <= room:
                return times, stored
        if not self.space.strategies.checkpoint or not self.possible(w, m, full)[start:stop].all():
            return None
        needed = [i for i in range(start, stop) if not self.allowed(i, stored.ways[i])]
        return stored.recomputed(self.uniform(w, m, full, first), start, stop, in_flight, room, needed)

    def _menu(self, pricer: Pricer, styles: Sequence[StageStyle]) -> Menu:
        """Every component in each of these styles."""
        key = (pricer.width, tuple(styles))
        if key not in self._menus:
            clock.count("menu", self.n * len(styles))
            self._menus[key] = self.prices.menu_of(
                pricer, [[self.way(i, pricer.width, x) for x in styles] for i in range(self.n)]
            )
        return self._menus[key]

    def possible(self, w: int, m: int, x: StageStyle) -> Any:
        """Which components may run in that style."""
        if (w, x) not in self._allowed:
            ways = [self.way(i, w, x) for i in range(self.n)]
            allowed = np.array([self.allowed(i, way) for i, way in enumerate(ways)])
            number = {layout: k for k, layout in enumerate(dict.fromkeys(way.layout for way in ways))}
            self._allowed[w, x] = allowed, tuple(number), np.array([number[way.layout] for way in ways])
        allowed, layouts, number = self._allowed[w, x]
        return allowed & (np.array([self.space.samples(y, m) for y in layouts])[number] >= self.prices.fewest)

    def _layout(self, w: int, data: int, tensor: int, sequence: bool) -> Layout:
        return Layout(width=w, data=data, tensor=tensor, weights=self.space.weights.get(w, ()), sequence=sequence)

    def _stages(self, w: int, m: int) -> _Stages | None:
        fast = None if self.tight else self._table(w, m, save_memory=False)
        span = min(len(self.cuts) - 1, 2 * (-(-(len(self.cuts) - 1) // self.most_stages)))
        starts = np.arange(len(self.cuts) - span)
        if fast is not None and np.isfinite(fast.steady[:, starts, starts + span]).all():
            return fast
        self.tight = True
        return self._table(w, m, save_memory=True) if clock.counted() < self.ends else fast

    def _table(self, w: int, m: int, *, save_memory: bool) -> _Stages | None:
        schedule = self.space.strategies.schedules[self.schedule]
        room = self.space.capacity(self.gpus)
        overlap = self.space.cluster.overlap
        saved = overlap.compute_slowdown * max(0.0, overlap.saving)
        count, at = len(self.cuts), np.array(self.cuts)
        styles = self.styles(w, m, save_memory=save_memory)
        in_flight = [min(schedule.in_flight(0, r + 1, m), m) if r else 1 for r in range(self.most_stages)]
        flights = np.array(in_flight)[:, None, None]
        steady = np.full((self.most_stages, count, count), INF)
        once, style = np.zeros_like(steady), np.full(steady.shape, -1)
        forward = np.arange(count)[None, :] > np.arange(count)[:, None]
        counts = np.maximum(1, at[None, :] - at[:, None])
        previous: tuple[Any, Any] | None = None
        clock.count("entry", len(styles) * steady.size)
        for number, x in enumerate(styles):
            if number and clock.counted() > self.ends:
                break
            c = self.uniform(w, m, x).priced
            sync = c.prompt + c.late
            rows = np.stack([c.forward + c.backward, sync, c.window, c.once, c.state + c.gradients, c.activations,
                             c.transient], axis=1)  # fmt: skip
            cannot = ~self.possible(w, m, x)
            missing = np.concatenate([[0.0], np.cumsum(cannot)])[at]
            possible = forward & (missing[None, :] == missing[:, None])
            sums = np.concatenate([np.zeros((1, 7)), np.cumsum(rows, axis=0)])[at]
            stage_sums = np.moveaxis(sums[None, :] - sums[:, None], 2, 0)
            moving = np.zeros((count, count))
            for a in range(count - 1):
                segments = np.maximum.reduceat(rows[at[a] :, 6], at[a : count - 1] - at[a])
                moving[a, a + 1 :] = np.maximum.accumulate(segments)
            once_s = np.maximum(0.0, stage_sums[1] - saved * stage_sums[2]) + stage_sums[3]
            stored = previous if number and replace(x, checkpoint=False) == styles[number - 1] else None
            stored = stored if x.checkpoint else None
            previous = (stage_sums, moving)
            memory = stage_sums[4] + flights * stage_sums[5] + moving
            pass_s = stage_sums[0]
            if stored is not None:  # recompute only as many as memory requires
                more = stored[0][4] + flights * stored[0][5] + stored[1] - memory
                share = np.clip((room - memory) / np.maximum(more, 1.0), 0.0, 1.0)
                share = np.floor(share * counts) / counts
                pass_s = pass_s - share * np.maximum(0.0, pass_s - stored[0][0])
            better = possible & (memory <= room) & (pass_s + once_s / m < steady + once / m)
            steady = np.where(better, pass_s, steady)
            once = np.where(better, once_s, once)
            style = np.where(better, number, style)
        return _Stages(steady, once, style, styles) if np.isfinite(steady).any() else None


def _span(stages: _Stages, level: float) -> int:
    """The largest distance in cuts between the ends of a stage that takes at most ``level`` seconds; at least 1."""
    start, stop = np.nonzero(stages.steady.min(axis=0) <= level)
    return int((stop - start).max(initial=1))
