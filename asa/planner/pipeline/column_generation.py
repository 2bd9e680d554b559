"""Column generation for plans with fixed cuts and widths: a lower bound on all of them, and good plans among them.

A step is the longest of many paths through the clock (:mod:`asa.cost.pipeline`), so no plan takes less than any
weighted mean of paths. For fixed weights, stages depend on each other only through the data degrees at their ends. Each
stage then is a pricing problem with its own minimum under the memory limit
(:mod:`asa.planner.stage.pricing_problem`), and the sum of these minima is a lower bound on all plans with these cuts
and widths. The best weights are the optimal mixed strategy of a zero-sum game between paths (rows) and the choices
generated so far (columns). The best choice under these weights is the next column (Dantzig and Wolfe, Operations
Research 8, 1960).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asa.cost.pipeline import played
from asa.interfaces.schedule import Schedule
from asa.planner.pipeline.case import Case
from asa.planner.pipeline.staged import stage_times
from asa.planner.stage.lattice import INF
from asa.planner.stage.pricing_problem import PricedChoice, PricingProblem
from asa.planner.stage.problem import Choice
from asa.planner.stage.stage_slice import StageSlice

Cuts = tuple[tuple[int, int, int], ...]
"""For each stage its width, its first component, and the component behind its last one."""

_LABELS, _UTMOST = 300, 4800
_PATHS = 40
"""Most labels behind a component, at first and in the end; most paths that are added in one iteration."""
_CLOSE = 1e-3
"""Share of a bound: a smaller gain is not worth another iteration."""
_FIRST, _NEAR = 0.2, 0.3
"""Share in the weights of paths through every single stage at first, and of the weights with the best bound so far in
each iteration. A stage of weight zero could take any time, and the columns would be useless."""


class ColumnGeneration:
    """The plans of a case with these cuts and widths. ``bound``: lower bound in ms; ``value`` and ``choices``: the best
    plan generated. ``done``: no further iteration is worth its time. ``known_times``: those of plans, or bounds on
    them, in the order of :func:`longest`; the first weights are the best ones against these."""

    def __init__(self, case: Case, cuts: Cuts, bound: float, known_times: Sequence[Any]) -> None:
        self.case, self.cuts, self.bound = case, cuts, bound
        self.value, self.choices, self.done = INF, tuple[Choice, ...](), False
        links, offset, p = case.links, 0, len(cuts)
        assert links is not None
        self._slices: list[StageSlice] = []
        self._keys = [case.keys.of[w] for w, _, _ in cuts]
        self._moves: list[tuple[Any, Any]] = []
        for s, (w, a, b) in enumerate(cuts):
            if s:
                hop, where = links.hops[offset], (a, self._keys[s - 1], self._keys[s])
                self._moves.append((links.ahead[hop][where], links.back[hop][where]))
            self._slices.append(case.cache.stage_slice(case.cache.key_of(w, case.m, case.in_flight[p - s]), a, b))
            offset += w
        self._iterations, self._most, self._best_bound = 0, _LABELS, 0.0
        self._paths, self._columns = list[Any](), list[Any]()
        self._stages: list[PricingProblem] = []
        if all(x.possible for x in self._slices):
            self._weights = self._center = self._first_weights(np.array(known_times))
        else:
            self.bound = INF

    def step(self, limit: float, ends: float) -> None:
        """Raise the bound: at first by dual bounds of the stages, then by the best choice under the current weights,
        with new weights in each iteration. Plans of ``limit`` ms or more do not count.

        Raises:
            OutOfTimeError: time is up.
        """
        if not self._stages:
            self._price()
            return
        self._iterations += 1
        choices, dropped = self._best(limit, ends)
        if self.bound > self._best_bound:
            self._best_bound, self._center = self.bound, self._weights
        if self.bound >= limit:
            return
        reach = INF if choices is None else self._add_column(choices)
        close_to = self.bound * (1 + _CLOSE / 3)
        self.done = reach <= close_to or self.value <= close_to or self._iterations >= self.case.cache.effort.turns
        if dropped and reach > close_to:
            self.done = self.done or self._most >= _UTMOST
            self._most *= 4
        if not self.done and choices is not None:
            self._price()

    def _price(self) -> None:
        """Bound all stages under the current weights by Lagrangian prices of memory, the last stage first."""
        behind, stages, weights = np.zeros(self._slices[-1].numbers.degrees), list[PricingProblem](), self._weights
        for s in range(len(self.cuts) - 1, -1, -1):
            forward, backward, last, after = weights[4 * s : 4 * s + 4].tolist()
            stages.append(PricingProblem(self._slices[s], (forward, backward, max(0.0, last - after), after), behind))
            entry_bounds = stages[-1].entry_bounds()
            if s:
                behind = (self._link_costs(s) + entry_bounds[None, :]).min(axis=1)
        self._stages = stages[::-1]
        self.bound = max(self.bound, float(entry_bounds.min()))

    def _best(self, limit: float, ends: float) -> tuple[list[Choice] | None, bool]:
        """The best choices below ``limit`` under the current weights, or None, and whether labels that matter were
        dropped."""
        front, proved = np.zeros(self._slices[0].numbers.degrees), limit
        results, sources = list[PricedChoice](), list[Any]()
        for s, stage in enumerate(self._stages):
            if s:
                after_link = results[-1].values[:, None] + self._link_costs(s)
                sources.append(after_link.argmin(axis=0))
                front = after_link.min(axis=0)
            results.append(stage.best(front, limit, self._most, ends))
            proved = min(proved, results[-1].proved)
            if not np.isfinite(results[-1].values).any():
                self.bound = max(self.bound, proved)
                return None, proved < limit
        end = int(results[-1].values.argmin())
        value = float(results[-1].values[end])
        self.bound = max(self.bound, min(proved, value))
        choices: list[Choice] = []
        for s in range(len(self.cuts) - 1, -1, -1):
            choice = results[s].choices[end]
            assert choice is not None
            choices.append(choice)
            if s:
                end = int(sources[s - 1][results[s].entries[end]])
        return choices[::-1], proved < value

    def _add_column(self, choices: Sequence[Choice]) -> float:
        """Add a plan as a column, and take the weights with the best bound (returned, in ms) on all columns."""
        column = self._times(choices)
        value, path = longest(column, self.case.schedule, len(self.cuts), self.case.m)
        if value < self.value:
            self.value, self.choices = value, tuple(choices)
        self._columns.append(column)
        self._paths.append(path)
        weights, reach = self._best_weights(np.array(self._columns), self._paths)
        self._weights = (1 - _NEAR) * weights + _NEAR * self._center
        return reach

    def _first_weights(self, known_times: Any) -> Any:
        """The first weights: the best ones against ``known_times``, mixed with the paths through each single stage."""
        p, through = len(self.cuts), []
        for s in range(p):
            slow = known_times.mean(axis=0)
            slow[4 * s : 4 * s + 4] += known_times.sum()
            through.append(longest(slow, self.case.schedule, p, self.case.m)[1])
        return (1 - _FIRST) * self._best_weights(known_times, [])[0] + _FIRST * np.mean(through, axis=0)

    def _best_weights(self, columns: Any, paths: list[Any]) -> tuple[Any, float]:
        """The best weights against these columns and their bound in ms; ``paths`` are added where needed."""
        p, m = len(self.cuts), self.case.m
        if not paths:
            paths += [longest(c, self.case.schedule, p, m)[1] for c in columns]
        for _ in range(_PATHS):
            weights, share, reach = game(np.maximum(1e-9, np.array(paths) @ columns.T))
            value, path = longest(share @ columns, self.case.schedule, p, m)
            if value <= reach * (1 + 1e-7):
                break
            paths.append(path)
        return weights @ np.array(paths), reach

    def _link_costs(self, s: int) -> Any:
        """Weighted ms of the transfers between stages s - 1 and s, by the data degrees on either side."""
        i = 4 * len(self.cuts) + 2 * (s - 1)
        ahead, back = self._moves[s - 1]
        return self._weights[i] * ahead + self._weights[i + 1] * back

    def _times(self, choices: Sequence[Choice]) -> Any:
        """The times of a plan in ms, in the order of :func:`longest`."""
        pipelines, m, times, degrees = self.case.cache.pipelines, self.case.m, list[float](), []
        for (w, a, _), choice in zip(self.cuts, choices, strict=True):
            chain = pipelines.chain(w, m)
            assert chain is not None
            stage = chain.chosen(a, choice)
            stage_ms = stage_times(stage, (0,) * len(choice))
            times += [stage_ms.forward, stage_ms.backward, stage_ms.last_backward_extra, stage_ms.after]
            ends = [chain.layouts[stage.configs[k][0].layout].data for k in (0, -1)]
            degrees.append([self.case.keys.pairs.index((w, d)) for d in ends])
        for s, (ahead, back) in enumerate(self._moves):
            where = (degrees[s][1] - self._keys[s].start, degrees[s + 1][0] - self._keys[s + 1].start)
            times += [float(ahead[where]), float(back[where])]
        return np.array(times)


def longest(times: Any, schedule: Schedule, stages: int, num_microbatches: int) -> tuple[float, Any]:
    """The time of a step, as by :func:`asa.cost.pipeline.makespan`, and how often each entry of ``times`` is on the
    critical path.

    ``times``: forward, backward, last_backward_extra and after of each stage; then forward and backward of each link.
    """
    entries = [_Traced(ms) for ms in times.tolist()]
    for k, entry in enumerate(entries):
        entry.path = (k, None)
    own, links = entries[: 4 * stages], entries[4 * stages :]
    stage_ms = [own[k : k + 4] for k in range(0, len(own), 4)]
    end = played(stage_ms, list(zip(links[::2], links[1::2], strict=True)), schedule, num_microbatches, max)
    counts, path = np.zeros(len(times)), end.path
    while path is not None:
        counts[path[0]] += 1
        path = path[1]
    return float(end), counts


class _Traced(float):
    """Ms with the entries of which they are the sum: the last one, and the path in front of it."""

    path: Any = None

    def __add__(self, other: Any) -> _Traced:
        total = _Traced(float.__add__(self, other))
        total.path = (other.path[0], self.path)
        return total

    def __radd__(self, start: float) -> _Traced:
        return self


def game(values: Any) -> tuple[Any, Any, float]:
    """Optimal mixed strategies of a positive matrix game and its value: weights of rows (maximise the least column) and
    of columns (minimise the largest row), by the simplex method (von Neumann)."""
    scale = float(values.max())
    rows, columns = values.shape
    table = np.zeros((rows + 1, columns + rows + 1))
    table[:rows, :columns], table[:rows, columns:-1], table[:rows, -1] = values / scale, np.eye(rows), 1.0
    table[rows, :columns] = -1.0
    basis = list(range(columns, columns + rows))
    for turn in range(50 * (rows + columns)):
        below = np.flatnonzero(table[rows, :-1] < -1e-11)
        if not len(below):
            break
        # Steepest column first; after many pivots the first one (Bland's rule), which cannot cycle.
        j = int(below[table[rows, below].argmin()] if turn < 10 * (rows + columns) else below[0])
        rising = table[:rows, j] > 1e-11
        ratio = np.where(rising, table[:rows, -1] / np.where(rising, table[:rows, j], 1.0), INF)
        i = int(ratio.argmin())
        table[i] /= table[i, j]
        others = np.arange(rows + 1) != i
        table[others] -= table[others, j, None] * table[i]
        basis[i] = j
    total = float(table[rows, -1])
    share = np.zeros(columns)
    for i, j in enumerate(basis):
        if j < columns:
            share[j] = table[i, -1]
    row_weights = np.maximum(0.0, table[rows, columns:-1])
    return row_weights / row_weights.sum(), share / share.sum(), scale / total
