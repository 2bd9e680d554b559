"""``torch.amp.GradScaler`` on a model that ranks hold in parts: all gradients are unscaled, and all ranks skip a step
or none does. A scaler of one rank looks at what its own optimizer updates, and decides by that alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from asa.executor.parallel import ParallelModel

_known: WeakKeyDictionary[Optimizer, tuple[ParallelModel, list[nn.Parameter]]] = WeakKeyDictionary()
"""Optimizers over parts of a model, with the parameters that other ranks update."""


def understood_by_scalers(optimizer: Optimizer, model: ParallelModel, others: list[nn.Parameter]) -> None:
    """Have scalers take ``optimizer`` for one of all ranks. ``others``: parameters here that another rank updates."""
    _known.pop(optimizer, None)
    if all(a.data.strategy == "replicate" and a.tensor.degree == 1 for a in model.plan.components):
        return  # every rank has all gradients, and finds the same
    _known[optimizer] = (model, others)
    theirs = GradScaler._unscale_grads_
    if not hasattr(theirs, "asa"):
        GradScaler._unscale_grads_ = _unscaled(theirs)  # type: ignore[method-assign]


def _unscaled(theirs: Callable[..., dict[torch.device, Tensor]]) -> Callable[..., dict[torch.device, Tensor]]:
    def unscale(
        scaler: GradScaler, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = theirs(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        if optimizer not in _known:
            return found
        model, others = _known[optimizer]
        rest: Any = SimpleNamespace(param_groups=[{"params": others}])
        more = theirs(scaler, rest, inv_scale, torch.zeros_like(found_inf), allow_fp16)
        worst = torch.zeros(1, dtype=torch.float32, device=model.device)
        for value in (*found.values(), *more.values()):
            worst = torch.maximum(worst, value.detach().view(1).to(worst))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return {model.device: worst.view(())}

    unscale.asa = True  # type: ignore[attr-defined]
    return unscale
