"""Recording of tensors that ``forward`` creates, if their size is symbolic or their content random; and limits of
symbolic types."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.overrides
from torch import fx
from torch.utils import _pytree as pytree

_RANDOM = ("rand", "randn", "randint", "randperm", "normal", "bernoulli")
_FACTORIES = (*_RANDOM, "zeros", "ones", "empty", "full", "arange", "linspace", "eye", "tensor")
_LIMITS = ("finfo", "iinfo")


@contextmanager
def recorded_factories(tracer: fx.Tracer) -> Iterator[None]:
    """Context in which ``torch.zeros(x.size(0), 8)`` and ``torch.randn(3)`` become nodes of the graph.

    fx records neither: the first fails on the symbolic size, the second would become a constant.
    """
    running = tracer._oracle  # type: ignore[attr-defined]

    def recorded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            symbolic = any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves((args, kwargs)))
            if running.running or not (symbolic or name in _RANDOM):
                return original(*args, **kwargs)
            return tracer.create_proxy("call_function", original, args, kwargs)

        return make

    def limits(original: Callable[..., Any]) -> Callable[..., Any]:
        def of_type(*args: Any) -> Any:  # the type of a symbolic value is an answer about its shape
            return original(*(tracer.value_of(a.node) if isinstance(a, fx.Proxy) else a for a in args))  # type: ignore[attr-defined]

        return of_type

    # Torch lists its own functions once and keeps the list. It must not list ours, which hold the tracer and its model.
    torch.overrides.get_ignored_functions()
    torch.overrides.get_overridable_functions()
    originals = {name: getattr(torch, name) for name in (*_FACTORIES, *_LIMITS)}
    try:
        for name, original in originals.items():
            setattr(torch, name, limits(original) if name in _LIMITS else recorded(name, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
