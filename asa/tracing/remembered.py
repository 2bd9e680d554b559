"""Cache of the outputs of torch's operators on tensors without values, by kind of call.

On the meta device most operators are written in Python: a layer norm takes milliseconds to return a shape. A model
calls few kinds of operators, each many times, and tracing runs it a dozen times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unknown(Exception):
    """Raised for an argument that cannot be part of a key."""


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter) or not value.is_meta or value.layout is not torch.strided:
            raise _Unknown
        return Tensor, value.shape, value.stride(), value.storage_offset(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if not isinstance(value, _PLAIN):
        raise _Unknown
    return type(value), value


def _recipe(value: Any) -> Any:
    """What is needed to make ``value`` again: shape, strides and type of a tensor; None for None."""
    if isinstance(value, Tensor):
        dense = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        if not value.is_meta or value.storage_offset() or not dense:
            raise _Unknown
        return value.shape, value.stride(), value.dtype
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return type(value)(map(_recipe, value))
    raise _Unknown


def _from_recipe(recipe: Any) -> Any:
    if recipe is None:
        return None
    if isinstance(recipe, tuple) and recipe and isinstance(recipe[0], torch.Size):
        return torch.empty_strided(*recipe[:2], dtype=recipe[2], device="meta")
    return type(recipe)(map(_from_recipe, recipe))


class Remembered(TorchDispatchMode):
    """Context in which an operator that makes new tensors on meta, or fills one in place, runs once for each kind of
    arguments. Later outputs get the same shapes, strides and types. Views and all other operators always run.
    ``spared`` is the number of calls answered from the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.spared = 0
        self._recipes: dict[Any, Any] = {}
        self._manner: dict[Any, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        manner = self._manner.get(func)
        if manner is None:
            manner = self._manner[func] = _manner(func)
        if manner == "run":
            return func(*args, **kwargs)
        try:
            key = func, _key(args), tuple((k, _key(v)) for k, v in sorted(kwargs.items()))
        except _Unknown:
            return func(*args, **kwargs)
        if key in self._recipes:
            self.spared += 1
            return args[0] if manner == "fill" else _from_recipe(self._recipes[key])
        result = func(*args, **kwargs)
        try:
            self._recipes[key] = None if manner == "fill" else _recipe(result)
        except _Unknown:
            self._manner[func] = "run"
        return result


def _manner(func: Any) -> str:
    """``make`` for operators whose outputs are all new, ``fill`` for those that write to their first argument and
    return it, ``run`` for others."""
    schema = func._schema
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None]
    if not any(isinstance(a.type, torch.TensorType) or "Tensor" in str(a.type) for a in schema.arguments):
        return "run"
    if written:
        inplace = written == [0] and schema.arguments[0].alias_info.is_write and schema.name.endswith("_")
        return "fill" if inplace and torch.Tag.inplace_view not in func.tags and len(schema.returns) == 1 else "run"
    return "run" if any(r.alias_info is not None for r in schema.returns) else "make"
