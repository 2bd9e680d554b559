"""Scenarios by name, each called in an empty folder and a process of its own."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

SCENARIOS: dict[str, Callable[[Path], None]] = {}


def scenario(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Enter ``function``, which is called in an empty folder, by its name."""
    SCENARIOS[function.__name__] = function
    return function


def apart(function: Callable[[Path], None], folder: Path) -> str | None:
    """The error of ``function`` in a child of this process; None where it went through."""
    told = folder / "error"
    pid = os.fork()
    if pid == 0:
        try:
            with open(folder / "said", "w") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            os.chdir(folder)
            function(folder)
        except BaseException:
            told.write_text(traceback.format_exc())
        finally:
            sys.stdout.flush()
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    if told.exists():
        return told.read_text() + (folder / "said").read_text()[-3000:]
    return None if status == 0 else f"ended with {os.waitstatus_to_exitcode(status)}"
