"""Methods of a program's model that run on the distributed model in the model's place: those that train, and those that
replace one of ``torch.nn.Module``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from asa.errors import UsageError
from asa.tracing.reads import names_called
from asa.tracing.surroundings import foreign

_LISTS = (
    "parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children",
    "named_children",
)  # fmt: skip
"""Methods by which ranks find what they share."""
_TRAINING: WeakKeyDictionary[type, dict[str, bool]] = WeakKeyDictionary()
"""For classes of models, which of their methods take gradients."""


def overridden(model: nn.Module) -> Iterator[str]:
    """Public methods of ``torch.nn.Module`` that a class of the program's own replaces."""
    for kind in type(model).__mro__:
        if not foreign(kind.__module__):
            usual = (n for n in vars(kind) if n[0] != "_" and n != "forward" and hasattr(nn.Module, n))
            yield from (n for n in usual if isinstance(vars(kind)[n], FunctionType))


def check_overridden(model: nn.Module) -> None:
    """Check that the methods by which ranks find and prepare a model are torch's.

    Raises:
        UsageError: one is not.
    """
    name = type(model).__name__
    for method in overridden(model):
        if method in _LISTS:
            raise UsageError(
                f"{name}.{method}() is not torch's, and may list other things than the model has, all of which ranks "
                "share: give it another name"
            )
    for kind in {type(module) for module in model.modules()}:
        try:
            inspect.signature(kind.train).bind(model, True)
        except TypeError:
            raise UsageError(
                f"{kind.__name__}.train() is not torch's, which sets a mode (model.train(True)): give it another name"
            ) from None


def own_methods(model: nn.Module, origin: nn.Module, shared: bool) -> dict[str, Callable[..., Any]]:
    """The methods with which ``origin`` replaces torch's and for which ``model``, the distributed one, has none of its
    own, by name; called on ``model`` if ranks share it."""
    this = ref(model)

    def called(function: Any) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            here = this()
            assert here is not None
            return bound(here, function)(*args, **options)

        return call

    names = [n for n in overridden(origin) if n not in ("train", "eval")]  # a trace has both modes
    if not shared:
        return {name: getattr(origin, name) for name in names}
    lacking = [name for name in names if getattr(type(model), name) is getattr(nn.Module, name)]
    return {name: called(getattr(type(origin), name)) for name in lacking}


def bound(model: nn.Module, function: Any) -> Callable[..., Any]:
    """``function``, a method of the class of the original model, called on ``model``, the distributed one. ``super()``
    in it is that of the distributed model."""
    plain = isinstance(function, FunctionType) and "__class__" in function.__code__.co_freevars
    if plain:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closure = tuple(CellType(type(model)) if name == "__class__" else cell for name, cell in cells)
        made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
        made.__kwdefaults__ = function.__kwdefaults__
        function = made

    def call(*args: Any, **options: Any) -> Any:
        return function(model, *args, **options)

    return call


def trains(origin: nn.Module, name: str) -> bool:
    """Whether the method ``name`` of the original model takes gradients: it, or a function of the program that it
    calls, names ``backward``."""
    known = _TRAINING.setdefault(type(origin), {})
    if name not in known:
        function = getattr(type(origin), name, None)
        known[name] = function is not None and "backward" in names_called(origin, function)
    return known[name]


def training_method(model: nn.Module, origin: nn.Module, name: str) -> Callable[..., Any]:
    """The method ``name`` of ``origin``, which trains, called on the distributed ``model``.

    Raises:
        UsageError: it calls ``super()``, which knows nothing of the distributed model.
    """
    function = getattr(type(origin), name)
    code = getattr(function, "__code__", None)
    kinds = type(origin).__mro__
    defined = next(i for i, kind in enumerate(kinds) if name in vars(kind))
    own = [kind for kind in kinds[defined + 1 :] if not foreign(kind.__module__)]
    of_torch = not own or (hasattr(nn.Module, name) and not any(name in vars(kind) for kind in own))
    if code is not None and "__class__" in code.co_freevars and not of_torch:
        raise UsageError(
            f"{type(origin).__name__}.{name}() takes gradients and calls super(): make it a function that is handed "
            "the model, or a method without super()"
        )
    return bound(model, function)
