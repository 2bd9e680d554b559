"""Process groups of a plan: every one it needs, created once, by all ranks in one order."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from asa.sharding.axis import Axis

Purpose = Literal["gradient", "activation"]
"""Gradient buckets run beside backward and activations run inside it: one must not queue behind the other."""


class Groups:
    """Axes of one rank by purpose and member ranks. Every rank of the world constructs them, member or not."""

    def __init__(self, rank: int, wanted: Sequence[tuple[Purpose, tuple[int, ...]]], timeout_s: float = 600.0) -> None:
        self.rank = rank
        self._axes: dict[tuple[Purpose, tuple[int, ...]], Axis] = {}
        for purpose, ranks in wanted:
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
            if isinstance(group, dist.ProcessGroup):
                self._axes[purpose, ranks] = Axis(size=len(ranks), index=ranks.index(rank), group=group)

    def axis(self, purpose: Purpose, ranks: tuple[int, ...]) -> Axis:
        """This rank's axis among ``ranks``; KeyError if it was not asked for."""
        if len(ranks) == 1:
            return Axis(size=1, index=0)
        return self._axes[purpose, ranks]

    def close(self) -> None:
        """Leave all groups, for instance before another plan's are made."""
        for axis in self._axes.values():
            if axis.group is not None:
                dist.destroy_process_group(axis.group)
        self._axes.clear()
