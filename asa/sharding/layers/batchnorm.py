"""BatchNorm over all ranks that share a microbatch, on any device (``torch.nn.SyncBatchNorm`` runs on GPUs only).

Statistics are those of the whole microbatch, so training equals that on one device with the same microbatch, up to
rounding. Mean and centred sum of squares are reduced in two rounds, because the one-pass formula loses digits, as
equivalence tests in float64 show.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from asa.sharding.collectives import direct
from asa.sharding.collectives.axis import Axis
from asa.sharding.stock import stock
from asa.tracing.component import TracedComponent


def _channel_sum(x: Tensor) -> Tensor:
    # In float64, as the stock kernel accumulates on CPUs: a deep network amplifies rounding errors made here.
    return x.sum(dim=[d for d in range(x.dim()) if d != 1], dtype=torch.float64)


def _view(v: Tensor, x: Tensor) -> Tensor:
    return v.view(1, -1, *(1,) * (x.dim() - 2))


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    # A new tensor in any case: backward reads y, and an activation behind the layer may work in place.
    if weight is not None:
        y = y * _view(weight, y)
    if bias is not None:
        return y + _view(bias, y)
    return y.clone() if weight is None else y


_COUNTED = [1.0]
"""1 if this rank's samples are part of the batch; 0 if they belong to another rank and are computed here only so that
this rank takes part in all collectives."""


def counted(is_own: bool) -> None:
    """Set whether this rank's samples belong to the batch, from the next forward on. Statistics are over the samples
    that do. If a batch has fewer samples than there are ranks, some samples are on two ranks."""
    _COUNTED[0] = float(is_own)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.part = part = _COUNTED[0]
        count = torch.tensor([x.numel() / x.shape[1]], dtype=torch.float64, device=x.device)
        first = torch.cat([_channel_sum(x), count]) * part
        direct.all_reduce(first, group=axis.group)
        count = first[-1:]
        mean = first[:-1] / count
        centred = x - _view(mean.to(x.dtype), x)
        squares = _channel_sum(centred * centred) * part
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
        sums = torch.stack([_channel_sum(gradient), _channel_sum(gradient * y)]) * ctx.part
        direct.all_reduce(sums, group=ctx.axis.group)
        mean_gradient, mean_product = (sums / count).to(gradient.dtype)
        corrected = gradient - _view(mean_gradient, y) - y * _view(mean_product, y)
        return corrected * _view(inverse, y) * ctx.part, None, None


class SynchronisedBatchNorm(nn.Module):
    """A BatchNorm layer over the microbatch of all ranks of ``axis``, with the same parameters and buffers."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, source: _BatchNorm, axis: Axis) -> None:
        super().__init__()
        self.axis, self.eps, self.momentum = axis, source.eps, source.momentum
        self.num_features, self.affine, self.track_running_stats = (
            source.num_features, source.affine, source.track_running_stats,
        )  # fmt: skip
        self.__dict__["_source"] = type(source)
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(source, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(source, name))
        shards = getattr(source, "asa_shards", None)
        if shards is not None:
            self.asa_shards = shards
        self.train(source.training)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Class of the layer that it replaces, because programs look for BatchNorm layers by ``isinstance``, to freeze
        them."""
        source: type = self.__dict__.get("_source", type(self))
        return source

    def reset_running_stats(self) -> None:
        """Set running statistics to those of a new layer, as ``torch.optim.swa_utils.update_bn`` does first."""
        _BatchNorm.reset_running_stats(self)  # type: ignore[arg-type]

    def reset_parameters(self) -> None:
        """Set everything to what a new layer has."""
        _BatchNorm.reset_parameters(self)  # type: ignore[arg-type]

    @property
    def meets(self) -> bool:
        """Whether ranks exchange statistics in the next forward: they do unless it uses running statistics."""
        return self.training or self.running_mean is None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` [samples, channels, ...]."""
        if not self.meets:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        # All ranks scale gradients by the same data degree, and backward is linear, so no correction is needed.
        y, mean, variance, count = _Normalise.apply(x, self.axis, self.eps)
        if self.training:
            self._track(mean, variance * (count / (count - 1)))
        return _scaled(y, self.weight, self.bias)

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return  # no running statistics, or a recomputation
        self.num_batches_tracked += 1
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _Meeting(TorchFunctionMode):
    """Context in which ``torch.nn.functional.batch_norm`` normalizes over the microbatch of all ranks of ``axis``,
    whether a subclass of BatchNorm or the model's own code calls it."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self._axis = axis
        self.met = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        return self._batch_norm(*args, **(kwargs or {}))

    def _batch_norm(
        self, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        if not training:
            return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        self.met = True
        y, mean, variance, count = _Normalise.apply(x, self._axis, eps)
        with torch.no_grad():
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            if running_var is not None:
                running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
        return _scaled(y, weight, bias)


class _Within:
    """Replaces a component's ``forward``; inside it, BatchNorm is over all ranks."""

    def __init__(self, component: TracedComponent, axis: Axis) -> None:
        self._run = component.__dict__.get("forward", partial(TracedComponent.forward, component))
        self._axis, self.met = axis, False

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        with _Meeting(self._axis) as meeting:
            outputs: tuple[Tensor, ...] = self._run(x)
        self.met = self.met or meeting.met
        return outputs


class SyncBatchNorm(_BatchNorm):
    """BatchNorm of inputs with any number of dimensions. It replaces ``torch.nn.SyncBatchNorm`` and has the same name,
    so that plans are valid for both."""

    __module__ = nn.SyncBatchNorm.__module__

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def without_torch_groups(model: nn.Module) -> bool:
    """Convert every ``torch.nn.SyncBatchNorm`` over all ranks in ``model`` to this module's :class:`SyncBatchNorm`;
    returns whether there was one. Torch's class runs on GPUs only, and chooses its ranks itself."""
    layers = [m for m in model.modules() if type(m) is nn.SyncBatchNorm and m.process_group is None]
    for module in layers:
        module.__class__ = SyncBatchNorm  # type: ignore[assignment]
    return bool(layers)


def synchronise(component: TracedComponent, axis: Axis) -> None:
    """Make every BatchNorm of ``component`` normalize over the ranks of ``axis``; does nothing on an axis of one rank.

    Torch's own layers are replaced by their synchronized form. Where other code may call ``batch_norm`` (a subclass, a
    layer of the user's own, the model's forward), the function is replaced.
    """
    if axis.size == 1:
        return
    for parent in list(component.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm) and stock(child):
                setattr(parent, name, SynchronisedBatchNorm(child, axis))
    if _calls(component):
        component.forward = _Within(component, axis)  # type: ignore[assignment]


def synchronised(component: TracedComponent, *, perhaps: bool = False) -> bool:
    """Whether ranks exchange statistics in a BatchNorm of ``component`` in its present mode, in backward too.

    For code that is not torch's own, this is known only after its first forward. With ``perhaps``: whether they may do
    so, in any mode.
    """
    run = component.__dict__.get("forward")
    within = isinstance(run, _Within) and (perhaps or run.met)
    return within or any(type(m) is SynchronisedBatchNorm and (perhaps or m.meets) for m in component.modules())


def _calls(component: TracedComponent) -> bool:
    """Whether code that is not torch's may call ``batch_norm``."""
    functions = {getattr(n.target, "__name__", "") for n in component.train_graph.graph.nodes}
    children = (m for m in component.modules() if m is not component)
    return "batch_norm" in functions or any(not type(m).__module__.startswith(("torch.nn.", "asa.")) for m in children)
