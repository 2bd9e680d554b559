"""When gradients are reduced: with the last backward of a step, whatever is in flight before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from asa.sharding.sharded import GATHERED_ONCE, SCALARS
from asa.sharding.waits import Mark, waits

_NOTHING = nullcontext()


class Reduction:
    """The data-parallel wrappers of a rank. ``quiet``: nothing is reduced at all, gradients stay this rank's own.

    DDP decides in *forward* whether the backward to come reduces, and expects it next. So it does where the last
    microbatch goes forward and straight back. Where others come between, it runs every forward as one that only
    accumulates, and is told to expect gradients just before the last backward: what torch's own pipelines do.
    Fully sharded modules decide in backward.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._replicated = [m for m in modules if isinstance(m, DistributedDataParallel)]
        self._sharded = [m for m in modules if isinstance(m, FSDPModule)]
        self._releases: dict[FSDPModule, bool] = {}
        self._expecting = False
        self._reduced = False
        self.quiet = False

    def gather(self) -> None:
        """Begin to gather what is gathered once a step (collective): a stage that has nothing to compute yet may as
        well. Not in the first step, whose forward is what makes FSDP ready."""
        for root in self._sharded:
            if self._reduced and getattr(root, GATHERED_ONCE):
                for module in root.modules():
                    if isinstance(module, FSDPModule):
                        module.unshard(async_op=True)

    def release(self) -> None:
        """Let go of gathered weights that a forward without backward left behind."""
        for root in self._sharded:
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def forward(self, *, straight_to_last: bool) -> AbstractContextManager[None]:
        """Around a microbatch's forward; ``straight_to_last``: the step's last backward follows at once."""
        self._expecting = straight_to_last and not self.quiet
        return _NOTHING if self._expecting or not self._replicated else self._accumulating()

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        for module in self._replicated:
            module.require_backward_grad_sync = False
        try:
            yield
        finally:
            for module in self._replicated:
                module.require_backward_grad_sync = True

    def backward(self, *, last: bool, in_flight: int) -> AbstractContextManager[None]:
        """Around a microbatch's backward; ``last`` of the step, ``in_flight`` others still to come back."""
        reduce = last and not self.quiet
        if reduce and not self._expecting:
            for module in self._replicated:
                module.reducer.prepare_for_backward([])
        self._expecting = False
        return self._scattering(reduce, last, in_flight == 0) if self._sharded else _NOTHING

    def own_part(self, exit: Tensor) -> list[Mark | None]:
        """Have it noted when backward from ``exit`` has computed what is this rank's own: from then on DDP waits for
        buckets, until backward returns. Empty until then. Callbacks at the end of backward come in the order in which
        they are asked for, and DDP's only once its last bucket is full."""
        marks: list[Mark | None] = []
        if self._replicated and waits.on:

            def over() -> None:
                marks.append(waits.begin(cuda=exit.is_cuda))

            def begun(_gradient: Tensor) -> None:
                torch.autograd.Variable._execution_engine.queue_callback(over)

            exit.register_hook(begun)
        return marks

    @contextmanager
    def _scattering(self, reduce: bool, last: bool, none_in_flight: bool) -> Iterator[None]:
        # Telling a sharded module anything is a walk over all it consists of.
        tells = not (reduce and none_in_flight)
        for sharded in self._sharded:
            if tells:
                sharded.set_requires_gradient_sync(reduce)
                getattr(sharded, SCALARS).reduce = reduce
                # Weights are prefetched in the order of the forwards since; with none in flight there are none.
                sharded.set_is_last_backward(none_in_flight)
            releases = last or not getattr(sharded, GATHERED_ONCE)
            if self._releases.get(sharded) != releases:
                self._releases[sharded] = releases
                sharded.set_reshard_after_backward(releases)
        try:
            yield
            self._reduced = self._reduced or reduce
        finally:
            for sharded in self._sharded if tells else ():
                sharded.set_requires_gradient_sync(True)
                getattr(sharded, SCALARS).reduce = True
                sharded.set_is_last_backward(True)
