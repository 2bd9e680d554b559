"""Products whose values a second forward does not need, because no gradient depends on them.

A second forward serves to get the tensors that backward reads. In a transformer block the last product is followed by
dropout and an addition, which save nothing of it, so its value is needed nowhere. Such a product is *left out*:
autograd records it as usual, so its gradients are the usual ones, but its result is zero.
``torch.utils.checkpoint`` stops early to the same end; here everything else runs, so random numbers, collectives and
hooks are those of a whole forward (decision 0204).
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from asa.tracing.shapes import about_shape
from asa.tracing.tracer import hooked

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FUNCTIONS = (
    F.linear, F.conv1d, F.conv2d, F.conv3d, torch.addmm, torch.mm, torch.bmm, torch.baddbmm, torch.matmul,
    operator.matmul,
)  # fmt: skip
_METHODS = ("matmul", "mm", "bmm")
"""Products of two tensors, each one operator of :class:`_LeftOut`."""

_PASSING = frozenset((
    operator.add, operator.sub, operator.neg, operator.getitem, torch.add, torch.sub, torch.cat, torch.stack,
    torch.flatten, torch.reshape, torch.transpose, torch.permute, torch.squeeze, torch.unsqueeze, F.dropout,
    "add", "sub", "view", "reshape", "flatten", "transpose", "permute", "squeeze", "unsqueeze", "contiguous", "expand",
    "to", "float", "type_as",
))  # fmt: skip
"""Functions and methods of which autograd saves no value of their inputs, and that write to none."""
_SCALING = frozenset((operator.mul, operator.truediv, torch.mul, torch.div, "mul", "div"))
"""Likewise, if a tensor is scaled by a number."""
_PASSING_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Identity, nn.Flatten)

_MATRICES = frozenset((
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
))  # fmt: skip
_CONVOLUTION = torch.ops.aten.convolution.default


class _LeftOut(TorchDispatchMode):
    """Context in which products return zeros of the right shape. Autograd is above it, and records what it does without
    it. Uninitialized memory would do, but numbers close to 0 in it make a processor slow."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types:  # what a tensor of another class computes is its own affair
            return func(*args, **(kwargs or {}))
        if func in _MATRICES:
            left, right = args[-2:]
            return left.new_zeros((*left.shape[:-1], right.shape[-1]))
        if func is _CONVOLUTION:
            with _disable_current_modes():
                like = func(*pytree.tree_map_only(Tensor, lambda t: t.to("meta"), args))
            return args[0].new_zeros(like.numel()).as_strided(like.shape, like.stride())
        return func(*args, **(kwargs or {}))


def _call_left_out(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _LeftOut():
        return layer(*args, **kwargs)


@cache
def _function_left_out(target: Any) -> Callable[..., Any]:
    """``target``, the function or the name of a method, as a function whose product is left out."""

    def left_out(*args: Any, **kwargs: Any) -> Any:
        with _LeftOut():
            return getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)

    return left_out


def _layer(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The module that ``node`` calls; None if there is none, if it has a ``forward`` of its own, or hooks, which may
    look at what it returns."""
    if node.op != "call_module":
        return None
    layer = module.get_submodule(str(node.target))
    return None if hooked(layer) or "forward" in vars(layer) else layer


def _is_product(module: fx.GraphModule, node: fx.Node, products: tuple[type, ...]) -> bool:
    layer = _layer(module, node)
    if layer is not None:
        return type(layer) in (*_LAYERS, *products)
    return (node.target in _FUNCTIONS and "out" not in node.kwargs) or (node.op, node.target) in _CALLED


_CALLED = frozenset(("call_method", name) for name in _METHODS)


def _passes(module: fx.GraphModule, node: fx.Node, passing: tuple[type, ...]) -> bool:
    layer = _layer(module, node)
    if layer is not None:  # what replaces a dropout has its class
        return layer.__class__ in (*_PASSING_LAYERS, *passing) and not getattr(layer, "inplace", False)
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs or node.kwargs.get("inplace"):
        return False
    if node.target in _SCALING:
        return len(node.args) == 2 and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int | float)
    return node.target in _PASSING and not (node.target is F.dropout and len(node.args) > 3)


def unneeded(
    module: fx.GraphModule, products: tuple[type, ...] = (), passing: tuple[type, ...] = ()
) -> list[fx.Node]:  # fmt: skip
    """The products in the graph of ``module`` whose values reach nothing but its output, and that only through
    operators that save no value of them. More classes of layers: ``products`` compute one product; ``passing`` save no
    value of their input."""
    only_returned: set[fx.Node] = set()
    for node in reversed(module.graph.nodes):
        reading = [user for user in node.users if not about_shape(user)]
        if reading and all(u.op == "output" or (u in only_returned and _passes(module, u, passing)) for u in reading):
            only_returned.add(node)
    return [n for n in module.graph.nodes if n in only_returned and _is_product(module, n, products)]


def left_out(
    module: fx.GraphModule, products: tuple[type, ...] = (), passing: tuple[type, ...] = ()
) -> fx.Graph | None:  # fmt: skip
    """A copy of the graph of ``module`` in which the :func:`unneeded` products are left out; None if there is none."""
    names = {node.name for node in unneeded(module, products, passing)}
    if not names:
        return None
    graph = copy.deepcopy(module.graph)
    for node in [n for n in graph.nodes if n.name in names]:
        with graph.inserting_before(node):
            if node.op == "call_module":
                new = graph.call_function(_call_left_out, (graph.get_attr(str(node.target)), *node.args), node.kwargs)
            else:
                new = graph.call_function(_function_left_out(node.target), node.args, node.kwargs)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    graph.lint()
    return graph
