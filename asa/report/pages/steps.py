"""Figures of traced steps: the plan's timeline above the run's, for every rank, one figure for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from asa.ir.streams import THREADS
from asa.report.figures.charts import Chart
from asa.report.figures.drawing import ASA, Row, single
from asa.report.pages import bench as page

MOST = 6
"""Largest number of steps on a page."""
_MOST_RANKS, _MOST_PIECES = 4, 1500
"""Largest number of ranks, and of pieces of work in all figures, so that a page stays below 1 MB."""
_SHADES = {
    "forward": "#56B4E9", "backward": "#0072B2", "update": "#999999", "gradient": ASA, "inside": "#CC79A7",
    "boundary": "#E69F00", "transfer": "#009E73",
}  # fmt: skip
_STYLE = """
.steps > label { margin-right: 1rem; } .steps > div { display: none; }
@media print { .steps > div { display: block; } .steps > input, .steps > label { display: none; } }
"""
_STREAMS = {number: stream for stream, number in THREADS.items()}


def charts(trace: Mapping[str, Any]) -> tuple[Chart, ...]:
    """One figure for each of the first traced steps; ``trace`` is that of :func:`asa.report.trace.together`."""
    rows = pieces(trace)
    steps = sorted({int(row[0] or 0) for row in rows})
    caption = "For every rank: the plan, and below it the run. All steps have the same time scale."
    if any(row[2] == "measured" and row[4] == "transfer" and row[5] == row[6] for row in rows):
        caption += " For messages between stages on CPUs, only the start was measured."
    numbers = steps[: max(1, min(MOST, _MOST_PIECES * len(steps) // max(1, len(rows))))]
    end = max((float(row[6] or 0) for row in rows if row[0] in numbers), default=0.0)
    return tuple(
        Chart(
            name=f"step_{number}",
            title=f"Traced step {number}",
            caption=caption,
            columns=("step", "rank", "side", "stream", "kind", "start_ms", "end_ms", "name"),
            rows=tuple(row for row in rows if row[0] == number),
            draw=lambda rows: draw(rows, end),
        )
        for number in numbers
    )


def pieces(trace: Mapping[str, Any]) -> list[Row]:
    """Rows: step (from 1), rank, ``planned`` or ``measured``, stream, kind, start and end in milliseconds since the
    begin of the step, and name. The plan's pieces are in every step."""
    events = [e for e in trace["traceEvents"] if int(e["pid"]) // 2 < _MOST_RANKS]
    begins: dict[int, list[float]] = {}
    for e in events:
        if e["ph"] == "i":
            begins.setdefault(int(e["pid"]), []).append(float(e["ts"]))
    steps = range(1, 1 + max(map(len, begins.values()), default=0))
    rows: list[Row] = []
    for e in (e for e in events if e["ph"] == "X"):
        rank, measured = divmod(int(e["pid"]), 2)
        start, length = float(e["ts"]), float(e["dur"])
        if not measured:
            inside = [(step, start) for step in steps]
        else:
            own = sorted(begins.get(int(e["pid"]), ()))
            step = sum(at <= start + 1e-3 for at in own)
            inside = [(step, start - own[step - 1])] if step else []
        for step, at in inside:
            side = "measured" if measured else "planned"
            stream = _STREAMS[int(e["tid"])]
            rows.append((step, rank, side, stream, str(e["cat"]), at / 1e3, (at + length) / 1e3, str(e["name"])))
    return sorted(rows, key=lambda row: [*map(str, row[:2]), str(row[2]) == "measured", float(row[5] or 0)])


def draw(rows: Sequence[Row], end_ms: float) -> Figure:
    """Figure of rows as in :func:`pieces`, of one step, from 0 to ``end_ms``."""
    order = list(THREADS)
    lines = sorted(
        {(int(r[1] or 0), str(r[2]), str(r[3])) for r in rows},
        key=lambda line: (line[0], line[1] == "measured", order.index(line[2])),  # type: ignore[arg-type]
    )
    figure, axes = single(0.9 + 0.3 * max(3, len(lines)), width=8.4)
    for kind, shade in _SHADES.items():
        found = [(lines.index((int(r[1] or 0), str(r[2]), str(r[3]))), float(r[5] or 0), float(r[6] or 0))
                 for r in rows if r[4] == kind]  # fmt: skip
        if found:
            ys, starts, ends = zip(*found, strict=True)
            widths = [b - a for a, b in zip(starts, ends, strict=True)]
            edge = 0.8 * (kind == "transfer")  # of some only the start is known
            axes.barh(ys, widths, left=starts, height=0.72, color=shade, label=kind, linewidth=edge, edgecolor=shade)
    names = [f"rank {r} {side}" + ("" if stream == "compute" else f", {stream}") for r, side, stream in lines]
    axes.set_yticks(range(len(lines)), names)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlim(0, 1.02 * end_ms if end_ms else None)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def section(drawings: Sequence[tuple[Chart, str]]) -> list[str]:
    """HTML of the figures, of which one is shown at a time. The arrow keys step through them; print shows all."""
    if not drawings:
        return []
    shown = "".join(
        f".steps > input:nth-of-type({n}):checked ~ div:nth-of-type({n}) {{ display: block; }}\n"
        for n in range(1, 1 + len(drawings))
    )
    parts = [f"<style>{_STYLE}{shown}</style>", '<h2 id="steps">Plan beside run, step by step</h2>']
    parts.append('<div class="steps" role="group" aria-labelledby="steps">')
    for i, (chart, _) in enumerate(drawings):
        key = f"show-{escape(chart.name)}"
        parts.append(
            f'<input type="radio" name="steps" id="{key}"{" checked" * (i == 0)}>'
            f'<label for="{key}">step {i + 1}</label>'
        )
    parts += [f"<div>{page.figure(chart, svg, 'log.jsonl')}</div>" for chart, svg in drawings]
    return [*parts, "</div>"]
