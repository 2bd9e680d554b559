"""Collectives, timed over message sizes on one group of ranks. Sizes as in :class:`asa.ir.traffic.Collective`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from asa.ir.cluster import CollectiveTable
from asa.ir.traffic import COLLECTIVE_OPS, CollectiveOp
from asa.ir.units import KIB
from asa.profiler.clock import Clock
from asa.profiler.effort import line_through
from asa.profiler.rounds import LEAST_SAMPLES, agree, time_together
from asa.sharding import direct

SIZES: tuple[int, ...] = (*(KIB << (2 * k) for k in range(10)),)
"""1 KiB to 256 MiB; a bucket of gradients has 25 MiB, unless one parameter has more."""

_WORD = 4


def measure_tables(
    group: dist.ProcessGroup,
    device: torch.device,
    clock: Clock,
    *,
    sizes: Sequence[int],
    slice_s: float,
    source: str,
    say: Callable[[float, str], None],
    between: Callable[[], None] = lambda: None,
) -> list[CollectiveTable]:
    """Tables of every collective on ``group``; called by all its ranks and by no other.

    Messages grow; one that would take a rank's whole share of time is left out with all larger ones. ``between`` is
    called after each collective.
    """
    ranks = dist.get_world_size(group)
    ops = [op for op in COLLECTIVE_OPS if op != "send_recv" or ranks == 2]
    started, done = time.perf_counter(), 0
    tables: list[CollectiveTable] = []
    for op in ops:
        points: list[tuple[int, float]] = []
        for size in sorted(sizes):
            words = max(1, round(size / _WORD / ranks))
            bytes_ = words * ranks * _WORD
            elapsed = agree(time.perf_counter() - started, group=group)[0]
            cells = len(ops) * len(sizes) - done
            done += 1
            if points and points[-1][0] >= bytes_:
                continue
            expected = line_through(*points[-2:])(bytes_) if len(points) > 1 else 0.0
            if expected * (LEAST_SAMPLES + 2) > max(slice_s - elapsed, 0.0) / max(1, len(ops) - len(tables)):
                continue
            say((done - 1) / (len(ops) * len(sizes)), f"{op} of {bytes_} bytes on {ranks} ranks")
            share = max(slice_s - elapsed, 0.0) / cells
            work = operation(op, words, group, device)
            messages = 2 if op == "send_recv" else 1
            points.append((bytes_, time_together(work, clock, slice_s=share, group=group) / messages))
        tables.append(CollectiveTable(op=op, ranks=ranks, points=tuple(points), status="measured", source=source))
        between()
    return tables


def operation(op: CollectiveOp, words: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """What to call to run ``op`` once on ``words`` fp32 elements per rank; ``send_recv`` there and back."""
    ranks = dist.get_world_size(group)
    whole = torch.zeros(words * ranks, device=device)
    part = torch.zeros(words, device=device)
    if op == "all_reduce":
        return lambda: direct.all_reduce(whole, group=group)
    if op == "all_gather":
        return lambda: direct.all_gather_into_tensor(whole, part, group=group)
    if op == "reduce_scatter":
        return lambda: direct.reduce_scatter_tensor(part, whole, group=group)
    if op == "all_to_all":
        received = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(received, whole, group=group)
    if op == "broadcast":
        return lambda: dist.broadcast(whole, group_src=0, group=group)
    first = dist.get_rank(group) == 0

    def there_and_back() -> None:
        if first:
            dist.send(whole, group_dst=1, group=group)
            dist.recv(whole, group_src=1, group=group)
        else:
            dist.recv(whole, group_src=0, group=group)
            dist.send(whole, group_dst=0, group=group)

    return there_and_back
