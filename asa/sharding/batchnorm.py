"""BatchNorm over all ranks that share a microbatch, on any device (``torch.nn.SyncBatchNorm`` runs on GPUs only).

Statistics are those of the whole microbatch, so training equals one device's on the same microbatch, to rounding.
Mean and centred sum of squares are reduced in two rounds: the one-pass form loses digits that float64
equivalence tests see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from asa.sharding import direct
from asa.sharding.axis import Axis
from asa.sharding.stock import stock


def _channel_sum(x: Tensor) -> Tensor:
    # In float64, as the stock kernel accumulates on CPUs: what is lost here a deep network amplifies.
    return x.sum(dim=[d for d in range(x.dim()) if d != 1], dtype=torch.float64)


def _view(v: Tensor, x: Tensor) -> Tensor:
    return v.view(1, -1, *(1,) * (x.dim() - 2))


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = torch.tensor([x.numel() / x.shape[1]], dtype=torch.float64, device=x.device)
        first = torch.cat([_channel_sum(x), count])
        direct.all_reduce(first, group=axis.group)
        count = first[-1:]
        mean = first[:-1] / count
        centred = x - _view(mean.to(x.dtype), x)
        squares = _channel_sum(centred * centred)
        direct.all_reduce(squares, group=axis.group)
        variance = squares / count
        inverse = (variance + eps).rsqrt().to(x.dtype)
        y = centred * _view(inverse, x)
        ctx.save_for_backward(y, inverse, count)
        ctx.axis = axis
        ctx.mark_non_differentiable(mean, variance, count)
        return y, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        y, inverse, count = ctx.saved_tensors
        sums = torch.stack([_channel_sum(gradient), _channel_sum(gradient * y)])
        direct.all_reduce(sums, group=ctx.axis.group)
        mean_gradient, mean_product = (sums / count).to(gradient.dtype)
        corrected = gradient - _view(mean_gradient, y) - y * _view(mean_product, y)
        return corrected * _view(inverse, y), None, None


class SynchronisedBatchNorm(nn.Module):
    """A BatchNorm layer whose batch is the microbatch of all ranks of ``axis``; same parameters and buffers."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, source: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, axis: Axis) -> None:
        super().__init__()
        self.axis, self.eps, self.momentum = axis, source.eps, source.momentum
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(source, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(source, name))
        shards = getattr(source, "asa_shards", None)
        if shards is not None:
            self.asa_shards = shards
        self.train(source.training)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [samples, channels, ...]."""
        if not self.training and self.running_mean is not None:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        # Gradients are scaled by the data degree uniformly over the axis, which backward is linear in.
        y, mean, variance, count = _Normalise.apply(x, self.axis, self.eps)
        if self.training:
            self._track(mean, variance * (count / (count - 1)))
        if self.weight is None or self.bias is None:
            return y
        return y * _view(self.weight, x) + _view(self.bias, x)

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return  # never kept, or computed a second time
        self.num_batches_tracked += 1
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def synchronise(module: nn.Module, axis: Axis) -> None:
    """Replace every BatchNorm below ``module`` by its synchronised form on ``axis``; nothing on an axis of one."""
    if axis.size == 1:
        return
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and stock(child):
                setattr(parent, name, SynchronisedBatchNorm(child, axis))
