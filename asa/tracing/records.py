"""Outputs that are objects of a program's own (records, distributions): torch's functions on trees find their tensors,
as they find those of a tuple."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

T = TypeVar("T")


def understood(output: T) -> T:
    """``output``. Classes of objects in it that have tensors in their attributes are known to ``torch.utils._pytree``
    from here on."""
    for leaf in pytree.tree_leaves(output):
        if _holds_tensors(leaf):
            of_names = isinstance(leaf, dict)
            ways = (_names_taken_apart, _names_put_together) if of_names else (_taken_apart, _put_together)
            pytree.register_pytree_node(type(leaf), *ways)
            understood(leaf)
    return output


def numbers_in(output: Any) -> bool:
    """Whether a Python number is in ``output``, which may be one of its samples."""
    return any(isinstance(leaf, int | float | complex) for leaf in pytree.tree_leaves(understood(output)))


def _holds_tensors(leaf: Any) -> bool:
    kind, of_names = type(leaf), isinstance(leaf, dict)
    if kind in pytree.SUPPORTED_NODES or isinstance(leaf, Tensor | fx.Proxy | nn.Module | type) or callable(leaf):
        return False
    if kind.__new__ not in (dict.__new__, object.__new__, SimpleNamespace.__new__):
        return False
    attributes = dict(leaf) if of_names else getattr(leaf, "__dict__", None)
    return any(isinstance(v, Tensor | fx.Proxy) or _holds_tensors(v) for v in pytree.tree_leaves(attributes))


def _taken_apart(record: Any) -> tuple[list[Any], Any]:
    return list(vars(record).values()), (type(record), tuple(vars(record)))


def _names_taken_apart(record: dict[Any, Any]) -> tuple[list[Any], Any]:
    return list(dict.values(record)), (type(record), tuple(record), vars(record))


def _names_put_together(values: Any, context: Any) -> Any:
    kind, names, attributes = context
    record = kind.__new__(kind)
    dict.update(record, zip(names, values, strict=True))
    record.__dict__.update(attributes)
    return record


def _put_together(values: Any, context: Any) -> Any:
    kind, names = context
    record = kind.__new__(kind)
    record.__dict__.update(zip(names, values, strict=True))
    return record
