"""``asa.save`` and ``asa.load``: full tensors in one file, independent of the plan."""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from asa.api.rank_context import current_votes, meet_at
from asa.errors import AsaError, InvalidInputError, UnavailableError, UsageError
from asa.executor.model.state import LocalTensor, cut, gather
from asa.ir import codec
from asa.reading import open_regular
from asa.sharding.collectives.axis import SOLO
from asa.sharding.split import TensorPart


def save(state: Any, path: Path | str) -> None:
    """Write ``state`` to ``path`` with ``torch.save``, as one device would (collective: call it on every rank).

    Models and optimizers in it are saved as their ``state_dict``; tensors that ranks hold in shards (parameters of the
    model, averages of them) as full ones, on the CPU. Rank 0 writes; the file is complete or absent::

        asa.save({"model": model, "optimizer": optimizer, "average": average, "epoch": 3}, "last.pt")

    Raises:
        UnavailableError: it cannot be written. UsageError: it has an object that cannot be stored. Both are raised on
            every rank.
    """
    meet_at("asa.save")
    full = _map(state, _full)
    target = Path(path)

    def write() -> None:
        try:
            with codec.replacing(target) as partial, partial.open("wb") as stream:
                try:
                    torch.save(full, stream)
                except RuntimeError as error:  # of a stream that could not be written; torch names a position in it
                    raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        except OSError as error:
            raise UnavailableError(f"{target} cannot be written: {error.strerror or error}") from None
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(f"the state for {target} has what cannot be stored: {_line(error)}") from None

    current_votes().once(write)


def load(path: Path | str, into: Any = None) -> Any:
    """The state that :func:`save` wrote, on the CPU; with ``into``, it is also loaded into that (collective)::

        state = asa.load("last.pt", {"model": model, "optimizer": optimizer, "average": average})
        epoch = state["epoch"]

    ``into`` has the structure of what was saved, or some of its entries. Any plan can load what any other saved.

    Raises:
        InvalidInputError: no such file, a damaged one, or one that was not written by :func:`save`; with ``into``, also
            where ranks read different files. UsageError: an entry is missing, or has another form. With ``into``, both
            are raised on every rank.
    """
    state: Any = None
    error: InvalidInputError | None = None
    checksum = 0
    try:
        state, checksum = _read(Path(path))
    except InvalidInputError as caught:
        error = caught
    if into is None:
        if error is not None:
            raise error
        return state
    meet_at("asa.load")
    votes = current_votes()
    votes.agree(error)
    if len({c for (c,) in votes.gather([float(checksum)])}) > 1:
        raise InvalidInputError(f"{path} is not the same file on all ranks: copy one of them to every machine")
    _fill(into, state, "the file")
    return state


def _read(path: Path) -> tuple[Any, int]:
    """The content of the file at ``path``, and a checksum of it."""
    try:
        with open_regular(path) as stream:
            checksum = _checksum(path, stream)
            stream.seek(0)
            with torch.serialization.safe_globals(_NUMPY):
                return torch.load(stream, map_location="cpu", weights_only=True), checksum
    except InvalidInputError:
        raise
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be loaded: {error.strerror or error}") from None
    except pickle.UnpicklingError as error:
        why = next((line for line in str(error).splitlines() if "GLOBAL" in line or "class" in line), "").strip()
        why = why or "it is no file of torch.save"
        raise InvalidInputError(
            f"{path} cannot be loaded: {_line(why)}; asa.load reads tensors, numbers, texts, arrays and containers of "
            "them: if you trust the file, torch.load(path, weights_only=False) reads others"
        ) from None
    except Exception as error:  # torch raises whatever pickle does
        raise InvalidInputError(f"{path} cannot be loaded: {_line(error) or type(error).__name__}") from None


def _checksum(path: Path, stream: IO[bytes]) -> int:
    """A checksum of a file of ``torch.save``, whose records have one each. ``torch.load`` does not compare them.

    Raises:
        InvalidInputError: a record is damaged.
    """
    if not zipfile.is_zipfile(stream):
        return 0  # the format before torch 1.6
    with zipfile.ZipFile(stream) as archive:
        records = archive.infolist()
        damaged = [record.filename for record in records if not _intact(archive, record)]
        # Where torch was told to write no checksums, none of them is right.
        if damaged and len(damaged) < len(records):
            raise InvalidInputError(f"{path} is damaged: the checksum of {damaged[0]} is not that of its content")
        return zlib.crc32(repr([(record.filename, record.CRC) for record in records]).encode())


def _intact(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(record) as content:
            while content.read(2**20):
                pass
    except (zipfile.BadZipFile, EOFError):
        return False
    return True


_NUMPY: list[Any] = [
    np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0], np.ndarray, np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"},
]  # fmt: skip
"""What pickles of arrays and of numpy's numbers are made of; objects excluded."""


def _line(error: object) -> str:
    return " ".join(str(error).split())[:200]


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
        _load_state(into, value, where)
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


def _load_state(into: Any, value: Any, where: str) -> None:
    """Load the state ``value`` into a model, an optimizer, or another object that has ``load_state_dict``.

    Raises:
        UsageError: it is that of another one.
    """
    kind = type(into).__name__
    try:
        into.load_state_dict(value)
    except AsaError:
        raise
    except Exception as error:  # objects of the user's own raise anything
        raise UsageError(
            f"{where} cannot be loaded into {kind} ({type(error).__name__}: {_line(error)}): it is the state of another"
        ) from error
    if not isinstance(into, Optimizer) or not type(into).__module__.startswith("torch.optim"):
        return
    for group in into.param_groups:
        if missing := sorted(into.defaults.keys() - group.keys()):
            raise UsageError(f"{where} is the state of another optimizer than {kind}: it has no {missing[0]!r}")
    for p, entry in into.state.items():
        for name, v in entry.items():
            # A moment has the shape of its parameter, or one number for some of its dimensions.
            if isinstance(v, Tensor) and any(n not in (1, m) for n, m in zip(v.shape, p.shape, strict=False)):
                raise UsageError(
                    f"{where} is the state of an optimizer of another model: {name!r} has the shape {list(v.shape)}, "
                    f"and its parameter {list(p.shape)}"
                )
