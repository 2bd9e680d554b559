"""A comparison as files: JSON, CSV, every figure in three formats, and one page that needs no network."""

from __future__ import annotations

import re
from html import escape
from io import StringIO
from pathlib import Path

from matplotlib import rc_context

from asa.ir import codec
from asa.ir.bench import Bench
from asa.report import bench as words
from asa.report.charts import Chart, charts

STYLE = """
:root { --ink: #222; --soft: #666; --line: #ddd; --accent: #d55e00; --paper: #fff; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 1080px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
p.soft, figcaption { color: var(--soft); font-size: .9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tr.asa td { font-weight: 600; color: var(--accent); }
tr.missing td { color: var(--soft); } figure { margin: 1.4rem 0; } figure svg { max-width: 100%; height: auto; }
ul { padding-left: 1.2rem; } code { font-size: .85em; }
"""


def write(bench: Bench, folder: Path) -> list[Path]:
    """Write everything into ``folder``; returns the paths, the page first."""
    page, data, table = folder / "report.html", folder / "bench.json", folder / "results.csv"
    codec.save(bench, data)
    words.write_csv(table, words.CSV_COLUMNS, words.csv_rows(bench))
    drawn: list[tuple[Chart, str]] = []
    paths = [page, data, table]
    for chart in charts(bench):
        files, svg = draw(chart, folder / "figures")
        paths += files
        drawn.append((chart, svg))
    page.write_text(html(bench, drawn), encoding="utf-8")
    return paths


def html(bench: Bench, drawn: list[tuple[Chart, str]]) -> str:
    """The page; ``drawn`` are the figures with their inline SVG."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>asa bench: {escape(', '.join(bench.settings.models))}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(', '.join(bench.settings.models))} under every strategy</h1>",
        f'<p class="soft">{escape(words.machine(bench))}. Data: {escape(bench.settings.data_source)}. '
        f"{escape(bench.created)}</p>",
    ]
    for model in bench.settings.models:
        parts += [f"<h2>{escape(model)}</h2>", _results(bench, model)]
        parts += ["<ul>", *(f"<li>{escape(s)}</li>" for s in words.sentences(bench, model)), "</ul>"]
    for chart, svg in drawn:
        parts += [
            f'<h2>{escape(chart.title)}</h2><figure id="{chart.name}">',
            svg,
            f"<figcaption>{escape(chart.caption)} Data: <code>figures/{chart.name}.csv</code>.</figcaption></figure>",
        ]
    if bench.notes:
        parts += ["<h2>Notes</h2><ul>", *(f"<li>{escape(n)}</li>" for n in bench.notes), "</ul>"]
    parts += ["<h2>Plans, written before the first measurement</h2>", _sealed(bench)]
    parts += [f'<p class="soft">First measured step: {escape(bench.started)}.</p>', "</body></html>\n"]
    return "\n".join(parts)


def _results(bench: Bench, model: str) -> str:
    rows = []
    for r in bench.of(model):
        kind = "asa" if r.strategy == "asa" else "missing" if r.step_time_s is None else ""
        rows.append((kind, (*words.times(r), *words.costs(r, bench.settings.num_classes))))
    return _table(words.COLUMNS, rows)


def _sealed(bench: Bench) -> str:
    columns = ("model", "strategy", "plan", "profile", "profile of", "cluster", "written")
    return _table(columns, [("", row) for row in words.sealed(bench)])


def _table(columns: tuple[str, ...], rows: list[tuple[str, tuple[str, ...]]]) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    body = "".join(
        f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for kind, row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def draw(chart: Chart, folder: Path) -> tuple[list[Path], str]:
    """SVG, PDF, PNG and CSV of one figure, and the SVG as it goes into the page."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.name,
        "pdf.fonttype": 42,
        "font.family": "sans-serif",
        "font.size": 9,
    }
    with rc_context(settings):
        figure = chart.draw(chart.rows)
        svg = StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
        paths = [folder / f"{chart.name}.{kind}" for kind in ("svg", "pdf", "png", "csv")]
        paths[0].write_text(svg.getvalue(), encoding="utf-8")
        figure.savefig(paths[1], format="pdf", metadata={"CreationDate": None})
        figure.savefig(paths[2], format="png", dpi=150)
    words.write_csv(paths[3], chart.columns, chart.rows)
    return paths, inline(svg.getvalue(), chart.name)


def inline(svg: str, prefix: str) -> str:
    """An SVG document as an element of a page: no prolog, and ids that no other figure has."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', body)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", body).strip()
