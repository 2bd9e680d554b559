"""Seconds saved by prefetching weights during a neighbour's compute, on devices with a stream for it.

Stock ``fully_shard`` gathers one unit ahead: in forward during the compute of the component in front, in backward
during that of the component behind. Both run together for tau seconds, which saves ``saving * tau``:

    tau = min(sc g, sp w)

    g        seconds of the gather alone
    w        seconds of the neighbour's compute alone
    sc, sp   slowdown of communication and of compute while both run; ``saving`` as in :mod:`asa.cost.step`

No gradients are synchronised meanwhile, as the links are busy. In backward the same communicator first scatters the
gradients of the component behind: w is the compute that remains then, and scatters that take longer than the compute
delay the gather and all that follows. The neighbour is assumed to run the same way.

Zhao et al. 2023, "PyTorch FSDP", 3.3.2 (backward and forward prefetching); torch.distributed.fsdp._fully_shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asa.ir.cluster import Overlap

_LEAST = 1e-30


@dataclass
class Gathers:
    """Seconds of the gathers for a component in every forward, in every backward and once per step: a neighbour's
    compute can hide them. ``front``: those in backward for the component in front: its own compute can hide them."""

    forward: float
    backward: float
    once: float
    front: float


@dataclass
class Hidden:
    """Seconds saved in a forward, in a backward and once per step. ``covered``: seconds of the component's own backward
    that overlap the gather for the component in front; ``queued``: seconds by which its reduce-scatters delay this
    gather. Numbers or arrays."""

    forward: Any
    backward: Any
    once: Any
    covered: Any
    queued: Any


def hidden(
    gathers: Any, overlap: Overlap, *, ahead: Any, behind: Any, own: Any, met: tuple[Any, Any] = (0.0, 0.0),
    scattered: Any = 0.0, microbatches: int = 1, least: Callable[[Any, Any], Any] = min,
) -> Hidden:  # fmt: skip
    """The seconds of ``gathers`` that are hidden. Arguments in seconds: ``ahead``: forward of the component in front;
    ``behind``: backward of the one behind; ``own``: the component's backward; ``met``: collectives in its forward and
    backward on the same links; ``scattered``: reduce-scatters of its gradients in the last of ``microbatches``.
    ``least``: ``numpy.minimum`` for arrays."""
    sp, sc, saving = overlap.compute_slowdown, overlap.communication_slowdown, overlap.saving

    def saved(gather: Any, window: Any, collectives: Any) -> Any:
        free = gather - alongside(gather, compute=window, collectives=collectives, least=least)
        return saving * least(sc * free, sp * window)

    def unused(window: Any) -> Any:
        return window - least(window, scattered * sc / sp)

    last = saved(gathers.backward, unused(behind), met[1])
    others = saved(gathers.backward, behind, met[1]) if microbatches > 1 else last
    return Hidden(
        forward=saved(gathers.forward, ahead, met[0]),
        backward=others,
        once=saved(gathers.once, ahead, met[0]) + last - others,
        covered=least(sc * gathers.front, sp * unused(own)) / sp,
        queued=(gathers.front > 0) * (scattered - least(scattered, sp / sc * own)),
    )


def alongside(messages: Any, *, compute: Any, collectives: Any, least: Callable[[Any, Any], Any] = min) -> Any:
    """Seconds of ``messages`` (m) that coincide with ``collectives`` (b); ``compute`` is w. All are in seconds.
    ``least``: ``numpy.minimum`` for arrays.

    If tensor and data parallelism of a component use the same links, gradients or gathered weights are sent while the
    component computes *and* during its own collectives. During a collective each gets half of the link, so nothing is
    saved. The messages run during the share m / (w + b) of the pass, so of their m seconds

        b * min(1, m / (w + b))

    coincide with collectives, and only the rest can be hidden. Here m, w and b are seconds of messages, compute and
    collectives, evenly mixed. In fact the messages run during the neighbours' passes; the formula is exact if these are
    alike, as :func:`hidden` assumes. Collectives at boundaries depend on two components and are ignored.
    """
    return collectives * least(1.0, messages / (compute + collectives + _LEAST))
