"""Searches for another plan in a background process during training, so that ranks never wait for it.

The process has a lower priority than ranks and may use all cores of the run. It gets a quarter of the time of a core
that a rank keeps busy (``_NICE``), the least that the limit of the search allows for
(docs/decisions/0081-the-limit-counts-work.md), and all of the time in which ranks wait for each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import IO

from asa.errors import AsaError, InfeasibleError, UnavailableError
from asa.scheduler.model import Answer, Model, Question

SOLVE_S = 1.0
"""Time limit of a search during training, in seconds."""
_NICE = 6
_LIMIT_S = 120.0
_PR_SET_PDEATHSIG = 1


class BackgroundSearch:
    """Starts a process that computes ``model.answer(question)``. What ``model.solve`` is made of can be pickled, and is
    imported from modules that do not load torch. A program that ends ends its search."""

    def __init__(self, model: Model, question: Question) -> None:
        self._began = time.monotonic()
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as question_file:
            pickle.dump((os.getpid(), model, question), question_file)
            question_file.seek(0)
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _program(_cores())], stdin=question_file, stdout=self._answer,
                stderr=subprocess.DEVNULL, env=environment,
            )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process, self._answer)

    def result(self) -> Answer | None:
        """The answer; None while the search is running.

        Raises:
            InfeasibleError: nothing fits. UnavailableError: the search failed, or took too long.
        """
        if self._process.poll() is None:
            if time.monotonic() - self._began < _LIMIT_S:
                return None
            self.stop()
            raise UnavailableError(f"the search took longer than {_LIMIT_S:.0f} s")
        self._answer.seek(0)
        data = self._answer.read()
        self.stop()
        if self._process.returncode != 0 or not data:
            raise UnavailableError(f"the search broke (exit status {self._process.returncode})")
        answer: Answer | str = pickle.loads(data)  # safe: written by this program's child to an unnamed file
        if isinstance(answer, str):
            raise InfeasibleError(answer)
        return answer

    def stop(self) -> None:
        """End the search, whose answer is no longer needed."""
        self._end()


def _end(process: subprocess.Popen[bytes], answer: IO[bytes]) -> None:
    answer.close()
    process.kill()
    process.wait()


def _program(cores: set[int]) -> str:
    """The program of the process. It gives way to ranks before it imports anything, which takes most of a second: until
    then it is bound to the core of the rank that started it. Modules are found where this process finds them."""
    lines = ["import contextlib, os, sys", f"os.nice({_NICE})", f"sys.path[:] = {sys.path}"]
    if cores:
        lines += ["with contextlib.suppress(OSError):", f"    os.sched_setaffinity(0, {sorted(cores)})"]
    return "\n".join([*lines, f"from {__name__} import main", "main()"])


def _cores() -> set[int]:
    """Cores that the run may use: those of this rank, which is bound to one, and of the process that started it."""
    with contextlib.suppress(OSError, AttributeError):
        return os.sched_getaffinity(os.getppid()) | os.sched_getaffinity(0)
    return set()


def main() -> None:
    """Read a question from standard input, and write the answer to standard output."""
    parent, model, question = pickle.load(sys.stdin.buffer)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # if memory runs out, the system should kill the search, not a rank
        Path("/proc/self/oom_score_adj").write_text("1000")
    answer: Answer | str
    try:
        answer = model.answer(question)
    except AsaError as error:
        answer = str(error)
    sys.stdout.buffer.write(pickle.dumps(answer))
