"""When gradients are reduced: with the last backward of a step, whatever is in flight before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from asa.sharding.sharded import GATHERED_ONCE, SCALARS


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

    @contextmanager
    def forward(self, *, straight_to_last: bool) -> Iterator[None]:
        """Around a microbatch's forward; ``straight_to_last``: the step's last backward follows at once."""
        expect = straight_to_last and not self.quiet
        self._expecting = expect
        for module in self._replicated:
            module.require_backward_grad_sync = expect
        try:
            yield
        finally:
            for module in self._replicated:
                module.require_backward_grad_sync = True

    @contextmanager
    def backward(self, *, last: bool, in_flight: int) -> Iterator[None]:
        """Around a microbatch's backward; ``last`` of the step, ``in_flight`` others still to come back."""
        reduce = last and not self.quiet
        if reduce and not self._expecting:
            for module in self._replicated:
                module.reducer.prepare_for_backward([])
        self._expecting = False
        for sharded in self._sharded:
            sharded.set_requires_gradient_sync(reduce)
            getattr(sharded, SCALARS).reduce = reduce
            # Weights are prefetched in the order of the forwards since; with none in flight there are none.
            sharded.set_is_last_backward(in_flight == 0)
            sharded.set_reshard_after_backward(last or not getattr(sharded, GATHERED_ONCE))
        try:
            yield
            self._reduced = self._reduced or reduce
        finally:
            for sharded in self._sharded:
                sharded.set_requires_gradient_sync(True)
                getattr(sharded, SCALARS).reduce = True
                sharded.set_is_last_backward(True)
