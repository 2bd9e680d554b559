"""Votes that survive lost ranks: every rank sends its message to the first one, which replies with those of all ranks.

A rank whose connection breaks, or that is far too late, is excluded from then on. The others notice only that it is
silent. The first rank also hands out samples. A *ticket* is the next range of samples of the epoch, as long as its
worker needs for one step. So workers of any speed share an epoch, and only the tickets that a lost worker had, at most
two, are lost with it.

A process that takes the place of a lost rank enters while samples are handed out. No messages are being collected then,
so it knows which round comes next. It gets samples at once, and takes part in exchanges from the end of that epoch on.
"""

from __future__ import annotations

import heapq
import json
import math
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asa.errors import WorkersFailedError
from asa.executor.consistency.channels import CONNECT_S, Exchange, head
from asa.executor.consistency.server import Snapshots
from asa.executor.model.votes import Votes
from asa.launch import alive, latecomer
from asa.launch.torchrun import answer_late

_SWAP, _TICKET, _ENTER = 1.0, 2.0, 3.0
_EXCLUDED, _DONE, _WAIT = -1.0, 0.0, -2.0
AT_NEED = -1
"""In place of a number of samples: ask again when they are needed."""
_ASK_AGAIN_S = 1.0
"""Seconds after which a rank that waits to enter asks again."""
_LOOK_S = 0.02
"""Seconds after which a rank that leaves the last samples to others looks whether they take them."""
_LATE_STEPS, _LATE_S, _LATE_TO_MEET_S = 10.0, 3.0, 10.0
"""Time by which a rank may be later than all others before it is excluded: this many of its own longest steps, plus
seconds. The last number replaces the seconds for a rank without samples, whose step is the time since the last
exchange."""


def _gone(source: int) -> WorkersFailedError:
    """The error of a rank that needs the message of rank ``source``, which is lost."""
    told = f"rank {source} is gone, and the others need what it would have sent"
    return WorkersFailedError(
        f"{told}; start all ranks again and resume from the last checkpoint", rank=source, lost=True
    )


@dataclass(frozen=True, kw_only=True)
class Entry:
    """State with which a rank enters the run: the ``epoch``, the ``position`` and ``step`` at which the others began
    it, and the running statistics [n] at that time."""

    epoch: int
    position: int
    step: int
    statistics: Tensor


class Coordinator:
    """The first rank's record of all ranks. Each rank calls from a thread of its own."""

    def __init__(self, num_ranks: int) -> None:
        self.live = set(range(num_ranks))
        self.lost_samples = 0
        self.lost: list[tuple[int, str]] = []
        self.returned: list[int] = []
        self._entry: Entry | None = None
        self._open = self._ended = False
        self._waiting: set[int] = set()
        self._round: dict[int, int] = dict.fromkeys(self.live, 0)
        self._messages: dict[int, dict[int, bytes]] = {}
        self._completed = -1
        self._receivers: dict[int, set[int]] = {}
        self._open_tickets: dict[int, list[int]] = {}
        self._ticket_at: dict[int, float] = {}
        self._longest: dict[int, float] = {}
        self._sample_s: dict[int, float] = {}
        self._round_ended_at: dict[int, float] = {}
        self._round_step_s: dict[int, float] = {}
        self._met_at = 0.0
        """When a rank last sent a message of a round, or all had time to connect to one that came back."""
        self._first = self._next = self._end = 0
        self._due = math.inf
        """When no more samples are handed out, though some are left: a checkpoint is due."""
        self._epoch = -1
        self._stopping = False
        self._changed = threading.Condition()

    def swap(self, rank: int, message: bytes) -> list[bytes | None] | None:
        """Messages of all ranks in this round, with None for excluded ones. Returns None to a rank that is itself
        excluded."""
        with self._changed:
            if rank not in self.live:
                return None
            number = self._round[rank]
            self._round[rank] += 1
            self._open = self._open and rank > 0  # ranks that only serve call this all the time
            self._open_tickets.pop(rank, None)
            self._ticket_at.pop(rank, None)
            now = time.monotonic()
            self._round_step_s[rank] = now - self._round_ended_at.get(rank, now)
            messages = self._messages.setdefault(number, {})
            messages[rank] = message
            self._met_at = max(self._met_at, now)
            self._changed.notify_all()
            while number > self._completed and not self.live <= messages.keys():
                if not self._changed.wait(timeout=0.25):
                    self._exclude_late(number)
            self._completed = max(self._completed, number)  # a rank that enters from now on is not waited for in it
            self._round_ended_at[rank] = time.monotonic()
            receivers = self._receivers.setdefault(number, set())
            receivers.add(rank)
            if self.live <= receivers:
                self._messages.pop(number - 1, None)
                self._receivers.pop(number - 1, None)
            return [messages.get(r) for r in sorted(self._round)]

    def _exclude_late(self, number: int) -> None:
        if 0 not in self._messages[number]:  # it is never excluded, so nothing is won before it comes
            return
        missing = self.live - self._messages[number].keys()
        now = time.monotonic()
        others_s = max((self._round_step_s[r] for r in self._messages[number]), default=0.0)
        for rank in missing:
            since = self._ticket_at.get(rank)
            patience = _LATE_STEPS * self._longest.get(rank, 0.0) + _LATE_S
            if since is None:
                since, patience = self._round_ended_at.get(rank), _LATE_STEPS * others_s + _LATE_TO_MEET_S
            # What held up all of them, such as a server that was started again, makes none of them late.
            if since is not None and now - max(since, self._met_at) > patience:
                self._lose(rank, f"sent nothing for {now - since:.0f} s")

    def begin(
        self, epoch: int, position: int, end: int, *, step: int = 0, statistics: Tensor | None = None,
        most_s: float = math.inf,
    ) -> None:  # fmt: skip
        """Offer samples ``position`` to ``end`` of the run as tickets in ``epoch`` (or another part of the run with a
        number of its own), for ``most_s`` seconds."""
        with self._changed:
            self._epoch, self._next, self._end, self._stopping = epoch, position, end, False
            self._first, self._due = position, time.monotonic() + most_s
            empty = torch.empty(0, dtype=torch.float64)
            self._entry = Entry(
                epoch=epoch, position=position, step=step, statistics=empty if statistics is None else statistics
            )
            self._open = position < end
            self._changed.notify_all()

    def enter(self, rank: int) -> Entry | None:
        """Admit ``rank``, which had been lost, while samples are handed out or by :meth:`admit`; None if it must ask
        again.

        Raises:
            WorkersFailedError: the run is over.
        """
        with self._changed:
            if rank not in self.live:
                if rank not in self._waiting:  # if it is a server, workers may take so long to connect to it
                    self._met_at = time.monotonic() + CONNECT_S
                self._waiting.add(rank)
                if not self._open and not self._ended:
                    self._changed.wait(timeout=_ASK_AGAIN_S)
            if self._ended:
                raise WorkersFailedError("the run is over", rank=rank, lost=True)
            if self._open:
                self._admit(rank)
            return self._entry if rank in self.live else None

    def admit(self, epoch: int, step: int, statistics: Tensor) -> None:
        """Admit all ranks that wait to enter, before ``epoch`` begins on rank 0."""
        with self._changed:
            self._entry = Entry(epoch=epoch, position=0, step=step, statistics=statistics)
            for rank in sorted(self._waiting):
                self._admit(rank)
            self._changed.notify_all()

    @property
    def waiting(self) -> bool:
        """Whether a rank waits to enter."""
        return bool(self._waiting)

    def _admit(self, rank: int) -> None:
        self._waiting.discard(rank)
        self.live.add(rank)
        self._round[rank] = self._round[0]
        self._ticket_at.pop(rank, None)
        self._longest.pop(rank, None)
        self._sample_s.pop(rank, None)
        self._round_ended_at[rank] = time.monotonic()
        self.returned.append(rank)

    def end(self) -> None:
        """Admit no rank any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def ticket(self, rank: int, epoch: int, samples: int, stop: bool, ahead: bool = False) -> tuple[int, int]:
        """(start, number) of the next samples of ``rank``. The number is 0 at the end of the epoch or the run.
        ``ahead``: it has not trained on those before yet; the number is :data:`AT_NEED` then if it must ask again when
        it has, because others may be sooner."""
        with self._changed:
            while epoch != self._epoch and rank in self.live:
                self._changed.wait(timeout=0.25)
            now = time.monotonic()
            before, tickets = self._ticket_at.get(rank), self._open_tickets.pop(rank, [])
            begun = tickets[-1:] if ahead else []
            if before is not None:
                self._longest[rank] = max(self._longest.get(rank, 0.0), now - before)
                if trained := sum(tickets) - sum(begun):
                    self._sample_s[rank] = (now - before) / trained
            self._ticket_at[rank] = now
            self._stopping = self._stopping or stop
            begun_until = now + sum(begun) * self._sample_s.get(rank, 0.0)
            while self._others_are_sooner(rank, samples, begun_until):
                if ahead:
                    self._open_tickets[rank] = begun
                    return self._next, AT_NEED
                self._changed.wait(timeout=_LOOK_S)
            start = self._next
            over = self._stopping or (start > self._first and time.monotonic() > self._due)
            count = 0 if over or rank not in self.live else min(samples, self._end - start)
            self._next += count
            self._open = self._open and count > 0
            self._open_tickets[rank], self._ticket_at[rank] = [*begun, count], time.monotonic()
            self._changed.notify_all()
            return start, count

    def _others_are_sooner(self, rank: int, samples: int, free_at: float) -> bool:
        """Whether the other ranks will have trained on all samples that are left before ``rank``, which is free at
        ``free_at``, would have trained on ``samples`` of them. The end of an epoch does not wait for a slow rank's last
        step then."""
        left, now = self._end - self._next, time.monotonic()
        finished_at = free_at + samples * self._sample_s.get(rank, 0.0)
        if left <= 0 or self._stopping or rank not in self.live or now >= finished_at:
            return False
        free = [
            (max(now, self._ticket_at[r] + sum(tickets) * self._sample_s[r]), r)
            for r, tickets in self._open_tickets.items()
            if sum(tickets) and r in self._sample_s and r in self.live
        ]
        heapq.heapify(free)
        while left > 0 and free:
            since, r = free[0]
            until = since + samples * self._sample_s[r]
            if until > finished_at:
                return False
            heapq.heapreplace(free, (until, r))
            left -= samples
        return left <= 0

    def lost_since(self) -> list[tuple[int, str]]:
        """(rank, reason) of every rank lost since the last call."""
        with self._changed:
            lost, self.lost = self.lost, []
            return lost

    def returned_since(self) -> list[int]:
        """Ranks that have entered since the last call."""
        with self._changed:
            returned, self.returned = self.returned, []
            return returned

    @property
    def position(self) -> int:
        """Samples handed out since the start of the run."""
        return self._next

    def disconnect(self, rank: int) -> None:
        """Record that ``rank`` has closed its connection."""
        with self._changed:
            self._waiting.discard(rank)
            if rank in self.live:
                self._lose(rank, "is gone")

    def _lose(self, rank: int, reason: str) -> None:
        self.live.discard(rank)
        self.lost_samples += sum(self._open_tickets.pop(rank, []))
        self.lost.append((rank, reason))
        self._changed.notify_all()


class StarVotes(Votes):
    """Votes between ranks of which all but the first may be lost. All of them construct it (collective), or one process
    that takes the place of a lost rank (``late``). That one is alone with its values until it has entered.

    ``returning`` are ranks that are started again if they are lost. ``snapshots`` is where a server on this rank stores
    its state.
    """

    bounded = False

    def __init__(
        self, timeout_s: float = 300.0, *, returning: Collection[int] = (), snapshots: Snapshots | None = None
    ) -> None:  # fmt: skip
        late = latecomer()
        self.late, self.returning, self.snapshots = late is not None, frozenset(returning), snapshots
        if late is None:
            super().__init__(timeout_s)
        else:
            self._timeout_s, self._group = timeout_s, None
            self.rank, self.num_ranks, self.live = late.rank, late.num_ranks, range(late.num_ranks)
        self.entered = late is None
        self.coordinator = Coordinator(self.num_ranks) if self.rank == 0 else None
        self._ticket = (0, 0)
        self._exchange: Exchange | None = None
        if self.num_ranks > 1:
            self._exchange = Exchange(self.rank, range(self.num_ranks), [0])
            if self.coordinator is not None:
                self._exchange.serve(self._answer, self.coordinator.disconnect, answer_late)
            self._exchange.connect()

    def _answer(self, rank: int, header: Tensor, body: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert self.coordinator is not None
        if header[0] == _TICKET:
            return head(*self.coordinator.ticket(rank, int(header[1]), int(header[2]), *map(bool, header[3:5]))), None
        if header[0] == _ENTER:
            if self._exchange is not None and self._exchange.closed:
                return head(_EXCLUDED), None
            try:
                entry = self.coordinator.enter(rank)
            except WorkersFailedError:
                return head(_EXCLUDED), None
            if entry is None:
                return head(_WAIT), None
            return head(_DONE, entry.epoch, entry.position, entry.step), entry.statistics
        assert body is not None
        messages = self.coordinator.swap(rank, body.numpy().tobytes())
        if messages is None:
            return head(_EXCLUDED), None
        sizes = [-1 if f is None else len(f) for f in messages]
        packed = json.dumps(sizes).encode() + b"\n" + b"".join(f for f in messages if f is not None)
        return head(_DONE), torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def swap(self, message: bytes) -> list[bytes | None]:
        """Messages of all ranks, by rank; None for lost ranks.

        Raises:
            WorkersFailedError: this rank was excluded.
        """
        if self._exchange is None:
            return [message]
        if not self.entered:
            return [message] * self.num_ranks
        # An empty body would not be sent; a newline is no part of any message.
        ((answer, body),) = self._exchange.ask(
            [(head(_SWAP), torch.frombuffer(bytearray(message + b"\n"), dtype=torch.uint8))]
        )
        if answer[0] == _EXCLUDED or body is None:
            raise WorkersFailedError(
                f"rank {self.rank} was too late, and the others continued without it", rank=self.rank, lost=True
            )
        first, _, rest = body.numpy().tobytes().partition(b"\n")
        messages: list[bytes | None] = []
        for size in json.loads(first):
            messages.append(None if size < 0 else rest[: size - 1])
            rest = rest[max(0, size) :]
        self.live = [r for r, f in enumerate(messages) if f is not None]
        return messages

    def enter(self) -> Entry | None:
        """Enter the run in the place of a lost rank; None if the run is over."""
        assert self._exchange is not None
        while True:
            ((answer, statistics),) = self._exchange.ask([(head(_ENTER), None)])
            alive.beat()
            if answer[0] == _EXCLUDED:
                return None
            if answer[0] == _DONE:
                assert statistics is not None
                self.entered = True
                epoch, position, step = (int(x) for x in answer[1:4])
                return Entry(epoch=epoch, position=position, step=step, statistics=statistics)

    def store_value(self, value: Any, name: str = "noted") -> None:
        """Store a JSON value under ``name`` for ranks that come late."""
        if self._exchange is not None:
            self._exchange.store_value(value, name)

    def stored_value(self, name: str = "noted") -> Any:
        """The value that :meth:`store_value` has stored."""
        assert self._exchange is not None
        return self._exchange.stored_value(name)

    def request_ticket(self, epoch: int, samples: int, *, stop: bool, ahead: bool) -> None:
        """Ask for the next samples for this rank, which :meth:`requested_ticket` returns. ``ahead``: those before are
        still to be trained on."""
        if self._exchange is None:
            assert self.coordinator is not None
            self._ticket = self.coordinator.ticket(0, epoch, samples, stop, ahead)
        else:
            self._exchange.request([(head(_TICKET, epoch, samples, stop, ahead), None)])

    def requested_ticket(self) -> tuple[int, int]:
        """(start, number) of the samples of :meth:`request_ticket`, as :meth:`Coordinator.ticket` says."""
        if self._exchange is None:
            return self._ticket
        ((answer, _),) = self._exchange.replies()
        return int(answer[0]), int(answer[1])

    def close(self) -> None:
        """Close the connection to the first rank."""
        if self.coordinator is not None:
            self.coordinator.end()
        if self._exchange is not None:
            self._exchange.close()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """All ranks' ``values``, by rank; zeros for lost ranks."""
        messages = self.swap(torch.tensor(list(values), dtype=torch.float64).numpy().tobytes())
        empty = [0.0] * len(values)
        return [empty if f is None else torch.frombuffer(bytearray(f), dtype=torch.float64).tolist() if f else []
                for f in messages]  # fmt: skip

    def everyone(self, yes: bool) -> bool:
        """Whether all remaining ranks say yes."""
        votes = self.gather([1.0 if yes else 0.0])
        return all(votes[rank][0] > 0 for rank in self.live)

    def tell(self, value: Any, *, source: int = 0) -> Any:
        """The JSON value of rank ``source``, on every rank.

        Raises:
            WorkersFailedError: ``source`` is lost.
        """
        if not self.entered:
            return value
        message = self.swap(json.dumps(value).encode() if self.rank == source else b"")[source]
        if message is None:
            raise _gone(source)
        return json.loads(message)

    def exchange(self, value: Any) -> list[Any]:
        """All ranks' JSON values, by rank; None for lost ranks."""
        return [None if f is None else json.loads(f) for f in self.swap(json.dumps(value).encode())]

    def mean(self, flat: Tensor) -> Tensor:
        """Mean of ``flat`` [n] (on the host) over the remaining ranks that passed one."""
        dtype = flat.dtype
        messages = self.swap(flat.contiguous().view(torch.uint8).numpy().tobytes())
        rows = [torch.frombuffer(bytearray(f), dtype=dtype) for f in messages if f]
        return torch.stack(rows).mean(dim=0) if rows else flat

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        """Copy the values of rank ``source`` into ``tensor`` (on the host) on all ranks.

        Raises:
            WorkersFailedError: ``source`` is lost.
        """
        values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if self.rank == source else b""
        message = self.swap(values)[source]
        if message is None:
            raise _gone(source)
        if message:
            tensor.copy_(torch.frombuffer(bytearray(message), dtype=tensor.dtype).view_as(tensor))

    def meet(self, what: str, *, within_s: float) -> None:
        """Wait for all remaining ranks (collective)."""
        del what, within_s
        self.swap(b"")
