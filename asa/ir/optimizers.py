"""Optimizers by name: which there are, and what the planner takes each for."""

from __future__ import annotations

from asa.errors import UsageError
from asa.ir.plan import OptimizerName

OPTIMIZERS = {
    kind.lower(): kind
    for kind in (
        "SGD", "AdamW", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop",
    )
}  # fmt: skip
"""Classes of ``torch.optim`` by the name they are asked for. All update element by element: shards add up to wholes."""
_ONE_WORD = {"sgd", "adagrad", "rmsprop"}


def planned_as(optimizer: str) -> OptimizerName:
    """What the planner takes an optimizer for, by the name of its class: its state is one word a parameter, or two."""
    return "sgd" if optimizer.lower() in _ONE_WORD else "adamw"


def check_optimizer(name: str) -> str:
    """``name``, if it has the form of an optimizer's.

    Raises:
        UsageError: it has not.
    """
    if ":" not in name and name not in OPTIMIZERS:
        raise UsageError(
            f"no optimizer is called {name!r}; there are {', '.join(OPTIMIZERS)} and package.module:factory"
        )
    return name
