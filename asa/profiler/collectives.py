"""Times of collectives over message sizes on one group of ranks. Sizes are counted as in
:class:`asa.ir.traffic.Collective`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from asa.ir.cluster import CollectiveTable
from asa.ir.traffic import COLLECTIVE_OPS, CollectiveOp
from asa.ir.units import KIB
from asa.profiler.clock import Clock
from asa.profiler.effort import line_through
from asa.profiler.rounds import LEAST_SAMPLES, agree, time_together
from asa.sharding.collectives import direct

SIZES: tuple[int, ...] = (*(KIB << (2 * k) for k in range(10)),)
"""Message sizes: 1 KiB to 256 MiB. A gradient bucket has 25 MiB, unless one parameter has more."""

_WORD = 4
_LEAST_SHARE = 0.5
"""Smallest fraction of an equal share of the time that the last collectives get."""
_SHORTEST = 64 * KIB
CALM_S = 0.1
"""Largest number of seconds of one of many messages. Between processes of one machine, and over fast networks, even the
longest messages here take less. Over slow networks they would take minutes."""


def measure_tables(
    group: dist.ProcessGroup,
    device: torch.device,
    clock: Clock,
    *,
    sizes: Sequence[int],
    slice_s: float,
    source: str,
    report: Callable[[float, str], None],
    between: Callable[[], None] = lambda: None,
) -> list[CollectiveTable]:
    """Measure tables of every collective on ``group``. All ranks of the group call it, and no others.

    Messages grow. If one would take a collective's whole share of the time, it and all larger ones are left out.
    ``between`` is called after each collective; its time is not counted.
    """
    ranks = dist.get_world_size(group)
    ops = [op for op in COLLECTIVE_OPS if op != "send_recv" or ranks == 2]
    spent, tables = 0.0, list[CollectiveTable]()
    for number, op in enumerate(ops):
        points: list[tuple[int, float]] = []
        own_s = max((slice_s - spent) / (len(ops) - number), _LEAST_SHARE * slice_s / len(ops))
        started = time.perf_counter()
        for index, size in enumerate(sorted(sizes)):
            words = max(1, round(size / _WORD / ranks))
            bytes_ = words * ranks * _WORD
            left_s = max(own_s - agree(time.perf_counter() - started, group=group)[0], 0.0)
            if points and points[-1][0] >= bytes_:
                continue
            expected = line_through(*points[-2:])(bytes_) if len(points) > 1 else 0.0
            if expected * (LEAST_SAMPLES + 2) > own_s:
                break
            report((number + index / len(sizes)) / len(ops), f"{op} of {bytes_} bytes on {ranks} ranks")
            work = operation(op, words, group, device)
            messages = 2 if op == "send_recv" else 1
            share_s = left_s / (len(sizes) - index)
            points.append((bytes_, time_together(work, clock, slice_s=share_s, group=group) / messages))
        tables.append(CollectiveTable(op=op, ranks=ranks, points=tuple(points), status="measured", source=source))
        spent += agree(time.perf_counter() - started, group=group)[0]
        between()
    return tables


def message_within(
    most: int, group: dist.ProcessGroup, device: torch.device, clock: Clock, *, seconds: float = CALM_S
) -> int:
    """Bytes of the longest message that ``group`` can all-reduce within ``seconds``: ``most``, or less by a power of
    four, down to 64 KiB. All ranks of the group call it."""
    fits = most
    while fits >= 4 * _SHORTEST:
        fits //= 4
    longer = [fits]
    while longer[-1] < most:
        longer.append(4 * longer[-1])
    for size in longer:
        message = torch.zeros(size // _WORD, device=device)
        if _once(partial(direct.all_reduce, message, group=group), clock, group) > seconds:
            break
        fits = size
    return fits


def _once(work: Callable[[], object], clock: Clock, group: dist.ProcessGroup) -> float:
    """Seconds of ``work`` on the slowest rank, in the shorter of two runs."""
    samples = []
    for _ in range(2):
        agree(group=group)
        samples.append(agree(clock.timed(work), group=group)[0])
    return min(samples)


def operation(op: CollectiveOp, words: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """A function that runs ``op`` once on ``words`` fp32 elements per rank. For ``send_recv`` the message is sent and
    returned."""
    ranks = dist.get_world_size(group)
    full = torch.zeros(words * ranks, device=device)
    part = torch.zeros(words, device=device)
    if op == "all_reduce":
        return lambda: direct.all_reduce(full, group=group)
    if op == "all_gather":
        return lambda: direct.all_gather_into_tensor(full, part, group=group)
    if op == "reduce_scatter":
        return lambda: direct.reduce_scatter_tensor(part, full, group=group)
    if op == "all_to_all":
        received = torch.zeros_like(full)
        return lambda: dist.all_to_all_single(received, full, group=group)
    if op == "broadcast":
        return lambda: direct.broadcast(full, group_src=0, group=group)
    first = dist.get_rank(group) == 0

    def round_trip() -> None:
        if first:
            dist.send(full, group_dst=1, group=group)
            dist.recv(full, group_src=1, group=group)
        else:
            dist.recv(full, group_src=0, group=group)
            dist.send(full, group_dst=0, group=group)

    return round_trip
