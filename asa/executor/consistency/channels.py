"""Messages between a worker and its servers: one process group per pair, so that a lost rank harms no other pair.

Everything travels as tensors in ``torch.distributed`` point-to-point operations over gloo, on the host. A request is a
header [16] of float64 (operation and numbers) and, if the header says so, a body; so is a reply.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FOREVER = timedelta(days=7)
"""Time limit of messages. A worker or server may wait for another as long as that lives; a lost rank closes its
sockets."""

Handle = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""Function from a worker's request (rank, header, body) to a reply (header, body)."""

_LEAVE_S = 1.0
"""Seconds that clients may take to report that they leave; one that hangs never does."""

HEAD = 16
"""Length of a header; its last two entries describe the body."""
LEAVING = -1.0
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int8)


class Channel:
    """One end of the connection between two ranks."""

    def __init__(self, group: Any, other: int) -> None:
        self.group, self.other = group, other

    def send(self, head: Tensor, body: Tensor | None) -> None:
        """Send ``head`` [HEAD] float64, whose last two entries (dtype and size of the body) are filled in here, and
        ``body``."""
        head = head.clone()
        head[-2] = -1.0 if body is None else float(_DTYPES.index(body.dtype))
        head[-1] = 0.0 if body is None else float(body.numel())
        dist.send(head, self.other, group=self.group)
        if body is not None and body.numel():
            dist.send(body.contiguous(), self.other, group=self.group)

    def receive(self) -> tuple[Tensor, Tensor | None]:
        """Receive a header and its body (None if there is none) from the other end."""
        head = torch.empty(HEAD, dtype=torch.float64)
        dist.recv(head, self.other, group=self.group)
        if head[-2] < 0:
            return head, None
        body = torch.empty(int(head[-1]), dtype=_DTYPES[int(head[-2])])
        if body.numel():
            dist.recv(body, self.other, group=self.group)
        return head, body


def head(*numbers: float) -> Tensor:
    """A message header that begins with ``numbers``, padded with zeros; float64 [HEAD]."""
    found = torch.zeros(HEAD, dtype=torch.float64)
    found[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    return found


class Exchange:
    """Request and reply between ranks: ``clients`` ask, each of ``hosts`` answers. A rank may be both.

    Every rank must construct one (collective).
    """

    def __init__(self, rank: int, clients: Sequence[int], hosts: Sequence[int]) -> None:
        self.rank, self.hosts, self.clients = rank, tuple(hosts), tuple(clients)
        self._to: dict[int, Channel] = {}
        self._from: dict[int, Channel] = {}
        self._threads: list[threading.Thread] = []
        self._handle: Handle | None = None
        for host in hosts:
            for client in clients:
                if client == host:
                    continue
                group = dist.new_group([client, host], backend="gloo", timeout=_FOREVER)
                if rank == client:
                    self._to[host] = Channel(group, host)
                elif rank == host:
                    self._from[client] = Channel(group, client)

    def serve(self, handle: Handle, lost: Callable[[int], None]) -> None:
        """Answer each client in its own thread; ``lost`` is called with a client whose connection has broken."""
        self._handle = handle
        for client, channel in self._from.items():
            thread = threading.Thread(target=_answer, args=(client, channel, handle, lost), daemon=True)
            thread.start()
            self._threads.append(thread)

    def ask(self, requests: Sequence[tuple[Tensor, Tensor | None]]) -> list[tuple[Tensor, Tensor | None]]:
        """Send one request to each host, then wait for the replies; returns them in the order of hosts."""
        for host, request in zip(self.hosts, requests, strict=True):
            if host != self.rank:
                self._to[host].send(*request)
        found: dict[int, tuple[Tensor, Tensor | None]] = {}
        for host, request in zip(self.hosts, requests, strict=True):
            if host == self.rank:
                assert self._handle is not None
                found[host] = self._handle(self.rank, *request)
        for host in self.hosts:
            if host != self.rank:
                found[host] = self._to[host].receive()
        return [found[host] for host in self.hosts]

    def close(self) -> None:
        """Tell every host that this client leaves, and wait for the threads that serve clients here."""
        for channel in self._to.values():
            with contextlib.suppress(RuntimeError):  # it has left before
                channel.send(head(LEAVING), None)
        until = time.monotonic() + _LEAVE_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))
        self._to, self._from, self._threads = {}, {}, []


def _answer(client: int, channel: Channel, handle: Handle, lost: Callable[[int], None]) -> None:
    try:
        while True:
            asked, body = channel.receive()
            if asked[0] == LEAVING:
                break
            channel.send(*handle(client, asked, body))
    except RuntimeError:  # the other end is gone
        pass
    lost(client)
