"""How many more processes and threads the system allows. At that limit libraries abort, or wait for a thread that never
came."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

from asa.errors import UnavailableError, WorkersFailedError
from asa.ir import control_groups

_FEWEST, _FEWEST_TRAINING, _MOST = 4, 15, 25
"""Threads of a rank: the fewest with which it comes up, with which it trains, and as many as any plan was seen to
need."""
_SIGNS = ("can't start new thread", "Resource temporarily unavailable")


@dataclass(frozen=True, kw_only=True)
class Room:
    """Number of processes and threads that can still be started, of ``limit``, and the ``name`` of that limit."""

    left: int
    limit: int
    name: str

    def __str__(self) -> str:
        return f"{self.left} of {self.limit} are left ({self.name})"


def room() -> Room | None:
    """The tightest limit on further processes and threads; None if there is none."""
    return min((*_of_groups(), *_of_user()), key=lambda r: r.left, default=None)


def check(num_ranks: int, *, training: bool) -> None:
    """Check that ``num_ranks`` ranks can come up, or train.

    Raises:
        UnavailableError: they cannot.
    """
    left, needed = room(), 1 + num_ranks * (_FEWEST_TRAINING if training else _FEWEST)
    if left is not None and left.left < needed:
        raise UnavailableError(f"{num_ranks} ranks need {needed} processes and threads at least, {left}; raise it")


def is_short(error: BaseException) -> bool:
    """Whether ``error`` says that the system started no further process or thread."""
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN and error.filename is None
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def shortage(what: str, left: Room | None, num_ranks: int = 0) -> str:
    """Message that ``what`` failed for lack of processes or threads, of which ``left`` were left."""
    known = "" if left is None else f"; {left}"
    ranks = f"; {num_ranks} ranks need up to {_MOST * num_ranks}" if num_ranks else ""
    return (
        f"{what}: the system allows no more processes or threads{known}{ranks}; raise the limit, or end other processes"
    )


def explains(error: WorkersFailedError, left: Room | None, num_ranks: int) -> bool:
    """Whether a lack of processes explains that one of ``num_ranks`` ranks, with ``left`` before them, failed with
    ``error``. Without a thread, libraries in C++ abort, or hang."""
    few = left is not None and left.left < 1 + _MOST * num_ranks
    silent = error.signal == signal.SIGABRT or (error.lost and error.signal is None)
    return any(sign in str(error) for sign in _SIGNS) or (few and silent)


def _of_groups() -> list[Room]:
    found = []
    for _, folders in control_groups.folders("pids"):
        for folder in folders:
            with contextlib.suppress(OSError, ValueError):  # "max", or a folder that is not there
                limit, used = (int((folder / f"pids.{name}").read_text()) for name in ("max", "current"))
                found.append(Room(left=max(0, limit - used), limit=limit, name="pids.max of its control group"))
    return found


def _of_user() -> list[Room]:
    """The limit of this user, which root does not have."""
    limit, user = resource.getrlimit(resource.RLIMIT_NPROC)[0], os.getuid()
    if limit == resource.RLIM_INFINITY or user == 0:
        return []
    used = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            used += len(os.listdir(folder / "task")) if folder.stat().st_uid == user else 0
    return [Room(left=max(0, limit - used), limit=limit, name="ulimit -u")]
