"""One rank's process: it joins the process group, runs the user's function, and reports to the parent."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import re
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed exports no types
from torch.distributed.distributed_c10d import _get_default_store

from asa.errors import AsaError, UnavailableError, WorkersFailedError, place_of
from asa.launch import alive, faults
from asa.launch.environments import Environment
from asa.launch.heap import keep_freed_memory

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process gets when its parent ends."""

# gloo's messages begin with a position in its source code.
_PLACE = re.compile(r"\[[^\]]*\.(cc|cpp|h):\d+\] ?")
# Errors of a rank whose peer is gone; the rank that reports one is a victim, not the cause.
_UNMET = re.compile(r"connectFullMesh failed.*Connection (closed|reset) by peer", re.DOTALL)
_COLLECTIVE = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Timed out|[Tt]imeout|Broken pipe|TCPStore")

_parent: Connection | None = None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a rank failed. ``collective``: while waiting for others, so it is most likely a victim. ``unmet``: gloo lost
    another rank during start-up, which happens if many groups use and free ports at once.

    ``error``: the exception itself if it is an :class:`AsaError`; ``line``: description in one line; ``signal``: the
    signal that killed it. ``lost``: it ended without a report, or hangs.
    """

    line: str
    collective: bool
    trace: str = ""
    error: AsaError | None = None
    signal: int | None = None
    unmet: bool = False
    lost: bool = False


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Start-up settings of a rank. It ends with the process ``parent``. If heartbeats are watched, they are counted in
    ``counters``, and ``steps`` has the current step. ``late``: it is a :class:`Latecomer`."""

    rank: int
    num_ranks: int
    backend: str
    port: int
    where: Environment
    threads: int
    timeout_s: float
    parent: int
    counters: Any = None
    steps: Any = None
    late: bool = False


@dataclass(frozen=True, kw_only=True)
class Latecomer:
    """A rank that takes the place of a lost one. It is in no process group, and finds the others in the ``store``."""

    rank: int
    num_ranks: int
    store: Store


_late: Latecomer | None = None
_store: Store | None = None


def latecomer() -> Latecomer | None:
    """What this process is if it takes the place of a lost rank; otherwise None."""
    return _late


def store_of_ranks() -> Store:
    """The store in which all ranks meet, those that come late included."""
    if _late is not None:
        return _late.store
    return _get_default_store() if _store is None else _store


def tell(message: Any) -> None:
    """Send ``message`` (anything picklable) to the parent's ``on_message``; does nothing without a parent."""
    if _parent is not None:
        _send(_parent, ("message", message))


def or_fail(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` for a thread whose work other ranks wait for: an error in it is reported and ends this rank, where
    Python would print it and let all ranks wait until they are found to hang."""

    def run(*args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            try:
                if _parent is None:
                    traceback.print_exc()
                else:
                    _send(_parent, ("failure", failure(error)))
            finally:  # also where the parent can no longer be told
                os._exit(1)

    return run


_SOONER = 500
"""Value added to the rank's OOM score (of 1000), by which the kernel chooses a process to kill."""


def _go_first() -> None:
    """Let the kernel kill this rank rather than its parent if memory runs out, because the parent can plan again."""
    with contextlib.suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + _SOONER)))


def work(
    setting: Setting,
    connection: Connection,
    inherited: tuple[Connection | socket.socket, ...],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Body of a rank's process. Never returns: every path ends in ``os._exit``, after a report if one can be made.

    A plain exit would run destructors of a process group without peers. These abort, and the wrong rank is blamed.
    """
    global _parent
    code, met = 1, False
    try:
        _guard(setting.parent)
        _go_first()
        gc.freeze()  # garbage collection of the parent's objects would copy all their pages
        for item in inherited:
            item.close()
        _parent = connection
        alive.count_in(setting.counters, setting.rank, setting.steps)
        if setting.where.enter is not None:
            setting.where.enter(setting.rank)
        _enter(setting)
        met = True
        result = function(setting.rank, *args)
        _send(connection, ("result", result))
        # Exiting closes sockets that a slower rank may still read from, so wait for the parent's message.
        with contextlib.suppress(EOFError, OSError):
            connection.recv_bytes()
        code = 0
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        if code:
            with contextlib.suppress(Exception):
                unmet = not met and _UNMET.search(str(error)) is not None
                _send(connection, ("failure", replace(failure(error), unmet=unmet)))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def failure(error: BaseException) -> Failure:
    """Report on ``error``: one line, and the full traceback."""
    text = " ".join(_PLACE.sub("", _first_and_last(str(error))).split())
    if isinstance(error, SystemExit):
        line = f"called sys.exit({error.code!r}) before it was done"
    else:
        line = f"failed with {type(error).__name__}" + (f": {text}" if text else "")
        line = (line if len(line) <= 400 else line[:397] + "...") + place_of(error)
    is_report = isinstance(error, WorkersFailedError) and error.rank is None
    collective = _in_waiting(error) or (is_report and _in_waiting(error.__cause__))
    trace = "".join(traceback.format_exception(error))
    return Failure(
        line=line,
        collective=collective,
        trace=trace,
        error=error if isinstance(error, AsaError) and _pickles(error) else None,
    )


def _first_and_last(text: str) -> str:
    """``text`` without the traceback that a data loader's worker process puts in the middle of its message."""
    head, marker, trace = text.partition("Original Traceback (most recent call last)")
    return head + trace.strip().splitlines()[-1] if marker else text


def _in_waiting(error: BaseException | None) -> bool:
    """Whether ``error`` is of the kind that a rank sees when another rank is gone."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and not isinstance(error, NotImplementedError)
        and _COLLECTIVE.search(str(error)) is not None
    )


@contextlib.contextmanager
def others_may_leave() -> Iterator[None]:
    """Context that turns the error of a collective after a lost rank into one line.

    Raises:
        WorkersFailedError: another rank is gone.
    """
    try:
        yield
    except RuntimeError as error:
        found = failure(error)
        if not found.collective:
            raise
        line = found.line.partition(". This is typically")[0]
        raise WorkersFailedError(
            f"another rank is gone: start all ranks again and resume from the last checkpoint (this rank {line})"
        ) from error


def _pickles(value: object) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


def _send(connection: Connection, message: tuple[str, Any]) -> None:
    # Plain pickle: multiprocessing's own would pass tensors as shared-memory handles, which die with this process.
    connection.send_bytes(pickle.dumps(message))


def _guard(parent: int) -> None:
    """Make this process die with its parent, and ignore Ctrl-C and SIGHUP, which are the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before prctl took effect
        os._exit(1)


def _enter(setting: Setting) -> None:
    """Set up threads, memory, standard output, device and process group."""
    torch.set_num_threads(setting.threads)
    keep_freed_memory()
    # gloo writes lines of its own to descriptor 1, which belongs to the parent's one JSON document.
    with open(os.devnull, "w") as nowhere, contextlib.suppress(OSError):
        os.dup2(nowhere.fileno(), 1)
    sys.stdout = sys.stderr
    separate = setting.where.interface is not None
    os.environ.update(
        RANK=str(setting.rank),
        LOCAL_RANK="0" if separate else str(setting.rank),
        WORLD_SIZE=str(setting.num_ranks),
        LOCAL_WORLD_SIZE="1" if separate else str(setting.num_ranks),
        MASTER_ADDR=setting.where.host,
        MASTER_PORT=str(setting.port),
    )
    if setting.where.interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = setting.where.interface
    elif sys.platform == "linux":
        # All ranks are on this host; its name may resolve to an interface that is not usable.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    faults.reached("rendezvous")
    timeout = timedelta(seconds=setting.timeout_s)
    store = TCPStore(setting.where.host, setting.port, None, False, timeout=timeout)
    shared = PrefixStore("asa", store)
    if setting.late:
        come_late(setting.rank, setting.num_ranks, shared)
    else:
        form_group(setting.backend, shared, setting.rank, setting.num_ranks, setting.rank, timeout)


def come_late(rank: int, num_ranks: int, store: Store) -> None:
    """Make this process take the place of a lost rank, in no process group."""
    global _late
    _late = Latecomer(rank=rank, num_ranks=num_ranks, store=store)


def form_group(backend: str, store: Store, rank: int, num_ranks: int, local_rank: int, timeout: timedelta) -> None:
    """Join the default process group. With ``nccl`` there is also gloo, for votes that must not wait for the device.

    Raises:
        UnavailableError: the network interface that ranks are to use is not there, or has no address.
    """
    global _store
    _store = store
    try:
        _init_group(backend, store, rank, num_ranks, local_rank, timeout)
    except RuntimeError as error:
        if "Unable to find address for" not in str(error):
            raise
        named = f"GLOO_SOCKET_IFNAME={os.environ.get('GLOO_SOCKET_IFNAME', '')}"
        there = ", ".join(name for _, name in socket.if_nameindex())
        raise UnavailableError(
            f"{named}: no such network interface, or none with an address; this host has {there}: name one, or unset it"
        ) from None


def _init_group(
    backend: str, store: Store, rank: int, num_ranks: int, local_rank: int, timeout: timedelta
) -> None:  # fmt: skip
    if backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=num_ranks, timeout=timeout, device_id=device
        )
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def leave_group() -> None:
    """Leave the default process group, and forget the store in which its ranks met."""
    global _store
    _store = None
    dist.destroy_process_group()
