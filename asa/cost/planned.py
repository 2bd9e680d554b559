"""The price of a whole plan, by the closed forms: no solver, no numbers of a solver."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import hypot

from asa.cost.estimate import on_device
from asa.cost.memory import Peak, peak
from asa.cost.pricing import Pricer, Way, times_of
from asa.cost.step import BoundaryCost, ComponentCost, StepCost, step
from asa.errors import InvalidInputError
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster, Overlap
from asa.ir.codec import noun
from asa.ir.plan import Plan
from asa.ir.profile import Profile


@noun
class Price:
    """What a stage costs: seconds, the peak of a rank in bytes, and standard errors in seconds.

    ``boundaries[i]`` lies in front of component i, the last one behind the last component.
    """

    cost: StepCost
    peak: Peak
    components: tuple[ComponentCost, ...]
    boundaries: tuple[BoundaryCost, ...]
    compute_error_s: float
    link_error_s: float


def price(pricer: Pricer, ways: Sequence[Way], overlap: Overlap) -> Price:
    """A stage in which component i runs ``ways[i]``."""
    components = tuple(pricer.component(i, way) for i, way in enumerate(ways))
    between = [pricer.boundary(i, a.layout, b.layout) for i, (a, b) in enumerate(pairwise(ways), 1)]
    boundaries = (pricer.entry(ways[0].layout), *between, pricer.exit(ways[-1].layout))
    return Price(
        cost=step(components, boundaries, overlap),
        peak=peak([c.footprint for c in components], [b.footprint for b in boundaries[:-1]]),
        components=components,
        boundaries=boundaries,
        compute_error_s=hypot(*(c.error_s for c in components)),
        link_error_s=sum(c.link_error_s for c in components) + sum(b.link_error_s for b in boundaries),
    )


def ways_of(plan: Plan, profile: Profile, strategies: Strategies) -> tuple[Way, ...]:
    """How ``plan`` runs each component of the profile.

    Raises:
        InvalidInputError: the plan is of another model, of several stages, or asks of a component what it refuses.
    """
    names = tuple(c.name for c in profile.graph.components)
    if tuple(a.name for a in plan.components) != names:
        raise InvalidInputError(
            f"the plan is of {len(plan.components)} components of {plan.model_spec}, the profile of {len(names)} of "
            f"{profile.model_spec}",
            where="$.components",
        )
    if len(plan.stages) != 1:
        raise InvalidInputError(f"a plan of {len(plan.stages)} stages cannot be priced yet", where="$.stages")
    ways = []
    for i, (assignment, layout) in enumerate(zip(plan.components, plan.layouts(), strict=True)):
        way = Way(layout=layout, data=assignment.data, tensor=assignment.tensor)
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


def price_plan(plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies) -> Price:
    """The price of ``plan``; on another kind of device than the profile's, from estimated times.

    Raises:
        InvalidInputError: as for :func:`ways_of`.
    """
    used = on_device(profile, cluster)
    pricer = Pricer(
        used,
        times_of(used, strategies),
        cluster,
        strategies,
        width=len(plan.stages[0].ranks),
        global_batch=plan.global_batch,
        num_microbatches=plan.num_microbatches,
        optimizer=plan.optimizer,
    )
    return price(pricer, ways_of(plan, profile, strategies), cluster.overlap)
