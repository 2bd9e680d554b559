"""Results of ``asa doctor``: one line per check, with a mark and the repair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from asa.report.text.tables import line


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of one check. ``needed`` is False for what asa can do without; ``fix`` is empty if ``ok``."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = True


def render(checks: Sequence[Check]) -> list[RenderableType]:
    """What is missing, in one line, then one line per check."""
    wide = max((len(c.name) for c in checks), default=0)
    missing = [c.name for c in checks if not c.ok and c.needed]
    without = [c.name for c in checks if not c.ok and not c.needed]
    first = f"missing: {', '.join(missing)}" if missing else "everything that is needed is here"
    lines: list[RenderableType] = [line(first + (f"; without: {', '.join(without)}" if without else ""), "bold")]
    for c in checks:
        mark = "✓" if c.ok else "✗" if c.needed else "–"
        repair = f"; {c.fix}" if not c.ok and c.fix else ""
        style = "" if c.ok else "red" if c.needed else "yellow"
        lines.append(line(f"{mark} {c.name:<{wide}}  {c.detail}{repair}", style))
    return lines
