"""Ranks started by others: torchrun, Slurm, Ray, or a caller that already has a process group."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from asa.errors import UnavailableError, UsageError
from asa.launch import faults
from asa.launch.devices import cuda_devices
from asa.launch.environments import is_launched
from asa.launch.heap import keep_freed_memory
from asa.launch.worker import PR_SET_PDEATHSIG, come_late, form_group, leave_group

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Variable in which torchrun counts how often it has started all ranks again."""
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""If set to 1, torchrun creates a store for the ranks instead of sharing that of an agent."""
_LOOK_S = 0.01
"""Seconds between two checks of rank 0 for arriving ranks."""


@dataclass(frozen=True, kw_only=True)
class TorchrunRank:
    """Identity of this process: ``rank`` of ``num_ranks``, and ``local_rank`` on its machine."""

    rank: int
    num_ranks: int
    local_rank: int


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several ranks: in a process group, or with the environment variables of a
    launcher."""
    in_group: bool = dist.is_available() and dist.is_initialized()
    return in_group or is_launched(environment)


def agent(environment: Mapping[str, str] = os.environ) -> str | None:
    """Identifier of the torchrun agent that started this process: host, process number and start time; None without
    one."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    number = os.getppid()
    try:
        began = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
    return f"{socket.gethostname()} {number} {began}"


def stop_with_agent() -> None:
    """Let the system send this process SIGTERM when the torchrun agent that started it has ended (Linux)."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextlib.contextmanager
def join(*, backend: str = "gloo", timeout_s: float = 600) -> Iterator[TorchrunRank]:
    """Context in which this process is the rank given by ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``.

    An existing group is used and left as it is. A group formed here is destroyed at the end, but not after an error,
    since its peers may be gone. If the others train already and continue without lost ranks, this process becomes a
    :class:`~asa.launch.Latecomer`.

    Raises:
        UsageError: there is no launcher, or its variables are no numbers, or contradict each other.
        UnavailableError: the rendezvous failed, or there are fewer CUDA devices than local ranks.
    """
    if dist.is_initialized():
        yield TorchrunRank(rank=dist.get_rank(), num_ranks=dist.get_world_size(), local_rank=_number("LOCAL_RANK", 0))
        return
    if not launched():
        raise UsageError("not under a launcher: RANK and WORLD_SIZE are not set; start with torchrun, or let asa start")
    place = TorchrunRank(rank=_number("RANK"), num_ranks=_number("WORLD_SIZE"), local_rank=_number("LOCAL_RANK", 0))
    if not 0 <= place.rank < place.num_ranks:
        raise UsageError(f"RANK={place.rank} is not one of WORLD_SIZE={place.num_ranks} ranks; they count from 0")
    _check_local(place)
    if backend == "nccl" and place.local_rank >= cuda_devices():
        raise UnavailableError(
            f"local rank {place.local_rank} needs a CUDA device of its own, this machine has {cuda_devices()}; "
            "start fewer ranks per machine"
        )
    faults.reached("rendezvous")
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, num_ranks = next(rendezvous("env://", timeout=timeout))
        name, late = _meeting(store, rank, num_ranks, timeout_s)
        own = PrefixStore(f"asa/{name}", store)
        keep_freed_memory()
        if late:
            come_late(rank, num_ranks, own)
        else:
            form_group(backend, own, rank, num_ranks, place.local_rank, timeout)
    except (dist.DistError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:200] + _remedy(os.environ)
        raise UnavailableError(f"rank {place.rank} of {place.num_ranks} found no rendezvous: {reason}") from error
    yield place
    if not late:
        leave_group()


def _check_local(place: TorchrunRank) -> None:
    """Check the launcher's other variables, which a rank reads later.

    Raises:
        UsageError: one is no number, or not possible.
    """
    for variable in (RESTARTS, "MASTER_PORT"):
        _number(variable, 0)
    here = _number("LOCAL_WORLD_SIZE", place.num_ranks)
    if not 1 <= here <= place.num_ranks:
        raise UsageError(f"LOCAL_WORLD_SIZE={here} ranks on this machine are not 1 to WORLD_SIZE={place.num_ranks}")
    if not 0 <= place.local_rank < here:
        raise UsageError(f"LOCAL_RANK={place.local_rank} is not one of {here} ranks on this machine; they count from 0")


def _remedy(environment: Mapping[str, str]) -> str:
    """Advice for ranks that use the stores of their agents. An agent keeps its first store, so after a change of nodes
    two agents may send their ranks to different stores."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    return f"; where nodes come and leave, start every torchrun with {OWN_STORE}=1"


_met: tuple[int, Store, str] | None = None
"""On rank 0, its process, and the store and the name of the last rendezvous."""
_answered: set[str] = set()
"""On rank 0, the names under which ranks have asked and were answered."""


def answer_late(rank: int) -> None:
    """Answer a process that asks to join as ``rank`` of a running job: it becomes a latecomer. Called on rank 0."""
    if _met is None or _met[0] != os.getpid():  # a fork of rank 0 has ranks of its own
        return
    _, store, meeting = _met
    name = store.get(f"asa/asks/{rank}").decode() if store.check([f"asa/asks/{rank}"]) else ""
    if name and name not in _answered:
        _answered.add(name)
        store.set(f"asa/told/{name}", f"late/{meeting}")


def _meeting(store: Store, rank: int, num_ranks: int, timeout_s: float) -> tuple[str, bool]:
    """A random name chosen by rank 0 for this rendezvous, the same on every rank, and whether this rank comes late.

    A store may outlive the ranks, and contain entries of earlier ranks. The launcher's number of restarts does not
    distinguish them: an elastic launcher does not count changes of nodes, and each node has its own count. So every
    rank asks under a random name, and rank 0 replies until every rank has its reply.

    Raises:
        DistError: not all ranks arrived in time.
    """
    mine = secrets.token_hex(8)
    if rank:
        store.set(f"asa/asks/{rank}", mine)
        told: str = store.get(f"asa/told/{mine}").decode()
        if told.startswith("late/"):
            return told.removeprefix("late/"), True
        store.set(f"asa/heard/{told}/{rank}", "")
        return told, False
    global _met
    _met = (os.getpid(), store.clone(), mine)
    missing, until = set(range(1, num_ranks)), time.monotonic() + timeout_s
    while missing:
        for other in sorted(missing):
            if store.check([f"asa/heard/{mine}/{other}"]):
                missing.discard(other)
            elif store.check([f"asa/asks/{other}"]):
                name = store.get(f"asa/asks/{other}").decode()
                if name not in _answered:
                    _answered.add(name)
                    store.set(f"asa/told/{name}", mine)
        if missing and time.monotonic() > until:
            raise dist.DistStoreError(f"rank {min(missing)} did not come within {timeout_s:g} s")
        time.sleep(_LOOK_S if missing else 0.0)
    return mine, False


def _number(variable: str, otherwise: int | None = None) -> int:
    text = os.environ.get(variable)
    if text is None and otherwise is not None:
        return otherwise
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(f"{variable}={text!r} is not a number; the launcher must set it") from None
