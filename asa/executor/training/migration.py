"""Migration of state between plans: weights, buffers and optimizer state. Only the missing parts of tensors are sent.

Ranks tell each other which region of every tensor they hold and which they will hold (:mod:`asa.ir.region`), and all
compute the same list of transfers. A rank copies the weights that it already has, and keeps the memory of optimizer
state whose region stays the same. The rest is sent in buckets, in rounds in which each process sends and receives at
most one bucket. At the end all ranks compare the checksums of all buckets. The old state is never written to.

A bucket of one transfer goes from the old memory to the new one, without a copy, where both are contiguous.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from asa.errors import WorkersFailedError
from asa.executor.model.offload import updated_in
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.state import LocalTensor, counted_on_device, local_tensors, on_host, restored, stored
from asa.executor.model.votes import Votes
from asa.ir.region import Box, Region, as_region, everything, extent, narrowed, places, size, transfers
from asa.ir.units import MIB
from asa.sharding.split.local_parts import as_held, local, state_memory

BUCKET_BYTES = 8 * MIB
"""Largest number of bytes that one process sends another at a time, unless a single row is longer. A migration needs
memory for two sent and two received buckets, in addition to the old and the new state."""
_ALONE_BYTES = MIB
"""A transfer of at least this many bytes has a bucket of its own. The copies that this saves take longer than a
message."""
_ALIGNED = 16
_COLUMNS = 1024


@dataclass(frozen=True)
class Part:
    """The part of one named tensor that this process holds. ``shape`` is that of the full tensor. ``follows`` says
    whether this optimizer state is sharded like its parameter."""

    name: str
    shape: tuple[int, ...]
    region: Region
    tensor: Tensor
    follows: bool = True


@dataclass(frozen=True)
class Traffic:
    """Traffic of one migration on this process: bytes sent, received and copied locally, the number of buckets, and the
    seconds that all took."""

    sent_bytes: int = 0
    received_bytes: int = 0
    copied_bytes: int = 0
    buckets: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Transfer:
    """Transfer of region ``box`` of tensor number ``index`` from one process to another."""

    source: int
    target: int
    index: int
    box: Box
    num_bytes: int


def region_of(item: LocalTensor) -> tuple[tuple[int, ...], Region]:
    """Shape of the full tensor, and the region of it that this rank holds."""
    tensor = item.tensor
    shape, region = list(tensor.shape), list(everything(tensor.shape))
    if item.shard is not None and item.axis.size > 1:
        shard, dim = item.shard, item.shard.dim
        run = shard.units * shard.unit
        shape[dim] = shard.blocks * run
        index = shard.index(item.axis.index).tolist()
        region[dim] = _runs(index)
    if isinstance(tensor, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        for d, (length, first) in enumerate(zip(sizes, offsets, strict=True)):
            region[d] = narrowed(region[d], first, first + length)
    return tuple(shape), tuple(region)


def _runs(indices: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending ``indices`` as half-open ranges (start, stop)."""
    runs: list[tuple[int, int]] = []
    for i in indices:
        if runs and runs[-1][1] == i:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return tuple(runs)


@torch.no_grad()
def parts_of(model: ParallelModel, optimizer: torch.optim.Optimizer) -> list[Part]:
    """Weights, buffers and existing optimizer state (``name/key``) as this process holds them; not copied."""
    parts = []
    for item in local_tensors(model):
        shape, region = region_of(item)
        parts.append(Part(item.name, shape, region, local(item.tensor.detach())))
        parameter = updated_in(optimizer, item.tensor)
        for key, value in (stored(*entry) for entry in optimizer.state.get(parameter, {}).items()):
            follows = value.shape in (parameter.shape, item.tensor.shape)
            value = local(value.detach())
            value_shape = shape if follows else tuple(value.shape)
            value_region = region if follows else everything(value.shape)
            parts.append(Part(f"{item.name}/{key}", value_shape, value_region, value, follows))
    return parts


@dataclass(frozen=True)
class TargetPart:
    """The part of one parameter or buffer that this process will hold. ``updates`` says whether it also updates it."""

    name: str
    shape: tuple[int, ...]
    region: Region
    updates: bool


def target_parts(model: ParallelModel) -> list[TargetPart]:
    """All parts that this process holds under the plan of ``model``."""
    updated = {id(p) for p in model.updated}
    return [TargetPart(item.name, *region_of(item), id(item.tensor) in updated) for item in local_tensors(model)]


@torch.no_grad()
def move(
    before: Sequence[Part], after: Sequence[TargetPart], model: ParallelModel, optimizer: torch.optim.Optimizer,
    votes: Votes,
) -> Traffic:  # fmt: skip
    """Fill ``model`` (whose parts are ``after``) and the state of ``optimizer`` with what all processes of the run held
    ``before`` (collective).

    Raises:
        AsaError: no process has a needed part, or data was corrupted in transfer; raised on every process.
    """
    descriptions = votes.exchange(
        [
            [[p.name, str(p.tensor.dtype).removeprefix("torch."), p.shape, p.region, p.follows] for p in before],
            [[w.name, w.shape, w.region, w.updates] for w in after],
        ]
    )
    items = {item.name: item for item in local_tensors(model)}
    held = {p.name: p for p in before}
    error: Exception | None = None
    targets: dict[str, Part] = {}
    try:
        tensors, plan = _plan_transfers(descriptions)
        for one in tensors:
            region = one.destinations.get(votes.rank)
            if region is not None:
                memory = _memory_for(one, region, items, optimizer, held.get(one.name))
                targets[one.name] = Part(one.name, one.shape, region, memory, one.follows)
    except Exception as caught:
        error = caught
    votes.agree(error)  # all agree before any rank waits for a message
    moved = Traffic()
    try:
        moved = _Mover(votes, tensors, held, targets).carry(plan)
        _install(targets, items, optimizer)
    except Exception as caught:
        error = caught
    votes.agree(error)
    return moved


@dataclass(frozen=True)
class _Tensor:
    """One named tensor with the regions that each process holds and will hold."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    follows: bool
    sources: dict[int, Region]
    destinations: dict[int, Region]


def _plan_transfers(descriptions: Sequence[Any]) -> tuple[list[_Tensor], list[_Transfer]]:
    """All tensors and all transfers, in the same order on every process."""
    by_name: dict[str, _Tensor] = {}
    for process, (before, _) in enumerate(descriptions):
        for name, dtype, shape, region, follows in before:
            kind = getattr(torch, dtype)
            one = by_name.setdefault(name, _Tensor(name, kind, tuple(shape), follows, {}, {}))
            if (one.dtype, one.shape, one.follows) != (kind, tuple(shape), follows):
                raise WorkersFailedError(f"ranks hold {name} in different forms")
            one.sources[process] = as_region(region)
    keys: dict[str, list[_Tensor]] = {}
    for one in by_name.values():
        keys.setdefault(one.name.rsplit("/", 1)[0], []).append(one)
    for process, (_, wants) in enumerate(descriptions):
        for name, shape, region, updates in wants:
            if name not in by_name:
                raise WorkersFailedError(f"no rank holds {name}")
            if by_name[name].shape != tuple(shape):
                raise WorkersFailedError(f"{name} is {shape} under the new plan, {list(by_name[name].shape)} before")
            for one in keys[name]:
                if one.name == name or updates:
                    one.destinations[process] = as_region(region) if one.follows else everything(one.shape)
    tensors = list(by_name.values())
    sent_bytes = dict.fromkeys(range(len(descriptions)), 0)
    moves = []
    for index, one in enumerate(tensors):
        width = one.dtype.itemsize
        for source, target, box in transfers(one.sources, one.destinations, sent_bytes, width):
            for part in _split(box, BUCKET_BYTES // width) if source != target else (box,):
                moves.append(_Transfer(source, target, index, part, size(part) * width))
    return tensors, moves


def _split(box: Box, most: int) -> Iterator[Box]:
    """Cut ``box`` along its first dimension into boxes of at most ``most`` elements."""
    if not box or size(box) <= most:
        yield box
        return
    (start, stop), *rest = box
    rows = max(1, most // max(1, size(tuple(rest))))
    for first in range(start, stop, rows):
        yield ((first, min(stop, first + rows)), *rest)


def _memory_for(
    one: _Tensor, region: Region, items: dict[str, LocalTensor], optimizer: torch.optim.Optimizer, held: Part | None
) -> Tensor:
    """Memory for ``region``: the parameter or buffer itself; for optimizer state what this rank ``held`` of it, if that
    is the same region on the same device with the same strides, otherwise a new tensor."""
    if one.name in items:
        return local(items[one.name].tensor.detach())
    name, key = one.name.rsplit("/", 1)
    parameter = updated_in(optimizer, items[name].tensor)
    number = restored(key, torch.zeros((), dtype=one.dtype))[0] != key
    host = number or on_host(key, one.shape, parameter, counted_on_device(optimizer))
    device = torch.device("cpu") if host else local(parameter).device
    made = partial(state_memory, parameter) if one.follows else partial(torch.empty, extent(region))
    strides = made(dtype=one.dtype, device=torch.device("meta")).stride()
    if held is not None and (held.region, held.tensor.device, held.tensor.stride()) == (region, device, strides):
        return held.tensor
    return made(dtype=one.dtype, device=device)


def _install(targets: dict[str, Part], items: dict[str, LocalTensor], optimizer: torch.optim.Optimizer) -> None:
    """Replace the optimizer's state by ``targets``, in the form in which its parameters are held."""
    optimizer.state.clear()
    for part in targets.values():
        if part.name in items:
            continue
        name, key = part.name.rsplit("/", 1)
        item = items[name]
        parameter = updated_in(optimizer, item.tensor)
        plain, value = restored(key, part.tensor)
        if plain == key and part.follows and parameter is item.tensor:
            value = as_held(item.tensor, part.tensor)
        optimizer.state[parameter][plain] = value


@dataclass(frozen=True)
class _PendingRound:
    """Messages of one round: what is sent (kept until it is delivered) and to whom, and where a bucket arrives."""

    going: dist.Work | None
    coming: dist.Work | None
    sent: tuple[Tensor, int] | None
    room: Tensor | None
    into: list[_Transfer] | None


class _Mover:
    """Performs the transfers of one process."""

    def __init__(self, votes: Votes, tensors: list[_Tensor], before: dict[str, Part], after: dict[str, Part]) -> None:
        self._votes, self._tensors = votes, tensors
        self._before, self._after = before, after
        self._sent_checksums: dict[int, list[int]] = {}
        self._received_checksums: dict[int, list[int]] = {}
        self._error: Exception | None = None

    @contextmanager
    def _own_work(self) -> Iterator[None]:
        """Keep the first error of what this process does alone, until the others have its messages."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def carry(self, plan: list[_Transfer]) -> Traffic:
        """Perform all transfers in ``plan``: local copies first, then bucket by bucket.

        Raises:
            WorkersFailedError: the checksum of a received bucket differs from the sender's (on the receiving process).
            Exception: this process could not read or write a part (on this process, when all messages are delivered).
        """
        began, me = time.perf_counter(), self._votes.rank
        copied = sent = received = buckets = 0
        with self._own_work():
            for one in (one for one in plan if one.source == one.target == me):
                source, target = self._source_view(one), self._target_view(one)
                if source.data_ptr() != target.data_ptr():
                    target.copy_(source)
                    copied += one.num_bytes
        pending: _PendingRound | None = None
        for turn in _rounds(plan):
            out = next((b for b in turn if b[0].source == me), None)
            into = next((b for b in turn if b[0].target == me), None)
            # Packing and unpacking overlap with the messages of the previous round, and of this one.
            message = None if out is None else (self._packed(out), out[0].target)
            room = None if into is None else self._room(into)
            works = self._votes.started(message, None if room is None or into is None else (room, into[0].source))
            self._finish(pending)
            pending = _PendingRound(*works, message, room, into)
            sent += 0 if out is None else _length(out)
            received += 0 if into is None else _length(into)
            buckets += (out is not None) + (into is not None)
        self._finish(pending)
        self._compare_checksums()
        if self._error is not None:
            raise self._error
        return Traffic(sent, received, copied, buckets, time.perf_counter() - began)

    def _finish(self, pending: _PendingRound | None) -> None:
        """Wait for the messages of a round, and unpack what arrived."""
        if pending is None:
            return
        if pending.sent is not None:
            message, target = pending.sent
            self._sent_checksums.setdefault(target, []).append(_checksum(message))
        if pending.coming is not None and pending.room is not None and pending.into is not None:
            pending.coming.wait()
            self._received_checksums.setdefault(pending.into[0].source, []).append(_checksum(pending.room))
            if self._direct(self._target_view, pending.into) is None:
                with self._own_work():
                    for one, part in self._entries(pending.into, pending.room):
                        self._target_view(one).copy_(part)
        if pending.going is not None:
            pending.going.wait()

    def _compare_checksums(self) -> None:
        """Compare the checksums of all buckets with those of their senders (collective)."""
        told = self._votes.exchange([[target, sums] for target, sums in self._sent_checksums.items()])
        for source, lists in enumerate(told):
            sums = [one for target, some in lists for one in some if target == self._votes.rank]
            if sums != self._received_checksums.get(source, []):
                raise WorkersFailedError("weights were corrupted on their way to the new plan; the old plan stays")

    def _source_view(self, one: _Transfer) -> Tensor:
        part = self._before[self._tensors[one.index].name]
        return _view(part.tensor, part.region, one.box)

    def _target_view(self, one: _Transfer) -> Tensor:
        part = self._after[self._tensors[one.index].name]
        return _view(part.tensor, part.region, one.box)

    def _direct(self, view: Callable[[_Transfer], Tensor], bucket: list[_Transfer]) -> Tensor | None:
        """The bytes of the memory itself, if ``bucket`` is one contiguous piece of host memory."""
        if len(bucket) != 1:
            return None
        tensor = view(bucket[0])
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            return None
        return tensor.view(-1).view(torch.uint8)

    def _packed(self, bucket: list[_Transfer]) -> Tensor:
        direct = self._direct(self._source_view, bucket)
        if direct is not None:
            return direct
        flat = torch.empty(_length(bucket), dtype=torch.uint8)
        with self._own_work():
            for one, part in self._entries(bucket, flat):
                part.copy_(self._source_view(one))
        return flat

    def _room(self, bucket: list[_Transfer]) -> Tensor:
        direct = self._direct(self._target_view, bucket)
        return torch.empty(_length(bucket), dtype=torch.uint8) if direct is None else direct

    def _entries(self, bucket: list[_Transfer], flat: Tensor) -> Iterator[tuple[_Transfer, Tensor]]:
        at = 0
        for one in bucket:
            dtype = self._tensors[one.index].dtype
            shape = [stop - start for start, stop in one.box]
            yield one, flat[at : at + one.num_bytes].view(dtype).view(shape)
            at += _aligned(one.num_bytes)


def _view(tensor: Tensor, region: Region, box: Box) -> Tensor:
    return tensor[tuple(slice(first, last) for first, last in places(region, box))] if box else tensor


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _length(bucket: Sequence[_Transfer]) -> int:
    """Bytes of the message: one transfer as it is, several aligned."""
    return bucket[0].num_bytes if len(bucket) == 1 else sum(_aligned(one.num_bytes) for one in bucket)


def _checksum(flat: Tensor) -> int:
    """Checksum of a message: the CRC-32 of the sums of its 64-bit words over the rows and over the columns of a table,
    and of the bytes that remain. A CRC-32 of all bytes takes several times as long as sending them."""
    data = flat.numpy()
    words = data[: len(data) // 8 * 8].view(np.int64)  # may begin at any byte, unlike a view by torch
    table = words[: len(words) // _COLUMNS * _COLUMNS].reshape(-1, _COLUMNS)
    checksum = zlib.crc32(data[table.nbytes :].data)
    for sums in (table.sum(0), table.sum(1)):
        checksum = zlib.crc32(sums.data, checksum)
    return checksum


def _rounds(plan: Sequence[_Transfer]) -> Iterator[list[list[_Transfer]]]:
    """Buckets by round. In each round, a process sends and receives at most one. Pairs with most buckets left come
    first."""
    waiting: dict[tuple[int, int], list[list[_Transfer]]] = {}
    shared: dict[tuple[int, int], list[_Transfer]] = {}
    for one in plan:
        if one.source == one.target or not one.num_bytes:
            continue
        buckets = waiting.setdefault((one.source, one.target), [])
        if one.num_bytes >= _ALONE_BYTES:
            buckets.append([one])
            continue
        last = shared.get((one.source, one.target))
        if last is None or sum(_aligned(t.num_bytes) for t in (*last, one)) > BUCKET_BYTES:
            last = shared[one.source, one.target] = []
            buckets.append(last)
        last.append(one)
    while waiting:
        sending: set[int] = set()
        receiving: set[int] = set()
        turn = []
        for pair in sorted(waiting, key=lambda pair: (-len(waiting[pair]), pair)):
            source, target = pair
            if source not in sending and target not in receiving:
                sending.add(source)
                receiving.add(target)
                turn.append(waiting[pair].pop(0))
                if not waiting[pair]:
                    del waiting[pair]
        yield turn
