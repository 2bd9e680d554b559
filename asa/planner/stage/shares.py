"""Lower bound on a single stage of unequal devices, however its batch is divided among them.

Weights of ranks are whole numbers, and there are too many to search them one by one. This bound holds for all of them.
In every component the devices of each speed have some number of samples, which add up to the batch, and the slowest
device determines the time. The least of that over all divisions is computed component by component, as if each had its
own division. Synchronisation that cannot be hidden, the update, and traffic of even shards between layouts are added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asa.cost.pricing import Pricer
from asa.ir.layout import Layout
from asa.planner import clock
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Allowed, layouts
from asa.planner.stage.problem import MS

INF = float("inf")
_POINTS = 192
"""Largest number of sample counts that are tried; between two of them the smaller one counts."""
_HALVINGS = 26


def free_bound(prices: Prices, allowed: Allowed, ends: float = INF) -> float:
    """Lower bound in ms on every plan of one stage with devices of several speeds, whatever its weights. Infinite if no
    stage has such devices, or if batches are divided evenly. After the time ``ends`` it is one of compute alone."""
    space, bound_s = prices.space, INF
    if not space.cluster.unequal or not space.request.uneven:
        return INF
    some = [w for w in space.single_widths() if len(set(space.cluster.speeds(range(w)) or (1.0,))) > 1]
    stages = [(w, m, _compute(prices, w, m)) for w in some for m in space.microbatches()]
    least_s = [float(compute_s.min(axis=0).sum()) for _, _, compute_s in stages]
    for k in np.argsort(least_s, kind="stable").tolist():
        if least_s[k] >= bound_s:
            break
        bound_s = min(bound_s, least_s[k] if clock.now() > ends else _bound(prices, allowed, *stages[k]))
    return bound_s * MS


def _compute(prices: Prices, width: int, m: int) -> Any:
    """The least seconds of compute of a step with ``m`` microbatches, for each layout and component."""
    samples, speeds = prices.space.request.global_batch // m, prices.space.cluster.speeds(range(width))
    some = layouts(width)
    compute_s = np.full((len(some), len(prices.fewest)), INF)
    for k, layout in enumerate(some):
        if layout.data <= samples:
            shards = Counter(min(speeds[i : i + layout.inner]) for i in range(0, width, layout.inner))
            compute_s[k] = _longest(prices, layout.tensor, samples, shards)
    return m * compute_s * prices.pricer(width, m).slow


def _bound(prices: Prices, allowed: Allowed, width: int, m: int, compute_s: Any) -> float:
    """Lower bound in seconds on stages of that width: compute, what is paid once, and traffic between layouts."""
    space, some, pricer = prices.space, layouts(width), prices.pricer(width, m)
    step_s = compute_s + _least_once(prices, pricer, allowed, some)
    if space.by_tokens:
        return float(step_s.min(axis=0).sum())
    # Uneven shards send more between layouts, because the largest has more than an even one.
    front = step_s[:, 0]
    for i in range(1, len(prices.fewest)):
        size, ends = pricer.states.forms[i]
        between = pricer.states.between(ends, some, some)
        x = between.priced(pricer.edges.links, [pricer.microbatch * size], pricer.edges.keeping.part)
        front = (front[:, None] + m * (x.forward + x.backward).reshape(len(some), -1)).min(axis=0) + step_s[:, i]
    return float(front.min())


def _longest(prices: Prices, tensor: int, samples: int, shards: Counter[float]) -> Any:
    """The least seconds, for each component, of the slowest shard in forward and backward of ``samples`` samples."""
    grid = np.unique(np.geomspace(1, max(1, samples), _POINTS).astype(np.int64))
    seconds = np.stack([prices.compute_on(int(n), tensor) for n in grid])
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]  # of these samples, or of any larger number
    beyond = np.r_[grid[1:] - 1, samples]
    low, high = seconds[0] / min(shards), seconds[-1] / min(shards)  # each shard has at least one sample
    can = np.isfinite(high)
    low, high = np.where(can, low, 0.0), np.where(can, high, 0.0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        covered = np.zeros(seconds.shape[1])
        for speed, count in shards.items():
            reached = (seconds <= middle * speed).sum(axis=0)
            covered += count * np.where(reached > 0, beyond[np.maximum(0, reached - 1)], 0)
        enough = covered >= samples
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(can, low, INF)


def _least_once(prices: Prices, pricer: Pricer, allowed: Allowed, some: Sequence[Layout]) -> Any:
    """The least seconds per step that no backward hides, for each component, by layout."""
    overlap, menu = prices.space.cluster.overlap, prices.menu(pricer, allowed)
    which = np.arange(len(menu.component))
    x = menu.priced(pricer, which)
    hidden = overlap.communication_slowdown * overlap.saving
    least = np.full((len(some), len(prices.space.profile.graph)), INF)
    number_of = np.array([some.index(replace(y, weights=(), sequence=False)) for y in menu.layouts])
    at = (number_of[menu.layout[which]], menu.component[which])
    np.minimum.at(least, at, np.maximum(0.0, x.once + (x.prompt + x.late) * (1 - hidden)))
    return least
