"""Values that every component can recompute by itself: masks, positions and rotations that follow from shapes alone.

A model computes them once and passes them to all its blocks, so at every cut they are alive beside the hidden state.
They depend on no element of the input. So each component recomputes those that it reads from the shape of its own
input.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from asa.tracing.program import Program
from asa.tracing.shapes import about_shape
from asa.tracing.tracer import hooked

_PURE = frozenset((
    "abs", "add", "and", "and_", "arange", "bmm", "bool", "cat", "clamp", "contiguous", "cos", "cumsum", "diff",
    "div", "eq", "exp", "expand", "expand_as", "eye", "flatten", "flip", "float", "floor", "floordiv", "full",
    "full_like", "ge", "getattr", "getitem", "gt", "int", "inv", "invert", "le", "linspace", "log", "logical_and",
    "logical_not", "logical_or", "long", "lt", "masked_fill", "matmul", "maximum", "minimum", "mod", "movedim",
    "mul", "ne", "neg", "new_full", "new_ones", "new_zeros", "not_", "ones", "ones_like", "or", "or_", "outer",
    "permute", "pow", "repeat", "reshape", "rsqrt", "sin", "sqrt", "squeeze", "stack", "sub", "sum", "to",
    "transpose", "tril", "triu", "truediv", "type", "type_as", "unsqueeze", "view", "where", "zeros", "zeros_like",
))  # fmt: skip
"""Functions and methods that draw no random number and write to nothing."""


class Batch:
    """Placeholder for the number of samples among the entries of a shape."""


def repeatable(program: Program, observations: tuple[Any, Any]) -> dict[fx.Node, Any]:
    """Nodes that depend on no data, and what is needed to recompute each.

    The value is the answer for a question about shapes, in which :class:`Batch` stands for the number of samples. For a
    module that uses only shapes and types of data, it is (shape of one sample, type) of each of these inputs. Otherwise
    it is None. ``observations`` are observations on two batch sizes (:class:`asa.tracing.cuts.Observation`).
    """
    values: dict[fx.Node, Any] = {}
    written = {storage for _, storage in observations[0].writes}
    for node in program.graph.nodes:
        if observations[0].storage.get(node) in written:
            continue
        if about_shape(node):
            answer = _answer(*(s.plain.get(node) for s in observations), *(s.batch for s in observations))
            if answer is not None:
                values[node] = answer
        elif node.op == "get_attr":
            changed = str(node.target) in observations[0].written
            if not (changed or isinstance(program.attributes[str(node.target)], nn.Parameter)):
                values[node] = None
        elif node.op in ("call_function", "call_method"):
            name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
            if name in _PURE and "out" not in node.kwargs and all(n in values for n in node.all_input_nodes):
                values[node] = None
        elif node.op == "call_module":
            data = [n for n in node.all_input_nodes if n not in values]
            if _ignores(program.attributes[str(node.target)], node, data, observations):
                values[node] = {n: (observations[0].shapes[n][1:], observations[0].types[n]) for n in data}
    return values


_SHAPE_ONLY = frozenset((
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like",
    "zeros_like",
))  # fmt: skip
"""Operators that use only shape and type of a tensor."""


class _Reads(TorchDispatchMode):
    """Context that tracks which tensors depend on the values of ``data``. All tensors have no values. ``drew`` says
    whether a random number was requested."""

    def __init__(self, data: list[torch.Tensor]) -> None:
        super().__init__()
        self.drew = False
        self._alive = list(data)  # keeps storages alive: the address of a freed one could be used again
        self._followers = {t.untyped_storage()._cdata for t in data}

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` depends on the data."""
        return tensor.untyped_storage()._cdata in self._followers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        if func.overloadpacket.__name__ in _SHAPE_ONLY:
            return result
        inputs = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        if any(map(self.follows, inputs)):
            written = [
                a for a, s in zip(args, func._schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write
            ]
            outputs = [v for v in pytree.tree_leaves((result, written)) if isinstance(v, torch.Tensor)]
            self._alive += outputs
            self._followers |= {t.untyped_storage()._cdata for t in outputs}
        return result


def _answer(small: Any, large: Any, one: int, other: int) -> Any:
    if isinstance(small, torch.Size) and isinstance(large, torch.Size) and small != large:
        if small[:1] == (one,) and large[:1] == (other,) and small[1:] == large[1:]:
            return (Batch, *small[1:])
        return None
    if type(small) is int and (small, large) == (one, other):
        return Batch
    return small if small == large else None


def _ignores(module: nn.Module, node: fx.Node, data: list[fx.Node], observations: tuple[Any, Any]) -> bool:
    """Whether ``module`` uses only shape and type of ``data``. A run without values shows whether any of its outputs
    depends on their values."""
    state = [
        *module.parameters(),
        *(b for n, b in module.named_buffers() if n not in module._non_persistent_buffers_set),
    ]
    tensors = [n for n in node.all_input_nodes if n in observations[0].shapes]
    shown = len(tensors) > len(data) or next(module.buffers(), None) is not None
    plain = len(tensors) < len(node.all_input_nodes) or any(n not in observations[0].floating for n in data)
    split = any(s.shapes[n][:1] != (s.batch,) for n in data if n in observations[0].shapes for s in observations)
    if state or not shown or plain or split or hooked(module) or next(module.children(), None) is not None:
        return False

    probe = copy.deepcopy(module).to(device="meta")
    inputs = {n: torch.empty(observations[0].shapes[n], dtype=observations[0].types[n], device="meta") for n in tensors}
    reads = _Reads([inputs[n] for n in data if n in inputs])
    versions = [b._version for b in probe.buffers()]
    try:
        with torch.no_grad(), reads:
            value = probe(*fx.node.map_arg(node.args, inputs.get), **fx.node.map_arg(node.kwargs, inputs.get))
    except Exception:  # a module may raise anything on meta tensors
        return False
    leaves: list[torch.Tensor] = []
    fx.node.map_aggregate(value, lambda v: leaves.append(v) if isinstance(v, torch.Tensor) else None)
    same = versions == [b._version for b in probe.buffers()]
    return bool(leaves) and same and not reads.drew and not any(map(reads.follows, leaves))


def copy_recomputed(
    graph: fx.Graph, entry: fx.Node, node: fx.Node, answers: Mapping[fx.Node, Any], copied: Callable[[fx.Node], Any]
) -> Any:
    """Copy ``node`` into the graph of a component that reads ``entry``; ``copied`` maps its inputs."""
    answer = answers[node]

    def function(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    def filled(shape: Any) -> Any:
        return tuple(map(filled, shape)) if isinstance(shape, tuple) else batch() if shape is Batch else shape

    def batch() -> fx.Node:
        return function(operator.getitem, function(getattr, entry, "shape"), 0)

    if about_shape(node):
        return function(getattr, entry, "device") if isinstance(answer, torch.device) else filled(answer)
    stand_ins = {
        n: graph.call_method(
            "expand", (graph.call_method("new_empty", (entry, (1,)), {"dtype": dtype}), filled((Batch, *shape)))
        )
        for n, (shape, dtype) in (answer or {}).items()
    }

    def read(n: fx.Node) -> Any:
        return stand_ins[n] if n in stand_ins else copied(n)

    new = graph.create_node(node.op, node.target, fx.node.map_arg(node.args, read), fx.node.map_arg(node.kwargs, read))
    new.meta.update(node.meta)
    return new
