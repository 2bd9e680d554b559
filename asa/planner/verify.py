"""``verify``: time and memory of any plan from profile, cluster and strategies alone. No solver has a say in it."""

from __future__ import annotations

from asa.cost.estimate import on_device
from asa.errors import InvalidInputError
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan, Prediction
from asa.ir.profile import Profile
from asa.planner.candidate import Candidate, Prices
from asa.planner.prediction import predict
from asa.planner.request import Request
from asa.planner.space import Space, Way


def verify(plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies) -> Prediction:
    """The prediction of ``plan``, recomputed.

    Raises:
        InvalidInputError: the plan is of another model, of several stages, or asks of a component what it refuses.
    """
    candidate, prices = priced(plan, profile, cluster, strategies)
    return predict(candidate, prices.of(candidate), prices.space.profile, plan.global_batch)


def priced(plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies) -> tuple[Candidate, Prices]:
    """The candidate a plan stands for, and prices of the space it lies in.

    Raises:
        InvalidInputError: as for :func:`verify`.
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
    request = Request(gpus=plan.gpus, global_batch=plan.global_batch, optimizer=plan.optimizer)
    space = Space(on_device(profile, cluster), cluster, strategies, request)
    width = len(plan.stages[0].ranks)
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
    candidate = Candidate(
        origin=plan.strategy, width=width, num_microbatches=plan.num_microbatches, ways=tuple(ways)
    )  # fmt: skip
    return candidate, Prices(space)
