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
    """The costs of a component's state on a rank, independent of its computation: numbers, or arrays with an entry for
    each way.

    Once per step, in seconds: ``update_moved`` is communication of the update, ``prompt`` and ``late`` are gradient
    synchronisation (:class:`asa.cost.step.ComponentCost`), ``copied`` are copies at the speed of the profiled device.
    For each of :data:`PHASES`: ``count`` collectives, ``overhead_s`` seconds of the rank for copies and calls,
    ``launches`` seconds of an asynchronous device's host; for the first two phases: ``link_s`` seconds on links.
    ``moving``: whether some of the traffic blocks in every microbatch; ``blocking``: whether backward waits for all of
    it. ``shared``: share of the traffic's time on the same links as the collectives inside the component;
    ``scattered``: the reduce-scatters in ``prompt``. Bytes are those of :class:`asa.ir.traffic.Memory` and
    :class:`asa.ir.traffic.Share`; ``added``: bytes of gradients that are accumulated over microbatches.
    """

    update_moved: Any
    prompt: Any
    late: Any
    copied: Any
    moving: Any
    blocking: Any
    shared: Any
    scattered: Any
    overhead_s: Any
    count: Any
    link_s: Any
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
    """One way to run one component. ``checkpoint``: activations are recomputed in backward; ``offload``: the optimizer
    state is on the host, which runs the update."""

    layout: Layout
    data: DataDegree
    tensor: TensorDegree
    checkpoint: bool = False
    offload: bool = False


@dataclass
class Figures:
    """The input of :meth:`asa.cost.pricing.Pricer.price`: numbers for one way to run a component, or arrays with an
    entry for each way. Seconds and bytes are those of one microbatch.

    Seconds: compute ``forward``, ``backward`` and ``again``, a second forward; compute of neighbours that can hide
    gathers (``ahead``: forward of the component in front, ``behind``: backward of the one behind); ``update``: an
    optimizer step on all parameters of a tensor rank; ``floor``: launch of a forward by the host; ``inner_s``:
    collectives inside the component, in forward and in backward. ``count``: the number of these in each of
    :data:`PHASES`. Bytes: ``saved`` for backward, ``transient`` in it, and in ``buffers`` of strategy and neighbours.
    Booleans: ``checkpoint``, ``offload``, ``split`` (tensor degree > 1), ``single_rank`` (data degree 1). Only for a
    single way: ``release`` of :class:`asa.cost.step.ComponentCost`, the standard errors ``error`` (compute, seconds)
    and ``link_error`` (share).
    """

    upkeep: Upkeep
    gathers: Gathers | None
    forward: Any
    backward: Any
    again: Any
    ahead: Any
    behind: Any
    update: Any
    floor: Any
    inner_s: Any
    count: Any
    saved: Any
    transient: Any
    buffers: Any
    checkpoint: Any
    offload: Any
    split: Any
    single_rank: Any
    release: int = 0
    error: float = 0.0
    link_error: float = 0.0
