"""Averages the gradients of parameters that all ranks of a data group hold whole, in buckets.

The buckets of a rank fill from the last parameter to the first, as backward proceeds. Each is sent when it is full and
those before it were sent. The others are sent at the end of backward. So all ranks send in the same order, whichever
parameters their own samples reached (:mod:`asa.sharding.gradients.averaging`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asa.sharding.collectives import direct
from asa.sharding.collectives.axis import Axis
from asa.sharding.collectives.segment import segment_of
from asa.sharding.gradients.bucket import Bucket, Send, Wait
from asa.sharding.gradients.compression import compressed

_FIRST_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20
"""Sizes of the first bucket that is sent and of the others, as in torch's own data parallelism."""

_REPLICATED = "asa_replicated"


class Replicated:
    """The parameters of ``module`` whose gradients are averaged over ``axis``.

    ``parameters`` are all of them, trained or not. ``sparse`` are those whose gradients have values for some rows only
    (:class:`torch.nn.Embedding` with ``sparse``). ``send`` is the function that averages a bucket, and may be replaced.
    """

    def __init__(self, module: nn.Module, axis: Axis, only: Collection[nn.Parameter] | None) -> None:
        self.axis = axis
        self.parameters = [p for p in dict.fromkeys(module.parameters()) if only is None or p in only]
        tables = {m.weight for m in module.modules() if getattr(m, "sparse", False) is True and hasattr(m, "weight")}
        self.sparse = [p for p in self.parameters if p in tables]
        self.send: Send = sender(axis)

    def buckets(self) -> list[Bucket]:
        """Buckets of the parameters that are currently trained, in the order in which they are sent."""
        sparse = set(self.sparse)
        groups: list[list[nn.Parameter]] = []
        size, limit = 0, _FIRST_BYTES
        for p in reversed(self.parameters):
            if not p.requires_grad or p in sparse:
                continue
            if not groups or size >= limit or groups[-1][0].dtype != p.dtype or groups[-1][0].device != p.device:
                limit = _BUCKET_BYTES if groups else _FIRST_BYTES
                groups.append([])
                size = 0
            groups[-1].append(p)
            size += p.nbytes
        return [Bucket(i, members, last=i + 1 == len(groups)) for i, members in enumerate(groups)]


def sender(axis: Axis) -> Send:
    """A function that averages buckets over ``axis``: with the compression of ``axis``, if it has one; otherwise
    through shared memory, if the ranks have it; otherwise by messages."""
    if axis.compression != "none":
        return compressed(axis)
    group = axis.group

    def send(bucket: Bucket) -> Wait:
        flat = torch.view_as_real(bucket.flat) if bucket.flat.is_complex() else bucket.flat
        if flat.device.type == "cpu" and segment_of(group) is not None:
            direct.all_reduce(flat, group=group, mean=True)
            return lambda: None
        flat.div_(axis.size)  # before the sum, which may overflow in half precision
        work = dist.all_reduce(flat, group=group, async_op=True)

        def wait() -> None:
            if flat.device.type == "cpu":
                direct.awaited(work)
            elif work is not None:
                work.wait()

        return wait

    return send


def replicated(module: nn.Module, axis: Axis, *, only: Collection[nn.Parameter] | None = None) -> nn.Module:
    """Prepare ``module`` for averaging its gradients over ``axis``, and return it. ``only`` are the parameters
    concerned, if not all.

    Weights are set to those of the first rank (collective), unless they are known to be equal.
    """
    if axis.size == 1 or axis.group is None or next(module.parameters(), None) is None:
        return module
    if not axis.alike:
        _send_first((*module.parameters(), *module.buffers()), axis.group)
    module.__dict__[_REPLICATED] = Replicated(module, axis, only)
    return module


def replicated_of(module: nn.Module) -> Replicated | None:
    """The :class:`Replicated` of ``module``; None if nothing of it is averaged."""
    state: Replicated | None = module.__dict__.get(_REPLICATED)
    return state


@torch.no_grad()
def _send_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in dict.fromkeys(tensors):
        alike.setdefault((t.dtype, t.device), []).append(t)
    for same in alike.values():
        flat = torch.cat([t.detach().reshape(-1) for t in same])
        direct.broadcast(flat.view(torch.uint8), group_src=0, group=group)  # gloo does not send every type of number
        for t, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
            t.copy_(part.view(t.shape))
