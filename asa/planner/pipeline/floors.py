"""Lower bounds on plans of several stages from computation alone, and the host's work for messages on asynchronous
devices. They are quick for any number of ranks.

For one number of microbatches: every rank always busy; one microbatch through all components; and the slowest stage,
which has all microbatches to do, at the cuts and widths that make it fastest. Then both at once: before a stage begins
the first microbatch has to reach it, and afterwards the last gradient has to go back, so a step takes at least what all
microbatches take in a stage plus what one takes in all stages in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asa.planner import clock
from asa.planner.budget import ROUNDING
from asa.planner.pipeline.lattice import INF
from asa.planner.pipeline.pipelines import Pipelines

_NEVER = 1e18
_LEAST_S = 1.0
_STEPS = 12
PACED = 6
"""Halvings of what is left between a bound and the best plan."""
_NEAR = 0.5
"""Share of the best plan: a bound further below it is not raised here, where closer bounds follow anyway."""
_MOST_RANKS, _NODE = 128, 8
"""Beyond so many ranks they are counted in nodes of eight, and narrower stages as none at all."""
_MOST_ENTRIES = 4e8
"""Most entries of all tables of one halving (seconds of work); beyond, none is made."""


def floors(
    pipelines: Pipelines, best: float = INF, ends: float = INF, *, halvings: int = PACED,
    counts: Sequence[int] | None = None,
) -> dict[int, float]:  # fmt: skip
    """A bound in ms on every plan of several stages, for each number of microbatches (of ``counts``, all where None);
    ``best`` where it is no less.

    ``halvings``: how often what is left between a bound and ``best`` is halved, where the bound does not reach ``best``
    at once; 1 for none, where closer bounds follow. The time ``ends`` (a second from now at least) limits only these
    halvings, which take longest: without the others nothing is proved.
    """
    ends = max(ends, clock.now() + _LEAST_S)
    found = dict.fromkeys(pipelines.microbatches() if counts is None else counts, 0.0)
    gpus = pipelines.gpus
    for m in found:
        rows = {w: row for w in pipelines.widths() if w < gpus and (row := pipelines.compute(w, m)) is not None}
        if not rows:
            found[m] = best
            continue
        own = np.minimum(np.array(list(rows.values()), dtype=float), _NEVER)
        widths = np.array(list(rows), dtype=np.int64)
        area = m * float((own * widths[:, None]).min(axis=0).sum()) / gpus
        low = max(area, float(own.min(axis=0).sum()))
        if low >= min(best, _NEVER / 2):
            found[m] = best
            continue
        found[m] = max(low, m * _slowest(own, widths, gpus, low / m, best / m))
        if found[m] < best < INF and (halvings > 1 or found[m] > _NEAR * best):
            met = [pipelines.ends(w, m) for w in rows]
            joints = np.zeros((2, *own.shape)) if None in met else np.array(met, dtype=float).swapaxes(0, 1)
            found[m] = max(found[m], _paced(own, joints, widths, gpus, m, found[m], best, ends, halvings))
    return found


def _paced(
    own: Any, joints: Any, widths: Any, gpus: int, m: int, low: float, high: float, ends: float, halvings: int
) -> float:  # fmt: skip
    """A bound between ``low`` and ``high`` ms on the slowest stage with what is in front of it. ``joints``: ms of
    beginning, and of ending, a stage with each component, by width."""
    unit = 1 if gpus <= _MOST_RANKS else _NODE
    n, slots = own.shape[1], gpus // unit
    counts = sorted(set((widths // unit).tolist()))
    if high == INF or len(counts) * n * n * (slots + 1) > _MOST_ENTRIES:
        return low
    sums = np.concatenate([np.zeros((len(widths), 1)), np.cumsum(own, axis=1)], axis=1)
    slots_of = widths // unit
    least = {k: (sums[slots_of == k], *joints[:, slots_of == k]) for k in counts}
    for step in range(halvings):
        middle = high if step == 0 else (low + high) / 2
        if clock.now() > ends:
            break
        if _reachable(least, slots, m, middle * (1 + ROUNDING)):
            if step == 0:
                continue
            high = middle
        elif step == 0:
            return high
        else:
            low = middle
    return low


def _reachable(least: dict[int, tuple[Any, Any, Any]], slots: int, m: int, most: float) -> bool:
    """Whether stages fit of which each, counted so, takes no more than ``most`` ms. ``least``: for widths that count as
    so many slots, running sums of ms over components, and ms of beginning and of ending with each."""
    n = next(iter(least.values()))[0].shape[1] - 1
    front = np.full((n + 1, slots + 1), INF)
    """By cut and slots used in front of it, the least ms of a microbatch's way there and back."""
    front[0] = 0.0
    for stop in range(1, n + 1):
        for k, (sums, begin, end) in least.items():
            inside = sums[:, stop, None] - sums[:, :stop]
            first = int(np.searchsorted(-inside.min(axis=0), -most / m))  # further in front a stage alone is too slow
            if first == stop or k > slots:
                continue
            own = (inside + begin[:, :stop] + end[:, stop - 1, None]).min(axis=0)
            before, own = front[first:stop, : slots + 1 - k], own[first:, None]
            found = np.where(before + m * own <= most, before + own, INF).min(axis=0)
            np.minimum(front[stop, k:], found, out=front[stop, k:])
        np.minimum.accumulate(front[stop], out=front[stop])
    return bool(np.isfinite(front[n, slots]))


def _slowest(own: Any, widths: Any, gpus: int, low: float, high: float) -> float:
    """A bound on the slowest stage between ``low`` and ``high`` ms; ``own``: ms by width and component."""
    sums = np.concatenate([np.zeros((len(widths), 1)), np.cumsum(own, axis=1)], axis=1)
    if high < INF and not _possible(sums, widths, gpus, high):
        return high
    high = min(high, float(sums[:, -1].min()))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _possible(sums, widths, gpus, middle):
            high = middle
        else:
            low = middle
    return low


def _possible(sums: Any, widths: Any, gpus: int, most: float) -> bool:
    """Whether stages of at most ``most`` ms need no more than the ranks there are."""
    n = sums.shape[1] - 1
    reach = np.array([np.searchsorted(row, row[:-1] + most * (1 + 1e-12), side="right") - 1 for row in sums])
    fewest = np.full(n + 1, 1 << 40)
    fewest[n] = 0
    for i in range(n - 1, -1, -1):
        stop = reach[:, i]
        fewest[i] = np.where(stop > i, widths + fewest[stop], 1 << 40).min()
    return bool(fewest[0] <= gpus)
