"""The time of a synchronous step, and error bars, from the spread that was measured."""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from asa.cost.constants import constant
from asa.cost.work.compute import deviation
from asa.ir.cluster import Cluster
from asa.ir.profile import Profile

Z90 = 1.6449
"""Half width of a two-sided 90 % interval, in standard deviations."""


@cache
def expected_maximum(ranks: float) -> float:
    """Expected maximum of ``ranks`` independent standard normals, by Blom's approximation of order statistics.

    Blom 1958: E ~ inverse normal of (n - 3/8) / (n + 1/4); within 3 % of the true value for n >= 2.

    >>> round(expected_maximum(8), 2)
    1.43
    """
    return 0.0 if ranks <= 1 else NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


_DEVIATIONS: dict[int, tuple[weakref.ref[Profile], float]] = {}
"""By the identity of a profile: a long one has tens of thousands of timings, and is asked about for every width."""


def relative_deviation(profile: Profile) -> float:
    """Standard deviation of one rank's step, relative to its median: of whole steps, else of components in quadrature.

    Where the machine's speed varied more over the time of the profile, that is taken: steps within a second or two of
    each other do not see all of it. Cores drift independently, and those of a virtual machine always do.
    """
    known = _DEVIATIONS.get(id(profile))
    if known is None or known[0]() is not profile:
        drifted = profile.drift.deviation if profile.drift is not None else 0.0
        drifted = max(drifted, constant("drift_floor_virtual")) if profile.device.virtual else drifted
        known = _DEVIATIONS[id(profile)] = (weakref.ref(profile), max(drifted, _relative_deviation(profile)))
    return known[1]


def _relative_deviation(profile: Profile) -> float:
    whole = [deviation(w.whole) / w.whole.median for w in profile.whole if w.whole.median > 0 and w.whole.n >= 3]
    if whole:
        return sorted(whole)[len(whole) // 2]
    largest: dict[str, tuple[int, float, float]] = {}
    for t in profile.timings:
        if t.tensor_degree == 1 and t.microbatch >= largest.get(t.component, (0, 0.0, 0.0))[0]:
            time = t.forward.median + t.backward.median
            largest[t.component] = (t.microbatch, time, math.hypot(deviation(t.forward), deviation(t.backward)))
    total = sum(time for _, time, _ in largest.values())
    return math.sqrt(sum(d * d for _, _, d in largest.values())) / total if total > 0 else 0.0


def drift(measured: Profile | Cluster) -> float:
    """Standard deviation of the logarithm of the machine's speed, from when it was ``measured`` to when it is used.

    It is what the reference showed during the measurement, and somewhat more, since hours show more than minutes; never
    less than the floor for that kind of device. Where no reference was read it is assumed; an estimated profile has
    none, since its own error is larger.
    """
    if isinstance(measured, Profile) and not measured.provenance.trusted:
        return 0.0
    if measured.drift is None:
        # How far links measured hours apart differ is the error of their tables.
        return constant("drift_assumed") if isinstance(measured, Profile) else 0.0
    return max(constant(f"drift_floor_{measured.device.type}"), constant("drift_growth") * measured.drift.ahead)


def contention(cluster: Cluster, ranks: float, *, memory: bool = False) -> float:
    """The slowdown of computation while ``ranks`` ranks work at once; affine between measured counts, 1 for one rank.

    ``memory``: of work that only moves memory.
    """
    known: dict[float, float] = {1: 1.0, **{c.ranks: c.of_memory if memory else c.slowdown for c in cluster.contention}}
    counts = sorted(known)
    if ranks >= counts[-1]:
        return known[counts[-1]]
    at = bisect_left(counts, ranks)
    if counts[at] == ranks:
        return known[ranks]
    low, high = counts[at - 1], counts[at]
    return known[low] + (known[high] - known[low]) * (ranks - low) / (high - low)


def waiting(cluster: Cluster, ranks: int, stretch_s: Any) -> Any:
    """The factor by which stretches of ``stretch_s`` seconds (a number or an array) grow when ``ranks`` ranks meet at
    their end, compared with stretches as long as those measured (whole steps include that, see :func:`slowest_rank`).
    Log-linear between points; 1 where not measured."""
    known = {w.ranks: w.points for w in cluster.waiting or ()}
    if ranks < 2 or not known:
        return 1.0
    points = known[min(known, key=lambda n: (abs(n - ranks), -n))]
    with np.errstate(divide="ignore"):
        factor = np.interp(np.log(stretch_s), [math.log(s) for s, _ in points], [f for _, f in points])
    found = np.where(np.greater(stretch_s, 0), np.maximum(1.0, factor / points[-1][1]), 1.0)
    return found if found.ndim else float(found)


def working(width: int, ranks: int, num_microbatches: int) -> float:
    """How many of ``ranks`` work at once, seen from a stage of ``width``: of a step's microbatches each stage has one
    to itself, while the others are not yet, or no longer, at work."""
    return width + (ranks - width) * (num_microbatches - 1) / num_microbatches


def slowest_rank(profile: Profile, cluster: Cluster, ranks: float, *, memory: bool = False) -> float:
    """By what a synchronous step of ``ranks`` working ranks exceeds the time of one rank alone.

    Contention times the expected maximum of the ranks' spread: every collective waits for the slowest.
    """
    return contention(cluster, ranks, memory=memory) * (1 + relative_deviation(profile) * expected_maximum(ranks))
