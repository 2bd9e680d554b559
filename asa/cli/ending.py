"""SIGTERM, as Slurm, Kubernetes and ``timeout`` send it: a command with nothing to save ends in order, as by Ctrl-C.
Its ranks are killed, and under --json a document says how it ended; a second one ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process ended by SIGTERM, as a shell names it."""


class Terminated(BaseException):
    """The signal came. Like KeyboardInterrupt no error that anybody on the way could handle."""


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises :class:`Terminated`, unless somebody else answers or ignores it. Processes that are forked
    here end by it, as ever."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # only the main thread may set handlers
        return
    owner = os.getpid()

    def answer(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != owner:
            signal.raise_signal(number)
        raise Terminated

    signal.signal(signal.SIGTERM, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def left_to_ranks() -> Iterator[None]:
    """Inside, SIGTERM waits for the ranks, who save first: they take it as soon as they run; a second one ends
    everything at once, without a word."""
    before = signal.getsignal(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    taken = threading.current_thread() is threading.main_thread() and callable(before)
    if taken:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        if taken:
            signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
