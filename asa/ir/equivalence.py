"""Result of ``asa verify``: the difference between training under a plan and training on one device."""

from __future__ import annotations

from asa.ir.codec import later, noun
from asa.ir.plan import CompressionName


@noun
class TensorError:
    """Relative error of one tensor, ``||plan - reference|| / ||reference||``, and the error that is allowed for it."""

    name: str
    error: float
    floor: float
    allowed: float


@noun
class Equivalence:
    """Verdict of ``asa verify``. Errors are relative, without units.

    ``equivalent`` is true if every tensor, every loss and the first fp32 gradients are within their tolerance.

    Attributes:
        max_rel_error: error of ``worst_tensor`` after ``steps`` steps in ``dtype``.
        worst_tensor: the tensor with the largest ratio of error to allowed error.
        noise_floor: largest error of one device against itself with the samples of every batch permuted.
        loss_error, loss_allowed: error and allowed error of the loss with the largest ratio of the two.
        gradient_error_fp32: error of ``worst_gradient``, the gradient of the first step in fp32 with the largest ratio.
        gradient_batches: number of batches whose gradients were compared. If only fp32 gradients differ, more batches
            are compared, and the values are those of the last one, on which they agree.
        within_tolerance: for a plan with ``compression``, which is never equivalent: whether gradients are within
            ``gradient_allowed_fp32``, and weights and losses within ``allowed``. Errors are then those of all weights,
            and of all gradients, as one vector.
        training_error: separate comparison of the training code (under the plan, without dropout) with the original
            model with stock modules in a plain loop. It is the error of ``training_tensor``: a tensor, ``losses``, or
            the mean of dropout's output, whichever has the largest ratio of error to ``training_allowed``.
        discipline: the plan's discipline if it changes training. Such a plan is never equivalent, whatever a few steps
            show.
        reasons: properties of the model that explain why a plan is not equivalent, or why it was compared with a noise
            floor above 1e-6, in sentences. Empty if none were identified.
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
