"""Files of a study: values for other programs, tables for papers, and a page that needs no network, with figures first,
then the merged table and published numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from html import escape
from pathlib import Path

from asa.ir import codec
from asa.ir.bench import BenchResult
from asa.ir.study import Study, StudyCell
from asa.report.figures import drawing
from asa.report.figures.charts import Chart, ratio
from asa.report.figures.drawing import Row
from asa.report.pages import bench as page
from asa.report.text import study as words
from asa.report.text import study_values as figures
from asa.report.text.bench import clear_communication, write_csv
from asa.report.text.study_values import Figures
from asa.report.units import ranks

Cells = dict[StudyCell, Figures]
"""All rows of a study by their cells."""


def write(study: Study, folder: Path) -> list[Path]:
    """Write ``study.csv`` with all values, ``study.md`` and ``study.tex`` with the main ones, and ``report.html`` with
    figures beside it; returns the paths."""
    rows = figures.of(study)
    write_csv(folder / "study.csv", figures.COLUMNS, [figures.plain(f) for f in rows])
    codec.write(words.markdown(study, rows), folder / "study.md")
    codec.write(words.latex(study, rows), folder / "study.tex")
    drawings = [(chart, page.draw(chart, folder / "figures")[1]) for chart in charts(rows) if chart.rows]
    codec.write(html(study, rows, drawings), folder / "report.html")
    return [folder / name for name in ("study.csv", "study.md", "study.tex", "report.html")]


def charts(rows: list[Figures]) -> tuple[Chart, ...]:
    """Throughput and speed-up over ranks, communication, accuracy and loss over epochs and over time, memory, predicted
    against measured."""
    last, by_cell = _longest(rows), {f.row.cell: f for f in rows}
    return (_throughput(last), _speedup(last, by_cell), _communication(last, by_cell), *_learning(last), _memory(last),
            _scatter(last))  # fmt: skip


def _longest(rows: list[Figures]) -> list[Figures]:
    """Rows without those of fewer epochs of the same run, which have the same values."""
    longest: dict[object, Figures] = {}
    for f in rows:
        key = replace(f.row.cell, epochs=0)
        if key not in longest or f.row.cell.epochs > longest[key].row.cell.epochs:
            longest[key] = f
    return list(longest.values())


def first_sentence(study: Study, rows: list[Figures]) -> str:
    """Number of cells, and the fastest strategy of each measured model, among cells that had a core for every rank and
    a quiet machine."""
    states = [row.state for row in study.rows]
    counted = ", ".join(f"{states.count(s)} {s}" for s in ("measured", "predicted", "refused", "open") if s in states)
    busy = [row for row in study.rows if figures.busy(row)]
    fastest = []
    for model in dict.fromkeys(f.row.cell.model for f in rows):
        timed = [f for f in rows if f.row.cell.model == model and f.row.state == "measured" and f.samples_per_s
                 and not f.row.oversubscribed and f.row not in busy]  # fmt: skip
        if timed:
            best = max(timed, key=lambda f: f.samples_per_s or 0.0)
            fastest.append(f"{best.variant} on {ranks(best.row.cell.gpus)} for {model}")
    most = f" Most samples a second: {', '.join(fastest)}." if fastest else ""
    among = f" {len(busy)} measured on a busy machine are not compared." if busy else ""
    return f"{len(states)} cells: {counted}.{most}{among}"


def html(study: Study, rows: list[Figures], drawings: list[tuple[Chart, str]]) -> str:
    """The page; ``drawings`` contains the figures with their inline SVG."""
    indices, texts = words.columns(study, rows)
    table = [
        ("asa" if f.row.cell.strategy == "asa" else "missing" if f.row.result is None else "",
         tuple(row[i] for i in indices)) for f, row in zip(rows, texts, strict=True)
    ]  # fmt: skip
    links = [(f"{c.name}-title", c.title) for c, _ in drawings] + [("cells", "All cells"), ("notes", "Notes")]
    published_rows = [("", tuple(row[:-1])) for row in words.comparison_rows(rows)]
    sources = "; ".join(dict.fromkeys(row[-1] for row in words.comparison_rows(rows)))
    notes = (*words.folded(study), *study.differs)
    parts = [
        page.head(f"asa study: {study.name}"),
        f"<h1>{escape(study.title)}</h1>",
        f'<p class="first">{escape(first_sentence(study, rows))}</p>',
        *(page.figure(c, svg, "study.json") for c, svg in drawings[:1]),
        page.contents(links),
        *(page.figure(c, svg, "study.json") for c, svg in drawings[1:]),
        '<h2 id="cells">All cells</h2>',
        page.html_table("Every cell of the study", tuple(words.TABLE_COLUMNS[i] for i in indices), table),
        *(
            [
                "<h2>Compared with published results</h2>",
                page.html_table(f"Published in: {sources}", words.PUBLISHED_COLUMNS[:-1], published_rows),
            ]
            if published_rows
            else []
        ),
        '<h2 id="notes">Notes</h2><ul>',
        *(f"<li>{escape(n)}</li>" for n in notes),
        f'</ul><p class="soft">{escape(study.created)}</p></main></body></html>\n',
    ]
    return "\n".join(parts)


def _throughput(rows: list[Figures]) -> Chart:
    chart_rows: list[Row] = [
        (f.panel, f.strategy, f.row.cell.gpus, f.row.state, f.samples_per_s, f.row.cell.devices)
        for f in rows if f.samples_per_s is not None
    ]  # fmt: skip
    return Chart(
        name="throughput", title="Samples per second over ranks",
        caption="Filled marks and lines: measured, waiting for data included. Open marks, dashed: predicted.",
        columns=("panel", "strategy", "ranks", "state", "samples_per_s", "devices"), rows=tuple(chart_rows),
        draw=drawing.over_ranks,
    )  # fmt: skip


def _speedup(rows: list[Figures], by_cell: Cells) -> Chart:
    """Speed-up over the single device of the same training, on the same devices."""
    chart_rows: list[Row] = []
    for f in rows:
        single, r = figures.counterpart(f, by_cell, "single", gpus=1), f.row.result
        if single is None or single.row.result is None or r is None or f.row.cell.strategy == "single":
            continue
        measured_s = None if f.row.oversubscribed else _measured_s(r)
        ratios = (ratio(single.row.result.predicted_step_time_s, r.predicted_step_time_s),
                  ratio(_measured_s(single.row.result), measured_s))  # fmt: skip
        if any(ratios):
            chart_rows.append(
                (f"{f.panel}, {f.row.cell.devices}", f.strategy, f.row.cell.gpus, r.predicted_step_time_s, measured_s,
                 *ratios)
            )  # fmt: skip
    return Chart(
        name="speedup", title="Speed-up over one device",
        caption="Dashed lines: predicted. Marks: measured, where every rank has a core.",
        columns=("panel", "strategy", "ranks", "predicted_s", "measured_s", "predicted_speedup", "measured_speedup"),
        rows=tuple(chart_rows), draw=drawing.speedup,
    )  # fmt: skip


def _measured_s(r: BenchResult) -> float | None:
    return None if r.step_time_s is None else r.step_time_s.median


def _communication(rows: list[Figures], by_cell: Cells) -> Chart:
    """A measured step, divided into computation and exposed communication."""
    chart_rows: list[Row] = []
    for f in rows:
        single, r = figures.counterpart(f, by_cell, "single", gpus=1), f.row.result
        step_s = None if r is None else _measured_s(r)
        if r is None or step_s is None or r.communication_s is None:
            continue
        if clear_communication(r, None if single is None else single.row.result):
            chart_rows.append(
                (f"{f.panel}, {ranks(f.row.cell.gpus)}", f.strategy, step_s - r.communication_s, r.communication_s,
                 f.communication_share, r.communication_low_s, r.communication_high_s)
            )  # fmt: skip
    return Chart(
        name="communication", title="Computation against communication",
        caption="Measured median step: computation, and communication that does not overlap with it, with its 95 % "
        "interval. Cells are left out if noise hides how much that is.",
        columns=("panel", "strategy", "compute_s", "communication_s", "share", "low_s", "high_s"),
        rows=tuple(chart_rows), draw=drawing.compute_communication,
    )  # fmt: skip


def _points(rows: Iterable[Figures]) -> tuple[Row, ...]:
    return tuple(
        (f"{f.panel}, {ranks(f.row.cell.gpus)}", f.strategy, a.epoch, a.seconds, a.train_loss,
         a.validation_loss, a.validation_accuracy)
        for f in rows if f.row.result is not None for a in f.row.result.accuracy
    )  # fmt: skip


_LEARNING = ("panel", "strategy", "epoch", "seconds", "train_loss", "validation_loss", "validation_accuracy")


def _learning(rows: list[Figures]) -> tuple[Chart, Chart, Chart]:
    """Validation accuracy over epochs and over the time of training, and the loss over epochs."""
    over_epochs = Chart(
        name="accuracy", title="Validation accuracy over epochs", columns=_LEARNING,
        rows=_points(f for f in rows if f.accuracy is not None),
        caption="The same data, order and seed for every strategy. Runs that end near the accuracy of guessing are not "
        "shown.", draw=drawing.accuracy,
    )  # fmt: skip
    over_time = replace(
        over_epochs, name="accuracy_time", title="Validation accuracy over training time",
        caption="Seconds of steps and of waiting for data, without validation and the turns of other strategies.",
        draw=drawing.accuracy_over_time,
    )  # fmt: skip
    loss = replace(
        over_epochs, name="loss", title="Validation loss over epochs", draw=drawing.loss,
        rows=_points(f for f in rows if not f.diverged),
        caption="The loss shows learning while accuracy is still near that of guessing. Runs that diverged are not "
        "shown.",
    )  # fmt: skip
    return over_epochs, over_time, loss


def _memory(rows: list[Figures]) -> Chart:
    chart_rows: list[Row] = [
        (f"{f.panel}, {ranks(f.row.cell.gpus)}", f.strategy, r.ranks, r.peak_memory_bytes,
         r.predicted_memory_bytes, r.state_memory_bytes)
        for f in rows if (r := f.row.result) is not None and f.row.state == "measured"
    ]  # fmt: skip
    return Chart(
        name="memory", title="Peak memory of the fullest rank",
        caption="Bars: measured active peak. Diamonds: the prediction.",
        columns=("panel", "strategy", "ranks", "peak_memory_bytes", "predicted_memory_bytes", "state_memory_bytes"),
        rows=tuple(chart_rows), draw=drawing.memory,
    )  # fmt: skip


def _scatter(rows: list[Figures]) -> Chart:
    chart_rows: list[Row] = [
        ("all cells", f.row.cell.strategy, r.step_time_s.median, r.predicted_step_time_s, r.predicted_low_s,
         r.predicted_high_s)
        for f in rows if (r := f.row.result) is not None and r.step_time_s is not None and r.predicted_step_time_s
    ]  # fmt: skip
    return Chart(
        name="predicted_measured", title="Predicted against measured step time",
        caption="Inside the grey band the error is at most 10 %. Lines: the interval of the prediction.",
        columns=("panel", "strategy", "measured_s", "predicted_s", "low_s", "high_s"), rows=tuple(chart_rows),
        draw=drawing.predicted_measured,
    )  # fmt: skip
