"""Numbers from sharded tensors (``g.norm().item()``), for which torch silently returns each rank's own shard's
value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

_LEAVE = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__")


def numbers_of_wholes(parameters: Iterable[Tensor]) -> None:
    """If any of ``parameters`` is sharded, let numbers taken from sharded tensors be those of the whole
    (collective)."""
    if "item" in DTensor.__dict__ or not any(isinstance(p, DTensor) for p in parameters):
        return
    for name in _LEAVE:
        setattr(DTensor, name, _whole(getattr(Tensor, name)))


def _whole(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def whole(tensor: DTensor, *args: Any, **options: Any) -> Any:
        return theirs(tensor.full_tensor(), *args, **options)

    return whole
