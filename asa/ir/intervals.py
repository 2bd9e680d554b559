"""Confidence intervals that hold exactly for small numbers of observations."""

from __future__ import annotations

import math
from collections.abc import Sequence

FEWEST = 6
"""Smallest number of observations for a 95 % interval: from six on, smallest and largest observation cover the median
with a probability of at least 1 - 2 / 2**6, 97 %."""


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The narrowest interval between observations, symmetric in their order, that covers the median with probability
    95 %.

    The interval is exact for independent observations of any distribution: the number of observations below the median
    is binomial with probability one half (David and Nagaraja, "Order Statistics", 7.1). Below :data:`FEWEST`
    observations, minimum and maximum are returned.

    >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    (1.0, 8.0)
    >>> median_interval([float(x) for x in range(1, 13)])
    (3.0, 10.0)
    """
    ordered, n = sorted(values), len(values)
    below, k = 0.0, 0
    while k < n // 2 and 2 * (below + math.comb(n, k) / 2**n) <= 0.05:
        below += math.comb(n, k) / 2**n
        k += 1
    return ordered[max(0, k - 1)], ordered[n - max(1, k)]
