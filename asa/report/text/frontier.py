"""Tables of a plan's curves: step time against memory, and time against cost of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import RenderableType

from asa.planner.questions.frontier import CostPoint, Frontier, MemoryPoint
from asa.report.text.tables import line, table
from asa.report.units import NOTHING, error, percent, seconds, size


def render(frontier: Frontier, *, epochs: int | None = None) -> list[RenderableType]:
    """The requested curves. ``epochs``: of a run whose time and cost are shown, too."""
    parts: list[RenderableType] = []
    if frontier.memory:
        parts += [line(""), memory(frontier.memory)]
    if frontier.cost:
        parts += [line(""), cost(frontier.cost, epochs=epochs)]
        parts.append(line("gap: what could be saved at most; worth it: no other is as fast and as cheap", "dim"))
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


def cost(points: Sequence[CostPoint], *, epochs: int | None = None) -> RenderableType:
    """Time and cost of an epoch, and of a run of ``epochs``, on increasing numbers of devices."""
    run = [] if epochs is None else [f"{epochs} epochs", "their cost"]
    columns = ("devices", "used", "step", "epoch", "its cost", *run, "gap", "worth it")
    result = table("Time against cost", columns, left=1)
    result.columns[-1].justify = "left"
    for p in points:
        of_run = [] if epochs is None else [_times(epochs, p.epoch_s, seconds), _times(epochs, p.epoch_cost, _amount)]
        result.add_row(
            str(p.gpus) if p.up_to == p.gpus else f"{p.gpus} to {p.up_to}",
            str(p.num_ranks) if p.num_ranks else NOTHING,
            seconds(p.step_time_s),
            seconds(p.epoch_s),
            _times(1, p.epoch_cost, _amount),
            *of_run,
            NOTHING if p.epoch_s is None else percent(p.gap),
            _verdict(p),
            style="" if p.on_frontier else "dim",
        )
    return result


def _times(count: int, value: float | None, text: Callable[[float], str]) -> str:
    return NOTHING if value is None else text(count * value)


def _amount(value: float) -> str:
    return f"{value:.4g}"


def _verdict(point: CostPoint) -> str:
    if point.why_not:
        return f"no: {point.why_not}"
    return "yes" if point.on_frontier else "no: another is as fast and as cheap, or better"
