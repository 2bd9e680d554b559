"""Text of an explanation of a plan, and of its comparison with another."""

from __future__ import annotations

from rich.console import RenderableType

from asa.ir.plan import DataDegree, TensorDegree
from asa.planner.questions.explain import Alternative, ComponentExplanation, Difference, Explanation
from asa.report.text.tables import fitted, line, table
from asa.report.units import NOTHING, difference, error, seconds, size

_ROWS = 8
"""Number of components shown without ``-v``."""


def render(explanation: Explanation, *, verbose: bool = False) -> list[RenderableType]:
    """What limits the plan, and components with their costs and the cost of the best alternative.

    Without ``verbose`` only the costliest ones, in 80 columns.
    """
    return _every(explanation) if verbose else _costliest(explanation)


def _costliest(explanation: Explanation) -> list[RenderableType]:
    cost = {c.name: computes(c) + communicates(c) for c in explanation.components}
    total_s = sum(cost.values()) or 1.0
    communication_s = sum(communicates(c) for c in explanation.components)
    shown = sorted(explanation.components, key=lambda c: -cost[c.name])[:_ROWS]
    result = table("", ("costliest", "runs as", "computes", "sends", "share", "next best"), left=2)
    result.title = None
    for c in shown:
        other = c.alternative
        result.add_row(
            fitted(c.name, 20), way(c.data, c.tensor, c.checkpoint, c.offload), seconds(computes(c)),
            seconds(communicates(c)), f"{100 * cost[c.name] / total_s:.0f} %",
            NOTHING if other is None else _next_best(other),
        )  # fmt: skip
    faster = any(c.alternative is not None and c.alternative.extra_s < 0 for c in shown)
    shorter = " (below 0: shorter)" if faster else ""
    recomputes = any(c.checkpoint or (c.alternative is not None and c.alternative.checkpoint) for c in shown)
    again = "; ckpt: activations are computed again in backward" if recomputes else ""
    more = len(explanation.components) - _ROWS
    fits = explanation.peak_bytes <= explanation.capacity_bytes
    limit = _LIMIT[explanation.binding] if fits else "memory: the plan does not fit; `asa plan --memory` makes another"
    return [
        line(f"Work     {seconds(total_s - communication_s)} computing, {seconds(communication_s)} communicating, "
             f"of which {seconds(explanation.hidden_s)} behind backward"),
        line(f"Memory   {_peak(explanation)} at {explanation.peak_component}"),
        line(f"Limit    {limit}"),
        line(""),
        result,
        line(f"next best: what else it could run as, and by how much the step would be longer{shorter}{again}", "dim"),
        line(f"-v shows: {f'{more} more components, ' if more > 0 else ''}what each second goes to", "dim"),
    ]  # fmt: skip


_LIMIT = {
    "memory": "memory: with more of it another plan may be faster",
    "communication": "communication: faster links would make it faster",
    "compute": "computing: only faster or more devices would make it faster",
}
"""Texts on what limits a plan's speed."""


def _peak(explanation: Explanation) -> str:
    """The plan's memory compared with that of a device."""
    need, has = size(explanation.peak_bytes), size(explanation.capacity_bytes)
    return f"{need} of {has}" if explanation.peak_bytes <= explanation.capacity_bytes else f"{need}, a device has {has}"


def computes(c: ComponentExplanation) -> float:
    """Seconds of a step in which ``c`` computes on the busiest rank."""
    return c.forward_s + c.backward_s + c.update_s


def communicates(c: ComponentExplanation) -> float:
    """Seconds of a step in which ``c`` communicates, exposed or hidden."""
    return c.inside_s + c.boundary_s + c.sync_s


def _every(explanation: Explanation) -> list[RenderableType]:
    result = table(
        "Seconds of a step on the busiest rank",
        ("component", "runs as", "forward", "backward", "inside", "boundary", "sync", "update", "state", "next best"),
        left=2,
    )
    staged = any(c.stage for c in explanation.components)
    for c in explanation.components:
        other = c.alternative
        result.add_row(
            c.name,
            way(c.data, c.tensor, c.checkpoint, c.offload) + (f" (stage {c.stage})" if staged else ""),
            *(seconds(t) for t in (c.forward_s, c.backward_s, c.inside_s, c.boundary_s, c.sync_s, c.update_s)),
            size(c.state_bytes),
            NOTHING if other is None else _next_best(other),
        )
    return [
        result,
        line(""),
        line(f"gradient synchronisation hidden behind backward: {seconds(explanation.hidden_s)} a step"),
        line(
            f"memory peaks at {explanation.peak_component}: {_peak(explanation)}; "
            f"what keeps the plan from being faster: {explanation.binding}"
        ),
    ]


def _next_best(other: Alternative) -> str:
    runs = way(other.data, other.tensor, other.checkpoint, other.offload)
    return f"{runs}: {difference(other.extra_s, plus=True)}" + ("" if other.fits else ", does not fit")


def versus(diff: Difference) -> list[RenderableType]:
    """Reasons against the other plan."""
    if diff.other_s is None:
        return [line(f"{diff.other} cannot be run: {diff.why_not}")]
    result = table(f"This plan compared with {diff.other}", ("term", "this plan", diff.other, "difference"))
    for t in diff.terms:
        change = difference(t.other_s - t.plan_s, plus=True)
        result.add_row(t.name, difference(t.plan_s), difference(t.other_s), change)
    result.add_row("step", seconds(diff.plan_s), seconds(diff.other_s), error(diff.other_s, diff.plan_s))
    lines: list[RenderableType] = [result, line("")]
    if not diff.fits:
        how = "is" if diff.why_not.startswith("not chosen") else "does not fit:"
        lines.append(line(f"{diff.other} {how} {diff.why_not}"))
    if diff.remark:
        lines.append(line(f"{diff.other} is {diff.remark}"))
    if diff.changed:
        count = f"{len(diff.changed)} component{'s' if len(diff.changed) > 1 else ''}"
        lines.append(line(f"{count} would run differently: {', '.join(diff.changed)}"))
    return lines


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
