"""Training programs of the kinds people write, small enough to run by the dozen: what ``benchmarks/programs.py`` runs.

A program makes its model, optimizer and loader, and trains in a loop of its own; nothing in it knows of ``asa`` but
where a loss asks for the rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Made = tuple[nn.Module, Any, Any]
"""Model, optimizer, loader."""
Loss = Callable[[Any, Any], Tensor]
"""From a model and a batch to a loss."""
PLANS = ("ddp", "fsdp", "tensor", "mixed", "zero1")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training program. ``job_loss``: of outputs and labels, where it can be an ``asa.Job``; ``options``: further
    arguments of ``asa.parallelize``."""

    name: str
    kind: str
    make: Callable[[], Made]
    loop: Callable[[Any, Any, Any], Any]
    job_loss: Callable[[Any, Any], Tensor] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    within: float = 1e-8


PROGRAMS: dict[str, Program] = {}


def program(
    kind: str, name: str, make: Callable[[], Made], loop: Callable[[Any, Any, Any], Any],
    job_loss: Callable[[Any, Any], Tensor] | None = None, within: float = 1e-8, **options: Any,
) -> None:  # fmt: skip
    """Add a program to the table."""
    if name in PROGRAMS:
        raise ValueError(f"two programs are called {name}")
    PROGRAMS[name] = Program(
        name=name, kind=kind, make=make, loop=loop, job_loss=job_loss, options=options, within=within
    )


def epochs(loss: Loss, count: int = 2, after: Callable[[Any], object] = id) -> Callable[..., None]:
    """The usual loop; ``after`` is called between backward and the step."""

    def loop(net: Any, opt: Any, batches: Any) -> None:
        for _ in range(count):
            for batch in batches:
                opt.zero_grad()
                loss(net, batch).backward()
                after(net)
                opt.step()

    return loop


def pairs(loss: Callable[[Any, Any], Tensor]) -> Loss:
    """The loss of batches ``(x, y)``."""
    return lambda net, batch: loss(net(batch[0]), batch[1])


def sgd(net: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay, to which no gradient and a gradient of zero are not the same."""
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=0.01)


def loader(*tensors: Tensor, batch: int = 6, **options: Any) -> DataLoader[Any]:
    """Tuples of rows of ``tensors``, in batches."""
    return DataLoader(TensorDataset(*tensors), batch, **options)


def normal(*shape: int) -> Tensor:
    """Normal numbers, float64."""
    return torch.randn(*shape, dtype=torch.float64)


def made(net: nn.Module, *tensors: Tensor, batch: int = 6, lr: float = 0.05, **options: Any) -> Made:
    """A float64 model with SGD and a loader over ``tensors``."""
    net = net.double()
    return net, sgd(net, lr), loader(*tensors, batch=batch, **options)


def table() -> dict[str, Program]:
    """All programs by name; those of libraries that are not installed are left out."""
    from benchmarks.program_table import (  # noqa: F401
        adversary,
        batches,
        composed,
        copies,
        everyday,
        fetched,
        frameworks,
        fresh,
        further,
        habits,
        held,
        library,
        loops,
        losses,
        methods,
        networks,
        outside,
        public,
        published,
        recipes,
        scripts,
        strange,
        studied,
        surroundings,
        trainers,
        unseen,
        varied,
        weights,
    )

    return PROGRAMS
