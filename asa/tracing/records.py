"""Outputs that are objects of a program's own (records, distributions): torch's functions on trees find their tensors,
as they find those of a tuple."""

from __future__ import annotations

from types import NoneType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

T = TypeVar("T")
_SIMPLE = (Tensor, fx.Proxy, int, float, complex, str, bytes, NoneType, torch.device, torch.dtype, type)
_MADE_BY = (dict.__new__, object.__new__, SimpleNamespace.__new__)
"""Ways in which an instance is made without a word of its class's."""


def understood(output: T) -> T:
    """``output``. Classes of records in it are known to ``torch.utils._pytree`` from here on.

    A record is an object that has tensors in its attributes, and nothing but tensors, numbers, texts, devices, types
    and other records;
    or a dictionary of such items, of a class of its own.
    """
    for leaf in pytree.tree_leaves(output):
        if not isinstance(leaf, _SIMPLE) and _is_record(leaf, ()) and type(leaf) not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(type(leaf), _taken_apart, _put_together, flatten_with_keys_fn=_named_parts)
            understood(leaf)
    return output


def numbers_in(output: Any) -> bool:
    """Whether a Python number is in ``output``, which may be one of its samples. What is true or false is none."""
    leaves = pytree.tree_leaves(understood(output))
    return any(isinstance(leaf, int | float | complex) and not isinstance(leaf, bool) for leaf in leaves)


def hides_tensors(output: Any) -> str:
    """Name of the class of an object in ``output`` that is no record and has tensors with gradients in its attributes;
    empty if there is none."""
    for leaf in pytree.tree_leaves(output):
        if not isinstance(leaf, _SIMPLE):
            held = pytree.tree_leaves(_attributes(leaf))
            if any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in held):
                return type(leaf).__name__
    return ""


def _attributes(record: Any) -> dict[str, Any]:
    """What a record has, by name."""
    slots = [n for kind in type(record).__mro__ for n in getattr(kind, "__slots__", ()) if hasattr(record, n)]
    return {n: getattr(record, n) for n in slots if n != "__dict__"} | dict(getattr(record, "__dict__", {}))


def _is_record(value: Any, above: tuple[int, ...]) -> bool:
    if type(value).__new__ not in _MADE_BY or callable(value) or id(value) in above or isinstance(value, type):
        return False
    items = pytree.tree_leaves((_attributes(value), dict(value) if isinstance(value, dict) else ()))
    within = (*above, id(value))
    if not any(isinstance(item, Tensor | fx.Proxy) or not isinstance(item, _SIMPLE) for item in items):
        return False
    return all(isinstance(item, _SIMPLE) or _is_record(item, within) for item in items)


def _taken_apart(record: Any) -> tuple[list[Any], Any]:
    items = dict(record) if isinstance(record, dict) else {}
    attributes = _attributes(record)
    return [*items.values(), *attributes.values()], (type(record), tuple(items), tuple(attributes))


def _named_parts(record: Any) -> tuple[list[tuple[Any, Any]], Any]:
    values, (kind, keys, names) = _taken_apart(record)
    places = [*map(pytree.MappingKey, keys), *map(pytree.GetAttrKey, names)]
    return list(zip(places, values, strict=True)), (kind, keys, names)


def _put_together(values: Any, context: Any) -> Any:
    kind, keys, names = context
    record, values = kind.__new__(kind), list(values)
    if keys:
        dict.update(record, zip(keys, values, strict=False))
    for name, value in zip(names, values[len(keys) :], strict=True):
        object.__setattr__(record, name, value)
    return record
