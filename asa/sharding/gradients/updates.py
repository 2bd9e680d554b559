"""Divided optimizer steps of replicated parameters: each parameter is updated by one rank, which sends it to the
others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asa.interfaces.strategy import SENT_BYTES
from asa.sharding.collectives import direct
from asa.sharding.collectives.along_axis import is_silent
from asa.sharding.collectives.axis import Axis
from asa.sharding.collectives.waits import waits


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Index of the rank that owns each item. Items are assigned in descending order of size, each to the rank with the
    smallest sum so far (Graham 1969: the largest sum is at most 4/3 of the optimum).

    >>> owners([5, 1, 4, 2], 2)
    [0, 0, 1, 1]
    """
    loads = [0] * ranks
    owner = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner[i] = loads.index(min(loads))
        loads[owner[i]] += sizes[i]
    return owner


class SharedUpdate:
    """The trained parameters of one wrapped module, whose updates are divided over ``axis``, its data group."""

    def __init__(self, module: nn.Module, axis: Axis) -> None:
        self.axis = axis
        self.parameters = [p for p in dict.fromkeys(module.parameters()) if p.requires_grad]
        self.owner = owners([p.numel() for p in self.parameters], axis.size)
        self._chunks = self._rounds()

    def _rounds(self) -> list[list[tuple[int, list[nn.Parameter]]]]:
        """Chunks of parameters that are sent at the same time: in each round at most one chunk per owner."""
        rounds: list[list[tuple[int, list[nn.Parameter]]]] = []
        for index in range(self.axis.size):
            chunks: list[list[nn.Parameter]] = []
            for p, owner in zip(self.parameters, self.owner, strict=True):
                if owner != index:
                    continue
                full = not chunks or sum(q.nbytes for q in chunks[-1]) + p.nbytes > SENT_BYTES
                if full or chunks[-1][0].dtype != p.dtype:
                    chunks.append([])
                chunks[-1].append(p)
            for number, chunk in enumerate(chunks):
                if number == len(rounds):
                    rounds.append([])
                rounds[number].append((index, chunk))
        return rounds

    @property
    def others(self) -> list[nn.Parameter]:
        """Parameters that another rank updates."""
        return [p for p, owner in zip(self.parameters, self.owner, strict=True) if owner != self.axis.index]

    @torch.no_grad()
    def publish(self) -> None:
        """Broadcast every parameter from its owner (collective)."""
        if self.axis.group is None or is_silent():
            return
        for together in self._chunks:
            in_flight: list[tuple[dist.Work | None, Tensor, list[nn.Parameter]]] = []
            for index, chunk in together:
                if len(chunk) == 1 and chunk[0].is_contiguous():
                    flat, chunk = chunk[0].detach(), []
                elif index == self.axis.index:
                    flat = torch.cat([p.detach().reshape(-1) for p in chunk])
                else:
                    flat = chunk[0].new_empty(sum(p.numel() for p in chunk))
                work = direct.broadcast(flat, group_src=index, group=self.axis.group, async_op=True)
                in_flight.append((work, flat, [] if index == self.axis.index else chunk))
            for work, flat, chunk in in_flight:
                if work is not None:
                    mark = waits.begin(cuda=flat.is_cuda)
                    work.wait()
                    waits.end(mark)
                if chunk:
                    for p, part in zip(chunk, flat.split([p.numel() for p in chunk]), strict=True):
                        p.copy_(part.view_as(p))


_SHARED = "asa_shared_update"


def share_update(module: nn.Module, axis: Axis) -> nn.Module:
    """Divide the update of ``module``'s parameters over ``axis``; returns ``module``."""
    if axis.size > 1 and any(p.requires_grad for p in module.parameters()):
        module.__dict__[_SHARED] = SharedUpdate(module, axis)
    return module


def shared_update(module: nn.Module) -> SharedUpdate | None:
    """The :class:`SharedUpdate` of ``module``; None if its update is not divided."""
    update: SharedUpdate | None = module.__dict__.get(_SHARED)
    return update
