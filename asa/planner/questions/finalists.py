"""Chooses the plans to measure against each other: those whose fastest is expected to take least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asa.cost.machine.estimate import on_device
from asa.errors import InfeasibleError
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.planner.answer.confidence import joint_times
from asa.planner.answer.posterior import prior, sample
from asa.planner.decide import plan
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.request import Request
from asa.planner.space.space import Space

STOCK = "ddp"
"""The strategy that the chosen plan must not be slower than."""


def finalists(
    profile: Profile, cluster: Cluster, strategies: Strategies, request: Request, count: int
) -> tuple[list[Plan], np.ndarray, int | None]:
    """Up to ``count`` plans that run differently, their seconds of a step under joint draws, of shape (plans, draws),
    and the index of plain data parallelism (None where it is not among them).

    The planner's answer comes first, then plain data parallelism and the best of the other whole strategies, where they
    fit. Each further plan is the one that most lowers the expected time of the fastest. Whole strategies that were not
    asked for (``request.strategies``) are left out.

    Raises:
        UsageError, InfeasibleError, UnavailableError: as for :func:`asa.planner.decide.plan`.
    """
    plans = plan(profile, cluster, strategies, replace(request, top_k=max(count, request.top_k)))
    if request.strategies is None or "asa" in request.strategies:
        names = tuple(b.name for b in plans[0].baselines if b.fits and b.name != "hybrid")
        plans += _whole(profile, cluster, strategies, replace(request, strategies=names, top_k=len(names) or 1))
    first: dict[object, Plan] = {}
    for p in plans:
        first.setdefault(p.conduct, p)
    pool = list(first.values())
    draws = joint(pool, profile, cluster, strategies, request.memory_bytes)
    stock = next((p.conduct for p in plans if p.strategy == STOCK), None)
    must = [0]
    must += [i for i, p in enumerate(pool) if p.conduct == stock and i not in must]
    others = [i for i, p in enumerate(pool) if i not in must and p.strategy not in ("asa", "search")]
    must += sorted(others, key=lambda i: pool[i].prediction.step_time_s)[:1]
    chosen = shortlist(draws, must[:count], count)
    chosen_plans = [replace(pool[i], strategy=STOCK) if pool[i].conduct == stock and i else pool[i] for i in chosen]
    at = next((n for n, i in enumerate(chosen) if pool[i].conduct == stock), None)
    return chosen_plans, draws[chosen], at


def _whole(profile: Profile, cluster: Cluster, strategies: Strategies, request: Request) -> list[Plan]:
    try:
        return plan(profile, cluster, strategies, request) if request.strategies else []
    except InfeasibleError:  # pins that no whole strategy satisfies
        return []


def joint(
    plans: Sequence[Plan], profile: Profile, cluster: Cluster, strategies: Strategies, memory_bytes: int | None = None
) -> np.ndarray:
    """Seconds of a step under joint draws of the errors of costs, of shape (plans, draws).

    Raises:
        InvalidInputError: a plan and the profile do not belong together.
    """
    first = plans[0]
    request = Request(
        gpus=first.gpus, global_batch=first.global_batch, optimizer=first.optimizer, memory_bytes=memory_bytes,
        compression=first.compression,
    )  # fmt: skip
    used = on_device(profile, cluster)
    prices = Prices(Space(used, cluster.ordered(first.devices), strategies, request))
    candidates = [Candidate.of(p, used, strategies) for p in plans]
    return joint_times([(c, prices.of(c)) for c in candidates], used, strategies, cluster.overlap)


def shortlist(draws: np.ndarray, must: Sequence[int], count: int) -> list[int]:
    """Indices of up to ``count`` rows of ``draws``: ``must``, then one by one what lowers the expected minimum most.

    A row that is similar to a chosen one adds little, however fast it is.
    """
    chosen, times = list(must), np.exp(sample(*prior(draws), 2048)).T
    while len(chosen) < min(count, len(times)):
        fastest = times[chosen].min(axis=0)
        remaining = [i for i in range(len(times)) if i not in chosen]
        chosen.append(min(remaining, key=lambda i: float(np.minimum(fastest, times[i]).mean())))
    return chosen
