"""``torch.amp.GradScaler`` on a model that ranks hold in shards: all ranks skip a step or none does. The scaler alone
would decide on each rank by that rank's gradients."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from asa.api.patching import replace_once
from asa.api.tensors.collectives import over_processes
from asa.executor.model.parallel import ParallelModel

_sharded: WeakKeyDictionary[Optimizer, ParallelModel] = WeakKeyDictionary()
"""Optimizers over shards of a model."""


def understood_by_scalers(optimizer: Optimizer, model: ParallelModel) -> None:
    """Let scalers treat ``optimizer`` as one over all ranks."""
    _sharded.pop(optimizer, None)
    if all(a.data.strategy == "replicate" and a.tensor.degree == 1 for a in model.plan.components):
        return  # every rank has all gradients, and finds the same
    _sharded[optimizer] = model
    replace_once(GradScaler, "_unscale_grads_", _unscaled)


def _unscaled(original: Callable[..., dict[torch.device, Tensor]]) -> Callable[..., dict[torch.device, Tensor]]:
    def unscale(
        scaler: GradScaler, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        overflows = original(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        if optimizer not in _sharded:
            return overflows
        model = _sharded[optimizer]
        worst = torch.zeros(1, dtype=torch.float32, device=model.device)
        for value in overflows.values():
            worst = torch.maximum(worst, value.detach().view(1).to(worst))
        return {model.device: over_processes(model, worst, dist.ReduceOp.MAX).view(())}

    return unscale
