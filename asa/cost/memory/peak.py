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

from asa.cost.constants import constant
from asa.ir.cluster import Device
from asa.ir.codec import noun


@noun
class Footprint:
    """Bytes one rank holds for one component (or one boundary). Gradients are zero where they count as state."""

    state: float = 0.0
    activations: float = 0.0
    gradients: float = 0.0
    transient: float = 0.0


@noun
class Peak:
    """``index`` is the component whose backward is the peak; the rest says what is held at that moment, in bytes."""

    total: float
    index: int
    state: float
    activations: float
    gradients: float
    transient: float


def peak(components: Sequence[Footprint], boundaries: Sequence[Footprint], in_flight: int = 1) -> Peak:
    """Active peak of a step. ``boundaries[i]`` lies in front of component i (the first is the model's input).

    ``in_flight`` microbatches hold their activations: all but the one at work hold all of them.
    """
    state = sum(c.state for c in components) + sum(b.state for b in boundaries)
    others = (in_flight - 1) * sum(x.activations for x in (*components, *boundaries))
    behind = sum(c.gradients for c in components)
    activations = 0.0
    best: tuple[float, int, float, float, float] | None = None
    for k, (own, entry) in enumerate(zip(components, boundaries, strict=True)):
        activations += own.activations + entry.activations
        transient = own.transient + entry.transient
        total = state + others + activations + behind + transient
        if best is None or total > best[0]:
            best = (total, k, others + activations, behind, transient)
        behind -= own.gradients
    assert best is not None, "a step has at least one component"
    total, k, activations, behind, transient = best
    return Peak(
        total=total, index=k, state=state, activations=activations, gradients=behind, transient=transient
    )  # fmt: skip


def made_ready(input_shape: Sequence[int]) -> float:
    """The most bytes there while an input is made ready, beyond its own, as a share of those: of tokens, their labels.

    Images are stored as bytes. While they are shifted and mirrored they are there twice, beside where each pixel comes
    from (8 bytes) and whether that lies inside (2): of three channels 16 bytes a pixel, where 12 of numbers are left.
    """
    channels = input_shape[0]
    return max((2 * channels + 10) / (4 * channels) - 1, 0.25) if len(input_shape) == 3 else 1.0


def margin() -> float:
    """Factor on activations and transients that turns the usual figure into an upper quantile."""
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
    """Bytes that a process takes for ``active`` bytes of training, rounded up: with what the allocator holds beyond
    them, and on a CPU with what its libraries allocate themselves. What it had without a model is not in it.

    ``gathered``: of weights that are gathered and let go of in every step. A heap without a home for each of these
    buffers, which are of every size, grows by holes of theirs: up to once as much was seen. ``largest``: what is made
    and let go of in one piece, or nearly. Where something small has taken a place in the hole that it left, it is put
    behind everything else: whether that happens differs from run to run of the same plan.
    """
    if device.type == "cpu":
        return math.ceil(
            active * (1 + constant("cpu_allocator_slack")) + constant("cpu_library_bytes") + gathered + largest
        )
    return math.ceil(active * (1 + constant("cuda_allocator_slack")))


def within(device: Device, held: float) -> float:
    """Bytes of active memory that ``held`` bytes take in: the inverse of :func:`reserved`."""
    if device.type == "cpu":
        return max(0.0, held - constant("cpu_library_bytes")) / (1 + constant("cpu_allocator_slack"))
    return held / (1 + constant("cuda_allocator_slack"))


def needed(device: Device, active: float, ranks: int) -> int:
    """Memory of a device, in bytes, of which :func:`usable` leaves ``active``: its inverse, rounded up."""
    if device.type == "cpu":
        return math.ceil(active)
    held = constant("cuda_context_bytes") + (constant("nccl_bytes") if ranks > 1 else 0.0)
    return math.ceil(active * (1 + constant("cuda_allocator_slack")) + held)
