"""Seconds of a training step of one stage, in closed form, with gradient communication overlapped with backward.

Backward runs from the last component to the first on the compute stream; the gradients of a component are handed to
one communication stream when its backward has ended (or that of the component which fills its bucket), and only in
the last microbatch. With b_l the backward time of component l, g_l its synchronisation, released after component
r_l <= l, and while both streams work compute slowed down by sp and communication by sc, both busy for tau seconds:

    step = all compute + all communication - saving * tau,      saving = 1/sc + 1/sp - 1
    tau  = min over k of   sp * sum_{l<k} b_l  +  sc * sum_{l: r_l>k} g_l

Exact for this process: let k begin the stretch in which the communication stream is busy to the end; what was
released before it ran wholly beside backward, and so does the backward behind it. With sp = sc = 1 it is the two-
machine flow shop. Where ``saving`` is negative, overlap is forced and not chosen: all synchronisation is charged as
overlapped, which is never too low. Blocking collectives lie outside the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asa.cost.memory.peak import Footprint
from asa.ir.cluster import Overlap
from asa.ir.codec import noun


@noun
class ComponentCost:
    """The cost of one component on one rank, in seconds (of the slowest rank) and bytes: numbers, or arrays with an
    entry for each way.

    Of one microbatch: ``forward_s`` and ``backward_s`` are compute, ``forward_communication_s`` and
    ``backward_communication_s`` what blocks in it. ``bucket_s`` is compute on gradients in the last microbatch, and
    what the update of another stage takes from this one. Beside ``covered_s`` of a backward the neighbour's weights are
    gathered, and gradients wait. Once per step: ``prompt_sync_s`` leaves when the last backward ends, ``late_sync_s``
    after the backward of component ``release``; the optimizer follows. ``prefetched_s`` is the time of gathers that is
    hidden beside the neighbours' compute. ``error_s`` is the standard error of a step's compute, ``link_error_s`` that
    of its communication.
    """

    num_microbatches: int
    forward_s: float
    backward_s: float
    forward_communication_s: float
    backward_communication_s: float
    bucket_s: float
    prompt_sync_s: float
    late_sync_s: float
    release: int
    update_s: float
    update_communication_s: float
    error_s: float
    link_error_s: float
    footprint: Footprint
    covered_s: float = 0.0
    prefetched_s: float = 0.0

    def released_at(self, release: int) -> ComponentCost:
        """A copy with another ``release``, made without checking every field again: it is needed for a thousand
        components of many plans."""
        found = object.__new__(ComponentCost)
        found.__dict__.update(self.__dict__, release=release)
        return found

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward of all microbatches."""
        return self.num_microbatches * (self.forward_s + self.backward_s) + self.bucket_s

    @property
    def blocking_s(self) -> float:
        """Communication inside the component that computation waits for, of all microbatches."""
        return self.num_microbatches * (self.forward_communication_s + self.backward_communication_s)

    @property
    def window_s(self) -> float:
        """Seconds of backward compute of the last microbatch, behind which other components' synchronisation can
        hide."""
        return self.backward_s + self.bucket_s - self.covered_s

    @property
    def sync_s(self) -> float:
        """Seconds of gradient synchronisation, whether it leaves at once or later."""
        return self.prompt_sync_s + self.late_sync_s


@noun
class BoundaryCost:
    """The boundary in front of one component: seconds of one microbatch, and once per step; bytes held."""

    num_microbatches: int
    forward_s: float
    backward_s: float
    wrapper_s: float
    link_error_s: float
    footprint: Footprint

    @property
    def blocking_s(self) -> float:
        """All of a step."""
        return self.num_microbatches * (self.forward_s + self.backward_s) + self.wrapper_s


@noun
class StepCost:
    """A step taken apart: ``compute_s + exposed_s + bubble_s == total_s``. ``compute_s`` includes the optimizer. For a
    pipeline the figures are those of the busiest stage, and ``bubble_s`` is what it waits for others."""

    total_s: float
    compute_s: float
    exposed_s: float
    hidden_s: float
    update_s: float
    overlap_s: float
    bubble_s: float = 0.0


def side_by_side(
    windows: Sequence[float], prompt: Sequence[float], late: Sequence[float], release: Sequence[int], sp: float,
    sc: float,
) -> float:  # fmt: skip
    """Seconds during which both streams work (tau of this module). ``windows``, ``prompt`` and ``late`` are seconds of
    each component; late synchronisation leaves after component ``release``."""
    leaving = np.array(prompt, dtype=float)
    np.add.at(leaving, list(release), late)
    return max(0.0, float(hidden_from(np.array(windows, dtype=float), leaving, sp, sc).min()))


def hidden_from(windows: Any, leaving: Any, sp: float, sc: float) -> Any:
    """Seconds of overlap if the communication stream were busy from each component on: tau is the least of them.
    ``windows`` are b_l, ``leaving`` the synchronisation that each component releases; arrays, component first."""
    behind = leaving.sum(axis=0) - leaving.cumsum(axis=0)
    return sp * (windows.cumsum(axis=0) - windows) + sc * behind


def step(components: Sequence[ComponentCost], boundaries: Sequence[BoundaryCost], overlap: Overlap) -> StepCost:
    """The cost of a step; ``boundaries[i]`` lies in front of component i, the last one behind the last component."""
    compute = sum(c.compute_s + c.update_s for c in components)
    sync = sum(c.sync_s for c in components)
    blocking = sum(c.blocking_s + c.update_communication_s for c in components) + sum(b.blocking_s for b in boundaries)
    if overlap.saving >= 0:
        both = side_by_side(
            [c.window_s for c in components], [c.prompt_sync_s for c in components],
            [c.late_sync_s for c in components], [c.release for c in components],
            overlap.compute_slowdown, overlap.communication_slowdown,
        )  # fmt: skip
    else:
        both = overlap.communication_slowdown * sync
    total = compute + sync + blocking - overlap.saving * both
    exposed = total - compute
    return StepCost(
        total_s=total,
        compute_s=compute,
        exposed_s=exposed,
        hidden_s=max(0.0, sync + blocking - exposed) + sum(c.prefetched_s for c in components),
        update_s=sum(c.update_s + c.update_communication_s for c in components),
        overlap_s=both,
    )
