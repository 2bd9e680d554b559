"""Bytes that a run of neighbours, wrapped as one unit, holds beyond the sum over its components.

Solvers add up the least that each component holds, whatever its neighbours run. Which neighbours are wrapped together
determines what is held beyond that (:mod:`asa.cost.memory.together`). If a choice does not fit for that reason, the ILP
gets charges for its runs: every choice with such a run, over the same components, holds that much more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asa.cost.memory.together import wrapped, wrapped_memory
from asa.cost.way import Way
from asa.ir.units import GIB
from asa.planner.space.candidate import Prices
from asa.planner.stage.formulate import Formulation
from asa.planner.stage.problem import Choice


@dataclass(frozen=True)
class RunCharge:
    """GiB that a stage holds beyond the sum in the backward of each component (``more``). It applies if component
    ``start + i`` has one of the configurations ``members[i]``, and the components before and after have none of
    ``front`` and ``behind``."""

    start: int
    members: tuple[frozenset[int], ...]
    front: frozenset[int]
    behind: frozenset[int]
    more: tuple[float, ...]


class Runs:
    """Charges for the runs of a single stage's formulation. Each is computed once."""

    def __init__(self, prices: Prices, formulation: Formulation) -> None:
        self._formulation, self._chain = formulation, formulation.chain
        self._pricer = prices.pricer(self._chain.width, self._chain.num_microbatches)
        self._n = len(self._chain.names)
        self._even = not prices.space.cluster.unequal  # unequal ranks are priced one by one
        self._families = set[tuple[object, ...]]()

    def of(self, choice: Choice) -> list[RunCharge]:
        """A charge for each run of the choice that holds more than the sum. If that is state, also one for each run of
        other components with the same kind of state."""
        ways = self._formulation.picked(0, choice)
        if not self._even or ways[0].layout.weights:
            return []
        charges, alike = list[RunCharge](), list(wrapped(ways))
        for run in alike:
            run_ways, first = ways[run.start : run.stop], ways[run.start]
            if not self._pricer.joint(first) or len({(w.tensor, w.offload) for w in run_ways}) > 1:
                continue
            more = self._excess(run, choice, run_ways)
            if max(more) <= 0:
                continue
            charges.append(self._charge(run, first, more))
            family = (first.layout, first.data, first.tensor, first.offload)
            if min(more) > 0 and family not in self._families:
                self._families.add(family)
                charges += self._family(first, but=run)
        return charges

    def _charge(self, run: range, way: Way, more: Sequence[float]) -> RunCharge:
        return RunCharge(
            run.start,
            tuple(self._alike(i, way, fully=True) for i in run),
            self._alike(run.start - 1, way, fully=False),
            self._alike(run.stop, way, fully=False),
            tuple(max(0.0, x) for x in more),
        )

    def _alike(self, i: int, way: Way, *, fully: bool) -> frozenset[int]:
        """Configurations of component ``i`` that are wrapped with one that runs ``way``; with ``fully``, only those
        that are also split alike."""
        if not 0 <= i < self._n:
            return frozenset()
        return frozenset(
            c for c, w in enumerate(self._formulation.ways[i])
            if (w.layout, w.data) == (way.layout, way.data)
            and (not fully or (w.tensor, w.offload) == (way.tensor, way.offload))
        )  # fmt: skip

    def _excess(self, run: range, choice: Choice, ways: Sequence[Way]) -> list[float]:
        """GiB beyond the sum in the backward of each component, for a run of the choice."""
        chain, rows = self._chain, self._formulation.ways
        is_whole = len(run) == self._n
        unit = wrapped_memory(self._pricer, run, ways, whole=is_whole)
        state = sum(p.state / GIB - chain.configs[i][choice[i]].state for i, p in zip(run, unit.parts, strict=True))
        state -= unit.repeated / GIB
        more = [state + (unit.remaining / GIB if k < run.start else 0.0) for k in range(self._n)]
        for k in run:
            excess = []
            for c in self._alike(k, ways[0], fully=True):
                run_ways = [*ways[: k - run.start], rows[k][c], *ways[k - run.start + 1 :]]
                part = wrapped_memory(self._pricer, run, run_ways, whole=is_whole).parts[k - run.start]
                excess.append(part.transient / GIB - chain.configs[k][c].transient)
            more[k] += max(0.0, min(excess))
        return more

    def _family(self, way: Way, but: range) -> list[RunCharge]:
        """Charges for the state of all runs that keep it like ``way``."""
        charges = list[RunCharge]()
        extra = [self._extra(i, way) for i in range(self._n)]
        for a in range(self._n):
            for b in range(a + 1, self._n + 1):
                if extra[b - 1] is None:
                    break
                if range(a, b) != but:
                    state = sum(x for x in extra[a:b] if x) - self._pricer.states.repeated(range(a, b), way) / GIB
                    if state > 0:
                        charges.append(self._charge(range(a, b), way, [state] * self._n))
        return charges

    def _extra(self, i: int, way: Way) -> float | None:
        """GiB of state of component ``i`` by itself beyond its least; None if it has no such way."""
        rows = self._formulation.ways[i]
        which = self._alike(i, way, fully=True)
        if not which:
            return None
        return min(self._pricer.cost(i, rows[c]).footprint.state / GIB - self._chain.configs[i][c].state for c in which)
