"""Activation checkpointing: a component drops its activations in forward and recomputes them in backward.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; ``torch.utils.checkpoint`` in its non-reentrant form.
The recomputation is bitwise equal: it has the same samples and dropout masks, and buffers that forward changes as they
were before it; running statistics are not updated again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from asa.sharding.batchnorm import SynchronisedBatchNorm
from asa.sharding.samples import SampleContext
from asa.tracing.component import TracedComponent
from asa.tracing.program import opened

_Registry = dict[str, Tensor | None]
_Buffers = list[tuple[_Registry, str, Tensor]]
"""Triples of a module's buffer registry, the name of a buffer in it, and its tensor."""


def _normalises(module: nn.Module) -> bool:
    """Whether ``module`` keeps running statistics, and is called as a whole in the graph."""
    return isinstance(module, _NormBase | SynchronisedBatchNorm) and not opened(module)


def _buffers(component: nn.Module) -> _Buffers:
    """Buffers that are not running statistics."""
    others = [m._buffers for m in component.modules() if not _normalises(m)]
    return [(registry, name, b) for registry in others for name, b in registry.items() if b is not None]


class _Moving:
    """Buffers that a component's forward changes: an average of its own, a counter, the vectors of a spectral norm."""

    def __init__(self) -> None:
        self._moved: set[tuple[int, str]] | None = None  # None before the first forward: all may change

    @contextmanager
    def copied(self, component: nn.Module) -> Iterator[_Buffers]:
        """Context around a forward; yields copies of the changing buffers from before it (the first time, of all
        buffers)."""
        found = [(registry, name, b, b._version) for registry, name, b in _buffers(component)]
        copies = {id(b): b.detach().clone() for r, n, b, _ in found if self._moved is None or (id(r), n) in self._moved}
        yield [(registry, name, copies[id(b)]) for registry, name, b, _ in found if id(b) in copies]
        moved = {(id(r), n) for r, n, b, version in found if r.get(n) is not b or b._version != version}
        self._moved = moved | (self._moved or set())


@contextmanager
def _in_place_of(buffers: _Buffers) -> Iterator[None]:
    now = [(registry, name, registry[name]) for registry, name, _ in buffers]
    for registry, name, b in buffers:
        registry[name] = b
    try:
        yield
    finally:
        for registry, name, present in now:
            registry[name] = present


@contextmanager
def _as_before(
    component: nn.Module, context: SampleContext, before: SampleContext, buffers: _Buffers
) -> Iterator[None]:
    """Context in which ``context`` and ``buffers`` have their state from ``before``, and running statistics do not
    change."""
    now = context.copy()
    context.become(before)
    frozen: list[tuple[nn.Module, float | None, Tensor | None]] = []
    for module in component.modules():
        if _normalises(module) and module.running_mean is not None:
            frozen.append((module, module.momentum, module.num_batches_tracked))  # type: ignore[arg-type]
            # Autograd has to save the same tensors again, so the buffers stay, unchanged by a momentum of 0. The
            # counter is replaced by a copy, since a subclass may change it.
            count: Any = module.num_batches_tracked
            module.momentum, module.num_batches_tracked = 0.0, None if count is None else count.clone()  # type: ignore[assignment]
    try:
        with _in_place_of(buffers):
            yield
    finally:
        for module, momentum, tracked in frozen:
            module.momentum, module.num_batches_tracked = momentum, tracked  # type: ignore[assignment]
        context.become(now)


class _EveryTime:
    """A context that may be entered repeatedly: a program may run backward through one forward more than once."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make, self._inside = make, ExitStack()

    def __enter__(self) -> None:
        self._inside.enter_context(self._make())

    def __exit__(self, *_: object) -> None:
        self._inside.close()


class _Recomputed:
    """Replaces a component's ``forward``, so that wrappers' hooks are around it and gather weights once for both."""

    def __init__(self, component: TracedComponent, context: SampleContext, *, alone: bool) -> None:
        self._component, self._context, self._alone = component, context, alone
        run = component.__dict__.get("forward", partial(TracedComponent.forward, component))
        self._run, self._moving = run, _Moving()

    def _contexts(self, buffers: _Buffers) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        before = self._context.copy()
        return nullcontext(), _EveryTime(lambda: _as_before(self._component, self._context, before.copy(), buffers))

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if not (self._component.training and is_grad_enabled()):
            return self._run(x)
        # With collectives inside, all ranks have to recompute to the same point: the end.
        with set_checkpoint_early_stop(self._alone), self._moving.copied(self._component) as buffers:
            found: tuple[Tensor, ...] = checkpoint(
                self._run, x, use_reentrant=False, context_fn=partial(self._contexts, buffers)
            )
        return found


def recompute(component: TracedComponent, context: SampleContext, *, alone: bool) -> None:
    """Let ``component`` recompute its forward in backward, from now on, in training.

    ``alone``: no collective runs inside it, so a rank may stop as soon as it has what it needs.
    """
    component.__dict__["forward"] = _Recomputed(component, context, alone=alone)
