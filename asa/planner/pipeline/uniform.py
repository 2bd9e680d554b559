"""Stages that run all their components alike, priced as sums of arrays. The times are those of
:func:`asa.cost.planned.price_stage`. Memory is about the same, or more where neighbours share it. The first plans
consist of such stages: a component is priced once for each style, not once for each stage that contains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from asa.cost.memory.peak import peaks
from asa.cost.memory.together import repeated_bytes
from asa.cost.menu import PricedWays
from asa.cost.pipeline import StageTimes
from asa.cost.pricing import Pricer, Way
from asa.cost.step import BoundaryCost, side_by_side
from asa.ir.cluster import Overlap
from asa.planner import clock
from asa.planner.stage.problem import all_ahead


@dataclass
class Uniform:
    """All components in one style: their configurations (``ways``) and costs (``priced``, an entry for each
    component)."""

    pricer: Pricer
    overlap: Overlap
    ways: Sequence[Way]
    priced: PricedWays

    @cached_property
    def _between(self) -> Any:
        """Costs of the boundary in front of each component inside a stage: rows of :func:`_numbers` x component."""
        costs, known, fronts = np.zeros((6, len(self.ways))), dict[object, Any](), self.pricer.states.fronts
        for i in range(1, len(self.ways)):
            source, target = self.ways[i - 1].layout, self.ways[i].layout
            if source == target and target.data == target.width:
                continue  # every rank has whole samples of its own on both sides
            key = (fronts[i], id(source), id(target))
            if key not in known:
                known[key] = _numbers(self.pricer.edges.boundary(i, source, target))
            costs[:, i] = known[key]
        return costs

    def mixed(self, other: Uniform, which: Sequence[int]) -> Uniform:
        """A copy in which the components ``which`` run in another style of the same layout."""
        mask = np.zeros(len(self.ways), dtype=bool)
        mask[list(which)] = True
        priced = PricedWays(
            **{name: np.where(mask, vars(other.priced)[name], x) for name, x in vars(self.priced).items()}
        )
        mixture = Uniform(
            self.pricer, self.overlap,
            [b if k else a for a, b, k in zip(self.ways, other.ways, mask.tolist(), strict=True)], priced,
        )  # fmt: skip
        mixture.__dict__["_between"] = self._between
        return mixture

    def recomputed(
        self, full: Uniform, start: int, stop: int, in_flight: int, room: float, needed: Sequence[int] = ()
    ) -> tuple[StageTimes, Uniform] | None:
        """Times and configuration of a stage in which as few components are ``full``, recomputed, as fit into ``room``
        bytes, those first that cost least time for the bytes they free; None where not even all fit. ``needed``: those
        that are recomputed in any case."""
        stage = slice(start, stop)
        spared = self.priced.activations[stage] - full.priced.activations[stage]
        longer = full.priced.backward[stage] - self.priced.backward[stage]
        able = np.array([w.checkpoint for w in full.ways[stage]], dtype=bool) & (spared > 0)
        rank = np.where(able, longer / np.maximum(1.0, spared), np.inf)
        rank[[i - start for i in needed]] = -np.inf
        order: Any = np.argsort(rank, kind="stable")[: int((rank < np.inf).sum())]
        low, high, count, best = max(1, len(needed)), len(order), len(order), None
        while low <= high:  # bisection; all recomputed comes first: if that does not fit, nothing does
            mixed = self.mixed(full, [start + int(i) for i in order[:count]])
            times, peak = mixed.stage(start, stop, in_flight)
            if peak <= room:
                best, high = (times, mixed), count - 1
            elif best is None:
                return None
            else:
                low = count + 1
            count = (low + high) // 2
        return best

    def stage(self, start: int, stop: int, in_flight: int) -> tuple[StageTimes, float]:
        """Times in seconds and peak bytes of a rank, for a stage of the components ``start`` to ``stop - 1``."""
        clock.count("stage")
        x, stage = self.priced, slice(start, stop)
        inlet = self.pricer.edges.inlet(start, self.ways[start].layout)
        outlet = _numbers(self.pricer.edges.outlet(stop - 1, self.ways[stop - 1].layout))
        entries = self._between[:, stage].copy()
        entries[:, 0] = _numbers(inlet)
        forward, backward, wrapper = (entries[:3].sum(axis=1) + outlet[:3]).tolist()
        forward += float(x.forward[stage].sum())
        backward += float(x.backward[stage].sum())
        sync = float((x.prompt[stage] + x.late[stage]).sum())
        sp, sc = self.overlap.compute_slowdown, self.overlap.communication_slowdown
        longer, overlapped = float(x.bucket[stage].sum()), sc * sync
        if self.overlap.saving >= 0:
            release = np.maximum(np.array(self.pricer.states.released[stage]) - start, 0)
            overlapped = side_by_side(x.window[stage], x.prompt[stage], x.late[stage], release, sp, sc)
            longer += overlapped * (1 - 1 / sp)
        once = float(x.once[stage].sum()) + sync + wrapper - self.overlap.saving * overlapped - longer
        times = StageTimes(forward=forward, backward=backward, last_backward_extra=longer, after=once)
        repeated = repeated_bytes(self.pricer, start, self.ways[start:stop])
        return times, self._peak(start, stop, entries[3:], outlet[3:], in_flight) - repeated

    def _peak(self, start: int, stop: int, entries: Any, outlet: Any, in_flight: int) -> float:
        """Peak bytes of a rank as by :mod:`asa.cost.memory.together`, before what neighbours share is subtracted."""
        x, stage = self.priced, slice(start, stop)
        activations, transient = x.activations[stage] + entries[1], x.transient[stage] + entries[2]
        activations[-1] += outlet[1]
        transient[-1] += outlet[2]
        state = x.state[stage].copy()
        state[-1] += outlet[0]

        def highest(state: Any, gradients: Any, flying: int) -> float:
            return float((flying - 1) * activations.sum() + peaks(state, activations, gradients, transient).max())

        if not all_ahead(self.pricer.num_microbatches, in_flight):
            return highest(state + entries[0], x.gradients[stage], in_flight)
        added = x.added[stage]
        inlet = entries[0] * (np.arange(len(state)) + start == 0)
        first = highest(state + inlet - added, added, in_flight)
        return max(first, highest(state + entries[0], x.gradients[stage], in_flight - 1))


def _numbers(cost: BoundaryCost) -> Any:
    memory = cost.footprint
    times = (cost.forward_s, cost.backward_s, cost.wrapper_s)
    return np.array((*times, memory.state, memory.activations, memory.transient))
