"""Whole strategies on fewer devices than there are: answers of widths that a search comes to late.

What has the lowest bound is searched first, and computation alone bounds wide stages lowest. Over slow links, or where
the last devices are slow, a narrow stage is faster all the same; one that runs all components alike is priced at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from asa.planner import clock
from asa.planner.space import baselines
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import Allowed, Space, widths

_EACH = 8
"""Devices up to which every width is tried; beyond, powers of two and what lies inside a node."""


def by_width(prices: Prices, allowed: Allowed, ends: float) -> list[Candidate]:
    """The fastest uniform single stage in one microbatch of each of a few widths, fastest first.

    Of those that fit and are ``allowed``, as many as are priced by the time ``ends``.
    """
    best: dict[int, tuple[float, Candidate]] = {}
    for width, candidate in _uniform(prices):
        if clock.now() > ends:
            break
        if not all(allowed(i, way) for i, way in enumerate(candidate.ways)):
            continue
        price = prices.of(candidate)
        if prices.fits(candidate):
            known = best.get(width)
            if known is None or price.cost.total_s < known[0]:
                best[width] = price.cost.total_s, candidate
    return [candidate for _, candidate in sorted(best.values(), key=lambda x: x[0])]


def _uniform(prices: Prices) -> Iterator[tuple[int, Candidate]]:
    """Replicas of every width first, then what splits components, too."""
    some = _widths(prices.space)
    names = [(w, f"hybrid:d{w}") for w in some]
    names += [(w, f"hybrid:d{w // t}t{t}") for w in some for t in range(2, w + 1) if w % t == 0]
    for width, name in names:
        try:
            yield width, baselines.uniform(name, prices, prices.space.microbatches()[0])
        except baselines.Unavailable:
            continue


def _widths(space: Space) -> list[int]:
    """Widths worth a look: the devices in front that are as fast as the first one, a node, all, powers of two, few."""
    gpus, cluster = space.request.gpus, space.cluster
    speeds = [cluster.speed(r) for r in range(gpus)]
    alike = next((r for r, s in enumerate(speeds) if s != speeds[0]), gpus)
    powers = (2**k for k in range(gpus.bit_length() - 1, 0, -1))
    some = dict.fromkeys((alike, cluster.node, gpus, *powers, *(w for w in widths(gpus) if w <= _EACH)))
    return [w for w in some if 1 < w <= gpus]
