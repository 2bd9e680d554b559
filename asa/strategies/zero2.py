"""Data strategy ``zero2``: optimizer state and gradients are sharded; weights are gathered once a step.

It is zero3 with gathered weights kept from the first forward of a step to its last backward: one gather per step for
any number of microbatches, at the price of one copy of the weights. Rajbhandari et al. 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models". Stock ``fully_shard``, one unit per component.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from asa.interfaces.sharded_state import ShardedState
from asa.interfaces.units import gathered_once
from asa.ir.traffic import Adjacent, Collective, Memory, Share

if TYPE_CHECKING:
    from torch import nn

    from asa.sharding.collectives.axis import Axis


class ShardedGradients(ShardedState):
    """``fully_shard`` on the data group, weights kept from forward to backward."""

    identifier = "zero2"

    def memory(self, share: Share, degree: int, optimizer: str) -> Memory:
        """Memory with state sharded over ``degree`` ranks, weights gathered until the component's last backward, and
        whole gradients while it computes. Gradients accumulated over several microbatches stay whole until the last one
        scatters them."""
        whole = 0.0 if degree == 1 else share.parameter_bytes
        return replace(super().memory(share, degree, optimizer), transient=whole, kept=whole)

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
        from asa.sharding.gradients.sharded import sharded

        return sharded(module, axis, release=False)
