"""An independent check of a certificate: it uses no array, table or bound of the solvers.

It asks two questions about a plan and its ``lower_bound_s``. First, does any plan break the bound? Plans of the stated
space near the answer, and the whole strategies, are priced one by one in closed form (:mod:`asa.cost.planned`). None
may be faster than the bound, or than an answer called optimal. Second, is the bound worth anything?
:meth:`Evaluator.floor` derives a bound from compute alone, with code of its own:

    step time >= sum_{j<i} T_j + m T_i  for every stage i, with T_i the least seconds of forward and backward of stage i

for one of m microbatches: the first one passes the stages before i, and stage i computes all. The least value over cuts
and widths is the floor. A bound below it shows that no search was made.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

from asa.cost.machine.estimate import on_device
from asa.cost.planned import schedule_of
from asa.cost.pricing import Way
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.codec import noun
from asa.ir.layout import Layout
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.planner.pipeline.kinds import kinds, views
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.request import Request
from asa.planner.space.space import MOST_IN_A_PIPELINE, Space, widths

_CLOSE = 1e-9
_ROOM = 16 * 2**10
"""Bytes by which a plan may exceed the memory limit, because solvers have a tolerance."""


@noun
class Trial:
    """The outcome of a check. ``fastest_s`` is the time of the fastest of ``tried`` plans that fit.

    ``refuted``: one was faster than the certificate's bound or than a plan called optimal, or the answer does not fit.
    """

    tried: int
    fastest_s: float
    lower_bound_s: float
    floor_s: float
    answer_s: float
    refuted: bool


class Evaluator:
    """Prices plans of one problem: a profile, a cluster, strategies and a request."""

    def __init__(
        self, plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies, request: Request | None = None
    ) -> None:
        if request is None:
            request = Request(
                gpus=plan.gpus, global_batch=plan.global_batch, optimizer=plan.optimizer, compression=plan.compression
            )
        self.space = Space(on_device(profile, cluster), cluster.ordered(plan.devices), strategies, request)
        self.prices = Prices(self.space)
        schedule_of(plan, strategies)
        self.answer = Candidate.of(plan, profile, strategies)
        self.space = self.space.weighted(self.answer.weights)
        self.ways = lru_cache(maxsize=100_000)(self._ways)

    def seconds(self, candidate: Candidate) -> float | None:
        """The step time of a candidate in seconds. None where it does not fit, or a stage of a pipeline has devices of
        several kinds, which is outside the space."""
        if len(candidate.widths) > 1 and self.space.cluster.unequal:
            kinds_of = kinds(self.space.cluster, candidate.ranks)
            ends = [0, *accumulate(candidate.widths)]
            if any(len(set(kinds_of[a:b])) > 1 for a, b in pairwise(ends)):
                return None
        price = self.prices.of(candidate)
        return price.cost.total_s if price.peak.total <= self.prices.capacity(candidate) + _ROOM else None

    def _ways(self, index: int, width: int, num_microbatches: int) -> tuple[Way, ...]:
        """Every way to run component ``index`` in a stage of ``width`` ranks."""
        return tuple(self.space.ways(index, width, num_microbatches, self.space.pinned))

    def floor(self) -> float:
        """A lower bound on the step time of every plan, in seconds, from compute alone."""
        least_s = float("inf")
        for m in self.space.microbatches():
            for prices, among in views(self.prices):
                least_s = min([least_s, *(m * sum(prices.compute(w, m)) for w in among)])
            if self.space.schedules and m <= MOST_IN_A_PIPELINE:
                least_s = min(least_s, self._pipelines(m, least_s))
        return least_s

    def _fastest(self, width: int, m: int) -> list[float]:
        """For each component its least seconds of compute in a stage of ``width`` ranks, wherever that begins."""
        gpus = self.space.request.gpus
        firsts = range(gpus - width + 1) if self.space.cluster.unequal else (0,)
        return [min(times) for times in zip(*(self.prices.compute(width, m, gpus, r) for r in firsts), strict=True)]

    def _pipelines(self, m: int, best: float) -> float:
        """A lower bound in seconds for plans of several stages, by a dynamic program over cuts and ranks, from the last
        stage to the first. Bounds above ``best`` are not computed."""
        gpus, n = self.space.request.gpus, len(self.space.profile.graph)
        compute_s = {w: self._fastest(w, m) for w in widths(gpus) if w < gpus}
        none = float("inf")
        least = [[none] * (gpus + 1) for _ in range(n)] + [[0.0] * (gpus + 1)]
        for start in range(n - 1, -1, -1):
            row = least[start]
            for w, component_s in compute_s.items():
                time = 0.0
                for stop in range(start + 1, n + 1):
                    time += component_s[stop - 1]
                    if m * time >= best:
                        break
                    behind = least[stop]
                    for r in range(w, gpus + 1):
                        step_s = max(m * time, time + behind[r - w])
                        if step_s < row[r]:
                            row[r] = step_s
        return least[0][gpus]


def moves(evaluator: Evaluator, rng: random.Random, count: int) -> Iterator[Candidate]:
    """``count`` random plans of the space near the answer. They differ in the ways of a few components, a cut, a rank,
    the number of stages or microbatches, or the schedule; some are several such changes away."""
    at, yielded = evaluator.answer, 0
    while yielded < count:
        if rng.random() < 0.3:
            at = evaluator.answer
        moved = _moved(evaluator, at, rng)
        if moved is None:
            at = evaluator.answer
            continue
        yielded += 1
        yield moved
        at = moved if rng.random() < 0.4 else evaluator.answer


def _moved(e: Evaluator, at: Candidate, rng: random.Random) -> Candidate | None:
    kind = rng.random()
    if kind < 0.6 or len(at.ways) == 1:
        return _other_ways(e, at, rng)
    if kind < 0.9 and e.space.schedules and e.space.request.gpus > 1:
        return _other_stages(e, at, rng)
    if len(at.widths) == 1:
        return _rebuilt(e, at, at.starts, at.widths, max(1, at.num_microbatches // 2), at.schedule, rng)
    if rng.random() < 0.3:
        return replace(at, schedule=rng.choice(list(e.space.schedules)))  # type: ignore[arg-type]
    m = rng.choice([max(1, at.num_microbatches // 2), 2 * at.num_microbatches])
    return _rebuilt(e, at, at.starts, at.widths, m, at.schedule, rng)


def _other_ways(e: Evaluator, at: Candidate, rng: random.Random) -> Candidate:
    """A random plan in which one to three components, in a row or not, have another way."""
    ways = list(at.ways)
    first, count, in_a_row = rng.randrange(len(ways)), rng.choice([1, 1, 1, 2, 3]), rng.random() < 0.5
    picked = None
    for k in range(count):
        i = (first + k) % len(ways) if in_a_row else rng.randrange(len(ways))
        offered = e.ways(i, at.width(i), at.num_microbatches) or (ways[i],)
        if in_a_row and picked in offered:
            ways[i] = picked
            continue
        picked = ways[i] = rng.choice(offered)
    return replace(at, ways=tuple(ways))


def _other_stages(e: Evaluator, at: Candidate, rng: random.Random) -> Candidate | None:
    """A random plan with a cut moved, a rank moved to another stage, two stages joined or one split."""
    starts, sizes, n = list(at.starts), list(at.widths), len(at.ways)
    kind = rng.randrange(4)
    s = rng.randrange(len(sizes))
    if kind == 0 and s:
        starts[s] += rng.choice([-1, 1])
    elif kind == 1 and len(sizes) > 1:
        other = rng.choice([k for k in range(len(sizes)) if k != s])
        sizes[s], sizes[other] = sizes[s] - 1, sizes[other] + 1
    elif kind == 2 and s:
        sizes[s - 1] += sizes[s]
        del starts[s], sizes[s]
    elif sizes[s] > 1:
        a, b = starts[s], starts[s + 1] if s + 1 < len(starts) else n
        if b - a < 2:
            return None
        starts.insert(s + 1, rng.randrange(a + 1, b))
        kept_ranks = rng.randrange(1, sizes[s])
        sizes[s : s + 1] = [kept_ranks, sizes[s] - kept_ranks]
    else:
        return None
    schedule = at.schedule if at.schedule != "none" else rng.choice(list(e.space.schedules))
    if len(sizes) == 1:
        schedule = "none"
    return _rebuilt(e, at, tuple(starts), tuple(sizes), at.num_microbatches, schedule, rng)


def _rebuilt(
    e: Evaluator, at: Candidate, starts: Sequence[int], sizes: Sequence[int], m: int, schedule: str,
    rng: random.Random,
) -> Candidate | None:  # fmt: skip
    """The plan with other stages, each component run as before where possible; None where that is outside the space."""
    n, gpus = len(at.ways), e.space.request.gpus
    allowed = set(widths(gpus) if len(sizes) > 1 else e.space.single_widths())
    if sum(sizes) > gpus or any(w not in allowed for w in sizes) or m > e.space.request.global_batch:
        return None
    if any(a >= b for a, b in zip(starts, [*starts[1:], n], strict=True)):
        return None
    if not all(e.space.profile.graph.cuttable(start) for start in starts[1:]):
        return None
    offsets = [sum(sizes[:s]) for s in range(len(sizes))]
    if len(sizes) > 1:
        refused = e.space.strategies.schedules[schedule].refusal(len(sizes), m)
        may_begin = all(e.space.placed(o, w) for o, w in zip(offsets, sizes, strict=True))
        if refused or not may_begin or m > MOST_IN_A_PIPELINE:
            return None
    elif m > at.num_microbatches or len(at.widths) > 1 < m:
        return None  # more microbatches in a single stage are in the space only while memory binds
    rebuilt = replace(
        at,
        starts=tuple(starts),
        widths=tuple(sizes),
        num_microbatches=m,
        schedule=schedule,  # type: ignore[arg-type]
    )
    ways = []
    for i, way in enumerate(at.ways):
        offered = e.ways(i, rebuilt.width(i), m)
        if not offered:
            return None
        ways.append(way if way in offered else _most_similar(way, offered, rng))
    return replace(rebuilt, ways=tuple(ways))


def _most_similar(way: Way, offered: Sequence[Way], rng: random.Random) -> Way:
    """A random one of the offered ways whose tensor degree and replication are closest to those of ``way``."""

    def distance(x: Way) -> tuple[bool, int, bool]:
        return x.tensor.degree != way.tensor.degree, abs(_repeats(x.layout) - _repeats(way.layout)), x.data != way.data

    best = min(distance(x)[:2] for x in offered)
    return rng.choice([x for x in offered if distance(x)[:2] == best])


def _repeats(layout: Layout) -> int:
    return layout.width // (layout.data * layout.tensor)


def check(
    plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies, request: Request | None = None, *,
    tries: int = 1000, seed: int = 0,
) -> Trial:  # fmt: skip
    """Try to refute the certificate of ``plan`` with ``tries`` random plans near it and with its baselines.

    ``request``: needed where it has a memory limit or pins, which the plan does not state.

    Raises:
        InvalidInputError: the plan and the profile do not belong together.
    """
    evaluator = Evaluator(plan, profile, cluster, strategies, request)
    certificate, answer = plan.certificate, evaluator.seconds(evaluator.answer)
    times = [b.step_time_s for b in plan.baselines if b.fits and b.step_time_s is not None]
    times += [t for c in moves(evaluator, random.Random(seed), tries) if (t := evaluator.seconds(c)) is not None]
    fastest = min(times, default=float("inf"))
    least = certificate.lower_bound_s if certificate.status == "feasible" else plan.prediction.step_time_s
    return Trial(
        tried=len(times),
        fastest_s=fastest,
        lower_bound_s=certificate.lower_bound_s,
        floor_s=evaluator.floor(),
        answer_s=plan.prediction.step_time_s,
        refuted=answer is None or fastest < least * (1 - _CLOSE) or answer < certificate.lower_bound_s * (1 - _CLOSE),
    )
