"""Parameters that ``forward`` lists (``self.parameters()``), which no graph can follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_READ_OUT = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__array__")
"""Functions that give the values of a tensor, and no tensor."""
_PROPERTIES = ("grad", "grad_fn")
"""Attributes that are no computation, though tensors."""


class ListedTensorsRefused(TorchFunctionMode):
    """Context in which computing with a parameter of ``model`` raises ``TraceError``, unless symbolically:
    the result would be a constant. ``running`` says whether the computation is not one of the trace."""

    def __init__(self, model: nn.Module, running: Callable[[], bool]) -> None:
        super().__init__()
        self._running = running
        self._ids = set(map(id, model.parameters()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of ``func``, if it does not depend on the values of a listed tensor."""
        del types
        result = func(*args, **(kwargs or {}))
        if self._running():
            return result
        given = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, fx.Proxy) for leaf in given) or not any(id(leaf) in self._ids for leaf in given):
            return result
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name.startswith("new_") or name.endswith("_like") or name in _PROPERTIES:
            return result
        if name in _READ_OUT or any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            raise fx.proxy.TraceError("forward computes with parameters that it lists")
        return result
