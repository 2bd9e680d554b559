"""Common parts of all tables: their style, and equal consecutive components on one line."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from asa.ir.plan import Assignment


def table(title: str, columns: Sequence[str], *, left: int = 1) -> Table:
    """An empty table; the first ``left`` columns are left-aligned, the others (numbers) right-aligned."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", title_style="bold")
    for i, name in enumerate(columns):
        result.add_column(name, justify="left" if i < left else "right", overflow="fold", no_wrap=i < left)
    return result


def line(text: str, style: str = "") -> Text:
    """One line of text without markup."""
    return Text(text, style=style)


def folded(text: str, width: int = 80) -> str:
    """Text wrapped to at most ``width`` characters a line; a long word is not broken. Later lines are indented by four,
    or to the column of what follows a heading in front.

    >>> print(folded("loss 5.687; this plan stays the best", 20))
    loss 5.687; this
        plan stays the
        best
    >>> print(folded("Plan  1.2 s a step, 53 samples/s", 20))
    Plan  1.2 s a step,
          53 samples/s
    """
    lines: list[str] = []
    for part in text.split("\n"):
        heading = re.match(r"\w+ {2,}", part)
        indent = " " * (heading.end() if heading else 4)
        lines += textwrap.wrap(
            part, max(1, width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)


def plain(parts: Iterable[RenderableType], *, width: int = 100) -> str:
    """``parts`` as plain text without colour, for files and tests."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return captured.get()


def runs(names: Sequence[str]) -> str:
    """First and last of consecutive names, with their number.

    >>> runs(["stem"]), runs(["layer1.0", "layer1.1", "layer1.2"])
    ('stem', 'layer1.0 .. layer1.2 (3)')
    """
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"


def fitted(name: str, width: int = 24) -> str:
    """A name in at most ``width`` characters; the end of a longer one, which distinguishes components.

    >>> fitted("encoder.layers.encoder_layer_11", 20), fitted("stem")
    ('....encoder_layer_11', 'stem')
    """
    return name if len(name) <= width else "..." + name[3 - width :]


def groups(components: Sequence[Assignment]) -> list[tuple[Assignment, tuple[str, ...]]]:
    """Consecutive components with equal assignment: one assignment, and the names of all."""
    members: list[tuple[Assignment, list[str]]] = []
    for c in components:
        if members and _same(members[-1][0], c):
            members[-1][1].append(c.name)
        else:
            members.append((c, [c.name]))
    return [(first, tuple(names)) for first, names in members]


def short(assignment: Assignment) -> str:
    """Short description of an assignment: ``replicate x2``, ``replicate x2, tensor x4``, ``repeated``."""
    words = []
    if assignment.data.degree > 1 or assignment.data.strategy != "replicate":
        words.append(assignment.data.text)
    if assignment.tensor.degree > 1:
        words.append(f"{assignment.tensor.strategy} x{assignment.tensor.degree}")
    if assignment.checkpoint:
        words.append("checkpointed")
    if assignment.offload:
        words.append("offloaded")
    return ", ".join(words) or "whole batch, whole weights"


def _same(a: Assignment, b: Assignment) -> bool:
    return replace(a, name=b.name) == b
