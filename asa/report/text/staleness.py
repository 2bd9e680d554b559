"""Text of curves of stale and local training."""

from __future__ import annotations

from rich.console import RenderableType

from asa.ir.staleness import PLAIN, Curve, Staleness, Steps, Target
from asa.report.text.tables import line, table
from asa.report.units import NOTHING

_SHARE = 0.95
"""Fraction of the plain run's best accuracy that is the target in the table."""


def render(curves: Staleness) -> list[RenderableType]:
    """For each setting the final accuracy, and global batches to an accuracy close to that of plain runs."""
    plain = curves.curve(PLAIN)
    best = [max(r.accuracies, default=0.0) for r in plain.runs] if plain is not None else []
    goal = int(100 * _SHARE * sum(best) / len(best)) / 100 if best else 0.0
    target = Target(what="accuracy", value=goal) if goal > 0 else None
    result = table(
        f"Staleness of {curves.model_spec} on {curves.data}, {curves.optimizer} at {curves.learning_rate:g} "
        f"({curves.schedule}), batch {curves.global_batch}",
        ("gradients", "seeds", "accuracy at the end", f"batches to {target}" if target else "batches"),
    )
    for curve in curves.curves:
        result.add_row(
            curve.setting.words, str(len(curve.runs)), _ends(curve),
            batches(curves.steps_to(target, curve.setting), curves.steps) if target else NOTHING,
        )  # fmt: skip
    return [result, *(line(f"note: {s}") for s in curves.skipped)]


def _ends(curve: Curve) -> str:
    """Lowest and highest final accuracy of runs, and the number that diverged."""
    ends = sorted(r.accuracies[-1] for r in curve.runs if r.accuracies and not r.diverged)
    diverged = sum(r.diverged for r in curve.runs)
    text = f"{ends[0]:.3f} to {ends[-1]:.3f}" if ends else NOTHING
    return f"{text}, {diverged} diverged" if diverged else text


def batches(steps: Steps | None, most: int) -> str:
    """Median with its range, as text; says so if no run reached the target."""
    if steps is None:
        return NOTHING
    if steps.reached == 0:
        return f"not in {most}"
    middle = f"{steps.median:.0f}" if steps.median is not None else f"over {most}"
    high = f"{steps.high:.0f}" if steps.high is not None else f"over {most}"
    return f"{middle} ({steps.low:.0f} to {high})"
