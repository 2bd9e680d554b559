"""One stage as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asa.planner.stage import dual
from asa.planner.stage import lattice as at
from asa.planner.stage.lattice import INF, Numbers
from asa.planner.stage.pareto import begins


class StageSlice:
    """The components of a stage, with the arrays that do not depend on weights. ``layout``, ``config`` and ``row``:
    layout, number and figures of each configuration, an array for each component. ``edges``: figures of the boundaries
    between them; ``more``: microbatches in flight beyond one; ``tight``: whether memory may bind."""

    def __init__(
        self, numbers: Numbers | dual.Arrays, layout: Sequence[Any], config: Sequence[Any], row: Sequence[Any],
        edges: Any, release: Sequence[int], *, more: int, tight: bool,
    ) -> None:  # fmt: skip
        self.numbers, self.n, self.tight = numbers, len(row), tight
        self.possible = all(len(r) > 0 for r in row)
        if not self.possible:
            return
        self.layout, self.config = np.concatenate(layout), np.concatenate(config)
        self.component = np.repeat(np.arange(self.n), [len(r) for r in row])
        self.row = np.concatenate(row)
        self.row[:, at.STATE] += more * self.row[:, at.ACT]
        self.release = list(release)
        closes = np.array(self.release) == np.arange(self.n)  # a bucket that its own component closes is sent at once
        leaving = self.row[:, at.LATE] * closes[self.component]
        self.row[:, at.PROMPT] += leaving
        self.row[:, at.LATE] -= leaving
        self.across = [i + 1 < self.n and self.release[i + 1] < i for i in range(self.n)]
        """For each component, whether a bucket spans it."""
        self.has_edge = np.isfinite(edges[:, at.EONCE])
        self.edges = np.where(self.has_edge[:, None], edges, 0.0)
        self.edges[:, at.ESTATE] += more * self.edges[:, at.EACT]
        memory = [self.row[:, at.STATE] + self.row[:, k] for k in (at.GRAD, at.ACT)]
        self.standing, self.working = (self._least_behind(h, k) for h, k in zip(memory, (None, at.EACT), strict=True))

    @classmethod
    def of(cls, x: dual.Arrays) -> StageSlice:
        """The stage of a problem. All of its time is paid once per step."""
        rows = [np.zeros((len(r), at.ADDED + 1)) for r in x.rows]
        for into, r in zip(rows, x.rows, strict=True):
            into[:, at.ONCE] = r[:, dual.WORK] - r[:, dual.PROMPT] - r[:, dual.LATE]
            into[:, [at.PROMPT, at.LATE, at.WINDOW]] = r[:, [dual.PROMPT, dual.LATE, dual.WINDOW]]
            into[:, at.STATE : at.TRANS + 1] = r[:, dual.STATE :]
        edges = np.concatenate([np.zeros((len(x.edges), 2, x.count, x.count)), x.edges], axis=1)
        config = [np.arange(len(r)) for r in rows]
        return cls(x, x.layout, config, rows, edges, x.release, more=0, tight=x.capacity < INF)

    def _least_behind(self, memory: Any, edge_column: int | None) -> Any:
        """Least sum of ``memory`` (GiB) over all later components, for each component and layout."""
        first, x = begins(self.component, self.layout), self.numbers
        least = np.full((self.n, x.count), INF)
        least[self.component[first], self.layout[first]] = np.minimum.reduceat(memory, first)
        behind = np.zeros((self.n, x.count))
        for i in range(self.n - 1, 0, -1):
            e = self.edges[i - 1]
            between = e[at.ESTATE] + (0.0 if edge_column is None else e[edge_column])
            between = np.where(self.has_edge[i - 1], between, INF)
            behind[i - 1] = (between + (least[i] + behind[i])[None, :]).min(axis=1)
        return behind
