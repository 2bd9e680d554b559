"""``torch.distributed`` collectives on sharded tensors, in programs that were written for whole tensors. All ranks
would have the same whole tensor there, so the result is known without communication."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from asa.api.patching import replace_once
from asa.errors import UsageError
from asa.sharding.split import TensorPart
from asa.sharding.split.local_parts import local

_SAME = (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)


class _CompletedWork:
    """Handle of a completed collective."""

    def wait(self, *_: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return True


def understood_by_torch() -> None:
    """Patch ``all_reduce`` and ``broadcast``: on a shard they have the same effect as on a whole tensor that is equal
    on all ranks. Operations that torch does not support for shards raise a UsageError."""
    for name in ("all_reduce", "broadcast"):
        replace_once(dist, name, _on_whole_tensors)
    replace_once(ShardingPropagator, "propagate_op_sharding_non_cached", _with_remedy)


def _on_whole_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def collective(*args: Any, **options: Any) -> Any:
        arguments = signature.bind(*args, **options).arguments
        tensor = arguments.get("tensor")
        if not isinstance(tensor, TensorPart | DTensor):
            return original(*args, **options)
        op = arguments.get("op", dist.ReduceOp.SUM)
        if original.__name__ == "all_reduce" and op not in _SAME:
            if op != dist.ReduceOp.SUM:
                raise UsageError(
                    f"all_reduce with {op} of a tensor that ranks hold in shards; sums, means and extremes are to be "
                    "had, or plan with strategies=('ddp',)"
                )
            with torch.no_grad():
                local(tensor).mul_(dist.get_world_size(arguments.get("group")))
        return _CompletedWork() if arguments.get("async_op") else None

    return collective


def _with_remedy(rule: Callable[..., Any]) -> Callable[..., Any]:
    def propagate(self: Any, schema: Any) -> Any:
        try:
            return rule(self, schema)
        except NotImplementedError as error:
            raise UsageError(
                f"torch cannot do {schema.op} with a tensor that ranks hold in shards: take p.full_tensor(), or "
                "model.state_dict(), or plan with strategies=('ddp',)"
            ) from error

    return propagate
