"""Text of a rehearsed rank and its prediction."""

from __future__ import annotations

from rich.console import RenderableType

from asa.ir.rehearsal import Rehearsal, RehearsedComponent
from asa.report.text.tables import line, table
from asa.report.units import error, seconds, size


def render(rehearsal: Rehearsal) -> list[RenderableType]:
    """Table of all components, then step time and peak memory."""
    result = table(
        f"Rank {rehearsal.rank} of {rehearsal.num_ranks} (stage {rehearsal.stage}), {rehearsal.model}, "
        f"{rehearsal.samples} samples per step, alone on one {rehearsal.device} device",
        ("component", "runs as", "compute", "predicted", "error", "saved", "predicted"),
        left=2,
    )
    for c in rehearsal.components:
        result.add_row(c.name, c.assignment, *_times(c), size(c.saved_bytes), size(c.predicted_saved_bytes))
    result.add_row("update", "", seconds(rehearsal.update_s), seconds(rehearsal.predicted_update_s), "", "", "")
    return [
        result,
        line(""),
        line(
            f"compute: {seconds(rehearsal.compute_s)} per step, predicted for a rank alone "
            f"{seconds(rehearsal.predicted_compute_s)} ({error(rehearsal.predicted_compute_s, rehearsal.compute_s)}); "
            f"a step without any communication took {seconds(rehearsal.step_s.median)}"
        ),
        line(
            f"peak memory: {size(rehearsal.peak_memory_bytes)}, predicted {size(rehearsal.predicted_memory_bytes)} "
            f"({error(rehearsal.predicted_memory_bytes, rehearsal.peak_memory_bytes)})"
        ),
        line(
            f"the plan's step of {seconds(rehearsal.plan_step_time_s)} counts {seconds(rehearsal.plan_compute_s)} of "
            f"compute beside {rehearsal.num_ranks - 1} other ranks and {seconds(rehearsal.priced_communication_s)} of "
            "exposed communication, which was priced and not run"
        ),
        *(line(f"note: {n}") for n in rehearsal.notes),
    ]


def _times(c: RehearsedComponent) -> tuple[str, str, str]:
    predicted_s = c.predicted_forward_s + c.predicted_backward_s
    return seconds(c.forward_s + c.backward_s), seconds(predicted_s), error(predicted_s, c.forward_s + c.backward_s)
