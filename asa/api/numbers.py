"""Numbers out of sharded tensors (``g.norm().item()``): torch gives each rank that of its own shard, without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

_LEAVE = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__")


def numbers_of_wholes(parameters: Iterable[Tensor]) -> None:
    """Where any of ``parameters`` is sharded, have what leaves sharded tensors be that of the whole (collective)."""
    if "item" in DTensor.__dict__ or not any(isinstance(p, DTensor) for p in parameters):
        return
    for name in _LEAVE:
        setattr(DTensor, name, _whole(getattr(Tensor, name)))


def _whole(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def whole(tensor: DTensor, *args: Any, **options: Any) -> Any:
        return theirs(tensor.full_tensor(), *args, **options)

    return whole
