"""The prediction in a plan, made of its price, with an interval; and the same of any plan, without a solver."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

from asa.cost.constants import constant
from asa.cost.machine.estimate import on_device
from asa.cost.memory.peak import libraries
from asa.cost.planned import Price, price_plan
from asa.cost.work.spread import Z90, drift
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan, Prediction
from asa.ir.profile import Profile


def deviation(price: Price, profile: Profile, cluster: Cluster) -> float:
    """Standard deviation of the step time around its prediction, in seconds.

    It combines four errors in quadrature: the standard errors of the measured times; the cost model's usual error on
    compute and pipeline bubbles (far larger for estimated profiles); the error of links on exposed communication; and
    the drift of the machine, as seen while the links (for communication) or the model and the links (for the rest,
    whichever drifted more) were measured. Drift is common to all plans and does not decide which is fastest.
    """
    model = constant("step_error" if profile.provenance.trusted else "estimate_error")
    moved = price.cost.exposed_s + price.cost.hidden_s
    exposed = price.cost.exposed_s / moved if moved > 0 else 0.0
    worked = max(0.0, price.cost.total_s - price.cost.exposed_s)
    drifts = drift(profile), drift(cluster)
    common = (max(drifts) if drifts[0] else 0.0) * worked + drifts[1] * price.cost.exposed_s
    return math.hypot(price.compute_error_s, model * worked, exposed * price.link_error_s, common)


def predict(
    price: Price, profile: Profile, cluster: Cluster, *, widths: Sequence[int], global_batch: int
) -> Prediction:
    """The prediction of one step with stages of ``widths`` ranks. Ranks with equal shares of a batch are predicted to
    hold as much as the one that holds most.

    The 90 % interval is log-normal, as in :mod:`asa.planner.answer.confidence`: the machine is slower or faster than
    when it was profiled by a factor, and more often slower.
    """
    total = price.cost.total_s
    factor = math.exp(Z90 * deviation(price, profile, cluster) / total) if total > 0 else 1.0
    return Prediction(
        step_time_s=total,
        step_time_low_s=total / factor,
        step_time_high_s=total * factor,
        compute_s=price.cost.compute_s,
        exposed_communication_s=price.cost.exposed_s,
        hidden_communication_s=price.cost.hidden_s,
        update_s=price.cost.update_s,
        bubble_s=price.cost.bubble_s,
        memory_bytes_per_rank=memory_of(price, cluster, widths),
        samples_per_s=global_batch / total if total > 0 else 0.0,
    )


def memory_of(price: Price, cluster: Cluster, widths: Sequence[int]) -> tuple[int, ...]:
    """Peak bytes of active memory on every rank of stages of ``widths`` ranks."""
    return tuple(
        math.ceil(stage.peak_of(place) + libraries(cluster.device))
        for stage, width in zip(price.stages, widths, strict=True)
        for place in range(width)
    )


def memory_max(price: Price, cluster: Cluster) -> int:
    """Bytes of active memory on the rank that holds most."""
    return math.ceil(max(s.most for s in price.stages) + libraries(cluster.device))


def noise(one: Price, other: Price) -> float:
    """Seconds by which two predicted step times must differ for the shorter one to be faster with the probability
    ``sure_enough``.

    Errors of what both plans do in the same way cancel. What counts are the standard errors of the components that
    differ, and the difference of the errors of communication. The result is at least the share ``claim_floor`` of the
    faster step, by which two runs of stock data parallelism differ.
    """
    pairs = list(zip(one.components, other.components, strict=True))
    errors, other_errors = [a.error_s for a, b in pairs if a != b], [b.error_s for a, b in pairs if a != b]
    links = abs(one.link_error_s - other.link_error_s)
    floor = constant("claim_floor") * min(one.cost.total_s, other.cost.total_s)
    sure = NormalDist().inv_cdf(constant("sure_enough"))
    return max(floor, sure * math.hypot(*errors, *other_errors, links))


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
