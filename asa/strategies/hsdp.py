"""Data strategy ``hsdp``: sharded inside a group of neighbours (a node), replicated across groups.

Inside a group it works like zero3: weights are gathered over the group's fast links only. Gradients are scattered
inside the group, and each shard is averaged with the same shard of the other groups. Zhang et al. 2022, "MiCS:
Near-linear Scaling for Training Gigantic Model on Public Cloud"; Zhao et al. 2023, "PyTorch FSDP", 3.2.2. Stock
``fully_shard`` on a mesh of two dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asa.interfaces.strategy import OPTIMIZER_WORDS, DataStrategy
from asa.interfaces.units import released, remaining_bytes
from asa.ir.graph import Component
from asa.ir.plan import DataDegree
from asa.ir.traffic import Adjacent, Collective, Memory, Share

if TYPE_CHECKING:
    from torch import nn

    from asa.sharding.axis import Axis


class HybridShard(DataStrategy):
    """``fully_shard`` over ``shards`` neighbours of the data group, replicated across such groups; over the whole data
    group if ``shards`` is None."""

    identifier = "hsdp"
    joint = True
    prefetches = True

    def __init__(self, shards: int | None = None) -> None:
        self.shards = shards

    def of(self, choice: DataDegree) -> HybridShard:
        """The strategy with the number of shards that ``choice`` specifies."""
        return HybridShard(choice.shards)

    def _inside(self, degree: int) -> int:
        return degree if self.shards is None else min(self.shards, degree)

    def refusal(self, component: Component, degree: int) -> str:
        """Empty: any component can be sharded; uneven dimensions are padded."""
        return ""

    def memory(self, share: Share, degree: int, optimizer: str) -> Memory:
        """Memory of zero3 at the degree of a group: replication across groups saves nothing."""
        size, inside = share.parameter_bytes, self._inside(degree)
        part = size / inside
        return Memory(
            parameters=part,
            gradients=part,
            optimizer=OPTIMIZER_WORDS[optimizer] * part,
            buffers=share.buffer_bytes,
            accumulated=None if degree == 1 else size,
            transient=0.0 if degree == 1 else 2 * size,
        )

    def remaining_bytes(self, share: Share, degree: int, num_microbatches: int) -> float:
        """Bytes of the reduce-scatter buffer, which replaces accumulated gradients."""
        return remaining_bytes(share, self._inside(degree), num_microbatches)

    def transient(self, share: Share, degree: int, beside: Adjacent) -> float:
        """Bytes of whole weights and gradients, including buffers of the neighbours (:mod:`asa.interfaces.units`)."""
        return 0.0 if degree == 1 else released(share, self._inside(degree), beside)

    def traffic(self, share: Share, degree: int, stride: int) -> tuple[Collective, ...]:
        """Two gathers of the weights per microbatch and one reduce-scatter of the gradients per step inside a group;
        one all_reduce of each rank's shard of the gradients across groups."""
        size, inside = share.parameter_bytes, self._inside(degree)
        across = degree // inside
        if degree == 1 or not size:
            return ()
        found = [
            Collective(op="all_gather", phase="forward", bytes=size, ranks=inside, stride=stride),
            Collective(op="all_gather", phase="backward", bytes=size, ranks=inside, stride=stride),
            Collective(op="reduce_scatter", phase="gradient", bytes=size, ranks=inside, stride=stride),
        ]
        if across > 1:
            part, far = size / inside, stride * inside
            found.append(Collective(op="all_reduce", phase="gradient", bytes=part, ranks=across, stride=far))
        return tuple(found)

    def apply(self, module: nn.Module, axis: Axis) -> nn.Module:
        """Shard every component of the segment as one unit over ``axis.parts``; the segment is their root."""
        from asa.sharding.sharded import sharded

        return sharded(module, axis, release=True)
