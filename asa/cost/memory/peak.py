"""Peak memory of a rank, by the order in which a step allocates and frees.

During the backward of component k, activations of the components behind it have been freed, and gradients of those in
front of it do not exist yet. So the peak of a step with one microbatch is

    max over k of   sum of state  +  sum_{l<=k} activations_l  +  sum_{l>=k} gradients_l  +  transient_k

(24 equal linear layers: 200 MiB measured; the sum of everything is 288). With several microbatches all gradients exist
from the first backward on, so they count as state. A boundary's converted tensor counts as an activation of the
component behind it, and its gathered gradient as a transient of this component.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asa.cost.constants import constant
from asa.ir.cluster import Device
from asa.ir.codec import noun
from asa.ir.consistency import Held


@noun
class Footprint:
    """Bytes that one rank holds for one component (or one boundary). Gradients are zero where they count as state."""

    state: float = 0.0
    activations: float = 0.0
    gradients: float = 0.0
    transient: float = 0.0


@noun
class Peak:
    """The peak of a rank in bytes, and its parts. ``index``: the component in whose backward it occurs."""

    total: float
    index: int
    state: float
    activations: float
    gradients: float
    transient: float


def peaks(state: Any, activations: Any, gradients: Any, transient: Any) -> Any:
    """Bytes held in the backward of each component, by the formula of this module; component is the first axis."""
    behind = gradients[::-1].cumsum(axis=0)[::-1]
    return state.sum(axis=0) + activations.cumsum(axis=0) + behind + transient


def peak(components: Sequence[Footprint], boundaries: Sequence[Footprint], in_flight: int = 1) -> Peak:
    """The peak of a step, in bytes of active memory. ``boundaries[i]`` lies in front of component i (the first is the
    model's input).

    ``in_flight`` microbatches hold activations: all but the one in backward hold those of every component.
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


def under(plain: Peak, size: float, held: Held, gradients: float) -> Peak:
    """The peak of a rank that holds ``held`` for a discipline, ``plain`` without. ``size``: bytes of its weights;
    ``gradients``: those of its gradients that do not count as state."""
    more, state, moving = held.lasting * size, plain.state + held.lasting * size, held.exchanged * size
    passes = replace(plain, total=plain.total + more, state=state)
    total = state + gradients + moving + 4096 * (moving > 0)  # headers of messages
    exchange = replace(plain, total=total, state=state, activations=0.0, gradients=gradients, transient=moving)
    return max(passes, exchange, key=lambda p: p.total)


def made_ready(input_shape: Sequence[int]) -> float:
    """The most additional bytes held while an input is prepared, relative to the bytes of the input. For tokens these
    are the labels.

    Images are stored as bytes. During augmentation they are held twice, with the source position of each pixel (8
    bytes) and whether it lies inside (2 bytes): with three channels 16 bytes per pixel, for an input of 12 bytes. Data
    of fewer pixels, which are resized, take less.
    """
    if len(input_shape) != 3:
        return 1.0
    channels = input_shape[0]
    return max((2 * channels + 10) / (4 * channels) - 1, 0.25)


def margin() -> float:
    """The factor on activations and transients from their median to an upper quantile."""
    return 1 + constant("activation_margin")


def usable(device: Device, memory_bytes: int | None, ranks: int) -> float:
    """Bytes of *active* memory that a plan may use on a rank, out of ``memory_bytes`` (None: all of the device's). On
    CUDA the context, NCCL's buffers, and what the caching allocator reserves beyond the active peak are excluded."""
    total = float(device.memory_bytes if memory_bytes is None else memory_bytes)
    if device.type == "cpu":
        return total
    return (total - needed(device, 0.0, ranks)) / (1 + constant("cuda_allocator_slack"))


def libraries(device: Device) -> float:
    """Bytes of library workspaces: a part of what is predicted, and of the context that :func:`usable` excludes."""
    return constant("cuda_workspace_bytes") if device.type == "cuda" else 0.0


def reserved(device: Device, active: float, gathered: float = 0.0, largest: float = 0.0) -> int:
    """Bytes that a process takes for ``active`` bytes of training, rounded up. They include what the allocator holds
    beyond those bytes and, on a CPU, what its libraries allocate. What the process had without a model is not included.

    ``gathered``: bytes of weights that are gathered and released in every step. Such buffers differ in size and
    fragment the heap: by up to their own size in measurements. ``largest``: bytes of the largest single buffer that is
    allocated and released. If a small allocation takes its place, the next such buffer extends the heap; this varies
    between runs of the same plan.
    """
    if device.type == "cpu":
        return math.ceil(
            active * (1 + constant("cpu_allocator_slack")) + constant("cpu_library_bytes") + gathered + largest
        )
    return math.ceil(active * (1 + constant("cuda_allocator_slack")))


def within(device: Device, process_bytes: float) -> float:
    """Bytes of active memory in ``process_bytes`` bytes of a process: the inverse of :func:`reserved`."""
    if device.type == "cpu":
        return max(0.0, process_bytes - constant("cpu_library_bytes")) / (1 + constant("cpu_allocator_slack"))
    return process_bytes / (1 + constant("cuda_allocator_slack"))


def needed(device: Device, active: float, ranks: int) -> int:
    """Bytes of device memory for which :func:`usable` is ``active``: its inverse, rounded up."""
    if device.type == "cpu":
        return math.ceil(active)
    reserved_bytes = constant("cuda_context_bytes") + (constant("nccl_bytes") if ranks > 1 else 0.0)
    return math.ceil(active * (1 + constant("cuda_allocator_slack")) + reserved_bytes)
