"""The optimum of Piper's problem, proved, and the value of Piper's own greedy rule in the same recurrence.

Piper's dynamic program (Tarnawski, Narayanan, Phanishayee: "Piper: Multidimensional Planner for DNN Parallelization",
NeurIPS 2021), from the last stage to the first: ``best[J][k][s]`` is the least maximum over the stages that hold what
is outside the downset J, on exactly k devices with data degrees that sum to s,

    best[J][k][s] = min over I above J, d, t of  max(best[I][k - d t][s - d], stage(I - J; d, t, ceil(s / d)))

Inside a stage each layer takes one variant so that memory fits: a knapsack, there solved greedily, here exactly.

What keeps it small: no stage is faster than its fastest variants (a difference of two sums over downsets, less a
product for edges that pass over it); work outside J must be done by k devices and work in J by the others, none beyond
a known answer, which leaves few downsets per k; and a knapsack is solved only where this bound is below the best known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from asa.errors import InfeasibleError
from benchmarks.truth import knapsack
from benchmarks.truth.downsets import Downsets, Floats, Indices, downsets
from benchmarks.truth.piper import Stage, Workload, contributions

Fill = Callable[[Sequence[knapsack.Variants], float], knapsack.Choice]
_Key = tuple[int, int]  # devices, sum of data degrees

_SLACK = 1e-9  # relative: a sum over downsets this near the memory limit is added up anew


@dataclass(frozen=True)
class Answer:
    """Time per sample, a pipeline that attains it, and how much was looked at."""

    time: float
    stages: tuple[Stage, ...]
    downsets: int
    states: int
    knapsacks: int


def solve(workload: Workload, *, fill: Fill = knapsack.exact, known: float = math.inf) -> Answer:
    """The best pipeline with ``fill`` choosing variants inside a stage: the optimum where ``fill`` is exact.

    ``known``: the value of any pipeline, to search below (it is itself found again).

    Raises:
        InfeasibleError: no pipeline fits into memory.
        InvalidInputError: the graph has too many downsets.
    """
    edges = [(e.source, e.target) for e in workload.edges]
    sets = downsets(len(workload.nodes), edges, source="the workload")
    if not math.isfinite(known):
        known = _Search(workload, _prefixes(sets), knapsack.greedy, math.inf).run().time
    found = _Search(workload, sets, fill, known).run()
    if not math.isfinite(found.time):
        if fill is knapsack.exact and not math.isfinite(known):
            raise InfeasibleError(
                f"no pipeline of {workload.devices} devices with {workload.memory_bytes / 2**30:.3g} GiB holds the "
                "workload; allow more devices or more memory"
            )
        raise InfeasibleError("no pipeline is as good as the one said to be known")
    return found


def _prefixes(sets: Downsets) -> Downsets:
    """Those downsets that are the first nodes in topological order."""
    nodes = sets.inside.shape[1]
    ends = sets.inside.sum(axis=1)
    rows = [i for i in range(len(sets)) if sets.inside[i, : ends[i]].all()]
    if len(rows) != nodes + 1:
        raise AssertionError("nodes are not in topological order")
    return sets.only(np.asarray(rows))


@dataclass
class _Way:
    """Sums over downsets for one data and tensor degree."""

    data: int
    tensor: int
    time: Floats
    lacking: Floats
    """Nodes that have no variant at this tensor degree."""


@dataclass
class _Search:
    workload: Workload
    sets: Downsets
    fill: Fill
    known: float
    best: dict[_Key, Floats] = field(default_factory=dict)
    chosen: dict[tuple[_Key, int], tuple[_Key, int, Stage]] = field(default_factory=dict)
    states: int = 0
    knapsacks: int = 0

    def __post_init__(self) -> None:
        w = self.workload
        self.degrees = sorted({t for node in w.nodes for t in node.variants})
        self.ways = [
            self._way(d, t)
            for t in self.degrees
            for d in range(1, min(w.devices // t, w.microbatches) + 1)
            if w.microbatches % d == 0
        ]
        # Device-seconds no pipeline can do without.
        work = [min(t * v.time for t, rows in node.variants.items() for v in rows) for node in w.nodes]
        self.work = self.sets.sums(work)
        self.crossing = {t: self._crossing(t) for t in self.degrees}
        self.entering = {t: self._leaving(matrix[0]) for t, matrix in self.crossing.items()}
        self.leaving = {t: self._leaving(matrix[1]) for t, matrix in self.crossing.items()}
        self.smallest: dict[tuple[int, int], Floats] = {}
        self.filled: dict[tuple[int, int, int, int, int], knapsack.Choice] = {}

    def _way(self, data: int, tensor: int) -> _Way:
        none = [tensor not in node.variants for node in self.workload.nodes]
        time = [
            0.0 if lacks else min(self._alone(v.time, v.parameter_bytes, data) for v in node.variants[tensor])
            for node, lacks in zip(self.workload.nodes, none, strict=True)
        ]
        return _Way(data, tensor, self.sets.sums(time), self.sets.sums([float(lacks) for lacks in none]))

    def _alone(self, time: float, parameters: float, data: int) -> float:
        w = self.workload
        return time / data + 4 * (data - 1) * parameters / (data * w.microbatches) / w.bandwidth

    def _crossing(self, tensor: int) -> tuple[Floats, Floats]:
        """Bytes of each edge where it enters a stage and where it leaves one, with the least synchronisation."""
        count = len(self.workload.nodes)
        entering, leaving = np.zeros((count, count)), np.zeros((count, count))
        for e in self.workload.edges:
            ins = [v.sync_in[e.source] for v in self.workload.nodes[e.target].variants.get(tensor, ())]
            outs = [v.sync_out[e.target] for v in self.workload.nodes[e.source].variants.get(tensor, ())]
            entering[e.source, e.target] = e.bytes + min(ins, default=0.0)
            leaving[e.source, e.target] = e.bytes + min(outs, default=0.0)
        return entering, leaving

    def _leaving(self, matrix: Floats) -> Floats:
        """Per downset the bytes on edges out of it."""
        inside = self.sets.inside.astype(np.float64)
        total: Floats = ((inside @ matrix) * (1 - inside)).sum(axis=1)
        return total

    def _memory(self, tensor: int, in_flight: int) -> Floats:
        """Sums over downsets of the bytes of each node's smallest variant."""
        key = (tensor, in_flight)
        if key not in self.smallest:
            small = [
                min((v.memory_each * in_flight + v.memory_fixed for v in node.variants.get(tensor, ())), default=0.0)
                for node in self.workload.nodes
            ]
            self.smallest[key] = self.sets.sums(small)
        return self.smallest[key]

    def run(self) -> Answer:
        """Fill the table from the full set down to the empty one."""
        w, last = self.workload, len(self.sets) - 1
        self.bound = self.known * (1 + _SLACK)
        start = np.full(len(self.sets), np.inf)
        start[last] = 0.0
        self.best[0, 0] = start
        active: dict[_Key, list[int]] = {(0, 0): [last]}
        for j in range(last - 1, -1, -1):
            most = (self.work[last] - self.work[j]) / self.bound if self.bound < math.inf else 0.0
            least_left = self.work[j] / self.bound if self.bound < math.inf else 0.0
            for way in self.ways:
                used = way.data * way.tensor
                for key in list(active):
                    devices, behind = key[0] + used, key[1] + way.data
                    if most > devices * (1 + _SLACK) or least_left > (w.devices - devices) * (1 + _SLACK):
                        continue
                    if devices <= w.devices and behind <= w.microbatches:
                        self._extend(j, way, key, (devices, behind), active[key])
            for key, table in self.best.items():
                if table[j] <= self.bound:
                    active.setdefault(key, []).append(j)
                    self.states += 1
        value, key = min(((table[0], key) for key, table in self.best.items()), default=(math.inf, (0, 0)))
        stages: list[Stage] = []
        at = 0
        while math.isfinite(value) and at != last:
            key, at, stage = self.chosen[key, at]
            stages.append(stage)
        return Answer(float(value), tuple(stages), len(self.sets), self.states, self.knapsacks)

    def _extend(self, j: int, way: _Way, key: _Key, made: _Key, active: list[int]) -> None:
        """Stages from J up to each downset above it that can be followed by ``key`` devices."""
        w = self.workload
        above = self.sets.holds(j, np.asarray(active))
        above = above[way.lacking[above] - way.lacking[j] == 0]
        if not len(above):
            return
        table = self.best.setdefault(made, np.full(len(self.sets), np.inf))
        load = way.time[above] - way.time[j]
        rest = self.best[key][above]
        lower = np.maximum(load * (1 - _SLACK), rest)
        near = lower <= min(self.bound, table[j])
        above, load, rest = above[near], load[near], rest[near]
        if not len(above):
            return
        load = load + 2 * self._transfers(j, above, way.tensor) / (way.data * w.bandwidth)
        in_flight = -(-made[1] // way.data)
        small = self._memory(way.tensor, in_flight)
        lower = np.maximum(load * (1 - _SLACK), rest)
        fits = small[above] - small[j] <= w.memory_bytes * (1 + _SLACK)
        for i in np.flatnonzero(fits)[np.argsort(lower[fits], kind="stable")]:
            if lower[i] >= table[j] or lower[i] > self.bound:
                break
            # Differences of sums are only bounds; what is kept is added up from the nodes of the stage.
            choice = self._fill(j, int(above[i]), way, in_flight)
            worth = max(choice.time, float(rest[i]))
            if worth < table[j]:
                table[j] = worth
                nodes = np.flatnonzero(self.sets.inside[above[i]] & ~self.sets.inside[j])
                stage = Stage(tuple(int(v) for v in nodes), way.data, way.tensor, choice.variants)
                self.chosen[made, j] = (key, int(above[i]), stage)

    def _transfers(self, j: int, above: Indices, tensor: int) -> Floats:
        """Bytes into and out of the stages from J to each of ``above``: what leaves J, less what passes over."""
        entering, leaving = self.crossing[tensor]
        out = self.sets.inside[j] @ (entering + leaving)
        over: Floats = (~self.sets.inside[above]) @ out
        total: Floats = self.entering[tensor][j] + self.leaving[tensor][above] - over
        return total

    def _fill(self, j: int, i: int, way: _Way, in_flight: int) -> knapsack.Choice:
        key = (j, i, way.data, way.tensor, in_flight)
        if key not in self.filled:
            nodes = frozenset(int(v) for v in np.flatnonzero(self.sets.inside[i] & ~self.sets.inside[j]))
            rows = contributions(self.workload, nodes, way.data, way.tensor, in_flight)
            self.filled[key] = self.fill(rows, self.workload.memory_bytes)
            self.knapsacks += 1
        return self.filled[key]
