"""Exchange of named tensors between ranks, after which all of them have the tensors of each."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from asa.errors import WorkersFailedError
from asa.executor.model.votes import Votes, as_bytes
from asa.sharding.collectives.axis import Axis


def united(local: Mapping[str, Tensor], axis: Axis | None) -> dict[str, Tensor]:
    """Union of the named CPU tensors that the ranks of ``axis`` pass, on all of them (collective).

    Without an axis, a copy of this rank's own tensors. Names and shapes are sent as JSON, never as pickles.

    Raises:
        WorkersFailedError: two ranks pass different tensors of one name; raised on all of them.
    """
    if axis is None or axis.group is None:
        return dict(local)
    described = json.dumps([[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in local.items()]).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(axis.size)]
    dist.all_gather(sizes, torch.tensor([len(described)]), group=axis.group)
    tensors: dict[str, Tensor] = {}
    different: list[str] = []
    for index in range(axis.size):
        header = torch.empty(int(sizes[index]), dtype=torch.uint8)
        if index == axis.index:
            header = torch.frombuffer(bytearray(described), dtype=torch.uint8)
        dist.broadcast(header, group_src=index, group=axis.group)
        for name, dtype, shape in json.loads(header.numpy().tobytes()):
            is_source = index == axis.index
            tensor = local[name].contiguous() if is_source else torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(as_bytes(tensor), group_src=index, group=axis.group)
            if not _equal(tensors.setdefault(name, tensor), tensor):
                different.append(name)
    if different:
        raise WorkersFailedError(
            f"{different[0]} has other values in one stage than in another, although no traced step writes it: "
            "plan with one stage"
        )
    return tensors


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN."""
    same = one is other or (one.shape == other.shape and one.dtype == other.dtype)
    return same and (one is other or bool(((one == other) | ((one != one) & (other != other))).all()))


def broadcast_tensors(local: Mapping[str, Tensor], votes: Votes, source: int) -> dict[str, Tensor]:
    """Send the named CPU tensors of process ``source`` to every process of the run, and return them (collective)."""
    described = [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in local.items()]
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape in votes.tell(described, source=source):
        is_source = votes.rank == source
        tensors[name] = local[name].contiguous() if is_source else torch.empty(shape, dtype=getattr(torch, dtype))
        votes.broadcast(tensors[name], source=source)
    return tensors
