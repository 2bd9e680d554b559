"""Answers to the tracer's questions that depend on shapes and types alone.

``if x.dim() == 4``, ``range(x.shape[1])`` and ``len(x.shape)`` ask a symbolic value for a concrete one. If the question
uses only shape, type and device of tensors, and the answer is equal for two batch sizes, it becomes a constant of the
traced graph. A question about data is not answered.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

_PROPERTIES = {"shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_nested", "is_sparse", "requires_grad"}
_ARITHMETIC = ("_operator", "builtins", "math")
_METHODS = {"size", "dim", "ndimension", "is_floating_point", "is_complex"}


def about_shape(node: fx.Node) -> bool:
    """Whether ``node`` maps a tensor to a value that does not depend on the tensor's elements."""
    if node.op == "call_method":
        return node.target in _METHODS
    return node.op == "call_function" and node.target is getattr and node.args[1] in _PROPERTIES


def shape_only(node: fx.Node) -> bool:
    """Whether the value of ``node`` is computed from shapes, types and devices alone."""
    pending, visited = [node], set()
    while pending:
        current = pending.pop()
        if current in visited or about_shape(current):
            continue
        visited.add(current)
        if current.op != "call_function" or getattr(current.target, "__module__", "") not in _ARITHMETIC:
            return False
        pending += current.all_input_nodes
    return True


def _words(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


class Oracle:
    """Runs the graph recorded so far on two examples that differ only in batch size."""

    def __init__(self, examples: tuple[Tensor, Tensor], fetch: Callable[[str], Any]) -> None:
        self._examples = examples
        self._fetch = fetch
        self._values: dict[fx.Node, tuple[Any, Any]] = {}
        self.running = False

    def value(self, node: fx.Node) -> Any:
        """The value of ``node``.

        Raises:
            LookupError: it depends on data, or on the batch size.
        """
        if not shape_only(node):
            raise LookupError(f"forward asks for {_words(node)}, which depends on data")
        return self._agreed(node, lambda value: value)

    def length(self, node: fx.Node) -> int:
        """The length of ``node``'s value; for a tensor, its first dimension.

        Raises:
            LookupError: it depends on the batch size.
        """
        return int(self._agreed(node, len))

    def _agreed(self, node: fx.Node, of: Callable[[Any], Any]) -> Any:
        with self._at_work():
            for earlier in node.graph.nodes:
                if earlier not in self._values and earlier.op != "output":
                    self._values[earlier] = (self._run(earlier, 0), self._run(earlier, 1))
        first, second = (of(value) for value in self._values[node])
        if first != second:
            raise LookupError(f"forward asks for {_words(node)}, which depends on the batch size")
        return first

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self.running = True
        try:
            with torch.no_grad():
                yield
        finally:
            self.running = False

    def _run(self, node: fx.Node, which: int) -> Any:
        if node.op == "placeholder":
            return self._examples[which].clone()
        if node.op == "get_attr":
            return self._fetch(str(node.target))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self._values[n][which])
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Any = self._fetch(str(node.target)) if node.op == "call_module" else node.target
        return target(*args, **kwargs)


class _Answers:
    """Extension of fx's symbolic values that answers questions about shapes."""

    node: fx.Node
    tracer: Any

    def __index__(self) -> int:
        return operator.index(self.tracer.value_of(self.node))

    def __int__(self) -> int:
        return int(self.tracer.value_of(self.node))

    def __len__(self) -> int:
        return int(self.tracer.length_of(self.node))

    def __getattr__(self, name: str) -> Any:
        return ShapeAttribute(self, name)  # type: ignore[arg-type]


class ShapeProxy(_Answers, fx.Proxy):
    """A symbolic value."""


class ShapeAttribute(_Answers, fx.proxy.Attribute):
    """An attribute of a symbolic value. It is recorded when it is read, or called as a method."""
