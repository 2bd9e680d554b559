"""The allocator's record of a piece of work, from torch's profiler: every allocation and release, on CPU and CUDA,
including those inside operators, in backward and in communication buckets."""

from __future__ import annotations

import os
from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile, record_function


@dataclass(frozen=True)
class Event:
    """``size`` bytes allocated at address ``pointer``, or released if negative; ``at`` is in nanoseconds."""

    at: int
    pointer: int
    size: int


Recorded = tuple[list[Event], dict[str, int]]


@contextmanager
def quiet() -> Iterator[None]:
    """Context that keeps Kineto from printing a message on its first use."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("KINETO_LOG_LEVEL", None)


@contextmanager
def recording(device: torch.device, marks: str = "") -> Iterator[Callable[[], Recorded]]:
    """Context that records allocations. The function that it yields returns, after the context has ended, the
    allocations on ``device`` in order of time, and the start (in nanoseconds) of every ``record_function`` range whose
    name begins with ``marks``."""
    # Torch leaves out releases on a GPU that happen outside every range, such as those of Python's own variables.
    with quiet(), profile(profile_memory=True) as profiled, record_function("asa.record"):
        yield lambda: _read(profiled, device, marks)


def record(work: Callable[[], object], device: torch.device, marks: str = "") -> Recorded:
    """Run ``work``; return what :func:`recording` reads."""
    with recording(device, marks) as read:
        work()
    return read()


def _read(profiled: profile, device: torch.device, marks: str) -> Recorded:
    results = profiled.kineto_results
    assert results is not None
    events: list[Event] = []
    times: dict[str, int] = {}
    for entry in _walk(results.experimental_event_tree()):
        if entry.tag.name == "Allocation":
            fields = entry.extra_fields
            if fields.device.type == device.type:
                events.append(Event(at=entry.start_time_ns, pointer=fields.ptr, size=fields.alloc_size))
        elif marks and entry.name.startswith(marks):
            times[entry.name] = entry.start_time_ns
    events.sort(key=lambda e: e.at)
    return (_released(events) if device.type == "cuda" else events), times


def _released(events: Sequence[Event]) -> list[Event]:
    """``events`` with a release added before each allocation at an address that is still in use. Autograd's thread for
    a CUDA device releases the gradients of a node after recording has stopped for it."""
    starts: list[int] = []
    sizes: dict[int, int] = {}
    result: list[Event] = []
    for event in events:
        if event.size > 0:
            i = max(0, bisect_right(starts, event.pointer) - 1)
            while i < len(starts) and starts[i] < event.pointer + event.size:
                if starts[i] + sizes[starts[i]] > event.pointer:
                    result.append(Event(at=event.at, pointer=starts[i], size=-sizes.pop(starts.pop(i))))
                else:
                    i += 1
            insort(starts, event.pointer)
            sizes[event.pointer] = event.size
        elif event.pointer in sizes:
            del sizes[event.pointer]
            starts.remove(event.pointer)
        result.append(event)
    return result


def _walk(entries: Sequence[Any]) -> Iterator[Any]:
    pending = list(reversed(entries))
    while pending:
        entry = pending.pop()
        yield entry
        pending.extend(reversed(entry.children))


def completed(events: Sequence[Event], surviving: Collection[int]) -> list[Event]:
    """``events`` with missing releases added. The record covers only the threads that do the work, not gloo's own
    threads, which release the copies that its collectives make. A block that is neither released nor at one of the
    addresses ``surviving`` was such a copy, and is released here at the next event."""
    last: dict[int, int] = {}
    missing: set[int] = set()
    for i, event in enumerate(events):
        if event.size > 0:
            if event.pointer in last:
                missing.add(last[event.pointer])
            last[event.pointer] = i
        else:
            last.pop(event.pointer, None)
    missing.update(i for pointer, i in last.items() if pointer not in surviving)
    result: list[Event] = []
    for i, event in enumerate(events):
        result.append(event)
        if i in missing:
            result.append(Event(at=event.at, pointer=event.pointer, size=-event.size))
    return result


def peak(events: Iterable[Event]) -> int:
    """Largest number of bytes alive at once among those allocated in ``events``; earlier allocations do not count."""
    living: dict[int, int] = {}
    alive = highest = 0
    for event in events:
        if event.size > 0:
            living[event.pointer] = event.size
            alive += event.size
        else:
            alive -= living.pop(event.pointer, 0)
        highest = max(highest, alive)
    return highest


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
