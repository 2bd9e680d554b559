"""Makes the dataflow graph of a module by symbolic execution of its ``forward`` with ``torch.fx``.

fx fixes Python control flow, ``self.training`` included, so a model is traced once per mode. Code that cannot be traced
is not an error. The innermost module that fails becomes a single call, and tracing continues around it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.transformer import _detect_is_causal_mask
from torch.utils import _pytree as pytree

from asa.tracing.factories import recorded_factories
from asa.tracing.listed import ListedTensorsRefused
from asa.tracing.packed import packing_looked_up
from asa.tracing.preserve import attributes, changed_attributes, mode, restore_attributes
from asa.tracing.program import CONSTANT, Origin, Program, opened
from asa.tracing.records import understood
from asa.tracing.shapes import Oracle, ShapeProxy
from asa.tracing.surroundings import Surroundings


def _ambient() -> tuple[bool, ...]:
    return (torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu"))


def _in_checkpoint() -> bool:
    """Whether the current call is inside ``torch.utils.checkpoint``, which leaves no trace in the graph."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None


def _target_name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)


def reason_of(error: Exception) -> str:
    """Description of an error in one line."""
    lines = str(error).splitlines()
    if isinstance(error, fx.proxy.TraceError) and lines:
        return lines[0]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModelTracer(fx.Tracer):
    """Records one run of a module with symbolic input. :func:`opened` determines which modules it enters."""

    proxy_buffer_attributes = True

    def __init__(self, examples: tuple[Tensor, Tensor], except_one: set[str] | None = None) -> None:
        super().__init__()
        self.opaque: dict[str, str] = {}
        self.checkpointed: dict[str, None] = {}
        self.result: Any = None
        self._oracle = Oracle(examples, lambda target: attrgetter(target)(self.root), except_one)
        self._calls: Counter[str] = Counter()
        self._scopes: list[tuple[str, str]] = [("", "")]
        self._keys: Counter[str] = Counter()
        self._outer = _ambient()
        self._attribute_proxies: dict[str, fx.Proxy] = {}

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Make only the first argument of ``forward`` symbolic; the others keep their defaults. The graph returns a
        flat list, and ``result`` keeps the structure."""
        del is_module, concrete_args

        def call(*args: Any) -> list[Any]:
            self.result = understood(root_fn(*args))
            return [leaf for leaf in pytree.tree_leaves(self.result) if isinstance(leaf, fx.Proxy)]

        return call, [self.root, self.create_proxy("placeholder", "x", (), {}, name="x")]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether ``m`` is recorded as a single call (not :func:`opened`)."""
        del module_qualified_name
        return not opened(m)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Create a node with its origin. Refuse nodes in a state that a context manager has changed, which the graph
        would not record."""
        if kind.startswith("call") and _ambient() != self._outer:
            raise RuntimeError("forward switches gradients or autocast on or off")
        node = super().create_node(kind, target, *args, **kwargs)
        path, call = self._scopes[-1]
        if kind.startswith("call") and _in_checkpoint():
            self.checkpointed[path] = None
        key = f"{call}:{_target_name(target)}"
        node.meta["origin"] = Origin(path, _target_name(target), f"{key}#{self._keys[key]}")
        self._keys[key] += 1
        return node

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """The attribute as fx returns it. The cache is kept, because a roll-back must clean it."""
        if self._oracle.running:
            return attr_val
        self._attribute_proxies = parameter_proxy_cache
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A symbolic value that answers questions about shapes."""
        return ShapeProxy(node, self)

    def value_of(self, node: fx.Node) -> Any:
        """The value of ``node`` if it depends only on shapes; raises ``TraceError`` otherwise."""
        try:
            return self._oracle.value(node)
        except LookupError as error:
            raise fx.proxy.TraceError(error.args[0]) from None

    def length_of(self, node: fx.Node) -> int:
        """The length of ``node``'s value if it does not depend on the batch; raises ``TraceError`` otherwise."""
        try:
            return self._oracle.length(node)
        except LookupError as error:
            raise fx.proxy.TraceError(error.args[0]) from None

    def to_bool(self, obj: fx.Proxy) -> bool:
        """The truth value of ``obj`` if it depends only on shapes; raises ``TraceError`` for control flow on data."""
        return bool(self.value_of(obj.node))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Unroll a loop over shapes or over a tensor of known length."""
        return (obj[i] for i in range(self.length_of(obj.node)))  # type: ignore[index]

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace into ``m``; if that fails, or changes ``m``, record a single call of it."""
        if self._oracle.running:
            return forward(*args, **kwargs)
        try:
            path = self.path_of_module(m)
        except NameError:  # a module created in forward, as in nn.ReLU()(x)
            if next(m.parameters(), None) is not None or next(m.buffers(), None) is not None:
                raise
            return forward(*args, **kwargs)
        with self._inside(path):
            if not opened(m):
                return self.create_proxy("call_module", path, *_by_position(m, args, kwargs))
            before, around, last = attributes(m), Surroundings([m]), next(iter(reversed(self.graph.nodes)))
            counters = self._calls.copy(), self._keys.copy()
            try:
                result = self._call(m, forward, args, kwargs)
                reason = _marks(m, before, around)
                if not reason:
                    return result
            except Exception as error:
                reason = reason_of(error)
            restore_attributes(m, before)
            around.put_back()
            self._roll_back(last)
            self._calls, self._keys = counters
            self.opaque = {p: r for p, r in self.opaque.items() if not p.startswith(f"{path}.")}
            self.opaque[path] = reason
            return self.create_proxy("call_module", path, args, kwargs)

    def _call(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # fmt: skip
        if type(m).forward is not nn.TransformerEncoder.forward:
            return forward(*args, **kwargs)
        given = inspect.signature(type(m).forward).bind(m, *args, **kwargs).arguments
        value, mask, hint = given["src"], given.get("mask"), given.get("is_causal")
        if given.get("src_key_padding_mask") is not None:
            raise RuntimeError("masks of padding are not traced")
        options: dict[str, Any] = {}
        layers: Any = m.layers
        if mask is not None:
            length = int(value.shape[1 if layers[0].self_attn.batch_first else 0])
            shown = mask if hint is not None or not isinstance(mask, fx.Proxy) else self._mask(mask.node)
            options = {"src_mask": mask, "is_causal": _detect_is_causal_mask(shown, hint, length)}
        for layer in layers:  # its own forward reads data to choose a fast path
            value = layer(value, **options)
        return m.norm(value) if isinstance(m.norm, nn.Module) else value

    def value_pair(self, node: fx.Node) -> tuple[Tensor, Tensor]:
        """The values of ``node`` for two batch sizes if it depends on no data; raises ``TraceError`` otherwise."""
        try:
            return self._oracle.tensors(node)
        except LookupError as error:
            raise fx.proxy.TraceError(error.args[0]) from None

    def _mask(self, node: fx.Node) -> Tensor:
        """The value of an attention mask if it depends on no data; raises ``TraceError`` otherwise."""
        try:
            return self._oracle.tensor(node)
        except LookupError as error:
            raise fx.proxy.TraceError(error.args[0]) from None

    @contextmanager
    def _inside(self, path: str) -> Iterator[None]:
        self._scopes.append((path, f"{path}@{self._calls[path]}"))
        self._calls[path] += 1
        try:
            yield
        finally:
            self._scopes.pop()

    def _roll_back(self, last: fx.Node) -> None:
        while (node := next(iter(reversed(self.graph.nodes)))) is not last:
            self.graph.erase_node(node)
        alive = set(self.graph.nodes)
        for name in [n for n, proxy in self._attribute_proxies.items() if proxy.node not in alive]:
            del self._attribute_proxies[name]


def _by_position(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call of ``m``, with the arguments that it requires by position: how a layer splits is derived
    from its first arguments."""
    if hooked(m):  # a hook sees how arguments are passed
        return args, kwargs
    parameters = inspect.signature(m.forward).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    for name in required[len(args) :]:
        if name not in kwargs:
            break
        args, kwargs = (*args, kwargs[name]), {k: v for k, v in kwargs.items() if k != name}
    return args, kwargs


def _marks(m: nn.Module, before: dict[str, Any], around: Surroundings) -> str:
    marks = sorted(n for n in changed_attributes(m, before) if not n.startswith(CONSTANT))
    if marks:
        return f"forward assigns {', '.join(marks[:3])}"
    return f"forward changes {name}" if (name := around.changed()) else ""


def hooked(module: nn.Module) -> bool:
    """Whether a call of ``module`` does more than its ``forward``."""
    return any(vars(module)[kind] for kind in _HOOKS)


def trace_mode(
    model: nn.Module, training: bool, examples: tuple[Tensor, Tensor], except_one: set[str] | None = None
) -> Program:  # fmt: skip
    """Trace ``model`` in one mode. The caller preserves it (:func:`asa.tracing.preserve.preserved`).

    ``examples`` (the same input at two batch sizes) and ``except_one`` are for :class:`asa.tracing.shapes.Oracle`.

    Raises:
        fx.proxy.TraceError: even the model's own ``forward`` cannot be traced.
    """
    if hooked(model):  # fx runs the model's own forward, without its hooks
        raise fx.proxy.TraceError("the model itself has hooks")
    tracer = ModelTracer(examples, except_one)
    before, around = attributes(model), Surroundings([model])
    try:
        listed = ListedTensorsRefused(model, lambda: tracer._oracle.running)
        with mode(model, training), recorded_factories(tracer), packing_looked_up(tracer.value_pair), listed:
            graph = tracer.trace(model)
            contrary = frozenset(p for p, m in model.named_modules() if p and m.training != training)
        named = {str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")}
        objects = {target: attrgetter(target)(model) for target in named}
        graph.lint()
    except fx.proxy.TraceError:
        raise
    except Exception as error:
        raise fx.proxy.TraceError(reason_of(error)) from error
    finally:
        reason = _marks(model, before, around)
        restore_attributes(model, before)
        around.put_back()
    structure = pytree.tree_map(lambda leaf: leaf.node if isinstance(leaf, fx.Proxy) else leaf, tracer.result)
    program = Program(graph, objects, structure, tracer.opaque, contrary, tuple(tracer.checkpointed))
    if reason or not program.outputs or program.outputs[-1].op in ("placeholder", "get_attr"):
        raise fx.proxy.TraceError(reason or "forward returns nothing that it computed")
    return program
