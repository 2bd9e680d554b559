"""Messages between a worker and its servers. Each pair has a connection of its own, so that a lost rank affects no
other pair.

Everything is sent as tensors on the host by gloo's point-to-point operations. A request is a header [32] of float64
(operation and numbers) and, if the header says so, a body; so is a reply.

A connection is a gloo group of two ranks that meet in the store of the run. The requesting end *calls*: it writes a new
name to the store, under which both ends connect. So the other end need know nothing about the caller, and either end
may be a process that has taken the place of a lost one.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from asa.launch import alive, or_fail, store_of_ranks

_FOREVER = timedelta(days=7)
"""Time limit of messages. A worker or server may wait for another as long as that lives; a lost rank closes its
sockets."""
CONNECT_S = 10.0
"""Seconds after which a call that was not answered is repeated."""
_POLL_S, _POLL_CONNECTED_S = 0.02, 0.2
"""Seconds between two checks for a call, without a connection and with one."""
_NUMBERS = itertools.count()
"""Numbers for the exchanges of a process. All ranks create their exchanges in the same order."""

Handle = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""Function from a worker's request (rank, header, body) to a reply (header, body)."""

_LEAVE_TIMEOUT_S = 1.0
"""Seconds that clients may take to report that they leave; one that hangs never does."""
_END_TIMEOUT_S = 60.0
"""Seconds for which the process of a host outlasts its program while clients are connected."""

_open_exchanges: WeakSet[Exchange] = WeakSet()
"""Exchanges of this process that were not closed, or have clients that have not left."""

HEAD = 32
"""Length of a header; its last two entries describe the body."""
LEAVING = -1.0
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int8)
_HEADERS, _OTHERS, _USUAL = 0, 1, 2
"""Tags of headers, bodies, and usual bodies."""
_USUAL_BYTES = (1 << 10, 1 << 22)
"""Smallest and largest usual body. The memory of one is kept for every connection."""


class Channel:
    """One end of the connection between two ranks. The calling end has number 0.

    Gloo sends a message only when the other end has asked for it. So an end asks for the next header before it is sent,
    and also for a body like the *usual* one: the first of at least :data:`_USUAL_BYTES` that came from the other end.
    Usual bodies have a tag of their own. Both ends see the same bodies, so they agree on which one is usual.
    """

    def __init__(self, group: Any, other: int) -> None:
        self.group, self.other = group, other
        self._usual_sent: tuple[torch.dtype, int] | None = None
        self._usual_received: tuple[torch.dtype, int] | None = None
        self._header: _Awaited | None = None
        self._body: _Awaited | None = None

    def send(self, head: Tensor, body: Tensor | None) -> None:
        """Send ``head`` [HEAD] float64 and ``body``. The last two entries of the header (dtype and size of the body)
        are filled in here."""
        head = head.clone()
        head[-2] = -1.0 if body is None else float(_DTYPES.index(body.dtype))
        head[-1] = 0.0 if body is None else float(body.numel())
        self.group.send([head], self.other, _HEADERS).wait(_FOREVER)
        if body is not None and body.numel():
            tag = _USUAL if self._usual_sent == (body.dtype, body.numel()) else _OTHERS
            self._usual_sent = self._usual_sent or _usual(body)
            self.group.send([body.contiguous()], self.other, tag).wait(_FOREVER)

    def expect(self) -> None:
        """Ask for the next header and a usual body, if this was not done yet. :meth:`receive` returns them."""
        self._header = self._header or self._awaited(torch.float64, HEAD, _HEADERS)
        if self._usual_received is not None and self._body is None:
            self._body = self._awaited(*self._usual_received, _USUAL)

    def receive(self) -> tuple[Tensor, Tensor | None]:
        """Receive a header and its body (None if there is none) from the other end."""
        self.expect()
        assert self._header is not None
        head, self._header = self._header.take(), None
        if head[-2] < 0:
            return head, None
        dtype, size = _DTYPES[int(head[-2])], int(head[-1])
        if not size:
            return head, torch.empty(0, dtype=dtype)
        if self._usual_received == (dtype, size):
            assert self._body is not None
            awaited, self._body = self._body, None
            return head, awaited.take()
        body = self._awaited(dtype, size, _OTHERS).take()
        self._usual_received = self._usual_received or _usual(body)
        return head, body

    def _awaited(self, dtype: torch.dtype, size: int, tag: int) -> _Awaited:
        tensor = torch.empty(size, dtype=dtype)
        return _Awaited(tensor, self.group.recv([tensor], self.other, tag))


@dataclass
class _Awaited:
    """A message that was asked for, with the tensor it is written to."""

    tensor: Tensor
    work: Any

    def take(self) -> Tensor:
        """The message, once it is there."""
        self.work.wait(_FOREVER)
        return self.tensor


def _usual(body: Tensor) -> tuple[torch.dtype, int] | None:
    """Dtype and size of ``body``, if it is large enough to be the usual one and small enough to keep memory for it."""
    least, most = _USUAL_BYTES
    return (body.dtype, body.numel()) if least <= body.numel() * body.element_size() <= most else None


def head(*numbers: float) -> Tensor:
    """A message header that begins with ``numbers``, padded with zeros; float64 [HEAD]."""
    padded = torch.zeros(HEAD, dtype=torch.float64)
    padded[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    return padded


class Exchange:
    """Request and reply between ranks: ``clients`` ask, and each of ``hosts`` answers. A rank may be both.

    All ranks construct their exchanges in the same order. ``returning`` are hosts that come back if they are lost. A
    request to such a host is repeated then, so it may arrive twice. ``patience_s`` is the longest time in seconds to
    wait for a host.
    """

    def __init__(
        self, rank: int, clients: Sequence[int], hosts: Sequence[int], *, returning: Collection[int] = (),
        patience_s: float = 600.0,
    ) -> None:  # fmt: skip
        self.rank, self.hosts, self.clients = rank, tuple(hosts), tuple(clients)
        self._returning, self._patience_s = frozenset(returning), patience_s
        self._channels: dict[int, Channel] = {}
        self._threads: list[threading.Thread] = []
        self._answering = Holding()
        self._connections: list[_Connection] = []
        self._requests: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._handle: Handle | None = None
        self._on_check: Callable[[int], None] | None = None
        self._closed = False
        self._name = f"exchange/{next(_NUMBERS)}"
        store = store_of_ranks() if len({*hosts, *clients}) > 1 else None
        self._store = None if store is None else PrefixStore(self._name, store.clone())
        _open_exchanges.add(self)

    def store_value(self, value: Any, name: str = "noted") -> None:
        """Store a JSON value under ``name`` for ranks that join late."""
        if self._store is not None:
            self._store.set(name, json.dumps(value))

    def stored_value(self, name: str = "noted") -> Any:
        """The value that :meth:`store_value` has stored."""
        assert self._store is not None
        return json.loads(self._store.get(name))

    def answering_bytes(self) -> int:
        """The most bytes of requests and replies that the threads of this host held at once since the last call."""
        return self._answering.most_since()

    @property
    def closed(self) -> bool:
        """Whether this end was closed."""
        return self._closed

    def serve(
        self, handle: Handle, on_lost: Callable[[int], None], on_check: Callable[[int], None] | None = None
    ) -> None:  # fmt: skip
        """Answer each client in threads of its own. ``on_lost`` is called with a client whose connection has broken,
        and ``on_check`` with each client at every check for a call."""
        self._handle, self._on_check = handle, on_check
        for client in self.clients:
            if client != self.rank:
                thread = threading.Thread(
                    target=or_fail(self._serve_client), args=(client, handle, on_lost), daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def connect(self) -> None:
        """Connect to all hosts, if this rank is a client."""
        for host in self.hosts if self.rank in self.clients else ():
            if host != self.rank and host not in self._channels:
                self._channels[host] = self._call(host)

    def ask(self, requests: Sequence[tuple[Tensor, Tensor | None]]) -> list[tuple[Tensor, Tensor | None]]:
        """Send one request to each host, then wait for the replies; returns them in the order of hosts."""
        self.request(requests)
        return self.replies()

    def request(self, requests: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Send one request to each host, for :meth:`replies`. Replies to an earlier request are dropped."""
        if self._requests:
            self.replies()
        self.connect()
        self._requests = dict(zip(self.hosts, requests, strict=True))
        for host, request in self._requests.items():
            if host != self.rank:
                with self._tolerate_loss(host):
                    self._channels[host].expect()
                    self._channels[host].send(*request)

    def replies(self) -> list[tuple[Tensor, Tensor | None]]:
        """The replies to :meth:`request`, in the order of hosts."""
        requests_by_host, self._requests = self._requests, {}
        replies: dict[int, tuple[Tensor, Tensor | None]] = {}
        if self.rank in requests_by_host:
            assert self._handle is not None
            replies[self.rank] = self._handle(self.rank, *requests_by_host[self.rank])
        for host, request in requests_by_host.items():
            while host not in replies:
                with self._tolerate_loss(host):
                    if host not in self._channels:
                        self._channels[host] = self._call(host)
                        self._channels[host].send(*request)
                    replies[host] = self._channels[host].receive()
        return [replies[host] for host in self.hosts]

    @contextlib.contextmanager
    def _tolerate_loss(self, host: int) -> Iterator[None]:
        """Context in which the loss of a returning host leaves it unconnected."""
        try:
            yield
        except RuntimeError:
            if host not in self._returning or host not in self._channels:
                raise
            del self._channels[host]

    def _call(self, host: int) -> Channel:
        """Connect to ``host``, and try again until it answers.

        Raises:
            RuntimeError: it did not answer within :attr:`_patience_s`.
        """
        assert self._store is not None
        until = time.monotonic() + self._patience_s
        while True:
            name = secrets.token_hex(8)
            self._store.set(f"call/{self.rank}/{host}", name)
            try:
                return Channel(self._group(self._store, name, 0), 1)
            except RuntimeError:
                if time.monotonic() > until:
                    raise

    def _group(self, store: Store, name: str, end: int) -> Any:
        return ProcessGroupGloo(PrefixStore(name, store.clone()), end, 2, timeout=timedelta(seconds=CONNECT_S))

    def _serve_client(self, client: int, handle: Handle, on_lost: Callable[[int], None]) -> None:
        """Answer ``client``, and any process that takes its place. Each connection has a thread of its own, because the
        thread of a client that is gone may still be waiting for others."""
        assert self._store is not None
        store, last, connection = self._store.clone(), "", None
        with contextlib.suppress(RuntimeError):  # the run has ended, and its store with it
            while (name := self._next_call(store, client, last, connection)) is not None:
                last = name
                try:
                    channel = Channel(self._group(store, name, 1), 0)
                except RuntimeError:  # the caller is gone, or has called again
                    continue
                store.set(f"answered/{client}/{self.rank}", name)
                if connection is not None:
                    connection.end()
                connection = _Connection(client, channel, handle, on_lost, self._answering)
                self._connections.append(connection)
                connection.thread.start()

    def _next_call(self, store: Store, client: int, last: str, connection: _Connection | None) -> str | None:
        """The next name under which ``client`` calls, other than ``last`` and names that were answered here before.
        None if this end is closed, or the client has announced that it leaves."""
        call, answered = f"call/{client}/{self.rank}", f"answered/{client}/{self.rank}"
        while not self._closed and not (connection is not None and connection.client_left):
            if self._on_check is not None:
                self._on_check(client)
            if store.check([call]):
                name = str(store.get(call).decode())
                if name != last and not (store.check([answered]) and store.get(answered).decode() == name):
                    return name
            time.sleep(_POLL_S if connection is None or connection.ended else _POLL_CONNECTED_S)
        return None

    def close(self) -> None:
        """Tell every host that this client leaves, and wait for the threads that serve clients here."""
        for channel in self._channels.values():
            with contextlib.suppress(RuntimeError):  # it has left before
                channel.send(head(LEAVING), None)
        self._closed = True
        until = time.monotonic() + _LEAVE_TIMEOUT_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))
        self._channels, self._threads = {}, []
        if not any(
            connection.thread.is_alive() for connection in self._connections
        ):  # else a client has not left, and end() waits for it
            _open_exchanges.discard(self)

    def end(self) -> None:
        """Close at the end of the process, and wait until all clients have gone, at most :data:`_END_TIMEOUT_S`
        seconds. A thread that still waits for a message while the interpreter ends aborts the process, and gloo cannot
        stop it."""
        self.close()
        until = time.monotonic() + (
            0.0 if hasattr(sys, "last_value") else _END_TIMEOUT_S
        )  # after an exception others wait
        for connection in self._connections:
            connection.thread.join(timeout=max(0.0, until - time.monotonic()))


@atexit.register
def _close_all() -> None:
    for exchange in list(_open_exchanges):
        exchange.end()


class Holding:
    """Counts the bytes that several threads hold, and the most at once."""

    def __init__(self) -> None:
        self._bytes = self._most = 0
        self._lock = threading.Lock()

    def add(self, tensor: Tensor | None, sign: int = 1) -> None:
        """Count the bytes of ``tensor``; with ``sign`` -1 they are no longer held."""
        with self._lock:
            self._bytes += 0 if tensor is None else sign * tensor.nbytes
            self._most = max(self._most, self._bytes)

    def most_since(self) -> int:
        """The most bytes held at once since the last call."""
        with self._lock:
            most, self._most = self._most, self._bytes
            return most


class _Connection:
    """The host's end of one connection, while it lasts. ``client_left``: the client has announced that it leaves.
    ``thread`` answers its requests."""

    def __init__(
        self, client: int, channel: Channel, handle: Handle, on_lost: Callable[[int], None], holding: Holding
    ) -> None:
        self._client, self._channel, self._handle, self._on_lost = client, channel, handle, on_lost
        self._holding = holding
        self._lock = threading.Lock()
        self.client_left = self.ended = False
        self.thread = threading.Thread(target=or_fail(self._run), daemon=True)

    def _run(self) -> None:
        """Answer requests until the connection ends."""
        with contextlib.suppress(RuntimeError):  # the other end is gone
            while (reply := self._reply()) is not None:
                self._channel.send(*reply)
                self._holding.add(reply[1], -1)
                del reply
        self.end()

    def _reply(self) -> tuple[Tensor, Tensor | None] | None:
        """The reply to the next request, whose body is freed by then; None if the client leaves."""
        header, body = self._channel.receive()
        alive.beat()
        if header[0] == LEAVING:
            self.client_left = True
            return None
        self._holding.add(body)
        try:
            reply = self._handle(self._client, header, body)
            self._holding.add(reply[1])
        finally:
            self._holding.add(body, -1)
        return reply

    def end(self) -> None:
        """Report the client as lost, once."""
        with self._lock:
            if not self.ended:
                self._on_lost(self._client)
            self.ended = True
