"""``verify``: predicts time and memory of any plan from profile, cluster and strategies, without a solver."""

from __future__ import annotations

from dataclasses import replace

from asa.cost.machine.estimate import on_device
from asa.cost.planned import price_plan
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan, Prediction
from asa.ir.profile import Profile
from asa.planner.answer.prediction import predict


def verify(plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies) -> Prediction:
    """The prediction of ``plan``, recomputed. Where ranks train in groups, its times are those of a group's step.

    Raises:
        InvalidInputError: the plan is of another model, or asks of a component what it refuses.
    """
    price = price_plan(plan, profile, cluster, strategies)
    widths = [len(s.ranks) for s in plan.stages]
    batch = plan.global_batch // plan.groups
    prediction = predict(price, on_device(profile, cluster), cluster, widths=widths, global_batch=batch)
    return replace(prediction, memory_bytes_per_rank=prediction.memory_bytes_per_rank * plan.groups)


def step_shares(plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies) -> tuple[float, ...]:
    """The share of each component in the work of a step, from 0 to 1. A boundary counts with the component after it.

    Raises:
        InvalidInputError: as for :func:`verify`.
    """
    price = price_plan(plan, profile, cluster, strategies)
    each = [
        c.compute_s + c.blocking_s + c.sync_s + c.update_s + c.update_communication_s + b.blocking_s
        for c, b in zip(price.components, price.boundaries[:-1], strict=True)
    ]
    whole = sum(each)
    return tuple(x / whole for x in each) if whole > 0 else ()
