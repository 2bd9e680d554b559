"""A plan in the making, and what it costs by the closed forms: no solver, no numbers of a solver."""

from __future__ import annotations

from asa.cost.planned import Price, price
from asa.cost.pricing import Pricer, Way, times_of
from asa.ir.codec import noun
from asa.planner.space import Space, layouts


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


class Prices:
    """Prices of ways and candidates in one space, each computed once."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._times = times_of(space.profile, space.strategies)
        self._pricers: dict[tuple[int, int], Pricer] = {}

    def pricer(self, width: int, num_microbatches: int) -> Pricer:
        """The pricer for one width and number of microbatches."""
        key = (width, num_microbatches)
        if key not in self._pricers:
            s = self.space
            self._pricers[key] = Pricer(
                s.profile,
                self._times,
                s.cluster,
                s.strategies,
                width=width,
                global_batch=s.request.global_batch,
                num_microbatches=num_microbatches,
                optimizer=s.request.optimizer,
            )
        return self._pricers[key]

    def compute_alone(self, width: int, num_microbatches: int) -> float:
        """Lower bound in seconds on every plan of that width: each component's fastest layout, nothing communicated.

        Infinite where some component cannot run there at all.
        """
        pricer, total = self.pricer(width, num_microbatches), 0.0
        for i in range(len(self.space.profile.graph)):
            possible = [x for x in layouts(width) if self.space.runs(i, x, num_microbatches)]
            total += min((pricer.compute_alone(i, x) for x in possible), default=float("inf"))
        return total

    def of(self, candidate: Candidate) -> Price:
        """All of a candidate."""
        pricer = self.pricer(candidate.width, candidate.num_microbatches)
        return price(pricer, candidate.ways, self.space.cluster.overlap)
