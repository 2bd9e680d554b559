"""Text of the verdict of ``asa verify``."""

from __future__ import annotations

from rich.console import RenderableType

from asa.ir.equivalence import Equivalence
from asa.report.text.tables import line, table


def render(check: Equivalence) -> list[RenderableType]:
    """The verdict, its basis, and the five worst tensors by ratio of error to allowance."""
    result = table("Tensors nearest to their limit", ("tensor", "error", "floor", "allowed"))
    batches = "" if check.gradient_batches == 1 else f", {check.gradient_batches} batches compared"
    for t in sorted(check.tensors, key=lambda t: t.error / t.allowed, reverse=True)[:5]:
        result.add_row(t.name, f"{t.error:.2e}", f"{t.floor:.2e}", f"{t.allowed:.2e}")
    return [
        line(verdict(check), "bold" if check.equivalent or check.within_tolerance else "bold red"),
        *(line(f"{'note' if check.equivalent else 'why'}: {reason}") for reason in check.reasons),
        line(
            f"{check.steps} steps of {check.samples} samples on {check.ranks} ranks in {check.dtype}, learning rate "
            f"{check.learning_rate:g}, {check.batch_norm} BatchNorm; noise floor (one device, samples permuted) "
            f"{check.noise_floor:.2e}"
        ),
        line(
            f"first gradients in fp32: {check.gradient_error_fp32:.2e} at {check.worst_gradient} "
            f"(allowed {check.gradient_allowed_fp32:.2e}{batches}); losses {check.loss_error:.2e}"
        ),
        *trained(check),
        line(""),
        result,
    ]


def trained(check: Equivalence) -> list[RenderableType]:
    """Line on the training code compared with a plain loop, if that was checked."""
    if check.training_error is None or check.training_allowed is None:
        return []
    fine = check.training_error <= check.training_allowed
    text = (
        f"training loop beside a plain one of stock modules: {check.training_error:.2e} at {check.training_tensor} "
        f"(allowed {check.training_allowed:.2e})"
    )
    return [line(text if fine else f"NOT the plain model's training: {text}", "" if fine else "bold red")]


def verdict(check: Equivalence) -> str:
    """The verdict in one sentence."""
    numbers = f"{check.worst_tensor} differs by {check.max_rel_error:.2e}, allowed {check.allowed:.2e}"
    if check.equivalent:
        return f"equivalent: training under this plan is training on one device ({numbers})"
    if check.discipline:
        return (
            f"not equivalent by construction, workers train under {check.discipline}: after {check.steps} steps "
            f"{check.worst_tensor} differs by {check.max_rel_error:.2e} from one device"
        )
    if check.within_tolerance is not None:
        relation = "within" if check.within_tolerance else "BEYOND"
        return (
            f"not equivalent by construction, gradients travel as {check.compression}; {relation} tolerance: first "
            f"gradients differ by {check.gradient_error_fp32:.2e} (allowed {check.gradient_allowed_fp32:.2g}), weights "
            f"by {check.max_rel_error:.2e} and losses by {check.loss_error:.2e} (allowed {check.allowed:.2g})"
        )
    text = f"NOT equivalent to one device: {numbers}; fp32 gradients {check.gradient_error_fp32:.2e}"
    if check.training_error is not None and check.training_error > (check.training_allowed or 0.0):
        text += f"; the training loop differs from a plain one by {check.training_error:.2e} at {check.training_tensor}"
    return text
