"""A search for the plan with the lowest peak of memory, within limits: what fits if anything does."""

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
    """The plan with the lowest peak, and by how many bytes that peak oversteps what a rank may use."""

    candidate: Candidate
    price: Price
    excess: float


def lean(prices: Prices, allowed: Allowed = anything, *, few: bool = False) -> Iterator[Leanest]:
    """Plans with low peaks: every single stage (with ``few``: of one rank, of all, and of a power of two), and for
    every number of equal stages of a pipeline the cuts that spread the least state and activations evenly."""
    gpus = prices.space.request.gpus
    some = sorted({1, gpus, 2 ** (gpus.bit_length() - 1)}) if few else list(widths(gpus))
    for candidate in (*_leanest_stages(prices, allowed, some), *_leanest_pipelines(prices, allowed)):
        price = prices.of(candidate)
        yield Leanest(candidate=candidate, price=price, excess=price.peak.total - prices.capacity(candidate))


def leanest(prices: Prices, allowed: Allowed = anything, *, few: bool = False) -> Leanest | None:
    """The plan that comes closest to fitting among those of :func:`lean`; None where no plan exists at all."""
    return min(lean(prices, allowed, few=few), key=lambda x: x.excess, default=None)


def _leanest_stages(prices: Prices, allowed: Allowed, some: Sequence[int]) -> Iterator[Candidate]:
    """Single stages in one microbatch, where gradients do not exist all at once, and in as many as give each layout's
    ranks samples: the more, the less memory."""
    for width in some:
        counts = _microbatches(prices.space)
        divisors = [d for d in range(1, width + 1) if width % d == 0]
        most = {max((m for m in counts if prices.space.enough_samples(0, d, m)), default=1) for d in divisors}
        fewer = {m // 2 for m in most}  # where a later component needs two samples
        for m in sorted({counts[0], *most, *fewer} & set(counts)):
            formulation = formulate(prices, width, m, allowed, every=True, counted=True)
            if formulation is None:
                continue
            found = memory.least_memory(formulation.problem)
            if found.choice is not None:
                yield formulation.candidate(found.choice)


def _leanest_pipelines(prices: Prices, allowed: Allowed) -> Iterator[Candidate]:
    """Pipelines under 1f1b, which holds no more microbatches than any other schedule: in the most microbatches, which
    leave the fewest activations, and in the fewest, where gradients do not exist all at once."""
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
    """Stages of one width in ``m`` microbatches, as far as they can be cut; none where they cannot."""
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
    made = tuple(c for c in choices if c is not None)
    if len(made) == stages:
        yield staged.candidate(
            Skeleton(starts=starts, widths=(width,) * stages, num_microbatches=m, schedule="1f1b"), made
        )


def _even(chain: Chain, flights: Sequence[int]) -> tuple[int, ...]:
    """Starts of stages, stage s with ``flights[s]`` microbatches in flight, such that the fullest holds least."""
    n, stages = len(chain.names), len(flights)
    held = [[0.0, *accumulate(min(c.state + f * c.activations for c in row) for row in chain.configs)] for f in flights]
    best = [(held[-1][n] - held[-1][i], n) for i in range(n)]
    ends = [best]
    for s in range(stages - 2, -1, -1):
        behind = ends[0]
        row = []
        for i in range(n):
            cuts = range(i + 1, n - (stages - 2 - s))
            row.append(min(((max(held[s][j] - held[s][i], behind[j][0]), j) for j in cuts), default=(float("inf"), n)))
        ends.insert(0, row)
    starts = [0]
    for s in range(stages - 1):
        starts.append(ends[s][starts[-1]][1])
    return tuple(starts)


def _microbatches(space: Space) -> list[int]:
    """One microbatch, and all powers of two; memory rarely falls beyond the last that can run."""
    return list(space.microbatches())
