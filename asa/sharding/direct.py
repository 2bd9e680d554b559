"""Collectives between CPU ranks, without the copies that gloo makes for itself, and without its naps.

Where all ranks are on one host, and keep its cores busy, they go through memory that they share
(:mod:`asa.sharding.segment`), and are over when the call returns. Elsewhere they are messages of gloo's.

Gloo's own all_gather assembles everything in memory that it takes and gives back each time, and copies it out; its
reduce_scatter does the like before it adds up. Here parts travel straight to where they belong: to gather, every rank
broadcasts its own out of the message; to scatter, ranks exchange theirs (all_to_all) and each adds up what is its own.
What moves is the same, (n-1)/n of the message. On a GPU both are the stock operations. So is a gather over a network:
there gloo's ring, in which nobody sends to two at a time, is two to three times as fast as n broadcasts.

What a part sums up to does not depend on which rank adds, and is added in the order of ranks.

Who waits stays awake for a while (:func:`awaited`): gloo hands a message on from thread to thread, and where all of a
rank sleep, milliseconds go by until they are back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from asa.ir.traffic import CollectiveOp
from asa.launch import usable_cores
from asa.sharding.segment import AWAKE_S, on_one_host, segment_of, summed
from asa.sharding.waits import waits


def own_cores() -> bool:
    """Whether there is a core for every rank, so that one that waits awake is in nobody's way."""
    ranks = int(os.environ.get("WORLD_SIZE") or 0)
    return hasattr(os, "sched_yield") and on_one_host() and 0 < ranks <= usable_cores()


def awaited(work: dist.Work | None) -> float:
    """Wait for ``work``, a collective between CPU ranks: where each has a core of its own awake at first, yielding it
    to gloo's threads all the time. (A send or receive would not say that it is done.)

    Returns for how many seconds, where that is :mod:`observed <asa.sharding.waits>`.

    Its future is asked, which takes no lock. ``is_completed`` takes the work's with the GIL in hand: under a profiler
    gloo's thread has that lock while it waits for the GIL, to hand over hooks on saved tensors, as checkpoints set.
    """
    if work is None:
        return 0.0
    mark = waits.begin()
    if own_cores():
        ends, there = time.perf_counter() + AWAKE_S, work.get_future()
        while not there.done() and time.perf_counter() < ends:
            os.sched_yield()
    work.wait()
    return waits.end(mark)


class Pending(dist.Work):
    """A collective under way: the messages that are, and what is done with them once they are there."""

    def __init__(self, works: Sequence[dist.Work | None], received: Tensor | None = None, into: Tensor | None = None,
                 *, mean: bool = False) -> None:  # fmt: skip
        super().__init__()
        self._works, self._received, self._into, self._mean = works, received, into, mean
        self.over = not works
        """Whether nothing was under way in the first place."""
        self.waited = 0.0
        """Seconds in :meth:`wait`, where they are observed."""

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        """Until the result is there, however long that takes."""
        self.waited = sum(map(awaited, self._works))
        if self._received is not None and self._into is not None:
            rows, self._received = self._received, None
            summed(rows, self._into)
            if self._mean:
                self._into.div_(len(rows))
        return True


@torch.no_grad()
def all_reduce(x: Tensor, *, group: dist.ProcessGroup | None = None, mean: bool = False) -> None:
    """The sum (or mean) of every rank's ``x`` (contiguous), in ``x``."""
    if x.device.type == "cpu" and (shared := segment_of(group)):
        mark = waits.begin()
        shared.all_reduce(x, mean=mean)
        waits.met(mark, "all_reduce", group, x.nbytes)
        return
    if x.device.type != "cpu":
        mark = waits.begin(cuda=True)
        dist.all_reduce(x, group=group)
        waits.end(mark)
    else:
        waited = awaited(dist.all_reduce(x, group=group, async_op=True))
        waits.transferred("all_reduce", group, x.nbytes, waited)
    if mean:
        x.div_(dist.get_world_size(group))


@torch.no_grad()
def broadcast(x: Tensor, *, group_src: int, group: dist.ProcessGroup | None = None, async_op: bool = False) -> Any:
    """``x`` (contiguous) as rank ``group_src`` of the group has it, on all its ranks."""
    if x.device.type == "cpu" and (shared := segment_of(group)):
        mark = waits.begin()
        shared.broadcast(x, group_src)
        waits.met(mark, "broadcast", group, x.nbytes)
        return _finished(Pending(()), async_op)
    if x.device.type != "cpu":
        mark = None if async_op else waits.begin(cuda=True)
        work = dist.broadcast(x, group_src=group_src, group=group, async_op=async_op)
        waits.end(mark)
        return work
    return _finished(Pending([dist.broadcast(x, group_src=group_src, group=group, async_op=True)]), async_op)


@torch.no_grad()
def all_gather_into_tensor(
    whole: Tensor, part: Tensor, *, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Every rank's ``part``, in the order of ranks, in ``whole`` (both contiguous; ``part`` may lie in it)."""
    if part.device.type == "cpu" and (shared := segment_of(group)):
        mark = waits.begin()
        shared.all_gather(whole, part)
        waits.met(mark, "all_gather", group, whole.nbytes)
        return _finished(Pending(()), async_op)
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    cuda = part.device.type != "cpu"
    if cuda or (ranks > 2 and not on_one_host()):
        mark = None if async_op else waits.begin(cuda=cuda)
        work = dist.all_gather_into_tensor(whole, part, group=group, async_op=async_op)
        waited = waits.end(mark)
        waits.transferred("all_gather", group, whole.nbytes, waited)
        return work
    parts = whole.view(-1).chunk(ranks)
    if parts[me].data_ptr() != part.data_ptr():
        parts[me].copy_(part.view(-1))
    works = [dist.broadcast(p, group_src=i, group=group, async_op=True) for i, p in enumerate(parts) if p.numel()]
    return _finished(Pending(works), async_op, ("all_gather", group, whole.nbytes))


@torch.no_grad()
def reduce_scatter_tensor(
    part: Tensor, whole: Tensor, *, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    """This rank's ``part`` of the sum (or mean) of every rank's ``whole`` (both contiguous)."""
    mean = op == dist.ReduceOp.AVG
    cuda = part.device.type != "cpu"
    if cuda or not (mean or op == dist.ReduceOp.SUM):
        mark = None if async_op else waits.begin(cuda=cuda)
        scattered = dist.reduce_scatter_tensor(part, whole, op=op, group=group, async_op=async_op)
        waits.end(mark)
        return scattered
    if shared := segment_of(group):
        mark = waits.begin()
        shared.reduce_scatter(part, whole, mean=mean)
        waits.met(mark, "reduce_scatter", group, whole.nbytes)
        return _finished(Pending(()), async_op)
    ranks = dist.get_world_size(group)
    received = torch.empty_like(whole)
    work = dist.all_to_all_single(received, whole, group=group, async_op=True)
    pending = Pending([work], received.view(ranks, -1), part.view(-1), mean=mean)
    return _finished(pending, async_op, ("reduce_scatter", group, whole.nbytes))


def _finished(
    pending: Pending, async_op: bool, what: tuple[CollectiveOp, dist.ProcessGroup | None, int] | None = None
) -> Pending | None:
    """``pending`` itself, or None once it is over; ``what`` it is, where it goes by messages."""
    if async_op:
        return pending
    pending.wait()
    if what is not None:
        waits.transferred(*what, pending.waited)
    return None


class _Gather:
    """Gathers for :class:`torch.distributed.fsdp` by :func:`all_gather_into_tensor`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Gather):
    """Scatters for :class:`torch.distributed.fsdp` by :func:`reduce_scatter_tensor`."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        return reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def directly(unit: nn.Module) -> None:
    """Have a unit of ``fully_shard`` gather and scatter this way."""
    if isinstance(unit, FSDPModule):
        unit.set_custom_all_gather(_Gather())  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(_Scatter())  # type: ignore[arg-type]


__all__ = [
    "Pending",
    "all_gather_into_tensor",
    "all_reduce",
    "awaited",
    "broadcast",
    "directly",
    "reduce_scatter_tensor",
]
