"""Data strategy ``zero2``: optimizer state and gradients sharded; weights gathered once a step.

Like zero3, but gathered weights stay from the first forward of a step to its last backward: one gather per step
whatever the number of microbatches, for one more copy of the weights. Rajbhandari et al. 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models". Stock ``fully_shard``, one unit a component.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asa.interfaces.strategy import OPTIMIZER_WORDS, DataStrategy
from asa.interfaces.units import gathered_once, left
from asa.ir.graph import Component
from asa.ir.traffic import Adjacent, Collective, Memory, Share

if TYPE_CHECKING:
    from torch import nn

    from asa.sharding.axis import Axis


class ShardedGradients(DataStrategy):
    """``fully_shard`` on the data group, weights kept from forward to backward."""

    identifier = "zero2"
    joint = True
    prefetches = True

    def refusal(self, component: Component, degree: int) -> str:
        """Anything with parameters can be sharded; uneven dimensions are padded."""
        return ""

    def memory(self, share: Share, degree: int, optimizer: str) -> Memory:
        """One part in ``degree`` of the state; the gathered weights until the last backward is through the component,
        whose gradients are whole while it computes. Gradients that several microbatches add up stay whole until the
        last one scatters them."""
        size = share.parameter_bytes
        part = size / degree
        return Memory(
            parameters=part,
            gradients=part,
            optimizer=OPTIMIZER_WORDS[optimizer] * part,
            buffers=share.buffer_bytes,
            accumulated=None if degree == 1 else size,
            transient=0.0 if degree == 1 else size,
            kept=0.0 if degree == 1 else size,
        )

    def left(self, share: Share, degree: int, num_microbatches: int) -> float:
        """The buffer that its gradients were scattered from, in place of gradients that were added up."""
        return left(share, degree, num_microbatches)

    def transient(self, share: Share, degree: int, beside: Adjacent) -> float:
        """Gradients whole, beside those of the neighbour behind (:mod:`asa.interfaces.units`)."""
        return 0.0 if degree == 1 else gathered_once(share, degree, beside)

    def traffic(self, share: Share, degree: int, stride: int) -> tuple[Collective, ...]:
        """One gather of the updated weights and one scatter of the gradients per step."""
        size = share.parameter_bytes
        if degree == 1 or not size:
            return ()
        return (
            Collective(op="reduce_scatter", phase="gradient", bytes=size, ranks=degree, stride=stride),
            Collective(op="all_gather", phase="update", bytes=size, ranks=degree, stride=stride),
        )

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Shard every component of the segment as one unit, the segment as their root."""
        from asa.sharding.sharded import sharded

        return sharded(module, axis, release=False)
