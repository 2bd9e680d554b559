"""Closures of optimizers that decide by the loss: every rank gets the mean of all ranks' losses, and decides alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asa.api.model.distributed_model import DistributedModel, distributed_models

_followed: list[Any] = []


def follow_closures() -> None:
    """Hand ``LBFGS`` the mean loss of all ranks where it updates a distributed model."""
    if not _followed:
        _followed.append(register_optimizer_step_pre_hook(_with_mean_loss))


def _with_mean_loss(optimizer: Optimizer, args: Any, options: Any) -> Any:
    closure = args[1] if len(args) > 1 else options.get("closure")
    model = _updated_by(optimizer) if isinstance(optimizer, LBFGS) and closure is not None else None
    if model is None:
        return None

    def mean_loss() -> Any:
        loss = closure()
        number = float(loss.detach().as_subclass(Tensor) if isinstance(loss, Tensor) else loss)
        context = model.rank_context
        total = sum(f[0] for f in context.votes.gather([number * model.mean_weight]))
        kind = loss.dtype if isinstance(loss, Tensor) else torch.get_default_dtype()
        return torch.tensor(total / context.ranks, dtype=kind)

    return (args[0], mean_loss, *args[2:]), {k: v for k, v in options.items() if k != "closure"}


def _updated_by(optimizer: Optimizer) -> DistributedModel | None:
    """The distributed model of which ``optimizer`` has parameters."""
    ids = {id(p) for g in optimizer.param_groups for p in g["params"]}
    return next((m for m in distributed_models() if any(id(p) in ids for p in m.parameters())), None)
