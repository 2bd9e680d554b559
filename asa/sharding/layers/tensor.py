"""Tensor parallelism of one traced component: rewrites its graphs and shards its layers, so that the ranks of an axis
compute it together."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextlib import redirect_stderr
from io import StringIO
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.shape_prop import ShapeProp

from asa.errors import UsageError
from asa.ir.layout import bounds
from asa.sharding.collectives.axis import Axis
from asa.sharding.layers.modules import Gather, GatherTokens, ReduceGradient, ScatterTokens, SumGradients, shard_module
from asa.sharding.layers.propagate import Cut, SplitPlan, is_elementwise, propagate
from asa.sharding.layers.tokens import propagate_tokens
from asa.sharding.randomness.samples import SampleDropout
from asa.tracing.component import TracedComponent
from asa.tracing.preserve import histories, on_meta, with_tensors

Module = TypeVar("Module", bound=nn.Module)

_SAMPLES = 2
_SHAPES = "asa_shapes"
"""Key in a node's ``meta``, kept by copies: shape and type of the component's input when the node's shape was
recorded."""


def example_input(component: TracedComponent, samples: int = _SAMPLES) -> Tensor:
    """An input of ``samples`` samples for ``component``, on the meta device."""
    return torch.empty((samples, *component.input_shape), dtype=_input_dtype(component), device="meta")


def _input_dtype(component: TracedComponent) -> torch.dtype:
    """Type of the component's input, as traced or as the component was converted since."""
    if not component.input_dtype.is_floating_point:
        return component.input_dtype
    return next((p.dtype for p in component.parameters() if p.is_floating_point()), component.input_dtype)


def _propagate_shapes(component: TracedComponent) -> None:
    """Record the shape of every value in its node, without computing or changing buffers; once for a component."""
    shape, dtype = key = (_SAMPLES, *component.input_shape), _input_dtype(component)
    graphs = component.graphs()
    if all(node.meta.get(_SHAPES) == key for graph in graphs for node in graph.graph.nodes):
        return
    try:
        for graph, twin in zip(graphs, without_values(component).graphs(), strict=True):
            with torch.device("meta"):  # tensors that forward creates go there, too
                ShapeProp(twin).propagate(torch.empty(shape, dtype=dtype))
            for node, like in zip(graph.graph.nodes, twin.graph.nodes, strict=True):
                node.meta.update(like.meta)
    except Exception:  # a real constant was combined with meta tensors; fake tensors allow that, but are slower
        fake = FakeTensorMode()
        with fake:
            device = next((p.device for p in component.parameters()), torch.device("cpu"))
            x = torch.empty(shape, dtype=dtype, device=device)
        for graph in graphs:
            ShapeProp(graph, fake_mode=fake).propagate(x)
    for graph in graphs:
        for node in graph.graph.nodes:
            node.meta[_SHAPES] = key


def without_values(module: Module, more: Iterable[Tensor] = ()) -> Module:
    """A copy of ``module`` on the meta device, made without copying any value, also of ``more`` tensors in it."""
    return with_tensors(module, (*more, *module.parameters(), *module.buffers()), on_meta)


def plan_split(component: TracedComponent, *, tokens: bool = False) -> list[SplitPlan]:
    """How each of the component's graphs splits. With ``tokens``, also by tokens; plans whose ``tokens`` is 0 mean that
    this is impossible.

    The first plan's actions contain the layers of all graphs (an auxiliary head is only in that of training). A layer
    that is in two graphs splits in the same way in both.

    Raises:
        UsageError: the two modes would split different layers, or shapes depend on values.
    """
    if component.ties:  # parameters shared with another component are not split
        return [SplitPlan() for _ in component.graphs()]
    try:
        with redirect_stderr(StringIO()):  # fx prints a traceback of its error
            _propagate_shapes(component)
    except Exception as error:
        reason = type(error.__cause__ or error).__name__
        raise UsageError(f"{component.name} does something that depends on values ({reason})") from error
    plans = [propagate_tokens(graph) if tokens else propagate(graph) for graph in component.graphs()]
    first, *rest = plans
    for other in rest:
        for path in first.actions.keys() & other.actions.keys():
            if (other.actions[path], other.cuts[path]) != (first.actions[path], first.cuts[path]):
                raise UsageError(f"{component.name} would split differently in training and in evaluation")
        first.actions.update(other.actions)
        first.cuts.update(other.cuts)
        if (other.entry_partial, other.exit_partial) != (first.entry_partial, first.exit_partial):
            for plan in plans:
                plan.hoisted, plan.exit_partial = set(), False
    return plans


def sequence_plans(component: TracedComponent) -> list[SplitPlan] | None:
    """How each of the component's graphs splits by tokens, with parameters split as in tensor parallelism alone; None
    if that is impossible.

    Raises:
        UsageError: see :func:`plan_split`.
    """
    plain = plan_split(component)[0]
    if component.has_sides() or not plain.actions:
        return None
    plans = plan_split(component, tokens=True)
    first = plans[0]
    alike = (first.actions, first.cuts) == (plain.actions, plain.cuts)
    ends = {(p.tokens, p.exit_tokens) for p in plans}
    return plans if alike and first.tokens > 1 and len(ends) == 1 else None


def split(component: TracedComponent, axis: Axis, *, tokens: bool = False) -> TracedComponent:
    """Split ``component`` in place over ``axis``; without a process group it is rehearsed (see :class:`Axis`). With
    ``tokens``, its input and output are split by tokens (:mod:`asa.sharding.layers.tokens`).

    Raises:
        UsageError: the component has nothing to split, or fewer units than the axis has ranks.
    """
    if axis.size == 1:
        return component
    plans = sequence_plans(component) if tokens else plan_split(component)
    if plans is None:
        raise UsageError(f"{component.name} cannot be split by tokens")
    plan = plans[0]
    most = min(plan.max_degree, plan.tokens) if tokens else plan.max_degree
    if not plan.actions or axis.size > most:
        raise UsageError(f"{component.name} splits at most {most} ways, asked {axis.size}")
    for graph, each in zip(component.graphs(), plans, strict=True):
        _connect(graph, each, axis)
    exits = _exits(component.train_graph) if plan.exit_partial else set()
    exits |= {str(node.target) for node in plan.scattered}
    scatter = ScatterTokens(plan.tokens, axis) if tokens else None
    for path, action in plan.actions.items():
        source = component.get_submodule(path)
        shard = shard_module(source, action, plan.cuts[path], axis, partial=path in exits, scatter=scatter)
        component.set_submodule(path, shard)
    return component


def _exits(module: fx.GraphModule) -> set[str]:
    output = next(n for n in reversed(module.graph.nodes) if n.op == "output")
    return {str(n.target) for n in output.all_input_nodes if n.op == "call_module"}


def _connect(module: fx.GraphModule, plan: SplitPlan, axis: Axis) -> None:
    """Insert collectives into one graph, and set which part of its input each dropout gets."""
    for node in module.graph.nodes:
        if node.op == "call_module":
            _offset_dropout(module.get_submodule(str(node.target)), plan.states.get(node), axis)
    for value, readers in plan.readers.items():
        if value in plan.hoisted:
            continue
        _insert(module, value, readers, ReduceGradient(axis), f"reduce_gradient_{value.name}")
    consumers: dict[fx.Node, list[fx.Node]] = {}
    for value, consumer in plan.gathers:
        consumers.setdefault(value, []).append(consumer)
    for value, users in consumers.items():
        cut = plan.states[value]
        assert cut is not None
        _insert(module, value, users, Gather(cut, axis), f"gather_{value.name}")
    for value, readers in plan.gathered.items():
        _insert(module, value, readers, GatherTokens(plan.tokens, axis), f"gather_tokens_{value.name}")
    for node in plan.scattered:
        if plan.actions[str(node.target)] == "row":
            _insert(module, node, list(node.users), ScatterTokens(plan.tokens, axis), f"scatter_tokens_{node.name}")
    _sum_gradients(module, plan.tokenwise, axis)
    module.graph.lint()
    module.recompile()


def _insert(module: fx.GraphModule, value: fx.Node, users: list[fx.Node], step: nn.Module, name: str) -> None:
    # Before the first user, not right after the value, because it may be changed in place in between.
    module.add_submodule(name, step)
    user_set = set(users)
    first = next(n for n in module.graph.nodes if n in user_set)
    with module.graph.inserting_before(first):
        node = module.graph.call_module(name, (value,))
    for user in users:
        user.replace_input_with(value, node)


def _sum_gradients(module: fx.GraphModule, norms: list[fx.Node], axis: Axis) -> None:
    """Pass the parameters of ``norms`` through one :class:`SumGradients` at the beginning of the graph."""
    layers = {node: module.get_submodule(str(node.target)) for node in norms}
    names = [(node, name) for node, m in layers.items() for name, _ in m.named_parameters(recurse=False)]
    graph = module.graph
    (entry,) = [n for n in graph.nodes if n.op == "placeholder"]
    read: dict[tuple[fx.Node, str], fx.Node] = {}
    with graph.inserting_before(entry.next):
        for node, name in names:
            read[node, name] = graph.get_attr(f"{node.target}.{name}")
        trained = [key for key in names if getattr(layers[key[0]], key[1]).requires_grad]
        if trained:
            module.add_submodule("sum_gradients", SumGradients(axis))
            summed = graph.call_module("sum_gradients", tuple(read[key] for key in trained))
            for i, key in enumerate(trained):
                read[key] = graph.call_function(operator.getitem, (summed, i))
    for node, m in layers.items():
        assert isinstance(m, nn.LayerNorm | nn.RMSNorm)
        with graph.inserting_before(node):
            shape, weight, bias = tuple(m.normalized_shape), read.get((node, "weight")), read.get((node, "bias"))
            if isinstance(m, nn.RMSNorm):
                call = graph.call_function(F.rms_norm, (node.args[0], shape, weight, m.eps))
            else:
                call = graph.call_function(F.layer_norm, (node.args[0], shape, weight, bias, m.eps))
        node.replace_all_uses_with(call)
        graph.erase_node(node)


def _offset_dropout(module: nn.Module, cut: Cut | None, axis: Axis) -> None:
    if cut is not None and isinstance(module, SampleDropout) and is_elementwise(module):
        start, _stop = bounds(cut.units, axis.size, axis.index)
        module.shard = (cut.dim, start * cut.unit, cut.units * cut.unit)


def detached_copy(component: TracedComponent, device: torch.device | str) -> TracedComponent:
    """A copy with its own parameters and buffers on ``device`` (``meta`` costs nothing)."""
    tensors = (*component.parameters(), *component.buffers())
    return with_tensors(component, tensors, lambda t: t.detach().to(device, copy=True), histories(component))
