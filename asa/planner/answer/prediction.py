"""The prediction that goes into a plan, made of a price, with its error bar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from asa.cost.constants import constant
from asa.cost.planned import Price
from asa.cost.work.spread import Z90, drift
from asa.ir.cluster import Cluster
from asa.ir.plan import Prediction
from asa.ir.profile import Profile


def deviation(price: Price, profile: Profile, cluster: Cluster) -> float:
    """Standard deviation of the step time around its prediction, in seconds.

    It combines in quadrature: the standard errors of the measured times; the model's usual error on compute and on a
    stage's waiting for another's (far larger for estimated profiles); the error of the links on what they leave
    exposed; and by how much the machine will be faster or slower than when it was measured, as much as the more
    restless of the two measurements saw. The last is the same for the whole step and for every other plan, so it does
    not decide which is fastest.
    """
    model = constant("step_error" if profile.provenance.trusted else "estimate_error")
    moved = price.cost.exposed_s + price.cost.hidden_s
    exposed = price.cost.exposed_s / moved if moved > 0 else 0.0
    worked = max(0.0, price.cost.total_s - price.cost.exposed_s)
    seen = drift(profile), drift(cluster)
    common = (max(seen) if seen[0] else 0.0) * worked + seen[1] * price.cost.exposed_s
    return math.hypot(price.compute_error_s, model * worked, exposed * price.link_error_s, common)


def predict(
    price: Price, profile: Profile, cluster: Cluster, *, widths: Sequence[int], global_batch: int
) -> Prediction:
    """The prediction of one step with stages of ``widths`` ranks. Ranks with equal shares of a batch all hold what the
    busiest one does.

    The interval is that of a factor (log-normal, as in :mod:`asa.planner.answer.confidence`): a machine in another
    state than when it was profiled is slower or faster by a factor, and more often slower.
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
        memory_bytes_per_rank=tuple(
            math.ceil(stage.held(place) + _libraries(cluster))
            for stage, width in zip(price.stages, widths, strict=True)
            for place in range(width)
        ),
        samples_per_s=global_batch / total if total > 0 else 0.0,
    )


def _libraries(cluster: Cluster) -> float:
    """Bytes that the allocator counts beside the training's own, on every rank: part of the context left room for."""
    return constant("cuda_workspace_bytes") if cluster.device.type == "cuda" else 0.0


def memory_max(price: Price, cluster: Cluster) -> int:
    """Bytes of active memory of the rank that holds most."""
    return math.ceil(max(s.most for s in price.stages) + _libraries(cluster))


def noise(one: Price, other: Price) -> float:
    """Seconds by which two predicted step times must differ for the shorter one to be shorter with the probability
    ``sure_enough``.

    Errors of what both plans do alike cancel, so only components that differ count: their standard errors, and the
    error of the links on the difference in communication. It is never less than the share of a step by which stock data
    parallelism differs from itself.
    """
    pairs = list(zip(one.components, other.components, strict=True))
    mine, theirs = [a.error_s for a, b in pairs if a != b], [b.error_s for a, b in pairs if a != b]
    links = abs(one.link_error_s - other.link_error_s)
    floor = constant("claim_floor") * min(one.cost.total_s, other.cost.total_s)
    sure = NormalDist().inv_cdf(constant("sure_enough"))
    return max(floor, sure * math.hypot(*mine, *theirs, links))
