"""Activation checkpointing: a component drops its activations in forward and recomputes them in backward.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". A component is one autograd function of its input and
its parameters: forward runs it without a graph, backward runs it again with one and differentiates that. Gradients of
parameters leave the function, so their hooks run where they would without a checkpoint. ``torch.utils.checkpoint``
keeps a graph and calls Python for every saved tensor instead, which is most of a step where a GPU waits for its host
(decision 0119).

The recomputation is bitwise equal: it has the same samples and dropout masks, and buffers that forward changes as they
were before it; running statistics are not updated again. Products whose values no gradient depends on are left out of
it (:mod:`asa.tracing.unneeded`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, is_grad_enabled, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules import module as torch_modules
from torch.nn.modules.batchnorm import _NormBase

from asa.sharding.layers.batchnorm import SynchronisedBatchNorm
from asa.sharding.layers.modules import Gather, RowParallel, ScatterTokens
from asa.sharding.randomness.samples import SampleContext
from asa.tracing.component import TracedComponent
from asa.tracing.program import opened
from asa.tracing.tracer import hooked
from asa.tracing.unneeded import left_out

OF_SHARDS: tuple[tuple[type, ...], tuple[type, ...]] = ((RowParallel,), (Gather, ScatterTokens))
"""Layers of tensor-parallel components that compute one product, and those of which autograd saves no value."""

_Registry = dict[str, Tensor | None]
_Buffers = list[tuple[_Registry, str, Tensor]]
"""Triples of a module's buffer registry, the name of a buffer in it, and its tensor."""


def _normalises(module: nn.Module) -> bool:
    """Whether ``module`` keeps running statistics, and is called as a whole in the graph."""
    return isinstance(module, _NormBase | SynchronisedBatchNorm) and not opened(module)


class _Parts:
    """The modules of a component, which are listed once. ``layers``: all but the component itself;
    ``statistics``: those that keep running statistics; ``registries``: the buffers of the others."""

    def __init__(self, component: nn.Module) -> None:
        modules = list(component.modules())
        self.layers = modules[1:]
        self._parameters_of = [m._parameters for m in modules if m._parameters]
        self._of_others = [(vars(m), n) for m in modules for n, v in vars(m).items() if isinstance(v, nn.Parameter)]
        self.statistics = [m for m in modules if _normalises(m) and m.running_mean is not None]
        self.registries = [m._buffers for m in modules if m._buffers and not _normalises(m)]
        self._moved: set[tuple[int, str]] | None = None  # None before the first forward: all may change

    def parameters(self) -> list[Tensor]:
        """The parameters as they are now, since sharding replaces them by their whole values and back; also those that
        another component holds."""
        own = (p for registry in self._parameters_of for p in registry.values() if p is not None)
        return list(dict.fromkeys((*own, *(attributes[name] for attributes, name in self._of_others))))

    @contextmanager
    def copied(self) -> Iterator[_Buffers]:
        """Context around a forward; yields copies, from before it, of the buffers that forward changes: an average of
        its own, a counter, the vectors of a spectral norm (the first time, of all buffers)."""
        old = [(r, n, b, b._version) for r in self.registries for n, b in r.items() if b is not None]
        copies = {id(b): b.detach().clone() for r, n, b, _ in old if self._moved is None or (id(r), n) in self._moved}
        yield [(registry, name, copies[id(b)]) for registry, name, b, _ in old if id(b) in copies]
        moved = {(id(r), n) for r, n, b, version in old if r.get(n) is not b or b._version != version}
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
def _as_before(parts: _Parts, context: SampleContext, before: SampleContext, buffers: _Buffers) -> Iterator[None]:
    """Context in which ``context`` and ``buffers`` have their state from ``before``, and running statistics do not
    change."""
    now = context.copy()
    context.become(before)
    frozen: list[tuple[nn.Module, float | None, Tensor | None]] = []
    for module in parts.statistics:
        count = module._buffers["num_batches_tracked"]
        frozen.append((module, module.__dict__["momentum"], count))
        # Autograd has to save the same tensors again, so the buffers stay, unchanged by a momentum of 0. The counter
        # is replaced by a copy, since a subclass may change it.
        module.__dict__["momentum"] = 0.0
        module._buffers["num_batches_tracked"] = None if count is None else count.clone()
    try:
        with _in_place_of(buffers):
            yield
    finally:
        for module, momentum, tracked in frozen:
            module.__dict__["momentum"], module._buffers["num_batches_tracked"] = momentum, tracked
        context.become(now)


def _generators(device: torch.device) -> list[Tensor]:
    """States of torch's generators that a component on ``device`` can draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextmanager
def _drawing_from(states: list[Tensor] | None, device: torch.device) -> Iterator[None]:
    """Context in which torch's generators start from ``states``; None: as they are."""
    if states is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)
        yield


def _same_autocast(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A function that makes a context of the autocast that is in force now."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return partial(torch.autocast, "cpu", enabled=False)
    return partial(
        torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )  # fmt: skip


class _Start(torch.autograd.Function):
    """The input of a recomputation, as a tensor that a component may change in place: a leaf may not be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class _Component(torch.autograd.Function):
    """``run(x)`` as a function of ``x`` and ``parameters``. ``rerun()``: a context for running it once more."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], tuple[Tensor, ...]], rerun: Callable[[], AbstractContextManager[None]],
        x: Tensor, *parameters: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        outputs = run(x)
        ctx.run, ctx.rerun, ctx.parameters = run, rerun, parameters
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o in outputs if not (o.is_floating_point() or o.is_complex())))
        # A view made without a graph may not be changed in place later; its values may, unless they are the input's.
        input_memory = x.untyped_storage().data_ptr()
        return tuple(o.data if o._is_view() and o.untyped_storage().data_ptr() != input_memory else o for o in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (x,) = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        twice = is_grad_enabled()  # the gradients will be differentiated: the graph reaches back to the input
        with torch.enable_grad(), ctx.rerun():
            leaf = x if twice else x.detach().requires_grad_(needed[0])
            outputs = ctx.run(_Start.apply(leaf) if needed[0] and not twice else leaf)
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
        inputs = [v for v, is_needed in zip((leaf, *ctx.parameters), needed, strict=True) if is_needed]
        results: Iterator[Tensor | None] = iter([None] * len(inputs))
        if pairs and inputs:
            ends, output_gradients = [get_gradient_edge(o) for o, _ in pairs], [g for _, g in pairs]
            del outputs, pairs  # what no gradient needs of them is released
            results = iter(torch.autograd.grad(ends, inputs, output_gradients, create_graph=twice, allow_unused=True))
        return (None, None, *(next(results) if is_needed else None for is_needed in needed))


class _Recomputed:
    """Replaces a component's ``forward``, so that wrappers' hooks are around it and gather weights once for both."""

    def __init__(self, component: TracedComponent, context: SampleContext) -> None:
        self._component, self._context = component, context
        self._run = component.__dict__.get("forward", partial(TracedComponent.forward, component))

    @cached_property
    def _parts(self) -> _Parts:
        return _Parts(self._component)

    @cached_property
    def _shortened(self) -> fx.GraphModule | None:
        """The component's graph without products that a second forward does not need; None if it needs all."""
        module = self._component.train_graph
        graph = left_out(module, *OF_SHARDS) if isinstance(module, fx.GraphModule) else None
        return None if graph is None else self._component.over(graph)

    @contextmanager
    def _without_unneeded(self) -> Iterator[None]:
        """Context in which the component leaves out what a second forward does not need. It runs as a whole if it is
        compiled, or if a hook may look at values."""
        component, whole = self._component, self._component.train_graph
        looked_at = torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks
        shortened = None
        if not (looked_at or component._compiled_call_impl or any(map(hooked, self._parts.layers))):
            shortened = self._shortened
        component.__dict__["train_graph"] = shortened or whole
        try:
            yield
        finally:
            component.__dict__["train_graph"] = whole

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if not (self._component.training and is_grad_enabled()):
            return self._run(x)
        before, autocast, device = self._context.copy(), _same_autocast(x.device), x.device
        states: list[Tensor] | None = _generators(device)

        @contextmanager
        def rerun() -> Iterator[None]:
            same = _as_before(self._parts, self._context, before.copy(), buffers)
            with autocast(), _drawing_from(states, device), same, self._without_unneeded():
                yield

        with self._parts.copied() as buffers:
            outputs = _Component.apply(self._run, rerun, x, *self._parts.parameters())
        assert states is not None
        if all(map(torch.equal, states, _generators(device))):
            states = None
        return outputs


def recompute(component: TracedComponent, context: SampleContext) -> None:
    """Let ``component`` recompute its forward in backward, from now on, in training."""
    component.__dict__["forward"] = _Recomputed(component, context)
