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
from asa.cost.pricing import Pricer, Way
from asa.ir.layout import Layout
from asa.ir.plan import DataDegree, DataStrategyName, TensorDegree
from asa.planner import clock
from asa.planner.pipeline.uniform import Uniform
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Allowed, widths

INF = float("inf")
_LEVELS = 8
"""Limits on the slowest stage that are tried."""
_MOST_CUTS = 48
"""Most cuts; of more components, those that divide the computation most evenly."""
_MOST_STAGES = 32
_FREE = 16
"""Ranks up to which the stages of a plan may differ in width; beyond, all have the same width."""
_PRICED = 6
"""Outlines for each number of microbatches that are priced in full."""
_SEVERAL = 64
_AT_ONCE = 1000
"""Most pairs of a component and a style that are priced at once."""


@dataclass(frozen=True)
class StageStyle:
    """The configuration of all components of a stage."""

    data: int
    tensor: int
    strategy: DataStrategyName
    checkpoint: bool


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

    def __init__(self, prices: Prices, allowed: Allowed, ends: float, gpus: int | None = None) -> None:
        self.prices, self.allowed, self.ends = prices, allowed, ends
        space = prices.space
        self.space, self.gpus, self.graph = space, gpus or space.request.gpus, space.profile.graph
        self.n = len(self.graph)
        self.cuts = self._cuts()
        """First components of possible stages, and finally the number of components."""
        self.schedule = "1f1b" if "1f1b" in space.schedules else next(iter(space.schedules), "")
        self.tight = False
        """Whether memory was found to bind: styles that save memory are then tried from the start."""
        self.most = min(self.gpus, len(self.cuts) - 1, _MOST_STAGES)
        self._uniforms: dict[tuple[int, int, StageStyle, int], Uniform] = {}
        self._menus: dict[tuple[object, ...], Menu] = {}
        self._ways: dict[tuple[int, int, StageStyle], Way] = {}
        self._allowed: dict[tuple[int, StageStyle], Any] = {}

    def _cuts(self) -> list[int]:
        inside = [i for i in range(1, self.n) if self.graph.cuttable(i)]
        if len(inside) >= _MOST_CUTS:
            flops = np.cumsum([c.flops_per_sample + 1.0 for c in self.graph.components])
            wanted = np.searchsorted(flops, flops[-1] * np.arange(1, _MOST_CUTS) / _MOST_CUTS)
            inside = sorted({min(inside, key=lambda i: abs(i - int(k))) for k in wanted})
        return [0, *inside, self.n]

    def plans(self, m: int) -> Iterator[PipelineOutline]:
        """Promising plans with ``m`` microbatches, the most promising first."""
        sizes = [w for w in widths(self.gpus) if w < self.gpus]
        if self.gpus <= _FREE:
            yield from self._free(m, sizes)
            return
        for w in sizes:
            if self.gpus // w <= self.most and (w <= 8 or self.gpus % w == 0) and clock.counted() < self.ends:
                yield from self._free(m, [w])

    def _free(self, m: int, sizes: Sequence[int]) -> Iterator[PipelineOutline]:
        stages = {w: s for w in sizes if (s := self._stages(w, m)) is not None}
        if not stages:
            return
        unit = 1 if self.gpus <= _FREE else next(iter(stages))
        ranks = self.gpus // unit
        placed = {
            w: np.array([self.space.placed(o * unit, w) if o * unit + w <= self.gpus else False for o in range(ranks)])
            for w in stages
        }
        links = {w: self._links(w, m) for w in stages}
        whole = min(float(s.steady[0, 0, -1]) for s in stages.values())
        every = np.concatenate([s.steady[0][np.isfinite(s.steady[0])] for s in stages.values()])
        if not len(every):
            return
        longest = min(whole, float(every.max()))
        each = range(len(self.cuts) - 1)
        shortest = max(float(min(s.steady[0, k, k + 1] for s in stages.values())) for k in each)
        shortest = max(shortest, longest / (2 * ranks))
        if not np.isfinite(shortest) or shortest <= 0:
            shortest = longest / (2 * ranks)
        if longest <= 0:
            return  # components take no time: one stage is as fast as any number
        found: dict[Any, tuple[float, PipelineOutline]] = {}
        for level in np.geomspace(shortest * 1.001, max(longest, shortest * 1.01), _LEVELS):
            for value, candidate in self._below(m, float(level), stages, links, placed, unit, ranks):
                found.setdefault((candidate.starts, candidate.widths), (value, candidate))
            if clock.counted() > self.ends:
                break
        for _, candidate in sorted(found.values(), key=lambda x: x[0])[:_PRICED]:
            yield candidate

    def _below(
        self, m: int, level: float, stages: dict[int, _Stages], links: dict[int, Any], placed: dict[int, Any],
        unit: int, ranks: int,
    ) -> Iterator[tuple[float, PipelineOutline]]:  # fmt: skip
        """For each number of stages the plan with the least round trip and no stage slower than ``level`` seconds."""
        count = len(self.cuts)
        behind = np.full((count, ranks + 1), INF)
        behind[-1] = 0.0
        turns: list[Any] = []
        clock.count("entry", min(self.most, ranks) * len(stages) * count * count * ranks)
        for r in range(min(self.most, ranks)):
            best, turn = np.full((count, ranks + 1), INF), np.full((count, ranks + 1, 2), -1)
            for w, s in stages.items():
                k = w // unit
                own = np.where(s.steady[r] <= level, s.steady[r] + s.once[r] / m, INF)
                if r == 0:
                    own = np.where(np.arange(count)[None, :] == count - 1, own, INF)
                rest = np.full((count, ranks), INF)
                rest[:, : ranks - k + 1] = behind[:, k:] if r == 0 else behind[:, k:] + links[w][:, None]
                total = own[:, :, None] + np.where(placed[w], rest, INF)[None]
                stop = total.argmin(axis=1)
                value = np.take_along_axis(total, stop[:, None, :], axis=1)[:, 0]
                better = value < best[:count, :ranks]
                best[:, :ranks] = np.where(better, value, best[:, :ranks])
                turn[:, :ranks, 0] = np.where(better, stop, turn[:, :ranks, 0])
                turn[:, :ranks, 1] = np.where(better, w, turn[:, :ranks, 1])
            turns.append(turn)
            behind = best
            if r and np.isfinite(best[0, 0]):
                yield self._read(m, r, float(best[0, 0]), stages, links, turns, unit)

    def _read(
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
            slowest = max(slowest, float(s.steady[k, at, stop]), float(links[w][at]) / 2 if at else 0.0)
            longest = max(longest, float(s.once[k, at, stop]))
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
        known: dict[float, float] = {}
        found = np.zeros(len(self.cuts))
        for k, cut in enumerate(self.cuts[1:-1], 1):
            size = float(self.graph.components[cut - 1].output_bytes_per_sample)
            if size not in known:
                known[size] = sum(pricer.handover(cut, layout, layout, w))
            found[k] = known[size]
        return found

    def _degree(self, w: int, m: int) -> int:
        fewest = max(self.space.fewest_samples(i) for i in range(self.n))
        samples = self.space.request.global_batch // m // fewest
        return max((d for d in range(1, w + 1) if w % d == 0 and d <= samples), default=1)

    def styles(self, w: int, m: int, *, lean: bool) -> list[StageStyle]:
        """Candidate styles; with ``lean`` also those that save memory."""
        most = self._degree(w, m)
        found = []
        for d in (d for d in range(1, most + 1) if w % d == 0):
            t = w // d
            if t > 1 and ("tensor" not in self.space.strategies.tensor or t > _SEVERAL or (w > 8 and d != most)):
                continue
            kinds: list[DataStrategyName] = ["replicate"]
            if lean and d > 1:
                kinds += [k for k in ("zero1", "zero3") if k in self.space.strategies.data]
            again = (False, True) if lean and self.space.strategies.checkpoint else (False,)
            found += [StageStyle(d, t, kind, c) for kind in kinds for c in again]
        if not any(x.data == most for x in found):
            found.append(StageStyle(most, 1, "replicate", False))
        return found

    def way(self, i: int, w: int, x: StageStyle) -> Way:
        """Component ``i`` in that style; where it cannot be split, it is replicated over the tensor ranks."""
        i = self.prices.like[i]
        if (i, w, x) not in self._ways:
            self._ways[i, w, x] = self._way(i, w, x)
        return self._ways[i, w, x]

    def _way(self, i: int, w: int, x: StageStyle) -> Way:
        splits = x.tensor > 1 and self.space.splits(i, x.tensor)
        component = self.graph.components[i]
        strategy = x.strategy
        if component.parameter_bytes == 0 or self.space.strategies.data[strategy].refusal(component, x.data):
            strategy = "replicate"
        forgets = x.checkpoint and component.saved_bytes_per_sample > component.output_bytes_per_sample
        return Way(
            layout=self._layout(w, x.data, x.tensor if splits else 1),
            data=DataDegree(strategy=strategy, degree=x.data),
            tensor=TensorDegree(strategy="tensor" if splits else "none", degree=x.tensor if splits else 1),
            checkpoint=forgets,
        )

    def uniform(self, w: int, m: int, x: StageStyle, first: int = 0) -> Uniform:
        """All components in that style, on stages of ``w`` ranks from the rank ``first`` on."""
        if (w, m, x, first) not in self._uniforms:
            pricer = self.prices.pricer(w, m, self.gpus, first)
            some = self.styles(w, m, lean=x not in self.styles(w, m, lean=False))
            some = some if x in some and self.n * len(some) <= _AT_ONCE else [x]
            menu, n = self._menu(pricer, some), len(some)
            priced = menu.priced(pricer, np.arange(len(menu.ways)))
            clock.count("way", len(menu.ways))
            for k, style in enumerate(some):
                own = PricedWays(**{name: values[k::n] for name, values in vars(priced).items()})
                made = Uniform(pricer, self.space.cluster.overlap, menu.ways[k::n], own)
                self._uniforms[w, m, style, first] = made
        return self._uniforms[w, m, x, first]

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
            self._allowed[w, x] = np.array([self.allowed(i, self.way(i, w, x)) for i in range(self.n)])
        return self._allowed[w, x] & (self.space.samples(self._layout(w, x.data, 1), m) >= self.prices.fewest)

    def _layout(self, w: int, data: int, tensor: int) -> Layout:
        return Layout(width=w, data=data, tensor=tensor, weights=self.space.weights.get(w, ()))

    def _stages(self, w: int, m: int) -> _Stages | None:
        plain = None if self.tight else self._table(w, m, lean=False)
        even = min(len(self.cuts) - 1, 2 * (-(-(len(self.cuts) - 1) // self.most)))
        each = np.arange(len(self.cuts) - even)
        if plain is not None and np.isfinite(plain.steady[:, each, each + even]).all():
            return plain
        self.tight = True
        return self._table(w, m, lean=True) if clock.counted() < self.ends else plain

    def _table(self, w: int, m: int, *, lean: bool) -> _Stages | None:
        schedule = self.space.strategies.schedules[self.schedule]
        room = self.space.capacity(self.gpus)
        overlap = self.space.cluster.overlap
        saved = overlap.compute_slowdown * max(0.0, overlap.saving)
        count, at = len(self.cuts), np.array(self.cuts)
        styles = self.styles(w, m, lean=lean)
        in_flight = [min(schedule.in_flight(0, r + 1, m), m) if r else 1 for r in range(self.most)]
        flights = np.array(in_flight)[:, None, None]
        steady = np.full((self.most, count, count), INF)
        once, style = np.zeros_like(steady), np.full(steady.shape, -1)
        forward = np.arange(count)[None, :] > np.arange(count)[:, None]
        counts = np.maximum(1, at[None, :] - at[:, None])
        before: tuple[Any, Any] | None = None
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
            own = np.moveaxis(sums[None, :] - sums[:, None], 2, 0)
            moving = np.zeros((count, count))
            for a in range(count - 1):
                pieces = np.maximum.reduceat(rows[at[a] :, 6], at[a : count - 1] - at[a])
                moving[a, a + 1 :] = np.maximum.accumulate(pieces)
            late = np.maximum(0.0, own[1] - saved * own[2]) + own[3]
            plain = before if number and replace(x, checkpoint=False) == styles[number - 1] else None
            plain = plain if x.checkpoint else None
            before = (own, moving)
            held = own[4] + flights * own[5] + moving
            both = own[0]
            if plain is not None:  # recompute only as many as memory requires
                more = plain[0][4] + flights * plain[0][5] + plain[1] - held
                share = np.clip((room - held) / np.maximum(more, 1.0), 0.0, 1.0)
                share = np.floor(share * counts) / counts
                both = both - share * np.maximum(0.0, both - plain[0][0])
            better = possible & (held <= room) & (both + late / m < steady + once / m)
            steady = np.where(better, both, steady)
            once = np.where(better, late, once)
            style = np.where(better, number, style)
        return _Stages(steady, once, style, styles) if np.isfinite(steady).any() else None
