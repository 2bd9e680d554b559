"""What every component can compute again by itself: masks, positions and rotations that follow from shapes alone.

A model computes them once and hands them to all its blocks, so beside the hidden state they are alive at every cut.
They depend on no element of the input: each component makes those that it reads from the shape of its own input.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

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
"""Functions and methods that draw no random number and write into nothing."""


class Batch:
    """What stands for the number of samples among the entries of a shape."""


def repeatable(program: Program, seen: tuple[Any, Any]) -> dict[fx.Node, Any]:
    """The nodes that depend on no data, and of questions about shapes their answer, with :class:`Batch` where it is the
    number of samples. ``seen``: what runs on two batch sizes showed (:class:`asa.tracing.cuts.Observation`)."""
    found: dict[fx.Node, Any] = {}
    written = {storage for _, storage in seen[0].writes}
    for node in program.graph.nodes:
        if seen[0].storage.get(node) in written:
            continue
        if about_shape(node):
            answer = _answer(*(s.plain.get(node) for s in seen), *(s.batch for s in seen))
            if answer is not None:
                found[node] = answer
        elif node.op == "get_attr":
            if not isinstance(program.attributes[str(node.target)], nn.Parameter):
                found[node] = None
        elif node.op in ("call_function", "call_method"):
            name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
            if name in _PURE and "out" not in node.kwargs and all(n in found for n in node.all_input_nodes):
                found[node] = None
        elif node.op == "call_module":
            data = [n for n in node.all_input_nodes if n not in found]
            if _ignores(program.attributes[str(node.target)], node, data, seen):
                found[node] = {n: (seen[0].shapes[n][1:], seen[0].types[n]) for n in data}
    return found


def _answer(small: Any, large: Any, one: int, other: int) -> Any:
    if isinstance(small, torch.Size) and isinstance(large, torch.Size) and small != large:
        if small[:1] == (one,) and large[:1] == (other,) and small[1:] == large[1:]:
            return (Batch, *small[1:])
        return None
    if type(small) is int and (small, large) == (one, other):
        return Batch
    return small if small == large else None


def _ignores(module: nn.Module, node: fx.Node, data: list[fx.Node], seen: tuple[Any, Any]) -> bool:
    """Whether ``module`` takes nothing but shape and type of ``data``: it says the same when they are not a number."""
    held = [
        *module.parameters(),
        *(b for n, b in module.named_buffers() if n not in module._non_persistent_buffers_set),
    ]
    tensors = [n for n in node.all_input_nodes if n in seen[0].shapes]
    shown = len(tensors) > len(data) or next(module.buffers(), None) is not None
    plain = len(tensors) < len(node.all_input_nodes) or any(n not in seen[0].floating for n in data)
    split = any(s.shapes[n][:1] != (s.batch,) for n in data if n in seen[0].shapes for s in seen)
    if held or not shown or plain or split or hooked(module) or next(module.children(), None) is not None:
        return False

    def said(filling: float) -> list[torch.Tensor]:
        probe = copy.deepcopy(module).to_empty(device="cpu")
        for buffer in probe.buffers():
            buffer.fill_(0.5)
        inputs = {
            n: torch.full(seen[0].shapes[n], filling if n in data else 1, dtype=seen[0].types[n], device="cpu")
            for n in tensors
        }
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            drawn = torch.get_rng_state()
            value = probe(*fx.node.map_arg(node.args, inputs.get), **fx.node.map_arg(node.kwargs, inputs.get))
            if not torch.equal(drawn, torch.get_rng_state()):
                raise ValueError("it draws random numbers")
        leaves: list[torch.Tensor] = []
        fx.node.map_aggregate(value, lambda v: leaves.append(v) if isinstance(v, torch.Tensor) else None)
        return leaves

    try:
        first, *others = (said(f) for f in (0.0, 1.0, float("nan")))
    except Exception:  # whatever a module may raise on values that it never sees
        return False
    return bool(first) and all(len(o) == len(first) and all(map(torch.equal, first, o)) for o in others)


def copied_again(
    graph: fx.Graph, entry: fx.Node, node: fx.Node, answers: Mapping[fx.Node, Any], copied: Callable[[fx.Node], Any]
) -> Any:
    """``node`` in the graph of a component that reads ``entry``; ``copied`` gives what it is computed from."""
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
