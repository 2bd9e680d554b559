"""Plans of one request, priced by the closed forms alone, and annealing over them: what ``attack.py`` attacks with."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise

from asa.cost.machine.estimate import on_device
from asa.cost.memory.peak import usable
from asa.cost.pipeline import makespan
from asa.cost.planned import StagePrice, price_stage, schedule_of, ways_of
from asa.cost.pricing import Pricer, Way, times_of
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.layout import Layout, lowest_terms
from asa.ir.plan import DataDegree, Plan, TensorDegree, TensorStrategyName
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
    """Prices plans of one request, and draws others beside them. Ranks are those of ``cluster``, fastest first.

    ``best`` and ``beyond``: the fastest plan that fits, in seconds, of the space that the certificate names and of what
    lies outside it.
    """

    profile: Profile
    cluster: Cluster
    strategies: Strategies
    request: Request
    rng: random.Random
    space: str = ""
    """What a certificate says of its space. It names offloading where that is in it."""
    priced: int = 0
    best: tuple[float, Trial | None] = (NEVER, None)
    beyond: tuple[float, Trial | None] = (NEVER, None)
    _pricers: dict[object, Pricer] = field(default_factory=dict)
    _stages: dict[object, StagePrice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.used = on_device(self.profile, self.cluster)
        self.parts = self.used.graph.components
        self.times = times_of(self.used, self.strategies)
        self.schedules = [n for n in self.strategies.schedules if n != "layers"]
        ones = {t.component for t in self.used.timings if t.microbatch == 1 and t.tensor_degree == 1}
        self.fewest = [2 if c.batch_norm and c.name not in ones else 1 for c in self.parts]
        self.by_tokens = "sequence" in self.strategies.tensor and bool(self.used.by_tokens)
        gpus, batch = self.request.gpus, self.request.global_batch
        self.speeds = [self.cluster.speed(r) for r in range(gpus)]
        self.mixed = self.cluster.unequal
        self.offloads = "offload" in self.space or self.request.offload == "always"
        self.borders = [r for r in range(1, gpus) if self._kind(r) != self._kind(r - 1)]
        said = re.search(r"one stage of 1 to (\d+) ranks(.*?)(, or several| ?;)", self.space)
        most, others = (int(said[1]), said[2]) if said else (gpus, "")
        self.single_widths = {
            w for w in range(1, gpus + 1)
            if w <= most or ("multiple of 8" in others and w % 8 == 0) or (f"or of {gpus}" in others and w == gpus)
            or ("third or quarter" in others and w in [-(-batch // k) for k in (2, 3, 4)])
            or ("its divisors" in others and batch % w == 0) or ("another kind" in others and w in self.borders)
            or ("of a node" in others and w == self.cluster.node)
            or ("times the batch" in others and w % batch == 0 and (w // batch).bit_count() == 1)
        }  # fmt: skip
        """Widths that the certificate names for a single stage; all where nothing is said."""
        nodes = range(self.cluster.node, 17, self.cluster.node) if "up to 16 in whole nodes" in self.space else ()
        self.several_widths = {w for w in range(1, gpus + 1) if w <= 8 or w % 8 == 0 or w in nodes}
        if "its longest row has" in self.space:
            rows = [(kind, len(list(row))) for kind, row in groupby(map(self._kind, range(gpus)))]
            self.several_widths |= {max(n for k, n in rows if k == kind) for kind, _ in rows}

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

    def runs(self, x: Trial) -> bool:
        """Whether it is a plan that can be written down, priced and run."""
        p, n, m = len(x.widths), len(self.parts), x.microbatches
        if p > n or min(x.widths) < 1 or sum(x.widths) > self.request.gpus or m > self.request.global_batch:
            return False
        if len(x.starts) != p or x.starts[0] or any(a >= b for a, b in pairwise((*x.starts, n))):
            return False
        if self.request.microbatches is not None and m != self.request.microbatches:
            return False
        if not all(self.used.graph.cuttable(a) for a in x.starts[1:]):
            return False
        if p > 1 and (m > 1024 or self.strategies.schedules[x.schedule].refusal(p, m)):
            return False
        firsts = [0, *accumulate(x.widths)]
        if p > 1 and not all(self.cluster.placed(a, w) for a, w in zip(firsts, x.widths, strict=False)):
            return False
        return all(self._runs(i, x) for i in range(n))

    def named(self, x: Trial) -> bool:
        """Whether a plan that runs is in the space that certificates name."""
        first, p = 0, len(x.widths)
        if p > 1 and self.space and "or several" not in self.space:
            return False
        for s, w in enumerate(x.widths):
            weights = x.ways[x.starts[s]].layout.weights
            if (w not in self.single_widths) if p == 1 else (w not in self.several_widths):
                return False
            if p > 1 and (weights or len({self._kind(r) for r in range(first, first + w)}) > 1):
                return False
            first += w
        return self.request.pins != () or all(self._named(i, x) for i in range(len(self.parts)))

    def _named(self, i: int, x: Trial) -> bool:
        """In wide stages a component repeats work only so that ranks have one sample, or two, at least."""
        layout = x.ways[i].layout
        if layout.width <= 16 or layout.data * layout.tensor == layout.width:
            return True
        sizes = {self.request.global_batch // x.microbatches, -(-self.request.global_batch // x.microbatches)}
        wider = (replace(layout, data=d) for d in _divisors(layout.width // layout.tensor) if d > layout.data)
        return all(min(layout_rows(w, size) for size in sizes) < max(2, self.fewest[i]) for w in wider)

    def _kind(self, rank: int) -> tuple[float, int]:
        return self.speeds[rank], self.cluster.memories()[rank]

    def _runs(self, i: int, x: Trial) -> bool:
        way, batch, m = x.ways[i], self.request.global_batch, x.microbatches
        sizes = {batch // m, -(-batch // m)}
        if min(layout_rows(way.layout, size) for size in sizes) < self.fewest[i]:
            return False
        for pin in self.request.pins:
            if pin.matches(self.parts[i].name):
                choice = way.data if pin.axis == "data" else way.tensor
                bare = pin.axis == "data" and not self.parts[i].parameter_bytes  # nothing to shard
                if not pin.allows(pin.strategy if bare else choice.strategy, choice.degree):
                    return False
        return True

    def _shards(self, layout: Layout) -> int | None:
        """Neighbours over which hsdp shards: those of a node, where a group has several whole ones."""
        node = self.cluster.node
        inside = node // layout.inner if len(self.cluster.levels) > 1 and node % layout.inner == 0 else 1
        return inside if 1 < inside < layout.data and layout.data % inside == 0 else None

    def way(self, i: int, layout: Layout, wanted: str | None = None, again: bool | None = None) -> Way:
        """A way at random for a component in a layout, or plain replicas of it whole where that cannot be."""
        part, rng = self.parts[i], self.rng
        t = 1 if part.tied else layout.tensor
        names: list[TensorStrategyName] = ["sequence", "tensor"] if layout.sequence else ["tensor"]
        pages = self.strategies.tensor
        split = next((n for n in names if t > 1 and n in pages and not pages[n].refusal(part, t)), "none")
        t = 1 if split == "none" else t
        data = layout.width if part.tied else layout.data
        own = Layout(width=layout.width, data=data, tensor=t, weights=layout.weights, sequence=split == "sequence")
        shards = self._shards(own)
        kinds = [
            k for k, page in self.strategies.data.items() if not page.refusal(part, data) and (k != "hsdp" or shards)
        ]
        kind = wanted or rng.choice(kinds)
        if data == 1 or not part.parameter_bytes or kind not in kinds:
            kind = "replicate"
        able = self.strategies.checkpoint and part.saved_bytes_per_sample > part.output_bytes_per_sample
        offload = self.offloads and part.parameter_bytes > 0
        offload = offload and (self.request.offload == "always" or rng.random() < 0.3)
        return Way(
            layout=own, data=DataDegree(strategy=kind, degree=data, shards=shards if kind == "hsdp" else None),  # type: ignore[arg-type]
            tensor=TensorDegree(strategy=split, degree=t),
            checkpoint=able and (rng.random() < 0.3 if again is None else again), offload=offload,
        )  # fmt: skip

    def layout(self, width: int, m: int, weights: tuple[int, ...] = ()) -> Layout:
        """A layout at random, all ranks with samples of their own more often than not."""
        t = self.rng.choice(_divisors(width)) if self.rng.random() < 0.5 else 1
        samples, least = self.request.global_batch // m, self.rng.choice([1, max(self.fewest)])
        rest = [d for d in _divisors(width // t) if d * least <= samples] or [1]
        d = rest[-1] if self.rng.random() < 0.8 else self.rng.choice(rest)
        by_tokens = t > 1 and self.by_tokens and self.rng.random() < 0.5
        return Layout(width=width, data=d, tensor=t, weights=weights, sequence=by_tokens)

    def alike(self, start: int, stop: int, width: int, m: int, weights: tuple[int, ...] = ()) -> tuple[Way, ...]:
        """Components run alike."""
        layout, rng = self.layout(width, m, weights), self.rng
        kind, again = rng.choice(list(self.strategies.data)), rng.random() < 0.4
        return tuple(self.way(i, layout, kind, again) for i in range(start, stop))

    def drawn(self) -> Trial:
        """A plan at random, its stages each of one mind."""
        rng, n = self.rng, len(self.parts)
        widths = self._ranks(1 if rng.random() < 0.4 else rng.randint(1, min(self.request.gpus, n, 8)))
        starts = (0, *sorted(rng.sample(range(1, n), len(widths) - 1)))
        m = self.request.microbatches or 2 ** rng.randint(0, min(8, int(math.log2(self.request.global_batch))))
        stops = (*starts[1:], n)
        ways = tuple(
            way for a, b, w in zip(starts, stops, widths, strict=True) for way in self.alike(a, b, w, m)
        )  # fmt: skip
        return Trial(starts, widths, m, rng.choice(self.schedules) if len(widths) > 1 else "none", ways)

    def _ranks(self, stages: int) -> tuple[int, ...]:
        """Widths of up to ``stages`` stages from rank 0 on, each where it may begin and mostly on devices of a kind."""
        rng, gpus = self.rng, self.request.gpus
        if stages == 1:
            return (gpus if rng.random() < 0.5 else rng.choice([*self.borders, *self.single_widths]),)
        widths, first = list[int](), 0
        while first < gpus and len(widths) < stages:
            end = next((r for r in self.borders if r > first), gpus) if rng.random() < 0.9 else gpus
            able = [w for w in range(1, end - first + 1) if self.cluster.placed(first, w)]
            if not able:
                break
            even = gpus // stages
            widths.append(min(able, key=lambda w: abs(w - even)) if rng.random() < 0.7 else rng.choice(able))
            first += widths[-1]
        return tuple(widths) if len(widths) > 1 else (gpus,)

    def beside(self, x: Trial) -> Trial:
        """A plan that differs in one thing."""
        moves: list[Callable[[Trial], Trial]] = [self._one, self._one, self._some, self._stage]
        if self.request.microbatches is None:
            moves.append(self._count)
        if len(x.widths) > 1:
            moves += [self._cut, self._cut, self._order, self._merged]
        if self.request.gpus > 1:
            moves += [self._widths, self._widths]
        if len(x.starts) < len(self.parts) and self.request.gpus > 1:
            moves.append(self._divided)
        if self.mixed and len(x.widths) == 1 and self.request.uneven:
            moves += [self._weighed] * 3 + [self._counted] * 2
        return self.rng.choice(moves)(x)

    def _stage_of(self, x: Trial) -> tuple[int, int, int]:
        s = self.rng.randrange(len(x.widths))
        return s, x.starts[s], (*x.starts[1:], len(self.parts))[s]

    def _one(self, x: Trial) -> Trial:
        i = self.rng.randrange(len(self.parts))
        s = sum(a <= i for a in x.starts) - 1
        old = x.ways[i].layout
        layout = old if self.rng.random() < 0.6 else self.layout(x.widths[s], x.microbatches, old.weights)
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
        return self._with(x, a, self.alike(a, b, x.widths[s], x.microbatches, x.ways[a].layout.weights))

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
        """Ranks go from a stage to another, to none, or come from none; or a single stage takes any other width."""
        widths, rng, gpus = list(x.widths), self.rng, self.request.gpus
        s, t = rng.randrange(len(widths)), rng.randrange(len(widths))
        by = rng.choice([1, 1, 2, 4, 8])
        if len(widths) == 1 and rng.random() < 0.5:
            by = widths[0] - rng.choice([*self.borders, *self.single_widths, rng.randint(1, gpus)])
        elif s == t and rng.random() < 0.5:
            by = -min(by, gpus - sum(widths))
        if by == 0 or widths[s] <= by:
            return x
        widths[s] -= by
        if s != t:
            widths[t] += by
        found = replace(x, widths=tuple(widths))
        for k in {s, t}:
            a, b = x.starts[k], (*x.starts[1:], len(self.parts))[k]
            alike = rng.random() < 0.3
            found = self._with(found, a, self.alike(a, b, widths[k], x.microbatches) if alike
                               else self._as_before(x, a, b, widths[k]))  # fmt: skip
        return found

    def _as_before(self, x: Trial, a: int, b: int, width: int) -> tuple[Way, ...]:
        """Components in a stage of another width, each as it ran, as far as that can be."""
        samples, least, ways = self.request.global_batch // x.microbatches, max(self.fewest[a:b]), []
        for i in range(a, b):
            old = x.ways[i]
            t = old.tensor.degree if width % old.tensor.degree == 0 else 1
            t = width if old.tensor.degree == old.layout.width else t
            d = max([d for d in _divisors(width // t) if d * least <= samples], default=1)
            ways.append(self.way(i, Layout(width=width, data=d, tensor=t), old.data.strategy, old.checkpoint))
        return tuple(ways)

    def _merged(self, x: Trial) -> Trial:
        s = self.rng.randrange(1, len(x.starts))
        width = x.widths[s - 1] + x.widths[s] if self.rng.random() < 0.8 else x.widths[s - 1]
        widths = (*x.widths[: s - 1], width, *x.widths[s + 1 :])
        starts = (*x.starts[:s], *x.starts[s + 1 :])
        a, b = starts[s - 1], (*starts[1:], len(self.parts))[s - 1]
        schedule = x.schedule if len(widths) > 1 else "none"
        return replace(
            self._with(x, a, self.alike(a, b, width, x.microbatches)), widths=widths, starts=starts, schedule=schedule
        )  # fmt: skip

    def _divided(self, x: Trial) -> Trial:
        s, a, b = self._stage_of(x)
        free = self.request.gpus - sum(x.widths)
        if b - a < 2 or x.widths[s] + free < 2:
            return x
        cut, w = self.rng.randrange(a + 1, b), self.rng.randint(1, x.widths[s] + free - 1)
        rest = min(x.widths[s] + free - w, max(1, x.widths[s] - w))
        m = x.microbatches
        found = self._with(self._with(x, a, self.alike(a, cut, w, m)), cut, self.alike(cut, b, rest, m))
        return replace(
            found, widths=(*x.widths[:s], w, rest, *x.widths[s + 1 :]),
            starts=(*x.starts[: s + 1], cut, *x.starts[s + 1 :]),
            schedule=x.schedule if len(x.widths) > 1 else self.rng.choice(self.schedules),
        )  # fmt: skip

    def _weighed(self, x: Trial) -> Trial:
        """Ranks of one speed, or seldom one rank alone, have more or fewer samples."""
        w, rng = x.widths[0], self.rng
        old = x.ways[0].layout.weights or tuple(max(1, round(1000 * self.speeds[r])) for r in range(w))
        chosen, factor = rng.randrange(w), math.exp(rng.gauss(0, rng.choice([0.02, 0.3])))
        alike = {chosen} if rng.random() < 0.1 else {r for r in range(w) if self.speeds[r] == self.speeds[chosen]}
        new = [max(1, round(10 * v * (factor if r in alike else 1))) for r, v in enumerate(old)]
        while max(new) > 10**5:
            new = [max(1, v // 7) for v in new]
        return self._weighted(x, tuple(new))

    def _counted(self, x: Trial) -> Trial:
        """Ranks of one speed have a whole number of samples each, the others share the rest; or all have as many."""
        w, rng = x.widths[0], self.rng
        chosen = self.speeds[rng.randrange(w)]
        own = sum(s == chosen for s in self.speeds[:w])
        most = self.request.global_batch // x.microbatches // own
        if own == w or most < 1 or rng.random() < 0.2:
            return self._weighted(x, ())
        rows, others = rng.randint(1, most), w - own
        rest = self.request.global_batch // x.microbatches - own * rows
        return self._weighted(
            x, tuple(rows * others if s == chosen else max(1, rest) for s in self.speeds[:w])
        )  # fmt: skip

    @staticmethod
    def _weighted(x: Trial, weights: tuple[int, ...]) -> Trial:
        cut = lowest_terms(weights) if weights else ()
        return replace(x, ways=tuple(replace(v, layout=replace(v.layout, weights=cut)) for v in x.ways))

    @staticmethod
    def _with(x: Trial, at: int, ways: Sequence[Way]) -> Trial:
        return replace(x, ways=(*x.ways[:at], *ways, *x.ways[at + len(ways) :]))

    def note(self, x: Trial, taken: float) -> None:
        """Take a plan that fits and runs, where it is the fastest."""
        if taken < self.best[0] and self.named(x):
            self.best = taken, x
        elif taken < min(self.best[0], self.beyond[0]):
            self.beyond = taken, x

    def annealed(self, x: Trial, moves: int, *, wide: bool = False, fit: bool = False) -> None:
        """Walk from a plan to others and :meth:`note` those that fit. ``wide``: also beyond the named space; ``fit``:
        only memory counts, until a plan fits."""
        taken, over = self.seconds(x)
        if over <= 0:
            self.note(x, taken)
        now = (1.0 if fit else taken) * (1 + 20 * over)
        for k in range(moves):
            other = self.beside(x)
            if other == x or not self.runs(other) or not (wide or self.named(other)):
                continue
            taken, over = self.seconds(other)
            if over <= 0:
                self.note(other, taken)
                if fit:
                    return
            value, heat = (1.0 if fit else taken) * (1 + 20 * over), 0.05 * (1 - k / moves) ** 2 + 1e-6
            if value <= now or self.rng.random() < math.exp((1 - value / now) / heat):
                x, now = other, value


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def layout_rows(layout: Layout, size: int) -> int:
    """Samples of the smallest shard."""
    rows = (layout.rows(size, i) for i in range(layout.data))
    return min(b - a for a, b in rows) if layout.weights else size // layout.data
