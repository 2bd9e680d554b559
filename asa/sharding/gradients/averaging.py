"""Completes the averaging of gradients at the end of a backward, with the same collectives on all ranks.

If the samples of a rank did not reach a parameter, the rank has no gradient of it, which counts as zero. If no rank's
samples reached it, its gradient stays what it was, usually None, so that an optimizer skips it as on one device. The
sums show this: a rank without a gradient contributes negative zeros, and a sum is negative zero only if all addends
are.

So the sequence of collectives depends on what is trained, and not on a rank's samples.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from asa.errors import UsageError
from asa.sharding.collectives.axis import Axis
from asa.sharding.collectives.waits import waits
from asa.sharding.gradients.bucket import Bucket, Wait
from asa.sharding.gradients.replicated import Replicated
from asa.sharding.gradients.sharded import Unreached

_NONE, _DENSE = -1, -2
"""Values in place of the number of rows of a sparse gradient: there is no gradient, or the gradient is dense."""


def at_the_end_of_backward(call: Callable[[], None]) -> None:
    """Call ``call`` when the current backward is over."""
    Variable._execution_engine.queue_callback(call)


class Averaging:
    """Averages the gradients of parameters that a rank holds whole, and of the ``unreached`` parameters of sharded
    units.

    ``replicas`` are in the order of the network. ``on`` says whether backwards average; otherwise gradients accumulate
    locally.
    """

    def __init__(self, replicas: Sequence[Replicated], unreached: Sequence[Unreached]) -> None:
        self.on = True
        self._replicas, self._unreached = replicas, unreached
        self._parameters = [p for r in replicas for p in r.parameters]
        self._trained: list[bool] | None = None
        self._handles: list[RemovableHandle] = []
        self._hooked: set[nn.Parameter] = set()
        """Parameters on which this object has registered a hook."""
        self._buckets: list[tuple[Replicated, Bucket]] = []
        self._waits: list[Wait] = []
        self._in_bucket: set[tuple[int, int]] = set()
        self._sparse: list[tuple[Replicated, nn.Parameter]] = []
        self._under_way = False
        self.weight = 1.0
        """Weight of this rank's gradients in the mean; the weights of all ranks sum to the number of ranks."""
        self.done = 0
        """Number of backwards after which gradients were averaged."""
        for each in unreached:
            each.at_the_end(self._ended)

    def buckets(self) -> list[Tensor]:
        """Memory of the buckets; empty tensors where nothing was averaged yet."""
        return [bucket.flat for _, bucket in self._buckets]

    def refresh(self) -> None:
        """Record which parameters are trained now; call before a forward.

        Raises:
            UsageError: the program has a hook of its own that runs when a gradient has been accumulated.
        """
        if any(len(p._post_accumulate_grad_hooks or ()) > (p in self._hooked) for p in self._parameters):
            raise UsageError(
                "a hook on a parameter that runs when its gradient has been accumulated sees only this rank's part of "
                "it; do the same after loss.backward(), or plan with strategies=('fsdp',)"
            )
        trained = [p.requires_grad for p in self._parameters]
        if trained == self._trained:
            return
        self._trained = trained
        for handle in self._handles:
            handle.remove()
        self._buckets = [(r, b) for r in reversed(self._replicas) for b in r.buckets()]
        self._handles = []
        this = weakref.ref(self)
        for number, (_, bucket) in enumerate(self._buckets):
            for i, p in enumerate(bucket.parameters):
                self._handles.append(p.register_post_accumulate_grad_hook(partial(_arrived, this, number, i)))
        self._sparse = [(r, p) for r in reversed(self._replicas) for p in r.sparse if p.requires_grad]
        self._hooked = {p for _, b in self._buckets for p in b.parameters} | {p for _, p in self._sparse}
        for _, p in self._sparse:
            self._handles.append(p.register_post_accumulate_grad_hook(partial(_began, this)))

    def begin(self) -> None:
        """Start averaging in the current backward, when its first gradient arrives."""
        if self.on and not self._under_way:
            self._open()
            at_the_end_of_backward(self._ended)

    def _open(self) -> None:
        self._under_way = True
        self._waits, self._in_bucket = [], set()
        for _, bucket in self._buckets:
            bucket.begin()

    @torch.no_grad()
    def arrived(self, number: int, i: int) -> None:
        """Record that the gradient of parameter ``i`` of bucket ``number`` has been accumulated."""
        if not self.on:
            return
        self.begin()
        bucket = self._buckets[number][1]
        gradient = bucket.parameters[i].grad
        if gradient is not None and gradient.layout != torch.strided:
            _warn_dense()
            bucket.parameters[i].grad = gradient.to_dense()
        bucket.place(i)
        if (number, i) not in self._in_bucket:
            self._in_bucket.add((number, i))
            bucket.waiting -= 1
        while len(self._waits) < len(self._buckets) and not self._buckets[len(self._waits)][1].waiting:
            self._send()

    def _send(self) -> None:
        replica, bucket = self._buckets[len(self._waits)]
        if self.weight != 1:
            bucket.flat.mul_(self.weight)
        bucket.mark()
        for i in range(len(bucket.parameters)) if bucket.waiting else ():
            if (len(self._waits), i) not in self._in_bucket and bucket.parameters[i].grad is None:
                bucket.absent(i)
        self._waits.append(replica.send(bucket))

    def _ended(self) -> None:
        # FSDP's own callbacks run at the end of backward, too, and some start a reduction there; run after them.
        at_the_end_of_backward(self.finish)

    @torch.no_grad()
    def finish(self) -> None:
        """Average the remaining gradients (collective)."""
        if self._under_way:
            self._under_way = False
            self.done += 1
            for number, (_, bucket) in enumerate(self._buckets):
                for i, p in enumerate(bucket.parameters) if bucket.waiting else ():
                    if (number, i) not in self._in_bucket and p.grad is not None:  # from an earlier backward
                        bucket.place(i)
            while len(self._waits) < len(self._buckets):
                self._send()
            mark = waits.begin(cuda=any(b.flat.is_cuda for _, b in self._buckets[:1]))
            for wait in self._waits:
                wait()
            waits.end(mark)
            self._waits = []
            for _, bucket in self._buckets:
                for i, p in enumerate(bucket.parameters) if bucket.waiting else ():
                    if p.grad is None and not bucket.absent_everywhere(i):
                        p.grad = bucket.view(i)
            for replica, p in self._sparse:
                average_rows(p, replica.axis, self.weight)
        for each in self._unreached:
            each.drop_filled_gradients()

    def complete(self) -> None:
        """Average all gradients after a backward in which no gradient arrived on this rank (collective)."""
        if self._buckets or self._sparse:
            self._open()
        self.finish()


@torch.no_grad()
def average_rows(p: nn.Parameter, axis: Axis, weight: float = 1.0) -> None:
    """Replace the sparse gradient of ``p`` by its mean over ``axis`` (collective). This rank's gradient has weight
    ``weight`` in it. The result has all rows that any rank has."""
    gradient, group = p.grad, axis.group
    if gradient is not None and gradient.layout == torch.sparse_coo:
        gradient = gradient.coalesce()
        count = gradient._nnz()
    else:
        count = _NONE if gradient is None else _DENSE
    own_count = torch.tensor([count], dtype=torch.int64, device=p.device)
    parts = [torch.empty_like(own_count) for _ in range(axis.size)]
    dist.all_gather(parts, own_count, group=group)
    counts = [int(each) for each in parts]
    if max(counts) == _NONE == min(counts):
        return
    if min(counts) == _DENSE:
        total = torch.zeros_like(p) if gradient is None else gradient.to_dense().contiguous() * weight
        dist.all_reduce(total, group=group)
        p.grad = total / axis.size
        return
    most, rows = max(counts), max(count, 0)
    where = torch.zeros((most,), dtype=torch.int64, device=p.device)
    values = p.new_zeros((most, *p.shape[1:]))
    if gradient is not None:
        where[:rows], values[:rows] = gradient.indices()[0], gradient.values() * (weight / axis.size)
    all_where, all_values = ([torch.empty_like(t) for _ in counts] for t in (where, values))
    dist.all_gather(all_where, where, group=group)
    dist.all_gather(all_values, values, group=group)
    p.grad = torch.sparse_coo_tensor(
        torch.cat([t[: max(n, 0)] for t, n in zip(all_where, counts, strict=True)])[None],
        torch.cat([t[: max(n, 0)] for t, n in zip(all_values, counts, strict=True)]),
        p.shape,
        check_invariants=False,
    ).coalesce()


def _warn_dense() -> None:
    warnings.warn(
        "a sparse gradient of a parameter outside of a sparse Embedding or EmbeddingBag is made dense before it is "
        "averaged over the ranks",
        stacklevel=3,
    )


def _arrived(averaging: weakref.ref[Averaging], number: int, i: int, _: Tensor) -> None:
    current = averaging()
    if current is not None:
        current.arrived(number, i)


def _began(averaging: weakref.ref[Averaging], _: Tensor) -> None:
    current = averaging()
    if current is not None:
        current.begin()
