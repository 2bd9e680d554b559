"""Sends rows of a microbatch from one pipeline stage to the next, as :mod:`asa.ir.transfer` declares them.

Sends and receives are asynchronous, and each direction has its own group. So neither side waits for the other's sends,
whatever the order of their actions. Messages between two ranks arrive in the order of sending.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from asa.ir.layout import Layout
from asa.ir.transfer import transfers
from asa.sharding.collectives.along_axis import is_silent
from asa.sharding.collectives.waits import waits

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Arrival:
    """Rows that are being received: call :meth:`wait` before reading them."""

    rows: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Wait for all rows, and return them."""
        mark = waits.begin(cuda=self.rows.is_cuda)
        for work in self.works:
            work.wait()
        waits.end(mark)
        return self.rows


class Link:
    """One direction of a transfer between stages on one rank. The sender calls :meth:`send` and the receiver
    :meth:`receive`, microbatch by microbatch in the same order."""

    def __init__(
        self, source: Layout, source_ranks: tuple[int, ...], target: Layout, target_ranks: tuple[int, ...], *,
        rank: int, group: dist.ProcessGroup, processes: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        """Ranks are those of the plan. ``processes`` are the processes that run them, in their order; if None, process
        i runs rank i."""
        self._processes = processes or tuple(range(1 + max(*source_ranks, *target_ranks)))
        self._ends = (source, source_ranks, target, target_ranks)
        self._rank, self._group = rank, group
        self._sends: deque[tuple[list[dist.Work], Tensor]] = deque()
        self._dtypes: dict[bool, torch.dtype] = {}
        self._messages: dict[int, tuple[int, list[tuple[int, slice]]]] = {}

    def _exchanges(self, rows: int) -> tuple[int, list[tuple[int, slice]]]:
        """(number, exchanges): the number of this rank's rows in a microbatch of ``rows`` rows, and which of them it
        exchanges with which rank. Cached."""
        exchanges = self._messages.get(rows)
        if exchanges is None:
            source, source_ranks, target, target_ranks = self._ends
            sends = self._rank in source_ranks
            layout, ranks = (source, source_ranks) if sends else (target, target_ranks)
            start, stop = layout.rows_of(rows, ranks.index(self._rank))
            parts = [
                (m.target if sends else m.source, slice(m.start - start, m.stop - start))
                for m in transfers(*self._ends, rows)
                if self._rank == (m.source if sends else m.target)
            ]
            exchanges = self._messages[rows] = stop - start, parts
        return exchanges

    def send(self, x: Tensor, rows: int) -> None:
        """Send the rows of ``x`` that others need; returns at once. ``x`` are this rank's rows of a microbatch of
        ``rows`` rows."""
        x = x.detach().contiguous()
        works = []
        for peer, part_of in self._exchanges(rows)[1]:
            part = x[part_of]
            if is_silent():
                part = part.reshape(-1)[:1].clone()
            works.append(self._started(dist.isend(part, self._processes[peer], group=self._group)))
        self._sends.append((works, x))
        while self._sends and all(work.is_completed() for work in self._sends[0][0]):
            self.finish_sends(len(self._sends) - 1)

    def receive(self, rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Arrival:
        """Start to receive this rank's rows, each of ``shape``. While collectives are silenced, each message is one
        number, so that only the waiting remains."""
        count, parts = self._exchanges(rows)
        silent = is_silent()
        buffer = (torch.zeros if silent else torch.empty)((count, *shape), dtype=dtype, device=device)
        works = []
        for peer, part_of in parts:
            part = torch.empty(1, dtype=dtype, device=device) if silent else buffer[part_of]
            works.append(self._started(dist.irecv(part, self._processes[peer], group=self._group)))
        return Arrival(buffer, works)

    @staticmethod
    def _started(work: dist.Work | None) -> dist.Work:
        assert work is not None, "a rank outside the group"
        return work

    def tell_dtype(self, training: bool, dtype: torch.dtype, device: torch.device) -> None:
        """Send the type of the rows, which mixed precision decides at run time; once per mode, before the first
        rows."""
        if training in self._dtypes:
            return
        self._dtypes[training] = dtype
        _, source_ranks, _, target_ranks = self._ends
        if self._rank == source_ranks[0]:
            code = torch.tensor([_DTYPES.index(dtype)], device=device)
            peers = [self._processes[rank] for rank in target_ranks]
            works = [self._started(dist.isend(code, peer, group=self._group)) for peer in peers]
            self._sends.append((works, code))

    def hear_dtype(self, training: bool, device: torch.device) -> torch.dtype:
        """Receive the type that :meth:`tell_dtype` sends."""
        if training not in self._dtypes:
            code = torch.zeros(1, dtype=torch.int64, device=device)
            mark = waits.begin(cuda=device.type == "cuda")
            dist.recv(code, self._processes[self._ends[1][0]], group=self._group)
            waits.end(mark)
            self._dtypes[training] = _DTYPES[int(code)]
        return self._dtypes[training]

    def finish_sends(self, keep: int = 0) -> None:
        """Wait until at most ``keep`` microbatches are still being sent."""
        while len(self._sends) > keep:
            works, rows = self._sends.popleft()
            mark = waits.begin(cuda=rows.is_cuda)
            for work in works:
                work.wait()
            waits.end(mark)
