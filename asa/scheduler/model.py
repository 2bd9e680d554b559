"""The cost model corrected by measurements: prices of plans, and the best plan.

Slow ranks change the cluster's devices, slow links the tables of their level, the common factor the profile, and the
residual of the step both. Corrections are always applied to the original files.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from asa.cost.machine.what_if import slower_profile
from asa.cost.planned import price_plan
from asa.cost.traffic.collectives import Links, carried
from asa.errors import InfeasibleError
from asa.interfaces.executor import Placement
from asa.interfaces.strategy import OPTIMIZER_WORDS, Strategies
from asa.ir import codec
from asa.ir.cluster import MOST_SLOWDOWN, Cluster, RankDevice
from asa.ir.measurements import Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.scheduler.costs import LIKE, Slowness
from asa.scheduler.expected import Expected
from asa.scheduler.shape import Shape

Solve = Callable[[Plan, Measurements, Profile, Cluster, int], Plan]
"""Function that returns the best plan for at most the given number of ranks on a corrected profile and cluster, after a
plan with measurements. Raises :class:`asa.errors.InfeasibleError` if none fits."""


Deviations = tuple[tuple[float, ...], tuple[float, ...]]
"""Standard deviations of the logarithms of factors, by process and by level."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Is another plan faster than ``current`` under ``slowness``? ``known``: plans that ran before. ``draws``: number
    of joint draws of the factors, with the standard deviations ``deviations``."""

    current: Placement
    known: tuple[Placement, ...]
    measured: Measurements
    slowness: Slowness
    deviations: Deviations
    draws: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The best plans ``found`` (see :meth:`Model.best`). ``placements``: the current plan, the known ones and these.
    ``draws``: seconds of a step of each placement, one tuple per joint draw."""

    found: list[Placement]
    placements: list[Placement]
    draws: list[tuple[float, ...]]


class Asked(Protocol):
    """A search for another plan that runs during training."""

    def result(self) -> Answer | None:
        """The result of :meth:`Model.answer`; None while the search is running.

        Raises:
            AsaError: no plan fits, or the search failed.
        """
        ...

    def stop(self) -> None:
        """End the search."""
        ...


@dataclass(frozen=True, kw_only=True)
class Model:
    """The profile and cluster of the run's plan, the strategies, and the planner (see :data:`Solve`). ``background``:
    starts :meth:`answer` in another process during training; None to wait for it."""

    profile: Profile
    cluster: Cluster
    strategies: Strategies
    solve: Solve
    background: Callable[[Question], Asked] | None = None

    def expected(self, plan: Plan, processes: Sequence[int]) -> Expected:
        """Expected times of ``plan`` on ``processes`` by the original files."""
        cluster = self._devices(self.cluster, Slowness(common=0.0, ranks=(), levels=()), processes)
        return Expected(plan, self.profile, cluster, self.strategies)

    def corrected(
        self, slowness: Slowness, order: Sequence[int], working: Sequence[int] | None = None
    ) -> tuple[Profile, Cluster]:  # fmt: skip
        """Profile and cluster under ``slowness``, in which process ``order[i]`` is device ``i``; devices without a
        process follow unchanged. ``working``: the processes that train, by default all in ``order``."""
        log = slowness.common + slowness.residual
        profile = slower_profile(self.profile, math.exp(log)) if log else self.profile
        links = self._links(slowness, order if working is None else working)
        return profile, self._devices(links, slowness, order)

    def _links(self, slowness: Slowness, working: Sequence[int]) -> Cluster:
        # Ranks copy messages in shared memory with their own cores: such a transfer is as slow as its slowest rank.
        copying = [p for p in slowness.stolen if p in working] if self.cluster.shared_memory else []
        least = max((slowness.common + slowness.ranks[p] for p in copying), default=-math.inf)
        shapes = slowness.shapes or (Shape(),) * len(slowness.levels)
        levels = []
        for i, (level, log, shape) in enumerate(zip(self.cluster.levels, slowness.levels, shapes, strict=True)):
            factor, residual = math.exp(log if i else max(log, least)), math.exp(slowness.residual)
            tables = tuple(
                replace(
                    t,
                    points=tuple(
                        (b, residual * shape.seconds(s, b * carried(t.op, t.ranks), factor)) for b, s in t.points
                    ),
                )
                for t in level.tables
            )
            levels.append(replace(level, tables=tables) if factor != 1 or residual != 1 else level)
        return replace(self.cluster, levels=tuple(levels))

    def _devices(self, cluster: Cluster, slowness: Slowness, order: Sequence[int]) -> Cluster:
        in_order = tuple(order) == tuple(range(len(order)))
        if not any(slowness.ranks) and (in_order or cluster.devices is None):
            return cluster
        processes = [*order, *(r for r in range(cluster.num_devices) if r not in set(order))]
        devices = []
        for process in processes:
            device = cluster.devices[process] if cluster.devices else RankDevice(name=cluster.device.name, speed=1.0)
            slower = math.exp(slowness.ranks[process]) if process < len(slowness.ranks) else 1.0
            name = device.name if slower == 1 else f"{device.name} (rank {process}, slow)"
            devices.append(replace(device, name=name, speed=device.speed / min(slower, MOST_SLOWDOWN)))
        return replace(cluster, devices=tuple(devices))

    def order(self, slowness: Slowness, current: Sequence[int]) -> tuple[int, ...]:
        """Processes in the order in which plans number them: the fastest first, without separating those that an inner
        level connects; among equals, working ones first, in their current order."""
        index = {p: i for i, p in enumerate([*current, *(p for p in range(len(slowness.ranks)) if p not in current)])}

        def slow(process: int) -> float:
            speed = self.cluster.devices[process].speed if self.cluster.devices else 1.0
            return round(slowness.ranks[process] - math.log(speed), 9)

        def ordered(members: list[int], level: int) -> list[int]:
            if level < 0:
                return sorted(members, key=lambda p: (slow(p), index[p]))
            size = self.cluster.levels[level].devices
            blocks: dict[int, list[int]] = {}
            for p in members:
                blocks.setdefault(p // size, []).append(p)
            inner = [ordered(b, level - 1) for b in blocks.values()]
            # Incomplete blocks come last, because a plan assumes complete blocks first.
            inner.sort(key=lambda b: (-len(b), max(map(slow, b)), min(index[p] for p in b)))
            return [p for b in inner for p in b]

        return tuple(ordered(list(range(len(slowness.ranks))), len(self.cluster.levels) - 2))

    def step_s(self, placement: Placement, slowness: Slowness) -> float:
        """Seconds of a step of ``placement`` under ``slowness``."""
        slowness = slowness.under(placement.processes)
        every = _all_processes(placement.processes, len(slowness.ranks))
        profile, cluster = self.corrected(slowness, every, placement.processes)
        return price_plan(placement.plan, profile, cluster, self.strategies).cost.total_s

    def best(self, placement: Placement, measured: Measurements, slowness: Slowness) -> list[Placement]:
        """The best plans under ``slowness``, each with its processes. The first may use all current processes. If some
        are slow, there is also the best plan without them: its devices are equal, so a short search finds it reliably.
        If links are slow, there is also the best plan of one block of devices that needs none of them. If some share a
        core, there is also the best plan with one process per core.

        Raises:
            InfeasibleError: nothing fits.
        """
        base = replace(slowness, residual=0.0)
        order = self.order(base, placement.processes)
        placements = [self._solved(placement, measured, base, order)]
        fast = tuple(p for p in order if base.ranks[p] == 0)
        fewer = {len(fast)} if fast == order[: len(fast)] else set[int]()
        fewer |= {self.cluster.levels[i - 1].devices if i else 1 for i, log in enumerate(base.levels) if log > LIKE}
        for count in sorted(n for n in fewer if 0 < n < len(order)):
            with contextlib.suppress(InfeasibleError):
                placements.append(self._solved(placement, measured, base, order[:count]))
        single = tuple(p for p in order if all(p not in g or p == _first(g, order) for g, _ in base.sharing))
        if len(single) < len(order):
            with contextlib.suppress(InfeasibleError):
                placements.append(self._solved(placement, measured, base, single))
        return placements

    def _solved(
        self, placement: Placement, measured: Measurements, slowness: Slowness, order: tuple[int, ...]
    ) -> Placement:
        profile, cluster = self.corrected(slowness.under(order), order)
        plan = self.solve(placement.plan, measured, profile, cluster, len(order))
        plan = replace(
            plan,
            gpus=len(slowness.ranks),
            profile_fingerprint=placement.plan.profile_fingerprint,
            cluster=self.cluster.name,
            cluster_fingerprint=codec.fingerprint(self.cluster),
        )
        return Placement(plan=plan, processes=order[: plan.num_ranks])

    def answer(self, question: Question) -> Answer:
        """The answer to ``question``, computed in this process.

        Raises:
            InfeasibleError: nothing fits.
        """
        q = question
        best = self.best(q.current, q.measured, q.slowness)
        placements: list[Placement] = []
        for candidate in (q.current, *q.known, *best):
            if not any(same(candidate, p) for p in placements):
                placements.append(candidate)
        return Answer(
            found=best,
            placements=placements,
            draws=self.draws(q.deviations, q.slowness, placements, q.draws, q.seed),
        )

    def draws(
        self, deviations: Deviations, slowness: Slowness, placements: Sequence[Placement], count: int, seed: int
    ) -> list[tuple[float, ...]]:
        """Seconds of a step of each placement under ``count`` joint draws of the factors, the same draws for all of
        them."""
        generator = random.Random(seed)
        ranks, levels = deviations
        kinds = sorted(set(slowness.ranks))
        members = {k: [p for p, r in enumerate(slowness.ranks) if r == k] for k in kinds}
        rows = []
        for _ in range(count):
            logs = {
                k: k + generator.gauss(0, max(ranks[p] for p in members[k]) / len(members[k]) ** 0.5) for k in kinds
            }
            factors = replace(
                slowness,
                ranks=tuple(logs[r] for r in slowness.ranks),
                levels=tuple(f + generator.gauss(0, d) for f, d in zip(slowness.levels, levels, strict=True)),
            )
            rows.append(tuple(self.step_s(p, factors) for p in placements))
        return rows

    def move_s(self, old: Placement, new: Placement, slowness: Slowness) -> float:
        """Seconds to send each process the state that it needs for ``new`` and does not have, over the links under
        ``slowness``. Different shards of a tensor are taken to have nothing in common."""
        words, loads = OPTIMIZER_WORDS[old.plan.optimizer], defaultdict[tuple[str, int], float](float)
        for i, c in enumerate(self.profile.graph.components):
            had, needed = _fractions_of(old, i), _fractions_of(new, i)
            if list(had.items()) == list(needed.items()):
                continue
            for kind, size in enumerate((c.parameter_bytes + c.buffer_bytes, c.parameter_bytes * words)):
                for p, parts in needed.items():
                    share = had.get(p, (0.0, 0.0))[kind]
                    size_p = size * max(0.0, parts[kind] - (share if 1.0 in (share, parts[kind]) else 0.0))
                    loads["in", p] += size_p
                    for source in had:
                        loads["out", source] += size_p / len(had)
        everyone, levels = {*old.processes, *new.processes}, self.cluster.levels
        inside = [i for i, level in enumerate(levels) if len({p // level.devices for p in everyone}) == 1]
        border = levels[inside[0] - 1].devices if inside and inside[0] else 1
        links = Links(self._links(replace(slowness, residual=0.0), sorted(everyone)))
        flows = sum(way == "in" and load > 0 for (way, _), load in loads.items())
        return links.handover(max(loads.values(), default=0.0), border, flows) if levels else 0.0


def _fractions_of(placement: Placement, index: int) -> dict[int, tuple[float, float]]:
    """Fractions of the weights and of the optimizer state of a component that each process has, in rank order."""
    c = placement.plan.components[index]
    shards = 1 if c.data.strategy == "replicate" else c.data.shards or c.data.degree
    has_all = c.data.strategy in ("replicate", "zero1", "zero2")
    parts = 1 / (c.tensor.degree * (1 if has_all else shards)), 1 / (c.tensor.degree * shards)
    return {placement.processes[rank]: parts for rank in placement.plan.stages[c.stage].ranks}


def rung(old: Placement, new: Placement) -> str:
    """Kind of a change: ``none``, another ``split`` of the batch or ``layout``, ``fewer`` or ``more`` ranks."""
    if set(new.processes) < set(old.processes):
        return "fewer"
    if set(new.processes) > set(old.processes):
        return "more"
    if same(old, new):
        return "none"
    even_plans = [replace(p.plan, stages=tuple(replace(s, weights=None) for s in p.plan.stages)) for p in (old, new)]
    same_layouts = len({p.conduct for p in even_plans}) == 1 and old.processes == new.processes
    replicas = all(c.data.strategy == "replicate" and c.tensor.degree == 1 for c in new.plan.components)
    return "split" if same_layouts and replicas and len(new.plan.stages) == 1 else "layout"


def same(a: Placement, b: Placement) -> bool:
    """Whether both placements have the same plan on the same processes; predictions are not compared."""
    if a is b:
        return True
    return a.plan.conduct == b.plan.conduct and a.processes == b.processes


def _first(group: Sequence[int], order: Sequence[int]) -> int:
    return next(p for p in order if p in group)


def _all_processes(processes: Sequence[int], count: int) -> tuple[int, ...]:
    """``processes``, followed by the others of ``count`` processes."""
    return (*processes, *(p for p in range(count) if p not in set(processes)))
