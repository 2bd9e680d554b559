"""Preservation of a model during tracing: everything that a trace touches is restored afterwards."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from asa.tracing.surroundings import Surroundings
from asa.zoo.input_checks import check_kinds

_REGISTRIES = ("_parameters", "_buffers", "_modules")

T = TypeVar("T")


def changed_attributes(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Names in ``module.__dict__`` (registries included) whose objects differ from ``before``."""
    names = []
    for key, value in module.__dict__.items():
        old = before.get(key, before)
        if key in _REGISTRIES and isinstance(old, dict):
            names += [n for n in {*value, *old} if value.get(n) is not old.get(n)]
        elif old is not value:
            names.append(key)
    return names + [key for key in before if key not in module.__dict__]


def restore_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    """Undo attribute assignments since ``before`` was taken; registries keep their identity."""
    for key in [k for k in module.__dict__ if k not in before]:
        del module.__dict__[key]
    for key, value in before.items():
        if key in _REGISTRIES:
            registry = module.__dict__[key]
            registry.clear()
            registry.update(value)
        else:
            module.__dict__[key] = value


def attributes(module: nn.Module) -> dict[str, Any]:
    """A snapshot for :func:`changed_attributes` and :func:`restore_attributes`."""
    return {k: dict(v) if k in _REGISTRIES else v for k, v in module.__dict__.items()}


def with_history(model: nn.Module) -> list[Tensor]:
    """Tensors with a gradient history among the attributes of modules, as with ``torch.nn.utils.weight_norm``."""
    tensors = (t for module in model.modules() for t in vars(module).values() if isinstance(t, Tensor))
    return [t for t in tensors if not t.is_leaf]


def histories(model: nn.Module) -> dict[int, Any]:
    """A memo for ``copy.deepcopy`` that replaces tensors with a gradient history by their values, because such tensors
    cannot be copied."""
    return {id(t): t.detach().clone() for t in with_history(model)}


def with_parameters(
    value: T, modules: Iterable[nn.Module], make: Callable[[nn.Parameter], torch.Tensor]
) -> tuple[T, dict[int, nn.Parameter]]:
    """A deep copy of ``value``, which holds ``modules``, with ``make(p)`` in place of each of their parameters p; and
    these, by ``id(p)``. Raises whatever a module raises when it is copied."""
    memo: dict[int, Any] = {}
    old: dict[int, nn.Parameter] = {}
    for module in modules:
        memo.update(histories(module))
        old.update({id(p): p for p in module.parameters()})
    new = {key: nn.Parameter(make(p), p.requires_grad) for key, p in old.items()}
    return copy.deepcopy(value, {**memo, **new}), new


def with_tensors(
    value: T, tensors: Iterable[Tensor], make: Callable[[Tensor], Tensor], memo: dict[int, Any] | None = None
) -> T:
    """A deep copy of ``value`` with ``make(t)`` in place of each of its ``tensors``; ``memo`` has what replaces others.
    Raises whatever a module raises when it is copied."""
    memo = {} if memo is None else memo
    for t in tensors:
        made = make(t)
        memo[id(t)] = nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made
    return copy.deepcopy(value, memo)


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor like ``tensor`` on the meta device, without values."""
    return torch.empty_like(tensor, device="meta")


def foreign_state() -> tuple[Any, ...]:
    """State of the random generators of Python, and of numpy if it is in use."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    name, words, *more = numpy.random.get_state()
    return (random.getstate(), name, words.tobytes(), *more)


@contextmanager
def foreign_random() -> Iterator[None]:
    """Context after which the random generators of Python and numpy are restored."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Context after which ``model``'s modes, attributes and buffer values, the random state, and what its code changes
    beside it (:class:`Surroundings`) are restored; also the values of parameters that forward writes, as
    :func:`parameters_restored` found.

    Raises:
        InvalidInputError: the model contains TorchScript or sparse tensors.
    """
    check_kinds(model)
    own_memory(model)
    around = Surroundings(model.modules())
    state = [(module, attributes(module)) for module in model.modules()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    parameters = [(p, p.data, p.detach().clone()) for p in model.parameters() if getattr(p, _WRITTEN, False)]
    devices = sorted({t.device.index or 0 for t in (*model.parameters(), *model.buffers()) if t.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices), foreign_random():
            yield
    finally:
        for module, before in state:
            restore_attributes(module, before)
        around.put_back()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
            for p, memory, value in parameters:
                p.data = memory.copy_(value)


def own_memory(model: nn.Module) -> None:
    """Give each element of ``model``'s buffers memory of its own. Buffers that ``expand`` made repeat some, and torch
    copies nothing into them."""
    for b in model.buffers():
        if any(size > 1 and not stride for size, stride in zip(b.shape, b.stride(), strict=True)):
            b.data = b.detach().clone(memory_format=torch.contiguous_format)


_WRITTEN = "_written_by_forward"


class _Writes(TorchDispatchMode):
    """Keeps the values of parameters before the first operation that writes them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._watched = {p.untyped_storage().data_ptr(): p for p in parameters}
        self.kept: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[i] if i < len(args) else kwargs.get(argument.name)
                    for tensor in pytree.tree_leaves(value):
                        p = self._watched.get(tensor.untyped_storage().data_ptr()) if type(tensor) is Tensor else None
                        if p is not None and id(p) not in self.kept:
                            self.kept[id(p)] = p.detach().clone()
        return func(*args, **kwargs)


@contextmanager
def parameters_restored(model: nn.Module) -> Iterator[None]:
    """Context after which ``model``'s parameters have their values. Those that were changed are restored by
    :func:`preserved`, too, from then on; :func:`written` names them."""
    before = [(p, p.data) for p in model.parameters() if not p.is_meta and p.numel()]
    writes = _Writes(p for p, _ in before)
    try:
        with writes:
            yield
    finally:
        with torch.no_grad():
            for p, memory in before:
                value = writes.kept.get(id(p), memory)
                moved = p.data_ptr() != memory.data_ptr()
                if moved or value is not memory:
                    if p.shape != value.shape or not torch.equal(p.detach(), value):
                        setattr(p, _WRITTEN, True)
                    p.data = memory if value is memory else memory.copy_(value)


def written(model: nn.Module) -> list[str]:
    """Names of the parameters that :func:`parameters_restored` found to be changed."""
    return [name for name, p in model.named_parameters() if getattr(p, _WRITTEN, False)]


def mark_written(model: nn.Module, names: Iterable[str]) -> None:
    """Let :func:`preserved` restore the parameters ``names``, too."""
    parameters = dict(model.named_parameters())
    for name in names:
        setattr(parameters[name], _WRITTEN, True)


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Context with ``model.train(training)``; every module gets its own mode back afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
