"""Marks of sharded and split tensors that a loop computed with numbers of one rank's samples."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

OF_RANK = "asa_of_rank"
"""Attribute of such a tensor: whom to tell of what it is written into."""
_ELEMENTS, _MOST = 64, 256
"""Number of elements of a whole tensor by which ranks compare it; largest number of figures that are kept on a device.
"""
_IN_PLACE = re.compile(r"_?[a-z].*[^_]_|__i[a-z]+__|__setitem__|__set__|setting \w+")


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


class Operands:
    """A figure for the numbers and whole tensors that a program combined with tensors in parts, in their order. They
    have to be alike on all ranks, wherever they come from."""

    def __init__(self) -> None:
        self.written = 0
        """A number for what was written into tensors in parts so far: by which functions, and their shapes."""
        self._sum = 0.0
        self._tensors: list[Tensor] = []
        self._count = 0

    def note(self, operands: Iterable[Any]) -> None:
        """Count the numbers and whole tensors among ``operands``, and in lists and tuples among them."""
        for leaf in operands:
            if type(leaf) in (int, float):
                self._add(leaf)
            elif type(leaf) in (list, tuple):
                self.note(leaf)
            elif isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and not hasattr(leaf, "held"):
                with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                    if leaf.layout is torch.strided and not leaf.is_meta and not leaf.is_complex():
                        # Read out at once, which a device would wait for, only where a batch ends.
                        self._tensors.append(leaf.detach().reshape(-1)[:_ELEMENTS].sum(dtype=torch.float64))
        if len(self._tensors) > _MOST:
            self._read()

    def note_written(self, name: str, target: Any) -> None:
        """Count that the function ``name`` writes into ``target``, a tensor or several, if ranks hold it in parts."""
        for leaf in target if isinstance(target, list | tuple) else (target,):
            if isinstance(leaf, DTensor) or hasattr(leaf, "held"):
                self.written += zlib.crc32(repr((name, tuple(leaf.shape))).encode())

    def figure(self) -> float:
        """The figure since it was asked for last."""
        self._read()
        figure, self._sum, self._count = self._sum, 0.0, 0
        return figure

    def _read(self) -> None:
        values, self._tensors = [t.item() for t in self._tensors], []
        for value in values:
            self._add(value)

    def _add(self, value: float) -> None:
        self._count += 1
        if isfinite(value):
            self._sum += value / (1 + abs(value)) * (1 + self._count % 7)


operands = Operands()


def followed(name: str, args: Iterable[Any], run: Callable[[], Any], options: Any = None) -> Any:
    """The result of ``run()``, the function ``name`` of ``args``, which tells of such a tensor that is written into
    another and marks what is computed from it."""
    given = list(args)
    operands.note(given)
    operands.note((options or {}).values())
    if writes(name) and given and name != "__set__" and not name.startswith("setting "):
        operands.note_written(name, given[0])
    told = next((mark for each in given if (mark := getattr(each, OF_RANK, None)) is not None), None)
    if told is None:
        return run()
    if writes(name):
        told(given[0])
    return mark_of_rank(run(), told)
