"""The price of a complete plan in closed form, independent of the solvers: it checks their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import hypot

from asa.cost.machine.estimate import on_device
from asa.cost.memory import together
from asa.cost.memory.peak import Peak, peak, under
from asa.cost.pipeline import StageTimes, makespan
from asa.cost.pricing import Pricer, Way, times_of
from asa.cost.step import BoundaryCost, ComponentCost, StepCost, step
from asa.cost.work.compute import Times
from asa.errors import InvalidInputError
from asa.interfaces.schedule import Schedule
from asa.interfaces.strategy import OPTIMIZER_WORDS, Strategies
from asa.ir.cluster import Cluster, Overlap
from asa.ir.codec import noun
from asa.ir.consistency import Discipline
from asa.ir.layout import Layout, largest_shard
from asa.ir.plan import Plan, Stage
from asa.ir.profile import Profile


@noun
class StagePrice:
    """The price of one stage: seconds of its own work in a step, and peak memory in bytes.

    ``start`` is the index of its first component. ``boundaries[i]`` lies in front of its component i; the last entry
    lies behind its last component. ``peak`` is that of the rank that holds most (:mod:`asa.cost.memory.together`).
    ``peaks`` has an entry for each rank if shards are uneven, and is empty otherwise.
    """

    start: int
    cost: StepCost
    times: StageTimes
    peak: Peak
    components: tuple[ComponentCost, ...]
    boundaries: tuple[BoundaryCost, ...]
    peaks: tuple[Peak, ...] = ()

    def peak_of(self, place: int) -> float:
        """Peak bytes of the stage's rank number ``place``."""
        return (self.peaks[place] if self.peaks else self.peak).total

    @property
    def most(self) -> float:
        """Peak bytes of the rank that holds most."""
        return max(p.total for p in self.peaks or (self.peak,))


@noun
class Price:
    """The price of a plan: seconds of a step, the highest peak of a rank in bytes, and standard errors in seconds.

    ``handovers[i]``: seconds to send a microbatch from stage i to stage i + 1, and its gradient back.
    """

    cost: StepCost
    peak: Peak
    stages: tuple[StagePrice, ...]
    handovers: tuple[tuple[float, float], ...]
    compute_error_s: float
    link_error_s: float

    @property
    def components(self) -> tuple[ComponentCost, ...]:
        """Costs of the components of all stages."""
        return tuple(c for s in self.stages for c in s.components)

    @property
    def boundaries(self) -> tuple[BoundaryCost, ...]:
        """The boundary in front of every component (for a stage's first one, its inlet), then the last outlet."""
        return (*(b for s in self.stages for b in s.boundaries[:-1]), self.stages[-1].boundaries[-1])


def _rank_peaks(pricer: Pricer, start: int, ways: Sequence[Way], in_flight: int) -> tuple[Peak, ...]:
    """The peak of every rank of a stage with uneven shards."""
    by_rows: dict[tuple[int, ...], Peak] = {}
    peaks, rows_of = [], [(x, pricer.shards.rows(x)) for x in {w.layout for w in ways}]
    for rank in range(pricer.width):
        rows = tuple(shards[layout.data_index(rank)] for layout, shards in rows_of)
        if rows not in by_rows:
            view = pricer.holder(rank)
            parts = [view.cost(i, way).footprint for i, way in enumerate(ways, start)]
            between = [view.edges.boundary(i, a.layout, b.layout) for i, (a, b) in enumerate(pairwise(ways), start + 1)]
            inlets = (view.edges.inlet(start, ways[0].layout), *between)
            outlet = view.edges.outlet(start + len(ways) - 1, ways[-1].layout)
            highest = peak(together.ended(parts, outlet.footprint), [b.footprint for b in inlets], in_flight)
            by_rows[rows] = replace(highest, index=start + highest.index)
        peaks.append(by_rows[rows])
    return tuple(peaks)


def price_stage(pricer: Pricer, start: int, ways: Sequence[Way], overlap: Overlap, in_flight: int = 1) -> StagePrice:
    """The price of a stage in which component ``start + i`` runs ``ways[i]``, while activations of ``in_flight``
    microbatches are held."""
    components = tuple(pricer.component(i, way, start) for i, way in enumerate(ways, start))
    between = [pricer.edges.boundary(i, a.layout, b.layout) for i, (a, b) in enumerate(pairwise(ways), start + 1)]
    stop = start + len(ways)
    boundaries = (pricer.edges.inlet(start, ways[0].layout), *between, pricer.edges.outlet(stop - 1, ways[-1].layout))
    cost = step(components, boundaries, overlap)
    peaks = _rank_peaks(pricer, start, ways, in_flight) if ways[0].layout.weights else ()
    stage_peak = together.stage_peak(pricer, start, ways, components, boundaries, in_flight)
    return StagePrice(
        start=start,
        cost=cost,
        times=_times(cost, components, boundaries, overlap),
        peak=max(peaks, key=lambda p: p.total) if peaks else replace(stage_peak, index=start + stage_peak.index),
        components=components,
        boundaries=boundaries,
        peaks=peaks,
    )


def _times(
    cost: StepCost, components: Sequence[ComponentCost], boundaries: Sequence[BoundaryCost], overlap: Overlap
) -> StageTimes:
    """The stage's times as :func:`asa.cost.pipeline.makespan` needs them. Overlap lengthens the last backward."""
    *_, forward, backward, bucket = (float(sum(x)) for x in zip(*(c.sums for c in components), strict=True))
    forward += sum(b.forward_s for b in boundaries)
    backward += sum(b.backward_s for b in boundaries)
    longer = bucket + (cost.overlap_s * (1 - 1 / overlap.compute_slowdown) if overlap.saving >= 0 else 0.0)
    return StageTimes(
        forward=forward,
        backward=backward,
        last_backward_extra=longer,
        after=cost.total_s - components[0].num_microbatches * (forward + backward) - longer,
    )


def price(
    pricers: Sequence[Pricer], starts: Sequence[int], ways: Sequence[Way], overlap: Overlap, schedule: Schedule | None
) -> Price:
    """The price of a plan whose stage s begins with component ``starts[s]`` and is priced by ``pricers[s]``.

    ``schedule`` is None for one stage; otherwise the step time is :func:`asa.cost.pipeline.makespan`.
    """
    ends = [*starts[1:], len(ways)]
    m = pricers[0].num_microbatches
    stages = tuple(
        price_stage(pricer, a, ways[a:b], overlap, 1 if schedule is None else schedule.in_flight(s, len(starts), m))
        for s, (pricer, a, b) in enumerate(zip(pricers, starts, ends, strict=True))
    )
    offsets = [sum(p.width for p in pricers[:s]) for s in range(len(pricers))]
    handovers = tuple(
        pricers[s].handover(starts[s], ways[starts[s] - 1].layout, ways[starts[s]].layout, offsets[s])
        for s in range(1, len(starts))
    )
    return Price(
        cost=stages[0].cost if schedule is None else _pipelined(stages, handovers, schedule, m),
        peak=max((s.peak for s in stages), key=lambda p: p.total),
        stages=stages,
        handovers=handovers,
        compute_error_s=hypot(*(c.error_s for s in stages for c in s.components)),
        link_error_s=max(
            sum(c.link_error_s for c in s.components) + sum(b.link_error_s for b in s.boundaries) for s in stages
        ),
    )


def disciplined(
    discipline: Discipline, price: Price, pricers: Sequence[Pricer], ways: Sequence[Way], profile: Profile, ranks: int
) -> Price:
    """``price`` with the memory that ``discipline`` takes on ``ranks`` ranks. Whole replicas and stages of one device
    have no buckets. Two batches are in flight in a pipeline that is not drained. Peaks of a stage end with those of
    servers on ranks of their own."""
    stages, among = list[StagePrice](), ranks // len(price.stages)
    largest = max(c.largest_parameter_bytes for c in profile.graph.components)
    for depth, stage, pricer in zip(range(len(pricers), 0, -1), price.stages, pricers, strict=True):
        some, m = ways[stage.start : stage.start + len(stage.components)], pricer.num_microbatches
        size = sum(pricer.states.state_cost(i, w).memory.parameters for i, w in enumerate(some, stage.start))
        plain = list(stage.peaks or (stage.peak,) * pricer.width)
        if discipline.groups is None:
            workers, count = min(among, discipline.workers(ranks)), m * min(2, len(pricers))
            alone = Pricer(
                profile, pricer.times, pricer.cluster, pricer.strategies, width=1, optimizer=pricer.optimizer,
                global_batch=largest_shard(pricer.microbatch, workers) * count, num_microbatches=count,
            )  # fmt: skip
            one = replace(some[0], layout=Layout(width=1, data=1, tensor=1), data=replace(some[0].data, degree=1))
            peak = price_stage(alone, stage.start, (one,) * len(some), pricer.cluster.overlap, min(depth, count)).peak
            plain = [peak] * workers + [Peak(**dict.fromkeys(vars(peak), 0))] * (among - workers)
        words, most = OPTIMIZER_WORDS[pricer.optimizer], largest / (size or 1.0)
        held = (discipline.held(rank, ranks, words, most) for rank in range(len(plain)))
        peaks = [under(p, size, h, size * (m == 1 and p.total > 0)) for p, h in zip(plain, held, strict=True)]
        stages.append(replace(stage, peak=max(peaks, key=lambda p: p.total), peaks=tuple(peaks)))
    return replace(price, stages=tuple(stages), peak=max((s.peak for s in stages), key=lambda p: p.total))


def _pipelined(
    stages: Sequence[StagePrice], handovers: Sequence[tuple[float, float]], schedule: Schedule, num_microbatches: int
) -> StepCost:
    total = makespan([s.times for s in stages], handovers, schedule, num_microbatches)
    busiest = max((s.cost for s in stages), key=lambda c: c.total_s)
    return replace(busiest, total_s=total, bubble_s=max(0.0, total - busiest.compute_s - busiest.exposed_s))


def ways_of(plan: Plan, profile: Profile, strategies: Strategies) -> tuple[Way, ...]:
    """The way in which ``plan`` runs each component of the profile.

    Raises:
        InvalidInputError: the plan is of another model, or a strategy that it chooses refuses the component.
    """
    names = tuple(c.name for c in profile.graph.components)
    if tuple(a.name for a in plan.components) != names:
        chosen = [a.name for a in plan.components]
        at = next(
            (i for i, (a, b) in enumerate(zip(chosen, names, strict=False)) if a != b), min(len(chosen), len(names))
        )
        differs = f"; component {at} is {chosen[at]!r} and {names[at]!r}" if at < min(len(chosen), len(names)) else ""
        raise InvalidInputError(
            f"the plan is of {len(chosen)} components of {plan.model_spec}, the profile of {len(names)} of "
            f"{profile.model_spec}{differs}",
            where="$.components" + (f"[{at}].name" if differs else ""),
        )
    for name in ("input_shape", "num_classes"):
        in_plan, in_profile = getattr(plan, name), getattr(profile.graph, name)
        if in_plan != in_profile:
            raise InvalidInputError(f"the plan has {name} {in_plan}, its profile {in_profile}", where=f"$.{name}")
    ways = []
    for i, (assignment, layout) in enumerate(zip(plan.components, plan.layouts(), strict=True)):
        way = Way(
            layout=layout, data=assignment.data, tensor=assignment.tensor, checkpoint=assignment.checkpoint,
            offload=assignment.offload,
        )  # fmt: skip
        component = profile.graph.components[i]
        if way.tensor.strategy not in strategies.tensor or way.data.strategy not in strategies.data:
            raise InvalidInputError(
                f"component {component.name} uses {way.data.strategy} and {way.tensor.strategy}, offered are "
                f"{', '.join((*strategies.data, *strategies.tensor))}",
                where=f"$.components[{i}]",
            )
        refusal = strategies.tensor[way.tensor.strategy].refusal(component, way.tensor.degree)
        refusal = refusal or strategies.data[way.data.strategy].refusal(component, way.data.degree)
        if refusal:
            raise InvalidInputError(f"the plan cannot be run: {refusal}", where=f"$.components[{i}]")
        ways.append(way)
    return tuple(ways)


def schedule_of(plan: Plan, strategies: Strategies) -> Schedule | None:
    """The schedule of a plan of several stages, None for one stage.

    Raises:
        InvalidInputError: the plan has no schedule, or one that is not offered, or the schedule refuses the plan.
    """
    if len(plan.stages) == 1:
        return None
    schedule = strategies.schedules.get(plan.schedule)
    if schedule is None:
        offered = ", ".join(strategies.schedules) or "none"
        raise InvalidInputError(
            f"{len(plan.stages)} stages need a schedule, the plan says {plan.schedule}; offered: {offered}",
            where="$.schedule",
        )
    refusal = schedule.refusal(len(plan.stages), plan.num_microbatches)
    if refusal:
        raise InvalidInputError(f"the plan cannot be run: {refusal}", where="$.num_microbatches")
    return schedule


def price_plan(plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies) -> Price:
    """The price of ``plan``; of one group, if its ranks train in groups. If the cluster's kind of device is not the
    profile's, times are estimated.

    Raises:
        InvalidInputError: as for :func:`ways_of`, :func:`schedule_of` and :meth:`asa.ir.cluster.Cluster.check_stages`.
    """
    cluster, whole = cluster.ordered(plan.devices), plan
    plan = plan.of_group() if plan.groups > 1 else plan
    used = on_device(profile, cluster)
    ways, schedule = ways_of(plan, profile, strategies), schedule_of(plan, strategies)
    cluster.check_stages([s.ranks for s in plan.stages])
    times = times_of(used, strategies)
    pricers = [pricer_of(plan, s, used, times, cluster, strategies, cluster.speeds(s.ranks)) for s in plan.stages]
    found = price(pricers, plan.starts(), ways, cluster.overlap, schedule)
    loose, ranks = whole.consistency, whole.num_processes
    return found if loose is None else disciplined(loose, found, pricers, ways, used, ranks)


def pricer_of(
    plan: Plan, stage: Stage, profile: Profile, times: Times, cluster: Cluster, strategies: Strategies,
    speeds: tuple[float, ...],
) -> Pricer:  # fmt: skip
    """The pricer of a plan's stage. ``speeds`` are those of its ranks; empty if all run at the device's speed."""
    return Pricer(
        profile, times, cluster, strategies, width=len(stage.ranks), global_batch=plan.global_batch,
        num_microbatches=plan.num_microbatches, optimizer=plan.optimizer,
        busy=None if len(plan.stages) == 1 else plan.gpus, compression=plan.compression, speeds=speeds,
    )  # fmt: skip
