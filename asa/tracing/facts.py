"""Facts of each component (FLOPs, bytes), measured by running it on a tiny batch.

Two batch sizes are run. Figures per sample come from the difference, so parts that do not grow with the batch
(BatchNorm's statistics) cancel exactly.

*Saved bytes* are the storages that autograd keeps from forward to backward. Each is counted once over the whole model,
in the component that made it: a component's input counts for the component before it, and the model's own input for
none. Parameters and buffers are never counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from asa.ir.graph import Component
from asa.tracing.alike import signature, stand_ins
from asa.tracing.component import TracedComponent
from asa.tracing.fused import fused_attention
from asa.tracing.preserve import preserved
from asa.tracing.unneeded import left_out

Kind = Literal["convolution", "attention", "linear", "recurrent", "other"]
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_ATTENTION_CALLS = ("scaled_dot_product_attention", "shifted_window_attention", "multi_head_attention_forward")


def _mkldnn_rnn_flops(x: Any, input_weight: Any, hidden_weight: Any, *_: Any, **__: Any) -> int:
    """FLOPs of an LSTM layer on the CPU, which torch does not count; ``x`` is [time, batch, features]."""
    return 2 * math.prod(x[:-1]) * (math.prod(input_weight) + math.prod(hidden_weight))


def _cudnn_rnn_flops(x: Any, weights: Any, *_: Any, **__: Any) -> int:
    """FLOPs of all layers of an LSTM or GRU on CUDA: each weight matrix is used once per time step and sample."""
    return 2 * math.prod(x[:-1]) * sum(math.prod(w) for w in weights if len(w) == 2)


def _attention_flops(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, *_: Any, **__: Any
) -> int:
    """FLOPs of fused attention on inputs of [batch, heads, sequence, features]. Causal kernels leave out half of the
    products."""
    del dropout_p
    return 2 * math.prod(query[:-1]) * key[-2] * (key[-1] + value[-1]) // (2 if is_causal else 1)


MORE_FLOPS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten.mkldnn_rnn_layer: _mkldnn_rnn_flops,
    torch.ops.aten._cudnn_rnn: _cudnn_rnn_flops,
}
"""FLOP formulas for operators that torch's own counter omits."""

_FUSED = frozenset({
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
})  # fmt: skip
"""Operators of fused attention."""


class _Untold(ModuleTracker):
    """Tells no modules apart: the hooks for that fail where a forward computes gradients."""

    def __enter__(self) -> _Untold:
        return self

    def __exit__(self, *_: object) -> None: ...


def flop_counter() -> FlopCounterMode:
    """Context that counts the FLOPs of all operators in it."""
    counter = FlopCounterMode(display=False, custom_mapping=MORE_FLOPS)
    counter.mod_tracker = _Untold()
    return counter


@dataclass
class _Run:
    """Totals of one component over one run. Parts of ``flops``: ``attention``, those in fused attention; ``spared``,
    those that a second forward leaves out."""

    flops: int
    attention: int
    spared: int
    output_bytes: int
    saved_bytes: int


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


@contextmanager
def listing_saved(saved: list[Tensor]) -> Iterator[None]:
    """Context in which tensors that autograd saves are listed in ``saved``, and found there by a backward inside it (of
    a forward that computes gradients). Clear the list at the end: the graph refers to it, and its tensors to the graph,
    a cycle that gc does not collect."""

    def keep(tensor: Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    with torch.autograd.graph.saved_tensors_hooks(keep, saved.__getitem__):
        yield


def _spared(component: TracedComponent, value: Tensor, flops: int) -> int:
    """How many of the ``flops`` of a forward of ``value`` are left out if it is computed again for its gradients."""
    graph = left_out(component.train_graph)
    if graph is None:
        return 0
    with torch.no_grad(), flop_counter() as again, fused_attention():
        component.over(graph)(value)
    return max(0, flops - again.get_total_flops())


def _measure(components: list[TracedComponent], batch: Tensor) -> list[_Run]:
    counted = {t.untyped_storage()._cdata for c in components for t in (*c.parameters(), *c.buffers())}
    value = batch.clone()
    counted.add(value.untyped_storage()._cdata)
    runs: list[_Run] = []
    owner: dict[int, int] = {}
    alive: list[list[Tensor]] = [[value]]
    for i, component in enumerate(components):
        component.input_shape, component.input_dtype = tuple(value.shape[1:]), value.dtype
        saved: list[Tensor] = []
        with flop_counter() as flops, fused_attention(), listing_saved(saved):
            outputs = component(value)
        counts = flops.get_flop_counts().get("Global", {})
        attention = sum(n for operator, n in counts.items() if operator.__name__ in _FUSED)
        spared = _spared(component, value, flops.get_total_flops())
        runs.append(_Run(flops.get_total_flops(), attention, spared, _bytes(outputs[:1]), 0))
        alive += [saved, list(outputs)]  # keeps storages alive: the address of a freed one could be used again
        for tensor in saved:
            storage = tensor.untyped_storage()
            if storage._cdata not in counted:
                counted.add(storage._cdata)
                runs[owner.get(storage._cdata, i)].saved_bytes += storage.nbytes()
        for tensor in outputs:
            owner.setdefault(tensor.untyped_storage()._cdata, i)
        value = outputs[0]
    for tensors in alive:
        tensors.clear()
    return runs


def _kind(component: TracedComponent) -> Kind:
    modules = list(component.modules())
    called = {str(getattr(n.target, "__name__", "")) for n in component.train_graph.graph.nodes}
    if any(isinstance(m, nn.MultiheadAttention) for m in modules) or called & set(_ATTENTION_CALLS):
        return "attention"
    if any(isinstance(m, nn.RNNBase | nn.RNNCellBase) for m in modules):
        return "recurrent"
    if any(isinstance(m, _CONVOLUTIONS) for m in modules) or any(c.startswith("conv") for c in called):
        return "convolution"
    return "linear" if any(isinstance(m, nn.Linear) for m in modules) or "linear" in called else "other"


def _modules(component: TracedComponent) -> tuple[str, ...]:
    paths: dict[str, None] = {}
    for graph in dict.fromkeys((component.train_graph, component.eval_graph)):
        for node in graph.graph.nodes:
            if node.op == "call_module":
                paths[str(node.target)] = None
            elif node.op == "get_attr":
                paths[str(node.target).rpartition(".")[0]] = None
    return tuple(m for m in paths if m)


def measure(
    model: nn.Module, components: list[TracedComponent], small: Tensor, large: Tensor
) -> list[Component]:  # fmt: skip
    """The ``components`` of ``model`` as nouns without splits, measured in training mode on batches of two
    sizes. Each component must have its ``input_shape``.

    In a row of components that are equal except for their names, only a few are run. The model is preserved between the
    runs, because what it keeps of one batch may not fit the next.
    """
    indices = stand_ins([signature(c) for c in components])
    chosen = [c for i, c in enumerate(components) if indices[i] == i]
    runs = []
    for batch in (small, large):
        # The same random numbers in both runs, so that a model that skips layers at random skips the same ones.
        with preserved(model):
            runs.append(dict(zip(chosen, _measure(chosen, batch), strict=True)))

    def per_sample(a: int, b: int) -> float:
        # Counts that depend on the values of a batch may be smaller for the larger batch.
        return (b - a) / (large.shape[0] - small.shape[0]) if b >= a else b / large.shape[0]

    facts = []
    for c, index in zip(components, indices, strict=True):
        a, b = (run[components[index]] for run in runs)
        facts.append(
            Component(
                name=c.name,
                kind=_kind(c),
                modules=_modules(c),
                num_parameter_tensors=len(list(c.parameters())),
                parameter_bytes=_bytes(c.parameters()),
                largest_parameter_bytes=max((_bytes([p]) for p in c.parameters()), default=0),
                buffer_bytes=_bytes(c.buffers()),
                flops_per_sample=per_sample(a.flops, b.flops),
                attention_flops_per_sample=per_sample(a.attention, b.attention),
                spared_flops_per_sample=per_sample(a.spared, b.spared),
                output_bytes_per_sample=per_sample(a.output_bytes, b.output_bytes),
                saved_bytes_per_sample=per_sample(a.saved_bytes, b.saved_bytes),
                batch_norm=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in c.modules()),
                split=None,
            )
        )
    return facts
