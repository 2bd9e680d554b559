"""Output: data to stdout, everything else to stderr; with --json stdout contains exactly one document."""

from __future__ import annotations

import codecs
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from asa.errors import UnavailableError
from asa.launch.environments import is_launched

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType
    from rich.progress import Progress

Report = Callable[[float, str], None]
"""Progress function of long work: gets the fraction done, and what is being done."""


class Console:
    """Output of a process. Ranks other than 0 print nothing but data; progress is shown only on a terminal."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.first_rank = not is_launched() or os.environ["RANK"] == "0"
        self._document_to: TextIO | None = None
        self._document_printed = False
        self._bars: Progress | None = None

    def show(self, *parts: RenderableType) -> None:
        """Print tables and lines for people to stdout; nothing with --json."""
        if self.as_json or not self.first_rank:
            return
        from rich.text import Text

        from asa.report.text.tables import folded

        console, tables = _rich(stderr=False), _rich(stderr=False)
        tables.width = max(tables.width, _TABLE_WIDTH)
        for part in parts:
            if isinstance(part, Text) and console.is_terminal:
                part = Text(folded(part.plain, console.width), style=part.style)
            # Sentences that go to a pipe stay on one line. Tables are not squeezed: a narrow terminal wraps them.
            with reaching_stdout():
                if isinstance(part, Text):
                    console.print(part, soft_wrap=True)
                else:
                    tables.print(part)

    def text(self, text: str) -> None:
        """Print a text that is the result itself, such as a script, to stdout; nothing with --json."""
        if self.as_json or not self.first_rank:
            return
        with reaching_stdout():
            sys.stdout.write(text.rstrip("\n") + "\n")
            sys.stdout.flush()

    def say(self, message: str, *, verbatim: bool = False) -> None:
        """Print a message to stderr. Failure to write (a full disk, a closed terminal) is ignored.

        On a terminal it is wrapped at words; ``verbatim``: it is not, as it contains a command that people copy.
        """
        if self.first_rank:
            console = self._bars.console if self._bars is not None else _rich(stderr=True)
            if console.is_terminal and not verbatim:
                from asa.report.text.tables import folded

                message = folded(message, console.width)
            with _unheard(2):
                console.print(message, markup=False, highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        """Print a line of a report that grows during work: to stdout, with --json to stderr. Failure to write is
        ignored, so that work goes on when nobody reads."""
        if self.as_json or (self._bars is not None and sys.stdout.isatty()):
            self.say(text)  # above the bar, which is on the same terminal
        elif self.first_rank:
            with _unheard(1):
                sys.stdout.write(text + "\n")
                sys.stdout.flush()

    def document(self, data: dict[str, Any]) -> None:
        """Print the one JSON document to stdout, with its schema version; nothing without --json, nor after the first
        document: the end of a command is then reported by its exit code."""
        if not self.as_json or not self.first_rank or self._document_printed:
            return
        from asa.ir.codec import SCHEMA_VERSION

        text = json.dumps({"schema_version": SCHEMA_VERSION, **data}, indent=1, allow_nan=False) + "\n"
        stream = self._document_to or sys.stdout
        try:
            stream.write(text)
            stream.flush()
            self._document_printed = True
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UnavailableError(f"cannot write the document to stdout: {error.strerror or error}") from None

    @contextmanager
    def keeping_stdout(self) -> Iterator[None]:
        """Context in which, with --json, output of libraries and workers goes to stderr; only the document reaches
        stdout."""
        if not self.as_json:
            yield
            return
        sys.stdout.flush()
        descriptor = os.dup(1)
        os.dup2(2, 1)
        stream = os.fdopen(descriptor, "w", encoding="utf-8") if _is_descriptor_1(sys.stdout) else sys.stdout
        self._document_to = stream
        try:
            with redirect_stdout(sys.stderr):
                yield
        finally:
            os.dup2(descriptor, 1)
            self._document_to = None
            if stream is sys.stdout:
                os.close(descriptor)
            else:
                with suppress(OSError):  # a failure to write was reported when flushing
                    stream.close()

    def result(self, data: dict[str, Any], parts: Callable[[], Iterable[RenderableType]]) -> None:
        """Print the document with --json, tables otherwise."""
        if self.as_json:
            self.document(data)
        else:
            self.show(*parts())

    @contextmanager
    def _now_and_then(self, title: str) -> Iterator[Report]:
        """Context with a progress function. A line goes to stderr ten seconds after the start or the last line, or
        without an alarm at the next call after that."""
        began = last = time.monotonic()
        known = (0.0, "")

        def line() -> str:
            (fraction, what), seconds = known, time.monotonic() - began
            eta = f", about {seconds * (1 - fraction) / fraction:.0f} s left" if _TELLING <= fraction < 1 else ""
            told = (
                f": {what}, {100 * fraction:.0f} % after {seconds:.0f} s{eta}" if what else f", {seconds:.0f} s so far"
            )
            return f"asa: {title}{told}"

        def report(fraction: float, what: str) -> None:
            nonlocal last, known
            known = (fraction, what)
            if not rings and time.monotonic() - last >= LINE_EVERY_S:
                last = time.monotonic()
                self.say(line())

        with _alarm(line) as rings:
            yield report

    @contextmanager
    def progress(self, title: str) -> Iterator[Report]:
        """Context with a progress bar and ETA on stderr; if stderr is not a terminal, a line every ten seconds."""
        if not self.first_rank:
            yield _quiet
            return
        if self.as_json or not sys.stderr.isatty():
            with self._now_and_then(title) as report:
                yield report
            return
        from rich.progress import (
            BarColumn,
            Progress,
            ProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        terminal = _rich(stderr=True)
        bar = max(4, min(30, terminal.width - 88))
        columns: tuple[ProgressColumn, ...] = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=bar),
            TextColumn("{task.percentage:3.0f} %"),
            *([TimeElapsedColumn()] if terminal.width >= 100 else []),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        room = max(8, min(60, terminal.width - bar - 20 - 8 * (terminal.width >= 100)))
        # Nothing is redirected: what goes to stdout may go to a file.
        with Progress(*columns, console=terminal, transient=True, redirect_stdout=False, redirect_stderr=False) as bars:
            task = bars.add_task(title, total=1.0)
            self._bars = bars

            def report(fraction: float, what: str) -> None:
                bars.update(task, completed=fraction, description=f"{title}: {what}"[:room])

            try:
                yield report
            finally:
                self._bars = None

    @contextmanager
    def waiting(self, title: str) -> Iterator[None]:
        """Context in which a line goes to stderr every ten seconds, for work that cannot say how much is done."""
        if not self.first_rank:
            yield
            return
        with self._now_and_then(title):
            yield


_TABLE_WIDTH = 80
"""Least number of columns that tables are laid out for."""

_TELLING = 0.1
"""Fraction of long work from which on the time so far tells how long the rest takes."""

LINE_EVERY_S = 10.0
"""Seconds between lines of progress if there is no terminal."""


@contextmanager
def _alarm(line: Callable[[], str]) -> Iterator[bool]:
    """Context that writes ``line()`` to stderr every ten seconds, and whether it does: not outside the main thread, on
    a launcher's rank, or if the process uses SIGALRM itself."""
    free = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and not is_launched()
    if not free or threading.current_thread() is not threading.main_thread():
        yield False
        return

    def tell(*_: object) -> None:  # not by a stream, which may be in use when the signal arrives
        with suppress(OSError):
            os.write(2, f"{line()}\n".encode())

    signal.signal(signal.SIGALRM, tell)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, LINE_EVERY_S, LINE_EVERY_S)
    try:
        yield True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@contextmanager
def _unheard(descriptor: int) -> Iterator[None]:
    """Context in which a failure to write to ``descriptor`` redirects all later output there to nowhere."""
    try:
        yield
    except (OSError, SystemExit):  # rich raises SystemExit for a closed pipe
        _to_nowhere(descriptor)


@contextmanager
def reaching_stdout() -> Iterator[None]:
    """Context in which results are written to stdout. If their reader has gone, as in ``| head``, later output goes
    nowhere, and the command ends as if all had been read.

    Raises:
        UnavailableError: they cannot be written for another reason, such as a full disk.
    """
    try:
        yield
    except (BrokenPipeError, SystemExit):
        _to_nowhere(1)
    except OSError as error:
        _to_nowhere(1)  # what is left in the buffer would be complained of once more at the end
        raise UnavailableError(f"cannot write to stdout: {error.strerror or error}") from None


def legible_stdout() -> None:
    """Let stdout take every text: what its encoding lacks, as ASCII has no check mark and UTF-8 no half of a character
    in a file's name, is written in characters that it has."""
    codecs.register_error(_LEGIBLE, _in_ascii)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors=_LEGIBLE)


_LEGIBLE = "asa.legible"
_ASCII = {"✓": "+", "✗": "x", "–": "-"}


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    mark = _ASCII.get(error.object[error.start])
    return (mark, error.start + 1) if mark else codecs.backslashreplace_errors(error)


def _to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _quiet(fraction: float, what: str) -> None:
    """Ignore progress."""


def _rich(*, stderr: bool) -> RichConsole:
    from rich.console import Console as Rich

    # Output that is piped keeps its lines whole: tools cut and grep them.
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 200
    return Rich(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def _is_descriptor_1(stream: TextIO) -> bool:
    """Whether ``stream`` is the process's own stdout, and not a replacement (of a notebook, of a test)."""
    try:
        return stream.fileno() == 1
    except (OSError, ValueError, AttributeError):
        return False
