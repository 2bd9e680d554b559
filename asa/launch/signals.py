"""Blocks SIGTERM until a handler is installed that saves the state, so that an early signal is neither lost nor fatal.
SIGHUP (the terminal was closed) is handled in the same way in the process that started the ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

NOTHING_TO_SAVE = (
    "stopped on request before the first step: nothing was trained since the last checkpoint, so nothing is saved; "
    "give the same command again"
)
begun = False
"""Whether ranks that this process started have begun a step."""
asked = False
"""Whether ranks that this process started were asked to stop. They may have come to their end before."""
missed = False
"""Whether SIGTERM came between two starts of the ranks, when there was none to pass it on to."""
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals by which a command is asked to end."""


def hold_sigterm() -> None:
    """Block SIGTERM and SIGHUP, in this thread and processes it starts, until :func:`take_sigterm`."""
    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def take_sigterm() -> None:
    """Unblock SIGTERM and SIGHUP, and deliver one that was held back. Call it when a handler is installed."""
    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


@contextlib.contextmanager
def held_while_starting(enabled: bool) -> Iterator[None]:
    """Context in which started processes hold SIGTERM back if ``enabled``; this process unblocks it afterwards."""
    if enabled:
        hold_sigterm()
    try:
        yield
    finally:
        if enabled:
            take_sigterm()


def leave_terminal() -> None:
    """Redirect standard streams to ``/dev/null`` if they are a terminal that was closed, so that writing cannot
    fail."""
    for stream in (0, 1, 2):
        with contextlib.suppress(OSError):
            if os.isatty(stream):
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, stream)
                os.close(nowhere)
