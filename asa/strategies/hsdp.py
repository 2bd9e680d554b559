"""Data strategy ``hsdp``: sharded inside a group of neighbours (a node), replicated across groups.

Inside a group it works like zero3: weights are gathered over the group's fast links only. Gradients are scattered
inside the group, and each shard is averaged with the same shard of the other groups. Zhang et al. 2022, "MiCS:
Near-linear Scaling for Training Gigantic Model on Public Cloud"; Zhao et al. 2023, "PyTorch FSDP", 3.2.2. Stock
``fully_shard`` on a mesh of two dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asa.interfaces.sharded_state import ShardedState
from asa.ir.plan import DataDegree
from asa.ir.traffic import Adjacent, Collective, Memory, Share

if TYPE_CHECKING:
    from torch import nn

    from asa.sharding.collectives.axis import Axis


class HybridShard(ShardedState):
    """``fully_shard`` over ``shards`` neighbours of the data group, at least 2, replicated across such groups; over the
    whole data group if ``shards`` is None."""

    identifier = "hsdp"

    def __init__(self, shards: int | None = None) -> None:
        self.shards = shards

    def of(self, choice: DataDegree) -> HybridShard:
        """The strategy with the number of shards that ``choice`` specifies."""
        return HybridShard(choice.shards)

    def _inside(self, degree: int) -> int:
        return degree if self.shards is None else min(self.shards, degree)

    def memory(self, share: Share, degree: int, optimizer: str) -> Memory:
        """Memory of zero3 at the degree of a group: replication across groups saves nothing."""
        return super().memory(share, self._inside(degree), optimizer)

    def remaining_bytes(self, share: Share, degree: int, num_microbatches: int) -> float:
        """Bytes of the reduce-scatter buffer, which replaces accumulated gradients."""
        return super().remaining_bytes(share, self._inside(degree), num_microbatches)

    def transient(self, share: Share, degree: int, beside: Adjacent) -> float:
        """Bytes of whole weights and gradients, including buffers of the neighbours (:mod:`asa.interfaces.units`)."""
        return super().transient(share, self._inside(degree), beside)

    def traffic(self, share: Share, degree: int, stride: int) -> tuple[Collective, ...]:
        """Two gathers of the weights per microbatch and one reduce-scatter of the gradients per step inside a group;
        one all_reduce of each rank's shard of the gradients across groups."""
        inside = self._inside(degree)
        groups, part = degree // inside, share.parameter_bytes / inside
        within = super().traffic(share, inside, stride)
        if groups == 1 or not part:
            return within
        across = Collective(op="all_reduce", phase="gradient", bytes=part, ranks=groups, stride=stride * inside)
        return (*within, across)

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Shard every component of the segment as one unit over ``axis.parts``; the segment is their root."""
        from asa.sharding.gradients.sharded import sharded

        return sharded(module, axis, release=True)
