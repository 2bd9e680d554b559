"""``verify``: time and memory of any plan from profile, cluster and strategies alone. No solver has a say in it."""

from __future__ import annotations

from asa.cost.machine.estimate import on_device
from asa.cost.planned import price_plan
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan, Prediction
from asa.ir.profile import Profile
from asa.planner.answer.prediction import predict


def verify(plan: Plan, profile: Profile, cluster: Cluster, strategies: Strategies) -> Prediction:
    """The prediction of ``plan``, recomputed.

    Raises:
        InvalidInputError: the plan is of another model, or asks of a component what it refuses.
    """
    price = price_plan(plan, profile, cluster, strategies)
    widths = [len(s.ranks) for s in plan.stages]
    return predict(price, on_device(profile, cluster), cluster, widths=widths, global_batch=plan.global_batch)
