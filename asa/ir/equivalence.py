"""The verdict of ``asa verify``: how far training under a plan is from training on one device."""

from __future__ import annotations

from asa.ir.codec import later, noun
from asa.ir.plan import CompressionName


@noun
class TensorError:
    """One tensor: ``||plan - reference|| / ||reference||`` and what is allowed for it."""

    name: str
    error: float
    floor: float
    allowed: float


@noun
class Equivalence:
    """``equivalent`` if every tensor, every loss and the first fp32 gradients are within their tolerance.

    ``max_rel_error`` is that of ``worst_tensor``, the tensor with the largest share of its allowance after ``steps``
    steps in ``dtype``; ``noise_floor`` is the largest error of one device against itself with samples permuted
    inside the batch. ``loss_error`` is that of the loss with the largest share of its allowance, ``loss_allowed``;
    ``gradient_error_fp32`` that of such a first-step gradient in fp32. Where fp32 gradients alone differ, other batches
    are compared, and figures are those of the one on which they agree: ``gradient_batches`` says which that was.

    A plan with ``compression`` is never equivalent: then errors are those of all weights, and of all gradients, as one
    vector, and ``within_tolerance`` says whether gradients are within ``gradient_allowed_fp32``, and weights and losses
    within ``allowed``.

    Beside that, the code that trains (under the plan, dropping nothing) is held against the model as it was written,
    with stock modules in a plain loop: ``training_error`` is that of ``training_tensor``, a tensor, ``losses``, or the
    mean of what dropout leaves, whichever has the largest share of its allowance.

    ``discipline``: the plan's, where it changes training: such a plan is never equivalent, whatever five steps show.

    ``reasons``: where a plan is not equivalent, or held against a floor above 1e-6, what of the model explains it, in
    sentences; empty where nothing was found.
    """

    equivalent: bool
    max_rel_error: float
    noise_floor: float
    worst_tensor: str
    allowed: float
    loss_error: float
    gradient_error_fp32: float
    worst_gradient: str
    gradient_allowed_fp32: float
    dtype: str
    learning_rate: float
    steps: int
    samples: int
    ranks: int
    batch_norm: str
    plan_fingerprint: str
    tensors: tuple[TensorError, ...]
    compression: CompressionName = later("none")
    within_tolerance: bool | None = later()
    loss_allowed: float = later(1e-6)
    gradient_batches: int = later(1)
    training_error: float | None = later()
    training_allowed: float | None = later()
    training_tensor: str = later("")
    reasons: tuple[str, ...] = later(())
    discipline: str = later("")
