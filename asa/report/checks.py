"""What ``asa doctor`` found: a tick or a cross a line, and the repair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from asa.report.tables import line


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing looked at. ``needed`` is false for what asa can do without; ``fix`` is empty where ``ok``."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = True


def render(checks: Sequence[Check]) -> list[RenderableType]:
    """A line a check."""
    wide = max((len(c.name) for c in checks), default=0)
    said: list[RenderableType] = []
    for c in checks:
        mark = "✓" if c.ok else "✗" if c.needed else "–"
        repair = f"; {c.fix}" if not c.ok and c.fix else ""
        style = "" if c.ok else "red" if c.needed else "yellow"
        said.append(line(f"{mark} {c.name:<{wide}}  {c.detail}{repair}", style))
    return said
