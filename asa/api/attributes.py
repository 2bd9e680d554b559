"""Attributes and methods of a model, read and called on the result of ``asa.parallelize``."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from asa.api.distributed_model_base import DistributedModelBase
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
    """The ranks' version of ``value`` if it is a module of the model; otherwise ``value``."""
    if not isinstance(value, nn.Module) or model.parallel is None:
        return value
    path = next((n for n, m in model.origin.named_modules() if m is value), "")
    for component in model.parallel.components:
        part: Any = component
        for name in path.split("."):
            part = None if part is None else part._modules.get(name)
        if part is not None:
            return part
    return value


def _method(model: DistributedModelBase, name: str, /, *args: Any, **options: Any) -> Any:
    """Call a method of the model. If its result has gradients, it is handled like ``model(...)``, so that they are
    averaged over ranks."""
    parallel = model.parallel
    assert parallel is not None
    if not parallel.called:
        if any(map(replaced, parallel.plan.components)):
            raise UsageError(
                f"model.{name}() needs the whole model, of which ranks hold parts under {parallel.plan.strategy}: plan "
                "with strategies=('ddp',), or load model.state_dict() into a plain one"
            )
        if not torch.is_grad_enabled():
            return getattr(model.origin, name)(*args, **options)
        with preserved(model.origin):
            result = getattr(model.origin, name)(*args, **options)
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(result)):
            return getattr(model.origin, name)(*args, **options)
        model.run_whole(f"model.{name}() computes with gradients")
    return model.call(name, args, options)


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
