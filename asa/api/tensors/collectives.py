"""A program's own ``torch.distributed`` collectives, on sharded tensors, and beside those of this package.

A program was written for whole tensors. All ranks would have the same one there, so the result is known without
communication. Any other collective counts as a pass that ranks share: another rank may wait in one that the program
does not see, such as a read of values that ranks hold in parts.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from asa.api.patching import replace_once
from asa.api.rank_context import current_votes
from asa.errors import UsageError
from asa.executor.model.parallel import ParallelModel
from asa.sharding.collectives.reads import OF_PROGRAM, reading
from asa.sharding.split import TensorPart
from asa.sharding.split.local_parts import local, stepping
from asa.sharding.split.of_rank import operands

_SAME = (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
_ON_TENSORS = ("all_reduce", "broadcast")
_COLLECTIVES = (
    *_ON_TENSORS, "barrier", "reduce", "gather", "scatter", "all_gather", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_gather_object", "gather_object",
    "broadcast_object_list", "scatter_object_list",
)  # fmt: skip


class _CompletedWork:
    """Handle of a completed collective."""

    def wait(self, *_: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return True


def understood_by_torch() -> None:
    """Patch the collectives. ``all_reduce`` and ``broadcast`` of a shard have the same effect as of a whole tensor that
    is equal on all ranks. Operations that torch does not support for shards raise a UsageError."""
    for name in _COLLECTIVES:
        replace_once(dist, name, _of_program)
    replace_once(ShardingPropagator, "propagate_op_sharding_non_cached", _with_remedy)


def _of_program(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    name: str = original.__name__

    @wraps(original)
    def collective(*args: Any, **options: Any) -> Any:
        first = args[0] if args else options.get("tensor")
        if name in _ON_TENSORS and isinstance(first, TensorPart | DTensor):
            return _on_whole_tensors(name, **signature.bind(*args, **options).arguments)
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] in ("asa", "torch"):
            return original(*args, **options)
        if (optimizer := stepping()) is not None:
            raise UsageError(
                f"{type(optimizer).__name__}.step() calls torch.distributed.{name}, and the plan has a rank update "
                'only a part of the parameters, another than other ranks do: plan="auto" and strategies=("ddp",) have '
                "every rank update all"
            )
        group = signature.bind(*args, **options).arguments.get("group")
        if group is not None and group is not dist.group.WORLD:  # of some ranks, perhaps
            return original(*args, **options)
        with reading(f"{OF_PROGRAM}{name}"):
            return original(*args, **options)

    return collective


def _on_whole_tensors(
    name: str, tensor: Tensor, *, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False, **_: Any
) -> _CompletedWork | None:
    if group is None or group is dist.group.WORLD:
        with reading(f"{OF_PROGRAM}{name}"):
            written = {each[0] for each in current_votes().gather([float(operands.written)])}
        if len(written) > 1:
            raise UsageError(
                f"torch.distributed.{name} of a tensor that ranks hold in parts, behind changes of such tensors that "
                "not all ranks made (each updates parameters of its own, and sends them): a rank changes its part "
                "only; change them on every rank, or plan with strategies=('ddp',)"
            )
    if name == "all_reduce" and op not in _SAME:
        if op != dist.ReduceOp.SUM:
            raise UsageError(
                f"all_reduce with {op} of a tensor that ranks hold in shards; sums, means and extremes are to be "
                "had, or plan with strategies=('ddp',)"
            )
        with torch.no_grad():
            local(tensor).mul_(dist.get_world_size(group))
    return _CompletedWork() if async_op else None


@torch.no_grad()
def over_processes(model: ParallelModel, values: Tensor, op: Any) -> Tensor:
    """``values`` of all processes, combined by ``op`` (collective): in a group of the plan, if there is one, which the
    program has no messages in."""
    group = model.host_group
    wire = values.to(model.device if group is None else "cpu", copy=True)
    with reading():
        dist.all_reduce(wire, op, group)
    return wire.to(values.device)


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
