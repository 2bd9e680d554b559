"""Figures beside what others published, for reading."""

from __future__ import annotations

from rich.console import RenderableType

from asa.report.text.tables import line, table
from benchmarks.truth.figures import Truth


def render(truth: Truth) -> list[RenderableType]:
    """A table a part, then what was missed and why, and what was left out."""
    said: list[RenderableType] = []
    for part in dict.fromkeys(f.part for f in truth.figures):
        made = table(part, ("", "figure", "", "target", "verdict"))
        for f in truth.figures:
            if f.part == part:
                made.add_row(f.name, f"{f.figure:.10g}", f.unit, f.target, verdict(f.met))
        said += [made, *(line(f"  {f.name}: {f.note}") for f in truth.figures if f.part == part and f.note), line("")]
    judged = [f for f in truth.figures if f.met is not None]
    said.append(line(f"{len(judged) - truth.missed} of {len(judged)} targets met"))
    said += [line(f"missed: {f.name}: {f.figure:.4g}, target {f.target}") for f in judged if not f.met]
    return said + [line(f"left out: {text}") for text in truth.left_out]


def verdict(met: bool | None) -> str:
    """A word for the last column.

    >>> verdict(True), verdict(False), verdict(None)
    ('met', 'missed', '-')
    """
    return "-" if met is None else "met" if met else "missed"
