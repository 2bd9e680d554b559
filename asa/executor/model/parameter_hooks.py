"""Checks for a user's hooks on parameters. A plan that replaces parameters by other tensors would lose hooks without a
message, so it is refused."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor

from asa.errors import UsageError
from asa.ir.plan import Assignment, Plan
from asa.tracing import TracedModel


def hooked(p: nn.Parameter) -> bool:
    """Whether ``p`` has a hook that sees or changes its gradient before the optimizer does."""
    return bool(p._backward_hooks) or bool(getattr(p, "_post_accumulate_grad_hooks", None))


def check_hooks(plan: Plan, traced: TracedModel) -> None:
    """Check that hooks on parameters have the same effect under ``plan`` as on one device.

    Raises:
        UsageError: they do not.
    """
    for assignment, component in zip(plan.components, traced.components, strict=True):
        for name, p in component.named_parameters():
            if getattr(p, "_post_accumulate_grad_hooks", None) and assignment.data.degree > 1:
                raise UsageError(
                    f"{name} has a hook that runs when its gradient has been accumulated, before the ranks' gradients "
                    "are averaged; do the same after loss.backward()"
                )
            if p._backward_hooks and replaced(assignment):
                raise UsageError(
                    f"{name} has a hook on its gradient, and {assignment.name} would hold parts of it; change p.grad "
                    "after loss.backward() instead, or plan with strategies=('ddp',)"
                )


def replaced(assignment: Assignment) -> bool:
    """Whether ``assignment`` replaces the component's parameters by shards of them."""
    return assignment.tensor.degree > 1 or (
        assignment.data.degree > 1 and assignment.data.strategy not in ("replicate", "zero1")
    )


def refuse_hooks(parameters: list[nn.Parameter]) -> None:
    """Make sharded parameters refuse hooks on their gradient, because autograd never calls them there."""
    for p in parameters:
        if isinstance(p, DTensor):
            p.register_hook = _refused  # type: ignore[method-assign]


def _refused(*_: Any) -> NoReturn:
    raise UsageError(
        "the gradient of a sharded parameter is not autograd's, and a hook on it would never run; change p.grad after "
        "loss.backward() instead, or plan with strategies=('ddp',)"
    )
