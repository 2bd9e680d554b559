"""Data strategy ``zero3``: parameters, gradients and optimizer state are sharded over the data group (FSDP).

Weights of a component are gathered before its forward and again before its backward; gradients are scattered as they
are computed. Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models";
Zhao et al. 2023, "PyTorch FSDP". Stock ``fully_shard``, one unit per component.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asa.interfaces.sharded_state import ShardedState

if TYPE_CHECKING:
    from torch import nn

    from asa.sharding.collectives.axis import Axis


class FullyShard(ShardedState):
    """``fully_shard`` on the data group, weights released between forward and backward."""

    identifier = "zero3"

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Shard every component of the segment as one unit; the segment is their root."""
        from asa.sharding.gradients.sharded import sharded

        return sharded(module, axis, release=True)
