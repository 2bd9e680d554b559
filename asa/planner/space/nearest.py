"""Changes known plans as little as possible, so that a search with restrictions can begin with them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

from asa.cost.pricing import Way
from asa.planner import clock
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import Allowed, Space, divisors

_FEW = 3
"""Number of fitting plans among which the fastest is taken; known plans come fastest first."""


def nearest(space: Space, candidate: Candidate, allowed: Allowed) -> Candidate | None:
    """``candidate`` with the most similar allowed way wherever a way is not allowed; None where there is none."""
    changed, space = candidate, _cut_alike(space, candidate)
    for i, way in enumerate(candidate.ways):
        if not allowed(i, way):
            other = similar(space, i, way, candidate.num_microbatches, allowed)
            if other is None:
                return None
            changed = changed.with_way(i, other)
    return changed


def similar(space: Space, i: int, way: Way, m: int, allowed: Allowed) -> Way | None:
    """The allowed way of component ``i`` on as many ranks that is most similar to ``way``; None where there is none."""
    return min(space.ways(i, way.layout.width, m, allowed), key=partial(difference, way), default=None)


def start(prices: Prices, known: Iterable[Candidate | None], allowed: Allowed) -> Candidate | None:
    """The fastest of the first few of ``known`` that fit after being changed to what is allowed; None if none does."""
    changed = (nearest(prices.space, k, allowed) for k in known if k is not None)
    fitting = islice((x for x in changed if x is not None and prices.fits(x)), _FEW)
    return min(fitting, key=lambda x: prices.of(x).cost.total_s, default=None)


def single_changes(prices: Prices, candidate: Candidate, allowed: Allowed, count: int, ends: float) -> list[Candidate]:
    """The ``count`` fastest plans in which one component has another way than in ``candidate``, fastest first.

    All of them fit and are ``allowed``. Plans that are not priced by the time ``ends`` are left out.
    """
    space = _cut_alike(prices.space, candidate)

    def changed() -> Iterator[tuple[float, int, Candidate]]:
        for i, way in enumerate(candidate.ways):
            for other in space.ways(i, candidate.width(i), candidate.num_microbatches, allowed):
                if clock.now() > ends:
                    return
                if other != way:
                    changed_plan = replace(candidate.with_way(i, other), origin="asa")
                    price = prices.of(changed_plan)
                    if prices.fits(changed_plan):
                        yield price.cost.total_s, i, changed_plan

    return [changed_plan for _, _, changed_plan in heapq.nsmallest(count, changed(), key=lambda x: x[:2])]


def retied(prices: Prices, candidate: Candidate, allowed: Allowed) -> Candidate:
    """The fastest plan that fits among ``candidate`` and those in which components that share a parameter have a lower
    data degree: more ranks compute the same samples, and fewer sum its gradient."""
    space, m, best = prices.space, candidate.num_microbatches, candidate
    tied = [i for i, c in enumerate(space.profile.graph.components) if c.tied]
    if not tied:
        return candidate
    now = candidate.ways[tied[0]].layout
    for degree in divisors(now.data)[:-1]:
        layout = replace(now, data=degree, tensor=1, sequence=False)
        offered = {i: [w for w in space.ways_on_any(i, layout) if allowed(i, w)] for i in tied}
        if not all(offered.values()) or not all(space.enough(i, layout, m) for i in tied):
            continue
        changed = replace(candidate, origin="asa")
        for i in tied:
            changed = changed.with_way(i, min(offered[i], key=partial(difference, candidate.ways[i])))
        fitting = (x for x in (changed.with_way(tied[0], w) for w in offered[tied[0]]) if prices.fits(x))
        best = min((best, *fitting), key=lambda x: prices.of(x).cost.total_s)
    return best


def _cut_alike(space: Space, candidate: Candidate) -> Space:
    """``space`` with the weights by which ``candidate`` divides its batch, which are the same for all components of a
    stage."""
    return space if space.weights == candidate.weights else space.weighted(candidate.weights)


def difference(a: Way, b: Way) -> int:
    """The number of choices in which two ways differ; a layout counts as four."""
    private = (a.data.strategy != b.data.strategy, a.checkpoint != b.checkpoint,
               a.offload != b.offload)  # fmt: skip
    return 4 * (a.layout != b.layout) + sum(private)
