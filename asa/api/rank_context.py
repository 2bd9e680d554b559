"""Context of the user's program: its ranks, its device, and equal weights on all ranks."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from asa.errors import UnavailableError, UsageError
from asa.executor.model.votes import Votes
from asa.launch import Latecomer, join, latecomer, launched
from asa.tracing.preserve import own_memory

_FIRST_S = 60.0
"""Time limit in seconds for the first meeting of all ranks; later ones have the user's limit."""

_open = ExitStack()
atexit.register(_open.close)


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """This process as one of the ranks."""

    votes: Votes
    device: torch.device

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return self.votes.rank

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.votes.num_ranks


ANNOUNCED = "announced"
"""Name in the store of ranks of the values that ranks announced while they made their job."""


class ReplayedVotes(Votes):
    """Votes of a process that takes the place of a lost rank, while it makes its job. Announcements are those that the
    others stored. All other values are assumed to be the same on every rank, because all run the same program."""

    def __init__(self, late: Latecomer) -> None:
        self.rank, self.num_ranks, self.live, self._group = late.rank, late.num_ranks, range(late.num_ranks), None
        self._remaining: list[Any] = json.loads(late.store.get(ANNOUNCED))

    def meet(self, what: str, *, within_s: float) -> None:
        """Wait for nobody."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """``values``, for every rank."""
        return [list(values)] * self.num_ranks

    def exchange(self, value: Any) -> list[Any]:
        """``value``, for every rank."""
        return [value] * self.num_ranks

    def tell(self, value: Any, *, source: int = 0) -> Any:
        """The next stored announcement."""
        return self._remaining.pop(0)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0) -> None:
        """Leave ``tensor``: the current weights come later."""


_votes: list[Votes] = []
"""Votes of the last context."""
_meetings: list[tuple[Any, Callable[[str], None]]] = []
"""The process group of the loop that was made last, and how its ranks meet."""


def current_votes() -> Votes:
    """The votes between the ranks: those created last, or new ones (collective then)."""
    if not _votes or _votes[0].num_ranks != (dist.get_world_size() if dist.is_initialized() else 1):
        _votes[:] = [Votes()]
    return _votes[0]


def meet_by(world: Any, meet: Callable[[str], None]) -> None:
    """Use ``meet`` in :func:`meet_at`, for the ranks of the process group ``world``."""
    _meetings[:] = [(world, meet)]


def meet_at(what: str) -> None:
    """Wait until all ranks have come to ``what``, a call that a program easily makes on one rank only (collective).

    Raises:
        UsageError, WorkersFailedError: another rank does something else, or does not arrive in time.
    """
    if _meetings and dist.is_initialized() and _meetings[0][0] is dist.group.WORLD:
        _meetings[0][1](what)
    else:
        current_votes().meet(what, within_s=inf)


def join_ranks(device: str, timeout_s: float) -> RankContext:
    """Join the ranks that a launcher started, or those of the user's process group; or run alone.

    Raises:
        UsageError, UnavailableError: see :func:`asa.launch.join`; or ``cuda`` on a machine without it.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"unknown device {device!r}; one of auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnavailableError("no CUDA device is usable here; choose device='cpu'")
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    local = 0
    if launched():
        if dist.is_initialized() and device == "auto" and "nccl" not in dist.get_backend_config():
            cuda = False  # the user's own group tells what it is for
        if not dist.is_initialized():
            worker = _open.enter_context(join(backend="nccl" if cuda else "gloo", timeout_s=timeout_s))
        else:
            with join() as worker:
                pass
        local = worker.local_rank
    if cuda:
        torch.cuda.set_device(local)
    late = latecomer()
    votes = Votes(timeout_s) if late is None else ReplayedVotes(late)
    votes.meet("asa.parallelize (or asa.Job)", within_s=_FIRST_S)
    _votes[:] = [votes]
    return RankContext(votes=votes, device=torch.device("cuda", local) if cuda else torch.device("cpu"))


@torch.no_grad()
def same_weights(context: RankContext, model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to every rank (collective)."""
    if context.ranks > 1:
        own_memory(model)
        for tensor in (*model.parameters(), *model.buffers()):
            copy = tensor.detach().cpu().contiguous()
            context.votes.broadcast(copy)
            tensor.copy_(copy.to(tensor.device))
