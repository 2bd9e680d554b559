"""``asa.save`` and ``asa.load``: full tensors in one file, independent of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from asa.api.rank_context import current_votes
from asa.errors import InvalidInputError, UnavailableError, UsageError
from asa.executor.model.state import LocalTensor, cut, gather
from asa.ir import codec
from asa.sharding.axis import SOLO
from asa.sharding.split import TensorPart


def save(state: Any, path: Path | str) -> None:
    """Write ``state`` to ``path`` with ``torch.save``, as one device would (collective: call it on every rank).

    Models and optimizers in it are saved as their ``state_dict``; tensors that ranks hold in shards (parameters of the
    model, averages of them) as full ones, on the CPU. Rank 0 writes; the file is complete or absent::

        asa.save({"model": model, "optimizer": optimizer, "average": average, "epoch": 3}, "last.pt")

    Raises:
        UnavailableError: it cannot be written; raised on every rank.
    """
    full = _map(state, _full)
    target = Path(path)

    def write() -> None:
        try:
            with codec.replacing(target) as partial:
                torch.save(full, partial)
        except OSError as error:
            raise UnavailableError(f"{target} cannot be written: {error.strerror or error}") from None

    current_votes().once(write)


def load(path: Path | str, into: Any = None) -> Any:
    """The state that :func:`save` wrote, on the CPU; with ``into``, it is also loaded into that (collective)::

        state = asa.load("last.pt", {"model": model, "optimizer": optimizer, "average": average})
        epoch = state["epoch"]

    ``into`` has the structure of what was saved, or some of its entries. Any plan can load what any other saved.

    Raises:
        InvalidInputError: no such file, or not one of :func:`save`. UsageError: an entry is missing, or has another
            form.
    """
    try:
        state = torch.load(Path(path), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever pickle does
        raise InvalidInputError(f"{path} cannot be loaded: {' '.join(str(error).split())[:160]}") from None
    if into is not None:
        _fill(into, state, "the file")
    return state


def _full(value: Any) -> Any:
    if isinstance(value, nn.Module | Optimizer):
        return _map(value.state_dict(), _full)
    if callable(getattr(value, "state_dict", None)):
        return value.state_dict()
    if isinstance(value, TensorPart):
        return gather(_local_tensor(value), value.held)
    if isinstance(value, DTensor):
        return value.full_tensor().detach().cpu()
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _local_tensor(value: TensorPart) -> LocalTensor:
    return LocalTensor("", value.held, value.parted.shard, value.parted.axis, 0)


def _map(value: Any, of: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping) and not isinstance(value, nn.Module):
        return {key: _map(one, of) for key, one in value.items()}
    if isinstance(value, tuple | list) and not isinstance(value, nn.Module):
        return type(value)(_map(one, of) for one in value) if type(value) in (tuple, list) else of(value)
    return of(value)


@torch.no_grad()
def _fill(into: Any, value: Any, where: str) -> None:
    if isinstance(into, nn.Module | Optimizer) or callable(getattr(into, "load_state_dict", None)):
        into.load_state_dict(value)
    elif isinstance(into, Tensor):
        if not isinstance(value, Tensor) or value.shape != into.shape:
            actual = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(f"{where} has {actual} for a tensor of shape {list(into.shape)}")
        if isinstance(into, TensorPart):
            into.held.copy_(cut(_local_tensor(into), value))
        elif isinstance(into, DTensor):
            into.copy_(cut(LocalTensor("", into, None, SOLO, 0), value))
        else:
            into.copy_(value)
    elif isinstance(into, Mapping):
        for key, one in into.items():
            if not isinstance(value, Mapping) or key not in value:
                raise UsageError(f"{where} has no {key!r}")
            _fill(one, value[key], f"{where}[{key!r}]")
    elif isinstance(into, tuple | list):
        if not isinstance(value, tuple | list) or len(value) != len(into):
            raise UsageError(f"{where} has another number of entries than {len(into)}")
        for i, one in enumerate(into):
            _fill(one, value[i], f"{where}[{i}]")
