"""Arguments of ``asa.parallelize``, ``asa.Job`` and ``asa.plan``, read in one way: lists may be texts as on the command
line, and what is of a wrong type is refused in a line before anything is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args

from asa.errors import UsageError
from asa.ir.cluster import Cluster
from asa.ir.plan import OptimizerName, Plan
from asa.ir.profile import Precision


def read(**given: Any) -> dict[str, Any]:
    """Values of the arguments ``given`` by name, in the types that the planner takes.

    Raises:
        UsageError: one is of a wrong type; says which, and what it may be.
    """
    return {name: _READERS[name](name, value) for name, value in given.items()}


def check_model(model: Any) -> None:
    """Check that ``model`` is a module.

    Raises:
        UsageError: it is not.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        _refuse("model", model, "a torch.nn.Module, and the first argument")


def check_training(model: Any, optimizer: Any, loader: Any) -> None:
    """Check that ``model`` is a module, ``optimizer`` has groups of parameters, and ``loader`` yields batches.

    Raises:
        UsageError: one of them does not; a data set is no loader.
    """
    from torch.utils.data import Dataset

    check_model(model)
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        _refuse("optimizer", optimizer, "an optimizer of the model's parameters, and the second argument")
    iterates = hasattr(type(loader), "__iter__")
    if not (iterates or hasattr(type(loader), "__getitem__")) or (isinstance(loader, Dataset) and not iterates):
        _refuse("loader", loader, "what yields batches: a DataLoader, or a list of them, such as [(x, y)]")


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    shown = repr(value) if isinstance(value, str | int | float | bytes | None) else f"of type {type(value).__name__}"
    raise UsageError(f"{name} is {wanted}; it was {shown[:80]}")


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Texts of one argument: a text with commas, or a list of texts; each once.

    >>> texts("strategies", "ddp, fsdp"), texts("strategies", ["ddp"])
    (('ddp', 'fsdp'), ('ddp',))

    Raises:
        UsageError: it is neither.
    """
    wanted = f"names with commas between them, or a list of texts, such as {_EXAMPLES[name]}"
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        _refuse(name, value, wanted)
    items = sorted(value, key=str) if isinstance(value, set | frozenset) else list(value)
    for item in items:
        if not isinstance(item, str):
            _refuse(f"each of {name}", item, f"a text, such as {_EXAMPLES[name]}")
    return tuple(dict.fromkeys(part.strip() for item in items for part in item.split(",") if part.strip()))


def _strategies(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    found = texts(name, value)
    if not found:
        raise UsageError(f"{name} is empty: name some, such as {_EXAMPLES[name]}, or leave it out")
    return found


def _whole(least: int, of: str) -> Callable[[str, Any], int | None]:
    def read_number(name: str, value: Any) -> int | None:
        if value is None:
            return None
        wanted = f"{of}, {least} or more"
        if isinstance(value, bool | str | bytes):
            _refuse(name, value, wanted)
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            _refuse(name, value, wanted)
        if number != value or number < least:
            _refuse(name, value, wanted)
        return number

    return read_number


def _above_zero(of: str) -> Callable[[str, Any], float]:
    def read_number(name: str, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool | str | bytes) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not number > 0:
            _refuse(name, value, f"{of} above 0")
        return number

    return read_number


def _one_of(*choices: str) -> Callable[[str, Any], str]:
    def read_choice(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            _refuse(name, value, f"one of {', '.join(choices)}")
        return value

    return read_choice


def _plan(name: str, value: Any) -> Plan | Path | str:
    if not isinstance(value, Plan | Path | str):
        _refuse(name, value, "'auto', an asa.Plan, or the path of its file")
    return value


def _cluster(name: str, value: Any) -> Cluster | Path | str | None:
    if value is not None and not isinstance(value, Cluster | Path | str):
        _refuse(name, value, "an asa.Cluster, its file, or a name from `asa cluster list`")
    return value  # type: ignore[no-any-return]


def _folder(name: str, value: Any) -> Path | str | None:
    if value is not None and not isinstance(value, Path | str):
        _refuse(name, value, "a folder, 'auto' or None")
    return value


_EXAMPLES = {"strategies": "'ddp,fsdp'", "pins": "'layer4.*=zero3@4'"}
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "strategies": _strategies,
    "pins": lambda name, value: () if value is None else texts(name, value),
    "gpus": _whole(1, "a whole number of devices"),
    "global_batch": _whole(1, "a whole number of samples"),
    "num_classes": _whole(1, "a whole number of outputs"),
    "memory_bytes": _whole(1, "a whole number of bytes (8 GiB are 8 * 2**30)"),
    "seed": _whole(0, "a whole number"),
    "time_limit_s": _above_zero("a number of seconds"),
    "timeout_s": _above_zero("a number of seconds"),
    "max_norm": lambda name, value: None if value is None else _above_zero("a norm")(name, value),
    "precision": _one_of(*get_args(Precision)),
    "optimizer": _one_of(*get_args(OptimizerName)),
    "batch_norm": _one_of("local", "exact"),
    "plan": _plan,
    "cluster": _cluster,
    "cache": _folder,
}
