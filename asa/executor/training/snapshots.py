"""In-memory snapshots of a run's state that survive its ranks: the launcher keeps them, and restarted ranks continue
from them.

Every rank has an anonymous file (``memfd_create``) with room for two snapshots of what it holds. It writes one while
the other stays complete. The process that started the ranks also has the files open, so nothing is lost if a rank is
killed, and nothing is left behind. Restarted ranks use the newest step of which all have a complete snapshot.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from asa.executor.training.migration import Part
from asa.instruments.memory_limits import limits_of
from asa.ir.region import as_region

_HEAD = mmap.PAGESIZE
_WORDS = 64
"""Bytes of a slot's header: step (0: being written), offset, length, and number of the plan."""
_COST = 0.02
"""Largest fraction of the time that snapshots may take."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of one rank after ``step``. ``plan`` is the fingerprint of the current plan."""

    step: int
    position: int
    plan: str
    loss_scale: float
    parts: list[Part]


def files(ranks: int) -> tuple[int, ...]:
    """Open one file per rank, inherited by forked processes; empty if the system has no such files."""
    if not hasattr(os, "memfd_create"):
        return ()
    return tuple(os.memfd_create("asa-state") for _ in range(ranks))


def _slots(file: int) -> list[tuple[int, int, int, int]]:
    """Step, offset, length and plan number of a rank's two snapshots."""
    heads = [os.pread(file, 32, slot * _WORDS).ljust(32, bytes(1)) for slot in range(2)]
    return [tuple(int.from_bytes(h[8 * i : 8 * i + 8], "little") for i in range(4)) for h in heads]  # type: ignore[misc]


def _number(plan: str) -> int:
    return int(plan[:12], 16)


def newest(everyone: Sequence[int], plan: str) -> int:
    """The newest step of which the files of all ranks have a complete snapshot under ``plan``; 0 if there is none."""
    steps = [{s for s, _, _, number in _slots(f) if s and number == _number(plan)} for f in everyone]
    return max(set.intersection(*steps), default=0) if steps else 0


def read(file: int, step: int) -> Snapshot:
    """The snapshot in ``file`` after ``step``."""
    at = next(at for s, at, _, _ in _slots(file) if s == step)
    size = int.from_bytes(os.pread(file, 8, at), "little")
    head = json.loads(os.pread(file, size, at + 8))
    data = torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)
    parts, start = [], at + head["data"]
    for name, dtype, shape, region, follows, local_shape, size in head["parts"]:
        tensor = data[start : start + size].clone().view(getattr(torch, dtype)).reshape(local_shape)
        start += -(-size // 16) * 16
        parts.append(Part(name, tuple(shape), as_region(region), tensor, follows))
    return Snapshot(
        step=step, position=head["position"], plan=head["plan"], loss_scale=head["scale"], parts=parts
    )  # fmt: skip


def lacks_memory(parts: Sequence[Part], device: torch.device) -> bool:
    """Whether two snapshots of ``parts`` would take more than half of the memory that is still free for ``device``."""
    size = 2 * sum(p.tensor.nbytes for p in parts)
    return any(2 * size > (1 - limit.full) * limit.limit for limit in limits_of(device))


@dataclass
class RowSnapshots:
    """Snapshots of tensors by name in ``file``, for a process that takes the place of this one. ``plan`` is the
    fingerprint of its plan."""

    file: int
    plan: str

    def __post_init__(self) -> None:
        self._snapshot_file: SnapshotFile | None = None

    def due(self, step: int) -> bool:
        """Whether the next snapshot is due after ``step``."""
        return self._snapshot_file is None or self._snapshot_file.due(step)

    def write(self, step: int, rows: dict[str, Tensor], step_s: float) -> None:
        """Store ``rows`` as the state after ``step`` (counted from 1). A step takes ``step_s`` seconds."""
        if self._snapshot_file is None:
            self._snapshot_file = SnapshotFile(self.file)
        began = time.monotonic()
        parts = [Part(name, tuple(row.shape), (), row) for name, row in rows.items()]
        self._snapshot_file.write(Snapshot(step=step, position=0, plan=self.plan, loss_scale=1.0, parts=parts))
        if step_s:
            self._snapshot_file.set_interval(time.monotonic() - began, step_s)

    def read(self) -> dict[str, Tensor] | None:
        """The newest rows; None if there are none."""
        step = newest((self.file,), self.plan)
        return {part.name: part.tensor for part in read(self.file, step).parts} if step else None


@dataclass
class SnapshotFile:
    """A rank's own snapshot ``file``, and how often it writes to it. Snapshots take at most the fraction :data:`_COST`
    of the time."""

    file: int
    every: int = 1
    step: int = 0
    _slot: int = 0
    _slot_bytes: int = 0
    _map: mmap.mmap | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if size := os.fstat(self.file).st_size:  # snapshots of earlier ranks stay until there is a newer one
            self._slot_bytes, self._map = (size - _HEAD) // 2, mmap.mmap(self.file, size)
            self._slot = min((s, slot) for slot, (s, *_) in enumerate(_slots(self.file)))[1]

    def due(self, step: int) -> bool:
        """Whether a snapshot is due after ``step``; equal on all ranks."""
        return step - self.step >= self.every

    def set_interval(self, write_s: float, step_s: float) -> None:
        """Set the interval: the slowest rank takes ``write_s`` for a snapshot, and a step takes ``step_s``."""
        self.every = max(1, math.ceil(write_s / (_COST * max(step_s, 1e-9))))

    @torch.no_grad()
    def write(self, snapshot: Snapshot) -> None:
        """Write ``snapshot``, and keep the one before it."""
        entries, size = [], 0
        for p in snapshot.parts:
            dtype = str(p.tensor.dtype).removeprefix("torch.")
            entries.append([p.name, dtype, p.shape, p.region, p.follows, list(p.tensor.shape), p.tensor.nbytes])
            size += -(-p.tensor.nbytes // 16) * 16
        head = {"position": snapshot.position, "plan": snapshot.plan, "scale": snapshot.loss_scale, "parts": entries}
        text = json.dumps(head | {"data": 10**9}).encode()
        data = -(-(8 + len(text)) // _HEAD) * _HEAD
        text = json.dumps(head | {"data": data}).encode()
        slot_bytes = -(-(data + size) // _HEAD) * _HEAD
        if self._map is None or slot_bytes > self._slot_bytes:
            os.ftruncate(self.file, 0)  # earlier snapshots belong to another plan
            os.ftruncate(self.file, _HEAD + 2 * slot_bytes)
            self._slot_bytes, self._map = slot_bytes, mmap.mmap(self.file, _HEAD + 2 * slot_bytes)
        memory, at = self._map, _HEAD + self._slot * self._slot_bytes
        first = self._slot * _WORDS
        memory[first : first + 8] = bytes(8)
        memory[at : at + 8] = len(text).to_bytes(8, "little")
        memory[at + 8 : at + 8 + len(text)] = text
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        start = at + data
        for p in snapshot.parts:
            if p.tensor.nbytes:
                flat = p.tensor.contiguous().view(-1).view(torch.uint8)
                buffer[start : start + p.tensor.nbytes].copy_(flat)
            start += -(-p.tensor.nbytes // 16) * 16
        words = (at, size, _number(snapshot.plan))
        memory[first + 8 : first + 32] = b"".join(word.to_bytes(8, "little") for word in words)
        memory[first : first + 8] = snapshot.step.to_bytes(8, "little")
        self.step, self._slot = snapshot.step, 1 - self._slot
