"""Patches for sharded tensors. Numbers from them (``g.norm().item()``) are those of the whole tensor, where torch
silently returns the value of the rank's shard. Random numbers are drawn as for whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

_READING = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__")


def patch_sharded_tensors(parameters: Iterable[Tensor]) -> None:
    """Apply these patches if any of ``parameters`` is sharded. Numbers of sharded tensors are then collective."""
    if "item" in DTensor.__dict__ or not any(isinstance(p, DTensor) for p in parameters):
        return
    for name in _READING:
        setattr(DTensor, name, _read_in_full(getattr(Tensor, name)))
    for name in _DRAWING:
        setattr(DTensor, name, _drawn_in_full(getattr(Tensor, name)))


_DRAWING = ("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_", "geometric_")


def _drawn_in_full(original: Callable[..., Any]) -> Callable[..., Any]:
    def draw(tensor: DTensor, *args: Any, **options: Any) -> DTensor:
        with torch.no_grad():  # every rank draws the whole tensor and keeps its part, so equal seeds give equal tensors
            full = original(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *args, **options)
            part = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(part)
        return tensor

    return draw


def _read_in_full(original: Callable[..., Any]) -> Callable[..., Any]:
    def read(tensor: DTensor, *args: Any, **options: Any) -> Any:
        return original(tensor.full_tensor(), *args, **options)

    return read
