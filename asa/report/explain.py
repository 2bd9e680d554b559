"""A plan taken apart, and beside another, for reading."""

from __future__ import annotations

from rich.console import RenderableType

from asa.ir.plan import DataDegree, TensorDegree
from asa.planner.questions.explain import Alternative, Difference, Explanation
from asa.report.tables import line, table
from asa.report.units import NOTHING, difference, error, seconds, size


def render(found: Explanation) -> list[RenderableType]:
    """Every component with what it costs and what the best other choice for it would."""
    made = table(
        "Seconds of a step on the busiest rank",
        ("component", "runs as", "forward", "backward", "inside", "boundary", "sync", "update", "state", "next best"),
        left=2,
    )
    staged = any(c.stage for c in found.components)
    for c in found.components:
        other = c.alternative
        made.add_row(
            c.name,
            way(c.data, c.tensor, c.checkpoint, c.offload) + (f" (stage {c.stage})" if staged else ""),
            *(seconds(t) for t in (c.forward_s, c.backward_s, c.inside_s, c.boundary_s, c.sync_s, c.update_s)),
            size(c.state_bytes),
            NOTHING if other is None else _next_best(other),
        )
    return [
        made,
        line(""),
        line(f"gradient synchronisation hidden behind backward: {seconds(found.hidden_s)} a step"),
        line(
            f"memory peaks at {found.peak_component}: {size(found.peak_bytes)} of {size(found.capacity_bytes)}; what "
            f"keeps the plan from being faster: {found.binding}"
        ),
    ]


def _next_best(other: Alternative) -> str:
    runs = way(other.data, other.tensor, other.checkpoint, other.offload)
    return f"{runs}: {difference(other.extra_s, plus=True)}" + ("" if other.fits else ", does not fit")


def versus(found: Difference) -> list[RenderableType]:
    """Why not the other one."""
    if found.other_s is None:
        return [line(f"{found.other} cannot be run: {found.why_not}")]
    made = table(f"This plan beside {found.other}", ("term", "this plan", found.other, "difference"))
    for t in found.terms:
        change = difference(t.other_s - t.plan_s, plus=True)
        made.add_row(t.name, difference(t.plan_s), difference(t.other_s), change)
    made.add_row("step", seconds(found.plan_s), seconds(found.other_s), error(found.other_s, found.plan_s))
    said: list[RenderableType] = [made, line("")]
    if not found.fits:
        how = "is" if found.why_not.startswith("not chosen") else "does not fit:"
        said.append(line(f"{found.other} {how} {found.why_not}"))
    if found.remark:
        said.append(line(f"{found.other} is {found.remark}"))
    if found.changed:
        said.append(line(f"{len(found.changed)} components would run otherwise: {', '.join(found.changed)}"))
    return said


def way(data: DataDegree, tensor: TensorDegree, checkpoint: bool = False, offload: bool = False) -> str:
    """How a component runs, in a few characters.

    >>> way(DataDegree(strategy="replicate", degree=2), TensorDegree(strategy="none", degree=1))
    'replicate x2'
    """
    words = [data.text] if data.degree > 1 else []
    words += [f"{tensor.strategy} x{tensor.degree}"] if tensor.degree > 1 else []
    words += ["checkpoint"] if checkpoint else []
    words += ["offload"] if offload else []
    return ", ".join(words) or "whole"
