"""From measured spread to what a synchronous step takes and to error bars."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cache
from statistics import NormalDist

from asa.cost.compute import deviation
from asa.ir.cluster import Cluster
from asa.ir.profile import Profile

Z90 = 1.6449
"""Half width of a two-sided 90 % interval, in standard deviations."""


@cache
def expected_maximum(ranks: int) -> float:
    """Expected maximum of ``ranks`` independent standard normals, by Blom's approximation of order statistics.

    Blom 1958: E ~ inverse normal of (n - 3/8) / (n + 1/4); within 3 % of the true value for n >= 2.

    >>> round(expected_maximum(8), 2)
    1.43
    """
    return 0.0 if ranks <= 1 else NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def relative_deviation(profile: Profile) -> float:
    """Standard deviation of one rank's step over its median: of whole steps, else of components in quadrature."""
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


def contention(cluster: Cluster, ranks: int, *, memory: bool = False) -> float:
    """Slowdown of computation while ``ranks`` ranks work at once; affine between measured counts, 1 for one rank.

    ``memory``: of work that only moves memory.
    """
    known = {1: 1.0, **{c.ranks: c.of_memory if memory else c.slowdown for c in cluster.contention}}
    counts = sorted(known)
    if ranks >= counts[-1]:
        return known[counts[-1]]
    at = bisect_left(counts, ranks)
    if counts[at] == ranks:
        return known[ranks]
    low, high = counts[at - 1], counts[at]
    return known[low] + (known[high] - known[low]) * (ranks - low) / (high - low)


def slowest_rank(profile: Profile, cluster: Cluster, ranks: int, *, memory: bool = False) -> float:
    """By what a synchronous step of ``ranks`` working ranks exceeds the time of one rank alone.

    Contention times the expected maximum of the ranks' spread: every collective waits for the slowest.
    """
    return contention(cluster, ranks, memory=memory) * (1 + relative_deviation(profile) * expected_maximum(ranks))
