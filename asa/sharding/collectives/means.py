"""Means of running statistics over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def mean(own: Tensor, *, group: dist.ProcessGroup, ranks: int, weight: float = 1.0) -> Tensor:
    """The mean of the vector ``own`` (floating point) over the ``ranks`` ranks of ``group`` (collective). ``weight`` is
    the weight of this rank; the weights of all ranks sum to their number.

    Elements that are equal on all ranks stay as they are, whatever their sum is: constants such as a mask of the least
    number, of which a sum overflows, are among buffers, too.
    """
    ends = torch.cat((own, -own))
    ends.masked_fill_(ends.isnan(), torch.inf)  # so that they count as unequal
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    greatest, least = ends[: len(own)], -ends[len(own) :]
    total = own * weight if weight else torch.zeros_like(own)  # zero also of what is not finite
    dist.all_reduce(total, group=group)
    return torch.where(greatest == least, own, total / ranks)
