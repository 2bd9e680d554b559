"""Curves of the optimal step time against memory, and against the number of devices.

Every point is a search of its own with a short time limit, and has its gap. A limit under which the previous plan still
fits is skipped: the fastest plan under a limit is the fastest under every lower limit that it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from asa.cost.machine.estimate import on_device
from asa.cost.memory.peak import libraries, needed
from asa.errors import InfeasibleError, UsageError
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.codec import noun
from asa.ir.plan import Assignment, Plan
from asa.ir.profile import Profile
from asa.planner import clock
from asa.planner.answer.infeasible import leanest
from asa.planner.budget import ROUNDING
from asa.planner.decide import plan
from asa.planner.space.candidate import Prices
from asa.planner.space.request import Request
from asa.planner.space.space import Space

POINTS = 8
BUDGET_S = 4.0
"""Seconds for all searches of one curve together, about. Each has an equal share of the rest, and at least 0.25 s."""

CIFAR_SAMPLES = 50_000
"""Training images of CIFAR-10 and CIFAR-100."""

_RUNS = 3
"""Most runs of neighbouring components that are named."""
_BOUNDLESS = 2**60


@noun
class MemoryPoint:
    """The fastest plan on devices of ``limit_bytes``, the smallest that it fits; its peak is ``memory_bytes_max``.

    ``fits``: whether the cluster's devices have that much. ``changed``: how it differs from the point with more memory.
    """

    limit_bytes: int
    fits: bool
    memory_bytes_max: int
    step_time_s: float
    gap: float
    num_ranks: int
    num_microbatches: int
    changed: str


@noun
class CostPoint:
    """The fastest plan on up to ``gpus`` devices, of which it uses ``num_ranks``; only those are paid for. It is the
    answer for up to ``up_to`` devices.

    Times and the cost are None where nothing fits (``why_not`` is the reason). ``on_frontier``: no other point is as
    fast and as cheap, and better in one of both.
    """

    gpus: int
    up_to: int
    num_ranks: int = 0
    step_time_s: float | None = None
    epoch_s: float | None = None
    epoch_cost: float | None = None
    gap: float = 0.0
    memory_bytes_max: int = 0
    on_frontier: bool = False
    why_not: str = ""


@noun
class Frontier:
    """Time against memory, loosest limit first, and time against cost, fewest devices first. A curve that was not asked
    for is empty."""

    memory: tuple[MemoryPoint, ...] = ()
    cost: tuple[CostPoint, ...] = ()


def against_memory(
    profile: Profile, cluster: Cluster, strategies: Strategies, request: Request, *, points: int = POINTS,
    answer: Plan | None = None,
) -> tuple[MemoryPoint, ...]:  # fmt: skip
    """Optima under up to ``points`` falling limits, from what the optimum without a limit needs to the least under
    which any plan fits. No plan is replaced by a simpler one, so less memory never gives a faster plan. ``answer``: the
    plan that was made for ``request`` with more time to search; it takes the place of a slower first point.

    Raises:
        InfeasibleError: nothing runs, whatever the memory.
    """
    limit_s = _limits(request, points)
    unlimited = replace(request, prefer_simple=False, top_k=1, memory_bytes=_BOUNDLESS, time_limit_s=limit_s(0))
    prices = Prices(Space(on_device(profile, cluster), cluster, strategies, unlimited))
    plans = [_faster(plan(profile, cluster, strategies, unlimited, known=prices)[0], answer)]
    tight = Prices(Space(prices.space.profile, cluster, strategies, replace(unlimited, memory_bytes=1)), prices)
    least = leanest(tight, tight.space.pinned)  # in no memory, so that optimizer state may be on the host
    top = _limit(plans[0], cluster)
    floor = top if least is None else needed(cluster.device, least.price.peak.total, least.candidate.ranks)
    for done, limit in enumerate(_falling(top, min(top, floor), points)[1:], 1):
        if limit >= _limit(plans[-1], cluster):
            continue
        tighter = replace(unlimited, memory_bytes=limit, time_limit_s=limit_s(done))
        try:
            plans.append(plan(profile, cluster, strategies, tighter, known=prices)[0])
        except InfeasibleError:
            break
    return _as_points(plans, cluster, request.memory_bytes)


def against_cost(
    profile: Profile, cluster: Cluster, strategies: Strategies, request: Request, *, price: float,
    epoch_samples: int = CIFAR_SAMPLES, answer: Plan | None = None,
) -> tuple[CostPoint, ...]:  # fmt: skip
    """The optimum on 1, 2, 3 ... 8, 16, 32 ... devices, at ``price`` for one device and hour, in any currency.

    The global batch is fixed, so an epoch of ``epoch_samples`` takes the same number of steps at every point. Where
    more devices give no faster plan, one point stands for all (``up_to``). ``answer`` as for :func:`against_memory`.
    """
    steps = math.ceil(epoch_samples / request.global_batch)
    points: list[CostPoint] = []
    sizes = counts(request.gpus)
    limit_s = _limits(request, len(sizes))
    prices = Prices(Space(on_device(profile, cluster), cluster, strategies, request))
    for done, gpus in enumerate(sizes):
        narrower = replace(request, gpus=gpus, top_k=1, time_limit_s=limit_s(done))
        try:
            best = plan(profile, cluster, strategies, narrower, known=prices)[0]
        except (InfeasibleError, UsageError) as error:  # some disciplines need a certain number of devices
            if points and points[-1].num_ranks:
                points[-1] = replace(points[-1], up_to=gpus)
            else:
                points.append(CostPoint(gpus=gpus, up_to=gpus, why_not=str(error)))
            continue
        best = _faster(best, answer) if gpus == request.gpus else best
        step = best.prediction.step_time_s
        previous_s = points[-1].step_time_s if points else None
        if previous_s is not None and step >= previous_s * (1 - ROUNDING):  # a plan for fewer devices runs on more, too
            bound_s = best.certificate.lower_bound_s
            gap = max(points[-1].gap, 1 - bound_s / previous_s if previous_s > 0 else 0.0)
            points[-1] = replace(points[-1], up_to=gpus, gap=gap)
            continue
        points.append(CostPoint(
            gpus=gpus, up_to=gpus, num_ranks=best.num_processes, step_time_s=step, epoch_s=steps * step,
            epoch_cost=best.num_processes * price * steps * step / 3600, gap=best.certificate.gap,
            memory_bytes_max=max(best.prediction.memory_bytes_per_rank),
        ))  # fmt: skip
    return tuple(replace(p, on_frontier=_undominated(p, points)) for p in points)


def _faster(plan: Plan, answer: Plan | None) -> Plan:
    """The faster of two plans for the same request."""
    if answer is None or answer.prediction.step_time_s >= plan.prediction.step_time_s:
        return plan
    return answer


def _limits(request: Request, points: int) -> Callable[[int], float]:
    """Seconds for the next search by the number of points that are done: an equal share of the rest of
    :data:`BUDGET_S` for each point to come."""
    ends = clock.now() + BUDGET_S
    return lambda done: min(request.time_limit_s, max(0.25, (ends - clock.now()) / max(1, points - done)))


def counts(gpus: int) -> tuple[int, ...]:
    """Numbers of devices that have a point: all up to 8, powers of two beyond, and ``gpus``.

    >>> counts(24)
    (1, 2, 3, 4, 5, 6, 7, 8, 16, 24)
    """
    doubled = {2**k for k in range(gpus.bit_length())}
    return tuple(sorted({*range(1, min(gpus, 8) + 1), *doubled, gpus}))


def changes(before: Plan, after: Plan) -> str:
    """The differences of ``after`` from ``before``, in a few words."""
    words = []
    for what, old, new in (
        ("ranks", before.num_processes, after.num_processes),
        ("stages", len(before.stages), len(after.stages)),
        ("microbatches", before.num_microbatches, after.num_microbatches),
        ("schedule", before.schedule, after.schedule),
    ):
        if old != new:
            words.append(f"{what} {old} -> {new}")
    changed: dict[str, list[int]] = {}
    for i, (a, b) in enumerate(zip(before.components, after.components, strict=True)):
        if (a.data, a.tensor, a.checkpoint, a.offload) != (b.data, b.tensor, b.checkpoint, b.offload):
            changed.setdefault(_way(b), []).append(i)
    names = [c.name for c in after.components]
    words += [f"{_runs(names, which)} to {way}" for way, which in sorted(changed.items(), key=lambda x: -len(x[1]))]
    if not words and before.starts() != after.starts():
        words.append("cuts moved")
    return ", ".join(words)


def _runs(names: Sequence[str], which: Sequence[int]) -> str:
    """The names at the indices ``which``. Of neighbours only the first and the last are shown, and only a few runs.

    >>> _runs(["stem", "a", "b", "c", "head"], [0, 2, 3, 4]), _runs(list("abcdefghi"), [0, 2, 4, 6, 8])
    ('stem, b .. head (3)', 'a, c, e and 2 more')
    """
    runs: list[list[int]] = []
    for i in which:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    shown = [names[r[0]] if len(r) == 1 else f"{names[r[0]]} .. {names[r[-1]]} ({len(r)})" for r in runs[:_RUNS]]
    unnamed = sum(map(len, runs[_RUNS:]))
    return ", ".join(shown) + (f" and {unnamed} more" if unnamed else "")


def _way(a: Assignment) -> str:
    words = [a.data.text] if a.data.degree > 1 else []
    words += [f"{a.tensor.strategy} x{a.tensor.degree}"] if a.tensor.degree > 1 else []
    return " and ".join(words or ["whole"]) + " checkpointed" * a.checkpoint + " offloaded" * a.offload


def _limit(plan: Plan, cluster: Cluster) -> int:
    """Bytes of memory of the smallest device that ``plan`` fits."""
    held = max(plan.prediction.memory_bytes_per_rank) - libraries(cluster.device)
    return needed(cluster.device, held, plan.num_processes)


def _falling(top: int, floor: int, points: int) -> list[int]:
    """``points`` limits from ``top`` to ``floor`` in equal ratios."""
    ratio = (floor / top) ** (1 / max(1, points - 1)) if floor < top else 1.0
    return [top, *(round(top * ratio**k) for k in range(1, points - 1)), floor]


def _as_points(plans: Sequence[Plan], cluster: Cluster, have: int | None) -> tuple[MemoryPoint, ...]:
    """The points, loosest limit first, without those that are not faster than the next one: their search ran out of
    time. ``have``: bytes of memory that devices were said to have; None: as many as those that a plan uses.

    A bound under one limit holds under every lower one, so the gap of a point uses the bounds of all looser points.
    """
    bounds = list(accumulate((p.certificate.lower_bound_s for p in plans), max))
    faster_plans: list[tuple[Plan, float]] = []
    for p, bound in zip(reversed(plans), reversed(bounds), strict=True):
        if not faster_plans or p.prediction.step_time_s < faster_plans[-1][0].prediction.step_time_s:
            faster_plans.append((p, bound))
    faster_plans.reverse()
    return tuple(
        MemoryPoint(
            limit_bytes=_limit(p, cluster),
            fits=_limit(p, cluster) <= (have or min(cluster.ordered(p.devices).memories()[: p.num_processes])),
            memory_bytes_max=max(p.prediction.memory_bytes_per_rank),
            step_time_s=p.prediction.step_time_s,
            gap=max(0.0, 1 - bound / p.prediction.step_time_s) if p.certificate.gap > 0 else 0.0,
            num_ranks=p.num_processes,
            num_microbatches=p.num_microbatches,
            changed=changes(faster_plans[i - 1][0], p) if i else "",
        )
        for i, (p, bound) in enumerate(faster_plans)
    )


def _undominated(point: CostPoint, others: Sequence[CostPoint]) -> bool:
    """Whether no other point is at least as fast and as cheap, and better in one of both."""
    if point.epoch_s is None or point.epoch_cost is None:
        return False
    own = (point.epoch_s, point.epoch_cost)
    rivals = [(x.epoch_s, x.epoch_cost) for x in others if x.epoch_s is not None and x.epoch_cost is not None]
    return not any(x != own and x[0] <= own[0] and x[1] <= own[1] for x in rivals)
