"""Plans with one number of microbatches and one schedule, and a lower bound on all of them that rises in steps.

The first bound of a case is the dual bound of its stages (Lagrangian prices), with the memory limit where it may bind.
Then single combinations of cuts and widths are examined, those with the lowest bounds first, by the subclass
:class:`asa.planner.pipeline.open_list.OpenList`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from asa.cost.pipeline import lead
from asa.interfaces.schedule import Schedule
from asa.planner import clock
from asa.planner.pipeline.bounds import Frame, Keys, StageLinks, Tables
from asa.planner.pipeline.floors import Paced
from asa.planner.pipeline.stage_cache import StageCache
from asa.planner.pipeline.staged import Skeleton, value_of
from asa.planner.stage.lattice import INF, Table
from asa.planner.stage.pareto import OutOfTimeError
from asa.planner.stage.problem import Choice

_PLACE_S = 7e-8
"""CPU seconds of a frame for each stage (start x stop) at each offset."""
_ALIKE, _WITHOUT = 0.998, 0.2
"""Share of the first bound with the memory limit that the one without it has where memory hardly binds; and, elsewhere,
the most work without the limit as a share of that with it."""
_NOTHING = Table(steady=None, forward=None, whole=None, single=None)


class Case(ABC):
    """Plans with any of the numbers of stages in ``stages``; ``bound`` (ms) holds for all of them. ``offer(ms,
    skeleton, choices)`` is called with each plan and returns whether it is the new incumbent."""

    value = INF

    def __init__(
        self, cache: StageCache, m: int, name: str, schedule: Schedule, stages: Sequence[int],
        offer: Callable[[float, Skeleton, tuple[Choice, ...]], bool], bound: float = 0.0,
        paced: Paced | None = None,
    ) -> None:  # fmt: skip
        self.cache, self.m, self.name, self.schedule, self.stages = cache, m, name, schedule, tuple(stages)
        self.most, each = max(stages), range(1, max(stages) + 1)
        self._paced, self._bound = paced, bound
        self.offer, self.level = offer, 0
        self.in_flight = {r: min(schedule.in_flight(p - r, p, m) for p in stages if p >= r) for r in each}
        self._leads = {r: lead(schedule, [(p - r, p) for p in self.stages if p >= r], m) for r in each}
        """Warm-up microbatches by number of stages to the last; None where the schedule waits for no return."""
        self.widths = tuple(w for w in cache.offsets if w < cache.gpus)
        self.keys = Keys(self.widths)
        able = [w for w in cache.offsets if w < cache.gpus and cache.pipelines.compute(w, m) is not None]
        self.tables: dict[tuple[int, int], Table | None] = {(w, r): _NOTHING for w in able for r in each}
        self.links: StageLinks | None = None
        every = np.arange(cache.n + 1)[None, :] > np.arange(cache.n)[:, None]
        self._usable = {(w, r): every for w in self.widths for r in each}
        self.stuck = False
        self._tight = False
        self.priced = 0.0
        """The first bound of this case in ms, by prices of memory."""
        self._unlimited: Case | None = None
        """A case of these plans without the memory limit, whose bound holds with it, too."""
        self._with_s = self._without_s = 0.0
        """Seconds of work with the memory limit, and without it."""

    @property
    def bound(self) -> float:
        """Lower bound in ms on the step of all plans of this case."""
        return self._bound if self._paced is None else max(self._bound, self._paced.bound)

    def framed(self) -> Frame:
        """Lower bounds from the current tables."""
        assert self.links is not None
        return self._frame(self.keys, self.links, lambda w, r: self.tables.get((w, r)))

    def _frame(self, keys: Keys, links: StageLinks, tables: Tables) -> Frame:
        def usable(w: int, r: int) -> Any:
            return self._usable[w, r]

        return Frame(self.cache.n, self.m, keys, links, tables, self.most, self._leads.__getitem__, usable)

    def step(self, best: float, ends: float) -> None:
        """Raise the bound, first that of all cases with ``m``. Plans of ``best`` ms or more do not count."""
        if self._paced is not None and not self._paced.stuck and self._paced.bound < best:
            self._paced.step(best, ends)
            return
        if self.level == 0:
            # the time of a frame, including the test of which stages may be in a plan at all
            offsets = sum(len(self.cache.offsets[w]) for w in self.widths)
            ends -= _PLACE_S * self.most * self.cache.n**2 * offsets
            if clock.now() > ends:
                self.stuck = True
                return
            try:
                self._by_prices(best, ends)
            except OutOfTimeError:
                return
        elif not self._without_limit(best, ends):
            began = clock.now()
            with suppress(OutOfTimeError):
                self._by_plans(best, ends)
            self._with_s += clock.now() - began
        self.level += 1

    def _without_limit(self, best: float, ends: float) -> bool:
        """Whether a step was done without the memory limit. Such steps take less time. Where prices of memory hardly
        raise the first bound, they are done until the fastest plan does not fit; elsewhere they get a share of the
        work."""
        case, began = self._unlimited, clock.now()
        if case is None or case.ended:
            return False
        if case.level and case.priced < _ALIKE * self.priced:
            ends = min(ends, began + _WITHOUT * self._with_s - self._without_s)
        if ends <= began:
            return False
        case.step(best, ends)
        self._without_s += clock.now() - began
        self._bound = max(self._bound, case.bound)
        return True

    @property
    def ended(self) -> bool:
        """Whether the bound rises no further, because the fastest plan does not fit."""
        return self.stuck

    def _alive(self, frame: Frame, best: float) -> None:
        """Raise the bound to that of ``frame``, and drop the widths that are in no plan below ``best``."""
        self._bound = max(self.bound, frame.value(self.stages))
        if self.bound >= best:
            return
        if not len(frame.front_late):
            frame.look_ahead(self.stages)
        alive = []
        for w in self.widths:
            is_used = False
            for r in range(1, self.most + 1):
                mask = self._usable[w, r] = frame.through(w, r) < best
                if mask.any():
                    is_used = True
                else:
                    self.tables[w, r] = None
            if is_used:
                alive.append(w)
        self.widths = tuple(alive)
        self.most = max((r for r in range(1, self.most + 1) if any(self._usable[w, r].any() for w in alive)), default=1)
        self.stages = tuple(p for p in self.stages if p <= self.most)

    def _by_prices(self, best: float, ends: float) -> None:
        """Bound by the prices of all stages, with the memory limit where it may bind."""
        for w in self.widths:
            if clock.now() > ends:
                raise OutOfTimeError
            self.cache.numbers(w, self.m)
        self._tight = any(self.cache.tight(w, self.m, max(self.in_flight.values())) for w in self.widths)
        self.keys = Keys(self.widths)
        self.links = self.cache.links(self.m, self.keys, ends=ends)
        self._priced(ends)
        frame = self.framed()
        self.priced = frame.value(self.stages)
        self._alive(frame, best)
        if self._tight and self.bound < best:
            self._unlimited = type(self)(
                self.cache.unlimited, self.m, self.name, self.schedule, self.stages, self.offer, self._bound
            )

    def _priced(self, ends: float) -> None:
        """Compute the tables of bounds, with the memory limit where it may bind."""
        for w in self.widths:
            if clock.now() > ends:
                raise OutOfTimeError
            positions = [r for r in range(1, self.most + 1) if self.tables.get((w, r)) is not None]
            limited = self.cache.limited(w, self.m, [self.in_flight[r] for r in positions]) if self._tight else {}
            for r in positions:
                self.tables[w, r] = limited[self.in_flight[r]] if self._tight else self.cache.relaxed(w, self.m)

    def propose(
        self, starts: tuple[int, ...], widths: tuple[int, ...], choices: tuple[Choice, ...]
    ) -> tuple[float, bool]:  # fmt: skip
        """Offer a plan as incumbent; returns its time in ms and whether it was accepted."""
        skeleton = Skeleton(starts=starts, widths=widths, num_microbatches=self.m, schedule=self.name)
        value = value_of(self.cache.pipelines, skeleton, choices)
        return value, self.offer(value, skeleton, choices)

    @abstractmethod
    def _by_plans(self, best: float, ends: float) -> None:
        """Raise the bound by single combinations of cuts and widths."""
