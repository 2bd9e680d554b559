"""Builds a model without values on the meta device, where no weights are allocated or initialized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_FILLING = frozenset({
    "normal_", "uniform_", "trunc_normal_", "zero_", "fill_", "mul_", "add_", "clamp_", "erfinv_", "bernoulli_",
    "exponential_", "copy_",
})  # fmt: skip
"""Functions that only give values to a tensor."""


class _NoValues(TorchFunctionMode):
    """Context in which filling tensors on meta is skipped, because torch takes milliseconds for each, even without
    values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _FILLING and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return args[0]
        return func(*args, **kwargs or {})


@contextmanager
def without_values() -> Iterator[None]:
    """Context in which tensors are made on the meta device, and filling them does nothing."""
    with torch.device("meta"), _NoValues():
        yield


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """The model from ``make`` on the meta device. If its constructor needs values (for instance, rates of stochastic
    depth computed as a tensor), it is built normally and then moved to meta."""
    try:
        with without_values():
            return make()
    except Exception:  # a constructor may raise anything on meta tensors
        return make().to("meta")
