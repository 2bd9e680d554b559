"""Handling of SIGTERM, as Slurm, Kubernetes and ``timeout`` send it: a command without state to save ends like after
Ctrl-C. Its ranks are killed, and with --json a document reports the end; a second signal ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from asa.launch import signals

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process ended by SIGTERM, as reported by a shell."""


class Terminated(BaseException):
    """Raised by SIGTERM. Like KeyboardInterrupt it is not an error that other code should handle."""


@contextmanager
def terminable() -> Iterator[None]:
    """Context in which SIGTERM raises :class:`Terminated`, unless it is already handled or ignored. Processes forked
    here are ended by it as usual."""
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
def left_to_ranks(launched: bool) -> Iterator[None]:
    """Context in which SIGTERM is left to the ranks, which save first; a second one ends everything at once, without
    output. If this process is a rank that a launcher started (``launched``), it is held back until the others run, too.
    Otherwise it raises :class:`Terminated` before ranks have begun, because there is nothing to save, and is noted in
    :data:`asa.launch.signals.missed` while they are started again.
    """
    before = signal.getsignal(signal.SIGTERM)
    handled = threading.current_thread() is threading.main_thread() and callable(before)

    def answer(_number: int, _frame: object) -> None:
        if not signals.begun:
            raise Terminated
        signals.missed = True

    signals.missed = False
    if launched or not handled:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if handled:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if launched else answer)
    try:
        yield
    finally:
        if handled:
            signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if signals.missed:
            signals.missed = False
            signal.raise_signal(signal.SIGTERM)
