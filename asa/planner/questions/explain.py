"""Explanations of a plan: the cost of each component, the cost of its best alternative, and comparisons with another
plan."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from typing import Literal

from asa.cost.machine.estimate import on_device
from asa.cost.machine.what_if import heavier_profile, linked_at_once
from asa.cost.memory.peak import libraries
from asa.cost.planned import Price
from asa.cost.step import StepCost
from asa.errors import UsageError
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.codec import noun
from asa.ir.consistency import is_discipline, parse
from asa.ir.plan import DataDegree, Plan, TensorDegree
from asa.ir.profile import Profile
from asa.planner.answer.prediction import noise
from asa.planner.pipeline.whole import row
from asa.planner.search import search
from asa.planner.space import baselines, consistency
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.nearest import start
from asa.planner.space.request import Pin, Request, parse_pin
from asa.planner.space.space import Space, pinned
from asa.planner.stage.formulate import formulate

_FORCED_S = 1.5
"""Seconds to search for the best plan that has the forced choice."""


@noun
class Alternative:
    """The best other way for one component, with all others unchanged. ``extra_s``: seconds that it adds to a step;
    ``fits``: within the memory limit."""

    data: DataDegree
    tensor: TensorDegree
    extra_s: float
    fits: bool
    checkpoint: bool = False
    offload: bool = False


@noun
class ComponentExplanation:
    """The cost of one component in the plan: seconds per step and bytes at the peak, on the busiest rank.

    ``inside_s`` is its own blocking communication, with that of the update (which is in ``update_s`` if the state is
    offloaded), ``boundary_s`` that of the boundary before it; ``sync_s`` is gradient synchronisation, hidden or not.
    """

    name: str
    data: DataDegree
    tensor: TensorDegree
    samples_per_rank: int
    forward_s: float
    backward_s: float
    inside_s: float
    boundary_s: float
    sync_s: float
    update_s: float
    state_bytes: float
    activation_bytes: float
    transient_bytes: float
    alternative: Alternative | None
    stage: int = 0
    checkpoint: bool = False
    offload: bool = False


@noun
class Explanation:
    """The costs of a plan by component. ``binding`` is what limits its speed."""

    components: tuple[ComponentExplanation, ...]
    overlap_s: float
    hidden_s: float
    peak_component: str
    peak_bytes: float
    capacity_bytes: float
    binding: Literal["memory", "compute", "communication"]


@noun
class Term:
    """One term of the step time in both plans, in seconds."""

    name: str
    plan_s: float
    other_s: float


@noun
class Difference:
    """A plan compared with another one. ``other_s`` is None where the other cannot run; ``changed`` names components
    that differ; ``remark`` says why the other plan was not chosen, where it is the faster one."""

    other: str
    plan_s: float
    other_s: float | None = None
    fits: bool = False
    why_not: str = ""
    terms: tuple[Term, ...] = ()
    changed: tuple[str, ...] = ()
    remark: str = ""


def _prices(
    plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies, memory_bytes: int | None, other: str = ""
) -> tuple[Candidate, Prices]:
    forced = re.split("[=@]", other)
    by_tokens = "sequence" in (*(c.tensor.strategy for c in plan.components), *forced)
    named = (*(("sequence",) if by_tokens else ()), *(("hsdp",) if "hsdp" in forced else ()))
    request = Request(
        gpus=plan.gpus // plan.groups, global_batch=plan.global_batch // plan.groups, optimizer=plan.optimizer,
        compression=plan.compression,
        memory_bytes=plan.memory_bytes if memory_bytes is None else memory_bytes,
        strategies=("asa", *named) if named else None,
    )  # fmt: skip
    candidate = Candidate.of(plan, profile, strategies)
    used = heavier_profile(on_device(profile, cluster), plan.memory_scale)
    space = Space(used, cluster.ordered(plan.devices), strategies, request)
    return candidate, Prices(space.weighted(candidate.weights))


def explain(
    plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies, *, memory_bytes: int | None = None
) -> Explanation:
    """The costs of every component of ``plan``, with its best alternative. ``memory_bytes``: memory of a device; None
    for the limit that the plan was made with.

    Raises:
        InvalidInputError: the plan and the profile do not belong together.
    """
    candidate, prices = _prices(plan, profile, cluster, strategies, memory_bytes)
    price = prices.of(candidate)
    m, capacity = candidate.num_microbatches, prices.capacity(candidate)
    rows = []
    for i, (way, c) in enumerate(zip(candidate.ways, price.components, strict=True)):
        rows.append(
            ComponentExplanation(
                name=plan.components[i].name,
                data=way.data,
                tensor=way.tensor,
                samples_per_rank=prices.pricer(candidate.width(i), m, prices.busy(candidate)).local(way.layout),
                forward_s=m * c.forward_s,
                backward_s=m * c.backward_s + c.bucket_s,
                inside_s=c.blocking_s + (0.0 if way.offload else c.update_communication_s),
                boundary_s=price.boundaries[i].blocking_s,
                sync_s=c.sync_s,
                update_s=c.update_s + (c.update_communication_s if way.offload else 0.0),
                state_bytes=c.footprint.state + c.footprint.gradients,
                activation_bytes=c.footprint.activations
                + price.boundaries[i].footprint.activations
                + price.boundaries[i].footprint.state,
                transient_bytes=c.footprint.transient + price.boundaries[i].footprint.transient,
                alternative=_alternative(prices, candidate, price, i),
                stage=candidate.stage(i),
                checkpoint=way.checkpoint,
                offload=way.offload,
            )
        )
    tight = capacity - price.peak.total < 0.02 * capacity
    unlinked = _prices(plan, profile, linked_at_once(cluster), strategies, memory_bytes)[1].of(candidate)
    exposed = price.cost.total_s - unlinked.cost.total_s > price.cost.compute_s
    return Explanation(
        components=tuple(rows),
        overlap_s=price.cost.overlap_s,
        hidden_s=price.cost.hidden_s,
        peak_component=plan.components[price.peak.index].name,
        peak_bytes=price.peak.total + libraries(cluster.device),
        capacity_bytes=max(0.0, capacity + libraries(cluster.device)),
        binding="memory" if tight else "communication" if exposed else "compute",
    )


def _alternative(prices: Prices, candidate: Candidate, price: Price, index: int) -> Alternative | None:
    best: Alternative | None = None
    for way in prices.space.ways(index, candidate.width(index), candidate.num_microbatches):
        if way == candidate.ways[index]:
            continue
        other = prices.of(candidate.with_way(index, way))
        fits = prices.fits(candidate.with_way(index, way))
        extra = other.cost.total_s - price.cost.total_s
        if best is None or (not fits, extra) < (not best.fits, best.extra_s):
            best = Alternative(
                data=way.data, tensor=way.tensor, extra_s=extra, fits=fits, checkpoint=way.checkpoint,
                offload=way.offload,
            )  # fmt: skip
    return best


_MET = "what the plan has already: name a degree (@N), or something else"


def why_not(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    strategies: Strategies,
    other: str,
    *,
    memory_bytes: int | None = None,
) -> Difference:
    """``plan`` compared with the best plan in which ``other`` is forced: a whole strategy, a discipline, or
    ``COMPONENT=STRATEGY[@DEGREE]``.

    Raises:
        UsageError: ``other`` names no strategy and no component.
        InvalidInputError: the plan and the profile do not belong together.
    """
    candidate, prices = _prices(plan, profile, cluster, strategies, memory_bytes, other)
    price = prices.of(candidate)
    if is_discipline(other):
        return _versus_discipline(plan, candidate, prices, other)
    rival, reason = _forced(prices, other, plan, candidate) if "=" in other else _whole(prices, other)
    if rival is None:
        return Difference(other=other, plan_s=price.cost.total_s, why_not=reason)
    rival_price = prices.of(rival)
    fits = prices.fits(rival)
    return Difference(
        other=other,
        plan_s=price.cost.total_s,
        other_s=rival_price.cost.total_s,
        fits=fits,
        why_not="" if fits else prices.lacking(rival),
        terms=_terms(price, rival_price),
        changed=_changed(plan, candidate, rival),
        remark=_MET if "=" in other and rival.key == candidate.key else _remark(price, rival_price) if fits else "",
    )


def _remark(chosen: Price, rival: Price) -> str:
    """The reason why the faster plan of ``rival`` was not chosen; empty where it is not faster."""
    gain, unclear = chosen.cost.total_s - rival.cost.total_s, noise(chosen, rival)
    if gain <= 1e-6 * chosen.cost.total_s:
        return ""
    words = f"predicted {100 * gain / chosen.cost.total_s:.2g} % faster than this plan"
    if gain < unclear:
        return f"{words}, below the noise of {100 * unclear / chosen.cost.total_s:.2g} %"
    return f"{words}: not allowed when it was made, or not found in its time; try a longer --time-limit"


def _versus_discipline(plan: Plan, candidate: Candidate, prices: Prices, other: str) -> Difference:
    """``plan`` compared with the discipline of consistency ``other`` on the workers of plain data parallelism."""
    price, workers = prices.of(candidate), row("ddp", prices)
    if workers.candidate is None:
        return Difference(other=other, plan_s=price.cost.total_s, why_not=workers.why_not)
    discipline = parse(other)
    rival_price = consistency.disciplined(prices, workers.candidate, discipline).price
    return Difference(
        other=other,
        plan_s=price.cost.total_s,
        other_s=rival_price.cost.total_s,
        fits=False,
        why_not=consistency.why_not(discipline.name),
        terms=_terms_with(_terms(price, price), rival_price.cost),
        changed=_changed(plan, candidate, workers.candidate),
    )


def _terms_with(terms: tuple[Term, ...], rival: StepCost) -> tuple[Term, ...]:
    """``terms`` with those of a discipline as the other plan's. Its step is a mean over workers."""
    seconds_of = {
        "compute": rival.compute_s - rival.update_s, "optimizer": rival.update_s,
        "gradient synchronisation": rival.exposed_s, "waiting for other stages": rival.bubble_s,
    }  # fmt: skip
    return tuple(replace(t, other_s=seconds_of.get(t.name, 0.0)) for t in terms)


def _changed(plan: Plan, chosen: Candidate, rival: Candidate) -> tuple[str, ...]:
    return tuple(c.name for c, a, b in zip(plan.components, chosen.ways, rival.ways, strict=True) if a != b)


def _terms(chosen: Price, rival: Price) -> tuple[Term, ...]:
    """The terms of both step times, for the busiest stage; overlap counts as the time that it saves."""

    def parts(p: Price) -> dict[str, float]:
        stage = max(p.stages, key=lambda s: s.cost.total_s)
        sync = sum(c.sync_s for c in stage.components)
        blocking = sum(c.blocking_s + c.update_communication_s for c in stage.components)
        boundaries = sum(b.blocking_s for b in stage.boundaries)
        return {
            "compute": sum(c.compute_s for c in stage.components),
            "optimizer": sum(c.update_s for c in stage.components),
            "collectives inside components": blocking,
            "boundaries": boundaries,
            "gradient synchronisation": sync,
            "overlap (below 0: hidden)": stage.cost.total_s - stage.cost.compute_s - sync - blocking - boundaries,
            "waiting for other stages": p.cost.total_s - stage.cost.total_s,
        }

    a, b = parts(chosen), parts(rival)
    return tuple(Term(name=n, plan_s=a[n], other_s=b[n]) for n in a)


def _whole(prices: Prices, name: str) -> tuple[Candidate | None, str]:
    space = prices.space
    baselines.check((name,), space.strategies, space.request.gpus)
    if name == "asa":
        raise UsageError("asa is the search's own answer; name another strategy, or COMPONENT=STRATEGY[@DEGREE]")
    rows = [row(member, prices) for member in baselines.members(name, space.strategies, space.request.gpus)]
    best = min(rows, key=lambda r: (not r.fits, r.seconds))
    return best.candidate, best.why_not if best.name == name else f"{best.name}: {best.why_not}"


def _forced(prices: Prices, text: str, plan: Plan, current: Candidate) -> tuple[Candidate | None, str]:
    space, pins = prices.space, _pins_meant(prices, parse_pin(text), current)
    if not pins:
        return current, ""
    forced = Space(space.profile, space.cluster, space.strategies, replace(space.request, pins=pins))
    prices, allowed = Prices(forced.weighted(current.weights), prices), forced.pinned
    fitting = sorted((b for b in plan.baselines if b.fits and b.name != "hybrid"), key=lambda b: b.step_time_s or 0.0)
    uniform = (row(b.name, prices).candidate for b in fitting)
    begin = start(prices, chain((current,), uniform), allowed)
    outcome = search(
        prices, solver="dp", time_limit_s=_FORCED_S, allowed=allowed, baselines=[begin] if begin else [], start=begin
    )
    if outcome.best is not None:
        return outcome.best, ""
    runs = any(formulate(prices, w, 1, allowed) is not None for w in range(1, space.request.gpus + 1))
    return None, "nothing fits with it" if runs else "no stage of these devices can run it"


def _pins_meant(prices: Prices, pin: Pin, candidate: Candidate) -> tuple[Pin, ...]:
    """The pins to search with. Where the plan already satisfies ``pin`` there are none, except for ``replicate`` of
    components with split tensors: there the user means whole weights, so a tensor degree of 1 is pinned, too."""
    allowed = pinned(prices.space.profile, (pin,))
    names = [c.name for c in prices.space.profile.graph.components]
    indices = [i for i, name in enumerate(names) if pin.matches(name)]
    if not all(allowed(i, candidate.ways[i]) for i in indices):
        return (pin,)
    if pin.strategy == "replicate" and pin.degree is None and any(candidate.ways[i].tensor.degree > 1 for i in indices):
        return pin, Pin(pattern=pin.pattern, strategy="none", degree=1)
    return ()
