"""Detects components that are equal except for their names, so that facts and splits of one hold for all of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, fx, nn

from asa.tracing.component import TracedComponent
from asa.tracing.fingerprint import called, settings

_PROXY = re.compile(r"Proxy\(\w+\)")
"""Name of a value in fx's text of an assertion, which differs between blocks."""
_DROPS = re.compile("drop|stochasticdepth", re.IGNORECASE)
"""Modules whose rates differ between blocks, because deeper blocks drop more often. The work is the same."""
_RATE = re.compile(r"('\w+'): 0\.\d*[1-9]\d*(e-\d+)?(?=[,}])")
_SCALES = re.compile("drop|stochastic_depth|^bernoulli_?$|^div_?$|^truediv$|^mul_?$")
"""Functions for which a number between 0 and 1 is such a rate, or the factor for it."""
_PERIODS = range(1, 5)
"""Lengths of repeating groups: blocks of one kind, or of two to four kinds in turn."""
_FIRST, _LAST = 2, 1
"""Numbers of repetitions kept at the two ends of a row of equal groups, because their neighbours differ."""


def signature(component: TracedComponent) -> str:
    """A digest that is equal for components that do the same computation on inputs and tensors of the same shapes.
    Dropout rates may differ."""
    digest = hashlib.sha256()
    digest.update(repr((component.input_shape, component.input_dtype, component.side_outputs())).encode())
    order: dict[int, int] = {}
    for graph in (component.train_graph, component.eval_graph):
        for line in _lines(component, graph.graph, order):
            digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _lines(component: TracedComponent, graph: fx.Graph, order: dict[int, int]) -> list[str]:
    number = {n: f"%{i}" for i, n in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        target: str = called(node.target)
        if node.op in ("call_module", "get_attr"):
            target = _description(component, attrgetter(str(node.target))(component), order)
        elif node.op == "placeholder":
            target = ""
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _Number(number[n]))
        if _SCALES.search(target.rpartition(".")[2]):
            args, kwargs = fx.node.map_aggregate((args, kwargs), _share)
        lines.append(_PROXY.sub("a value", f"{node.op} {target} {args} {kwargs}"))
    return lines


def _share(value: Any) -> Any:
    return "a share" if isinstance(value, float) and 0 < value < 1 else value


def _settings(module: nn.Module) -> str:
    text = settings(module)
    return _RATE.sub(r"\1: a share", text) if _DROPS.search(type(module).__name__) else text


class _Number(str):
    """Name of a node, made from its position."""

    __slots__ = ()


def _description(component: TracedComponent, item: Any, order: dict[int, int]) -> str:
    """Description of a module or tensor by what determines its work. A repeated use is marked by the number of the
    first one."""
    number = order.setdefault(id(item), len(order))
    if isinstance(item, Tensor):
        return f"{number} {_tensor(item, component)}"
    if isinstance(item, nn.Module):
        inside = [f"{path} {_settings(m)}" for path, m in item.named_modules()]
        tensors = [f"{n} {_tensor(t, component)}" for n, t in (*item.named_parameters(), *item.named_buffers())]
        return f"{number} {inside} {tensors}"
    return f"{number} {type(item).__name__} {id(item)}"


def _tensor(tensor: Tensor, component: TracedComponent) -> str:
    kind = type(tensor).__name__
    return f"{kind} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {id(tensor) in component.ties}"


def stand_ins(kinds: Sequence[Hashable]) -> list[int]:
    """For each item, the index of an equal item with equal neighbours. It is the item's own index, except inside rows
    of repeated groups.

    >>> stand_ins("abbbbbbc")
    [0, 1, 2, 2, 2, 2, 6, 7]
    >>> stand_ins("abababababc")
    [0, 1, 2, 3, 2, 3, 2, 3, 8, 9, 10]
    """
    indices = list(range(len(kinds)))
    i = 0
    while i < len(kinds):
        period, repeats = max(((p, _repeats(kinds, i, p)) for p in _PERIODS), key=lambda each: (each[1] - 1) * each[0])
        if repeats <= _FIRST + _LAST:
            i += 1
            continue
        for j in range(_FIRST * period, (repeats - _LAST) * period):
            indices[i + j] = i + (_FIRST - 1) * period + j % period
        i += repeats * period
    return indices


def _repeats(kinds: Sequence[Hashable], start: int, period: int) -> int:
    group, count = list(kinds[start : start + period]), 1
    while list(kinds[start + count * period : start + (count + 1) * period]) == group:
        count += 1
    return count if len(group) == period else 1
