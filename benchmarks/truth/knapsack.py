"""One variant per node within a memory limit at the least time: exactly, and by the greedy rule Piper uses.

Minimise sum_v time[v][c_v] subject to sum_v memory[v][c_v] <= limit, c_v a variant of node v. NP-hard, small here.
Exact: labels (memory, time), node by node, kept where no other is better in both, dropped where even the fractional
relaxation of the nodes left (the sum of the lower convex hulls of their variants, piecewise linear in memory) cannot
bring them below the best answer known. Greedy: start with the fastest variants and make the swaps with the least time
lost per byte won first (Tarnawski et al., NeurIPS 2021; ``solveKnapsack`` of msr-fiddle/piper, fast form).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.truth.downsets import Floats

Variants = Sequence[tuple[float, float]]
"""(time, memory) of each variant of a node."""

_SAME = 1e-12  # relative: labels closer than this in time are one


@dataclass(frozen=True)
class Choice:
    """The variant of each node, and what they sum to; ``time`` is infinite where nothing fits."""

    variants: tuple[int, ...]
    time: float
    memory: float


NOTHING = Choice((), math.inf, math.inf)


def total(nodes: Sequence[Variants], variants: Sequence[int]) -> Choice:
    """What a choice of variants sums to, each sum rounded once."""
    picked = [node[c] for node, c in zip(nodes, variants, strict=True)]
    return Choice(tuple(variants), math.fsum(t for t, _ in picked), math.fsum(m for _, m in picked))


def fastest(nodes: Sequence[Variants]) -> Choice:
    """The fastest variant of every node; among equals the one that needs less."""
    return total(nodes, [node.index(min(node)) for node in nodes])


def greedy(nodes: Sequence[Variants], limit: float) -> Choice:
    """Piper's rule; a feasible choice, or :data:`NOTHING` where none exists."""
    found = fastest(nodes)
    if found.memory <= limit:
        return found
    if math.fsum(min(m for _, m in node) for node in nodes) > limit:
        return NOTHING
    chosen = list(found.variants)
    swaps = sorted(
        ((t - node[c][0]) / (node[c][1] - m), v, other)
        for v, (node, c) in enumerate(zip(nodes, chosen, strict=True))
        for other, (t, m) in enumerate(node)
        if m < node[c][1]
    )
    for _, v, other in swaps:
        if nodes[v][other][1] < nodes[v][chosen[v]][1]:
            chosen[v] = other
        found = total(nodes, chosen)
        if found.memory <= limit:
            return found
    return NOTHING


def exact(nodes: Sequence[Variants], limit: float) -> Choice:
    """The optimum, or :data:`NOTHING` where nothing fits."""
    best = greedy(nodes, limit)
    if not best.variants or best.variants == fastest(nodes).variants:
        return best
    # Nodes that lose the most time are decided first: the bound then says most.
    order = sorted(range(len(nodes)), key=lambda v: -_spread(nodes[v]))
    bounds = _relaxations([nodes[v] for v in order])
    labels = np.zeros((1, 2))  # time, memory
    trails: list[tuple[np.ndarray, np.ndarray]] = []
    for at, v in enumerate(order):
        variants = np.asarray(nodes[v], dtype=np.float64)
        times = (labels[:, None, 0] + variants[None, :, 0]).ravel()
        memory = (labels[:, None, 1] + variants[None, :, 1]).ravel()
        points, lowest = bounds[at + 1]
        room = limit - memory
        rest = np.where(room >= points[0], np.interp(room, points, lowest), np.inf)
        worth = np.flatnonzero(times + rest < best.time * (1 - _SAME))
        if not len(worth):
            return best
        worth = worth[np.lexsort((times[worth], memory[worth]))]
        falling = np.minimum.accumulate(times[worth])
        kept = worth[np.concatenate(([True], falling[1:] < falling[:-1]))]
        labels = np.stack((times[kept], memory[kept]), axis=1)
        trails.append(np.divmod(kept, len(variants)))
    at = int(labels[:, 0].argmin())
    chosen = [0] * len(nodes)
    for v, (parents, picks) in zip(reversed(order), reversed(trails), strict=True):
        chosen[v] = int(picks[at])
        at = int(parents[at])
    found = total(nodes, chosen)
    return found if found.memory <= limit and found.time < best.time else best


def _spread(node: Variants) -> float:
    return max(t for t, _ in node) - min(t for t, _ in node)


def _hull(node: Variants) -> list[tuple[float, float]]:
    """Corners (memory, time) of the lower left convex hull of a node's variants, from least memory on."""
    corners: list[tuple[float, float]] = []
    for m, t in sorted((m, t) for t, m in node):
        if corners and t >= corners[-1][1]:
            continue
        while len(corners) > 1:
            (m0, t0), (m1, t1) = corners[-2:]
            if (t1 - t0) * (m - m0) < (t - t0) * (m1 - m0):
                break
            corners.pop()
        corners.append((m, t))
    return corners


def _relaxations(nodes: Sequence[Variants]) -> list[tuple[Floats, Floats]]:
    """Per suffix of ``nodes`` the least fractional time over memory: breakpoints and values, convex and falling."""
    memory, time = 0.0, 0.0
    slopes: list[tuple[float, float]] = []  # (time per byte, bytes), all of the suffix
    found = [(np.zeros(1), np.zeros(1))]
    for node in reversed(nodes):
        corners = _hull(node)
        memory += corners[0][0]
        time += corners[0][1]
        slopes += [((t1 - t0) / (m1 - m0), m1 - m0) for (m0, t0), (m1, t1) in pairwise(corners)]
        slopes.sort()
        steps = np.asarray(slopes, dtype=np.float64).reshape(-1, 2)
        points = memory + np.concatenate(([0.0], np.cumsum(steps[:, 1])))
        values = time + np.concatenate(([0.0], np.cumsum(steps[:, 0] * steps[:, 1])))
        found.append((points, values))
    return found[::-1]
