"""Handling of Ctrl-C, and of SIGTERM, as Slurm, Kubernetes and ``timeout`` send it: a command without state to save
ends like after Ctrl-C. Its ranks are killed, and with --json a document reports the end; a second signal ends it at
once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from asa.cli.interrupts import interrupted
from asa.launch import signals

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process ended by SIGTERM, as reported by a shell."""


class Terminated(BaseException):
    """Raised by SIGTERM. Like KeyboardInterrupt it is not an error that other code should handle."""


INTERRUPTED = "interrupted", 130
TERMINATED = "terminated by SIGTERM", EXIT_CODE
"""What is printed, and the exit code, behind Ctrl-C and SIGTERM."""

End = Callable[[str, int], object]
"""Prints a line (and with --json a document) that the process ends, with an exit code."""


@contextmanager
def interruptible(end: End) -> Iterator[None]:
    """Context in which Ctrl-C raises KeyboardInterrupt. While a module is imported it ends the process at once, behind
    ``end``: what is raised there may be lost in an extension module, or become another error. Nothing is to be saved
    then. Processes forked here are interrupted as usual."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, interrupted):
        yield
        return
    owner = os.getpid()

    def answer(_number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            _end_import(frame, end, *INTERRUPTED)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_import(frame: FrameType | None, end: End, message: str, code: int) -> None:
    """End this process if ``frame`` runs within an import, and no rank has begun a step."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    if frame is not None and not signals.begun:
        with suppress(Exception):  # a part of this package may be what is imported
            end(message, code)
        os._exit(code)


@contextmanager
def terminable(end: End) -> Iterator[None]:
    """Context in which SIGTERM raises :class:`Terminated`, unless it is already handled or ignored. While a module is
    imported it ends the process at once, behind ``end``. Processes forked here are ended by it as usual."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # only the main thread may set handlers
        return
    owner = os.getpid()

    def answer(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != owner:
            signal.raise_signal(number)
        _end_import(frame, end, *TERMINATED)
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
