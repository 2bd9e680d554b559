"""Attributes and methods of a model, read and called on the result of ``asa.parallelize``."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from asa.api.model.own_methods import bound, training_method, trains
from asa.api.steps.distributed_model_base import DistributedModelBase
from asa.api.steps.registrations import PARTS
from asa.api.tensors.parameter_tools import view_of_whole
from asa.errors import UsageError
from asa.executor.model.parameter_hooks import replaced
from asa.tracing.preserve import preserved
from asa.tracing.reads import numbers_read, reads
from asa.tracing.ties import referred
from asa.tracing.whole import WholeModel, tensors_of

_NUMBERS = int | float | complex | str | None
"""Types of attributes of which a trace keeps the value."""
WHOLES = "which is to see whole tensors"
"""Why the model runs whole if a layer has a forward hook."""
_HOOKING = (
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook",
)  # fmt: skip


def get_attribute(model: DistributedModelBase, name: str) -> Any:
    """The model's attribute ``name``. A parameter is this rank's view of it; a method is collective.

    Raises:
        AttributeError: the model has none with that name.
    """
    origin, parallel = model.origin, model.parallel
    first = parallel.components[0] if parallel is not None else None
    runs = first.__dict__["_whole"] if isinstance(first, WholeModel) else origin
    try:
        value = getattr(runs if isinstance(runs.__dict__.get(name), Tensor) else origin, name)
    except AttributeError:
        raise AttributeError(f"{type(origin).__name__!r} object has no attribute {name!r}") from None
    if parallel is None:
        return value
    if inspect.ismethod(value) and value.__self__ is origin:
        return training_method(model, origin, name) if trains(origin, name) else partial(_method, model, name)
    if isinstance(value, nn.Parameter):
        return dict(model.named_parameters(remove_duplicate=False)).get(name, value)
    if isinstance(value, Tensor) and value.grad_fn is not None:
        if runs is origin and not isinstance(first, WholeModel):
            raise UsageError(
                f"model.{name} is computed in forward, with gradients, and this plan cuts the model into components, "
                "which leave nothing in its attributes: return it from forward beside the output"
            )
        return model.as_output(value)
    if isinstance(value, nn.Module):
        return part_of(model, value)
    return value


def entered(
    state: dict[str, Any], destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
) -> dict[str, Any]:  # fmt: skip
    """``state``, in ``destination`` and with ``prefix`` before its names, as ``state_dict`` of torch takes them."""
    del keep_vars
    if destination is None and not prefix:
        return state
    result = {} if destination is None else destination
    result.update({prefix + name: value for name, value in state.items()})
    return result


def loads_by_itself(model: nn.Module) -> bool:
    """Whether a class or a hook of the program's own loads states into ``model``."""
    methods = [type(model).load_state_dict, *(type(m)._load_from_state_dict for m in model.modules())]
    hooks = [h for m in model.modules() for h in m._load_state_dict_pre_hooks.values()]
    return any(
        (getattr(f, "__module__", None) or "").partition(".")[0] not in ("torch", "asa")
        for f in (*methods, *(getattr(h, "hook", h) for h in hooks))
    )


def part_of(model: DistributedModelBase, value: Any) -> Any:
    """The ranks' version of ``value`` if it is a module of the model, whose calls are collective; otherwise
    ``value``."""
    if not isinstance(value, nn.Module) or model.parallel is None:
        return value
    path = next((n for n, m in model.origin.named_modules() if m is value), "")
    if not path and value is not model.origin and isinstance(value, nn.Sequential | nn.ModuleList):  # a slice
        return _of_layers(value, [part_of(model, m) for m in value])
    part = what_runs(model, path, value)
    return value if part is None else called_by_all(model, path, part, value)


def what_runs(model: DistributedModelBase, path: str, own: nn.Module) -> nn.Module | None:
    """What runs on this rank in place of ``own``, the module ``path`` of the model; None if nothing does. Components
    may have parts of a module that was traced through, which are joined."""
    assert model.parallel is not None
    found: list[nn.Module] = []
    for component in model.parallel.components:
        part: Any = component
        for name in path.split("."):
            part = None if part is None else part._modules.get(name)
        found += [] if part is None else [part]
    return _joined(found, own)


def _joined(parts: list[nn.Module], own: Any) -> nn.Module | None:
    """``parts`` of ``own``, a module that was traced through, as one module that has everything in its order. Layers
    that left nothing in them are its own."""
    if not parts or any(type(part) is not nn.Module for part in parts):
        return parts[0] if parts else None
    joined = nn.Module()
    joined.__dict__[PARTS] = parts
    for kept in ("_parameters", "_buffers"):
        found = {name: value for part in parts for name, value in getattr(part, kept).items()}
        names = dict.fromkeys((*getattr(own, kept, ()), *found))
        getattr(joined, kept).update({name: found[name] for name in names if name in found})
    children = getattr(own, "_modules", {})
    for name in dict.fromkeys((*children, *(n for part in parts for n in part._modules))):
        below = [m for m in (part._modules.get(name) for part in parts) if m is not None]
        inside = _joined(below, children.get(name))
        joined._modules[name] = children.get(name) if inside is None else inside
    inner = [m.training for m in joined.modules() if m is not joined]
    joined.training = any(inner) or not inner
    return joined


def _parameters_and_lent(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The parameters of a layer, also those that belong to another component, which shares them with it."""
    yield from referred(module).items()
    yield from module._parameters.items()


def _of_layers(like: Any, layers: list[nn.Module]) -> Any:
    """``layers``, which are those of a slice ``like``, as a container."""
    return nn.Sequential(*layers) if isinstance(like, nn.Sequential) else nn.ModuleList(layers)


def splits_layers(model: DistributedModelBase) -> bool:
    """Whether ranks have parts of layers, or share samples for some layers only, and the model can run whole
    instead."""
    state = vars(model)
    return model.parallel is not None and state.get("rebuild_whole") is not None and not state["_independent"]


def called_by_all(model: DistributedModelBase, path: str, part: nn.Module, own: Any) -> nn.Module:
    """``part``, the module ``path`` of the model, as a program sees it: the same in everything, but a call is one of
    the model's methods. Otherwise gradients of such a call would be those of one rank's samples, and a rank that holds
    a piece of the module would compute with that. Of a module that was traced through, ``part`` holds only what is
    inside; its class and its attributes are those of ``own``, the module itself."""
    emptied = type(part) is nn.Module and isinstance(own, nn.Module)
    kind: Any = type(own) if emptied else type(part)
    listed = isinstance(own if emptied else part, nn.Sequential | nn.ModuleList)

    def inside(name: str, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return called_by_all(model, f"{path}.{name}", value, getattr(own, "_modules", {}).get(name))
        return view_of_whole(value)

    def attribute(view: Any, name: str) -> Any:
        if emptied and not any(name in part.__dict__[kept] for kept in ("_parameters", "_buffers", "_modules")):
            return getattr(own, name)
        return inside(name, kind.__getattr__(view, name))

    def assign(view: Any, name: str, value: Any) -> None:
        if value is not None and value is view_of_whole(part._parameters.get(name)):
            return  # layer.weight -= x has changed it, and assigns what it is
        if not emptied:
            kind.__setattr__(view, name, value)
        elif not isinstance(value, Tensor | nn.Module):
            if name == "training" and value != model.training and any(map(_reads_its_mode, own.modules())):
                warnings.warn(
                    f"model.{path} has another mode than the model from here on, which its forward asks for "
                    "(self.training), and what was traced of it does not see that: use layers in place of functions "
                    "(nn.Dropout)",
                    stacklevel=5,
                )
            own.__setattr__(name, value)
        elif name in part._buffers:
            for held in (part, *part.__dict__.get(PARTS, ())):
                if name in held._buffers:
                    held._buffers[name] = value
        else:
            raise UsageError(f"model.{path}.{name} cannot be replaced behind asa.parallelize: do it before the call")

    def delete(view: Any, name: str) -> None:
        if emptied or name in part._parameters:
            raise UsageError(
                f"model.{path}.{name} cannot be removed or parametrized behind asa.parallelize: do it before the call"
            )
        kind.__delattr__(view, name)

    def named(
        view: Any, members_of: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:  # fmt: skip
        modules = nn.Module.named_modules(view, None, prefix, remove_duplicate) if recurse else [(prefix, view)]
        yielded: set[int] = set()
        for below, module in modules:
            for name, value in members_of(module):
                if value is not None and (id(value) not in yielded or not remove_duplicate):
                    yielded.add(id(value))
                    yield f"{below}.{name}" if below else name, view_of_whole(value)

    def named_parameters(view: Any, *args: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        return named(view, _parameters_and_lent, *args, **options)

    def named_modules(
        _: Any, _memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:  # fmt: skip
        for name, module in model.named_modules(remove_duplicate=remove_duplicate):
            if name == path or name.startswith(f"{path}."):
                yield (prefix + name.removeprefix(path)).removeprefix("."), module

    def plain() -> nn.Module:
        return copy.deepcopy(model).get_submodule(path)

    def state(_: Any, *args: Any, **options: Any) -> dict[str, Any]:
        below = {n.removeprefix(f"{path}."): t for n, t in model.state_dict().items() if n.startswith(f"{path}.")}
        return entered(below, *args, **options)

    def load(_: Any, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        del assign
        names = [n.removeprefix(f"{path}.") for n in model.state_dict() if n.startswith(f"{path}.")]
        missing, more = [n for n in names if n not in state_dict], [n for n in state_dict if n not in names]
        if strict and (missing or more):
            how = f"lacks {missing[0]}" if missing else f"has {more[0]}, which is none of its names"
            raise UsageError(f"the state of model.{path} {how}; strict=False loads the others")
        model.load_state_dict({f"{path}.{n}": state_dict[n] for n in names if n in state_dict}, strict=False)
        return _IncompatibleKeys(missing, more)

    def hooking(name: str) -> Any:
        def register(view: Any, *args: Any, **options: Any) -> Any:
            if not emptied and ("backward" in name or not splits_layers(model)):
                return getattr(kind, name)(view, *args, **options)
            model.run_whole(f"model.{path} has a hook, {'and is traced through' if emptied else WHOLES}")
            return getattr(model.origin.get_submodule(path), name)(*args, **options)

        return register

    members: dict[str, Any] = {
        "__call__": lambda _, *args, **options: _method(model, path, *args, **options),
        "__getattr__": attribute, "__setattr__": assign, "__delattr__": delete, "_named_members": named,
        "named_parameters": named_parameters,
        "__deepcopy__": lambda _, _memo: plain(),
        "__reduce_ex__": lambda _, _protocol: (itself, (plain(),)),
        "state_dict": state, "load_state_dict": load,
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
    }  # fmt: skip
    members |= {name: hooking(name) for name in _HOOKING}
    if emptied:
        members["named_modules"] = named_modules
        members["named_children"] = lambda _: ((n, inside(n, m)) for n, m in part._modules.items() if m is not None)
    if listed:
        members["__iter__"] = lambda self: iter([inside(n, m) for n, m in self._modules.items()])
        members["__getitem__"] = lambda _, key: (
            [inside(n, m) for n, m in part._modules.items()][key]
            if type(key) is int
            else _of_layers(own if emptied else part, [inside(n, m) for n, m in part._modules.items()][key])
        )
    view: nn.Module = object.__new__(type(kind.__name__, (kind,), members))
    object.__setattr__(view, "__dict__", part.__dict__)
    return view


def itself(module: nn.Module) -> nn.Module:
    """``module``: what is read from a file of it."""
    return module


def traced_through(model: DistributedModelBase) -> dict[str, tuple[nn.Module, bool]]:
    """The modules of the original model that do not run themselves, by name, and whether none of their class runs in
    their place. What runs has their attributes as they were when they were traced."""
    if model.parallel is None or model.parallel.called:
        return {}
    if any(isinstance(component, WholeModel) for component in model.parallel.components):
        return {}
    running = {n: m for component in model.parallel.components for n, m in component.named_modules()}
    ids = set(map(id, running.values()))
    return {
        path: (m, bool(path) and type(running.get(path)) in (nn.Module, type(None)))
        for path, m in model.origin.named_modules()
        if id(m) not in ids
    }


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers and texts among a module's attributes, but for its mode."""
    return {k: v for k, v in vars(module).items() if k != "training" and k[0] != "_" and isinstance(v, _NUMBERS)}


def _reads_its_mode(module: nn.Module) -> bool:
    """Whether the ``forward`` of a class of the program's own asks for the module's mode."""
    own = not type(module).__module__.startswith("torch.")
    return own and "training" in getattr(getattr(type(module).forward, "__code__", None), "co_names", ())


def watched_attributes(module: nn.Module) -> dict[str, Any]:
    """:func:`plain_attributes`, and what ``forward`` and the functions that it calls read of containers, records and
    things outside of the module, which begin with a blank."""
    return plain_attributes(module) | numbers_read(module)


@contextlib.contextmanager
def _weights_preserved(module: nn.Module) -> Iterator[None]:
    """Context after which parameters are as before: a method may change them (an average of weights)."""
    before = [(p, p.data, p.detach().clone()) for p in module.parameters()]
    try:
        yield
    finally:
        for p, memory, values in before:
            p.data = memory
            p.data.copy_(values)


def _method(model: DistributedModelBase, name: str, /, *args: Any, **options: Any) -> Any:
    """Call a method of the model. If its result has gradients, it is handled like ``model(...)``, so that they are
    averaged over ranks."""
    parallel = model.parallel
    assert parallel is not None
    if not parallel.called:
        if any(map(replaced, parallel.plan.components)):
            return _of_a_copy(model, name, args, options)
        run = attrgetter(name)
        gives_nothing: set[str] = model.__dict__.setdefault("gives_nothing", set())
        if not torch.is_grad_enabled() or name in gives_nothing:
            return run(model.origin)(*args, **options)
        with preserved(model.origin), _weights_preserved(model.origin):
            result = run(model.origin)(*args, **options)
        if not any(t.requires_grad for t in tensors_of(result)):
            if result is None:
                gives_nothing.add(name)
            return run(model.origin)(*args, **options)
        model.run_whole(f"model.{name}() computes with gradients")
    return model.call(name, args, options)


def _of_a_copy(model: DistributedModelBase, name: str, args: Any, options: dict[str, Any]) -> Any:
    """Result of a method of a model of which ranks hold parts, called on a plain copy (collective). What it changes of
    weights, buffers and numbers is changed in the model.

    Raises:
        UsageError: the result has gradients.
    """
    assert model.plan is not None
    copied = copy.deepcopy(model)
    state = {n: t.clone() for n, t in copied.state_dict().items() if isinstance(t, Tensor)}
    numbers = {path: plain_attributes(m) for path, m in copied.named_modules()}
    result = attrgetter(name)(copied)(*args, **options)
    function = getattr(type(model.origin), name, None)
    if function is not None and isinstance(result, Iterator | contextlib.AbstractContextManager):
        return bound(model, function)(*args, **options)  # it goes on behind the call
    if any(t.requires_grad for t in tensors_of(result)):
        raise UsageError(
            f"model.{name}() computes with gradients, and ranks hold parts of the model under {model.plan.strategy}: "
            "plan with strategies=('ddp',), or call it under torch.no_grad()"
        )
    now = copied.state_dict()
    if any(not torch.equal(now[n], t) for n, t in state.items()):
        model.load_state_dict(now)
    for path, module in copied.named_modules():
        for key, value in plain_attributes(module).items():
            if numbers[path].get(key) != value:
                setattr(model.origin.get_submodule(path), key, value)
    return result


def set_attribute(model: DistributedModelBase, name: str, value: Any) -> bool:
    """Set an attribute of the model; returns False if the model has none called ``name``.

    Raises:
        UsageError: it is a module or parameter of a model that is already distributed.
    """
    origin, parallel = model.origin, model.parallel
    if not hasattr(origin, name):
        return False
    if parallel is not None and isinstance(value, nn.Module | nn.Parameter):
        raise UsageError(f"model.{name} cannot be replaced behind asa.parallelize: do it before the call")
    if parallel is not None and not parallel.called and reads(origin, name):
        warnings.warn(
            f"model.{name} was changed behind asa.parallelize: what was traced of the model before does not see it",
            stacklevel=4,
        )
    setattr(origin, name, value)
    if "" in (traced := model.__dict__.get("traced", {})):  # it was told
        traced[""] = (*traced[""][:2], watched_attributes(origin))
    return True
