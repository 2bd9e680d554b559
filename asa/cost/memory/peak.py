"""Peak memory of a rank, by the order in which a step allocates and frees.

While component k runs backward, the activations behind it are freed already and the gradients in front of it do not
exist yet. So the peak over a step of one microbatch is

    max over k of   sum of state  +  sum_{l<=k} activations_l  +  sum_{l>=k} gradients_l  +  transient_k

(24 equal linear layers: 200 MiB measured; the plain sum says 288). With several microbatches the gradients of all
components are there from the first on, so they count as state. Boundaries hold the converted tensor like an
activation of the component behind them, and their gathered gradient like a transient of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from asa.cost.constants import constant
from asa.ir.cluster import Device
from asa.ir.codec import noun


@noun
class Footprint:
    """Bytes that one rank holds for one component (or one boundary). Gradients are zero where they count as state."""

    state: float = 0.0
    activations: float = 0.0
    gradients: float = 0.0
    transient: float = 0.0


@noun
class Peak:
    """The peak of a rank: ``index`` is the component whose backward it falls into; the rest says what is held then, in
    bytes."""

    total: float
    index: int
    state: float
    activations: float
    gradients: float
    transient: float


def peaks(state: Any, activations: Any, gradients: Any, transient: Any) -> Any:
    """Bytes held in the backward of each component, by the law of this module: an array, component first.

    The arguments say what each component holds, in bytes; the first axis is that of components.
    """
    behind = gradients[::-1].cumsum(axis=0)[::-1]
    return state.sum(axis=0) + activations.cumsum(axis=0) + behind + transient


def peak(components: Sequence[Footprint], boundaries: Sequence[Footprint], in_flight: int = 1) -> Peak:
    """The peak of a step, in bytes of active memory. ``boundaries[i]`` lies in front of component i (the first is the
    model's input).

    ``in_flight`` microbatches hold their activations: all but the one at work hold all of theirs.
    """
    own, entry = (
        np.array([(x.state, x.activations, x.gradients, x.transient) for x in some]).T
        for some in (components, boundaries)
    )
    state, activations, gradients, transient = own + entry
    others = (in_flight - 1) * float(activations.sum())
    held = others + peaks(state, activations, gradients, transient)
    k = int(held.argmax())
    return Peak(
        total=float(held[k]),
        index=k,
        state=float(state.sum()),
        activations=others + float(activations[: k + 1].sum()),
        gradients=float(gradients[k:].sum()),
        transient=float(transient[k]),
    )


def made_ready(input_shape: Sequence[int]) -> float:
    """The most bytes held while an input is prepared, beyond its own, as a share of those. For tokens it is their
    labels.

    Images are stored as bytes. While they are shifted and mirrored they are held twice, beside the source position of
    each pixel (8 bytes) and whether it lies inside (2 bytes). With three channels that is 16 bytes a pixel, where 12 of
    numbers remain.
    """
    channels = input_shape[0]
    return max((2 * channels + 10) / (4 * channels) - 1, 0.25) if len(input_shape) == 3 else 1.0


def margin() -> float:
    """The factor on activations and transients that turns the usual figure into an upper quantile."""
    return 1 + constant("activation_margin")


def usable(device: Device, memory_bytes: int | None, ranks: int) -> float:
    """Bytes of *active* memory a rank may plan with, out of ``memory_bytes`` (the device's own where None).

    On CUDA the context, NCCL's buffers and what the caching allocator reserves beyond the active peak are set apart.
    """
    total = float(device.memory_bytes if memory_bytes is None else memory_bytes)
    if device.type == "cpu":
        return total
    held = constant("cuda_context_bytes") + (constant("nccl_bytes") if ranks > 1 else 0.0)
    return (total - held) / (1 + constant("cuda_allocator_slack"))


def reserved(device: Device, active: float, gathered: float = 0.0, largest: float = 0.0) -> int:
    """Bytes that a process takes for ``active`` bytes of training, rounded up. They include what the allocator holds
    beyond those bytes and, on a CPU, what its libraries allocate. What the process had without a model is not included.

    ``gathered``: bytes of weights that are gathered and released in every step. Such buffers have every size, and the
    heap grows by the holes they leave: by up to their own size in measurements. ``largest``: bytes that are allocated
    and released in one piece. If something small takes a place in that hole, the next piece goes behind everything
    else; this differs from run to run of the same plan.
    """
    if device.type == "cpu":
        return math.ceil(
            active * (1 + constant("cpu_allocator_slack")) + constant("cpu_library_bytes") + gathered + largest
        )
    return math.ceil(active * (1 + constant("cuda_allocator_slack")))


def within(device: Device, held: float) -> float:
    """Bytes of active memory in ``held`` bytes of a process: the inverse of :func:`reserved`."""
    if device.type == "cpu":
        return max(0.0, held - constant("cpu_library_bytes")) / (1 + constant("cpu_allocator_slack"))
    return held / (1 + constant("cuda_allocator_slack"))


def needed(device: Device, active: float, ranks: int) -> int:
    """Bytes of device memory of which :func:`usable` leaves ``active``: its inverse, rounded up."""
    if device.type == "cpu":
        return math.ceil(active)
    held = constant("cuda_context_bytes") + (constant("nccl_bytes") if ranks > 1 else 0.0)
    return math.ceil(active * (1 + constant("cuda_allocator_slack")) + held)
