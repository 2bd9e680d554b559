"""Data strategy ``zero2``: optimizer state and gradients are sharded; weights are gathered once a step.

It is zero3 with gathered weights kept from the first forward of a step to its last backward: one gather per step for
any number of microbatches, at the price of one copy of the weights. Rajbhandari et al. 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models". Stock ``fully_shard``, one unit per component.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asa.interfaces.strategy import OPTIMIZER_WORDS, DataStrategy
from asa.interfaces.units import gathered_once, remaining_bytes
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
        """Empty: any component can be sharded; uneven dimensions are padded."""
        return ""

    def memory(self, share: Share, degree: int, optimizer: str) -> Memory:
        """Memory with state sharded over ``degree`` ranks, weights gathered until the component's last backward, and
        whole gradients while it computes. Gradients accumulated over several microbatches stay whole until the last one
        scatters them."""
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

    def remaining_bytes(self, share: Share, degree: int, num_microbatches: int) -> float:
        """Bytes of the reduce-scatter buffer, which replaces accumulated gradients."""
        return remaining_bytes(share, degree, num_microbatches)

    def transient(self, share: Share, degree: int, beside: Adjacent) -> float:
        """Bytes of whole gradients, with those of the component after it (:mod:`asa.interfaces.units`)."""
        return 0.0 if degree == 1 else gathered_once(share, degree, beside)

    def traffic(self, share: Share, degree: int, stride: int) -> tuple[Collective, ...]:
        """One gather of the updated weights and one reduce-scatter of the gradients per step."""
        size = share.parameter_bytes
        if degree == 1 or not size:
            return ()
        return (
            Collective(op="reduce_scatter", phase="gradient", bytes=size, ranks=degree, stride=stride),
            Collective(op="all_gather", phase="update", bytes=size, ranks=degree, stride=stride),
        )

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Shard every component of the segment as one unit; the segment is their root."""
        from asa.sharding.sharded import sharded

        return sharded(module, axis, release=False)
