"""A model of shapes alone: built on the meta device, which allocates no weight and draws none."""

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
"""What gives a tensor values and nothing else."""


class _NoValues(TorchFunctionMode):
    """Leaves tensors on meta as they are where they would be filled; their shapes cost torch milliseconds each."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _FILLING and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return args[0]
        return func(*args, **kwargs or {})


@contextmanager
def without_values() -> Iterator[None]:
    """A context in which tensors are made on the meta device, and filling them does nothing."""
    with torch.device("meta"), _NoValues():
        yield


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """What ``make`` builds, on the meta device. Where its constructor asks for values (the rates of stochastic depth
    drawn up as a tensor, say), it is built as ever and then stripped of them."""
    try:
        with without_values():
            return make()
    except Exception:  # whatever a constructor may raise when it finds no values
        return make().to("meta")
