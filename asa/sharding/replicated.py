"""Parameters that every rank of a data group holds whole: their gradients are averaged in buckets.

The buckets of a rank fill from the last parameter to the first, as backward goes, and each sets out when it is full and
those before it have set out. What is not full at the end of backward sets out then. So all ranks send alike, whichever
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
"""Sizes of the bucket that sets out first and of the others, as in torch's own data parallelism."""

Wait = Callable[[], object]
Send = Callable[["Bucket"], Wait]
"""Begins to make a bucket its mean over the ranks (collective); what it returns ends when that is done."""

_REPLICATED = "asa_replicated"


class Bucket:
    """Gradients that travel together, of ``parameters`` of one type in the order in which they lie in ``flat``.

    A gradient that has been placed is a view of ``flat``. That memory is used again in the next step, unless somebody
    else still holds such a view: what a program has kept of an earlier step stays what it was.
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
        """Before the first gradient of a backward is placed."""
        self.waiting = len(self.parameters)
        if self.flat.numel() == self._length:
            where = self.flat.untyped_storage().data_ptr()
            ours = sum(1 for p in self.parameters if p.grad is not None and _storage_of(p.grad) == where)
            if _references(self.flat) <= self._known + ours:
                return
        self.flat = self.parameters[0].detach().new_empty(self._length)
        self._known = _references(self.flat)

    def view(self, i: int) -> Tensor:
        """Where the gradient of parameter ``i`` lies in ``flat``, strided like the parameter."""
        p, start = self.parameters[i], self._starts[i]
        return self.flat.as_strided(p.size(), self._strides[i], start)

    def place(self, i: int) -> None:
        """Have the gradient of parameter ``i`` lie in ``flat``."""
        p = self.parameters[i]
        gradient = p.grad
        assert gradient is not None
        # Where it has been added to in place it lies there already.
        if (
            gradient.data_ptr() != self.flat.data_ptr() + self._starts[i] * self.flat.element_size()
            or gradient.stride() != self._strides[i]
            or gradient.untyped_storage().data_ptr() != self.flat.untyped_storage().data_ptr()
        ):
            view = self.view(i)
            view.copy_(gradient)
            p.grad = view

    def absent(self, i: int) -> None:
        """Have a zero lie in ``flat`` for parameter ``i``, to which no sample of this rank led: a negative one, as a
        sum is only if all its addends are (IEEE 754)."""
        self.view(i).fill_(-0.0)

    def mark(self) -> None:
        """Have no gradient begin with a negative zero."""
        self.flat.index_add_(0, self._firsts, self.flat.new_zeros(len(self._firsts)))

    def absent_everywhere(self, i: int) -> bool:
        """Whether no rank had a gradient of parameter ``i``, which was absent here, once the bucket is summed."""
        start = self._starts[i]
        first = self.flat[start : start + 1]
        real = first.real if first.is_complex() else first
        return not self.parameters[i].numel() or bool(((real == 0) & real.signbit()).all())


def _dense(p: Tensor) -> bool:
    """Whether the elements of ``p`` fill a stretch of memory, in whatever order of dimensions."""
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
    """What of ``module`` is averaged over ``axis``. ``send`` may be replaced; ``parameters``: all, trained or not.

    ``sparse``: those whose gradients have values for some rows only (:class:`torch.nn.Embedding` with ``sparse``).
    """

    def __init__(self, module: nn.Module, axis: Axis, only: Collection[nn.Parameter] | None) -> None:
        self.axis = axis
        self.parameters = [p for p in dict.fromkeys(module.parameters()) if only is None or p in only]
        tables = {m.weight for m in module.modules() if getattr(m, "sparse", False) is True and hasattr(m, "weight")}
        self.sparse = [p for p in self.parameters if p in tables]
        self.send: Send = sender(axis)

    def buckets(self) -> list[Bucket]:
        """Buckets of the parameters that are trained now, in the order in which they set out."""
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
    """How buckets are averaged over ``axis``: as its compression says, through memory that the ranks share where they
    share any, and by messages elsewhere."""
    if axis.compression != "none":
        return compressed(axis)
    group = axis.group

    def send(bucket: Bucket) -> Wait:
        flat = torch.view_as_real(bucket.flat) if bucket.flat.is_complex() else bucket.flat
        if flat.device.type == "cpu" and segment_of(group) is not None:
            direct.all_reduce(flat, group=group, mean=True)
            return _done
        flat.div_(axis.size)  # before they are added: sums of halves need not fit
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
    """``module``, which is to have its gradients averaged over ``axis`` (those of the parameters in ``only``, where not
    all), its weights now those of the first rank there unless they are known to be alike (collective)."""
    if axis.size == 1 or axis.group is None or next(module.parameters(), None) is None:
        return module
    if not axis.alike:
        _send_first((*module.parameters(), *module.buffers()), axis.group)
    module.__dict__[_REPLICATED] = Replicated(module, axis, only)
    return module


def replicated_of(module: nn.Module) -> Replicated | None:
    """What of ``module`` is averaged, if anything is."""
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
