"""Requests to stop that come too early: held back until somebody is there who saves the state, never lost and never
fatal. A terminal that goes away (SIGHUP) is such a request to whoever started the ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

_TERM = {signal.SIGTERM, signal.SIGHUP}


def hold_sigterm() -> None:
    """From here on SIGTERM (and SIGHUP) waits, for this thread and what it starts, until :func:`take_sigterm`."""
    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_BLOCK, _TERM)


def take_sigterm() -> None:
    """Deliver a SIGTERM that was held back, and hold back no more. Called with a handler in place."""
    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERM)


@contextlib.contextmanager
def held_while_starting(held: bool) -> Iterator[None]:
    """With ``held``, processes started within hold SIGTERM back; afterwards this one takes it."""
    if held:
        hold_sigterm()
    try:
        yield
    finally:
        if held:
            take_sigterm()


def leave_terminal() -> None:
    """Where standard streams are a terminal, which is gone, words go nowhere: nobody ends for not being heard."""
    for stream in (0, 1, 2):
        with contextlib.suppress(OSError):
            if os.isatty(stream):
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, stream)
                os.close(nowhere)
