"""Optimizers over whatever parameters a rank holds, and the learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it when it is made: here, once, and not in each forked rank
from torch import nn
from torch.distributed.tensor import DTensor

from asa.executor.model.offload import HostCopies, attach
from asa.executor.training.settings import LEARNING_RATE, WEIGHT_DECAY
from asa.ir.plan import OptimizerName
from asa.sharding.parts import step_over_parts


def build_optimizer(
    name: OptimizerName,
    parameters: Sequence[nn.Parameter],
    *,
    lr: float | None = None,
    momentum: float = 0.9,
    weight_decay: float | None = None,
    offloaded: Collection[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """SGD with momentum, or AdamW; both update element by element, so shards add up to wholes.

    One group for all parameters, and one for those that are ``offloaded``: their update is on the host. A rank may hold
    none: its optimizer then steps over an empty tensor.
    """
    rate = LEARNING_RATE[name] if lr is None else lr
    decay = WEIGHT_DECAY[name] if weight_decay is None else weight_decay
    trained = [p for p in parameters if p.requires_grad]
    away = [p for p in trained if p in offloaded]
    held = [p for p in trained if p not in offloaded] or [nn.Parameter(torch.empty(0))]
    # One fused kernel does it all and allocates nothing; torch has none for complex numbers.
    fused = all(p.is_floating_point() for p in trained)
    groups: list[dict[str, Any]] = [{"params": held, "fused": fused}]
    copies = HostCopies(away)
    if away:
        groups.append({"params": list(copies.of.values()), "fused": fused})
    made: torch.optim.Optimizer
    if name == "sgd":
        made = torch.optim.SGD(groups, lr=rate, momentum=momentum, weight_decay=decay)
    else:
        made = torch.optim.AdamW(groups, lr=rate, weight_decay=decay)
    if away:
        attach(made, copies)
    if any(isinstance(p, DTensor) for p in held):
        step_over_parts(made)
    return made


def cosine(done: float) -> float:
    """Half a cosine from 1 to 0 (Loshchilov & Hutter 2017)."""
    return 0.5 * (1 + math.cos(math.pi * done))


def learning_rate(
    progress: float, peak: float, *, warmup: float, step: float, falling: Callable[[float], float] = cosine
) -> float:
    """Learning rate of the step that begins when ``progress`` of the run (0 to 1) lies behind.

    Linear up to ``peak`` over the first ``warmup`` of the run, then ``falling`` of what is behind the warm-up.
    ``step`` is the progress one step makes: the rise ends, rather than begins, with it, so that no step is lost at 0.

    >>> [learning_rate(p / 10, 1.0, warmup=0.2, step=0.1) for p in (0, 1, 2, 6)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if progress < warmup:
        return peak * min(1.0, (progress + step) / warmup)
    return peak * falling((progress - warmup) / (1 - warmup))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """``rate`` for every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
