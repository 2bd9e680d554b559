"""Plans of a single stage: widths and microbatches one by one, each with a bound that rises in steps.

First compute alone bounds a (width, microbatches), then synchronisation of every component by itself, then the optimum
*without* the memory limit, by the label program; where that does not fit, the label program with the limit, for as long
as it takes. Microbatches double only while memory binds, that is while the fastest plan without a limit does not fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from asa.ir.units import GIB
from asa.planner import dp, exhaustive
from asa.planner.candidate import Prices
from asa.planner.formulate import Formulation, formulate
from asa.planner.problem import MS, Problem, Solution
from asa.planner.request import SolverName
from asa.planner.space import Allowed, widths

TOLERANCE_GIB = 1e-5
"""By how much a solver may overstep the memory limit (10 KiB)."""
_FIRST_S = 0.15
"""For the label program under a memory limit, at first; four times as long each time it comes back."""
_LONG_S, _FORMULATED = 0.2, 3.0
"""Pricing components one by one for so long says that formulating takes so many times as long: thousands of them."""
_HELD = ("state", "activations", "gradients", "transient")
_NOTHING = Solution(choice=None, value=float("inf"), bound=float("inf"), solver="dp")


class Place:
    """One (width, microbatches): its formulation, and the optimum without the memory limit. Without a formulation,
    nothing fits."""

    def __init__(self, formulation: Formulation | None, time_limit_s: float) -> None:
        self._formulation = formulation
        self.free, self.fits = _NOTHING, False
        if formulation is None:
            return
        self.problem = formulation.problem
        limit = self.problem.capacity + TOLERANCE_GIB
        if dp.memory_floor(self.problem) <= limit:
            self.free = dp.solve(self.problem.without_memory_limit(), time_limit_s=time_limit_s)
        self.fits = self.free.choice is not None and exhaustive.peak(self.problem, self.free.choice) <= limit

    @property
    def formulation(self) -> Formulation:
        """Of a place where something fits."""
        assert self._formulation is not None
        return self._formulation

    @property
    def asked(self) -> Problem:
        """The problem to solve: without the limit where the fastest plan fits anyway."""
        return self.problem.without_memory_limit() if self.fits else self.problem


class Places:
    """All (width, microbatches) of a space, formulated when first asked for."""

    def __init__(
        self, prices: Prices, allowed: Allowed, ends: float, among: tuple[int, ...] | None = None
    ) -> None:  # fmt: skip
        self._prices, self._allowed, self._ends = prices, allowed, ends
        self._among = widths(prices.space.request.gpus) if among is None else among
        self._known: dict[tuple[int, int], Place | None] = {}
        self._apart: dict[int, tuple[float, float]] = {}

    def bounds(self) -> Iterator[tuple[float, int, int]]:
        """(ms of compute alone, width, microbatches) of each that could run."""
        request = self._prices.space.request
        for w in (w for w in self._among if self._prices.space.capacity(w) > 0):
            for m in (2**k for k in range(request.global_batch.bit_length())):
                alone = self._prices.compute_alone(w, m) * MS
                if alone < float("inf"):
                    yield alone, w, m

    def apart(self, width: int, num_microbatches: int, alone_ms: float) -> float:
        """A bound in ms that also counts gradient synchronisation, every component by itself.

        Synchronisation hides behind backward at most, which is a part of one microbatch's computation.
        """
        if width == 1:
            return alone_ms
        if width not in self._apart:
            self._apart[width] = self._synchronised(width)
        whole, once = self._apart[width]
        m = num_microbatches
        return whole if m == 1 else max(alone_ms, alone_ms * (1 - 1 / m) + once)

    def _synchronised(self, width: int) -> tuple[float, float]:
        """In ms: a bound on a step of one microbatch, and on what comes once per step."""
        space, pricer = self._prices.space, self._prices.pricer(width, 1)
        hidden = max(0.0, space.cluster.overlap.saving) * space.cluster.overlap.compute_slowdown
        whole = once = 0.0
        for i in range(len(space.profile.graph)):
            ways = (w for w in space.ways(i, width, 1, self._allowed) if not w.checkpoint)
            costs = [pricer.component(i, way) for way in ways]
            late = [c.sync_s + c.update_s + c.update_communication_s for c in costs]
            whole += min(
                (x + c.compute_s + c.blocking_s - hidden * c.window_s for x, c in zip(late, costs, strict=True)),
                default=float("inf"),
            )
            once += min(late, default=float("inf"))
        return whole * MS, once * MS

    def get(self, width: int, num_microbatches: int) -> Place | None:
        """The place, or None where it is not in the space: it cannot run, or fewer microbatches are enough."""
        key = (width, num_microbatches)
        if key not in self._known:
            self._known[key] = None
            fewer = self.get(width, num_microbatches // 2) if num_microbatches > 1 else None
            if num_microbatches == 1 or (fewer is not None and not fewer.fits):
                self._known[key] = self._made(width, num_microbatches)
        return self._known[key]

    def _made(self, width: int, num_microbatches: int) -> Place | None:
        if self._floor(width, num_microbatches) > self._prices.space.capacity(width) + TOLERANCE_GIB * GIB:
            return Place(None, 0.0)
        formulation = formulate(self._prices, width, num_microbatches, self._allowed)
        return None if formulation is None else Place(formulation, max(0.1, self._ends - time.monotonic()))

    def _floor(self, width: int, num_microbatches: int) -> float:
        """Bytes below which no choice peaks, before all else is priced: every component at its leanest in each respect,
        whether or not at once. Infinite where one cannot run."""
        space, pricer = self._prices.space, self._prices.pricer(width, num_microbatches)
        rows = []
        for i in range(len(space.profile.graph)):
            ways = space.ways(i, width, num_microbatches, self._allowed)
            held = [pricer.component(i, way).footprint for way in ways]
            if not held:
                return 0.0  # not in the space at all
            rows.append(tuple(min(getattr(f, name) for f in held) for name in _HELD))
        state, behind, before, found = sum(r[0] for r in rows), sum(r[2] for r in rows), 0.0, 0.0
        for _, activations, gradients, transient in rows:
            before += activations
            found = max(found, state + before + behind + transient)
            behind -= gradients
        return found


class Single:
    """All plans of one stage of that width with so many microbatches, for the queue of :mod:`asa.planner.joint`.

    ``bound`` holds for all of them; ``solution`` is the best one so far. ``stuck``: nothing more can be proved.
    """

    def __init__(self, places: Places, alone_ms: float, width: int, num_microbatches: int, solver: SolverName) -> None:
        self._places, self.width, self.num_microbatches, self._solver = places, width, num_microbatches, solver
        self.bound, self.level, self.stuck = alone_ms, 0, False
        self.place: Place | None = None
        self.solution = _NOTHING
        self._took = 0.0

    @property
    def value(self) -> float:
        """Ms of the best plan so far."""
        return self.solution.value

    def step(self, best: float, ends: float) -> None:
        """Raise the bound. Plans from ``best`` on are of no interest."""
        self.level += 1
        self.stuck = False
        began = time.monotonic()
        if self.level == 1:
            self._raise(self._places.apart(self.width, self.num_microbatches, self.bound))
            self._took = time.monotonic() - began
        elif self.level == 2 and self._took > _LONG_S and began + _FORMULATED * self._took > ends:
            self.level, self.stuck = 1, True  # would not be done in time, in this search
        elif self.level == 2:
            self._look()
        else:
            self._solve(best, ends)

    def _raise(self, bound: float) -> None:
        self.bound = max(self.bound, bound)

    def _look(self) -> None:
        """Without the memory limit."""
        place = self.place = self._places.get(self.width, self.num_microbatches)
        if place is None:
            self.bound = float("inf")
            return
        self._raise(place.free.bound)
        if place.fits and self._solver != "exhaustive":
            self.solution = place.free

    def _solve(self, best: float, ends: float) -> None:
        """With it, as far as it gets. A plan found is put back as the limit of what is looked for."""
        assert self.place is not None
        if self._solver == "exhaustive":
            self._take(exhaustive.solve(self.place.asked))
            return
        if self.place.fits:  # solved as far as it can be, already
            self.stuck = not self.place.free.proved
            return
        slice_s = min(max(0.05, ends - time.monotonic()), _FIRST_S * 4 ** (self.level - 3))
        cutoff = min(best, self.value)
        began = time.monotonic()
        found = dp.solve(self.place.problem, time_limit_s=slice_s, cutoff=cutoff)
        self._take(found)
        if self.bound < min(best, self.value) * (1 - 1e-9) and time.monotonic() - began < 0.9 * slice_s:
            self.stuck = True  # time was left, and yet there is no proof

    def _take(self, found: Solution) -> None:
        self._raise(found.bound)
        if found.value < self.value:
            self.solution = replace(found, bound=min(found.bound, found.value))
        if self.value <= self.bound:
            self.bound = self.value
            self.solution = replace(self.solution, bound=self.value)


def singles(places: Places, solver: SolverName) -> list[Single]:
    """One for every width and number of microbatches that could run."""
    return [Single(places, alone, w, m, solver) for alone, w, m in places.bounds()]
