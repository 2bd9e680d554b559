"""Weights that are gathered while the neighbour computes, on devices that have a stream for it.

Stock ``fully_shard`` gathers one unit ahead: in forward the weights of a component while the one in front of it
computes, in backward while the one behind it does. With g the gather and w that compute, each by itself, both go on for
tau = min(sc g, sp w) seconds, of which ``saving * tau`` are saved (:mod:`asa.cost.step`); what gradients are in the
meantime synchronised beside that compute is not: the links are taken. In backward the gradients of the component behind
are scattered first, by the same communicator, which does one after the other: w is what they leave of the compute, and
what outlasts it holds up the gather, and with it all that follows. The neighbour is taken to be run alike.

Zhao et al. 2023, "PyTorch FSDP", 3.3.2 (backward and forward prefetching); torch.distributed.fsdp._fully_shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asa.cost.traffic.sharing import alongside
from asa.ir.cluster import Overlap


@dataclass
class Gathers:
    """Seconds of the gathers for a component, in every forward, in every backward and once per step, each beside the
    neighbour's compute; ``front``: of those in backward for the component in front of it, beside its own compute."""

    forward: float
    backward: float
    once: float
    front: float


@dataclass
class Hidden:
    """Seconds saved in a forward, in a backward and once per step. Of the component's own backward, ``covered`` seconds
    are taken by the gather for the component in front; after it, gradients have ``queued`` for so long. Numbers or
    arrays."""

    forward: Any
    backward: Any
    once: Any
    covered: Any
    queued: Any


def hidden(
    gathers: Any, overlap: Overlap, *, ahead: Any, behind: Any, own: Any, met: tuple[Any, Any] = (0.0, 0.0),
    scattered: Any = 0.0, microbatches: int = 1, least: Callable[[Any, Any], Any] = min,
) -> Hidden:  # fmt: skip
    """The seconds that ``gathers`` hide. ``ahead`` is the forward of the component in front, ``behind`` the backward of
    the one behind, ``own`` the component's backward, in seconds. ``met``: seconds of collectives in its forward and
    backward on the same links; ``scattered``: seconds of its gradients in the last of ``microbatches``. ``least`` is
    ``numpy.minimum`` for arrays."""
    sp, sc, saving = overlap.compute_slowdown, overlap.communication_slowdown, overlap.saving

    def saved(gather: Any, window: Any, collectives: Any) -> Any:
        free = gather - alongside(gather, compute=window, collectives=collectives, least=least)
        return saving * least(sc * free, sp * window)

    def left(window: Any) -> Any:
        return window - least(window, scattered * sc / sp)

    last = saved(gathers.backward, left(behind), met[1])
    others = saved(gathers.backward, behind, met[1]) if microbatches > 1 else last
    return Hidden(
        forward=saved(gathers.forward, ahead, met[0]),
        backward=others,
        once=saved(gathers.once, ahead, met[0]) + last - others,
        covered=least(sc * gathers.front, sp * left(own)) / sp,
        queued=(gathers.front > 0) * (scattered - least(scattered, sp / sc * own)),
    )
