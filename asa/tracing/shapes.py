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


_SIZES = (1, 4, 5, 6, 7, 8, 12, 16, 31, 64, 100, 128, 129, 255, 512, 1000, 4096)
"""Batch sizes for which an answer must be that of both examples, so that a bound between them is found."""


def _continued(small: Any, large: Any, one: int, other: int, size: int) -> Any:
    """The value for a batch of ``size``, extrapolated from those for batches of ``one`` and ``other`` samples."""
    if isinstance(small, Tensor):
        return small.new_empty(_continued(small.shape, large.shape, one, other, size), device="meta")
    if isinstance(small, tuple | list):
        return tuple(_continued(a, b, one, other, size) for a, b in zip(small, large, strict=True))
    if small == large:
        return small
    return small + (large - small) * (size - one) // (other - one)


def _called(node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
    """The value of ``node``, which is a call, from those of its inputs."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _same(first: Any, second: Any) -> bool:
    return torch.equal(first, second) if isinstance(first, Tensor) else bool(first == second)


def _depends_on_batch(node: fx.Node) -> LookupError:
    return LookupError(
        f"forward asks for {_words(node)}, which depends on the batch size (on a rank, on that of its own samples)"
    )


def _words(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


class Oracle:
    """Runs the graph recorded so far on two examples that differ only in batch size.

    ``except_one`` collects questions whose answer is another one for a batch of a single sample. If it is None, they
    are not answered.
    """

    def __init__(
        self, examples: tuple[Tensor, Tensor], fetch: Callable[[str], Any], except_one: set[str] | None = None
    ) -> None:
        self._examples = examples
        self._fetch = fetch
        self._except_one = except_one
        self._values: dict[fx.Node, tuple[Any, Any]] = {}
        self.running = False

    def value(self, node: fx.Node) -> Any:
        """The value of ``node``.

        Raises:
            LookupError: it depends on data, or on the batch size.
        """
        if not shape_only(node):
            raise LookupError(f"forward asks for {_words(node)}, which depends on data")
        answer = self._agreed(node, lambda value: value)
        other = [size for size in _SIZES if self._for_batch(node, size) != answer]
        if other == [1] and self._except_one is not None:
            self._except_one.add(_words(node))
        elif other:
            raise _depends_on_batch(node)
        return answer

    def tensor(self, node: fx.Node) -> Tensor:
        """The value of ``node``, a tensor that follows from shapes, parameters and buffers.

        Raises:
            LookupError: it depends on data, or on the batch size.
        """
        self._refuse_data(node)
        found: Tensor = self._agreed(node, lambda value: value)
        return found

    def tensors(self, node: fx.Node) -> tuple[Tensor, Tensor]:
        """The values of ``node`` for both examples; it is a tensor that follows from shapes, parameters and buffers.

        Raises:
            LookupError: it depends on data.
        """
        self._refuse_data(node)
        with self._at_work():
            self._evaluate(node.graph)
        return self._values[node]

    def _refuse_data(self, node: fx.Node) -> None:
        pending, visited = [node], set()
        while pending:
            current = pending.pop()
            if current.op == "placeholder":
                raise LookupError("a mask that depends on data is not traced")
            if current not in visited and not about_shape(current):
                pending += current.all_input_nodes
            visited.add(current)

    def length(self, node: fx.Node) -> int:
        """The length of ``node``'s value; for a tensor, its first dimension.

        Raises:
            LookupError: it depends on the batch size.
        """
        length = int(self._agreed(node, len))
        if any(self._length_for(node, size) not in (length, None) for size in _SIZES if size > 1):
            raise _depends_on_batch(node)
        return length

    def _agreed(self, node: fx.Node, of: Callable[[Any], Any]) -> Any:
        with self._at_work():
            self._evaluate(node.graph)
        first, second = (of(value) for value in self._values[node])
        if not _same(first, second):
            raise _depends_on_batch(node)
        return first

    def _evaluate(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node not in self._values and node.op != "output":
                self._values[node] = (self._run(node, 0), self._run(node, 1))

    def _for_batch(self, node: fx.Node, size: int) -> Any:
        """The value of ``node`` for a batch of ``size`` samples, if sizes of tensors follow that of the batch linearly;
        None if it cannot be computed."""
        known: dict[fx.Node, Any] = {}

        def value(n: fx.Node) -> Any:
            if n not in known:
                known[n] = self._continued(n, size) if about_shape(n) else _called(n, value)
            return known[n]

        try:
            return value(node)
        except Exception:  # a division by a size that is zero, for example
            return None

    def _length_for(self, node: fx.Node, size: int) -> int | None:
        """The length of ``node``'s value likewise, from a run of ``node`` alone without values."""

        def value(n: fx.Node) -> Any:
            return self._for_batch(n, size) if shape_only(n) else self._continued(n, size)

        try:
            return len(_called(node, value))
        except Exception:  # it may need values
            return None

    def _continued(self, node: fx.Node, size: int) -> Any:
        (small, large), (one, other) = self._values[node], map(len, self._examples)
        return _continued(small, large, one, other, size)

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
        if node.op != "call_module":
            return _called(node, lambda n: self._values[n][which])
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self._values[n][which])
        return self._fetch(str(node.target))(*args, **kwargs)


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

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # a protocol, as that of arrays, which no tensor is asked for
            raise AttributeError(name)
        return ShapeAttribute(self, name)  # type: ignore[arg-type]


class ShapeProxy(_Answers, fx.Proxy):
    """A symbolic value."""


class ShapeAttribute(_Answers, fx.proxy.Attribute):
    """An attribute of a symbolic value. It is recorded when it is read, or called as a method."""
