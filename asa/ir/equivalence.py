"""Result of ``asa verify``: the difference between training under a plan and training on one device."""

from __future__ import annotations

from asa.ir.codec import later, noun
from asa.ir.plan import CompressionName


@noun
class TensorError:
    """Error of one tensor, ``||plan - reference|| / ||reference||``, and the error allowed for it."""

    name: str
    error: float
    floor: float
    allowed: float


@noun
class Equivalence:
    """Verdict: ``equivalent`` if every tensor, every loss and the first fp32 gradients are within their tolerance.

    ``max_rel_error`` is that of ``worst_tensor``, the tensor with the largest ratio of error to allowance after
    ``steps`` steps in ``dtype``; ``noise_floor`` is the largest error of one device against itself with samples
    permuted inside the batch. ``loss_error`` and ``loss_allowed``: of the loss with the largest ratio;
    ``gradient_error_fp32``: likewise of first-step gradients in fp32. If only fp32 gradients differ, other batches are
    compared, and the values are those of the batch on which they agree, whose number is ``gradient_batches``.

    A plan with ``compression`` is never equivalent: then errors are those of all weights, and of all gradients, as one
    vector, and ``within_tolerance`` says whether gradients are within ``gradient_allowed_fp32``, and weights and losses
    within ``allowed``.

    Separately, the training code (under the plan, without dropout) is compared with the original model with stock
    modules in a plain loop: ``training_error`` is that of ``training_tensor`` (a tensor, ``losses``, or the mean of
    dropout's output), whichever has the largest ratio of error to allowance.

    ``discipline``: the plan's, if it changes training: such a plan is never equivalent, whatever five steps show.

    ``reasons``: for a plan that is not equivalent, or was compared with a floor above 1e-6, the properties of the model
    that explain it, in sentences; empty if none were identified.
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
