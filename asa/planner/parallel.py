"""Runs work in a forked copy of this process, on another core.

A fork is made only where it is safe and helps: from a process with one thread, without torch (whose threads and devices
do not survive a fork), on two cores or more. Elsewhere the work is done here when its result is asked for. The work
must end by itself: it has the same time limit as what the search does meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

from asa.ir import control_groups

T = TypeVar("T")
_CHUNK = 1 << 16
_SOON_S, _LEAST = 0.0005, 1e-300
_NUMBER = struct.Struct("@d")
_PR_SET_PDEATHSIG = 1


def can_fork() -> bool:
    """Whether a forked copy of this process can work at the same time."""
    if not hasattr(os, "fork") or not hasattr(os, "sched_getaffinity") or "torch" in sys.modules:
        return False
    return threading.active_count() == 1 and min(len(os.sched_getaffinity(0)), control_groups.cores()) > 1


class Forked(Generic[T]):
    """The result of ``work``, done by a forked process; or here, if ``fork`` is false or the fork fails."""

    def __init__(self, work: Callable[[], T], *, fork: bool) -> None:
        self._work, self._result = work, list[T]()
        self._pid = self._source = -1
        if fork:
            with contextlib.suppress(OSError):
                self._fork()

    def _fork(self) -> None:
        parent = os.getpid()
        source, sink = os.pipe()
        try:
            with warnings.catch_warnings():
                # Python warns of threads that it did not start: these are numpy's, which survive a fork.
                warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
                self._pid = os.fork()
        except OSError:
            os.close(source)
            raise
        finally:
            if self._pid:
                os.close(sink)
        if self._pid == 0:
            os.close(source)
            _run_and_write(self._work, sink, parent)
        self._source = source

    def result(self) -> T:
        """The value that ``work`` returned; waits for it."""
        if not self._result:
            data = self._received() if self._pid > 0 else b""
            self._result.append(pickle.loads(data) if data else self._work())
        return self._result[0]

    def _received(self) -> bytes:
        chunks = []
        with open(self._source, "rb", buffering=0) as source:
            while chunk := source.read(_CHUNK):
                chunks.append(chunk)
        pid, self._pid = self._pid, -1
        _, status = os.waitpid(pid, 0)
        return b"".join(chunks) if status == 0 else b""

    def has_ended(self) -> bool:
        """Whether the forked process has ended, or there is none."""
        return self._pid <= 0 or os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def stop(self) -> None:
        """Kill the forked process, whose result is no longer needed."""
        if self._pid > 0:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
            os.close(self._source)
            os.waitpid(self._pid, 0)
            self._pid = -1


class Exchange:
    """Lets this process and a process forked later exchange one number each, which must not be negative."""

    def __init__(self) -> None:
        self._memory, self._made_by = mmap.mmap(-1, 2 * _NUMBER.size), os.getpid()

    def exchange(self, number: float, other: Forked[T] | None = None) -> float:
        """The other process's number, after telling it ``number``; infinite if it ends before it has told one. The
        other process is ``other``, or, where None, the one that made this exchange."""
        side = int(other is None)
        _NUMBER.pack_into(self._memory, side * _NUMBER.size, max(_LEAST, number))
        while True:
            has_ended = os.getppid() != self._made_by if other is None else other.has_ended()
            if received := float(_NUMBER.unpack_from(self._memory, (1 - side) * _NUMBER.size)[0]):
                return received
            if has_ended:
                return float("inf")
            time.sleep(_SOON_S)


def _run_and_write(work: Callable[[], T], sink: int, parent: int) -> NoReturn:
    """Run ``work`` in the process forked by ``parent``, with which it ends, and write its pickled result. It never
    returns, and runs no exit handlers."""
    status = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        data = pickle.dumps(work()) if os.getppid() == parent else b""
        with open(sink, "wb") as out:
            out.write(data)
        status = 0
    finally:
        os._exit(status)
