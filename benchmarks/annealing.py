"""Plans of one request, priced by the closed forms alone, and annealing over them: what ``attack.py`` attacks with."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from asa.cost.machine.estimate import on_device
from asa.cost.memory.peak import usable
from asa.cost.pipeline import makespan
from asa.cost.planned import StagePrice, price_stage, schedule_of, ways_of
from asa.cost.pricing import Pricer, Way, times_of
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.layout import Layout, lowest_terms
from asa.ir.plan import DataDegree, Plan, TensorDegree
from asa.ir.profile import Profile
from asa.planner import Request

ROOM = 16 * 2**10
"""Bytes by which a plan may overstep its memory: solvers have a tolerance."""
CLOSE = 1e-9
NEVER = float("inf")


@dataclass(frozen=True)
class Trial:
    """A plan to be priced: stage s runs components from ``starts[s]`` on, on ``widths[s]`` ranks."""

    starts: tuple[int, ...]
    widths: tuple[int, ...]
    microbatches: int
    schedule: str
    ways: tuple[Way, ...]


@dataclass
class Annealing:
    """Prices plans of one request, and draws others beside them."""

    profile: Profile
    cluster: Cluster
    strategies: Strategies
    request: Request
    rng: random.Random
    priced: int = 0
    _pricers: dict[object, Pricer] = field(default_factory=dict)
    _stages: dict[object, StagePrice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.used = on_device(self.profile, self.cluster)
        self.parts = self.used.graph.components
        self.times = times_of(self.used, self.strategies)
        self.schedules = [n for n in self.strategies.schedules if n != "layers"]
        ones = {t.component for t in self.used.timings if t.microbatch == 1 and t.tensor_degree == 1}
        self.fewest = [2 if c.batch_norm and c.name not in ones else 1 for c in self.parts]
        self.speeds = [self.cluster.speed(r) for r in range(self.request.gpus)]
        self.mixed = self.cluster.unequal

    def answered(self, answer: Plan) -> Trial:
        """The plan that is attacked."""
        schedule_of(answer, self.strategies)
        return Trial(
            answer.starts(), tuple(len(s.ranks) for s in answer.stages), answer.num_microbatches, answer.schedule,
            ways_of(answer, self.used, self.strategies),
        )  # fmt: skip

    def pricer(self, width: int, m: int, busy: int, first: int) -> Pricer:
        speeds = self.cluster.speeds(range(first, first + width))
        key = (width, m, busy, speeds)
        if key not in self._pricers:
            self._pricers[key] = Pricer(
                self.used, self.times, self.cluster, self.strategies, width=width,
                global_batch=self.request.global_batch, num_microbatches=m, optimizer=self.request.optimizer,
                busy=busy, compression=self.request.compression, speeds=speeds,
            )  # fmt: skip
        return self._pricers[key]

    def seconds(self, x: Trial) -> tuple[float, float]:
        """Of a step, and by what part it oversteps its memory at most (0 where it fits); infinite where it is none."""
        self.priced += 1
        p, m = len(x.widths), x.microbatches
        busy = x.widths[0] if p == 1 else self.request.gpus
        schedule = None if p == 1 else self.strategies.schedules[x.schedule]
        firsts, stops = [0, *accumulate(x.widths)], (*x.starts[1:], len(self.parts))
        stages, over = [], 0.0
        for s, (a, b, w) in enumerate(zip(x.starts, stops, x.widths, strict=True)):
            flight = 1 if schedule is None else schedule.in_flight(s, p, m)
            key = (a, w, m, busy, flight, x.ways[a:b], self.cluster.speeds(range(firsts[s], firsts[s] + w)))
            if key not in self._stages:
                pricer = self.pricer(w, m, busy, firsts[s])
                self._stages[key] = price_stage(pricer, a, x.ways[a:b], self.cluster.overlap, flight)
            stages.append(self._stages[key])
            for place in range(w if stages[-1].peaks or self.cluster.devices else 1):
                free = self._free(firsts[s] + place, busy)
                over = max(over, (stages[-1].peak_of(place) - free - ROOM) / max(1.0, abs(free)))
        if schedule is None:
            return stages[0].cost.total_s, over
        moves = [
            self.pricer(x.widths[s - 1], m, busy, firsts[s - 1]).handover(
                x.starts[s], x.ways[x.starts[s] - 1].layout, x.ways[x.starts[s]].layout, firsts[s]
            )
            for s in range(1, p)
        ]  # fmt: skip
        return makespan([s.times for s in stages], moves, schedule, m), over

    def _free(self, rank: int, busy: int) -> float:
        limit = self.request.memory_bytes
        if limit is None:
            limit = self.cluster.memories()[rank]
        return usable(self.cluster.device, limit, busy)

    def possible(self, x: Trial) -> bool:
        """Whether it is a plan of the stated space."""
        p, n = len(x.widths), len(self.parts)
        if p > n or sum(x.widths) > self.request.gpus or x.microbatches > self.request.global_batch:
            return False
        if len(x.starts) != p or x.starts[0] or any(a >= b for a, b in pairwise((*x.starts, n))):
            return False
        if not all(self.used.graph.cuttable(a) for a in x.starts[1:]):
            return False
        if p > 1 and (x.microbatches > 1024 or self.strategies.schedules[x.schedule].refusal(p, x.microbatches)):
            return False
        first = 0
        for w in x.widths:
            if w > 8 and w % 8 and w != self.request.gpus:
                return False
            if p > 1 and self.mixed and len({self._kind(r) for r in range(first, first + w)}) > 1:
                return False
            for level in self.cluster.levels[:-1]:
                inside = first // level.devices == (first + w - 1) // level.devices
                if p > 1 and not inside and (first % level.devices or w % level.devices):
                    return False
            first += w
        return all(self._runs(i, x) for i in range(n))

    def _kind(self, rank: int) -> tuple[float, int]:
        return self.speeds[rank], self.cluster.memories()[rank]

    def _runs(self, i: int, x: Trial) -> bool:
        way, batch, m = x.ways[i], self.request.global_batch, x.microbatches
        sizes = {batch // m, -(-batch // m)}
        shard = min(layout_rows(way.layout, size) for size in sizes)
        if shard < self.fewest[i] or (way.layout.width > 16 and way.layout.data * way.layout.tensor < way.layout.width):
            return False
        for pin in self.request.pins:
            if pin.matches(self.parts[i].name):
                choice = way.data if pin.axis == "data" else way.tensor
                if not pin.allows(choice.strategy, choice.degree):
                    return False
        return True

    def way(self, i: int, layout: Layout, wanted: str | None = None, again: bool | None = None) -> Way:
        """A way at random for a component in a layout, or plain replicas of it whole where that cannot be."""
        part, rng = self.parts[i], self.rng
        t = layout.tensor
        if part.tied or (t > 1 and ("tensor" not in self.strategies.tensor or
                                    self.strategies.tensor["tensor"].refusal(part, t))):  # fmt: skip
            t = 1
        data = layout.width if part.tied else layout.data
        own = Layout(width=layout.width, data=data, tensor=t, weights=layout.weights)
        kinds = [k for k, page in self.strategies.data.items() if not page.refusal(part, data) and k != "hsdp"]
        kind = wanted or rng.choice(kinds)
        if data == 1 or part.tied or not part.parameter_bytes or kind not in kinds:
            kind = "replicate"
        able = self.strategies.checkpoint and part.saved_bytes_per_sample > part.output_bytes_per_sample
        return Way(
            layout=own, data=DataDegree(strategy=kind, degree=data),  # type: ignore[arg-type]
            tensor=TensorDegree(strategy="tensor" if t > 1 else "none", degree=t),
            checkpoint=able and (rng.random() < 0.3 if again is None else again),
        )  # fmt: skip

    def layout(self, width: int, weights: tuple[int, ...] = ()) -> Layout:
        """A layout at random, all ranks with samples of their own more often than not."""
        divisors = [d for d in range(1, width + 1) if width % d == 0]
        t = self.rng.choice(divisors) if self.rng.random() < 0.5 else 1
        rest = [d for d in divisors if (width // t) % d == 0]
        d = rest[-1] if self.rng.random() < 0.8 else self.rng.choice(rest)
        return Layout(width=width, data=d, tensor=t, weights=weights)

    def alike(self, start: int, stop: int, width: int, weights: tuple[int, ...] = ()) -> tuple[Way, ...]:
        """Components run alike."""
        layout, rng = self.layout(width, weights), self.rng
        kind, again = rng.choice(list(self.strategies.data)), rng.random() < 0.4
        return tuple(self.way(i, layout, kind, again) for i in range(start, stop))

    def drawn(self) -> Trial:
        """A plan at random, its stages each of one mind."""
        rng, n, gpus = self.rng, len(self.parts), self.request.gpus
        p = 1 if rng.random() < 0.4 else rng.randint(1, min(gpus, n, 8))
        width = max(1, gpus // p)
        starts = (0, *sorted(rng.sample(range(1, n), p - 1)))
        m = 2 ** rng.randint(0, min(8, int(math.log2(self.request.global_batch))))
        stops = (*starts[1:], n)
        ways = tuple(w for a, b in zip(starts, stops, strict=True) for w in self.alike(a, b, width))
        return Trial(starts, (width,) * p, m, rng.choice(self.schedules) if p > 1 else "none", ways)

    def beside(self, x: Trial) -> Trial:
        """A plan that differs in one thing."""
        moves: list[Callable[[Trial], Trial]] = [self._one, self._one, self._some, self._stage, self._count]
        if len(x.widths) > 1:
            moves += [self._cut, self._cut, self._widths, self._order, self._merged]
        if len(x.starts) < len(self.parts) and self.request.gpus > 1:
            moves.append(self._divided)
        if self.mixed and len(x.widths) == 1 and self.request.uneven:
            moves += [self._weighed] * 4
        return self.rng.choice(moves)(x)

    def _stage_of(self, x: Trial) -> tuple[int, int, int]:
        s = self.rng.randrange(len(x.widths))
        return s, x.starts[s], (*x.starts[1:], len(self.parts))[s]

    def _one(self, x: Trial) -> Trial:
        i = self.rng.randrange(len(self.parts))
        s = sum(a <= i for a in x.starts) - 1
        old = x.ways[i].layout
        layout = old if self.rng.random() < 0.6 else self.layout(x.widths[s], old.weights)
        return self._with(x, i, (self.way(i, layout),))

    def _some(self, x: Trial) -> Trial:
        """Neighbours as one of them is."""
        _, a, b = self._stage_of(x)
        i, j = sorted(self.rng.choices(range(a, b), k=2))
        like = x.ways[self.rng.randrange(a, b)]
        ways = tuple(self.way(k, like.layout, like.data.strategy, like.checkpoint) for k in range(i, j + 1))
        return self._with(x, i, ways)

    def _stage(self, x: Trial) -> Trial:
        s, a, b = self._stage_of(x)
        return self._with(x, a, self.alike(a, b, x.widths[s], x.ways[a].layout.weights))

    def _count(self, x: Trial) -> Trial:
        return replace(x, microbatches=max(1, x.microbatches * 2 if self.rng.random() < 0.5 else x.microbatches // 2))

    def _order(self, x: Trial) -> Trial:
        return replace(x, schedule=self.rng.choice(self.schedules))

    def _cut(self, x: Trial) -> Trial:
        """A cut moved; what changes its stage runs as its new neighbour does."""
        s = self.rng.randrange(1, len(x.starts))
        by = self.rng.choice([-2, -1, -1, 1, 1, 2])
        start, old = x.starts[s] + by, x.starts[s]
        if not (x.starts[s - 1] < start < (*x.starts[1:], len(self.parts))[s]):
            return x
        like = x.ways[old] if start < old else x.ways[old - 1]
        moved = range(min(start, old), max(start, old))
        ways = tuple(self.way(i, like.layout, like.data.strategy, like.checkpoint) for i in moved)
        starts = (*x.starts[:s], start, *x.starts[s + 1 :])
        return replace(self._with(x, moved.start, ways), starts=starts)

    def _widths(self, x: Trial) -> Trial:
        """Ranks go from a stage to another, or to none."""
        widths = list(x.widths)
        s, t = self.rng.randrange(len(widths)), self.rng.randrange(len(widths))
        by = self.rng.choice([1, 1, 2, 4, 8])
        if widths[s] <= by:
            return x
        widths[s] -= by
        if s != t:
            widths[t] += by
        found = replace(x, widths=tuple(widths))
        for k in {s, t}:
            a, b = x.starts[k], (*x.starts[1:], len(self.parts))[k]
            found = self._with(found, a, self.alike(a, b, widths[k]))
        return found

    def _merged(self, x: Trial) -> Trial:
        s = self.rng.randrange(1, len(x.starts))
        width = x.widths[s - 1] + x.widths[s] if self.rng.random() < 0.8 else x.widths[s - 1]
        widths = (*x.widths[: s - 1], width, *x.widths[s + 1 :])
        starts = (*x.starts[:s], *x.starts[s + 1 :])
        a, b = starts[s - 1], (*starts[1:], len(self.parts))[s - 1]
        schedule = x.schedule if len(widths) > 1 else "none"
        return replace(
            self._with(x, a, self.alike(a, b, width)), widths=widths, starts=starts, schedule=schedule
        )  # fmt: skip

    def _divided(self, x: Trial) -> Trial:
        s, a, b = self._stage_of(x)
        free = self.request.gpus - sum(x.widths)
        if b - a < 2 or x.widths[s] + free < 2:
            return x
        cut, w = self.rng.randrange(a + 1, b), self.rng.randint(1, x.widths[s] + free - 1)
        rest = min(x.widths[s] + free - w, max(1, x.widths[s] - w))
        found = self._with(self._with(x, a, self.alike(a, cut, w)), cut, self.alike(cut, b, rest))
        return replace(
            found, widths=(*x.widths[:s], w, rest, *x.widths[s + 1 :]),
            starts=(*x.starts[: s + 1], cut, *x.starts[s + 1 :]),
            schedule=x.schedule if len(x.widths) > 1 else self.rng.choice(self.schedules),
        )  # fmt: skip

    def _weighed(self, x: Trial) -> Trial:
        w, rng = x.widths[0], self.rng
        old = x.ways[0].layout.weights or tuple(round(1000 * self.speeds[r]) for r in range(w))
        kinds = [self._kind(r) for r in range(w)]
        kind, factor = rng.choice(kinds), math.exp(rng.gauss(0, 0.1))
        new = [max(1, round(10 * v * (factor if k == kind else 1))) for v, k in zip(old, kinds, strict=True)]
        while max(new) > 10**5:
            new = [max(1, v // 7) for v in new]
        cut = lowest_terms(tuple(new))
        return replace(x, ways=tuple(replace(v, layout=replace(v.layout, weights=cut)) for v in x.ways))

    @staticmethod
    def _with(x: Trial, at: int, ways: Sequence[Way]) -> Trial:
        return replace(x, ways=(*x.ways[:at], *ways, *x.ways[at + len(ways) :]))

    def annealed(self, x: Trial, moves: int) -> tuple[float, Trial | None]:
        """The fastest plan that fits which is met on the way."""
        best, found = NEVER, None
        taken, over = self.seconds(x)
        if over <= 0:
            best, found = taken, x
        now = taken * (1 + 20 * over)
        for k in range(moves):
            other = self.beside(x)
            if other == x or not self.possible(other):
                continue
            taken, over = self.seconds(other)
            if over <= 0 and taken < best:
                best, found = taken, other
            value, heat = taken * (1 + 20 * over), 0.05 * (1 - k / moves) ** 2 + 1e-6
            if value <= now or self.rng.random() < math.exp((1 - value / now) / heat):
                x, now = other, value
        return best, found


def layout_rows(layout: Layout, size: int) -> int:
    """Samples of the smallest shard."""
    rows = (layout.rows(size, i) for i in range(layout.data))
    return min(b - a for a, b in rows) if layout.weights else size // layout.data
