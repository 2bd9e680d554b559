"""Tries to refute certificates: looks for plans that are faster than a bound, or than a plan called optimal.

    python benchmarks/attack.py [--answers 300] [--moves 4000] [--seed 0] [--laws 100] [-o FILE]

Requests are drawn: a model, a cluster (a preset, one with other links, one of unequal devices), 1 to 64 devices, a
batch, an optimizer, and memory from slack to hardly enough. Each answer is attacked by annealing over cuts, widths,
microbatches, schedules, ways and weights, from the answer and from plans drawn at random. A plan is priced by the
closed forms that `planner.verify` uses (:mod:`asa.cost.planned`), with the memory that is printed; nothing of the
search is used, not even to say which plans there are. Whoever finds a plan that fits and is faster than
``lower_bound_s``, or than an answer called optimal, has refuted it.

With ``--laws``, so many requests are asked again with one device more, links twice as fast, devices a quarter faster,
more memory, or a pin less: what is proved then may not be above what was found before.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "planner_tests"))

import known_models  # noqa: E402

from asa.cost.machine import presets, widen  # noqa: E402
from asa.cost.machine.estimate import on_device  # noqa: E402
from asa.cost.memory.peak import usable  # noqa: E402
from asa.cost.pipeline import makespan  # noqa: E402
from asa.cost.planned import StagePrice, price_stage, schedule_of, ways_of  # noqa: E402
from asa.cost.pricing import Pricer, Way, times_of  # noqa: E402
from asa.errors import InfeasibleError  # noqa: E402
from asa.interfaces.strategy import Strategies  # noqa: E402
from asa.ir.cluster import Cluster, RankDevice  # noqa: E402
from asa.ir.layout import Layout, lowest_terms  # noqa: E402
from asa.ir.plan import DataDegree, Plan, TensorDegree  # noqa: E402
from asa.ir.profile import Profile  # noqa: E402
from asa.planner import Pin, Request, plan  # noqa: E402
from asa.strategies import offered  # noqa: E402

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
class Attack:
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
                over = max(over, (stages[-1].held(place) - free - ROOM) / max(1.0, abs(free)))
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


@dataclass(frozen=True)
class Verdict:
    """What became of an attack. Seconds."""

    case: str
    status: str
    answer_s: float
    lower_bound_s: float
    fastest_s: float
    priced: int
    refuted: str = ""


def attack(
    answer: Plan, profile: Profile, cluster: Cluster, strategies: Strategies, request: Request, *, moves: int,
    seed: int, case: str = "",
) -> Verdict:  # fmt: skip
    """Half of the moves from the answer, half from plans at random."""
    x = Attack(profile, cluster, strategies, request, random.Random(seed))
    own = x.answered(answer)
    said = answer.prediction.step_time_s
    taken, over = x.seconds(own)
    refuted = ""
    if abs(taken - said) > 1e-6 * said or over > 0:
        refuted = f"the answer takes {taken:.9g} s and oversteps its memory by {100 * over:.3g} %, it says {said:.9g} s"
    best, _ = x.annealed(own, moves // 2)
    for _ in range(3):
        start = next((s for s in (x.drawn() for _ in range(200)) if x.possible(s)), None)
        if start is not None:
            best = min(best, x.annealed(start, moves // 6)[0])
    bound = answer.certificate.lower_bound_s
    if best < bound * (1 - CLOSE):
        refuted = f"a plan takes {best:.9g} s, the bound is {bound:.9g} s"
    elif answer.certificate.status == "optimal" and best < said * (1 - 2e-6):
        refuted = f"a plan takes {best:.9g} s, {said:.9g} s are called optimal"
    return Verdict(case, answer.certificate.status, said, bound, best, x.priced, refuted)


def faster_links(cluster: Cluster, factor: float) -> Cluster:
    """All messages in ``1 / factor`` of their time."""
    levels = [
        replace(level, tables=tuple(
            replace(t, points=tuple((size, s / factor) for size, s in t.points)) for t in level.tables
        ))
        for level in cluster.levels
    ]  # fmt: skip
    return replace(cluster, levels=tuple(levels), name=f"{cluster.name}-links-{factor:.3g}")


def drawn(rng: random.Random, *, small: bool = False) -> tuple[str, Profile, Cluster, Request]:
    """A request at random: what it is, in words, and all that it takes."""
    models: list[tuple[str, Callable[[], Any]]] = [
        ("chain", lambda: known_models.transformer(rng.randint(1, 3), rng.choice([256, 512, 1024]), 197)),
        ("vgg16", known_models.vgg16),
    ]
    if not small:
        models += [("resnet50", known_models.resnet50), ("vit", known_models.transformer)]
    name, model = rng.choice(models)
    profile = known_models.profile(model(), rng.choice([100.0, 400.0, 2000.0]), 64)
    known = [presets.load(n) for n in presets.names()]
    cluster = rng.choice([c for c in known if c.devices is None and (not small or c.num_devices <= 8)])
    if not small and len(cluster.levels) > 1 and rng.random() < 0.5:
        cluster = widen.widened(cluster, 64) if widen.possible(cluster, 64) else cluster
    cluster = faster_links(cluster, math.exp(rng.uniform(-1.2, 1.2)))
    most = cluster.num_devices
    gpus = (
        rng.randint(1, min(4, most))
        if small
        else rng.choice([g for g in (1, 2, 3, 4, 5, 6, 8, 16, 32, 64) if g <= most])
    )
    if rng.random() < 0.3 and 1 < gpus <= 8:
        slow = rng.randint(1, gpus - 1)
        speeds = [1.0] * (gpus - slow) + [rng.choice([0.9, 0.7, 0.5, 0.3])] * (most - gpus + slow)
        cluster = replace(cluster, devices=tuple(RankDevice(name=f"at {s:g}", speed=s) for s in speeds))
    batch = rng.choice([16, 30, 64, 128] if small else [32, 64, 100, 256, 512])
    request = Request(
        gpus=gpus, global_batch=batch, optimizer=rng.choice(["sgd", "adamw"]), prefer_simple=False, offload="never",
        time_limit_s=0.4 if small else 2.0,
    )  # fmt: skip
    if rng.random() < 0.7:
        free = plan(profile, cluster, offered(), request)[0]
        held = max(free.prediction.memory_bytes_per_rank)
        context = cluster.device.memory_bytes - usable(cluster.device, None, gpus)
        share = rng.choice([1.05, 0.9, 0.75, 0.6, 0.45, 0.3])
        request = replace(request, memory_bytes=int(context + 1.1 * held * share))
    memory = "slack" if request.memory_bytes is None else f"{request.memory_bytes / 2**30:.3g} GiB"
    mixed = ", unequal" if cluster.unequal else ""
    said = (
        f"{name} of {len(profile.graph)}, {gpus} x {cluster.name}{mixed}, batch {batch}, {request.optimizer}, {memory}"
    )
    return said, profile, cluster, request


def laws(profile: Profile, cluster: Cluster, request: Request, before: Plan, rng: random.Random) -> Iterator[str]:
    """What is broken: a request that leaves more room has no bound above what was found with less."""
    more: dict[str, tuple[Cluster, Request]] = {"links twice as fast": (faster_links(cluster, 2.0), request)}
    if request.gpus < cluster.num_devices and not cluster.unequal:
        more["one device more"] = (cluster, replace(request, gpus=request.gpus + 1))
    if request.memory_bytes is not None:
        more["more memory"] = (cluster, replace(request, memory_bytes=int(1.15 * request.memory_bytes)))
    if cluster.devices is not None:
        quick = tuple(replace(d, speed=d.speed * 1.25) for d in cluster.devices)
        more["faster devices"] = (replace(cluster, devices=quick), request)
    component = rng.choice(before.components)
    pin = Pin(pattern=component.name, strategy=component.data.strategy, degree=component.data.degree)
    pairs = [(name, before, plan(profile, other, offered(), asked)[0]) for name, (other, asked) in more.items()]
    pairs.append(("a pin less", plan(profile, cluster, offered(), replace(request, pins=(pin,)))[0], before))
    for name, less, found in pairs:
        taken, least = less.prediction.step_time_s, found.certificate.lower_bound_s
        if least > taken * (1 + CLOSE):
            yield f"{name}: {taken:.6g} s before, at least {least:.6g} s then"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=300)
    parser.add_argument("--moves", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--laws", type=int, default=100, help="answers that are asked for again with more room")
    parser.add_argument("--small", action="store_true", help="chains of a few components on up to four devices")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    verdicts, broken, infeasible = list[Verdict](), list[str](), 0
    for k in range(args.answers):
        rng = random.Random(args.seed * 1_000_003 + k)
        try:
            case, profile, cluster, request = drawn(rng, small=args.small)
            answer = plan(profile, cluster, offered(), request)[0]
        except InfeasibleError:
            infeasible += 1
            continue
        found = attack(answer, profile, cluster, offered(), request, moves=args.moves, seed=k, case=f"{k}: {case}")
        verdicts.append(found)
        if found.refuted:
            print(f"REFUTED {found.case}: {found.refuted}", flush=True)
        if k < args.laws:
            for said in laws(profile, cluster, request, answer, rng):
                broken.append(f"{found.case}: {said}")
                print(f"BROKEN {broken[-1]}", flush=True)
    refuted = [v for v in verdicts if v.refuted]
    optimal = sum(v.status == "optimal" for v in verdicts)
    missed = sorted((1 - v.fastest_s / v.answer_s for v in verdicts), reverse=True)[:5]
    tried = sum(v.priced for v in verdicts)
    print(f"{len(verdicts)} answers ({optimal} called optimal; {infeasible} requests without a plan), {tried} plans")
    print(f"{len(refuted)} refuted; {len(broken)} laws broken")
    print("faster than the answer, within its gap: " + ", ".join(f"{100 * max(0.0, x):.2g} %" for x in missed))
    if args.output:
        args.output.write_text(json.dumps([vars(v) for v in verdicts], indent=1) + "\n", encoding="utf-8")
    return 1 if refuted or broken else 0


if __name__ == "__main__":
    sys.exit(main())
