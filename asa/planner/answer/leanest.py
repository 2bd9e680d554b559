"""A search for the plan with the lowest peak of memory among a few kinds of plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from asa.cost.planned import Price
from asa.ir.codec import noun
from asa.planner.pipeline.pipelines import Skeleton
from asa.planner.pipeline.staged import StagedSpace
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import MOST_IN_A_PIPELINE, Allowed, Space, anything, widths
from asa.planner.stage import memory
from asa.planner.stage.formulate import formulate
from asa.planner.stage.problem import Chain


@noun
class Leanest:
    """A plan with a low peak of memory. ``excess``: bytes by which its peak exceeds what a rank may use."""

    candidate: Candidate
    price: Price
    excess: float


def low_peak_plans(prices: Prices, allowed: Allowed = anything, *, few: bool = False) -> Iterator[Leanest]:
    """Plans with low peaks: single stages of every width (with ``few``: of 1 rank, all ranks, and the largest power of
    two), and pipelines of every number of equal stages, cut so that state and activations are even."""
    gpus = prices.space.request.gpus
    sizes = sorted({1, gpus, 2 ** (gpus.bit_length() - 1)}) if few else list(widths(gpus))
    for candidate in (*_leanest_stages(prices, allowed, sizes), *_leanest_pipelines(prices, allowed)):
        price = prices.of(candidate)
        yield Leanest(candidate=candidate, price=price, excess=price.peak.total - prices.capacity(candidate))


def leanest(prices: Prices, allowed: Allowed = anything, *, few: bool = False) -> Leanest | None:
    """The plan of :func:`low_peak_plans` with the least ``excess``; None where there is no plan at all."""
    return min(low_peak_plans(prices, allowed, few=few), key=lambda x: x.excess, default=None)


def _leanest_stages(prices: Prices, allowed: Allowed, sizes: Sequence[int]) -> Iterator[Candidate]:
    """Single stages with one microbatch, where gradients need not all be held at once, and with the most microbatches
    that leave each layout's ranks enough samples, where activations are smallest."""
    for width in sizes:
        counts = _microbatches(prices.space)
        divisors = [d for d in range(1, width + 1) if width % d == 0]
        most = {max((m for m in counts if prices.space.enough_samples(0, d, m)), default=1) for d in divisors}
        fewer = {m // 2 for m in most}  # where a later component needs two samples
        for m in sorted({counts[0], *most, *fewer} & set(counts)):
            formulation = formulate(prices, width, m, allowed, every=True, counted=True)
            if formulation is None:
                continue
            solution = memory.least_memory(formulation.problem)
            if solution.choice is not None:
                yield formulation.candidate(solution.choice)


def _leanest_pipelines(prices: Prices, allowed: Allowed) -> Iterator[Candidate]:
    """Pipelines with the schedule 1f1b, which keeps the fewest microbatches in flight: with the most microbatches,
    where activations are smallest, and with the fewest, where gradients need not all be held at once."""
    space, n = prices.space, len(prices.space.profile.graph)
    if "1f1b" not in space.schedules:
        return
    staged = StagedSpace(prices, allowed, every=True)
    for stages in range(2, min(space.request.gpus, n) + 1):
        width = space.request.gpus // stages
        for w in sorted({width, 2 ** (width.bit_length() - 1)}):
            counts = [m for m in _microbatches(space) if m <= MOST_IN_A_PIPELINE]
            least = next((m for m in counts if staged.chain(w, m) is not None), None)
            many = next((m for m in reversed(counts) if staged.chain(w, m) is not None), None)
            for m in dict.fromkeys(m for m in (least, many) if m is not None):
                yield from _leanest_pipeline(space, staged, stages, w, m)


def _leanest_pipeline(space: Space, staged: StagedSpace, stages: int, width: int, m: int) -> Iterator[Candidate]:
    """The pipeline of ``stages`` even stages with ``m`` microbatches; none where the model cannot be cut like that."""
    n = len(space.profile.graph)
    chain, schedule = staged.chain(width, m), space.schedules["1f1b"]
    assert chain is not None
    flights = [schedule.in_flight(s, stages, m) for s in range(stages)]
    starts = _even(chain, flights)
    if not all(space.profile.graph.cuttable(start) for start in starts):
        return
    choices = []
    for s, (start, stop) in enumerate(pairwise((*starts, n))):
        choices.append(memory.least_memory(chain.stage(start, stop, flights[s])).choice)
    fitting = tuple(c for c in choices if c is not None)
    if len(fitting) == stages:
        yield staged.candidate(
            Skeleton(starts=starts, widths=(width,) * stages, num_microbatches=m, schedule="1f1b"), fitting
        )


def _even(chain: Chain, flights: Sequence[int]) -> tuple[int, ...]:
    """Starts of stages with ``flights[s]`` microbatches in flight, such that the most bytes of a stage are least."""
    n, stages = len(chain.names), len(flights)
    sums = [[0.0, *accumulate(min(c.state + f * c.activations for c in row) for row in chain.configs)] for f in flights]
    best = [(sums[-1][n] - sums[-1][i], n) for i in range(n)]
    ends = [best]
    for s in range(stages - 2, -1, -1):
        behind = ends[0]
        row = []
        for i in range(n):
            cuts = range(i + 1, n - (stages - 2 - s))
            row.append(min(((max(sums[s][j] - sums[s][i], behind[j][0]), j) for j in cuts), default=(float("inf"), n)))
        ends.insert(0, row)
    starts = [0]
    for s in range(stages - 1):
        starts.append(ends[s][starts[-1]][1])
    return tuple(starts)


def _microbatches(space: Space) -> list[int]:
    """All numbers of microbatches in the space."""
    return list(space.microbatches())
