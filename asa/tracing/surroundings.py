"""What the code of a model changes besides attributes: lists, records and generators that it holds, numbers of its
class, and names of its file."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_DEPTH = 3
"""How far objects in objects are looked into."""
_ELEMENTS = 1 << 20
"""Largest number of elements of a tensor or array whose values are kept."""
ENTRIES = 64
"""Largest number of entries of a container that are looked into."""
_RECORDS = ("types", "argparse", "dataclasses", "collections")
"""Modules of the standard library whose objects are records of numbers."""
_OF_MODULES = frozenset(vars(nn.Module()))


@cache
def foreign(module: str) -> bool:
    """Whether a module is not of the program: of the standard library, of ``asa``, or installed."""
    top = module.partition(".")[0]
    if top in ("asa", "torch") or (top in sys.stdlib_module_names and top != "__main__"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


@cache
def names_in(code: CodeType) -> frozenset[str]:
    """Names that ``code`` and the functions in it look up."""
    inner = (names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(code.co_names).union(*inner)


def is_record(value: Any) -> bool:
    """Whether ``value`` is an object of the program's own, or of numbers by name."""
    module = type(value).__module__
    return hasattr(value, "__dict__") and (module.partition(".")[0] in _RECORDS or not foreign(module))


class Surroundings:
    """The state, when this was made, of what the code of some modules (or of other callables) may read and change
    besides parameters, buffers and attributes of modules."""

    def __init__(self, subjects: Iterable[Any]) -> None:
        self._kept: list[tuple[str, Callable[[], bool], Callable[[], object]]] = []
        self._holders: list[tuple[str, Callable[[], Iterable[Any]], list[Any]]] = []
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        """Identities of what was looked at, and the objects, so that no other object gets one of these."""
        for subject in subjects:
            if isinstance(subject, FunctionType):
                self._function(subject)
                continue
            self._class(type(subject))
            if isinstance(subject, nn.Module):
                for key, value in list(vars(subject).items()):
                    if key not in _OF_MODULES:
                        self._value(key, value, _DEPTH)
            else:
                self._value(type(subject).__name__, subject, _DEPTH)

    def changed(self) -> str:
        """The name of something that is not as it was; empty if everything is."""
        return next((name for name, same, _ in self._kept if not same()), "")

    def left(self) -> str:
        """The name of a list, a dictionary or a record in which there are tensors with gradients now that were not
        there; empty if there is none."""
        for name, entries, before in self._holders:
            ids = set(map(id, before))
            if any(isinstance(t, Tensor) and t.grad_fn is not None and id(t) not in ids for t in entries()):
                return name
        return ""

    def put_back(self) -> None:
        """Make everything as it was."""
        for _, same, undo in self._kept:
            if not same():
                undo()

    def _keep(self, name: str, same: Callable[[], bool], undo: Callable[[], object]) -> None:
        self._kept.append((name, same, undo))

    def _new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._alive.append(value)
        return True

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if foreign(base.__module__) or base is object or not self._new(base):
                continue
            for key, value in list(vars(base).items()):
                value = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(value, FunctionType):
                    self._function(value)
                elif key[:2] != "__" and not hasattr(type(value), "__get__"):
                    name = f"{base.__name__}.{key}"
                    if isinstance(value, _SCALARS):
                        self._keep(name, partial(_is, value, vars(base).get, key), partial(setattr, base, key, value))
                    self._value(name, value, _DEPTH)

    def _function(self, function: FunctionType) -> None:
        while isinstance(inner := getattr(function, "__wrapped__", None), FunctionType):
            self._cells(function)
            function = inner
        if foreign(function.__module__ or "") or not self._new(function):
            return
        self._cells(function)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(function.__name__, default, _DEPTH)
        names = names_in(function.__code__)
        for name in names & function.__globals__.keys():
            self._global(function.__globals__, name, names)

    def _cells(self, function: FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # empty
                continue
            if isinstance(value, FunctionType):
                self._function(value)
            elif isinstance(value, _SCALARS):
                same = partial(_is, value, getattr, cell, "cell_contents")
                self._keep(name, same, partial(setattr, cell, "cell_contents", value))
            else:
                self._value(name, value, _DEPTH)

    def _global(self, namespace: dict[str, Any], name: str, names: frozenset[str]) -> None:
        value = namespace[name]
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, ModuleType):
            if not foreign(value.__name__) and self._new(value):
                for inner in names & vars(value).keys():
                    if not isinstance(vars(value)[inner], ModuleType):
                        self._global(vars(value), inner, names)
        else:
            if isinstance(value, _SCALARS):
                self._keep(name, partial(_is, value, namespace.get, name), partial(namespace.__setitem__, name, value))
            self._value(name, value, _DEPTH)

    def _value(self, name: str, value: Any, depth: int) -> None:
        """Keep the state of an object that may be changed in place."""
        if isinstance(value, (*_SCALARS, type, FunctionType, nn.Module, Dataset, DataLoader)) or not self._new(value):
            return
        entries: Iterable[tuple[str, Any]] = ()
        if isinstance(value, Tensor | torch.Generator | random.Random) or type(value).__module__.startswith("numpy"):
            self._state(name, value)
        elif isinstance(value, list | deque):
            before = list(value)
            self._holders.append((name, partial(list, value), before))
            self._keep(name, lambda: _alike(list(value), before), lambda: (value.clear(), value.extend(before)))
            entries = ((name, v) for v in before[:ENTRIES])
        elif isinstance(value, set):
            members = set(value)
            self._keep(name, lambda: value == members, lambda: value.symmetric_difference_update(value ^ members))
        elif isinstance(value, tuple):
            entries = ((name, v) for v in value[:ENTRIES])
        elif isinstance(value, dict) or is_record(value):
            held = value if isinstance(value, dict) else vars(value)
            items = dict(held)
            self._holders.append((name, held.values, list(items.values())))
            both = [*items, *items.values()]
            self._keep(name, lambda: _alike([*held, *held.values()], both), lambda: (held.clear(), held.update(items)))
            entries = ((f"{name}.{k}", v) for k, v in list(items.items())[:ENTRIES])
            if held is not value:
                self._class(type(value))
        if depth > 1:
            for inner, entry in entries:
                self._value(inner, entry, depth - 1)

    def _state(self, name: str, value: Any) -> None:
        """Keep the values of a tensor or an array, or the state of a generator."""
        if isinstance(value, Tensor):
            if _is_plain(value):
                version, values = value._version, value.clone()
                undo = torch.no_grad()(lambda: value.copy_(values))
                self._keep(name, lambda: value._version == version or torch.equal(value, values), undo)
        elif isinstance(value, torch.Generator):
            at = value.get_state()
            self._keep(name, lambda: torch.equal(value.get_state(), at), lambda: value.set_state(at))
        elif isinstance(value, random.Random):
            now = value.getstate()
            self._keep(name, lambda: value.getstate() == now, lambda: value.setstate(now))
        elif (numpy := sys.modules.get("numpy")) is None:
            return
        elif isinstance(value, numpy.random.Generator | numpy.random.RandomState):
            bits = value.bit_generator if isinstance(value, numpy.random.Generator) else value._bit_generator
            state = bits.state
            self._keep(name, lambda: repr(bits.state) == repr(state), partial(setattr, bits, "state", state))
        elif isinstance(value, numpy.ndarray) and 0 < value.size <= _ELEMENTS and value.dtype != object:
            numbers = value.copy()
            self._keep(name, lambda: value.tobytes() == numbers.tobytes(), lambda: numpy.copyto(value, numbers))


@contextmanager
def surroundings_preserved(*subjects: Any) -> Iterator[None]:
    """Context after which what the code of ``subjects`` (models with all their layers, functions) changes beside
    attributes is as before."""
    modules = [list(s.modules()) if isinstance(s, nn.Module) else [s] for s in subjects]
    around = Surroundings([one for some in modules for one in some])
    try:
        yield
    finally:
        around.put_back()


def _is_plain(tensor: Tensor) -> bool:
    """Whether the values of ``tensor`` can be kept, and may be changed in place."""
    usual = type(tensor) is Tensor and tensor.is_leaf and not tensor.requires_grad and tensor.layout is torch.strided
    return usual and not tensor.is_meta and not tensor.is_inference() and 0 < tensor.numel() <= _ELEMENTS


def _is(value: Any, get: Callable[..., Any], *args: Any) -> bool:
    return get(*args) is value


def _alike(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
