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
            own = explorer.by_layout[i]
            layout.append(np.concatenate([np.full(len(c), k) for k, c, _ in own]))
            config.append(np.concatenate([c for _, c, _ in own]))
            row.append(np.concatenate([r for _, _, r in own]))
        for k, end in ((0, x.inlets[start]), (-1, x.outlets[stop - 1])):
            joined = end[:, layout[k]]
            good = np.isfinite(joined[at.EF])
            layout[k], config[k], joined = layout[k][good], config[k][good], joined[:, good]
            row[k] = row[k][good]
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
        own = np.array(self.release) == np.arange(self.n)  # a bucket that closes with its own component is sent at once
        leaving = self.row[:, at.LATE] * own[self.component]
        self.row[:, at.PROMPT] += leaving
        self.row[:, at.LATE] -= leaving
        self.across = [i + 1 < self.n and self.release[i + 1] < i for i in range(self.n)]
        """For each component, whether a bucket spans it."""
        e = x.edges[start : stop - 1]
        self.over = np.isfinite(e[:, at.EF])
        self.edges = np.where(self.over[:, None], e, 0.0)
        self.edges[:, at.ESTATE] += more * self.edges[:, at.EACT]
        held = [self.row[:, at.STATE] + self.row[:, k] for k in (at.GRAD, at.ACT)]
        self.standing, self.held = (self._least(h, k) for h, k in zip(held, (None, at.EACT), strict=True))

    def _least(self, held: Any, beside: int | None) -> Any:
        """Least sum of ``held`` (GiB) over all later components, for each component and layout."""
        first, x = begins(self.component, self.layout), self.numbers
        least = np.full((self.n, x.count), INF)
        least[self.component[first], self.layout[first]] = np.minimum.reduceat(held, first)
        found = np.zeros((self.n, x.count))
        for i in range(self.n - 1, 0, -1):
            e = self.edges[i - 1]
            between = e[at.ESTATE] + (0.0 if beside is None else e[beside])
            between = np.where(self.over[i - 1], between, INF)
            found[i - 1] = (between + (least[i] + found[i])[None, :]).min(axis=1)
        return found
