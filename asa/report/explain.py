"""Text of an explanation of a plan, and of its comparison with another."""

from __future__ import annotations

from rich.console import RenderableType

from asa.ir.plan import DataDegree, TensorDegree
from asa.planner.questions.explain import Alternative, ComponentExplanation, Difference, Explanation
from asa.report.tables import fitted, line, table
from asa.report.units import NOTHING, difference, error, seconds, size

_ROWS = 8
"""Number of components shown without ``-v``."""


def render(found: Explanation, *, verbose: bool = False) -> list[RenderableType]:
    """What limits the plan, and components with their costs and the cost of the best alternative.

    Without ``verbose`` only the costliest ones, in 80 columns.
    """
    return _every(found) if verbose else _costliest(found)


def _costliest(found: Explanation) -> list[RenderableType]:
    cost = {c.name: computes(c) + communicates(c) for c in found.components}
    whole = sum(cost.values()) or 1.0
    sent = sum(communicates(c) for c in found.components)
    made = table("", ("costliest", "runs as", "computes", "sends", "share", "next best"), left=2)
    made.title = None
    for c in sorted(found.components, key=lambda c: -cost[c.name])[:_ROWS]:
        other = c.alternative
        made.add_row(
            fitted(c.name, 20), way(c.data, c.tensor, c.checkpoint, c.offload), seconds(computes(c)),
            seconds(communicates(c)), f"{100 * cost[c.name] / whole:.0f} %",
            NOTHING if other is None else _next_best(other),
        )  # fmt: skip
    more = len(found.components) - _ROWS
    return [
        line(f"Work     {seconds(whole - sent)} computing, {seconds(sent)} communicating, of which "
             f"{seconds(found.hidden_s)} behind backward"),
        line(f"Memory   {size(found.peak_bytes)} of {size(found.capacity_bytes)} at {found.peak_component}"),
        line(f"Limit    {_LIMIT[found.binding]}"),
        line(""),
        made,
        line(f"-v shows: {f'{more} more components, ' if more > 0 else ''}what each second goes to", "dim"),
    ]  # fmt: skip


_LIMIT = {
    "memory": "memory: with more of it another plan would be faster",
    "communication": "communication: faster links would make it faster",
    "compute": "computing: only faster or more devices would make it faster",
}
"""Texts on what limits a plan's speed."""


def computes(c: ComponentExplanation) -> float:
    """Seconds of a step in which ``c`` computes on the busiest rank."""
    return c.forward_s + c.backward_s + c.update_s


def communicates(c: ComponentExplanation) -> float:
    """Seconds of a step in which ``c`` communicates, exposed or hidden."""
    return c.inside_s + c.boundary_s + c.sync_s


def _every(found: Explanation) -> list[RenderableType]:
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
    """Reasons against the other plan."""
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
        count = f"{len(found.changed)} component{'s' if len(found.changed) > 1 else ''}"
        said.append(line(f"{count} would run differently: {', '.join(found.changed)}"))
    return said


def way(data: DataDegree, tensor: TensorDegree, checkpoint: bool = False, offload: bool = False) -> str:
    """Short description of how a component runs.

    >>> way(DataDegree(strategy="replicate", degree=2), TensorDegree(strategy="none", degree=1))
    'replicate x2'
    """
    words = [data.text] if data.degree > 1 else []
    words += [f"{tensor.strategy} x{tensor.degree}"] if tensor.degree > 1 else []
    words += ["ckpt"] if checkpoint else []
    words += ["offload"] if offload else []
    return ", ".join(words) or "whole"
