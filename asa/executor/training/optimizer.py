"""Optimizers over the parameters that a rank holds, and the learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it when it is made: here, once, and not in each forked rank
from torch import nn
from torch.distributed.tensor import DTensor

from asa.errors import InvalidInputError, UsageError
from asa.executor.model.offload import HostCopies, attach
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.state import local_tensors
from asa.executor.training.settings import LEARNING_RATE, WEIGHT_DECAY
from asa.ir.optimizers import OPTIMIZERS, check_optimizer
from asa.sharding.parts import step_over_parts
from asa.zoo.foreign import accepted, at_home, factory, first_line


def build_optimizer(
    name: str,
    parameters: Sequence[nn.Parameter],
    *,
    lr: float | None = None,
    momentum: float = 0.9,
    weight_decay: float | None = None,
    offloaded: Collection[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """Make an optimizer over ``parameters``. ``name`` is ``sgd`` (with momentum), ``adamw``, the lower-case name of
    another class of ``torch.optim``, or ``package.module:factory``, which is called. None selects the optimizer's usual
    value.

    The optimizer has one group for all parameters on the device, and one for those that are ``offloaded``, whose update
    is on the host. A rank may have no parameters; its optimizer then steps over an empty tensor.

    Raises:
        UsageError: there is no such optimizer.
        InvalidInputError: the factory fails, or returns no torch optimizer.
    """
    trained = [p for p in parameters if p.requires_grad]
    on_host = [p for p in trained if p in offloaded]
    on_device = [p for p in trained if p not in offloaded] or [nn.Parameter(torch.empty(0))]
    # One fused kernel updates everything and allocates nothing; torch has none for complex numbers.
    fused = {"fused": all(p.is_floating_point() for p in trained)} if name in LEARNING_RATE else {}
    groups: list[dict[str, Any]] = [{"params": on_device, **fused}]
    copies = HostCopies(on_host)
    if on_host:
        groups.append({"params": list(copies.of.values()), **fused})
    optimizer = _make(name, groups, lr=lr, momentum=momentum, weight_decay=weight_decay)
    if on_host:
        attach(optimizer, copies)
    if any(isinstance(p, DTensor) for p in on_device):
        step_over_parts(optimizer)
    return optimizer


def _make(
    name: str, groups: list[dict[str, Any]], *, momentum: float, **settings: float | None
) -> torch.optim.Optimizer:
    options = {key: value for key, value in settings.items() if value is not None}
    if name == "sgd":
        usual = {"lr": LEARNING_RATE["sgd"], "weight_decay": WEIGHT_DECAY["sgd"], "momentum": momentum}
        return torch.optim.SGD(groups, **usual | options)  # type: ignore[arg-type]
    if name == "adamw":
        usual = {"lr": LEARNING_RATE["adamw"], "weight_decay": WEIGHT_DECAY["adamw"]}
        return torch.optim.AdamW(groups, **usual | options)  # type: ignore[arg-type]
    if ":" not in name:
        return getattr(torch.optim, OPTIMIZERS[check_optimizer(name)])(groups, **options)  # type: ignore[no-any-return]
    with at_home():
        make = factory(name, "optimizer")
        try:
            result = make([p for group in groups for p in group["params"]], **accepted(make, options))
        except (Exception, SystemExit) as error:
            raise InvalidInputError(f"optimizer {name!r} failed with {first_line(error)}") from None
    if not isinstance(result, torch.optim.Optimizer):
        raise InvalidInputError(f"optimizer {name!r}: the factory returned a {type(result).__name__}, no optimizer")
    return result


def updates_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is known to update a shard of a parameter as it would update that part of the whole."""
    kind = type(optimizer)
    return kind.__name__ in OPTIMIZERS.values() and kind.__module__.startswith("torch.optim")


def cut_parameters(model: ParallelModel) -> Iterator[str]:
    """Names of parameters of which this rank updates only a shard."""
    for item in local_tensors(model):
        cut = isinstance(item.tensor, DTensor) or (item.shard is not None and item.axis.size > 1)
        if cut and isinstance(item.tensor, nn.Parameter):
            yield item.name


def doubt_about_parts(optimizer: torch.optim.Optimizer, name: str, remedy: str) -> str:
    """Warning for an ``optimizer`` that updates a shard of parameter ``name``. ``remedy`` says how to keep the
    parameter whole.

    Raises:
        UsageError: an optimizer of torch.optim that is known to use all elements of a parameter together.
    """
    kind = type(optimizer)
    why = f"the plan cuts parameters ({name}), of which a rank updates a part"
    if kind.__module__.startswith("torch.optim"):
        raise UsageError(f"{kind.__name__} uses all elements of a parameter together, and {why}; {remedy}")
    return f"{why}: correct only if {kind.__name__} updates element by element; otherwise {remedy}"


def try_out(name: str) -> None:
    """Check that the optimizer ``name`` can be made and takes a step.

    Raises:
        UsageError: the name has a wrong form.
        InvalidInputError: the optimizer fails.
    """
    p = nn.Parameter(torch.zeros(2, 2))
    optimizer = build_optimizer(name, [p])
    p.grad = torch.ones_like(p)
    try:
        optimizer.step()
    except Exception as error:
        raise InvalidInputError(f"optimizer {name!r}: a step failed with {first_line(error)}") from None


def cosine(progress: float) -> float:
    """Half a cosine, from 1 at ``progress`` = 0 to 0 at ``progress`` = 1 (Loshchilov & Hutter 2017)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def learning_rate(
    progress: float, peak: float, *, warmup: float, step: float, schedule: Callable[[float], float] = cosine
) -> float:
    """Learning rate of the step that begins after the fraction ``progress`` of the run, 0 to 1.

    It rises linearly to ``peak`` over the fraction ``warmup``, and then follows ``schedule`` over the rest of the run.
    ``step`` is the progress of one step. The rate is that at the end of the step, so that no step has a rate of 0.

    >>> [learning_rate(p / 10, 1.0, warmup=0.2, step=0.1) for p in (0, 1, 2, 6)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if progress < warmup:
        return peak * min(1.0, (progress + step) / warmup)
    return peak * schedule((progress - warmup) / (1 - warmup))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set ``rate`` as the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
