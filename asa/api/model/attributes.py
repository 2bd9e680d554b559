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
from torch.utils import _pytree as pytree

from asa.api.steps.distributed_model_base import DistributedModelBase
from asa.api.tensors.parameter_tools import view_of_whole
from asa.errors import UsageError
from asa.executor.model.parameter_hooks import replaced
from asa.tracing.preserve import preserved
from asa.tracing.whole import WholeModel


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
        return partial(_method, model, name)
    if isinstance(value, nn.Parameter):
        return dict(model.named_parameters()).get(name, value)
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


def part_of(model: DistributedModelBase, value: Any) -> Any:
    """The ranks' version of ``value`` if it is a module of the model, whose calls are collective; otherwise
    ``value``."""
    if not isinstance(value, nn.Module) or model.parallel is None:
        return value
    path = next((n for n, m in model.origin.named_modules() if m is value), "")
    if not path and value is not model.origin and isinstance(value, nn.Sequential | nn.ModuleList):  # a slice
        return _of_layers(value, [part_of(model, m) for m in value])
    for component in model.parallel.components:
        part: Any = component
        for name in path.split("."):
            part = None if part is None else part._modules.get(name)
        if part is not None:
            return called_by_all(model, path, part, value)
    return value


def _of_layers(like: Any, layers: list[nn.Module]) -> Any:
    """``layers``, which are those of a slice ``like``, as a container."""
    return nn.Sequential(*layers) if isinstance(like, nn.Sequential) else nn.ModuleList(layers)


def called_by_all(model: DistributedModelBase, path: str, part: nn.Module, own: Any) -> nn.Module:
    """``part``, the module ``path`` of the model, as a program sees it: the same in everything, but a call is one of
    the model's methods. Otherwise gradients of such a call would be those of one rank's samples, and a rank that holds
    a piece of the module would compute with that. Of a module that was traced through, ``part`` holds only what is
    inside; its class and its attributes are those of ``own``, the module itself."""
    emptied = type(part) is nn.Module and isinstance(own, nn.Module)
    kind: Any = type(own) if emptied else type(part)

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
        if emptied and not isinstance(value, Tensor | nn.Module):
            own.__setattr__(name, value)
        else:
            kind.__setattr__(view, name, value)

    def delete(view: Any, name: str) -> None:
        if name in part._parameters:
            raise UsageError(
                f"model.{path}.{name} cannot be removed or parametrized behind asa.parallelize: do it before the call"
            )
        kind.__delattr__(view, name)

    def named(view: Any, members_of: Any, *args: Any, **options: Any) -> Any:
        for name, value in kind._named_members(view, members_of, *args, **options):
            yield name, view_of_whole(value)

    members: dict[str, Any] = {
        "__call__": lambda _, *args, **options: _method(model, path, *args, **options),
        "__getattr__": attribute, "__setattr__": assign, "__delattr__": delete, "_named_members": named,
        "__reduce_ex__": lambda _, protocol: part.__reduce_ex__(protocol),  # a copy is a plain module
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
    }  # fmt: skip
    if isinstance(part, nn.Sequential | nn.ModuleList):
        members["__iter__"] = lambda self: iter([inside(n, m) for n, m in self._modules.items()])
        members["__getitem__"] = lambda _, key: (
            [inside(n, m) for n, m in part._modules.items()][key]
            if type(key) is int
            else _of_layers(part[key], [inside(n, m) for n, m in part._modules.items()][key])  # type: ignore[index]
        )
    view: nn.Module = object.__new__(type(kind.__name__, (kind,), members))
    object.__setattr__(view, "__dict__", part.__dict__)
    return view


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
        path: (m, type(running.get(path)) in (nn.Module, type(None)))
        for path, m in model.origin.named_modules()
        if path and id(m) not in ids
    }


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers and texts among a module's attributes, but for its mode."""
    kinds = int | float | complex | str | None
    return {k: v for k, v in vars(module).items() if k != "training" and k[0] != "_" and isinstance(v, kinds)}


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
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(result)):
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
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(result)):
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
    if parallel is not None and not parallel.called:
        warnings.warn(
            f"model.{name} was changed behind asa.parallelize: what was traced of the model before does not see it",
            stacklevel=4,
        )
    setattr(origin, name, value)
    return True
