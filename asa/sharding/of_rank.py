"""Marks of sharded and split tensors that a loop computed with numbers of one rank's samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

OF_RANK = "asa_of_rank"
"""Attribute of such a tensor: whom to tell of what it is written into."""
_IN_PLACE = re.compile(r"_?[a-z].*[^_]_|__i[a-z]+__|__setitem__")


def writes(name: str) -> bool:
    """Whether a function of torch with this name changes the values of its first argument."""
    return name != "requires_grad_" and bool(_IN_PLACE.fullmatch(name))


def in_parts(value: Any) -> bool:
    """Whether ``value`` is a tensor without gradients of which ranks hold shards or parts."""
    with torch._C.DisableTorchFunctionSubclass():
        parts = isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and hasattr(value, "held"))
        return parts and not value.requires_grad


def mark_of_rank(result: Any, told: Callable[[Any], None]) -> Any:
    """``result``, with its tensors in parts known as computed with numbers of this rank's samples."""
    for leaf in filter(in_parts, pytree.tree_leaves(result)):
        setattr(leaf, OF_RANK, told)
    return result


def followed(name: str, args: Iterable[Any], run: Callable[[], Any]) -> Any:
    """The result of ``run()``, the function ``name`` of ``args``, which tells of such a tensor that is written into
    another and marks what is computed from it."""
    given = list(args)
    told = next((mark for each in given if (mark := getattr(each, OF_RANK, None)) is not None), None)
    if told is None:
        return run()
    if writes(name):
        told(given[0])
    return mark_of_rank(run(), told)
