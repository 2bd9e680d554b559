"""Forking a process that has threads: which threads are harmless, which make children hang."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from asa.errors import UsageError
from asa.launch.devices import cuda_devices, default_threads

_log = logging.getLogger("asa")

_PROBE_S = 5.0
"""Seconds that a child may sleep before it counts as hanging."""
_MOST_WORK_S = 5.0
"""Seconds that it may compute before it does."""
_LONGEST_LOOK_S = 0.1
"""Longest time between two looks at it that counts in full: after more, this process itself was stopped."""
_PATIENCE_S = 60.0
"""Seconds after which it hangs for certain, whatever the system says of it."""
_hung = False


@contextlib.contextmanager
def fork_beside_threads() -> Iterator[None]:
    """Context without Python 3.12's warning about forking a process with threads, which numpy's BLAS starts at import
    and never uses here.

    Torch's own threads, which could hang a rank, are handled by :func:`safe_threads`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*", category=DeprecationWarning)
        yield


def ranks_can_fork() -> bool:
    """Whether ranks that are forked from this process can compute. They cannot if this process has initialized CUDA, or
    has started autograd's threads for CUDA devices, which the first backward does, also on the CPU."""
    if torch.cuda.is_initialized():
        return False
    # A second try, because a child rarely hangs in a race between torch's threads.
    return cuda_devices() == 0 or any(_child(torch.ones((), requires_grad=True).backward) == 0 for _ in range(2))


def safe_threads(requested: int | None, num_ranks: int) -> int:
    """Number of threads per rank that cannot hang it.

    If a process has computed with several OpenMP threads, its forked children inherit a thread pool without threads. A
    child that computes with one thread is not affected; one with more hangs.

    Raises:
        UsageError: several threads were requested and would hang.
    """
    threads = default_threads(num_ranks) if requested is None else requested
    if threads == 1 or torch.cuda.is_initialized() or _fork_computes(threads):
        return threads
    if requested is None:
        _log.warning("ranks get 1 thread instead of %d: this process has itself computed with several", threads)
        return 1
    raise UsageError(
        f"ranks of {threads} threads would hang: this process has itself computed with several threads; call "
        "torch.set_num_threads(1) before anything else here, or ask for threads=1"
    )


def _fork_computes(threads: int) -> bool:
    """Whether a forked child can compute with ``threads`` threads; tried out, since no library reports it."""
    global _hung

    def compute() -> None:
        torch.set_num_threads(threads)
        torch.ones(1 << 20).add_(1)

    _hung = _hung or _child(compute) is None  # the thread pool cannot be removed
    return not _hung


def _child(compute: Callable[[], object]) -> int | None:
    """Exit status of a forked child that calls ``compute``; None if it hangs: it sleeps, or computes, for far too long.
    Time in which it waits for a core does not count, because a busy machine would be taken for a hanging child."""
    with fork_beside_threads():
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            compute()
            code = 0
        finally:
            os._exit(code)
    asleep_s, began = 0.0, time.monotonic()
    looked = began
    while asleep_s < _PROBE_S and looked < began + _PATIENCE_S:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.002)
        rests, worked_s = _use_of_cores(pid)
        if worked_s > _MOST_WORK_S:
            break
        before, looked = looked, time.monotonic()
        asleep_s += min(looked - before, _LONGEST_LOOK_S) if rests else 0.0
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _use_of_cores(pid: int) -> tuple[bool, float]:
    """Whether all threads of process ``pid`` sleep (none computes, waits for a core or a disk, was stopped or has
    ended), and the seconds that all of them have computed. Where the system does not tell, they sleep."""
    try:
        threads = [path.read_text().rpartition(")")[2].split() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return True, 0.0
    ticks = sum(int(thread[11]) + int(thread[12]) for thread in threads)
    return not any(thread[0] in "RDTZ" for thread in threads), ticks / os.sysconf("SC_CLK_TCK")
