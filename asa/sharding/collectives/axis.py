"""One mesh axis from the view of a rank: number of ranks, its own index, and their process group."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from asa.ir.plan import CompressionName


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Index ``index`` of ``size`` ranks. ``group`` is None on an axis of one rank, and in *rehearsal*.

    In rehearsal (``size > 1`` without a group) the real shard of one rank is built and computed, and every collective
    is replaced by a local operation with a result of the right shape. So a shard can be timed on a single device.

    Attributes:
        parts: the same ranks in two dimensions, if state is sharded among some of them only: (inside, across), the
            ranks among which it is sharded, and the ranks that hold the same shard.
        compression: compression of gradients on this axis.
        alike: whether all ranks are known to start with the same weights, so that none need be sent.
    """

    size: int
    index: int
    group: dist.ProcessGroup | None = None
    parts: tuple[Axis, Axis] | None = None
    compression: CompressionName = "none"
    alike: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise ValueError(f"index {self.index} is not on an axis of {self.size}")


SOLO = Axis(size=1, index=0)
