"""Stages by width and number of microbatches, formulated on demand, and the results known for each."""

from __future__ import annotations

from collections.abc import Iterator

from asa.ir.units import GIB
from asa.planner import clock
from asa.planner.budget import USUAL, Budget
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Allowed, widths
from asa.planner.stage.floor import Floor, floor
from asa.planner.stage.formulate import formulate
from asa.planner.stage.formulated import FormulatedStage
from asa.planner.stage.problem import MS
from asa.planner.stage.runs import Runs
from asa.planner.stage.shares import DividedBounds


class StageLookup:
    """All widths and numbers of microbatches of a space, formulated on demand."""

    def __init__(
        self, prices: Prices, allowed: Allowed, among: tuple[int, ...] | None = None, budget: Budget = USUAL,
        divided: DividedBounds | None = None,
    ) -> None:  # fmt: skip
        self._prices, self._allowed, self.budget, self._divided = prices, allowed, budget, divided
        self._among = widths(prices.space.request.gpus) if among is None else among
        self._stages: dict[tuple[object, ...], FormulatedStage | None] = {}
        self._floors: dict[tuple[int, int], Floor] = {}
        self.pricing_s: dict[tuple[int, int], float] = {}
        """CPU seconds that :meth:`floor` took, by width and number of microbatches."""

    def weights(self, width: int) -> tuple[int, ...]:
        """Batch weights of a stage of that width; empty for equal shares."""
        return self._prices.space.weights.get(width, ())

    def bounds(self) -> Iterator[tuple[float, int, int]]:
        """Ms of compute alone, width and number of microbatches of each stage that can run."""
        self._prices.prepare(self._among)
        for w in (w for w in self._among if self._prices.space.capacity(w) > 0):
            for m in self._prices.space.microbatches():
                if self._divided is not None and self.weights(w):  # as good as a bound, and the same for all weights
                    compute_ms = self._divided.least(w, m)
                else:
                    compute_ms = m * sum(self._prices.compute(w, m)) * MS
                if compute_ms < float("inf"):
                    yield compute_ms, w, m

    @property
    def fixed_microbatches(self) -> bool:
        """Whether the request fixes the number of microbatches."""
        return self._prices.space.request.microbatches is not None

    def floor(self, width: int, num_microbatches: int) -> Floor:
        """Lower bounds on a stage before it is formulated."""
        key = (width, num_microbatches)
        if key not in self._floors:
            began = clock.now()
            self._floors[key] = floor(self._prices, *key, self._allowed)
            self.pricing_s[key] = clock.now() - began
        return self._floors[key]

    def independent_bound(self, width: int, num_microbatches: int, compute_ms: float) -> float:
        """Lower bound in ms from each component alone, with gradient synchronisation and memory. With several
        microbatches, only once-per-step work is added to compute; it is the same as with one microbatch
        where the stage has the same layouts.

        Synchronisation is hidden at most behind the backward of one microbatch and compute on gradients: neither counts
        twice.
        """
        m, layouts = num_microbatches, self._prices.space.layouts
        if m == 1:
            return self.floor(width, 1).whole
        once = self.floor(width, 1 if layouts(width, 1) == layouts(width, m) else m).once
        return max(compute_ms, compute_ms * (1 - 1 / m) + (once if once < float("inf") else 0.0))

    def divided_bound(self, width: int, num_microbatches: int) -> float:
        """Lower bound in ms where the stage has devices of several speeds, and 0 elsewhere."""
        return 0.0 if self._divided is None else self._divided.given(width, num_microbatches, self.weights(width))

    def get(self, width: int, num_microbatches: int, *, wrapped: bool = False) -> FormulatedStage | None:
        """The formulated stage; None where some component cannot run in it. ``wrapped``: with all configurations that
        may hold less where neighbours run alike."""
        key = (width, num_microbatches, wrapped)
        if key not in self._stages:
            self._stages[key] = self._formulate(*key)
        return self._stages[key]

    def runs(self, stage: FormulatedStage) -> Runs:
        """Memory of runs of equal choices beyond the sum over components."""
        return Runs(self._prices, stage.formulation)

    def is_excluded(self, width: int, num_microbatches: int, cutoff: float, ends: float) -> bool | None:
        """Whether the fastest choice with fewer microbatches fits, which excludes this number; None where that is
        open."""
        if num_microbatches == 1 or self.fixed_microbatches:
            return False
        fewer = self.get(width, num_microbatches // 2)
        if fewer is None:
            return True
        if not fewer.all_fit:
            fewer.decide(cutoff, ends)
        if fewer.all_fit or fewer.fits:
            return True
        excluded = self.is_excluded(width, num_microbatches // 2, cutoff, ends)
        return excluded if excluded or fewer.decided else None

    def possible(self, width: int, floor: Floor) -> bool:
        """Whether any choice may fit."""
        return floor.memory <= self._prices.space.capacity(width) / GIB

    def _formulate(self, width: int, num_microbatches: int, wrapped: bool) -> FormulatedStage | None:
        floor = self.floor(width, num_microbatches)
        if not self.possible(width, floor):
            return FormulatedStage(None)
        formulation = formulate(
            self._prices, width, num_microbatches, self._allowed, likely_tight=floor.may_bind, wrapped=wrapped
        )
        if formulation is None:
            return None
        return FormulatedStage(
            formulation, lambda choice: self._prices.fits(formulation.candidate(choice)), self.budget.effort.ilp_ways
        )
