"""Numbers, texts and functions that the code of a module reads when it runs, besides its parameters and buffers: a
trace keeps them as they were."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from enum import Enum
from functools import partial
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from asa.tracing.surroundings import ENTRIES, foreign, is_record, names_in

_DEPTH = 3
"""How far objects in objects are looked into."""
_VALUES = (Number, str, bytes, Enum, type(None), FunctionType, BuiltinFunctionType, MethodType, partial)
_SKIPPED = (nn.Module, type)
_READS: WeakKeyDictionary[nn.Module, _Reads] = WeakKeyDictionary()


class _Same:
    """Equal to another of the same object."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._held is self._held

    __hash__ = None  # type: ignore[assignment]


class _Reads:
    """What ``function``, a method of a module, names, and the functions and methods of the program that it names."""

    def __init__(self, module: nn.Module, function: Any) -> None:
        self._sources: dict[str, Callable[[], Any]] = {}
        self.names: set[str] = set()
        self._functions: list[FunctionType] = []
        self._owners: list[Any] = []
        self._pending: list[FunctionType] = []
        self._reach(function)
        if self._pending:
            self._owners.append(module)
        while self._pending:
            self._look_at(self._pending.pop())
            for owner in self._owners:
                self._methods(owner)

    def now(self) -> dict[str, Any]:
        """What is read, as it is now, by where it is."""
        found: dict[str, Any] = {}
        for name, get in self._sources.items():
            try:
                value = get()
            except (AttributeError, KeyError, ValueError):  # deleted, or an empty cell
                continue
            self._value(found, name, value, _DEPTH)
        for key, value in vars(self._owners[0]).items() if self._owners else ():
            if key in self.names and key[0] != "_" and key != "training":
                self._value(found, key, value, _DEPTH)
        return found

    def _reach(self, value: Any) -> None:
        """Look at the functions in ``value`` later, if they are the program's."""
        value = getattr(value, "__func__", getattr(value, "fget", value))
        if isinstance(value, partial):
            value = value.func
        if not isinstance(value, FunctionType) or any(value is f for f in self._functions):
            return
        self._functions.append(value)
        for cell in value.__closure__ or ():
            try:
                self._reach(cell.cell_contents)  # of a decorator, too
            except ValueError:
                continue
        if not foreign(value.__module__ or ""):
            self._pending.append(value)

    def _look_at(self, function: FunctionType) -> None:
        names = names_in(function.__code__)
        self.names |= names
        for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
            self._source(f" {name}", partial(getattr, cell, "cell_contents"))
        for name in names & function.__globals__.keys():
            self._source(f" {name}", partial(function.__globals__.__getitem__, name))
        if names & {"environ", "getenv", "environb"}:
            for text in _texts(function.__code__):
                self._sources[f" os.environ[{text!r}]"] = partial(os.environ.get, text)

    def _source(self, name: str, get: Callable[[], Any]) -> None:
        try:
            value = get()
        except ValueError:
            return
        if isinstance(value, ModuleType | type):
            module = value.__name__ if isinstance(value, ModuleType) else value.__module__
            if not foreign(module) and not any(value is o for o in self._owners):
                self._owners.append(value)
                self._sources[name] = lambda: value
            return
        self._reach(value)
        if isinstance(value, _SKIPPED):
            return
        self._sources[name] = get
        self._own(value, _DEPTH)

    def _own(self, value: Any, depth: int) -> None:
        """Note records in ``value``, whose methods may be called."""
        if is_record(value) and not isinstance(value, (*_SKIPPED, *_VALUES, Tensor)):
            if any(value is o for o in self._owners):
                return
            self._owners.append(value)
        if depth > 1:
            for _, inner in _entries(value, self.names):
                self._own(inner, depth - 1)

    def _methods(self, owner: Any) -> None:
        """Look later at what functions look up in ``owner`` and its classes."""
        for key in self.names & vars(owner).keys():
            value = vars(owner)[key]
            if isinstance(value, type) and not foreign(value.__module__) and not any(value is o for o in self._owners):
                self._owners.append(value)
            self._reach(value)
            if not isinstance(value, _SKIPPED):
                self._own(value, _DEPTH)
        bases = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        for base in () if isinstance(owner, ModuleType) else bases:
            if foreign(base.__module__) or base is object:
                continue
            for key in self.names & vars(base).keys():
                value = vars(base)[key]
                self._reach(value)
                if (
                    key[:2] != "__"
                    and not hasattr(type(value), "__get__")
                    and (isinstance(owner, type) or key not in vars(owner))
                ):
                    self._sources[f" {base.__name__}.{key}"] = partial(vars(base).__getitem__, key)

    def _value(self, found: dict[str, Any], name: str, value: Any, depth: int) -> None:
        if isinstance(value, ContextVar):
            value = value.get(None)
        if isinstance(value, _VALUES):
            found[name] = value
        elif isinstance(value, Tensor):
            found[name] = _Same(value)
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            if value.size <= ENTRIES and not self.names & {"from_numpy", "as_tensor"}:  # these share its memory
                found[name] = value.tobytes()
        elif depth and not isinstance(value, nn.Module):
            for key, inner in _entries(value, self.names):
                if not isinstance(inner, type | ModuleType):
                    self._value(found, f"{name}.{key}", inner, depth - 1)


def _entries(value: Any, names: set[str]) -> Iterable[tuple[Any, Any]]:
    """What is in a container or a record, of a record what is among ``names``."""
    if isinstance(value, dict):
        return list(value.items()) if len(value) <= ENTRIES else ()
    if isinstance(value, list | tuple | deque):
        return enumerate(list(value)) if len(value) <= ENTRIES else ()
    if isinstance(value, ModuleType | type) or is_record(value):
        return [(k, vars(value)[k]) for k in names & vars(value).keys()]
    return ()


def _texts(code: CodeType) -> set[str]:
    """Texts in ``code`` and in the functions in it."""
    inner = (_texts(c) for c in code.co_consts if isinstance(c, CodeType))
    return {c for c in code.co_consts if isinstance(c, str)}.union(*inner)


def numbers_read(module: nn.Module) -> dict[str, Any]:
    """Numbers, texts, functions and tensors that ``forward`` of ``module`` can read, and the program's functions that
    it calls, by where they are: attributes of the module, and behind a blank what is outside of it."""
    return _of_forward(module).now()


def reads(module: nn.Module, name: str) -> bool:
    """Whether ``forward`` of ``module``, or a function of the program that it calls, names ``name``, or may by a
    text."""
    return bool(_of_forward(module).names & {name, "getattr", "vars", "__dict__"})


def names_called(module: nn.Module, function: Any) -> set[str]:
    """Names that ``function``, a method of ``module``, and the program's functions that it calls look up."""
    return _Reads(module, function).names


def _of_forward(module: nn.Module) -> _Reads:
    reads = _READS.get(module)
    if reads is None:
        reads = _READS[module] = _Reads(module, type(module).forward)
    return reads
