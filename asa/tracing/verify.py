"""Checks that a chain of components computes what the model computes; run on every trace before it is returned.

Symbolic tracing can go wrong without an error: a random tensor becomes a constant, or a custom backward is lost. So
outputs in both modes, and gradients in training, are compared for the same batch and the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from asa.tracing.preserve import mode, preserved
from asa.tracing.whole import tensors_of

_HEAVY = 2**26
"""Bytes of weights above which gradients are compared for a single sample. Outputs are always compared for the whole
batch."""
_LARGE = 2**20
"""Number of elements above which a parameter's gradient is not compared if its module has a smaller parameter. The
gradient of a large weight may take half a gigabyte, and is determined by the same factors as the gradients of output
and bias."""


def _watched(model: nn.Module) -> list[nn.Parameter]:
    parameters: dict[nn.Parameter, None] = {}
    for module in model.modules():
        trained = sorted((p for p in module.parameters(recurse=False) if p.requires_grad), key=nn.Parameter.numel)
        parameters.update(dict.fromkeys([*trained[:1], *(p for p in trained if p.numel() <= _LARGE)]))
    return list(parameters)


def _answers(model: nn.Module, run: Callable[[Tensor], Any], batch: Tensor, training: bool) -> list[Tensor]:
    """Outputs of ``run``; in training also the sum and the norm of each parameter's gradient, which suffice to tell
    gradients apart."""
    parameters = _watched(model)
    with preserved(model), torch.set_grad_enabled(training):
        outputs = tensors_of(run(batch.clone()))
        answers = [o.detach().clone() for o in outputs]
        roots = [o for o in outputs if o.requires_grad]
        if training and roots and parameters:
            # Each element has a weight of its own: a plain sum after BatchNorm or softmax has no gradient.
            weights = [torch.arange(1, o.numel() + 1, device=o.device).sin().view(o.shape).to(o.dtype) for o in roots]
            gradients = torch.autograd.grad(roots, parameters, weights, allow_unused=True)
            answers += [torch.zeros(2) if g is None else torch.stack((g.sum(), g.norm())) for g in gradients]
    return answers


def _fewer(model: nn.Module, batch: Tensor) -> Tensor:
    """``batch``, or one sample of it if the model has many weights, whose gradients take long, and does not normalize
    over samples."""
    by_batch = any(isinstance(m, nn.modules.batchnorm._NormBase) for m in model.modules())
    return batch if by_batch or sum(p.nbytes for p in model.parameters()) <= _HEAVY else batch[:1]


def _distance(first: list[Tensor], second: list[Tensor]) -> float:
    """Largest relative difference of any pair of tensors (infinite if shapes differ)."""
    if [a.shape for a in first] != [b.shape for b in second]:
        return float("inf")
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        if not torch.equal(a, b):
            a, b = torch.nan_to_num(a.double()), torch.nan_to_num(b.double())
            worst = max(worst, float((a - b).norm() / a.norm().clamp_min(1e-30)))
    return worst


def disagreement(model: nn.Module, run: Callable[[Tensor], Any], train: Callable[[bool], None], batch: Tensor) -> str:
    """Description of how ``run`` differs from ``model`` on ``batch``; empty if it does not.

    ``train`` sets the mode of the components. Exact equality is required. On a device where two runs of the model
    itself differ, ten times that difference is allowed. For a model with many weights, gradients are compared on one
    sample if the model accepts that.
    """
    if batch.is_meta:
        return ""
    full_batch = batch
    for training in (True, False):
        with mode(model, training):
            batch = _fewer(model, full_batch) if training else full_batch
            try:
                expected = _answers(model, model, batch, training)
            except Exception:  # some models refuse a single sample
                batch = full_batch
                expected = _answers(model, model, batch, training)
        train(training)
        distance = _distance(expected, _answers(model, run, batch, training))
        if distance:
            with mode(model, training):
                floor = _distance(expected, _answers(model, model, batch, training))
            if distance > 10 * floor:
                where = "training" if training else "evaluation"
                return f"in {where} its traced components differ from it by {distance:.1e}"
    return ""
