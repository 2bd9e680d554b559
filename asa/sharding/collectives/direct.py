"""Collectives between CPU ranks without gloo's internal copies and without sleeping threads.

If all ranks are on one host and use all its cores, collectives go through shared memory
(:mod:`asa.sharding.collectives.segment`), and are finished when the call returns. Otherwise they are gloo messages.

Gloo's own all_gather assembles the result in memory that it allocates and frees each time, and copies it out; its
reduce_scatter does the same before it adds. Here parts are sent directly to their destination. To gather, every rank
broadcasts its own part from the result. To scatter, ranks exchange parts (all_to_all) and each adds its own. The
traffic is the same, (n-1)/n of the message.

On a GPU both are the stock operations. So is a gather over a network: in gloo's ring no rank sends to two others at a
time, which makes it two to three times as fast as n broadcasts.

Sums are added in the order of ranks, so they do not depend on which rank adds.

A waiting rank does not sleep for a while (:func:`awaited`). Gloo passes a message from thread to thread, and if all
threads of a rank sleep, waking them takes milliseconds.
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
from asa.sharding.collectives.segment import AWAKE_S, on_one_host, own_cores, segment_of, summed
from asa.sharding.collectives.waits import waits


def awaited(work: dist.Work | None) -> float:
    """Wait for ``work``, a collective between CPU ranks. Returns the seconds, if they are :mod:`observed
    <asa.sharding.collectives.waits>`; otherwise 0.

    If each rank has a core of its own, it does not sleep at first, but yields the core repeatedly to gloo's threads. (A
    send or receive would not report that it is done.)

    It polls the future, which takes no lock. ``is_completed`` takes the work's lock while it holds the GIL. Under a
    profiler, gloo's thread holds that lock while it waits for the GIL, to pass on hooks on saved tensors such as those
    of checkpoints: a deadlock.
    """
    if work is None:
        return 0.0
    mark = waits.begin()
    if own_cores():
        ends, future = time.perf_counter() + AWAKE_S, work.get_future()
        while not future.done() and time.perf_counter() < ends:
            os.sched_yield()
    work.wait()
    return waits.end(mark)


class Pending(dist.Work):
    """A collective in flight: its messages, and what is done with them on arrival."""

    def __init__(self, works: Sequence[dist.Work | None], received: Tensor | None = None, into: Tensor | None = None,
                 *, mean: bool = False) -> None:  # fmt: skip
        super().__init__()
        self._works, self._received, self._into, self._mean = works, received, into, mean
        self.over = not works
        """Whether there was nothing to wait for in the first place."""
        self.waited = 0.0
        """Seconds spent in :meth:`wait`, if they are observed."""

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        """Wait for the result, without a time limit."""
        self.waited = sum(map(awaited, self._works))
        if self._received is not None and self._into is not None:
            rows, self._received = self._received, None
            summed(rows, self._into)
            if self._mean:
                self._into.div_(len(rows))
        return True


@torch.no_grad()
def all_reduce(x: Tensor, *, group: dist.ProcessGroup | None = None, mean: bool = False) -> None:
    """Replace ``x`` (contiguous) by its sum (or mean) over all ranks."""
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
    """Copy ``x`` (contiguous) of rank ``group_src`` of the group to all its ranks."""
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
    full: Tensor, part: Tensor, *, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Gather every rank's ``part`` into ``full``, in the order of ranks (both contiguous; ``part`` may be a view of
    it)."""
    if part.device.type == "cpu" and (shared := segment_of(group)):
        mark = waits.begin()
        shared.all_gather(full, part)
        waits.met(mark, "all_gather", group, full.nbytes)
        return _finished(Pending(()), async_op)
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    cuda = part.device.type != "cpu"
    if cuda or (ranks > 2 and not on_one_host()):
        mark = None if async_op else waits.begin(cuda=cuda)
        work = dist.all_gather_into_tensor(full, part, group=group, async_op=async_op)
        waited = waits.end(mark)
        waits.transferred("all_gather", group, full.nbytes, waited)
        return work
    parts = full.view(-1).chunk(ranks)
    if parts[me].data_ptr() != part.data_ptr():
        parts[me].copy_(part.view(-1))
    works = [dist.broadcast(p, group_src=i, group=group, async_op=True) for i, p in enumerate(parts) if p.numel()]
    return _finished(Pending(works), async_op, ("all_gather", group, full.nbytes))


@torch.no_grad()
def reduce_scatter_tensor(
    part: Tensor, full: Tensor, *, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    """Set ``part`` to this rank's part of the sum (or mean) of all ranks' ``full`` (both contiguous)."""
    mean = op == dist.ReduceOp.AVG
    cuda = part.device.type != "cpu"
    if cuda or not (mean or op == dist.ReduceOp.SUM):
        mark = None if async_op else waits.begin(cuda=cuda)
        scattered = dist.reduce_scatter_tensor(part, full, op=op, group=group, async_op=async_op)
        waits.end(mark)
        return scattered
    if shared := segment_of(group):
        mark = waits.begin()
        shared.reduce_scatter(part, full, mean=mean)
        waits.met(mark, "reduce_scatter", group, full.nbytes)
        return _finished(Pending(()), async_op)
    ranks = dist.get_world_size(group)
    received = torch.empty_like(full)
    work = dist.all_to_all_single(received, full, group=group, async_op=True)
    pending = Pending([work], received.view(ranks, -1), part.view(-1), mean=mean)
    return _finished(pending, async_op, ("reduce_scatter", group, full.nbytes))


def _finished(
    pending: Pending, async_op: bool, what: tuple[CollectiveOp, dist.ProcessGroup | None, int] | None = None
) -> Pending | None:
    """``pending`` if asynchronous, otherwise None after waiting for it. ``what`` is the kind of the collective, for
    statistics."""
    if async_op:
        return pending
    pending.wait()
    if what is not None:
        waits.transferred(*what, pending.waited)
    return None


class _Gather:
    """All-gather for :class:`torch.distributed.fsdp`, by :func:`all_gather_into_tensor`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Gather):
    """Reduce-scatter for :class:`torch.distributed.fsdp`, by :func:`reduce_scatter_tensor`."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        return reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def directly(unit: nn.Module) -> None:
    """Let a unit of ``fully_shard`` use this module's all-gather and reduce-scatter."""
    if isinstance(unit, FSDPModule):
        unit.set_custom_all_gather(_Gather())  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(_Scatter())  # type: ignore[arg-type]
