"""Control of gradient reduction: gradients are reduced with the last backward of a step, and accumulate before that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from asa.errors import UsageError
from asa.sharding.gradients.averaging import Averaging
from asa.sharding.gradients.replicated import replicated_of
from asa.sharding.gradients.sharded import UNREACHED, gathered_once


class Reduction:
    """Everything that reduces the gradients of a rank. With ``quiet`` nothing is reduced, and gradients stay this
    rank's own.

    Outside :meth:`backward`, every backward pass reduces.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.replicas = [r for r in map(replicated_of, modules) if r is not None]
        self._sharded = [m for m in modules if isinstance(m, FSDPModule)]
        self._averaging = Averaging(self.replicas, [m.__dict__[UNREACHED] for m in self._sharded])
        units = [u for m in self._sharded for u in m.modules() if isinstance(u, FSDPModule)]
        self._staying = [u for u in units if gathered_once(u)]
        self._releases = True
        self._reduced = False
        self._batch: tuple[int, int, bool] | None = None
        self.quiet = False

    def buckets(self) -> list[Tensor]:
        """Memory of the buckets; empty tensors where nothing was reduced yet."""
        return self._averaging.buckets()

    def weighed(self, weight: float, total: int, shared: bool) -> float:
        """Set ``weight`` as the factor with which gradients of the next backward enter the average. Returns the factor
        to apply to outputs instead: 1, except if batches of several sizes go into one backward.

        ``total`` is the number of samples of the batch over all ranks. ``shared`` says whether each sample is counted
        on the rank that has it.

        Raises:
            UsageError: there are batches of several sizes, and ranks do not share one (raised on all ranks).
        """
        averaging = self._averaging
        if self._batch is None or averaging.done != self._batch[0]:
            self._batch = averaging.done, total, shared
            averaging.weight = weight
            return 1.0
        if self._batch[1] == total:
            return 1.0
        if not (shared and self._batch[2]):
            raise UsageError(
                f"batches of {self._batch[1]} and {total} samples go into one backward, and ranks cannot share the "
                "smaller: call backward for each, or leave it out (drop_last=True)"
            )
        return weight / averaging.weight

    def gather(self) -> None:
        """Start to gather weights that are gathered once per step (collective), while the stage has nothing to compute
        yet.

        Does nothing in the first step, whose forward initializes FSDP.
        """
        for unit in self._staying if self._reduced else ():
            unit.unshard(async_op=True)

    def release(self) -> None:
        """Free gathered weights that a forward without backward has left."""
        for root in self._sharded:
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def begin(self) -> None:
        """Prepare for a forward pass with gradients; call before it."""
        self._averaging.refresh()

    @contextmanager
    def backward(self, *, last: bool, in_flight: int) -> Iterator[None]:
        """Context of a microbatch's backward. ``last`` says whether it is the last of the step. ``in_flight`` is the
        number of other microbatches whose backward is still to come."""
        averaging, reduce = self._averaging, last and not self.quiet
        averaging.on, before = reduce, averaging.done
        try:
            with self._scattering(reduce, last, in_flight == 0):
                yield
            if reduce and averaging.done == before:
                averaging.complete()
        finally:
            averaging.on = True

    @contextmanager
    def _scattering(self, reduce: bool, last: bool, none_in_flight: bool) -> Iterator[None]:
        # Each setter walks over all submodules, so it is called only if needed.
        tells = not (reduce and none_in_flight)
        for sharded in self._sharded:
            if tells:
                sharded.set_requires_gradient_sync(reduce)
                # FSDP prefetches weights in the order of the forwards since; without any in flight there are none.
                sharded.set_is_last_backward(none_in_flight)
        if self._releases != last:
            self._releases = last
            for unit in self._staying:
                unit.set_reshard_after_backward(last, recurse=False)
        try:
            yield
            self._reduced = self._reduced or reduce
        finally:
            for sharded in self._sharded if tells else ():
                sharded.set_requires_gradient_sync(True)
                sharded.set_is_last_backward(True)
