"""What holds this rank up: seconds in collectives and receives, and those of them in which a later rank was waited for.

On a CPU whoever waits is the host, so two readings of its clock tell. Through memory that ranks share
(:mod:`asa.sharding.segment`) a rank sees when the last of the others comes: waiting for it is told from the transfer.
Of messages it sees only when they are there; whoever compares ranks tells the two apart, because the last rank to come
waits for nobody. On CUDA the stream waits, so events lie around what it waits for. What ``fully_shard`` overlaps there
with computation is in streams of its own and is not seen.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from asa.ir.traffic import CollectiveOp

_MOST_SAMPLES = 64
"""Seconds of one kind of transfer that are kept until somebody asks."""


class Held(NamedTuple):
    """Seconds of a step in which this rank was held up (``blocked``); of these ``late`` were for a later rank, and of
    ``unsplit`` it is not known whether they were for one or for the transfer."""

    blocked: float
    late: float
    unsplit: float


class Kind(NamedTuple):
    """Transfers that should take equally long: see :class:`asa.ir.measurements.Transfer`."""

    op: CollectiveOp
    level: int
    group_size: int
    num_bytes: int


@dataclass(slots=True)
class Mark:
    """Where a stretch began in which this rank may be held up."""

    at: Any
    blocked: float
    late: float


@dataclass
class Waits:
    """What this process was held up by since it was last asked. ``on``: whether anybody wants to know."""

    on: bool = True
    _blocked: float = 0.0
    _late: float = 0.0
    _unsplit: float = 0.0
    _samples: dict[tuple[CollectiveOp, int, int, int], list[float]] = field(default_factory=dict)
    _counts: dict[tuple[CollectiveOp, int, int, int], int] = field(default_factory=dict)
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    _places: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, int]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def begin(self, *, cuda: bool = False) -> Mark | None:
        """Where a rank may be held up from now on; to be handed to :meth:`end` or :meth:`met`."""
        if not self.on:
            return None
        return Mark(_event() if cuda else time.perf_counter(), self._blocked, self._late)

    def end(self, mark: Mark | None) -> float:
        """All since ``mark`` was waiting, for whatever it was; on a CPU, how many seconds."""
        if mark is None:
            return 0.0
        if not isinstance(mark.at, float):
            self._events.append((mark.at, _event()))
            return 0.0
        seconds = time.perf_counter() - mark.at
        # What was noted in between lies within this stretch and counts once.
        self._unsplit += seconds - (self._blocked - mark.blocked)
        self._blocked = mark.blocked + seconds
        return seconds

    def met(self, mark: Mark | None, op: CollectiveOp, group: dist.ProcessGroup | None, num_bytes: int) -> None:
        """All since ``mark`` was a collective through shared memory, of which :meth:`came_late` heard the waiting."""
        if mark is None:
            return
        seconds = time.perf_counter() - mark.at
        self._blocked = mark.blocked + seconds
        self._note(op, group, num_bytes, seconds - (self._late - mark.late))

    def came_late(self, seconds: float) -> None:
        """The last rank to come to a meeting was waited for."""
        self._late += seconds

    def transferred(self, op: CollectiveOp, group: dist.ProcessGroup | None, num_bytes: int, seconds: float) -> None:
        """A collective that was waited for from its beginning took ``seconds``, other ranks' lateness included."""
        if self.on and seconds:
            self._note(op, group, num_bytes, seconds)

    def _note(self, op: CollectiveOp, group: dist.ProcessGroup | None, num_bytes: int, seconds: float) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        place = self._places.get(group)
        if place is None:
            ranks = dist.get_process_group_ranks(group)
            place = self._places[group] = level_of(ranks), len(ranks)
        key = (op, *place, num_bytes)
        samples = self._samples.get(key)
        if samples is None:
            samples = self._samples[key] = []
            self._counts[key] = 0
        if len(samples) < _MOST_SAMPLES:
            samples.append(seconds)
        self._counts[key] += 1

    def take(self) -> Held | list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        """What a step was held up by, counted from the last call on; events where only the device can tell."""
        if self._events:
            events, self._events = self._events, []
            return events
        found = Held(self._blocked, self._late, self._unsplit)
        self._blocked = self._late = self._unsplit = 0.0
        return found

    def transfers(self) -> list[tuple[Kind, float, int]]:
        """Kinds of transfers since the last call, with the median seconds of each and how many there were; those that
        took most in all come first."""
        found = [(Kind(*key), median(samples), self._counts[key]) for key, samples in self._samples.items()]
        self._samples, self._counts = {}, {}
        return sorted(found, key=lambda entry: -entry[1] * entry[2])


def level_of(ranks: Sequence[int]) -> int:
    """The level of links that joins processes ``ranks``: 0 within a host, and 1 across hosts where a host has several.

    >>> level_of([0, 1])  # both on one host, or each on a host of its own
    0
    """
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return int(per_host > 1 and min(ranks) // per_host != max(ranks) // per_host)


def held_by(events: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> Held:
    """Seconds between the events of every pair, once the device has reached them."""
    seconds = sum(first.elapsed_time(last) for first, last in events) / 1e3
    return Held(seconds, 0.0, seconds)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


waits = Waits()
"""This process's: seen by every thread, because on CUDA backward runs in threads of its own."""
