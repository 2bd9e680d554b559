"""A plan in the making, and what it costs by the closed forms: no solver, no numbers of a solver."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

import numpy as np

from asa.cost.compute import Times
from asa.cost.planned import Price, price
from asa.cost.pricing import Pricer, Way, times_of
from asa.cost.spread import slowest_rank
from asa.ir.codec import noun
from asa.ir.layout import largest_shard
from asa.ir.plan import ScheduleName
from asa.planner.space import Space


@noun
class Candidate:
    """A way for every component, in stages of ``widths`` ranks that begin with components ``starts``.

    ``origin``: who proposed it. One stage has the schedule ``none``.
    """

    origin: str
    num_microbatches: int
    ways: tuple[Way, ...]
    widths: tuple[int, ...]
    starts: tuple[int, ...] = (0,)
    schedule: ScheduleName = "none"

    @property
    def ranks(self) -> int:
        """Ranks that take part."""
        return sum(self.widths)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for candidates that run the same way."""
        return (self.widths, self.starts, self.schedule, self.num_microbatches, self.ways)

    def stage(self, index: int) -> int:
        """The stage of component ``index``."""
        return bisect_right(self.starts, index) - 1

    def width(self, index: int) -> int:
        """Ranks of the stage of component ``index``."""
        return self.widths[self.stage(index)]

    def with_way(self, index: int, way: Way) -> Candidate:
        """The same, but for one component."""
        return replace(self, ways=(*self.ways[:index], way, *self.ways[index + 1 :]))


class Prices:
    """Prices of ways and candidates in one space, each computed once.

    ``known``: prices of the same profile, cluster, strategies, batch and optimizer, under another limit of memory or
    devices; what they have in common is not computed again.
    """

    def __init__(self, space: Space, known: Prices | None = None) -> None:
        self.space = space
        self._times: Times = times_of(space.profile, space.strategies) if known is None else known._times
        self._fewest = np.array([space.fewest_samples(i) for i in range(len(space.profile.graph))])
        self._slow: dict[int, float] = {}
        self._computes: dict[tuple[int, int], np.ndarray] = {}
        self._pricers: dict[tuple[int, int, int], Pricer] = {} if known is None else known._pricers

    def pricer(self, width: int, num_microbatches: int, busy: int | None = None) -> Pricer:
        """The pricer for stages of ``width`` ranks, ``busy`` of which work at once (``width`` for a single stage)."""
        key = (width, num_microbatches, width if busy is None else busy)
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
                busy=key[2],
            )
        return self._pricers[key]

    def compute_alone(self, width: int, num_microbatches: int) -> float:
        """Lower bound in seconds on every plan of one stage of that width: :meth:`compute` of all components."""
        return num_microbatches * sum(self.compute(width, num_microbatches))

    def compute(self, width: int, num_microbatches: int, busy: int | None = None) -> list[float]:
        """Per component the least seconds of forward and backward of one microbatch in a stage of that width, nothing
        communicated; infinite where it cannot run there at all."""
        space, busy = self.space, width if busy is None else busy
        batch = space.request.global_batch
        microbatch, smallest = largest_shard(batch, num_microbatches), batch // num_microbatches
        least = np.full(len(space.profile.graph), np.inf)
        for layout in space.layouts(width, num_microbatches):
            if smallest >= layout.data:
                alone = self._alone(largest_shard(microbatch, layout.data), layout.tensor)
                least = np.minimum(least, np.where(self._fewest <= smallest // layout.data, alone, np.inf))
        if busy not in self._slow:
            self._slow[busy] = slowest_rank(space.profile, space.cluster, busy)
        return [float(x) for x in least * self._slow[busy]]

    def _alone(self, samples: int, tensor: int) -> np.ndarray:
        """Per component forward and backward on one rank of a device that does nothing else."""
        key = (samples, tensor)
        if key not in self._computes:
            ratio, components = self._times.whole_ratio(samples), self.space.profile.graph.components
            found = []
            for i, c in enumerate(components):
                work = self._times.work(c, samples, tensor) if self.space.splits(i, tensor) else None
                found.append(float("inf") if work is None else (work.forward_s + work.backward_s) * ratio)
            self._computes[key] = np.array(found)
        return self._computes[key]

    def capacity(self, candidate: Candidate) -> float:
        """Bytes of active memory a rank of ``candidate`` may use."""
        return self.space.capacity(self.busy(candidate))

    def busy(self, candidate: Candidate) -> int:
        """Ranks whose work is taken to slow each other down: those of a single stage, all that a pipeline may use."""
        return candidate.ranks if len(candidate.widths) == 1 else self.space.request.gpus

    def of(self, candidate: Candidate) -> Price:
        """All of a candidate."""
        m, busy = candidate.num_microbatches, self.busy(candidate)
        schedule = self.space.strategies.schedules[candidate.schedule] if len(candidate.widths) > 1 else None
        pricers = [self.pricer(w, m, busy) for w in candidate.widths]
        return price(pricers, candidate.starts, candidate.ways, self.space.cluster.overlap, schedule)
