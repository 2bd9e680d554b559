"""Averages the gradients of parameters that all ranks of a data group hold whole, in buckets.

The buckets of a rank fill from the last parameter to the first, as backward goes, and each is sent when it is full and
those before it were sent. The others are sent at the end of backward. So all ranks send in the same order, whichever
parameters their own samples reached (:mod:`asa.sharding.averaging`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asa.sharding import direct
from asa.sharding.axis import Axis
from asa.sharding.compression import compressed
from asa.sharding.segment import segment_of

_FIRST_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20
"""Sizes of the first bucket that is sent and of the others, as in torch's own data parallelism."""

Wait = Callable[[], object]
Send = Callable[["Bucket"], Wait]
"""Function that starts to average a bucket over the ranks (collective), and returns a function that waits for it."""

_REPLICATED = "asa_replicated"


class Bucket:
    """Gradients that are sent in one message, for ``parameters`` of one type in their order in ``flat``.

    A gradient that has been placed is a view of ``flat``. That memory is used again in the next step, unless another
    reference to such a view exists: gradients that a program has kept from an earlier step do not change.
    """

    def __init__(self, number: int, parameters: list[nn.Parameter], *, last: bool) -> None:
        self.number, self.parameters, self.last = number, parameters, last
        sizes = [p.numel() for p in parameters]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._strides = [p.stride() if _dense(p) else torch.empty(p.shape, device="meta").stride() for p in parameters]
        self._length = sum(sizes)
        self._known = 0
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
            if _references(self.flat) <= self._known + ours:
                return
        self.flat = self.parameters[0].detach().new_empty(self._length)
        self._known = _references(self.flat)

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
            p.grad = view

    def absent(self, i: int) -> None:
        """Fill in negative zeros for parameter ``i``, which no sample of this rank reached; a sum is negative zero only
        if all addends are (IEEE 754)."""
        self.view(i).fill_(-0.0)

    def mark(self) -> None:
        """Make sure that no gradient begins with a negative zero."""
        self.flat.index_add_(0, self._firsts, self.flat.new_zeros(len(self._firsts)))

    def absent_everywhere(self, i: int) -> bool:
        """Whether no rank had a gradient of parameter ``i``, which was absent here; call after the bucket is summed."""
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


class Replicated:
    """The parameters of ``module`` whose gradients are averaged over ``axis``. ``send`` may be replaced;
    ``parameters``: all, trained or not.

    ``sparse``: those whose gradients have values for some rows only (:class:`torch.nn.Embedding` with ``sparse``).
    """

    def __init__(self, module: nn.Module, axis: Axis, only: Collection[nn.Parameter] | None) -> None:
        self.axis = axis
        self.parameters = [p for p in dict.fromkeys(module.parameters()) if only is None or p in only]
        tables = {m.weight for m in module.modules() if getattr(m, "sparse", False) is True and hasattr(m, "weight")}
        self.sparse = [p for p in self.parameters if p in tables]
        self.send: Send = sender(axis)

    def buckets(self) -> list[Bucket]:
        """Buckets of the parameters that are currently trained, in the order in which they are sent."""
        sparse = set(self.sparse)
        found: list[list[nn.Parameter]] = []
        size, limit = 0, _FIRST_BYTES
        for p in reversed(self.parameters):
            if not p.requires_grad or p in sparse:
                continue
            if not found or size >= limit or found[-1][0].dtype != p.dtype or found[-1][0].device != p.device:
                limit = _BUCKET_BYTES if found else _FIRST_BYTES
                found.append([])
                size = 0
            found[-1].append(p)
            size += p.nbytes
        return [Bucket(i, members, last=i + 1 == len(found)) for i, members in enumerate(found)]


def sender(axis: Axis) -> Send:
    """A function that averages buckets over ``axis``: compressed if it has a compression, otherwise through shared
    memory if the ranks have it, otherwise by messages."""
    if axis.compression != "none":
        return compressed(axis)
    group = axis.group

    def send(bucket: Bucket) -> Wait:
        flat = torch.view_as_real(bucket.flat) if bucket.flat.is_complex() else bucket.flat
        if flat.device.type == "cpu" and segment_of(group) is not None:
            direct.all_reduce(flat, group=group, mean=True)
            return _done
        flat.div_(axis.size)  # before the sum, which may overflow in half precision
        work = dist.all_reduce(flat, group=group, async_op=True)

        def wait() -> None:
            if flat.device.type == "cpu":
                direct.awaited(work)
            elif work is not None:
                work.wait()

        return wait

    return send


def _done() -> None:
    return None


def replicated(module: nn.Module, axis: Axis, *, only: Collection[nn.Parameter] | None = None) -> nn.Module:
    """Prepare ``module`` for averaging its gradients over ``axis`` (those of the parameters ``only``, if not all), and
    return it. Weights are set to those of the first rank, unless they are known to be equal (collective)."""
    if axis.size == 1 or axis.group is None or next(module.parameters(), None) is None:
        return module
    if not axis.alike:
        _send_first((*module.parameters(), *module.buffers()), axis.group)
    module.__dict__[_REPLICATED] = Replicated(module, axis, only)
    return module


def replicated_of(module: nn.Module) -> Replicated | None:
    """The :class:`Replicated` of ``module``; None if nothing of it is averaged."""
    found: Replicated | None = module.__dict__.get(_REPLICATED)
    return found


@torch.no_grad()
def _send_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in dict.fromkeys(tensors):
        alike.setdefault((t.dtype, t.device), []).append(t)
    for same in alike.values():
        flat = torch.cat([t.detach().reshape(-1) for t in same])
        direct.broadcast(flat.view(torch.uint8) if flat.dtype == torch.bool else flat, group_src=0, group=group)
        for t, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
            t.copy_(part.view(t.shape))


__all__ = ["Bucket", "Replicated", "Send", "Wait", "replicated", "replicated_of", "sender"]
