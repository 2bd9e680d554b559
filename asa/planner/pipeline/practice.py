"""Standard practice: the plan that an engineer would configure by hand. No chosen plan may be slower.

It has one split of all devices over data, tensor and pipeline parallelism, one data strategy and one number of
microbatches. Its stages are balanced by compute, and those of the fastest splits then by their times. Each stage
recomputes as few components as memory requires; those that cost the least time for the activations they free come
first. All splits that could be faster than the best one so far are priced, in order of their compute time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from asa.cost.memory.peak import margin
from asa.cost.memory.together import repeated_bytes
from asa.cost.pipeline import StageTimes, lower_bound, makespan
from asa.ir.layout import lowest_terms
from asa.ir.plan import DataStrategyName
from asa.planner import clock
from asa.planner.budget import ROUNDING
from asa.planner.pipeline.sketch import INF, Sketch, StageStyle
from asa.planner.pipeline.uniform import Uniform
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import MOST_IN_A_PIPELINE, Allowed, Space

_KINDS: tuple[DataStrategyName, ...] = ("replicate", "zero1", "zero2", "zero3")
_MOST_SPLIT = 8
"""Largest tensor degree, except on nodes of more devices."""
_EACH = 8
"""Devices up to which every width is tried; beyond, powers of two and widths inside a node."""
FINE = 1000
"""Weight of the fastest rank, where weights are in proportion to speed."""
_UNEVEN, _EVENED = 1.15, 0.5
"""Splits up to this multiple of the fastest get other cuts, for this share of the time that all splits took."""
_HALVINGS = 7
"""Bisections of the time of the slowest stage."""
_COUNTED = 200
"""Samples of a rank up to which each number is tried, and about so many beyond."""


@dataclass(frozen=True)
class _Split:
    """Data degree ``d`` and tensor degree ``t`` in each of ``p`` stages."""

    d: int
    t: int
    p: int
    num_microbatches: int
    starts: tuple[int, ...]
    least_s: float
    """Lower bound by compute alone, for any cuts; of a single stage, at least that of fewer microbatches."""


def practice(
    prices: Prices, allowed: Allowed, until: float = INF, first: float = 0.0
) -> tuple[Candidate | None, float]:
    """The fastest such plan on all devices that fits and is ``allowed``, or None; and a lower bound in seconds on those
    that were not tried, infinite if all were. Splits are priced until the time ``until``, or for ``first`` more seconds
    as long as none fits. Unequal devices form one stage."""
    gpus = prices.space.request.gpus
    if prices.space.cluster.unequal:
        return _fastest(_single_stages(prices, allowed, (gpus,)), INF, until, first)
    sketch = Sketch(prices, allowed, INF)
    return _fastest([(sketch, split) for split in _splits(prices)], INF, until, first)


def on_fewer(prices: Prices, allowed: Allowed, below: float, until: float) -> Candidate | None:
    """The fastest such plan of one stage on fewer devices, if it takes less than ``below`` seconds. The search proper
    comes to narrow stages late, since it begins with the lowest bounds by compute."""
    return _fastest(_single_stages(prices, allowed, _widths(prices.space)), below, until)[0]


def _fastest(
    splits: Iterable[tuple[Sketch, _Split]], below: float, until: float, first: float = 0.0
) -> tuple[Candidate | None, float]:
    best, all_kept, bound_s, began = None, set[tuple[Sketch, int, int]](), INF, clock.counted()
    pipelines = list[tuple[float, int, Sketch, _Split, StageStyle]]()
    for sketch, split in sorted(splits, key=lambda x: x[1].least_s):
        if split.least_s >= below:
            break
        if clock.counted() > (until if best else until + first):
            bound_s = split.least_s
            break
        key = (sketch, split.d, split.t)
        if split.p == 1 and key in all_kept:  # more microbatches only save memory
            continue
        for style in _styles(sketch, split):
            seconds, candidate = _filled(sketch, split, style, below)
            if split.p > 1 and seconds < INF:
                pipelines.append((seconds, len(pipelines), sketch, split, style))
            if candidate is not None and _is_faster(sketch.prices, candidate, below):
                best, below = candidate, sketch.prices.of(candidate).cost.total_s
            if candidate and all(w.data.strategy == "replicate" and not w.checkpoint for w in candidate.ways):
                all_kept.add(key)
    until = max(until, clock.counted()) + _EVENED * (min(until, clock.counted()) - began)
    for seconds, _, sketch, split, style in sorted(pipelines):
        if seconds >= _UNEVEN * below:
            break
        if clock.counted() > until:
            bound_s = min(bound_s, split.least_s)
            continue
        evened = _evened(sketch, split, style, below)
        candidate = None if evened is None else _filled(sketch, evened, style, below)[1]
        if candidate is not None and _is_faster(sketch.prices, candidate, below):
            best, below = candidate, sketch.prices.of(candidate).cost.total_s
    return best, bound_s


def _is_faster(prices: Prices, candidate: Candidate, below: float) -> bool:
    return prices.of(candidate).cost.total_s < below and prices.fits(candidate)


def _widths(space: Space) -> list[int]:
    """Candidate widths: the first ranks of equal speed, a node, powers of two, small ones, divisors of the batch, and a
    half, third and quarter of it, rounded up."""
    gpus, cluster, batch = space.request.gpus, space.cluster, space.request.global_batch
    alike = next((r for r in range(gpus) if cluster.speed(r) != cluster.speed(0)), gpus)
    powers = (2**k for k in range(gpus.bit_length() - 1, 0, -1))
    parts = [-(-batch // k) for k in (2, 3, 4)]
    small = (w for w in range(gpus - 1, 0, -1) if w <= _EACH or batch % w == 0 or w in parts)
    return [w for w in dict.fromkeys((alike, cluster.node, *powers, *small)) if w < gpus]


def _single_stages(prices: Prices, allowed: Allowed, sizes: Sequence[int]) -> Iterator[tuple[Sketch, _Split]]:
    """Splits of one stage of each of these widths, with the batch in equal parts and in proportion to speed."""
    space = prices.space
    for w in sizes:
        speeds = space.cluster.speeds(range(w))
        views = [prices]
        if len(set(speeds)) > 1 and space.request.uneven:
            cuts = lowest_terms(tuple(max(1, round(FINE * s / max(speeds))) for s in speeds)), quickest(prices, w)
            views += [Prices(space.weighted({w: cut}), prices) for cut in dict.fromkeys(cuts) if cut]
        for view in views:
            sketch = Sketch(view, allowed, INF, w)
            most = min(w, max(_MOST_SPLIT, space.cluster.node)) if "tensor" in space.strategies.tensor else 1
            for t in (t for t in range(1, most + 1) if w % t == 0):
                least_s = 0.0
                for m in space.microbatches():
                    if sketch.possible(w, m, StageStyle(w // t, t, "replicate", False)).all():
                        least_s = max(least_s, m * sum(view.compute(w, m, w)))
                        yield sketch, _Split(w // t, t, 1, m, (0,), least_s)


def quickest(prices: Prices, width: int, inner: int = 1) -> tuple[int, ...]:
    """Batch weights of the first ``width`` ranks with which the slowest computes its samples soonest, where each group
    of ``inner`` neighbours, as fast as the slowest of them, has a whole number of samples, except groups of the kind
    with most, which share the rest. Empty where all groups are alike, or too few samples."""
    speeds, batch = prices.space.cluster.speeds(range(width)), prices.space.request.global_batch
    speeds = tuple(min(speeds[i - i % inner : i - i % inner + inner]) for i in range(len(speeds)))
    number, fewest = {s: n // inner for s, n in Counter(speeds).items()}, int(prices.fewest.max())
    if len(number) < 2 or batch < width // inner * fewest:
        return ()
    grid = np.unique([*range(fewest, min(batch, _COUNTED) + 1), *np.geomspace(fewest, batch, _COUNTED).astype(int)])
    seconds = np.maximum.accumulate([float(prices.compute_on(int(k), 1).sum()) for k in grid])
    ends = np.unique(np.concatenate([seconds / s for s in number]))
    most = {s: grid[np.searchsorted(seconds, ends * s * (1 + ROUNDING), side="right") - 1] for s in number}
    able = np.sum([number[s] * most[s] for s in number], axis=0) >= batch
    able &= ends * min(number) * (1 + ROUNDING) >= seconds[0]
    rows = {s: int(most[s][able.argmax()]) for s in number}
    spread = max(number, key=lambda s: number[s] * rows[s])
    rest = batch - sum(number[s] * rows[s] for s in number if s != spread)
    scaled = {s: rest if s == spread else rows[s] * number[spread] for s in number}
    return lowest_terms(tuple(scaled[s] for s in speeds)) if rest >= number[spread] * fewest else ()


def _splits(prices: Prices) -> Iterator[_Split]:
    space, n = prices.space, len(prices.space.profile.graph)
    gpus, cuts = space.request.gpus, [0]
    cuts += [i for i in range(1, n) if space.profile.graph.cuttable(i)]
    most = max(_MOST_SPLIT, space.cluster.node)
    schedule = space.schedules.get("1f1b")
    for t in (t for t in range(1, min(gpus, most) + 1) if gpus % t == 0):
        if t > 1 and "tensor" not in space.strategies.tensor:
            continue
        for p in (p for p in range(1, gpus // t + 1) if gpus % (t * p) == 0 and p <= len(cuts)):
            d, least_s = gpus // t // p, 0.0
            if not all(space.placed(s * d * t, d * t) for s in range(p)):
                continue
            for m in space.microbatches():
                if p > 1 and (schedule is None or m > MOST_IN_A_PIPELINE or schedule.refusal(p, m)):
                    continue
                if all(space.enough_samples(i, d, m) for i in range(n)):
                    split = _balanced(prices, d, t, p, m, cuts)
                    least_s = max(least_s, split.least_s) if p == 1 else split.least_s
                    yield replace(split, least_s=least_s)


def _balanced(prices: Prices, d: int, t: int, p: int, m: int, cuts: Sequence[int]) -> _Split:
    compute_s = np.array(prices.compute_of(d, t, m, p))
    sums = np.concatenate([[0.0], np.cumsum(compute_s)])
    starts = [0]
    for s in range(1, p):  # the cut nearest to an equal share of the rest
        remaining = [c for c in cuts if c > starts[-1]]
        remaining = remaining[: len(remaining) - (p - s - 1)]
        target = sums[starts[-1]] + (sums[-1] - sums[starts[-1]]) / (p - s + 1)
        starts.append(min(remaining, key=lambda c: abs(sums[c] - target)))
    # A step is no shorter than any stage's microbatches after the first one has passed all stages in front. With any
    # cuts, the longest of these sums is least if all are equal: stage s then has the share (1 - 1/m)^s of the first.
    return _Split(d, t, p, m, tuple(starts), float(sums[-1]) / (1 - (1 - 1 / m) ** p))


def _styles(sketch: Sketch, x: _Split) -> Iterator[StageStyle]:
    """Each data strategy in which the split may fit, with and without tensor parallelism that splits tokens."""
    kinds = [k for k in _KINDS if k in sketch.space.strategies.data and (x.d > 1 or k == "replicate")]
    for by_tokens, kind in product((True, False) if x.t > 1 and sketch.space.by_tokens else (False,), kinds):
        style = StageStyle(x.d, x.t, kind, False, by_tokens)
        if sketch.possible(x.d * x.t, x.num_microbatches, style).all() and not _overfull(sketch, x, style):
            yield style


def _evened(sketch: Sketch, x: _Split, style: StageStyle, below: float) -> _Split | None:
    """The split with the cuts that make its slowest stage fastest, with what each stage has to recompute; None where
    some stage is then still too slow for a step of ``below`` seconds. Stages in front hold more microbatches, so they
    recompute more and become shorter than stages of equal compute."""
    m, n, w, schedule = x.num_microbatches, sketch.n, x.d * x.t, sketch.space.strategies.schedules["1f1b"]
    cuts, known = [c for c in range(n) if sketch.space.profile.graph.cuttable(c) or not c], dict[object, float]()

    def seconds(s: int, a: int, b: int) -> float:
        """Seconds of stage ``s`` for each microbatch, with what is paid once per step."""
        key = (a, b, flight := schedule.in_flight(s, x.p, m))
        if key not in known:
            stage = sketch.stage(a, b, w, style, m, flight)
            t = None if stage is None else stage[0]
            known[key] = INF if t is None else t.forward + t.backward + (t.last_backward_extra + t.after) / m
        return known[key]

    def within(most: float) -> tuple[float, tuple[int, ...]] | None:
        """Seconds of the slowest stage and cuts, with as many components as possible in the last stages."""
        starts, slowest = [n], 0.0
        for s in range(x.p - 1, -1, -1):
            some = cuts[s : bisect_left(cuts, starts[0])] if s else cuts[:1]
            at = bisect_left(some, True, key=lambda a: seconds(s, a, starts[0]) <= most)
            if at == len(some):
                return None
            slowest = max(slowest, seconds(s, some[at], starts[0]))
            starts.insert(0, some[at])
        return slowest, tuple(starts[:-1])

    best = within(below / (m + (x.p - 1) / 2))
    if best is None:
        return None
    low = best[0] / 2
    for _ in range(_HALVINGS):
        middle = (low + best[0]) / 2
        faster = within(middle)
        best, low = (best, middle) if faster is None else (faster, low)
    return replace(x, starts=best[1])


def _overfull(sketch: Sketch, x: _Split, style: StageStyle) -> bool:
    """Whether some stage exceeds memory even with all components recomputed, by a quick lower bound."""
    space, m, n = sketch.space, x.num_microbatches, sketch.n
    pricer, ways = sketch.prices.pricer(x.d * x.t, m, sketch.gpus), [sketch.way(i, x.d * x.t, style) for i in range(n)]
    clock.count("way", n / 2)
    costs = [pricer.states.state_cost(i, w).costs for i, w in enumerate(ways)]
    several = m > 1
    state = np.array([k.state + several * (k.added + k.kept) for k in costs])
    added = several * np.array([k.added for k in costs])
    local = {w.layout: pricer.local(w.layout) for w in ways}
    sizes = {layout: pricer.times.sizes(samples, layout.tensor)[0] for layout, samples in local.items()}
    saved = np.array([sizes[w.layout][i] for i, w in enumerate(ways)])
    each = [c.output_bytes_per_sample for c in sketch.graph.components]
    saved = margin() * np.minimum(saved, [local[w.layout] * size for w, size in zip(ways, each, strict=True)])
    state, added, saved = (np.add.reduceat(v, x.starts) for v in (state, added, saved))
    state = state - [repeated_bytes(pricer, a, ways[a:b]) for a, b in pairwise((*x.starts, n))]
    schedule = space.strategies.schedules["1f1b"] if x.p > 1 else None
    flights = np.array([1 if schedule is None else schedule.in_flight(s, x.p, m) for s in range(x.p)])
    memory = np.maximum(state - added + flights * saved, state + (flights - 1) * saved)
    return bool((memory > space.capacity(sketch.gpus)).any())


def _filled(sketch: Sketch, x: _Split, style: StageStyle, below: float) -> tuple[float, Candidate | None]:
    """Seconds of a step and the plan with as few components recomputed as fit; infinite where none fits. A lower bound,
    without a plan, where it is ``below`` seconds or more."""
    m, p, w, n, times, chosen = x.num_microbatches, x.p, x.d * x.t, sketch.n, list[StageTimes](), list[Uniform]()
    schedule = sketch.space.strategies.schedules["1f1b"] if p > 1 else None
    for s, (a, b) in enumerate(pairwise((*x.starts, n))):
        stage = sketch.stage(a, b, w, style, m, 1 if schedule is None else schedule.in_flight(s, p, m))
        if stage is None:
            return INF, None
        times.append(stage[0])
        chosen.append(stage[1])
    ways = tuple(way for u, (a, b) in zip(chosen, pairwise((*x.starts, n)), strict=True) for way in u.ways[a:b])
    plan = Candidate(
        origin="hybrid+ckpt", num_microbatches=m, widths=(w,) * p, starts=x.starts,
        schedule="1f1b" if p > 1 else "none", ways=ways,
    )  # fmt: skip
    if schedule is None:
        single = times[0]
        return m * (single.forward + single.backward) + single.last_backward_extra + single.after, plan
    pricer = chosen[0].pricer
    moves = [
        pricer.handover(a, u.ways[a - 1].layout, v.ways[a].layout, o)
        for a, u, v, o in zip(x.starts[1:], chosen, chosen[1:], range(w, w * p, w), strict=False)
    ]  # fmt: skip
    least_s = lower_bound(times, moves, schedule, m)
    if least_s >= below:
        return least_s, None
    clock.count("action", m * p)
    return makespan(times, moves, schedule, m), plan
