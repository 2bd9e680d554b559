"""Checks for parameters whose memory a plan could not divide."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from torch import Tensor, nn

from asa.errors import UsageError
from asa.executor.model.parameter_hooks import replaced
from asa.ir.plan import Plan
from asa.tracing import TracedModel


def in_one_memory(parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[str, str] | None:
    """Names of two parameters that overlap in memory, so that an update of one changes the other; None if there are
    none."""
    by_id = {id(p): (name, p) for name, p in parameters if p.numel() and not p.is_meta and type(p) is nn.Parameter}
    spans = sorted((*span(p), name) for name, p in by_id.values())
    return next(((a, b) for (_, end, a), (start, _, b) in pairwise(spans) if start < end), None)


def span(p: Tensor) -> tuple[int, int]:
    """The addresses at which the memory of ``p``, which has elements, begins and ends."""
    last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
    return p.data_ptr(), p.data_ptr() + (last + 1) * p.element_size()


def check_memory(plan: Plan, traced: TracedModel) -> None:
    """Check that ``plan`` does not divide memory that cannot be divided.

    Raises:
        UsageError: it shards a parameter without elements, or holds or updates two parameters in one memory apart.
    """
    named: list[tuple[str, nn.Parameter]] = []
    apart = len(plan.stages) > 1
    for assignment, component in zip(plan.components, traced.components, strict=True):
        named += component.named_parameters()
        divided = assignment.data.degree > 1 and assignment.data.strategy != "replicate"
        apart = apart or replaced(assignment) or divided
        sharded = divided and assignment.data.strategy != "zero1"
        name = next((n for n, p in component.named_parameters() if sharded and not p.numel()), "")
        if name:
            raise UsageError(f"{name} has no elements, and torch cannot shard it: plan with strategies=('ddp',)")
    if apart and (both := in_one_memory(named)):
        raise UsageError(
            f"{both[0]} and {both[1]} are two parameters in one memory, which ranks cannot hold in parts or update on "
            "different ranks: make them one nn.Parameter, or plan with strategies=('ddp',)"
        )
