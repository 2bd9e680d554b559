"""Seconds of a training step of one stage, in closed form, with gradient communication overlapped with backward.

Backward runs from the last component to the first on the compute stream. In the last microbatch, the gradients of a
component are sent on one communication stream, after its own backward or that of the component which fills its bucket:

    step = all compute + all communication - saving * tau,      saving = 1/sc + 1/sp - 1
    tau  = min over k of   sp * sum_{l<k} b_l  +  sc * sum_{l: r_l>k} g_l

    b_l, g_l   seconds of backward, and of gradient synchronisation, of component l
    r_l        component (r_l <= l) after whose backward the gradients of component l are sent
    sp, sc     slowdown of compute, and of communication, while both streams work
    tau        seconds during which both streams work

This is exact: let k be the component from which on the communication stream is busy to the end. Gradients sent earlier
overlap backward completely, and so does the rest of backward. With sp = sc = 1 it is the two-machine flow shop. If
``saving`` is negative, all synchronisation is charged as overlapped: an upper bound, as overlap cannot be switched off.
Blocking collectives never overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from asa.cost.memory.peak import Footprint
from asa.ir.cluster import Overlap
from asa.ir.codec import noun


@noun
class ComponentCost:
    """The cost of one component, in seconds (of the slowest rank) and bytes: numbers, or arrays with an entry for each
    way.

    For each microbatch: ``forward_s`` and ``backward_s`` are compute, ``forward_communication_s`` and
    ``backward_communication_s`` are communication that blocks. In the last microbatch: ``bucket_s`` is compute on
    gradients, and the slowdown by another stage's update; ``covered_s`` of the backward hide a neighbour's gather, so
    no gradients can be sent meanwhile. Once per step: ``prompt_sync_s`` of gradients are sent after the component's
    last backward, ``late_sync_s`` after that of component ``release``; then the optimizer runs. ``prefetched_s``:
    gathers hidden by neighbours' compute. ``error_s``, ``link_error_s``: standard errors of compute and communication.
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

    @cached_property
    def sums(self) -> tuple[float, ...]:
        """What is summed over components: seconds of a step of compute with the update, of gradient synchronisation, of
        other communication, hidden by neighbours, of the update; of a microbatch's forward and backward, with
        communication; and of :attr:`bucket_s`."""
        return (
            self.compute_s + self.update_s, self.sync_s, self.blocking_s + self.update_communication_s,
            self.prefetched_s, self.update_s + self.update_communication_s,
            self.forward_s + self.forward_communication_s, self.backward_s + self.backward_communication_s,
            self.bucket_s,
        )  # fmt: skip

    def released_at(self, release: int) -> ComponentCost:
        """A copy with another ``release``, made without checking every field again: it is needed for a thousand
        components of many plans."""
        copied = object.__new__(ComponentCost)
        copied.__dict__.update(self.__dict__, release=release)
        return copied

    @property
    def compute_s(self) -> float:
        """Seconds of forward and backward of all microbatches."""
        return self.num_microbatches * (self.forward_s + self.backward_s) + self.bucket_s

    @property
    def blocking_s(self) -> float:
        """Seconds of communication inside the component that computation waits for, over all microbatches."""
        return self.num_microbatches * (self.forward_communication_s + self.backward_communication_s)

    @property
    def window_s(self) -> float:
        """Seconds of backward compute of the last microbatch that can hide other components' synchronisation."""
        return self.backward_s + self.bucket_s - self.covered_s

    @property
    def sync_s(self) -> float:
        """Seconds of gradient synchronisation, prompt and late."""
        return self.prompt_sync_s + self.late_sync_s


@noun
class BoundaryCost:
    """The cost of the boundary in front of one component. ``forward_s`` and ``backward_s`` are seconds of one
    microbatch; ``wrapper_s`` are seconds per step of the data-parallel wrapper that begins there."""

    num_microbatches: int
    forward_s: float
    backward_s: float
    wrapper_s: float
    link_error_s: float
    footprint: Footprint

    @property
    def blocking_s(self) -> float:
        """Seconds of a step, over all microbatches."""
        return self.num_microbatches * (self.forward_s + self.backward_s) + self.wrapper_s


@noun
class StepCost:
    """The parts of a step in seconds: ``compute_s + exposed_s + bubble_s == total_s``. ``compute_s`` includes the
    optimizer. For a pipeline they are those of the busiest stage, which waits ``bubble_s`` for other stages."""

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
    """Seconds during which both streams work: tau in the formula of this module. ``windows`` (b_l), ``prompt`` and
    ``late`` are seconds of each component; late gradients are sent after component ``release`` (r_l)."""
    sync_after = np.array(prompt, dtype=float)
    np.add.at(sync_after, list(release), late)
    return max(0.0, float(hidden_from(np.array(windows, dtype=float), sync_after, sp, sc).min()))


def hidden_from(windows: Any, sync_after: Any, sp: float, sc: float) -> Any:
    """For each component k, the expression whose minimum over k is tau (formula of this module). ``windows`` are b_l;
    ``sync_after`` are the seconds of synchronisation sent after each component. Component is the first axis."""
    behind = sync_after.sum(axis=0) - sync_after.cumsum(axis=0)
    return sp * (windows.cumsum(axis=0) - windows) + sc * behind


def step(components: Sequence[ComponentCost], boundaries: Sequence[BoundaryCost], overlap: Overlap) -> StepCost:
    """The cost of a step; ``boundaries[i]`` lies in front of component i, the last one behind the last component."""
    compute, sync, blocking, hidden, update, *_ = (
        float(sum(x)) for x in zip(*(c.sums for c in components), strict=True)
    )
    blocking += sum(b.blocking_s for b in boundaries)
    overlap_s = overlap.communication_slowdown * sync
    if overlap.saving >= 0:
        overlap_s = side_by_side(
            [c.window_s for c in components], [c.prompt_sync_s for c in components],
            [c.late_sync_s for c in components], [c.release for c in components],
            overlap.compute_slowdown, overlap.communication_slowdown,
        )  # fmt: skip
    total = compute + sync + blocking - overlap.saving * overlap_s
    exposed = total - compute
    return StepCost(
        total_s=total,
        compute_s=compute,
        exposed_s=exposed,
        hidden_s=max(0.0, sync + blocking - exposed) + hidden,
        update_s=update,
        overlap_s=overlap_s,
    )
