"""What a planner could have chosen: every whole strategy, random feasible plans, and every small change of a plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.plan import Assignment, Plan, Stage
from asa.ir.profile import Profile
from asa.planner import Request, plan
from asa.planner.answer.prediction import predict
from asa.planner.pipeline.whole import table
from asa.planner.space import baselines
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import Space

_TRIES = 200


class Menu:
    """Plans of one profile, cluster and request beside the planner's own."""

    def __init__(self, profile: Profile, cluster: Cluster, strategies: Strategies, request: Request) -> None:
        self._profile, self._strategies, self._request = profile, strategies, request
        self.answer = plan(profile, cluster, strategies, request)[0]
        self._prices = Prices(Space(profile, cluster, strategies, request))
        self._own = Candidate.of(self.answer, profile, strategies)

    def static(self) -> list[Plan]:
        """Every whole strategy that fits, by its name."""
        rows = [r for r in table(self._prices) if r.fits and r.candidate is not None and r.name != "hybrid"]
        return [self._plan(r.candidate, r.name) for r in rows if r.candidate is not None]

    def hybrids(self) -> tuple[str, ...]:
        """The names among :meth:`static` that the best static hybrid is the fastest of."""
        return baselines.members("hybrid", self._strategies, self._request.gpus)

    def changes(self) -> list[Plan]:
        """Every plan that runs one component otherwise than the answer, and fits."""
        found = []
        for i, name in enumerate(c.name for c in self._profile.graph.components):
            for way in self._prices.space.ways(i, self._own.width(i), self._own.num_microbatches):
                if way != self._own.ways[i]:
                    found.append((self._own.with_way(i, way), name))
        return [self._plan(c, f"change:{name}") for c, name in found if self._fits(c)]

    def random(self, count: int, seed: int) -> list[Plan]:
        """``count`` feasible plans: stages, cuts, microbatches, schedule and every way drawn at random."""
        rng, found = random.Random(seed), {}
        for _ in range(_TRIES * count):
            if len(found) == count:
                break
            drawn = self._draw(rng)
            if drawn is not None and drawn.key not in found and self._fits(drawn):
                found[drawn.key] = self._plan(drawn, f"random:{len(found)}")
        return list(found.values())

    def _draw(self, rng: random.Random) -> Candidate | None:
        space, gpus = self._prices.space, self._request.gpus
        total = len(self._profile.graph)
        ranks = gpus if rng.random() < 0.8 else rng.randint(1, gpus)
        num_stages = rng.choice([1, 1, *range(2, min(ranks, total) + 1)]) if space.schedules else 1
        num_stages = min(num_stages, ranks)
        borders = sorted(rng.sample(range(1, ranks), num_stages - 1))
        widths = tuple(b - a for a, b in zip((0, *borders), (*borders, ranks), strict=True))
        starts = (0, *sorted(rng.sample(range(1, total), num_stages - 1)))
        m = 1 if num_stages == 1 else rng.choice([1, 2, 4, 8])
        schedule = "none" if num_stages == 1 else rng.choice(sorted(space.schedules))
        if num_stages > 1 and space.schedules[schedule].refusal(num_stages, m):
            return None
        ways = []
        for i in range(total):
            width = widths[max(s for s, start in enumerate(starts) if start <= i)]
            options = list(space.ways(i, width, m))
            if not options:
                return None
            ways.append(rng.choice(options))
        return Candidate(
            origin="random", num_microbatches=m, ways=tuple(ways), widths=widths, starts=starts,
            schedule=schedule,  # type: ignore[arg-type]
        )  # fmt: skip

    def _fits(self, candidate: Candidate) -> bool:
        return self._prices.of(candidate).peak.total <= self._prices.capacity(candidate)

    def _plan(self, candidate: Candidate, name: str) -> Plan:
        """The candidate as a plan that can be run; its certificate and baselines are the answer's."""
        parts = self._profile.graph.components
        ends = list(_running(candidate.widths))
        return replace(
            self.answer,
            strategy=name,
            components=tuple(
                Assignment(name=c.name, stage=candidate.stage(i), data=w.data, tensor=w.tensor, checkpoint=w.checkpoint)
                for i, (c, w) in enumerate(zip(parts, candidate.ways, strict=True))
            ),
            stages=tuple(
                Stage(ranks=tuple(range(end - w, end))) for end, w in zip(ends, candidate.widths, strict=True)
            ),
            schedule=candidate.schedule,
            num_microbatches=candidate.num_microbatches,
            prediction=predict(
                self._prices.of(candidate), self._profile, self._prices.space.cluster, widths=candidate.widths,
                global_batch=self._request.global_batch,
            ),
            notes=(),
            confidence=None,
        )  # fmt: skip


def _running(widths: tuple[int, ...]) -> Iterator[int]:
    total = 0
    for w in widths:
        total += w
        yield total
