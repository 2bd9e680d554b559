"""Text of a simulated step: the streams of every stage in letters, and sums for each kind of work."""

from __future__ import annotations

from rich.console import RenderableType

from asa.report.text.tables import line, table
from asa.report.units import percent, seconds
from asa.simulator.timeline import Timeline

LETTERS = {
    "forward": "F",
    "backward": "B",
    "boundary": "x",
    "inside": "i",
    "gradient": "G",
    "update": "U",
    "transfer": "t",
}


def render(timeline: Timeline, *, width: int = 65) -> list[RenderableType]:
    """Streams, legend and sums."""
    result = table(
        "Work of a step" + (", all stages" if len(timeline.stages) > 1 else " on the busiest rank"),
        ("kind", "letter", "pieces", "time", "share of the step"),
    )
    for kind, letter in LETTERS.items():
        events = [e for e in timeline.events if e.kind == kind]
        if events:
            time = sum(e.end_s - e.start_s for e in events)
            result.add_row(kind, letter, str(len(events)), seconds(time), percent(time / timeline.step_time_s))
    size = f"{timeline.ranks} rank{'s' * (timeline.ranks > 1)}"
    shown = [line(f"{timeline.model} on {size}: a step of {seconds(timeline.step_time_s)}", "bold")]
    for stage, ranks in enumerate(timeline.stages or (tuple(range(timeline.ranks)),)):
        if len(timeline.stages) > 1:
            shown.append(line(f"stage {stage}, ranks {ranks[0]} to {ranks[-1]}"))
        shown.append(line(f"compute        {strip(timeline, 'compute', width, stage)}"))
        shown.append(line(f"communication  {strip(timeline, 'communication', width, stage)}"))
    return [*shown, line(""), result]


def strip(timeline: Timeline, stream: str, width: int, stage: int = 0) -> str:
    """``width`` letters over the step: each shows the kind of work with the largest share there, or a dot if there is
    none."""
    cell = timeline.step_time_s / width
    filled: list[dict[str, float]] = [{} for _ in range(width)]
    for e in timeline.events:
        if e.stream != stream or e.stage != stage:
            continue
        first, last = int(e.start_s / cell), min(width - 1, int(e.end_s / cell))
        for i in range(min(first, width - 1), last + 1):
            share = min(e.end_s, (i + 1) * cell) - max(e.start_s, i * cell)
            filled[i][LETTERS[e.kind]] = filled[i].get(LETTERS[e.kind], 0.0) + share
    return "".join(max(f, key=lambda k: f[k]) if f and sum(f.values()) > 0.1 * cell else "." for f in filled)
