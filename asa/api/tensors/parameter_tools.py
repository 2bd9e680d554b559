"""Tools of torch for whole parameters, patched for those that ranks hold in parts: ``torch.nn.init`` draws what it
would draw for the whole tensor, ``parameters_to_vector`` and ``vector_to_parameters`` use whole tensors, and whole
tensors get whole data and gradients."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import init
from torch.nn.utils import convert_parameters
from torch.optim import Optimizer

from asa.api.patching import replace_once
from asa.errors import UsageError
from asa.executor.model.state import LocalTensor, gather
from asa.sharding.split import TensorPart
from asa.sharding.split.of_rank import followed
from asa.sharding.split.wire import gathered

_views: WeakValueDictionary[int, TensorPart] = WeakValueDictionary()
"""Views of the whole, by ``id`` of the part that a rank holds (and that modules have as their parameter)."""
_drawn: set[int] = set()
"""``id`` of parts that ``torch.nn.init`` changed."""


def understood_by_torch(parameters: Iterable[Tensor]) -> None:
    """Patch these tools for ``parameters``, a program's view of them. Other calls are unchanged."""
    parts = [p for p in parameters if isinstance(p, TensorPart)]
    _views.update({id(p.held): p for p in parts})
    if not parts and not any(isinstance(p, DTensor) for p in parameters):
        return
    for name, _ in inspect.getmembers(init, inspect.isfunction):
        draws = name.endswith("_") and not name.startswith("_")
        if draws or name == "_calculate_fan_in_and_fan_out":
            replace_once(init, name, _of_the_whole)
    for attribute in ("data", "grad", "_grad"):
        if attribute not in Tensor.__dict__:
            setattr(Tensor, attribute, _Wholly(attribute))
    replace_once(Tensor, "set_", _set_wholly)
    replace_once(Optimizer, "add_param_group", _in_one_group)
    _replace_code(convert_parameters.parameters_to_vector, _to_vector)
    _replace_code(convert_parameters.vector_to_parameters, _to_parameters)


class _Wholly:
    """The attribute ``name`` of tensors. What ranks hold in parts or shards is gathered for a tensor that is whole:
    torch would take the object itself for its memory."""

    def __init__(self, name: str) -> None:
        self._name, self._original = name, getattr(Tensor, name)

    def __get__(self, tensor: Tensor | None, owner: type | None = None) -> Any:
        return self._original if tensor is None else self._original.__get__(tensor, owner)

    def __set__(self, tensor: Tensor, value: Any) -> None:
        if isinstance(value, TensorPart | DTensor) and not isinstance(tensor, TensorPart | DTensor):
            if self._name == "data" and _shares_memory(value):
                raise UsageError(
                    "p.data = w.data would give a whole tensor the memory of a parameter that ranks hold in parts: use "
                    "w.data.clone(), or plan with strategies=('ddp',)"
                )
            followed(f"setting {self._name}", (tensor, value), lambda: self.__set__(tensor, _whole(value.detach())))
            return
        self._original.__set__(tensor, value)

    def __delete__(self, tensor: Tensor) -> None:
        self._original.__delete__(tensor)


def _in_one_group(original: Callable[..., None]) -> Callable[..., None]:
    """A group of an optimizer with views of the whole in place of parts, which ``model.modules()`` has."""

    @functools.wraps(original)
    def add_param_group(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
        listed, views = param_group["params"], list[Any]()
        if isinstance(listed, Iterable) and not isinstance(listed, Tensor | set):
            views = [tuple(map(view_of_whole, p)) if isinstance(p, tuple) else view_of_whole(p) for p in listed]
            param_group["params"] = views
        try:
            original(optimizer, param_group)
        except ValueError as error:
            if "more than one parameter group" not in str(error) or not any(isinstance(p, TensorPart) for p in views):
                raise
            raise UsageError(
                f"{error}: where ranks hold parts, a parameter of model.modules() is another object than that of "
                "model.parameters(); tell them apart by name (model.named_parameters()), or make the optimizer before "
                "asa.parallelize"
            ) from error

    return add_param_group


def _set_wholly(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``p.set_(w)``, of which torch's overrides hear nothing."""

    @functools.wraps(original)
    def set_(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        source = args[0] if args else options.get("source")
        if not isinstance(source, Tensor) or not any(isinstance(t, TensorPart | DTensor) for t in (tensor, source)):
            return original(tensor, *args, **options)
        if len(args) + len(options) > 1:
            raise UsageError("p.set_ with an offset or a shape needs a tensor that no rank holds in parts")
        tensor.data = source
        return tensor

    return set_


def _shares_memory(value: Tensor) -> bool:
    """Whether a parameter, or another tensor, has the memory of the part that this rank has of ``value``."""
    part: Any = value._local_tensor if isinstance(value, DTensor) else value.held  # type: ignore[attr-defined]
    part = part._local_tensor if isinstance(part, DTensor) else part
    memory = part.untyped_storage()
    return isinstance(value, nn.Parameter) or torch._C._storage_Use_Count(memory._cdata) > 2  # of part and memory


def view_of_whole(value: Any) -> Any:
    """A program's view of ``value`` if it is a parameter of which this rank holds a part; otherwise ``value``."""
    view = _views.get(id(value)) if isinstance(value, nn.Parameter) else None
    return value if view is None or view.held is not value else view


def drawn_as_whole(part: Tensor) -> bool:
    """Whether ``torch.nn.init`` changed ``part`` since this was asked last."""
    found = id(part) in _drawn
    _drawn.discard(id(part))
    return found


def _of_the_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(tensor: Tensor, *args: Any, **options: Any) -> Any:
        view = _views.get(id(tensor))
        if view is None or view.held is not tensor:
            return function(tensor, *args, **options)
        _drawn.add(id(tensor))
        result = function(view, *args, **options)
        return tensor if result is view else result

    return wrapper


def _whole(p: Tensor) -> Tensor:
    if isinstance(p, TensorPart):
        item = LocalTensor("", p.held, p.parted.shard, p.parted.axis, 0)
        return gather(item, p.held).to(p.device)
    return gathered(p)


_ORIGINAL: dict[str, Callable[..., Any]] = {}
"""The code that functions of ``torch.nn.utils`` had."""


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """The whole numbers of ``parameters`` in one vector, without gradients if ranks hold any of them in parts."""
    listed = list(parameters)
    if not any(isinstance(p, TensorPart | DTensor) for p in listed):
        return _ORIGINAL["parameters_to_vector"](listed)  # type: ignore[no-any-return]
    with torch.no_grad():  # a part of a loss is not computed from it
        return torch.cat([_whole(p).detach().reshape(-1) for p in listed])


def vector_to_parameters(vec: Tensor, parameters: Iterable[Tensor]) -> None:
    """Make the numbers of ``vec`` the data of ``parameters``, one after the other."""
    listed = list(parameters)
    if not any(isinstance(p, TensorPart | DTensor) for p in listed):
        _ORIGINAL["vector_to_parameters"](vec, listed)
        return
    for p, values in zip(listed, vec.detach().split([p.numel() for p in listed]), strict=True):
        p.data = values.view(p.shape).clone()


def _replace_code(function: Any, entry: Any) -> None:
    """Have ``function`` run ``entry``, also for programs that have imported it by name."""
    if function.__name__ not in _ORIGINAL:
        _ORIGINAL[function.__name__] = FunctionType(function.__code__, function.__globals__)
        function.__code__ = entry.__code__


def _to_vector(parameters: Iterable[Tensor]) -> Tensor:
    from asa.api.tensors.parameter_tools import parameters_to_vector  # its code runs among the names of torch's module

    return parameters_to_vector(parameters)


def _to_parameters(vec: Tensor, parameters: Iterable[Tensor]) -> None:
    from asa.api.tensors.parameter_tools import vector_to_parameters

    vector_to_parameters(vec, parameters)


def held_parts(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters of ``module`` itself of which it has a part, by name."""
    return [(n, p) for n, p in module.named_parameters(recurse=False) if is_part(p)]


def is_part(parameter: Tensor) -> bool:
    """Whether this rank has a part of a parameter in ``parameter``."""
    return id(parameter) in _views
