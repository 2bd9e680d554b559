"""Handling of Ctrl-C, and of SIGTERM, as Slurm, Kubernetes and ``timeout`` send it: a command without state to save
ends like after Ctrl-C. Its ranks are killed, and with --json a document reports the end; a second signal ends it at
once. SIGHUP, by which a closed terminal ends a command, is handled as SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from asa.cli.interrupts import interrupted
from asa.errors import PreemptedError
from asa.launch import signals

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process ended by SIGTERM, as reported by a shell."""


class Terminated(BaseException):
    """Raised by SIGTERM and SIGHUP. Like KeyboardInterrupt it is not an error that other code should handle."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)


INTERRUPTED = "interrupted", 130
"""What is printed, and the exit code, behind Ctrl-C."""


def terminated(number: int, argv: Sequence[str]) -> tuple[str, int]:
    """What is printed, and the exit code, behind the signal ``number`` to the command ``argv``: ``asa train`` that has
    not begun a step has nothing to save."""
    saves = argv[:1] == ["train"] and not any(word.startswith("--rehearse") for word in argv)
    if saves and not signals.begun:
        return signals.NOTHING_TO_SAVE, PreemptedError.exit_code
    return f"terminated by {signal.Signals(number).name}", EXIT_CODE


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
def terminable(end: End, argv: Sequence[str] = ()) -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise :class:`Terminated`, which holds the number of the signal, unless they
    are already handled or ignored. While a module is imported they end the process at once, behind ``end``, as the
    command ``argv``. Processes forked here are ended by them as usual."""
    main = threading.current_thread() is threading.main_thread()  # only this thread may set handlers
    handled = [n for n in signals.ENDING if main and signal.getsignal(n) == signal.SIG_DFL]
    owner = os.getpid()

    def answer(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        for each in handled:  # both the shell and the kernel send SIGHUP
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL)
        if number == signal.SIGHUP:
            signals.leave_terminal()
        _end_import(frame, end, *terminated(number, argv))
        raise Terminated(number)

    for number in handled:
        signal.signal(number, answer)
    try:
        signals.take_sigterm()  # since the start of the program it was held back
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def left_to_ranks(launched: bool) -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP are left to the ranks, which save first; a second SIGTERM ends everything at
    once, without output. If this process is a rank that a launcher started (``launched``), they are held back until the
    others run, too. Otherwise they raise :class:`Terminated` before ranks have begun, because there is nothing to save,
    and are noted in :data:`asa.launch.signals.missed` while they are started again.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {n: h for n in signals.ENDING if main and callable(h := signal.getsignal(n))}

    def answer(number: int, _frame: object) -> None:
        if number == signal.SIGHUP:
            signals.leave_terminal()
        if not signals.begun:
            raise Terminated(number)
        signals.missed = True

    signals.missed = False
    if launched or signal.SIGTERM not in before:
        signal.pthread_sigmask(signal.SIG_BLOCK, signals.ENDING)
    for number in before:
        signal.signal(number, signal.SIG_DFL if launched else answer)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.ENDING)
        if signals.missed:
            signals.missed = False
            signal.raise_signal(signal.SIGTERM)
