"""Compute time of each rank of a plan, and its collectives by link.

The slowest rank decides how long a step takes; measurements of one rank are compared with the rank's own compute time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asa.cost.machine.estimate import on_device
from asa.cost.planned import price_stage, pricer_of, schedule_of, ways_of
from asa.cost.pricing import Pricer, Way, times_of
from asa.cost.traffic.collectives import Links
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import MOST_SPEED, Cluster
from asa.ir.codec import noun
from asa.ir.plan import Plan, Stage
from asa.ir.profile import Profile
from asa.ir.traffic import CollectiveOp


@noun
class Carried:
    """One kind of collective of a plan: ``bytes`` of its largest message, and ``seconds`` that the message takes on
    otherwise idle links of ``level``. ``ranks`` and ``stride`` are those of :class:`asa.ir.traffic.Collective`."""

    op: CollectiveOp
    level: int
    ranks: int
    stride: int
    bytes: float
    seconds: float


class Ranks:
    """Compute time by rank and traffic by link of one plan.

    Raises:
        InvalidInputError: the plan is of another model, or a strategy that it chooses refuses the component.
    """

    def __init__(self, plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies) -> None:
        plan = plan.of_group() if plan.groups > 1 else plan
        self._plan, self._cluster, self._strategies = plan, cluster, strategies
        self._profile = on_device(profile, cluster)
        self._times = times_of(self._profile, strategies)
        self._ways = ways_of(plan, profile, strategies)
        self._busy = None if schedule_of(plan, strategies) is None else plan.gpus

    def _stages(self) -> Iterator[tuple[Stage, int, Sequence[Way]]]:
        ends = [*self._plan.starts()[1:], len(self._ways)]
        for stage, start, end in zip(self._plan.stages, self._plan.starts(), ends, strict=True):
            yield stage, start, self._ways[start:end]

    def _pricer(self, stage: Stage, speeds: tuple[float, ...]) -> Pricer:
        return pricer_of(self._plan, stage, self._profile, self._times, self._cluster, self._strategies, speeds)

    def compute(self) -> tuple[float, ...]:
        """Seconds that each rank computes in a step, optimizer included, waiting excluded: an entry for each rank.

        To exclude waiting, a rank is priced as if the other ranks of its stage took no time.
        """
        compute_s: dict[int, float] = {}
        for stage, start, ways in self._stages():
            by_kind: dict[tuple[float, int], float] = {}
            speeds = self._cluster.speeds(stage.ranks)
            for position, rank in enumerate(stage.ranks):
                speed = speeds[position] if speeds else 1.0
                kind = (speed, stage.weights[position] if stage.weights else 1)
                if kind not in by_kind:
                    rank_speeds = [MOST_SPEED] * len(stage.ranks)
                    rank_speeds[position] = speed
                    pricer = self._pricer(stage, tuple(rank_speeds) if stage.weights or speeds else ())
                    by_kind[kind] = price_stage(pricer, start, ways, self._cluster.overlap).cost.compute_s
                compute_s[rank] = by_kind[kind]
        return tuple(compute_s[r] for r in range(self._plan.num_ranks))

    def carried(self) -> tuple[Carried, ...]:
        """Every kind of collective inside stages (by operation, group and links), and one send between each two
        neighbouring stages."""
        largest: dict[tuple[CollectiveOp, int, int, int], Carried] = {}
        for stage, start, ways in self._stages():
            width = len(stage.ranks)
            pricer, links = self._pricer(stage, ()), Links(self._cluster, width, self._busy or width)
            for i, way in enumerate(ways, start):
                for c in (*pricer.inner(i, way), *pricer.states.state_cost(i, way).traffic):
                    if c.ranks > 1 and c.bytes > 0:
                        key = (c.op, links.level(c.ranks, c.stride), c.ranks, c.stride)
                        if key not in largest or largest[key].bytes < c.bytes:
                            largest[key] = Carried(
                                op=c.op, level=key[1], ranks=c.ranks, stride=c.stride, bytes=c.bytes,
                                seconds=links.seconds(c),
                            )  # fmt: skip
            if start:
                size = self._profile.graph.components[start - 1].output_bytes_per_sample * pricer.microbatch
                offset = stage.ranks[0]
                sent = Links(self._cluster).handover(size, offset, 1)
                level = self._cluster.hop(offset)
                largest["send_recv", level, 2, offset] = Carried(
                    op="send_recv", level=level, ranks=2, stride=offset, bytes=size, seconds=sent
                )  # fmt: skip
        return tuple(largest.values())
