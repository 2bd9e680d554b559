"""One way to run a component, and the figures that its price is computed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asa.cost.traffic.prefetch import Gathers
from asa.ir.codec import hashed, noun
from asa.ir.layout import Layout
from asa.ir.plan import DataDegree, TensorDegree
from asa.ir.traffic import Phase

PHASES: tuple[Phase, ...] = ("forward", "backward", "update", "gradient")
"""Phases of a step, in the order in which :class:`Upkeep` and :class:`Figures` count them."""


@dataclass
class Upkeep:
    """What a rank pays to keep the state of a component, whatever the component computes: numbers, or arrays with an
    entry for each way.

    Seconds once per step are those of :class:`asa.cost.step.ComponentCost`; ``copied`` is compute on a rank as fast as
    the profile's device. ``count`` (collectives), ``handled`` (seconds of the rank beside those of the links) and
    ``launches`` (seconds of a host that runs ahead of its device) have an entry for each of :data:`PHASES`; ``taken``,
    seconds on links, has one for each of the first two. ``moving``: whether backward, or every microbatch, waits for
    some of it; ``blocking``: whether backward waits for all of it. ``shared``: the share of the traffic's time on the
    links of the component's own collectives, which could otherwise be hidden; ``scattered``: the part of ``prompt``
    that is scattered. Bytes are those of :class:`asa.ir.traffic.Memory` and :class:`asa.ir.traffic.Share`; ``added``:
    bytes of gradients that several microbatches add up.
    """

    update_moved: Any
    prompt: Any
    late: Any
    copied: Any
    moving: Any
    blocking: Any
    shared: Any
    scattered: Any
    handled: Any
    count: Any
    taken: Any
    launches: Any
    state: Any
    gradients: Any
    added: Any
    kept: Any
    optimizer: Any
    parameters: Any
    updating: Any
    size: Any
    largest: Any
    tensors: Any


@hashed
@noun
class Way:
    """One way to run one component. ``checkpoint``: activations are forgotten, and made again in backward;
    ``offload``: optimizer state and update are on the host."""

    layout: Layout
    data: DataDegree
    tensor: TensorDegree
    checkpoint: bool = False
    offload: bool = False


@dataclass
class Figures:
    """What components do in one microbatch, run some way: numbers of one, or arrays with an entry for each way.

    Seconds: compute ``forward`` and ``backward``; the neighbours' compute beside which weights are gathered (``ahead``:
    forward of the component in front, ``behind``: backward of the one behind); an optimizer step on all that the rank
    has (``update``); the host's launch of a forward (``floor``); ``met``: collectives inside the component in forward
    and in backward. ``count``: how many of these there are in each of :data:`PHASES`. Bytes: ``saved`` for backward,
    ``transient`` in it, and ``around`` it for what neighbours gather. Booleans: ``checkpoint``, ``offload``, ``split``
    by tensors, ``alone`` (not replicated). ``release`` is that of :class:`asa.cost.step.ComponentCost`; ``error`` is
    the standard error of the compute in seconds, ``link_error`` that of communication as a share. Prices of many ways
    leave these three out.
    """

    kept: Upkeep
    gathers: Gathers | None
    forward: Any
    backward: Any
    ahead: Any
    behind: Any
    update: Any
    floor: Any
    met: Any
    count: Any
    saved: Any
    transient: Any
    around: Any
    checkpoint: Any
    offload: Any
    split: Any
    alone: Any
    release: int = 0
    error: float = 0.0
    link_error: float = 0.0
