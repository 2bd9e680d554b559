"""Table of disciplines of consistency, side by side."""

from __future__ import annotations

from rich.console import RenderableType

from asa.planner.answer.consistency import Consistency, ConsistencyRow
from asa.report.text.tables import line, table
from asa.report.units import NOTHING, percent, seconds, size


def render(answer: Consistency) -> list[RenderableType]:
    """The table, fastest first, and its explanation."""
    aimed = bool(answer.target)
    priced = any(r.time_to_target is not None and r.time_to_target.cost is not None for r in answer.rows)
    columns = ["who waits", "a global batch", "waiting", "age", "memory"]
    columns += [f"steps to {answer.target}", "time to it"] if aimed else []
    result = table("Consistency", (*columns, *(["its cost"] if priced else [])))
    for r in sorted(answer.rows, key=lambda r: _key(r, aimed=aimed)):
        if r.step_time_s is None:
            continue
        cells = [
            r.name, seconds(r.step_time_s), percent(r.waited), f"{r.mean_age:.2g} (most {r.max_age})",
            size(r.memory_bytes_max),
        ]  # fmt: skip
        if aimed:
            cells += [_steps(r), _time(r)]
        if priced:
            cost = None if r.time_to_target is None else r.time_to_target.cost
            cells.append(NOTHING if cost is None else f"{cost:.4g}")
        result.add_row(*cells, style="bold" if r.name == (answer.first or answer.fastest) else "" if r.fits else "dim")
    out = [f"{r.name} cannot be had: {r.why_not}" for r in answer.rows if r.step_time_s is None]
    out += [f"{r.name} does not fit the devices' memory" for r in answer.rows if r.step_time_s and not r.fits]
    unknown: dict[str, list[str]] = {}
    for r in answer.rows:
        if r.unknown:
            unknown.setdefault(r.unknown, []).append(r.name)
    out += [f"unknown ({', '.join(names)}): {why}" for why, names in unknown.items()]
    if aimed and answer.curves and answer.first:
        out.append(f"steps are medians from {answer.curves}; ranges are those of seeds and of the step's interval")
    if answer.first:
        sure = "surely" if answer.surely else "by the median, not surely,"
        out.append(f"first to {answer.target}, {sure}: {answer.first}")
    out.append("age: global batches of others' gradients applied since the weights were pulled")
    return [line(""), result, *(line(f"note: {text}", "dim") for text in out)]


def _key(r: ConsistencyRow, *, aimed: bool) -> tuple[bool, float]:
    middle = r.time_to_target.median_s if r.time_to_target is not None else None
    return (middle is None, r.step_time_s or 0.0) if not aimed or middle is None else (False, middle)


def _steps(r: ConsistencyRow) -> str:
    s = r.steps
    if s is None:
        return NOTHING
    if s.reached == 0:
        return "not reached"
    low, high = f"{s.low:.0f}" if s.low is not None else NOTHING, f"{s.high:.0f}" if s.high is not None else "?"
    return f"{s.median:.0f} ({low} to {high})" if s.median is not None else f"{low} or more"


def _time(r: ConsistencyRow) -> str:
    t = r.time_to_target
    if t is None or t.median_s is None:
        return NOTHING
    return f"{seconds(t.median_s)} ({seconds(t.low_s)} to {seconds(t.high_s)})"
