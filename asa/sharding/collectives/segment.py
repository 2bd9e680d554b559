"""Collectives between CPU ranks of one host, through shared memory.

Gloo passes messages between threads and through sockets. A message takes at least as long as waking those threads, 0.2
to 0.9 ms on a virtual machine. Here a rank copies its data into shared memory, announces it in a counter, waits for the
counters of the others without sleeping, and reads. No thread has to wake.

These collectives do not overlap with computation. So they are for ranks that have no second core each: with idle cores,
gloo's threads reduce gradients during backward. If ranks share a core, a waiting rank yields it.

The memory has no name (``memfd_create``), so nothing is left behind, however a rank ends. Ranks agree on using it by a
few messages over gloo at the first collective of a group. If one of them cannot use it, none does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
import time
import weakref
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from asa.ir.units import KIB, MIB
from asa.launch import usable_cores
from asa.sharding.collectives.waits import waits

CAPACITY_BYTES = MIB
"""Largest contribution of a rank to one meeting; longer messages are sent in several parts that fit a cache."""
_SMALL_BYTES = 16 * KIB
"""Size up to which every rank adds all contributions itself, because a second round would take longer."""
SPIN_S = 0.0005
"""Seconds for which a waiting rank with a core of its own keeps it. Most waits are shorter. A rank that yields to
another program does not run again before that program's time slice of some milliseconds ends
(docs/decisions/0146-a-short-wait-keeps-the-core.md)."""
AWAKE_S = 0.05
"""Seconds for which a waiting rank does not sleep, but yields its core to others; then it sleeps."""
_NAP_S = 0.001
_LINE_BYTES = 128
"""Distance of counters in bytes. No two of them share a cache line, or a pair of lines that is fetched together."""


def on_one_host() -> bool:
    """Whether all ranks are on this host, according to the launcher."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def own_cores() -> bool:
    """Whether every rank has a core of its own, so that a rank that waits without sleeping slows down no other."""
    ranks = int(os.environ.get("WORLD_SIZE") or 0)
    return hasattr(os, "sched_yield") and on_one_host() and 0 < ranks <= usable_cores()


def every_core_taken() -> bool:
    """Whether all ranks are on one host, and there is no second core for each, on which gloo's threads could send
    during computation."""
    return hasattr(os, "sched_yield") and on_one_host() and usable_cores() < 2 * int(os.environ.get("WORLD_SIZE") or 0)


class _Switch:
    on = True


def forgo() -> None:
    """Make groups use messages if their first collective comes after this call. An emulated device needs messages to
    run beside its work."""
    _Switch.on = False


class Segment:
    """Shared memory of the ``ranks`` of one group, as its rank ``me`` sees it.

    Each rank has two slots, used in turns. In every collective (meeting) a rank writes its slot, then the meeting's
    number to its counter. When all counters have that number, the slots can be read. A slot is written again two
    meetings later. By then every rank has begun the meeting in between, so it has finished reading.

    The protocol requires that stores become visible in the order in which they were made, as on x86.
    """

    def __init__(self, memory: mmap.mmap, ranks: int, me: int, timeout_s: float) -> None:
        self.ranks, self.me, self.timeout_s = ranks, me, timeout_s
        self._words = memoryview(memory).cast("q")
        self._step = _LINE_BYTES // 8
        self._all = torch.frombuffer(memory, dtype=torch.uint8, offset=_header(ranks)).view(2, ranks, CAPACITY_BYTES)
        self._boards: dict[torch.dtype, tuple[Tensor, ...]] = {}
        self._meeting = 0
        self._spin_s = SPIN_S if own_cores() else 0.0
        self._words[me * self._step + 1] = os.getpid()

    def all_reduce(self, x: Tensor, *, mean: bool = False) -> None:
        """Replace ``x`` (contiguous) by its sum (or mean) over all ranks. Sums are added in the order of ranks, so the
        result is bitwise equal on all ranks."""
        for flat in self._slices(x.view(-1)):
            if self.ranks == 2 or flat.nbytes <= _SMALL_BYTES:
                summed(self._shown(flat), flat)
            else:
                self._all_reduce_in_parts(flat)
            if mean:
                flat.div_(self.ranks)

    def _all_reduce_in_parts(self, flat: Tensor) -> None:
        """Sum one part on each rank, then share the sums. The amount that a rank reads does not grow with the number of
        ranks."""
        length = -(-flat.numel() // self.ranks)
        edges = [min(r * length, flat.numel()) for r in range(self.ranks + 1)]
        start, stop = edges[self.me], edges[self.me + 1]
        summed(self._shown(flat)[:, start:stop], flat[start:stop])
        sums = self._shown(flat[start:stop], length)
        for rank, (first, last) in enumerate(pairwise(edges)):
            if rank != self.me:
                flat[first:last].copy_(sums[rank, : last - first])

    def all_gather(self, full: Tensor, part: Tensor) -> None:
        """Gather every rank's ``part`` into ``full``, in the order of ranks (both contiguous; ``part`` may be a view
        of it)."""
        rows, own_part = full.view(self.ranks, -1), part.view(-1)
        for target, flat in zip(self._columns(rows), self._slices(own_part), strict=True):
            slots = self._shown(flat)
            for rank in range(self.ranks):
                if rank != self.me or target[rank].data_ptr() != flat.data_ptr():
                    target[rank].copy_(slots[rank])

    def reduce_scatter(self, part: Tensor, full: Tensor, *, mean: bool = False) -> None:
        """Set ``part`` to this rank's part of the sum (or mean) of all ranks' ``full`` (both contiguous)."""
        rows = full.view(self.ranks, -1)
        for flat, columns in zip(self._slices(part.view(-1), self.ranks), self._columns(rows, self.ranks), strict=True):
            summed(self._shown(columns).view(self.ranks, self.ranks, -1)[:, self.me], flat)
            if mean:
                flat.div_(self.ranks)

    def broadcast(self, x: Tensor, source: int) -> None:
        """Copy ``x`` (contiguous) of rank ``source`` to all. The source fills one slot while the others read the
        other."""
        for flat in self._slices(x.view(-1)):
            slots = self._shown(flat if self.me == source else flat[:0], flat.numel())
            if self.me != source:
                flat.copy_(slots[source])

    def _slices(self, flat: Tensor, share: int = 1) -> tuple[Tensor, ...]:
        """``flat`` in pieces of which ``share`` fill a slot."""
        return flat.split(max(1, CAPACITY_BYTES // (share * flat.itemsize)))

    def _columns(self, rows: Tensor, share: int = 1) -> tuple[Tensor, ...]:
        """``rows`` in groups of columns of which ``share`` fill a slot."""
        return rows.split(max(1, CAPACITY_BYTES // (share * rows.itemsize)), dim=1)

    def _shown(self, values: Tensor, length: int | None = None) -> Tensor:
        """Write ``values`` to this rank's slot, and return the slots of all ranks, one row each: ``length`` elements,
        or as many as ``values`` has. They must be read before the next meeting."""
        boards = self._boards.get(values.dtype)
        if boards is None:
            boards = self._boards[values.dtype] = tuple(self._all.view(values.dtype))
        self._meeting += 1
        count = values.numel()
        board = boards[self._meeting % 2][:, : count if length is None else length]
        board[self.me, :count].view(values.shape).copy_(values)
        self._meet()
        return board

    def _meet(self) -> None:
        now, words, step = self._meeting, self._words, self._step
        words[self.me * step] = now
        began = 0.0
        for rank in range(self.ranks):
            if words[rank * step] < now:
                began = began or time.perf_counter()
                self._wait(rank, now)
        if began:
            waits.came_late(time.perf_counter() - began)

    def _wait(self, rank: int, now: int) -> None:
        words, index = self._words, rank * self._step
        started = time.perf_counter()
        yields_at, asleep_at = started + self._spin_s, started + AWAKE_S
        while words[index] < now:
            passed_s = time.perf_counter()
            if passed_s < yields_at:
                continue
            if passed_s < asleep_at:
                os.sched_yield()
                continue
            time.sleep(_NAP_S)
            if words[index] >= now:
                return
            if _has_ended(words[index + 1]):
                raise dist.DistBackendError(f"Connection closed by peer: rank {rank} of the group is gone")
            if time.perf_counter() - started > self.timeout_s:
                raise dist.DistBackendError(
                    f"Timed out: rank {rank} of the group did not come to a collective within {self.timeout_s:g} s"
                )


def summed(rows: Tensor, into: Tensor) -> None:
    """Write the sum of ``rows``, added in their order, to ``into``. The sum of negative zeros is a negative zero here;
    ``torch.sum`` begins with 0."""
    torch.add(rows[0], rows[1], out=into)
    for row in rows[2:]:
        into.add_(row)


def _header(ranks: int) -> int:
    """Bytes before the slots, in whole pages: a counter and a process number per rank, and a token."""
    return -(-(ranks + 1) * _LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def _has_ended(pid: int) -> bool:
    """Whether process ``pid`` (0: not known yet) has ended, even if its parent has not reaped it."""
    if not pid:
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return not Path(f"/proc/{pid}").exists()
    return stat.rpartition(")")[2].split()[0] in "ZX"


_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, Segment | None] = weakref.WeakKeyDictionary()


def segment_of(group: dist.ProcessGroup | None) -> Segment | None:
    """Shared memory of ``group`` (None: all ranks); None if the group uses messages.

    The first call is collective: all ranks of the group must make it together.
    """
    group = group or dist.distributed_c10d._get_default_group()
    try:
        return _agreed[group]
    except KeyError:
        segment = _agreed[group] = _agree(group)
        return segment


def _agree(group: dist.ProcessGroup) -> Segment | None:
    ranks, me = group.size(), group.rank()
    if ranks == 1 or not on_one_host() or dist.get_backend(group) != "gloo":
        return None
    size = _header(ranks) + 2 * ranks * CAPACITY_BYTES
    memory, fd, token = None, -1, secrets.randbits(62)
    index = (_header(ranks) - _LINE_BYTES) // 8
    able = (
        _Switch.on and every_core_taken() and hasattr(os, "memfd_create") and platform.machine() in ("x86_64", "AMD64")
    )
    try:
        if me == 0 and able:
            with contextlib.suppress(OSError):
                fd = os.memfd_create("asa", os.MFD_CLOEXEC)
                os.ftruncate(fd, size)
                memory = mmap.mmap(fd, size)
                memoryview(memory).cast("q")[index] = token
        announced = torch.tensor([os.getpid(), fd, token])
        dist.broadcast(announced, group_src=0, group=group)
        pid, peer_fd, token = announced.tolist()
        if me and able and peer_fd >= 0:
            with contextlib.suppress(OSError, ValueError):
                memory = _opened(f"/proc/{pid}/fd/{peer_fd}", size)
        same = memory is not None and memoryview(memory).cast("q")[index] == token
        agreed = torch.tensor([int(same)])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    finally:
        if fd >= 0:
            os.close(fd)
    if memory is None or not agreed.item():
        return None
    limit = group._get_backend(torch.device("cpu")).options._timeout
    return Segment(memory, ranks, me, limit.total_seconds())


def _opened(path: str, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
