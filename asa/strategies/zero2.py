"""Data strategy ``zero2``: optimizer state and gradients are sharded; weights are gathered once a step.

It is zero3 with gathered weights kept from the first forward of a step to its last backward: one gather per step for
any number of microbatches, at the price of one copy of the weights. Rajbhandari et al. 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models". Stock ``fully_shard``, one unit per component.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asa.interfaces.sharded_state import ShardedState

if TYPE_CHECKING:
    from torch import nn

    from asa.sharding.collectives.axis import Axis


class ShardedGradients(ShardedState):
    """``fully_shard`` on the data group, weights kept from forward to backward."""

    identifier = "zero2"
    once = True

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Shard every component of the segment as one unit; the segment is their root."""
        from asa.sharding.gradients.sharded import sharded

        return sharded(module, axis, release=False)
