"""Text of a study: one merged table on the terminal and in files, compared with published numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from asa.ir.bench import BenchResult
from asa.ir.study import Study, StudyRow
from asa.report.text import study_values as figures
from asa.report.text.study_values import Figures
from asa.report.text.tables import folded as wrapped
from asa.report.text.tables import line, table
from asa.report.units import NOTHING, percent, rate, seconds, size

_MARKS = {"measured": "", "predicted": "~", "refused": "-", "open": "..."}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A block to run: its title, what is done, its estimated seconds and the ``basis`` of these."""

    title: str
    mode: str
    strategies: tuple[str, ...]
    epochs: int
    seconds: float
    basis: str


def planned(name: str, title: str, items: Sequence[Planned], budget_s: float, folder: Path) -> list[RenderableType]:
    """The open work of a study, and its estimated duration."""
    lines: list[RenderableType] = [line(f"study {name}: {title}", "bold")]
    for item in items:
        last = "done" if item.basis == "done" else f"about {seconds(item.seconds)}, {item.basis}"
        lines.append(line(f"  {item.mode}: {item.title}"))
        lines.append(line(f"    {', '.join(item.strategies)}: {last}", "dim"))
    total = sum(item.seconds for item in items)
    fits = "within" if total <= budget_s else "more than"
    lines.append(line(f"about {seconds(total)} in all, {fits} the budget of {seconds(budget_s)}; nothing was run"))
    lines.append(line(f"results go to {folder}; cells that are there already are not run again"))
    return lines


def planned_document(name: str, folder: Path, items: Sequence[Planned], budget_s: float) -> dict[str, Any]:
    """The content of :func:`planned` as a document."""
    return {
        "kind": "study-plan",
        "study": name,
        "folder": str(folder),
        "budget_s": budget_s,
        "about_s": sum(i.seconds for i in items),
        "blocks": [
            {"title": i.title, "mode": i.mode, "strategies": list(i.strategies), "epochs": i.epochs,
             "about_s": i.seconds, "how": i.basis} for i in items
        ],
    }  # fmt: skip


def render(study: Study) -> list[RenderableType]:
    """A table for every model, data set and place, in 80 columns; refusals and notes below."""
    lines: list[RenderableType] = [line(f"study {study.name}: {study.title}", "bold")]
    rows = figures.of(study)
    for heading in dict.fromkeys(f.heading for f in rows):
        group = [f for f in rows if f.heading == heading and f.row.result is not None]
        if not group:
            continue
        group_table = table(heading, ("strategy", "ranks", "step", "samples/s", "epoch", "memory", "learnt"))
        for f in group:
            group_table.add_row(
                f.strategy, str(f.row.cell.gpus),
                _MARKS[f.row.state] + seconds(f.step_s), rate(f.samples_per_s), seconds(f.epoch_s),
                size(f.memory_bytes), f.learnt,
                style="bold" if f.row.cell.strategy == "asa" else "dim" if f.row.state == "predicted" else "",
            )  # fmt: skip
        lines += [line(""), group_table, *_costs(study, group)]
    if any(f.row.state == "predicted" for f in rows):
        lines.append(line("~: predicted, not run"))
    if any("microbatches" in f.settings for f in rows):
        lines.append(line("m: microbatches that were asked for"))
    lines += [line(""), *(line(wrapped(text)) for text in folded(study))]
    published_rows = [f for f in rows if f.published]
    if published_rows:
        comparison = table(
            "beside what was published", ("model", "strategy", "ranks", "figure", "here", "published"), left=2
        )
        for f in published_rows:
            for p, value in f.published:
                comparison.add_row(
                    f.row.cell.model, f.variant, str(f.row.cell.gpus), p.metric.replace("_", " "),
                    NOTHING if value is None else f"{_MARKS[f.row.state]}{value:.4g}",
                    f"{p.value:g} ({figures.conditions(p)})",
                )  # fmt: skip
        lines += [line(""), comparison]
    missing = figures.unmatched(study, rows)
    if missing:
        lines.append(line(f"{len(missing)} published figures have no cell beside them: {figures.grouped(missing)}"))
    lines += [line(wrapped(f"differs: {text}")) for text in study.differs]
    return lines


def folded(study: Study) -> list[str]:
    """Single lines with each reason of refusal and its cells, notes, and the open work."""
    lines = [] if study.price is None else [f"costs: at {study.price:g} for a device and hour"]
    lines += [f"refused ({n}): {_few(cells)}: {why}" for n, (why, cells) in enumerate(_reasons(study).items(), 1)]
    left = _open_cells(study)
    if left:
        reasons = "; ".join(dict.fromkeys(why for _, why in left))
        remedy = "" if "the same command" in reasons else "; the same command goes on"
        lines.append(f"left ({len(left)}): {_few([c for c, _ in left])}: {reasons}{remedy}")
    rows = figures.of(study)
    diverged = [_cell(f.row) for f in rows if f.diverged]
    if diverged:
        lines.append(
            f"diverged ({len(diverged)}): {_few(diverged)}: the training loss is far above that of guessing, so only "
            "times and memory say something; try a lower --lr"
        )
    notes = dict.fromkeys(n for row in study.rows for n in row.notes)
    sources = dict.fromkeys(row.data_source for row in study.rows if row.data_source)
    lines += figures.against_synchronous(study, rows)
    lines += [f"note: {n}" for n in notes] + [f"data: {s}" for s in sources]
    return [" ".join(text.split()) for text in lines]  # an error of several lines would end a comment or a list


def _reasons(study: Study) -> dict[str, list[str]]:
    """Reasons of refused cells, each with its cells; a reason's number is its position."""
    reasons: dict[str, list[str]] = {}
    for row in study.rows:
        if row.state == "refused":
            reasons.setdefault(row.why, []).append(_cell(row))
    return reasons


def _open_cells(study: Study) -> list[tuple[str, str]]:
    """Cells that another run of the command would take up, each with the reason why it is left."""
    return [
        (_cell(row), row.why or "not run yet")
        if row.state == "open"
        else (_cell(row), "the budget, a stop or a lost rank ended them before their epochs")
        for row in study.rows
        if row.state == "open" or row.ended_early
    ]


def _cell(row: StudyRow) -> str:
    return f"{row.cell.strategy} of {row.cell.model} on {row.cell.gpus}"


def _few(cells: Sequence[str]) -> str:
    cells = list(dict.fromkeys(cells))
    more = f" and {len(cells) - 4} more" if len(cells) > 4 else ""
    return ", ".join(cells[:4]) + more


def _costs(study: Study, group: Sequence[Figures]) -> list[RenderableType]:
    """A table of costs and of the way to the target, if the study has a price or a target."""
    priced = ("cost of an epoch", "of the run") if study.price is not None else ()
    aimed = (f"to an accuracy of {percent(study.target)}",) if study.target is not None else ()
    if not priced and not aimed:
        return []
    result = table("", ("strategy", "ranks", *priced, *aimed), left=1)
    result.title = None
    for f in group:
        costs = [NOTHING if v is None else f"{v:.3g}" for v in (f.cost_per_epoch, f.cost_of_run)]
        result.add_row(f.strategy, str(f.row.cell.gpus), *(costs if priced else ()), *((f.to_target,) if aimed else ()))
    return [line(""), result]


TABLE_COLUMNS = (
    "model", "data", "ranks", "batch", "strategy", "epochs", *figures.SETTINGS, "state", "step", "samples/s", "epoch",
    "age of gradients", "utilisation", "MFU", "active memory", "state memory", "communication", "learnt", "to target",
    "cost of an epoch", "cost of the run", "published",
)  # fmt: skip
"""Columns of the tables in a paper."""


def cells(f: Figures, reasons: Sequence[str], *, price: bool) -> tuple[str, ...]:
    """A row with the columns :data:`TABLE_COLUMNS`, as text. Refused cells have the number of their reason."""
    c, r = f.row.cell, f.row.result
    settings = (f.settings.get(name, NOTHING) for name in figures.SETTINGS)
    key = (c.model, c.data, str(c.gpus), str(c.global_batch), c.strategy, str(c.epochs), *settings)
    if r is None:
        number = f" ({reasons.index(f.row.why) + 1})" if f.row.why in reasons else ""
        return (*key, f.row.state + number, *([NOTHING] * (len(TABLE_COLUMNS) - len(key) - 1)))
    return (
        *key, f.row.state + (f" for {c.devices}" if f.row.state == "predicted" else ""),
        seconds(f.step_s), rate(f.samples_per_s), seconds(f.epoch_s), _age(r), percent(r.utilisation), percent(r.mfu),
        size(f.memory_bytes), size(r.state_memory_bytes), percent(f.communication_share), f.learnt, f.to_target,
        *(f"{v:.3g}" if price and v is not None else NOTHING for v in (f.cost_per_epoch, f.cost_of_run)),
        "; ".join(
            f"{p.metric.replace('_', ' ')} {p.value:g}{'' if p.model else ' (model not named)'}" for p, _ in f.published
        )
        or NOTHING,
    )  # fmt: skip


def _age(r: BenchResult) -> str:
    """Mean age of gradients at servers, and the highest, in global batches."""
    return NOTHING if r.mean_age is None else f"{r.mean_age:.2g} (most {len(r.ages) - 1})"


PUBLISHED_COLUMNS = ("model", "strategy", "ranks", "figure", "here", "by", "published", "hardware", "source")
"""Columns of tables with published figures."""


def comparison_rows(rows: Sequence[Figures]) -> list[tuple[str, ...]]:
    """Rows with the columns :data:`PUBLISHED_COLUMNS`, as text: published figures, and those here beside them."""
    return [
        (f.row.cell.model, f.variant, str(f.row.cell.gpus), p.metric.replace("_", " "),
         NOTHING if value is None else f"{value:.4g}", f.row.state, f"{p.value:g}", figures.conditions(p), p.source)
        for f in rows for p, value in f.published
    ]  # fmt: skip


def markdown(study: Study, rows: Sequence[Figures]) -> str:
    """The table and all notes, as Markdown."""
    indices, texts = columns(study, rows)
    lines = [f"# {study.title}", "", f"Study `{study.name}`, {study.created}.", ""]
    lines += [_row(TABLE_COLUMNS[i] for i in indices), f"|{'---|' * len(indices)}"]
    lines += [_row(row[i] for i in indices) for row in texts]
    lines += ["", *(f"- {_literal(text)}" for text in (*folded(study), *(f"differs: {d}" for d in study.differs)))]
    beside = comparison_rows(rows)
    if beside:
        lines += ["", _row(PUBLISHED_COLUMNS), f"|{'---|' * len(PUBLISHED_COLUMNS)}", *map(_row, beside)]
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(_literal(text).replace('|', chr(92) + '|') for text in cells)} |"


def _literal(text: str) -> str:
    """``text`` in Markdown, which takes what begins with ``<`` for markup and hides it."""
    return text.replace("<", "&lt;")


_SPECIAL = {c: "\\" + c for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip


def latex(study: Study, rows: Sequence[Figures]) -> str:
    """The table in LaTeX with ``booktabs``."""
    indices, texts = columns(study, rows)
    left_aligned = {"model", "data", "strategy", "state"}
    lines = [
        f"% {study.title}; {study.created}",
        *(f"% {text}" for text in folded(study)),
        r"\begin{tabular}{" + "".join("l" if TABLE_COLUMNS[i] in left_aligned else "r" for i in indices) + "}",
        r"\toprule",
        " & ".join(_escaped(TABLE_COLUMNS[i]) for i in indices) + r" \\",
        r"\midrule",
        *(" & ".join(_escaped(row[i]) for i in indices) + r" \\" for row in texts),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return "".join(_SPECIAL.get(c, c) for c in text)


def columns(study: Study, rows: Sequence[Figures]) -> tuple[list[int], list[tuple[str, ...]]]:
    """Indices of columns in which any row has a value, and all rows."""
    reasons = list(_reasons(study))
    texts = [cells(f, reasons, price=study.price is not None) for f in rows]
    always = {*TABLE_COLUMNS[: TABLE_COLUMNS.index("samples/s")]} - {*figures.SETTINGS}
    indices = [i for i, name in enumerate(TABLE_COLUMNS) if name in always or any(row[i] != NOTHING for row in texts)]
    return indices, texts
