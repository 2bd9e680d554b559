"""Text of the verdict of ``asa verify``."""

from __future__ import annotations

from rich.console import RenderableType

from asa.ir.equivalence import Equivalence
from asa.report.tables import line, table


def render(found: Equivalence, *, worst: int = 5) -> list[RenderableType]:
    """The verdict, its basis, and the ``worst`` tensors by ratio of error to allowance."""
    made = table("Tensors nearest to their limit", ("tensor", "error", "floor", "allowed"))
    batches = "" if found.gradient_batches == 1 else f", {found.gradient_batches} batches compared"
    for t in sorted(found.tensors, key=lambda t: t.error / t.allowed, reverse=True)[:worst]:
        made.add_row(t.name, f"{t.error:.2e}", f"{t.floor:.2e}", f"{t.allowed:.2e}")
    return [
        line(verdict(found), "bold" if found.equivalent or found.within_tolerance else "bold red"),
        *(line(f"{'note' if found.equivalent else 'why'}: {reason}") for reason in found.reasons),
        line(
            f"{found.steps} steps of {found.samples} samples on {found.ranks} ranks in {found.dtype}, learning rate "
            f"{found.learning_rate:g}, {found.batch_norm} BatchNorm; noise floor (one device, samples permuted) "
            f"{found.noise_floor:.2e}"
        ),
        line(
            f"first gradients in fp32: {found.gradient_error_fp32:.2e} at {found.worst_gradient} "
            f"(allowed {found.gradient_allowed_fp32:.2e}{batches}); losses {found.loss_error:.2e}"
        ),
        *trained(found),
        line(""),
        made,
    ]


def trained(found: Equivalence) -> list[RenderableType]:
    """Line on the training code compared with a plain loop, if that was checked."""
    if found.training_error is None or found.training_allowed is None:
        return []
    fine = found.training_error <= found.training_allowed
    said = (
        f"training loop beside a plain one of stock modules: {found.training_error:.2e} at {found.training_tensor} "
        f"(allowed {found.training_allowed:.2e})"
    )
    return [line(said if fine else f"NOT the plain model's training: {said}", "" if fine else "bold red")]


def verdict(found: Equivalence) -> str:
    """The verdict in one sentence."""
    numbers = f"{found.worst_tensor} differs by {found.max_rel_error:.2e}, allowed {found.allowed:.2e}"
    if found.equivalent:
        return f"equivalent: training under this plan is training on one device ({numbers})"
    if found.discipline:
        return (
            f"not equivalent by construction, workers train under {found.discipline}: after {found.steps} steps "
            f"{found.worst_tensor} differs by {found.max_rel_error:.2e} from one device"
        )
    if found.within_tolerance is not None:
        said = "within" if found.within_tolerance else "BEYOND"
        return (
            f"not equivalent by construction, gradients travel as {found.compression}; {said} tolerance: first "
            f"gradients differ by {found.gradient_error_fp32:.2e} (allowed {found.gradient_allowed_fp32:.2g}), weights "
            f"by {found.max_rel_error:.2e} and losses by {found.loss_error:.2e} (allowed {found.allowed:.2g})"
        )
    apart = ""
    if found.training_error is not None and found.training_error > (found.training_allowed or 0.0):
        apart = f"; the training loop differs from a plain one by {found.training_error:.2e} at {found.training_tensor}"
    return f"NOT equivalent to one device: {numbers}; fp32 gradients {found.gradient_error_fp32:.2e}{apart}"
