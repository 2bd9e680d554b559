"""Names of optimizers, and how the planner treats each."""

from __future__ import annotations

from asa.errors import UsageError
from asa.ir.plan import OptimizerName

OPTIMIZERS = {
    kind.lower(): kind
    for kind in (
        "SGD", "AdamW", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop",
    )
}  # fmt: skip
"""Classes of ``torch.optim`` by their name on the command line. All of them update element by element, so shards may be
updated separately."""
_ONE_WORD = {"sgd", "adagrad", "rmsprop"}


def planned_as(optimizer: str) -> OptimizerName:
    """The optimizer that the planner assumes, because it needs the same memory: ``sgd`` for one word of state per
    parameter, ``adamw`` for two. ``optimizer`` is a class name."""
    return "sgd" if optimizer.lower() in _ONE_WORD else "adamw"


def check_optimizer(name: str) -> str:
    """Return ``name`` if it is a valid name of an optimizer.

    Raises:
        UsageError: it is not.
    """
    if ":" not in name and name not in OPTIMIZERS:
        raise UsageError(
            f"no optimizer is called {name!r}; there are {', '.join(OPTIMIZERS)} and package.module:factory"
        )
    return name
