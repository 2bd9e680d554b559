"""The problem inside a stage as arrays, and lower bounds in ms from prices of memory and overlap.

Two things tie the components of a stage together beyond their neighbours. One is the memory limit, once for every
component k whose backward may be the peak. The other is the overlap, which is the least of one sum per component k.
With a price ``memory[k] >= 0`` (ms per GiB) on the first and weights ``pivot[k] >= 0`` that sum to 1 on the second,

    value  >=  sum work + sum edge - saving * sum_k pivot[k] (sp * windows in front of k + sc * released behind k)
               + sum_k memory[k] (peak in component k - capacity)

for every choice that fits (Lagrangian relaxation). The right side is a shortest path through layouts. Its least value
bounds every choice, and also what follows a component. Any prices give a bound. Subgradient steps find good ones, and
meet choices that fit on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from asa.cost.memory.peak import peaks
from asa.cost.step import hidden_from
from asa.planner.budget import ROUNDING
from asa.planner.stage.pareto import begins
from asa.planner.stage.problem import JOINT, Choice, Problem, column, tabulated

INF = float("inf")
_SIDES = 64
"""Number of components from which on the overlap is first bounded without the memory limit."""
WORK, WINDOW, PROMPT, LATE, STATE, ACT, GRAD, TRANS = range(8)
_FIELDS = ("work", "window", "prompt", "late", "state", "activations", "gradients", "transient")
COST, ESTATE, EACT, ETRANS = range(4)
_JOINED = [JOINT.index(x) for x in ("cost", "state", "activations", "transient")]


class Arrays:
    """One problem as arrays. Configurations are stored by component, in order of layouts."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        n = self.n = len(problem)
        used = sorted({k for row in problem.configs for k in column(row, "layout").tolist()})
        number = {layout: k for k, layout in enumerate(used)}
        count = self.count = len(used)
        self.saving, self.sp, self.sc, self.capacity = problem.saving, problem.sp, problem.sc, problem.capacity
        self.release, self.m = problem.release, problem.num_microbatches
        self.degrees, self.degree = 1, np.zeros(count, dtype=np.int64)  # no other stage depends on the data degree
        self.rows: list[Any] = []
        self.layout: list[Any] = []
        self.index: list[Any] = []
        by_configs: dict[int, tuple[Any, Any, Any]] = {}
        for configs in problem.configs:
            if id(configs) not in by_configs:
                layout = np.array([number[k] for k in column(configs, "layout").tolist()], dtype=np.int64)
                order = np.argsort(layout, kind="stable")
                row = np.stack([column(configs, f) for f in _FIELDS], axis=1).astype(float)
                by_configs[id(configs)] = (row[order], layout[order], order)
            row, layout, order = by_configs[id(configs)]
            self.rows.append(row)
            self.layout.append(layout)
            self.index.append(order)
        for i in range(n):
            if self.release[i] == i:  # a bucket that leaves with its own component leaves at once
                row = self.rows[i].copy()
                row[:, PROMPT] += row[:, LATE]
                row[:, LATE] = 0.0
                self.rows[i] = row
        self.begins = [begins(x) for x in self.layout]
        self.layouts_of = [x[b] for x, b in zip(self.layout, self.begins, strict=True)]
        self.edges = np.zeros((max(0, n - 1), 4, count, count))
        self.edges[:, COST] = INF
        own = np.array([number.get(k, -1) for k in range(len(problem.layouts))], dtype=np.int64)
        known: dict[int, Any] = {}
        for array, edges in zip(self.edges, problem.edges, strict=True):
            if edges and id(edges) not in known:
                (sources, targets), figures = tabulated(edges)
                source, target = own[sources], own[targets]
                used_here = (source >= 0) & (target >= 0)
                array[:, source[used_here], target[used_here]] = figures[_JOINED][:, used_here]
            array[:] = known.setdefault(id(edges), array)
        self._pad()
        dearest = sum(float(r[:, WORK].max()) for r in self.rows)
        finite = np.where(np.isfinite(self.edges[:, COST]), self.edges[:, COST], 0.0)
        self.dearest = dearest + float(finite.max(axis=(1, 2)).sum()) if n > 1 else dearest
        """Upper bound on every choice, in ms. A larger lower bound proves that none fits."""

    def _pad(self) -> None:
        """Store all rows in one array, component x layout x configuration. Absent ones have infinite costs."""
        n, count = self.n, self.count
        most = max(int(np.diff(np.r_[b, len(x)]).max()) for b, x in zip(self.begins, self.layout, strict=True))
        self.padded = np.zeros((8, n, count, most))
        self.padded[WORK] = INF
        self.slot = np.full((n, count, most), -1)
        for i in range(n):
            begin = self.begins[i]
            position = np.arange(len(self.layout[i])) - np.repeat(begin, np.diff(np.r_[begin, len(self.layout[i])]))
            self.padded[:, i, self.layout[i], position] = self.rows[i].T
            self.slot[i, self.layout[i], position] = np.arange(len(self.layout[i]))

    def choice(self, picked: list[int]) -> Choice:
        """The choice of the problem for the rows ``picked``."""
        return tuple(int(self.index[i][k]) for i, k in enumerate(picked))

    def picked(self, choice: Choice) -> list[int]:
        """The rows of a choice of the problem."""
        return [int(np.flatnonzero(order == c)[0]) for order, c in zip(self.index, choice, strict=True)]

    def evaluate(self, picked: list[int]) -> EvaluatedChoice:
        """Overlap, peaks and time under a choice of rows."""
        n = self.n
        rows = np.array([self.rows[i][k] for i, k in enumerate(picked)])
        layout = [int(self.layout[i][k]) for i, k in enumerate(picked)]
        between = np.zeros((n + 1, 4))
        for i in range(1, n):
            between[i] = self.edges[i - 1][:, layout[i - 1], layout[i]]
        leaving = rows[:, PROMPT].copy()
        np.add.at(leaving, list(self.release), rows[:, LATE])
        hidden = hidden_from(rows[:, WINDOW], leaving, self.sp, self.sc)
        total = float(rows[:, WORK].sum() + between[:n, COST].sum())
        state, activations, transient = rows[:, [STATE, ACT, TRANS]].T + between[:n, [ESTATE, EACT, ETRANS]].T
        peak_gib = peaks(state, activations, rows[:, GRAD], transient)
        value = total - self.saving * float(hidden.min())
        return EvaluatedChoice(picked, rows, layout, between, hidden=hidden, peaks=peak_gib, total=total, value=value)


@dataclass(frozen=True)
class EvaluatedChoice:
    """One choice: the rows ``picked``, their figures, layouts and boundaries by component (the last boundary, after the
    end, is zero). ``hidden`` are the ms that would be hidden if the communication stream stayed busy from each
    component on; ``peaks`` GiB at the peak of each; ``total`` ms of all work, and ``value`` those of the step."""

    picked: list[int]
    rows: Any
    layout: list[int]
    between: Any
    hidden: Any
    peaks: Any
    total: float
    value: float


@dataclass
class StageWeights:
    """The weight of one ms or GiB of each field of a component, under a batch of prices. ``offset`` is added to the
    sum."""

    window: Any
    prompt: Any
    late: Any
    state: Any
    activations: Any
    gradients: Any
    offset: Any


def weigh(x: Arrays, pivot: Any, memory: Any) -> StageWeights:
    """The weights that follow from prices; ``pivot`` and ``memory`` are batch x component."""
    before = np.cumsum(pivot, axis=1) - pivot
    behind = pivot.sum(axis=1, keepdims=True) - before - pivot
    upto = np.cumsum(memory, axis=1)
    total = upto[:, -1:]
    return StageWeights(
        window=x.saving * x.sp * behind,
        prompt=x.saving * x.sc * before,
        late=x.saving * x.sc * before[:, list(x.release)],
        state=total[:, 0],
        activations=total - upto + memory,
        gradients=upto,
        offset=-total[:, 0] * x.capacity if x.capacity < INF else 0.0 * total[:, 0],
    )


def _overlap_bounds(x: Arrays, pivot: Any) -> Any:
    """A bound without the memory limit for each row of weights ``pivot``."""
    w = weigh(x, pivot, np.zeros_like(pivot))
    behind = np.zeros((len(pivot), x.count))
    for i in range(x.n - 1, -1, -1):
        r, least = x.rows[i], np.full(behind.shape, INF)
        cost = r[:, WORK] - w.window[:, i, None] * r[:, WINDOW] - w.prompt[:, i, None] * r[:, PROMPT]
        cost = cost - w.late[:, i, None] * r[:, LATE]
        least[:, x.layouts_of[i]] = np.minimum.reduceat(cost, x.begins[i], axis=1)
        behind = least + behind
        if i:
            behind = (x.edges[i - 1][COST] + behind[:, None, :]).min(axis=2)
    return behind.min(axis=1)


class Search:
    """Search for good prices. ``bound`` is the best value under prices. ``value`` and ``picked`` are the
    best choice that fits among those it met. ``loose`` is the value of the best choice it met, whether or not it
    fits."""

    def __init__(self, x: Arrays) -> None:
        self.x = x
        n = x.n
        self.value = self.loose = INF
        self.picked: list[int] = []
        single = np.eye(n)[np.unique(np.linspace(0, n - 1, min(n, _SIDES)).astype(np.int64))]
        sides = _overlap_bounds(x, single)
        at = int(sides.argmax())
        self.bound = float(sides[at])
        self.best = (single[at], np.zeros(n))

    def run(self, steps: int, *, cutoff: float = INF, gap: float = 0.0) -> None:
        """Take at most ``steps`` subgradient steps, until the bound has reached the cutoff or the best choice."""
        x, n = self.x, self.x.n
        tight = x.capacity < INF
        pivot, memory = (a.copy() for a in self.best)
        reach, since = 1.0, 0
        drift: Any = None
        for _ in range(steps):
            low, path = self.shortest(pivot, memory)
            if not low <= x.dearest * (1 + ROUNDING):
                self.bound = INF
                return
            chosen = x.evaluate(path)
            peak_gib, hidden, exact = chosen.peaks, chosen.hidden, chosen.value
            self.loose = min(self.loose, exact)
            if exact < self.value and (not tight or peak_gib.max() <= x.capacity * (1 + 1e-12)):
                self.value, self.picked = exact, path
            since += 1
            if low > self.bound:
                since = 0 if low > self.bound + 1e-3 * abs(self.bound) else since
                self.bound, self.best = low, (pivot.copy(), memory.copy())
            top = min(self.value, cutoff)
            if self.bound >= top * (1 - gap) - 1e-12:
                return
            if since >= 5:
                since, reach = 0, reach / 2
                pivot, memory = (a.copy() for a in self.best)
                drift = None
                if reach < 0.01:
                    return
                continue
            unit = max(1e-9, abs(self.bound)) / x.capacity if tight else 1.0
            aim = max(top if top < INF else 2 * self.bound, self.bound * (1 + 1e-6))
            slope_pivot = -x.saving * hidden
            positive = pivot > 0
            slope_pivot = np.maximum(slope_pivot - slope_pivot[positive].mean(), np.where(positive, -INF, 0.0))
            slope_memory = (peak_gib - x.capacity) * unit if tight else np.zeros(n)
            slope_memory = np.where((memory <= 0) & (slope_memory < 0), 0.0, slope_memory)
            slope = np.concatenate([slope_pivot, slope_memory])
            drift = slope if drift is None else slope + 0.3 * drift
            size = float((drift * drift).sum())
            if size <= 0:
                return
            length = reach * max(aim - low, 1e-9) / size
            pivot = _project_on_simplex(pivot + length * drift[:n]) if x.saving > 0 else pivot
            memory = np.maximum(0.0, memory + length * drift[n:] * unit)

    def shortest(self, pivot: Any, memory: Any) -> tuple[float, list[int]]:
        """The least value under these prices, and a choice that has it."""
        x, n = self.x, self.x.n
        w = weigh(x, pivot[None], memory[None])
        p = x.padded
        cost = p[WORK] - w.window[0][:, None, None] * p[WINDOW] - w.prompt[0][:, None, None] * p[PROMPT]
        cost -= w.late[0][:, None, None] * p[LATE]
        if memory.any():
            cost += w.state[0] * p[STATE] + w.activations[0][:, None, None] * p[ACT]
            cost += w.gradients[0][:, None, None] * p[GRAD] + memory[:, None, None] * p[TRANS]
            e = x.edges
            edges = e[:, COST] + w.state[0] * e[:, ESTATE] + w.activations[0][1:, None, None] * e[:, EACT]
            edges += memory[1:, None, None] * e[:, ETRANS]
        else:
            edges = x.edges[:, COST]
        which = cost.argmin(axis=2)
        least = np.take_along_axis(cost, which[:, :, None], axis=2)[:, :, 0]
        behind = least[n - 1]
        targets = []
        for i in range(n - 1, 0, -1):
            onward = edges[i - 1] + behind
            target = onward.argmin(axis=1)
            targets.append(target)
            behind = least[i - 1] + onward[np.arange(x.count), target]
        at = int(behind.argmin())
        low = float(behind[at] + w.offset[0])
        path = []
        for i in range(n):
            path.append(int(x.slot[i, at, which[i, at]]))
            if i + 1 < n:
                at = int(targets[n - 2 - i][at])
        return low, path


def _project_on_simplex(v: Any) -> Any:
    """The nearest point to ``v`` whose entries are at least 0 and sum to 1."""
    u = np.sort(v)[::-1]
    over = (np.cumsum(u) - 1) / np.arange(1, len(v) + 1)
    k = int(np.flatnonzero(u > over)[-1])
    return np.maximum(v - over[k], 0.0)
