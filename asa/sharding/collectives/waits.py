"""Measures how long this rank is blocked in collectives and receives, and how much of that it waits for a later rank.

On a CPU the host waits, so two readings of its clock suffice. With shared memory
(:mod:`asa.sharding.collectives.segment`) a rank sees when the last of the others arrives, so waiting and transfer can
be separated. With messages it sees only when they have arrived. A comparison of ranks
then separates the two, because the last rank to arrive waits for no other.

On CUDA the stream waits, so events are recorded around the wait. Communication of ``fully_shard`` that overlaps with
computation there is in streams of its own, and is not measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from asa.ir.traffic import CollectiveOp

Mark = tuple[Any, float, float]
"""Start of an interval in which this rank may be blocked: when, and seconds blocked and late until then. (A tuple takes
a fifth of the time of an object.)"""
_MOST_SAMPLES = 64
"""Largest number of times of one kind of transfer that are kept until the next query."""


class Held(NamedTuple):
    """Seconds of a step in which this rank was blocked. ``blocked`` are all of them; ``late`` are those spent waiting
    for a later rank; ``unsplit`` are those that are either waiting or transfer."""

    blocked: float
    late: float
    unsplit: float


class Kind(NamedTuple):
    """A kind of transfers that should take equally long; see :class:`asa.ir.measurements.Transfer`."""

    op: CollectiveOp
    level: int
    group_size: int
    num_bytes: int


@dataclass
class Waits:
    """Waiting times of this process since the last query. ``on``: whether they are recorded."""

    on: bool = True
    _blocked: float = 0.0
    _late: float = 0.0
    _unsplit: float = 0.0
    _samples: dict[tuple[CollectiveOp, dist.ProcessGroup | None, int], list[float]] = field(default_factory=dict)
    _counts: dict[tuple[CollectiveOp, dist.ProcessGroup | None, int], int] = field(default_factory=dict)
    _kinds: dict[tuple[CollectiveOp, dist.ProcessGroup | None, int], Kind] = field(default_factory=dict)
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def start(self, *, on: bool) -> None:
        """Record from now on if ``on``, without what other work of this process has left, such as a rehearsal."""
        self.on = on
        self._blocked = self._late = self._unsplit = 0.0
        self._samples, self._counts, self._kinds, self._events = {}, {}, {}, []

    def begin(self, *, cuda: bool = False) -> Mark | None:
        """Mark the start of an interval in which this rank may be blocked, for :meth:`end` or :meth:`met`."""
        if not self.on:
            return None
        return _event() if cuda else time.perf_counter(), self._blocked, self._late

    def end(self, mark: Mark | None) -> float:
        """Count all time since ``mark`` as blocked. Returns the seconds on a CPU, and 0 on CUDA, where only events are
        recorded."""
        if mark is None:
            return 0.0
        began, blocked, _ = mark
        if not isinstance(began, float):
            self._events.append((began, _event()))
            return 0.0
        seconds = time.perf_counter() - began
        # Waits that were recorded in between lie within this interval; count them once.
        self._unsplit += seconds - (self._blocked - blocked)
        self._blocked = blocked + seconds
        return seconds

    def met(self, mark: Mark | None, op: CollectiveOp, group: dist.ProcessGroup | None, num_bytes: int) -> None:
        """Count all time since ``mark`` as a collective through shared memory, whose waiting :meth:`came_late` has
        recorded."""
        if mark is None:
            return
        began, blocked, late = mark
        seconds = time.perf_counter() - began
        self._blocked = blocked + seconds
        self._note(op, group, num_bytes, seconds - (self._late - late))

    def came_late(self, seconds: float) -> None:
        """Record ``seconds`` of waiting for the last rank to arrive."""
        self._late += seconds

    def transferred(self, op: CollectiveOp, group: dist.ProcessGroup | None, num_bytes: int, seconds: float) -> None:
        """Record that a collective took ``seconds`` from its beginning, including the lateness of other ranks."""
        if self.on and seconds:
            self._note(op, group, num_bytes, seconds)

    def _note(self, op: CollectiveOp, group: dist.ProcessGroup | None, num_bytes: int, seconds: float) -> None:
        key = (op, group, num_bytes)
        samples = self._samples.get(key)
        if samples is None:
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            self._kinds[key] = Kind(op, level_of(ranks), len(ranks), num_bytes)
            samples = self._samples[key] = []
            self._counts[key] = 0
        if len(samples) < _MOST_SAMPLES:
            samples.append(seconds)
        self._counts[key] += 1

    def take(self) -> Held | list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        """Waiting times since the last call. On CUDA, where only the device knows them: the recorded events."""
        if self._events:
            events, self._events = self._events, []
            return events
        times = Held(self._blocked, self._late, self._unsplit)
        self._blocked = self._late = self._unsplit = 0.0
        return times

    def transfers(self) -> list[tuple[Kind, float, int]]:
        """(kind, seconds, number) of every kind of transfer since the last call, with the median of seconds; sorted by
        descending total time."""
        samples: dict[Kind, list[float]] = {}
        counts: dict[Kind, int] = {}
        for key, kind in self._kinds.items():  # groups of one size have kinds in common
            samples.setdefault(kind, []).extend(self._samples[key])
            counts[kind] = counts.get(kind, 0) + self._counts[key]
        self._samples, self._counts, self._kinds = {}, {}, {}
        medians = [(kind, median(seconds), counts[kind]) for kind, seconds in samples.items()]
        return sorted(medians, key=lambda entry: -entry[1] * entry[2])


def level_of(ranks: Sequence[int]) -> int:
    """Level of the links between processes ``ranks``: 0 within a host; 1 across hosts, if a host has several processes.

    >>> level_of([0, 1])  # both on one host, or each on a host of its own
    0
    """
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return int(per_host > 1 and min(ranks) // per_host != max(ranks) // per_host)


def held_by(events: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> Held:
    """Seconds between the two events of every pair, in sum; waits until the device has reached them."""
    seconds = sum(first.elapsed_time(last) for first, last in events) / 1e3
    return Held(seconds, 0.0, seconds)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


waits = Waits()
"""The instance of this process. All threads use it, because on CUDA backward runs in threads of its own."""
