"""Stages that run all their components alike, as sums of arrays: what :func:`asa.cost.planned.price_stage` says of
each; of memory about as much, or more where neighbours share.

First plans are made of such stages, of thousands of them: a component is priced once for each style, and not for each
stage that it is part of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from asa.cost.menu import PricedWays
from asa.cost.pipeline import StageTimes
from asa.cost.pricing import Pricer, Way
from asa.cost.step import BoundaryCost, hidden_from
from asa.ir.cluster import Overlap
from asa.planner.stage.problem import all_ahead


@dataclass
class Uniform:
    """All components in one style: ``ways``, and what they cost (``priced``, an entry a component)."""

    pricer: Pricer
    overlap: Overlap
    ways: Sequence[Way]
    priced: PricedWays

    @cached_property
    def _between(self) -> Any:
        """What lies in front of each component inside a stage: column x component, as in :func:`_numbers`."""
        found = np.zeros((6, len(self.ways)))
        for i in range(1, len(self.ways)):
            before, after = self.ways[i - 1].layout, self.ways[i].layout
            if before == after and after.data == after.width:
                continue  # every rank has its own samples, whole, on either side
            found[:, i] = _numbers(self.pricer.edges.boundary(i, before, after))
        return found

    def mixed(self, other: Uniform, which: Sequence[int]) -> Uniform:
        """With some components in another style of the same layout."""
        mask = np.zeros(len(self.ways), dtype=bool)
        mask[list(which)] = True
        priced = PricedWays(
            **{name: np.where(mask, vars(other.priced)[name], x) for name, x in vars(self.priced).items()}
        )
        found = Uniform(
            self.pricer, self.overlap,
            [b if k else a for a, b, k in zip(self.ways, other.ways, mask.tolist(), strict=True)], priced,
        )  # fmt: skip
        found.__dict__["_between"] = self._between
        return found

    def stage(self, start: int, stop: int, in_flight: int) -> tuple[StageTimes, float]:
        """Components ``start`` to ``stop - 1``: seconds as the clock sees them, and the peak of a rank in bytes."""
        x, own = self.priced, slice(start, stop)
        inlet = self.pricer.edges.inlet(start, self.ways[start].layout)
        outlet = _numbers(self.pricer.edges.outlet(stop - 1, self.ways[stop - 1].layout))
        entries = self._between[:, own].copy()
        entries[:, 0] = _numbers(inlet)
        forward, backward, wrapper = (entries[:3].sum(axis=1) + outlet[:3]).tolist()
        forward += float(x.forward[own].sum())
        backward += float(x.backward[own].sum())
        sync = float((x.prompt[own] + x.late[own]).sum())
        both = self._overlapped(start, stop) if self.overlap.saving >= 0 else self.overlap.communication_slowdown * sync
        longer = both * (1 - 1 / self.overlap.compute_slowdown) if self.overlap.saving >= 0 else 0.0
        longer += float(x.bucket[own].sum())
        after = float(x.once[own].sum()) + sync + wrapper - self.overlap.saving * both - longer
        times = StageTimes(forward=forward, backward=backward, last_backward_extra=longer, after=after)
        return times, self._peak(start, stop, entries[3:], outlet[3:], in_flight)

    def _overlapped(self, start: int, stop: int) -> float:
        """:func:`asa.cost.step.side_by_side` of a stage."""
        x, own = self.priced, slice(start, stop)
        sp, sc = self.overlap.compute_slowdown, self.overlap.communication_slowdown
        released = x.prompt[own].copy()
        at = np.maximum(np.array(self.pricer.releases[own]) - start, 0)
        np.add.at(released, at, x.late[own])
        return max(0.0, float(hidden_from(x.window[own], released, sp, sc).min()))

    def _peak(self, start: int, stop: int, entries: Any, outlet: Any, in_flight: int) -> float:
        """What :mod:`asa.cost.memory.together` says of a stage, but for what neighbours share."""
        x, own = self.priced, slice(start, stop)
        activations, transient = x.activations[own] + entries[1], x.transient[own] + entries[2]
        activations[-1] += outlet[1]
        transient[-1] += outlet[2]
        held, state = activations.cumsum() + transient, float(x.state[own].sum() + outlet[0])

        def most(gradients: Any, between: float, flying: int) -> float:
            behind = gradients[::-1].cumsum()[::-1]
            return between + (flying - 1) * float(activations.sum()) + float((held + behind).max())

        if not all_ahead(self.pricer.num_microbatches, in_flight):
            return state + most(x.gradients[own], float(entries[0].sum()), in_flight)
        added = x.added[own]
        first = most(added, float(entries[0, 0]) * (start == 0), in_flight) - float(added.sum())
        return state + max(first, most(x.gradients[own], float(entries[0].sum()), in_flight - 1))


def _numbers(cost: BoundaryCost) -> Any:
    held = cost.footprint
    times = (cost.forward_s, cost.backward_s, cost.wrapper_s)
    return np.array((*times, held.state, held.activations, held.transient))
