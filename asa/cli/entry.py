"""Dispatch of the command line to a command, and conversion of every outcome to an exit code and one line."""

from __future__ import annotations

import errno
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from asa.cli import ending
from asa.cli.console import Console, legible_stdout, reaching_stdout
from asa.cli.verbs import VERBS, verbs
from asa.errors import AsaError, UnavailableError, UsageError, lacking
from asa.launch import processes

if TYPE_CHECKING:
    from asa.cli.verb import Arguments

_REMEDIES = {
    errno.ENOSPC: "; free some space, or work in a folder of another disk",
    errno.EDQUOT: "; free some space, or work in a folder of another disk",
    errno.EROFS: "; work in a folder that can be written",
    errno.EACCES: "; change its permissions, or work in another folder",
    errno.EMFILE: "; raise the number of open files: ulimit -n 4096",
    errno.EFBIG: "; raise the largest size of a file: ulimit -f unlimited",
}
"""What to do about an error of the system that no part of the command foresaw."""


def run(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code and never raises."""
    from asa.cli.settings import wants_json

    legible_stdout()
    console = Console(as_json=wants_json(argv, os.environ))
    debug = os.environ.get("ASA_DEBUG", "") not in ("", "0")

    def end(message: str, code: int) -> int:
        return _end(console, message, code, debug)

    try:
        with console.keeping_stdout(), _quiet_libraries(debug), ending.terminable(end, argv), ending.interruptible(end):
            try:
                code = dispatch(argv, console) or 0
            except SystemExit as stop:  # argparse, after --help
                code = stop.code if isinstance(stop.code, int) else AsaError.exit_code if stop.code else 0
            with reaching_stdout():
                sys.stdout.flush()
            return code
    except BrokenPipeError:
        # The reader has gone; without this Python complains once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt as interrupt:
        message, code = ending.INTERRUPTED
        return end(str(interrupt) or message, code)
    except ending.Terminated as request:
        return end(*ending.terminated(request.args[0], argv))
    except AsaError as error:
        return _end(console, str(error), error.exit_code, debug)
    except OSError as error:
        # Of two names (a rename) the second is the target; the first may be a temporary file.
        if error.errno == errno.ENOMEM:
            return _internal(console, error, debug)
        if processes.is_short(error):
            return _internal(console, error, debug)
        if error.errno == errno.ENOENT and not error.filename and _is_homeless():
            gone = "the working directory no longer exists; change to one that does"
            return _end(console, gone, UnavailableError.exit_code, debug)
        name = error.filename2 or error.filename
        where = f"{name}: " if name else ""
        remedy = _REMEDIES.get(error.errno or 0, "")
        if "temporary directory" in str(error.strerror):
            remedy = "; set TMPDIR to a folder that can be written"
        if str(name).startswith("/dev/shm/"):
            remedy = "; ranks share memory there: mount it so that it can be written (docker run --shm-size=1g)"
        return _end(console, f"{where}{error.strerror or error}{remedy}", UnavailableError.exit_code, debug)
    except ModuleNotFoundError as error:
        if (error.name or "asa").partition(".")[0] == "asa":
            return _internal(console, error, debug)
        return _end(console, lacking(error.name or "a package"), UnavailableError.exit_code, debug)
    except ImportError as error:
        package = (error.name or "asa").partition(".")[0]
        if package == "asa":
            return _internal(console, error, debug)
        remedy = "install it anew, or allow this process more memory"
        what = f"{package} is installed and cannot be loaded: {error}; {remedy}"
        return _end(console, what, UnavailableError.exit_code, debug)
    except Exception as error:
        return _internal(console, error, debug)


def _is_homeless() -> bool:
    """Whether the working directory no longer exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def dispatch(argv: Sequence[str], console: Console) -> int | None:
    """Find the command, parse its options, run it."""
    from asa.cli.settings import arguments, misspelt

    words = list(argv)
    if words[:1] == ["help"] and words[1:]:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("--help", "-h", "help"):
        console.text(overview())
        return 0 if words else UsageError.exit_code
    if words[0] in ("--version", "-V"):
        from asa import __version__

        console.text(f"asa {__version__}")
        return 0
    if words[0].startswith("-"):
        raise UsageError(f"{words[0]} stands before the command; options come after it, as in `asa plan {words[0]}`")
    commands = verbs(words[0])
    for verb in commands:
        name = verb.name.split()
        if words[: len(name)] == name:
            args = arguments(verb, words[len(name) :])
            for sentence in misspelt(verb, os.environ):
                console.say(f"asa: {sentence}")
            _check_device(args)
            return verb.run(args, console)
    if words[1:2] in (["--help"], ["-h"]):
        console.text(_listing(f"asa {words[0]}", [(v.name, v.help) for v in commands]))
        return 0
    offered = ", ".join(f"`asa {v.name}`" for v in commands)
    raise UsageError(f"`{' '.join(['asa', *words[:2]])}` is no command; the commands are {offered}")


def _check_device(args: Arguments) -> None:
    """Check, before a command imports torch or reads anything, that there is a GPU if it was asked for.

    Raises:
        UnavailableError: there is none.
    """
    if getattr(args, "device", None) != "cuda":
        return
    from asa.launch import cuda_devices

    if not cuda_devices():
        raise UnavailableError("no CUDA device is usable here; choose --device cpu (`asa doctor` says more)")


def overview() -> str:
    """Text of ``asa --help``; imports no command."""
    return _listing("asa", [(name, text) for name, (_, text) in VERBS.items()])


def _listing(program: str, rows: Sequence[tuple[str, str]]) -> str:
    wide = max(len(name) for name, _ in rows)
    lines = [f"usage: {program} <command> [options]", "", "commands:"]
    for name, text in rows:
        lines += textwrap.wrap(
            f"  {name:<{wide}}  {text}", 80, subsequent_indent=" " * (wide + 4), drop_whitespace=True
        )
    lines += ["", "`asa <command> --help` says more about one.", "`--json` on any of them prints a document.", ""]
    return "\n".join(lines)


def _internal(console: Console, error: Exception, debug: bool) -> int:
    from asa.ir.shortage import asked, is_exhaustion
    from asa.ir.units import binary

    if is_exhaustion(error):
        much = f", which asked for {binary(asked(error))}" if asked(error) else ""
        what = f"memory ran out in this process{much}; take a smaller --global-batch, --input or model"
        return _end(console, what, UnavailableError.exit_code, debug)
    if processes.is_short(error):
        what = processes.shortage("this command cannot go on", processes.room())
        return _end(console, what, UnavailableError.exit_code, debug)
    what = f"internal error: {type(error).__name__}: {error}; set ASA_DEBUG=1 to see the traceback"
    return _end(console, what, AsaError.exit_code, debug)


def _end(console: Console, message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    line = " ".join(message.split())
    with suppress(OSError):  # stderr may be closed; the exit code remains
        sys.stderr.write(f"asa: {line}\n")
        sys.stderr.flush()
    with suppress(OSError, UnavailableError):
        console.document({"kind": "error", "exit_code": code, "error": line})
    return code


@contextmanager
def _quiet_libraries(debug: bool) -> Iterator[None]:
    """Context that hides warnings of libraries, which are for developers; asa's own log goes to stderr."""
    import logging
    import warnings

    if not debug:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read by torch's import, here and in the ranks
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("asa: %(message)s"))
    logger = logging.getLogger("asa")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            if not debug and not sys.warnoptions:
                warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeHandler(handler)
