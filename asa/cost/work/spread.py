"""Factors from the time of one rank to that of a synchronous step of many ranks, and error bars."""

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
"""Cache by the identity of the profile: it may have tens of thousands of timings, and every stage width needs this."""


def relative_deviation(profile: Profile) -> float:
    """Standard deviation of one rank's step time, relative to the median: of measured whole steps, else of components,
    added in quadrature.

    It is at least the drift of the machine's speed during the profile, which steps a second apart do not show: cores
    drift independently. On a virtual machine a minimum is assumed for the drift.
    """
    cached = _DEVIATIONS.get(id(profile))
    if cached is None or cached[0]() is not profile:
        drifted = profile.drift.deviation if profile.drift is not None else 0.0
        drifted = max(drifted, constant("drift_floor_virtual")) if profile.device.virtual else drifted
        cached = _DEVIATIONS[id(profile)] = (weakref.ref(profile), max(drifted, _relative_deviation(profile)))
    return cached[1]


def _relative_deviation(profile: Profile) -> float:
    whole_steps = [deviation(w.whole) / w.whole.median for w in profile.whole if w.whole.median > 0 and w.whole.n >= 3]
    if whole_steps:
        return sorted(whole_steps)[len(whole_steps) // 2]
    largest: dict[str, tuple[int, float, float]] = {}
    for t in profile.timings:
        if t.tensor_degree == 1 and t.microbatch >= largest.get(t.component, (0, 0.0, 0.0))[0]:
            time = t.forward.median + t.backward.median
            largest[t.component] = (t.microbatch, time, math.hypot(deviation(t.forward), deviation(t.backward)))
    total = sum(time for _, time, _ in largest.values())
    return math.sqrt(sum(d * d for _, _, d in largest.values())) / total if total > 0 else 0.0


def drift(measured: Profile | Cluster) -> float:
    """Standard deviation of the change of the machine's speed (its logarithm) between measurement and use.

    It is the drift of the reference computation during the measurement, times a factor because hours show more drift
    than minutes, and at least a minimum for this type of device. Without a reference a value is assumed for a profile.
    It is 0 for an estimated profile, whose own error is larger.
    """
    if isinstance(measured, Profile) and not measured.provenance.trusted:
        return 0.0
    if measured.drift is None:
        # The error of a cluster's tables already contains the differences between measurements hours apart.
        return constant("drift_assumed") if isinstance(measured, Profile) else 0.0
    return max(constant(f"drift_floor_{measured.device.type}"), constant("drift_growth") * measured.drift.ahead)


def contention(cluster: Cluster, ranks: float, *, memory: bool = False) -> float:
    """The factor on compute time while ``ranks`` ranks work at once; affine between measured counts, 1 for one rank.

    ``memory``: the factor for work that only moves memory.
    """
    table: dict[float, float] = {1: 1.0, **{c.ranks: c.of_memory if memory else c.slowdown for c in cluster.contention}}
    counts = sorted(table)
    if ranks >= counts[-1]:
        return table[counts[-1]]
    at = bisect_left(counts, ranks)
    if counts[at] == ranks:
        return table[ranks]
    low, high = counts[at - 1], counts[at]
    return table[low] + (table[high] - table[low]) * (ranks - low) / (high - low)


def waiting(cluster: Cluster, ranks: int, stretch_s: Any) -> Any:
    """The factor on ``stretch_s`` seconds of compute (a number or an array) if ``ranks`` ranks synchronise at their
    end, relative to the longest measured stretch (:func:`slowest_rank` already includes waiting once per step).
    Interpolated linearly in log seconds; 1 if not measured."""
    points_of = {w.ranks: w.points for w in cluster.waiting or ()}
    if ranks < 2 or not points_of:
        return 1.0
    points = points_of[min(points_of, key=lambda n: (abs(n - ranks), -n))]
    with np.errstate(divide="ignore"):
        factor = np.interp(np.log(stretch_s), [math.log(s) for s, _ in points], [f for _, f in points])
    factors = np.where(np.greater(stretch_s, 0), np.maximum(1.0, factor / points[-1][1]), 1.0)
    return factors if factors.ndim else float(factors)


def working(width: int, ranks: int, num_microbatches: int) -> float:
    """The mean number of ``ranks`` that work at the same time as a stage of ``width`` ranks: for one microbatch of a
    step the stage works alone, because the others have not begun or have finished."""
    return width + (ranks - width) * (num_microbatches - 1) / num_microbatches


def slowest_rank(profile: Profile, cluster: Cluster, ranks: float, *, memory: bool = False) -> float:
    """The factor from the step time of one rank alone to that of a synchronous step of ``ranks`` ranks.

    It is contention times the expected maximum of the ranks' spread, as every collective waits for the slowest rank.
    """
    return contention(cluster, ranks, memory=memory) * (1 + relative_deviation(profile) * expected_maximum(ranks))
