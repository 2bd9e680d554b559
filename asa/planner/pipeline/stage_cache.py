"""Cache that the cases of a search share: chains as arrays, tables of bounds, explorers and transfers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from asa.ir.layout import Layout
from asa.planner import clock
from asa.planner.budget import USUAL, Effort
from asa.planner.pipeline.bounds import Keys, StageLinks
from asa.planner.pipeline.staged import StagedSpace
from asa.planner.pipeline.stages import UTMOST, Explorer
from asa.planner.pipeline.tables import limited, relaxed
from asa.planner.pipeline.thinning import Points, Room
from asa.planner.stage.lattice import INF, Numbers, Table
from asa.planner.stage.pareto import OutOfTimeError
from asa.planner.stage.stage_slice import StageSlice


class StageCache:
    """Chains as arrays, tables of bounds and transfers, computed once for all cases. ``limited``: a cache of the same
    stages; this one is then of those without the memory limit."""

    def __init__(
        self, pipelines: StagedSpace, *, effort: Effort = USUAL.effort, limited: StageCache | None = None
    ) -> None:
        self.pipelines, self.effort, self._limited_ones = pipelines, effort, limited
        self.n = len(pipelines.names)
        self.gpus = pipelines.gpus
        self.offsets = {
            w: np.array([o for o in range(self.gpus - w + 1) if pipelines.placed(o, w)], dtype=np.int64)
            for w in pipelines.widths() if w <= self.gpus
        }  # fmt: skip
        hops = [pipelines.hop(o) for o in range(self.gpus + 1)]
        kinds = sorted(set(hops))
        self.hops = [kinds.index(h) for h in hops]
        self.example = [hops.index(h) for h in kinds]
        self._numbers: dict[tuple[int, int], Numbers | None] = {}
        self._relaxed: dict[tuple[int, int], Table] = {} if limited is None else limited._relaxed
        self._limited: dict[tuple[int, int, int], Table] = {}
        self._points: dict[tuple[int, int, int, int, int], tuple[Room, int, Points | None]] = {}
        self._explorers: dict[tuple[int, int, int], Explorer] = {}
        self._links: dict[Any, StageLinks] = {} if limited is None else limited._links
        self._slices: dict[tuple[int, int, int, int, int], StageSlice] = {}

    @cached_property
    def unlimited(self) -> StageCache:
        """The cache of the same stages without the memory limit."""
        return StageCache(self.pipelines, effort=self.effort, limited=self)

    def tight(self, w: int, m: int, in_flight: int) -> bool:
        """Whether memory may bind; False for chains that are not formulated yet."""
        numbers = self._numbers.get((w, m))
        return numbers is not None and not numbers.flying(in_flight).all_fit(in_flight)

    def numbers(self, w: int, m: int) -> Numbers | None:
        """The arrays of a chain; None where some component cannot run."""
        if (w, m) not in self._numbers:
            if self._limited_ones is not None:
                numbers = self._limited_ones.numbers(w, m)
                self._numbers[w, m] = None if numbers is None else numbers.without_memory_limit()
            else:
                chain = self.pipelines.chain(w, m)
                self._numbers[w, m] = None if chain is None else Numbers(chain)
        return self._numbers[w, m]

    def relaxed(self, w: int, m: int) -> Table | None:
        """The table without the memory limit."""
        numbers = self.numbers(w, m)
        if numbers is None:
            return None
        if (w, m) not in self._relaxed:
            self._relaxed[w, m] = relaxed(numbers)
        return self._relaxed[w, m]

    def limited(self, w: int, m: int, in_flight: Iterable[int]) -> dict[int, Table | None]:
        """Tables with the memory limit, by microbatches in flight."""
        numbers, table, flights = self.numbers(w, m), self.relaxed(w, m), sorted(set(in_flight))
        if numbers is None or table is None:
            return dict.fromkeys(flights, table)
        tight = [f for f in flights if not numbers.flying(f).all_fit(f)]
        missing = [f for f in tight if (w, m, f) not in self._limited]
        for some in {id(numbers.flying(f)): numbers.flying(f) for f in missing}.values():
            alike = [f for f in missing if numbers.flying(f) is some]
            self._limited.update(zip([(w, m, f) for f in alike], limited(some, table, alike), strict=True))
        return {f: self._limited[w, m, f] if f in tight else table for f in flights}

    def key_of(self, w: int, m: int, in_flight: int) -> tuple[int, int, int]:
        """Key of stages; where memory cannot bind, it is equal for all numbers of microbatches in flight."""
        numbers = self.numbers(w, m)
        assert numbers is not None
        return w, m, 0 if numbers.flying(in_flight).all_fit(in_flight) else in_flight

    def twin(self, w: int, m: int, start: int, stop: int) -> tuple[int, int]:
        """The first equal stage, which is explored in its stead."""
        numbers = self.numbers(w, m)
        assert numbers is not None
        return numbers.twin(start, stop)

    def explorer(self, stage_key: tuple[int, int, int]) -> Explorer:
        """The explorer of stages with this key."""
        w, m, in_flight = stage_key
        numbers = self.numbers(w, m)
        assert numbers is not None
        if stage_key not in self._explorers:
            self._explorers[stage_key] = Explorer(numbers.flying(in_flight), max(1, in_flight))
        return self._explorers[stage_key]

    def stage_slice(self, stage_key: tuple[int, int, int], start: int, stop: int) -> StageSlice:
        """The stage with this key as arrays."""
        slice_key = (*stage_key, *self.twin(stage_key[0], stage_key[1], start, stop))
        if slice_key not in self._slices:
            self._slices[slice_key] = self.explorer(stage_key).slice(*slice_key[3:])
        return self._slices[slice_key]

    def explored(
        self, stage_key: tuple[int, int, int], start: int, wanted: dict[int, tuple[Room, int]], ends: float
    ) -> dict[int, Points | None]:
        """The points of stages from ``start`` to each stop in ``wanted``, up to that many ms at least and with that
        many labels."""
        missing = {}
        for stop, (room, most) in wanted.items():
            stored = self._points.get((*stage_key, start, stop))
            if stored is None or stored[1] < most or any(a < b for a, b in zip(stored[0], room, strict=True)):
                missing[stop] = (room.larger(1 + 1e-3), most)
        ending = {self.n} if stage_key[1] == 1 else set()  # of one microbatch, a last stage has fewer labels by itself
        for some in (missing.keys() & ending, missing.keys() - ending):
            if not some:
                continue
            most, explorer = max(missing[b][1] for b in some), self.explorer(stage_key)
            caps = {b: missing[b][0] for b in some}
            explored = explorer.explore(start, caps, most, ends=ends)
            for stop, room in caps.items():
                points = explored.get(stop)
                exact = points is None or points.exact
                self._points[(*stage_key, start, stop)] = (room, UTMOST if exact else most, points)
        return {stop: self._points[(*stage_key, start, stop)][2] for stop in wanted}

    def links(self, m: int, keys: Keys, *, ends: float = INF) -> StageLinks:
        """Transfers between stages of these keys.

        Raises:
            OutOfTimeError: the clock has passed ``ends``.
        """
        key = (m, tuple(keys.pairs))
        if key in self._links:
            return self._links[key]
        kinds, count = len(self.example), len(keys)
        ahead, back = (np.zeros((kinds, self.n + 1, count, count)) for _ in range(2))
        classes: dict[float, list[int]] = {}
        for cut in range(1, self.n):
            classes.setdefault(self.pipelines.crossing(cut), []).append(cut)
        firsts, class_of = [cuts[0] for cuts in classes.values()], np.zeros(self.n, dtype=np.int64)
        for k, cuts in enumerate(classes.values()):
            class_of[cuts] = k
        layouts = [Layout(width=w, data=d, tensor=1) for w, d in keys.pairs]
        sent = np.zeros((kinds, len(firsts), count, count, 2))
        for a, x in enumerate(layouts):
            if clock.now() > ends:
                raise OutOfTimeError
            for b, y in enumerate(layouts):
                for kind, offset in enumerate(self.example) if x.width + y.width <= self.gpus else ():
                    sent[kind, :, a, b] = self.pipelines.transfers(firsts, m, x, y, offset)
        ahead[:, 1 : self.n], back[:, 1 : self.n] = np.moveaxis(sent[:, class_of[1:]], -1, 0)
        self._links.clear()
        self._links[key] = StageLinks(self.gpus, self.hops, ahead, back, m, self.offsets)
        return self._links[key]
