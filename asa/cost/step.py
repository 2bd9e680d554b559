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

from asa.cost.memory.peak import Footprint
from asa.ir.cluster import Overlap
from asa.ir.codec import noun


@noun
class ComponentCost:
    """One component on one rank, in seconds (of the slowest rank) and bytes.

    ``forward_s`` and ``backward_s`` are compute of one microbatch, ``forward_communication_s`` and
    ``backward_communication_s`` what blocks in it; ``bucket_s`` is compute on gradients in the last microbatch, and
    what the update of a stage takes from those in front. Beside ``covered_s`` of a backward the neighbour's weights are
    gathered, and gradients wait. The rest is once per step:
    ``prompt_sync_s`` leaves when the last backward ends, ``late_sync_s`` after the backward of component ``release``;
    then the optimizer. ``prefetched_s`` is what gathers of weights took beside the neighbours' compute. ``error_s`` is
    a standard error of a step's compute, ``link_error_s`` one of its communication.
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
        """A copy with another ``release``. (A thousand components of many plans are moved: `replace` checks each
        field anew.)"""
        found = object.__new__(ComponentCost)
        found.__dict__.update(self.__dict__, release=release)
        return found

    @property
    def compute_s(self) -> float:
        """Forward and backward of all microbatches."""
        return self.num_microbatches * (self.forward_s + self.backward_s) + self.bucket_s

    @property
    def blocking_s(self) -> float:
        """Communication inside the component that computation waits for, of all microbatches."""
        return self.num_microbatches * (self.forward_communication_s + self.backward_communication_s)

    @property
    def window_s(self) -> float:
        """Backward compute of the last microbatch, behind which others' synchronisation can hide."""
        return self.backward_s + self.bucket_s - self.covered_s

    @property
    def sync_s(self) -> float:
        """Gradient synchronisation, wherever it runs."""
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
    """A step taken apart: ``compute_s + exposed_s + bubble_s == total_s``. ``compute_s`` includes the optimizer's own
    time; of a pipeline, all is that of the busiest stage, and ``bubble_s`` what it waits for others."""

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
    """Seconds during which both streams work (tau of the module), of components with such backward windows, prompt and
    late synchronisation; the latter leaves after component ``release``."""
    leaving = list(prompt)
    for at, size in zip(release, late, strict=True):
        leaving[at] += size
    before, behind, found = 0.0, sum(leaving), float("inf")
    for window, own in zip(windows, leaving, strict=True):
        behind -= own
        found = min(found, sp * before + sc * behind)
        before += window
    return max(0.0, found)


def hidden_from(windows: Any, leaving: Any, sp: float, sc: float) -> Any:
    """What tau is the least of, in arrays: seconds of overlap if the communication stream were busy from each component
    on. ``windows``: b_l; ``leaving``: synchronisation that each releases. Components first, draws of both behind."""
    behind = leaving.sum(axis=0) - leaving.cumsum(axis=0)
    return sp * (windows.cumsum(axis=0) - windows) + sc * behind


def step(components: Sequence[ComponentCost], boundaries: Sequence[BoundaryCost], overlap: Overlap) -> StepCost:
    """Price a step; ``boundaries[i]`` lies in front of component i, the last one behind the last component."""
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
