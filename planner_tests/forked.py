"""``asa`` as a user types it, in a process of its own: forked, so that what is imported here is not imported anew."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import IO

from asa.cli import main
from asa.launch.forking import fork_beside_threads


def asa(*argv: str, cwd: Path, code: int = 0, timeout_s: float = 480) -> subprocess.CompletedProcess[str]:
    """Run the console script's function in ``cwd``, none of the user's variables set; streams are files.

    Raises:
        AssertionError: another exit code than ``code``, or a traceback.
        TimeoutError: it did not end in time, and was killed.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with fork_beside_threads():
            pid = os.fork()
        if pid == 0:
            _become(argv, cwd, out, err)
        ended = _wait(pid, time.monotonic() + timeout_s)
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(argv, ended, out.read(), err.read())
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def _become(argv: tuple[str, ...], cwd: Path, out: IO[str], err: IO[str]) -> None:
    """The child: its own streams and working directory, then ``main``; never returns."""
    code = 120
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdin = open(os.devnull)  # noqa: SIM115
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(cwd)
        for name in [n for n in os.environ if n.startswith("ASA_")]:
            del os.environ[name]
        sys.argv = ["asa", *argv]
        warnings.resetwarnings()
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 121
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, until: float) -> int:
    """The exit code of process ``pid``; negative, the signal that ended it."""
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"process {pid} did not end in time")
