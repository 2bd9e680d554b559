"""Outputs of a distributed model for autograd: weighted by samples, with errors for what is not possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asa.api.tensors.numbers import BY_BACKWARD
from asa.errors import UsageError
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.parameter_hooks import replaced
from asa.sharding.layers.batchnorm import synchronised


class Demands:
    """Checks that a backward pass through a model needs no unsupported gradient."""

    def __init__(self, model: ParallelModel) -> None:
        exchanged = any(layout.data != model.plan.num_ranks for layout in model.layouts)
        self._divided = any(replaced(a) for a in model.plan.components) or exchanged
        self._every_component = model.components
        wide = any(a.data.degree > 1 for a in model.plan.components)
        self._components = model.components if wide else []

    def check(self, weight: float) -> None:
        """Called with a gradient of an output, which is multiplied by ``weight`` on the way.

        Raises:
            UsageError: gradients of gradients are requested while ranks hold shards, or gradients that are not sums.
        """
        if torch.is_grad_enabled():  # a second derivative is neither weighted nor summed over ranks
            if self._divided:
                raise UsageError(
                    "a gradient of a gradient (create_graph=True) does not cross ranks that hold parts of a model; "
                    "plan with strategies=('ddp',)"
                )
            if any(map(synchronised, self._every_component)):
                raise UsageError(
                    "a gradient of a gradient (create_graph=True) does not cross a BatchNorm over all ranks; leave out "
                    "batch_norm='exact', or use a norm of single samples (GroupNorm, LayerNorm)"
                )
            if weight != 1:
                raise UsageError(
                    "a gradient of a gradient (create_graph=True) is wanted of one of several calls of the model that "
                    "go into one backward with unlike numbers of samples; call backward for each"
                )
        p = next((p for c in self._components for p in c.parameters() if p.requires_grad), None)
        ask = getattr(torch._C, "_will_engine_execute_node", None)
        if (
            p is None or ask is None or isinstance(p, DTensor)
        ):  # a shard is not in the graph: torch raises its own error
            return
        with torch.enable_grad():
            node: Any = p.view_as(p).grad_fn
        try:
            if node is None:  # inside a transform of torch.func, which differentiates by other tensors
                raise RuntimeError("autograd.grad")
            ask(node.next_functions[0][0])
        except RuntimeError as error:
            if "autograd.grad" in str(error):
                raise UsageError(BY_BACKWARD) from None


class _Weighed(torch.autograd.Function):
    """Copies the value (a program may change its outputs in place, which autograd forbids for views made inside a
    function); its gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def _weighed(x: Tensor, factor: float) -> Tensor:
    return _Weighed.apply(x, factor)  # type: ignore[no-any-return]


def leaving(x: Tensor, weight: float, demands: Demands) -> Tensor:
    """The output ``x``, whose gradient is multiplied by ``weight``; this is 1 unless batches are uneven."""
    if not x.requires_grad:
        return x
    output = x if weight == 1 else _weighed(x, weight)
    if not output.is_leaf:
        with torch._C.DisableTorchFunctionSubclass():  # a tape records hooks, but only those of the program
            output.register_hook(lambda _gradient: demands.check(weight))
    return output


def entering(x: Tensor, weight: float) -> Tensor:
    """The input ``x`` of a model whose output gradients were multiplied by ``weight``. Its gradient is divided by it
    again, because earlier modules (such as another distributed model) apply weights of their own."""
    return _weighed(x, 1 / weight) if x.requires_grad and weight not in (0, 1) else x
