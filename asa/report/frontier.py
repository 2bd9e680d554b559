"""Tables of a plan's curves: step time against memory, and time against cost of an epoch."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from asa.planner.questions.frontier import CostPoint, Frontier, MemoryPoint
from asa.report.tables import line, table
from asa.report.units import NOTHING, error, percent, seconds, size


def render(frontier: Frontier) -> list[RenderableType]:
    """The requested curves."""
    parts: list[RenderableType] = []
    if frontier.memory:
        parts += [line(""), memory(frontier.memory)]
    if frontier.cost:
        parts += [line(""), cost(frontier.cost)]
    return parts


def memory(points: Sequence[MemoryPoint]) -> RenderableType:
    """Step time on devices with less memory, and the changes of the plan for that."""
    result = table(
        "Time against memory", ("device memory", "used", "step", "against most", "gap", "what changes"), left=1
    )
    result.columns[-1].justify = "left"
    for p in points:
        result.add_row(
            f"{size(p.limit_bytes)}{'' if p.fits else ' (more than there is)'}",
            size(p.memory_bytes_max),
            seconds(p.step_time_s),
            NOTHING if p is points[0] else error(p.step_time_s, points[0].step_time_s),
            percent(p.gap),
            p.changed or NOTHING,
            style="" if p.fits else "dim",
        )
    return result


def cost(points: Sequence[CostPoint]) -> RenderableType:
    """Time and cost of an epoch on increasing numbers of devices."""
    result = table(
        "Time against cost", ("offered", "used", "step", "epoch", "cost of an epoch", "gap", "worth it"), left=1
    )
    result.columns[-1].justify = "left"
    for p in points:
        result.add_row(
            str(p.gpus) if p.up_to == p.gpus else f"{p.gpus} to {p.up_to}",
            str(p.num_ranks) if p.num_ranks else NOTHING,
            seconds(p.step_time_s),
            seconds(p.epoch_s),
            NOTHING if p.epoch_cost is None else f"{p.epoch_cost:.4g}",
            NOTHING if p.epoch_s is None else percent(p.gap),
            _verdict(p),
            style="" if p.on_frontier else "dim",
        )
    return result


def _verdict(point: CostPoint) -> str:
    if point.why_not:
        return f"no: {point.why_not}"
    return "yes" if point.on_frontier else "no: another is as fast and as cheap, or better"
