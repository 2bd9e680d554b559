"""Arrays of one stage, cut from those of its chain."""

from __future__ import annotations

from typing import Any

import numpy as np

from asa.planner.pipeline import lattice as at
from asa.planner.pipeline.lattice import INF
from asa.planner.pipeline.stages import Explorer
from asa.planner.stage.pareto import begins


class StageSlice:
    """Components ``start`` to ``stop - 1`` of a chain as one stage, with the explorer's number of microbatches in
    flight: the arrays that do not depend on weights."""

    def __init__(self, explorer: Explorer, start: int, stop: int) -> None:
        x = self.numbers = explorer.numbers
        self.start, self.n, self.tight = start, stop - start, explorer.tight
        more = explorer.in_flight - 1
        layout, config, row = list[Any](), list[Any](), list[Any]()
        for i in range(start, stop):
            configs = explorer.by_layout[i]
            layout.append(np.concatenate([np.full(len(c), k) for k, c, _ in configs]))
            config.append(np.concatenate([c for _, c, _ in configs]))
            row.append(np.concatenate([r for _, _, r in configs]))
        for k, end in ((0, x.inlets[start]), (-1, x.outlets[stop - 1])):
            joined = end[:, layout[k]]
            mask = np.isfinite(joined[at.EF])
            layout[k], config[k], joined = layout[k][mask], config[k][mask], joined[:, mask]
            row[k] = row[k][mask]
            for into, added in ((at.F, at.EF), (at.B, at.EB), (at.ONCE, at.EONCE), (at.STATE, at.ESTATE),
                            (at.ACT, at.EACT), (at.TRANS, at.ETRANS)):  # fmt: skip
                row[k][:, into] += joined[added]
        self.possible = all(len(r) > 0 for r in row)
        if not self.possible:
            return
        self.layout, self.config = np.concatenate(layout), np.concatenate(config)
        self.component = np.repeat(np.arange(self.n), [len(r) for r in row])
        self.row = np.concatenate(row)
        self.row[:, at.STATE] += more * self.row[:, at.ACT]
        self.release = [max(r, start) - start for r in x.release[start:stop]]
        closes = np.array(self.release) == np.arange(self.n)  # a bucket that its own component closes is sent at once
        leaving = self.row[:, at.LATE] * closes[self.component]
        self.row[:, at.PROMPT] += leaving
        self.row[:, at.LATE] -= leaving
        self.across = [i + 1 < self.n and self.release[i + 1] < i for i in range(self.n)]
        """For each component, whether a bucket spans it."""
        e = x.edges[start : stop - 1]
        self.has_edge = np.isfinite(e[:, at.EF])
        self.edges = np.where(self.has_edge[:, None], e, 0.0)
        self.edges[:, at.ESTATE] += more * self.edges[:, at.EACT]
        memory = [self.row[:, at.STATE] + self.row[:, k] for k in (at.GRAD, at.ACT)]
        self.standing, self.working = (self._least_behind(h, k) for h, k in zip(memory, (None, at.EACT), strict=True))

    def _least_behind(self, memory: Any, edge_column: int | None) -> Any:
        """Least sum of ``working`` (GiB) over all later components, for each component and layout."""
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
