"""Text of a rehearsed rank and its prediction."""

from __future__ import annotations

from rich.console import RenderableType

from asa.ir.rehearsal import Rehearsal, RehearsedComponent
from asa.report.tables import line, table
from asa.report.units import error, seconds, size


def render(found: Rehearsal) -> list[RenderableType]:
    """Table of all components, then step time and peak memory."""
    made = table(
        f"Rank {found.rank} of {found.num_ranks} (stage {found.stage}), {found.model}, {found.samples} samples per "
        f"step, alone on one {found.device} device",
        ("component", "runs as", "compute", "predicted", "error", "saved", "predicted"),
        left=2,
    )
    for c in found.components:
        made.add_row(c.name, c.assignment, *_times(c), size(c.saved_bytes), size(c.predicted_saved_bytes))
    made.add_row("update", "", seconds(found.update_s), seconds(found.predicted_update_s), "", "", "")
    return [
        made,
        line(""),
        line(
            f"compute: {seconds(found.compute_s)} per step, predicted for a rank alone "
            f"{seconds(found.predicted_compute_s)} ({error(found.predicted_compute_s, found.compute_s)}); a step "
            f"without any communication took {seconds(found.step_s.median)}"
        ),
        line(
            f"peak memory: {size(found.peak_memory_bytes)}, predicted {size(found.predicted_memory_bytes)} "
            f"({error(found.predicted_memory_bytes, found.peak_memory_bytes)})"
        ),
        line(
            f"the plan's step of {seconds(found.plan_step_time_s)} counts {seconds(found.plan_compute_s)} of compute "
            f"beside {found.num_ranks - 1} other ranks and {seconds(found.priced_communication_s)} of exposed "
            "communication, which was priced and not run"
        ),
        *(line(f"note: {n}") for n in found.notes),
    ]


def _times(c: RehearsedComponent) -> tuple[str, str, str]:
    foreseen = c.predicted_forward_s + c.predicted_backward_s
    return seconds(c.forward_s + c.backward_s), seconds(foreseen), error(foreseen, c.forward_s + c.backward_s)
