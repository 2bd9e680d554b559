"""A component that forgets its activations in forward and computes them again in backward.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; ``torch.utils.checkpoint`` in its non-reentrant form.
The second time is the first to the bit: the same samples and dropout masks, and running statistics stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import Tensor, is_grad_enabled, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from asa.sharding.batchnorm import SynchronisedBatchNorm
from asa.sharding.samples import SampleContext
from asa.tracing.component import TracedComponent


@contextmanager
def _as_before(component: nn.Module, context: SampleContext, before: SampleContext) -> Iterator[None]:
    """Inside, ``context`` is as it was ``before``, and the component's running statistics stand still."""
    now = context.copy()
    context.become(before)
    frozen: list[tuple[nn.Module, float | None, Tensor | None]] = []
    for module in component.modules():
        if isinstance(module, _BatchNorm | SynchronisedBatchNorm) and module.running_mean is not None:
            frozen.append((module, module.momentum, module.num_batches_tracked))
            # Without the buffers autograd would save less than the first time; at momentum 0 they do not move.
            module.momentum, module.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for module, momentum, count in frozen:
            module.momentum, module.num_batches_tracked = momentum, count  # type: ignore[assignment]
        context.become(now)


class _Recomputed:
    """Stands in for a component's ``forward``: wrappers put their hooks around it, and gather weights once for both."""

    def __init__(self, component: TracedComponent, context: SampleContext, *, alone: bool) -> None:
        self._component, self._context, self._alone = component, context, alone
        self._run = partial(TracedComponent.forward, component)

    def _contexts(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        return nullcontext(), _as_before(self._component, self._context, self._context.copy())

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if not (self._component.training and is_grad_enabled()):
            return self._run(x)
        # Ranks that meet inside must all come to the same end: they recompute everything.
        with set_checkpoint_early_stop(self._alone):
            found: tuple[Tensor, ...] = checkpoint(self._run, x, use_reentrant=False, context_fn=self._contexts)
        return found


def recompute(component: TracedComponent, context: SampleContext, *, alone: bool) -> None:
    """Have ``component`` compute its forward again in backward, from now on, in training.

    ``alone``: no collective runs inside it, so that a rank may stop once it has what it needs.
    """
    component.__dict__["forward"] = _Recomputed(component, context, alone=alone)
