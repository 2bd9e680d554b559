"""Errors of tensors, and the verdict on a plan with compressed gradients.

Training with compressed gradients differs from that on one device by construction. Errors in its verdict are those of
all gradients and of all weights, each as one vector, and not tensor by tensor. Where addends cancel between ranks (the
gradient of a bias before BatchNorm), the rounding errors of the addends remain, and the relative error of that tensor
means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from asa.ir.equivalence import Equivalence
from asa.ir.plan import CompressionName

TOLERANCE: dict[CompressionName, float] = {"fp16": 2**-9, "bf16": 2**-6, "powersgd": 1e-4}
"""Relative tolerance of first gradients. For ``fp16`` and ``bf16`` it is four roundings of the type. ``powersgd`` uses
low-rank factors only from the second step on."""

DRIFT = 0.1
"""Relative tolerance of losses and weights after all steps, because training amplifies differences of the gradients."""


UNLIKE = 1e300
"""Error of what is not a number or infinite, which documents do not hold."""


def _stated(error: float) -> float:
    return error if error < UNLIKE else UNLIKE


def noise(error: float) -> float:
    """The ``error`` of one device against itself, as a floor for others; 0 if there was no number to compare."""
    return error if error < UNLIKE else 0.0


def loss_error(value: float, reference: float) -> float:
    """Relative error of a loss."""
    return 0.0 if value == reference else _stated(abs(value - reference) / max(abs(reference), 1e-300))


def distance(actual: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Norm of the difference of all real tensors as one vector, over the norm of ``reference``. Equal infinities differ
    by 0."""
    names = [n for n, t in reference.items() if t.is_floating_point()]
    differences = (
        torch.where(actual[n] == reference[n], 0.0, actual[n].double() - reference[n].double()) for n in names
    )
    references = (torch.where(reference[n].isinf(), 0.0, reference[n].double()) for n in names)
    delta, total = (sum(float(torch.sum(t**2)) for t in each) for each in (differences, references))
    return _stated(float((delta / max(total, 1e-300)) ** 0.5))


def norm(x: Tensor) -> float:
    """Euclidean norm of all elements, computed in float64 or complex128."""
    return float(torch.linalg.vector_norm(_wide(x)))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def relative_error(value: Tensor, reference: Tensor, least: float = 0.0) -> float:
    """Norm of the difference over the reference's norm, or over ``least`` if that is larger."""
    same = value == reference  # also equal infinities of a mask, whose difference would be NaN
    delta = norm(torch.where(same, 0.0, _wide(value) - _wide(reference)))
    finite = torch.where(reference.isinf(), 0.0, reference)
    return 0.0 if delta == 0 else _stated(delta / max(norm(finite), least, 1e-300))


def compressed(
    verdict: Equivalence, name: CompressionName, *, weights: float, gradients: float, rounding: float = 0.0
) -> Equivalence:
    """``verdict`` adapted to compression ``name``, from the :func:`distance` of weights and of gradients.

    ``rounding``: difference of fp32 gradients that is allowed without any compression.
    """
    allowed = max(TOLERANCE[name], rounding)
    within = gradients <= allowed and max(weights, verdict.loss_error) <= DRIFT
    within = within and (verdict.training_error or 0.0) <= (verdict.training_allowed or 0.0)
    return replace(
        verdict,
        equivalent=False,
        max_rel_error=weights,
        worst_tensor="all weights",
        allowed=DRIFT,
        gradient_error_fp32=gradients,
        worst_gradient="all gradients",
        gradient_allowed_fp32=allowed,
        compression=name,
        within_tolerance=within,
    )
