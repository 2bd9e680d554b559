"""A plan in the making, and what it costs by the closed forms: no solver, no numbers of a solver."""

from __future__ import annotations

from itertools import pairwise

from asa.cost.memory import Peak, peak
from asa.cost.pricing import Pricer, combined_error
from asa.cost.step import BoundaryCost, ComponentCost, StepCost, step
from asa.ir.codec import noun
from asa.ir.layout import Layout
from asa.planner.space import Space, Way


@noun
class Candidate:
    """A way for every component, on ``width`` ranks, in ``num_microbatches``. ``origin``: who proposed it."""

    origin: str
    width: int
    num_microbatches: int
    ways: tuple[Way, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for candidates that run the same way."""
        return (self.width, self.num_microbatches, self.ways)


@noun
class Price:
    """What a candidate costs: seconds, the peak of a rank in bytes, and standard errors in seconds."""

    cost: StepCost
    peak: Peak
    components: tuple[ComponentCost, ...]
    boundaries: tuple[BoundaryCost, ...]
    compute_error_s: float
    link_error_s: float


class Prices:
    """Prices of ways and candidates in one space, each computed once."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._pricers: dict[tuple[int, int], Pricer] = {}
        self._components: dict[tuple[int, int, int, Way], ComponentCost] = {}
        self._boundaries: dict[tuple[int, int, int, Layout, Layout], BoundaryCost] = {}

    def pricer(self, width: int, num_microbatches: int) -> Pricer:
        """The pricer for one width and number of microbatches."""
        key = (width, num_microbatches)
        if key not in self._pricers:
            s = self.space
            self._pricers[key] = Pricer(
                s.profile, s.cluster, s.strategies, width=width, global_batch=s.request.global_batch,
                num_microbatches=num_microbatches, optimizer=s.request.optimizer,
            )  # fmt: skip
        return self._pricers[key]

    def component(self, index: int, width: int, num_microbatches: int, way: Way) -> ComponentCost:
        """One component."""
        key = (index, width, num_microbatches, way)
        if key not in self._components:
            self._components[key] = self.pricer(width, num_microbatches).component(
                index, way.layout, way.data.strategy, way.tensor.strategy
            )
        return self._components[key]

    def boundary(self, index: int, num_microbatches: int, source: Layout, target: Layout) -> BoundaryCost:
        """The boundary in front of component ``index``, at least 1."""
        key = (index, source.width, num_microbatches, source, target)
        if key not in self._boundaries:
            self._boundaries[key] = self.pricer(source.width, num_microbatches).boundary(index, source, target)
        return self._boundaries[key]

    def of(self, candidate: Candidate) -> Price:
        """All of a candidate."""
        width, m, ways = candidate.width, candidate.num_microbatches, candidate.ways
        pricer = self.pricer(width, m)
        components = tuple(self.component(i, width, m, way) for i, way in enumerate(ways))
        between = [self.boundary(i, m, a.layout, b.layout) for i, (a, b) in enumerate(pairwise(ways), 1)]
        boundaries = (pricer.entry(ways[0].layout), *between, pricer.exit(ways[-1].layout))
        return Price(
            cost=step(components, boundaries, self.space.cluster.overlap),
            peak=peak([c.footprint for c in components], [b.footprint for b in boundaries[:-1]]),
            components=components,
            boundaries=boundaries,
            compute_error_s=combined_error([c.error_s for c in components]),
            link_error_s=sum(c.link_error_s for c in components) + sum(b.link_error_s for b in boundaries),
        )
