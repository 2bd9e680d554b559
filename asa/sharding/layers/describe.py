"""Makes the planner's :class:`~asa.ir.graph.LayerGraph` from a traced model: facts and possible splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from asa.errors import UsageError
from asa.ir.graph import Component, InnerCollective, LayerGraph, SequenceSplit, TensorSplit
from asa.ir.traffic import CollectiveOp
from asa.sharding.collectives.axis import Axis
from asa.sharding.layers.modules import shards_of
from asa.sharding.layers.propagate import SplitPlan
from asa.sharding.layers.tensor import detached_copy, example_input, plan_split, sequence_plans, split
from asa.tracing import TracedModel
from asa.tracing.alike import signature
from asa.tracing.component import TracedComponent
from asa.tracing.facts import flop_counter, no_backward
from asa.tracing.fused import fused_attention
from asa.tracing.tracer import reason_of

_FROZEN = 0.01
"""Share of weights that are not trained above which a note says so."""
_NOTES = 3
"""Largest number of notes of a trace that are shown; a model of many layers may have one for each."""


def _bytes_per_sample(node: torch.fx.Node) -> float:
    meta = node.meta["tensor_meta"]
    while not hasattr(meta, "shape"):
        meta = meta[0]
    shape = torch.Size(meta.shape)
    return shape.numel() * meta.dtype.itemsize / shape[0]


def _collectives(plan: SplitPlan, *, first: bool) -> tuple[InnerCollective, ...]:
    collectives: list[InnerCollective] = []

    def add(op: CollectiveOp, phase: str, node: torch.fx.Node) -> None:
        collectives.append(
            InnerCollective(op=op, phase="forward" if phase == "forward" else "backward",
                            bytes_per_sample=_bytes_per_sample(node))
        )  # fmt: skip

    for node in plan.reduced:
        if not (plan.exit_partial and node is plan.reduced[-1]):
            add("all_reduce", "forward", node)
    for value in dict.fromkeys(v for v, _ in plan.gathers):
        add("all_gather", "forward", value)
    for value in plan.readers:
        # Nothing in front of the model needs a gradient.
        if value not in plan.hoisted and not (first and not value.meta["tensor_meta"].requires_grad):
            add("all_reduce", "backward", value)
    return tuple(collectives)


def _token_collectives(plan: SplitPlan, *, first: bool) -> tuple[InnerCollective, ...]:
    collectives: list[InnerCollective] = []
    for value in plan.gathered:
        size = _bytes_per_sample(value)
        collectives.append(InnerCollective(op="all_gather", phase="forward", bytes_per_sample=size))
        if not (first and not value.meta["tensor_meta"].requires_grad):
            collectives.append(InnerCollective(op="reduce_scatter", phase="backward", bytes_per_sample=size))
    for node in plan.scattered:
        size = _bytes_per_sample(node)
        collectives.append(InnerCollective(op="reduce_scatter", phase="forward", bytes_per_sample=size))
        collectives.append(InnerCollective(op="all_gather", phase="backward", bytes_per_sample=size))
    for value in dict.fromkeys(v for v, _ in plan.gathers):
        collectives.append(InnerCollective(op="all_gather", phase="forward", bytes_per_sample=_bytes_per_sample(value)))
    return tuple(collectives)


def _saved(component: TracedComponent, samples: int, tokens: int | None) -> tuple[float, float]:
    """(FLOPs, bytes) of one forward over ``samples`` samples on meta tensors: its FLOPs, and the bytes that it saves
    for backward. ``tokens`` is the number of tokens per sample that it reads, if not all."""
    x = example_input(component, samples)
    x = x if tokens is None else x[:, :tokens].clone()
    x.requires_grad_(component.input_dtype.is_floating_point)
    own_storages = {t.untyped_storage()._cdata for t in (*component.parameters(), *component.buffers())}
    saved: dict[int, int] = {}
    alive = []  # keeps storages alive: the address of a freed one would be used again

    def keep(t: torch.Tensor) -> Any:  # no backward runs here, so the tensor is not needed
        storage = t.untyped_storage()
        alive.append(storage)
        if storage._cdata not in own_storages:
            saved[storage._cdata] = storage.nbytes()

    counter = flop_counter()
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, no_backward)
    with torch.device("meta"), counter, fused_attention(), hooks:  # tensors that forward creates go there, too
        component(x)
    return float(counter.get_total_flops()), float(sum(saved.values()))


def _weigh(component: TracedComponent, tokens: int | None = None) -> tuple[float, float]:
    """(FLOPs, bytes) per sample of forward: its FLOPs, and the bytes saved for backward. The difference of two batches,
    in which constants cancel."""
    (flops, saved), (more_flops, more_saved) = _saved(component, 2, tokens), _saved(component, 3, tokens)
    return more_flops - flops, more_saved - saved


def _sequence_split(component: TracedComponent, half_saved: float, *, first: bool) -> SequenceSplit | None:
    """What sequence parallelism divides in ``component`` in addition to its weights; None if it cannot be split by
    tokens. ``half_saved`` is the number of bytes per sample that the first of two ranks saves under tensor parallelism
    alone."""
    plans = sequence_plans(component)
    if plans is None:
        return None
    plan, halved = plans[0], detached_copy(component, "meta")
    split(halved, Axis(size=2, index=0), tokens=True)
    own_tokens = plan.tokens // 2
    _, saved = _weigh(halved, own_tokens)
    layers = [component.get_submodule(str(node.target)) for node in plan.tokenwise]
    summed = [p for m in layers for p in m.parameters() if p.requires_grad]
    return SequenceSplit(
        tokens=plan.tokens,
        exit=plan.exit_tokens > 0,
        collectives=_token_collectives(plan, first=first),
        summed_parameter_bytes=sum(p.numel() * p.element_size() for p in summed),
        saved_bytes_per_sample=max(0.0, half_saved - saved) / (1 - own_tokens / plan.tokens),
    )


def tensor_split(
    component: TracedComponent, *, first: bool = False, kept_bytes: float | None = None
) -> tuple[TensorSplit | None, str]:
    """(split, reason): what tensor parallelism can divide in ``component``, or None and why it can divide nothing.

    ``first`` says whether the component reads the model's input. ``kept_bytes`` is the measured number of bytes per
    sample saved for backward. The count on meta tensors may be higher, because attention without its fused kernel also
    saves its scores; the divided part is then scaled down.
    """
    if component.ties:
        return None, "it shares a parameter with another component"
    try:
        plans = plan_split(component)
    except UsageError as error:
        return None, str(error)
    plan = plans[0]
    if not plan.actions or plan.max_degree < 2:
        return None, "no linear, attention or convolution layer that could be cut"
    unsplit, halved = detached_copy(component, "meta"), detached_copy(component, "meta")
    split(halved, Axis(size=2, index=0))
    shards = shards_of(halved)
    sizes = dict(unsplit.named_parameters())
    cut = [sizes[name] for name in shards if name in sizes]
    try:
        (flops, saved), (half_flops, half_saved) = _weigh(unsplit), _weigh(halved)
        sequence = _sequence_split(component, half_saved, first=first)
    except Exception as error:  # forward may name the device of a tensor that it creates
        return None, f"{component.name} does not run without values ({reason_of(error)})"
    fraction = -(-plan.max_degree // 2) / plan.max_degree
    gain = 1 / (1 - fraction)
    share = 1.0 if kept_bytes is None or kept_bytes >= saved else kept_bytes / saved
    return (
        TensorSplit(
            max_degree=plan.max_degree,
            parameter_bytes=sum(p.numel() * p.element_size() for p in cut),
            num_parameter_tensors=len(cut),
            flops_per_sample=min(flops, max(0.0, (flops - half_flops) * gain)),
            saved_bytes_per_sample=share * min(saved, max(0.0, (saved - half_saved) * gain)),
            collectives=_collectives(plan, first=first),
            entry_partial=plan.entry_partial,
            exit_partial=plan.exit_partial,
            sequence=sequence,
        ),
        "",
    )


def _loss_bytes(traced: TracedModel, input_shape: tuple[int, ...], num_classes: int) -> float:
    """Bytes per sample that the cross-entropy of tokens saves: an fp32 log-probability for every word at every
    position. 0 for a model with one class per image, where these bytes are negligible."""
    if len(input_shape) != 1 or traced.components[0].input_dtype.is_floating_point:
        return 0.0
    words = input_shape[0] * num_classes
    halves = traced.facts[-1].output_bytes_per_sample / 2
    return 4.0 * words if halves >= words else 0.0


def layer_graph(traced: TracedModel, *, model: str, input_shape: tuple[int, ...], num_classes: int) -> LayerGraph:
    """The graph of ``traced``, with every component's possible split."""
    components: list[Component] = []
    splits: dict[tuple[str, float, bool], tuple[TensorSplit | None, str, str]] = {}
    for traced_component, facts in zip(traced.components, traced.facts, strict=True):
        saved_bytes, first = facts.saved_bytes_per_sample, not components
        key = signature(traced_component), saved_bytes, first
        if key not in splits:
            splits[key] = (*tensor_split(traced_component, first=first, kept_bytes=saved_bytes), facts.name)
        tensor, why, of = splits[key]
        why = why.replace(of, facts.name)
        tied = True if traced_component.ties else None
        components.append(replace(facts, split=tensor, why_whole=why, tied=tied))
    last_bytes = components[-1].saved_bytes_per_sample + _loss_bytes(traced, input_shape, num_classes)
    components[-1] = replace(components[-1], saved_bytes_per_sample=last_bytes)
    return LayerGraph(
        model=model,
        input_shape=input_shape,
        num_classes=num_classes,
        input_bytes_per_sample=traced.input_bytes_per_sample,
        components=tuple(components),
        uncut=tuple(sorted(traced.uncut)) or None,
        notes=(*folded(traced.notes), *_frozen_note(traced), *_embedding_notes(traced)),
    )


def _frozen_note(traced: TracedModel) -> tuple[str, ...]:
    """A note if weights are not trained, since plans count gradients and optimizer state of all weights."""
    every = {id(p): p for c in traced.components for p in c.parameters()}.values()
    whole, frozen = sum(p.nbytes for p in every), sum(p.nbytes for p in every if not p.requires_grad)
    if frozen <= _FROZEN * whole:
        return ()
    return (
        f"{frozen / whole:.0%} of the weights are not trained; their gradients and optimizer state are counted all the "
        "same, so training takes less memory and communication than this says",
    )


def _embedding_notes(traced: TracedModel) -> tuple[str, ...]:
    """Notes on embeddings that change with, or count, all words of a batch, of which ranks have parts."""
    tables = [
        (n, m)
        for c in traced.components
        for n, m in c.named_modules()
        if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag)
    ]
    does = {
        "shortens rows of its weight in forward (max_norm)": [n for n, m in tables if m.max_norm is not None],
        "divides gradients by the count of a word (scale_grad_by_freq)": [n for n, m in tables if m.scale_grad_by_freq],
    }
    return tuple(
        f"{names[0]} {what}: a rank with a part of the batch, or of the weight, does so with that part alone, and "
        "training differs from that on one device"
        for what, names in does.items()
        if names
    )


def folded(notes: Sequence[str]) -> tuple[str, ...]:
    """The first few of the ``notes`` made by :func:`asa.tracing.trace`, then the number of the others.

    >>> folded(["a is one call: why", "b is one call: so", "c", "d", "e"])
    ('a is one call: why', 'b is one call: so', 'c', 'and 2 more of the kind')
    """
    more = len(notes) - _NOTES
    return (*notes[:_NOTES], *([f"and {more} more of the kind"] if more > 0 else []))
