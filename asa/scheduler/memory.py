"""Corrects the memory model after a run needed more memory than predicted, or has less, and plans again.

A rank needs state, which is known exactly, and saved and transient memory, measured component by component. The
correction is one factor on the latter: the smallest for which the prediction for the plan reaches the observed need. If
allocations failed below the limit (fragmentation, other processes), the memory that was reached is the new limit.
Every correction after a shortage allows less than the plan that failed, so that it cannot be chosen again.
"""

from __future__ import annotations

from dataclasses import replace

from asa.cost.machine.estimate import on_device
from asa.cost.machine.what_if import heavier_profile
from asa.cost.memory.peak import libraries, needed, usable, within
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.codec import noun
from asa.ir.measurements import Measurements
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.shortage import Shortage
from asa.planner import Request, verify
from asa.planner import plan as solve

MOST_SCALE = 16.0
"""Largest correction factor; a larger error has other causes than the memory model."""
_LESS = (0.95, 0.85, 0.65)
"""Largest predicted memory of a rank at the first, second and later attempts, as a fraction of the corrected prediction
for the failed plan."""


@noun
class Correction:
    """Correction of the memory model. ``scale``: factor on saved and transient bytes; ``memory_bytes``: memory of a
    device to plan with, None for its own."""

    scale: float
    memory_bytes: int | None


def scale_of(
    plan: Plan, rank: int, needed_bytes: int, profile: Profile, cluster: Cluster, strategies: Strategies
) -> float:
    """The smallest factor, from ``plan.memory_scale`` up to :data:`MOST_SCALE`, for which the prediction for ``plan``
    reaches ``needed_bytes`` on ``rank``."""
    low, high = plan.memory_scale, MOST_SCALE
    if needed_bytes <= plan.prediction.memory_bytes_per_rank[rank] or low >= high:
        return low
    for _ in range(20):
        middle = (low + high) / 2
        predicted = verify(plan, heavier_profile(profile, middle), cluster, strategies).memory_bytes_per_rank[rank]
        low, high = (low, middle) if predicted >= needed_bytes else (middle, high)
    return high


def corrected(
    shortage: Shortage, attempt: int, profile: Profile, cluster: Cluster, strategies: Strategies
) -> Correction:
    """The correction that follows from a shortage. ``attempt`` counts from 1.

    Raises:
        InvalidInputError: the plan is of another model than the profile.
    """
    plan, rank, needs = shortage.plan, shortage.plan_rank, _needed(shortage, cluster)
    profile = on_device(profile, cluster)
    scale = plan.memory_scale if needs is None else scale_of(plan, rank, needs, profile, cluster, strategies)
    promised = verify(plan, heavier_profile(profile, scale), cluster, strategies).memory_bytes_per_rank
    bounds = [_LESS[min(attempt, len(_LESS)) - 1] * promised[rank]]
    if needs is not None and shortage.cause == "exhausted":
        bounds.append(needs)
    if shortage.room_bytes is not None:
        bounds.append(within(cluster.device, shortage.room_bytes))
    device = min(cluster.memories()) if plan.memory_bytes is None else plan.memory_bytes
    limit = min(min(bounds) - libraries(cluster.device), usable(cluster.device, device, plan.num_ranks))
    return Correction(scale=scale, memory_bytes=max(1, min(device, needed(cluster.device, limit, plan.num_ranks))))


def among(ranks: int, correction: Correction, shortage: Shortage, attempt: int) -> Correction | None:
    """``correction`` for ``ranks`` ranks, fewer than before, after the memory of their host ran out; None after another
    shortage.

    The free memory of the host is divided evenly among the processes. Each process also needs memory outside the
    model: its even part minus the prediction. With fewer processes, each has more by the growth of the even part.
    """
    free, plan = shortage.free_bytes, shortage.plan
    if free is None or shortage.cause != "killed" or correction.memory_bytes is None:
        return None
    promised, less = max(plan.prediction.memory_bytes_per_rank), _LESS[min(attempt, len(_LESS)) - 1]
    base = max(0.0, free / plan.num_ranks - promised)
    return replace(correction, memory_bytes=max(1, int(less * (free / ranks - base))))


def _needed(shortage: Shortage, cluster: Cluster) -> int | None:
    """Bytes that the rank needs at least, counted like the prediction: a host reports the allocated bytes of a
    process, which include freed blocks. None if unknown."""
    used = shortage.used_bytes
    if used is None:
        return None
    return shortage.asked_bytes + int(within(cluster.device, used) if cluster.device.type == "cpu" else used)


def observed(
    plan: Plan, measured: Measurements, profile: Profile, cluster: Cluster, strategies: Strategies
) -> Correction:
    """The correction that follows from an epoch's memory peaks: only the factor, since the memory was enough."""
    scale = plan.memory_scale
    profile = on_device(profile, cluster)
    for rank, used in enumerate(measured.peak_memory_bytes or ()):
        scale = max(scale, scale_of(plan, rank, used, profile, cluster, strategies))
    return Correction(scale=scale, memory_bytes=plan.memory_bytes)


def plan_again(
    plan: Plan,
    correction: Correction,
    gpus: int,
    profile: Profile,
    cluster: Cluster,
    strategies: Strategies,
    *,
    time_limit_s: float = 10.0,
) -> Plan:
    """The best plan for at most ``gpus`` ranks under the corrected memory model, after ``time_limit_s`` seconds of
    search.

    Raises:
        InfeasibleError: nothing fits; names the limiting quantity.
    """
    request = Request(
        gpus=gpus,
        global_batch=plan.global_batch,
        optimizer=plan.optimizer,
        compression=plan.compression,
        memory_bytes=correction.memory_bytes,
        time_limit_s=time_limit_s,
    )
    new_plan = solve(heavier_profile(on_device(profile, cluster), correction.scale), cluster, strategies, request)[0]
    # The new plan records the original profile and the correction.
    return replace(new_plan, profile_fingerprint=plan.profile_fingerprint, memory_scale=correction.scale)
