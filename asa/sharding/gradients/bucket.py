"""Buckets: gradients that are sent together from one piece of memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Wait = Callable[[], object]
Send = Callable[["Bucket"], Wait]
"""Function that starts to average a bucket over the ranks (collective), and returns a function that waits for the
result."""


class Bucket:
    """Gradients of ``parameters``, all of one type, in their order in ``flat``, which is sent in one message.

    A gradient that has been placed is a view of ``flat``. That memory is used again in the next step, unless another
    reference to such a view exists. So gradients that a program has kept from an earlier step do not change.
    """

    def __init__(self, number: int, parameters: list[nn.Parameter], *, last: bool) -> None:
        self.number, self.parameters, self.last = number, parameters, last
        sizes = [p.numel() for p in parameters]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._strides = [p.stride() if _dense(p) else torch.empty(p.shape, device="meta").stride() for p in parameters]
        self._length = sum(sizes)
        self._base_references = 0
        self.flat = parameters[0].detach().new_empty(0)
        starts = [s for s, size in zip(self._starts, sizes, strict=True) if size]
        self._firsts = torch.tensor(starts, dtype=torch.int64, device=self.flat.device)
        self.waiting = len(parameters)

    def begin(self) -> None:
        """Prepare for the first gradient of a backward."""
        self.waiting = len(self.parameters)
        if self.flat.numel() == self._length:
            where = self.flat.untyped_storage().data_ptr()
            ours = sum(1 for p in self.parameters if p.grad is not None and _storage_of(p.grad) == where)
            if _references(self.flat) <= self._base_references + ours:
                return
        self.flat = self.parameters[0].detach().new_empty(self._length)
        self._base_references = _references(self.flat)

    def view(self, i: int) -> Tensor:
        """The view of ``flat`` for the gradient of parameter ``i``, strided like the parameter."""
        p, start = self.parameters[i], self._starts[i]
        return self.flat.as_strided(p.size(), self._strides[i], start)

    def place(self, i: int) -> None:
        """Move the gradient of parameter ``i`` into ``flat``."""
        p = self.parameters[i]
        gradient = p.grad
        assert gradient is not None
        # A gradient that was accumulated in place is already there.
        if (
            gradient.data_ptr() != self.flat.data_ptr() + self._starts[i] * self.flat.element_size()
            or gradient.stride() != self._strides[i]
            or gradient.untyped_storage().data_ptr() != self.flat.untyped_storage().data_ptr()
        ):
            view = self.view(i)
            view.copy_(gradient)
            p.grad = view.data  # no view for autograd: a program may multiply it by what has gradients

    def absent(self, i: int) -> None:
        """Fill in negative zeros for parameter ``i``, which no sample of this rank reached. A sum is negative zero only
        if all addends are (IEEE 754)."""
        self.view(i).fill_(-0.0)

    def mark(self) -> None:
        """Make sure that no gradient begins with a negative zero."""
        self.flat.index_add_(0, self._firsts, self.flat.new_zeros(len(self._firsts)))

    def absent_everywhere(self, i: int) -> bool:
        """Whether no rank had a gradient of parameter ``i``, which this rank had none of; call after the bucket is
        summed."""
        start = self._starts[i]
        first = self.flat[start : start + 1]
        real = first.real if first.is_complex() else first
        return not self.parameters[i].numel() or bool(((real == 0) & real.signbit()).all())


def _dense(p: Tensor) -> bool:
    """Whether the elements of ``p`` fill a contiguous piece of memory, in any order of dimensions."""
    length = 1
    for stride, size in sorted((stride, size) for stride, size in zip(p.stride(), p.shape, strict=True) if size > 1):
        if stride != length:
            return False
        length *= size
    return True


def _storage_of(tensor: Tensor) -> int:
    return 0 if tensor.layout != torch.strided else tensor.untyped_storage().data_ptr()


def _references(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
