"""``python program.py`` without its imports: forked from a process that has imported torch and ``asa``, and no more."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

SERVER = """
import json, os, runpy, sys
import torch._dynamo, torch.distributed, torch.utils.data
import asa.api.job.job, asa.api.loop.parallelize, asa.executor.consistency.channels

asked = None
for line in sys.stdin:
    asked = json.loads(line)
    if "path" not in asked:
        pid, status = os.waitpid(asked["poll"], os.WNOHANG)
        print(os.waitstatus_to_exitcode(status) if pid else "null", flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
else:
    os._exit(0)

# From here on the program, which ends as any other: at its last line, and with all that Python does then.
os.environ.clear()
os.environ.update(asked["env"])
for number, name in enumerate((os.devnull, asked["out"], asked["err"])):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), number)
os.chdir(asked["cwd"])
sys.argv = [asked["path"], *asked["argv"]]
runpy.run_path(asked["path"], run_name="__main__")
"""


COMMAND = Path(__file__).resolve().parent.parent / "asa" / "__main__.py"


@cache
def _server() -> subprocess.Popen[str]:
    """The process that programs are forked from, one for all tests of a process."""
    made = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end() -> None:
        with made:  # its input ends, and it with that
            pass

    atexit.register(end)
    return made


def _asked(question: dict[str, Any]) -> Any:
    server = _server()
    pipes: tuple[IO[str] | None, IO[str] | None] = (server.stdin, server.stdout)
    assert pipes[0] is not None
    assert pipes[1] is not None
    pipes[0].write(json.dumps(question) + "\n")
    pipes[0].flush()
    return json.loads(pipes[1].readline())


@dataclass
class Program:
    """A program that was started; what it says goes to the files ``out`` and ``err``."""

    pid: int
    out: Path
    err: Path
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = _asked({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = 480.0) -> int:
        """The exit code, once there is one.

        Raises:
            TimeoutError: there is none after ``timeout`` seconds.
        """
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} did not end in time: {self.err.read_text()}")
            time.sleep(0.02)
        return code

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def started(path: Path, *argv: str, out: Path, err: Path, env: dict[str, str], cwd: Path | None = None) -> Program:
    """``python path argv``, begun in an environment of exactly ``env``."""
    for stream in (out, err):
        stream.touch()
    asked = {"path": str(path), "argv": argv, "out": str(out), "err": str(err), "env": env}
    return Program(_asked({**asked, "cwd": str(cwd or path.parent)}), out, err)


def asa_started(*argv: str, cwd: Path) -> Program:
    """``python -m asa argv``, begun in ``cwd`` with none of the user's variables set."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ASA_")}
    return started(COMMAND, *argv, out=cwd / "said", err=cwd / "said.errors", env=env, cwd=cwd)


_NUMBERS = itertools.count()


def free_port() -> int:
    """A port that nobody has, and that Linux gives nobody by itself: one that it gave and took back may be another
    process's before a rank listens there. Processes that run tests begin at different ones."""
    while True:
        port = 20_000 + (97 * os.getpid() + next(_NUMBERS)) % 12_000
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def together(ranks: int) -> dict[str, str]:
    """What torchrun tells all ranks of a program on this machine."""
    return {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def rank_of(path: Path, rank: int, *argv: str, env: dict[str, str], name: str = "rank") -> Program:
    """One rank of a program."""
    own = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    out = path.with_name(f"{name}-{rank}")
    return started(path, *argv, out=out, err=out.with_suffix(".errors"), env=own)
