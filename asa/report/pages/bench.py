"""Files of a benchmark: JSON, CSV, every figure in three formats, and one page that needs no network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from io import BytesIO, StringIO
from pathlib import Path

from matplotlib import rc_context

from asa.ir import codec
from asa.ir.bench import Bench
from asa.report.figures.charts import Chart, charts
from asa.report.figures.drawing import hovering
from asa.report.text import bench as words
from asa.report.units import NOTHING

_LARGEST = 1.35
"""Largest enlargement of a figure, at which its letters are as large as those of the page."""

STYLE = """
:root { --ink: #1f2328; --soft: #57606a; --line: #d0d7de; --accent: #9a3b00; --paper: #fff; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #a5b0bb; --line: #3d444d; --accent: #ffa657; --paper: #0d1117; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 1080px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
p.first { font-size: 1.1rem; } p.soft, figcaption, caption { color: var(--soft); font-size: .9rem; }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1rem; } a { color: inherit; }
.wide, .paper { overflow-x: auto; --cover: var(--paper);  /* a shadow at the right while something is hidden there */
  background: linear-gradient(to left, var(--cover) 40%, transparent) right / 3rem 100% no-repeat local,
              linear-gradient(to left, #8889, transparent) right / 1rem 100% no-repeat scroll var(--cover); }
.wide:focus { outline: 2px solid var(--accent); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; margin-bottom: 1rem; }
caption { text-align: left; padding-bottom: .3rem; }
caption span { position: sticky; left: 0; display: inline-block; max-width: calc(100vw - 2.4rem); }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
tr.asa > * { font-weight: 600; color: var(--accent); }
tr.missing > * { color: var(--soft); }
figure { margin: 1.4rem 0; } .paper { --cover: #fff; border-radius: 6px; padding: .6rem; }
figure svg { width: 100%; height: auto; display: block; mix-blend-mode: multiply; } figcaption { margin-top: .4rem; }
summary { color: var(--soft); font-size: .9rem; margin-top: .4rem; cursor: pointer; }
ul { padding-left: 1.2rem; } code { font-size: .85em; overflow-wrap: anywhere; }
@media print { body { max-width: none; margin: 0; } nav, details { display: none; }
               figure, table { break-inside: avoid; } }
"""


def write(bench: Bench, folder: Path) -> list[Path]:
    """Write all files into ``folder``; returns the paths, the page first."""
    page, data, table = folder / "report.html", folder / "bench.json", folder / "results.csv"
    codec.save(bench, data)
    words.write_csv(table, words.CSV_COLUMNS, words.csv_rows(bench))
    drawings: list[tuple[Chart, str]] = []
    paths = [page, data, table]
    for chart in charts(bench):
        if not chart.rows:
            continue
        files, svg = draw(chart, folder / "figures")
        paths += files
        drawings.append((chart, svg))
    codec.write(html(bench, drawings), page)
    return paths


def html(bench: Bench, drawings: list[tuple[Chart, str]]) -> str:
    """The page; ``drawings`` contains the figures with their inline SVG."""
    first, *others = drawings
    models = escape(", ".join(bench.settings.models))
    parts = [
        head(f"asa bench: {', '.join(bench.settings.models)}"),
        f"<h1>{models} under every strategy{', on emulated devices' * bench.environment.emulated}</h1>",
        *(f'<p class="first">{escape(words.story(bench, model))}</p>' for model in bench.settings.models),
        figure(*first),
        _contents(bench, drawings),
    ]
    for model in bench.settings.models:
        parts += [f'<h2 id="model-{escape(model)}">{escape(model)}</h2>', *_results(bench, model)]
        parts += ["<ul>", *(f"<li>{escape(s)}</li>" for s in words.sentences(bench, model)), "</ul>"]
    parts += [figure(chart, svg) for chart, svg in others]
    if bench.notes:
        parts += ['<h2 id="notes">Notes</h2><ul>', *(f"<li>{escape(n)}</li>" for n in bench.notes), "</ul>"]
    parts += ['<h2 id="plans">Plans, written before the first measurement</h2>', _sealed(bench)]
    parts += [
        f'<p class="soft">{escape(words.machine(bench))}. Data: {escape(bench.settings.data_source.rstrip("."))}. '
        f"{escape(bench.created)}. First measured step: {escape(bench.started)}.</p>",
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def figure(chart: Chart, svg: str, data_file: str = "bench.json") -> str:
    """A figure with its title, its values, its caption as alternative text, and a reference to the file ``data_file``
    with its data."""
    name = escape(chart.name)
    attributes = f'role="img" aria-labelledby="{name}-title" aria-describedby="{name}-caption"'
    width = re.search(r'<svg[^>]* width="([\d.]+)pt"', svg)
    if width:  # scrolls rather than shrink to unreadable letters; not enlarged much
        attributes += (
            f' style="min-width: {0.75 * float(width[1]):.0f}pt; max-width: {_LARGEST * float(width[1]):.0f}pt"'
        )
    return (
        f'<h2 id="{name}-title">{escape(chart.title)}</h2><figure id="{name}">'
        f'<div class="paper" tabindex="0">{svg.replace("<svg ", f"<svg {attributes} ", 1)}</div>{_values(chart)}'
        f'<figcaption id="{name}-caption">{escape(chart.caption)} Data: <code>figures/{name}.csv</code> beside '
        f"<code>{escape(data_file)}</code>.</figcaption></figure>"
    )


_MOST_ROWS = 60
"""Largest number of rows of a figure whose values are on the page; all are in its file."""


def _values(chart: Chart) -> str:
    """The data of a figure as a table that opens on request: for keyboards, phones and readers of screens, which have
    no pointer that rests on a mark. Empty if there are too many."""
    if len(chart.rows) > _MOST_ROWS:
        return ""
    rows = [
        ("", tuple(NOTHING if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in row))
        for row in chart.rows
    ]
    table = html_table(f"Values of: {chart.title}", chart.columns, rows)
    return f"<details><summary>Values</summary>{table}</details>"


def head(title: str) -> str:
    """The beginning of a page, up to its first heading."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
    )


def contents(links: list[tuple[str, str]]) -> str:
    """A list of links to sections of the page, from (id, text)."""
    items = "".join(f'<li><a href="#{escape(anchor)}">{escape(text)}</a></li>' for anchor, text in links)
    return f'<nav aria-label="Contents"><ul>{items}</ul></nav>'


def _contents(bench: Bench, drawings: list[tuple[Chart, str]]) -> str:
    links = [(f"model-{m}", m) for m in bench.settings.models] + [(f"{c.name}-title", c.title) for c, _ in drawings]
    links += [("notes", "Notes")] if bench.notes else []
    links.append(("plans", "Plans"))
    return contents(links)


def _results(bench: Bench, model: str) -> list[str]:
    times: list[tuple[str, tuple[str, ...]]] = []
    costs: list[tuple[str, tuple[str, ...]]] = []
    single = next((r for r in bench.of(model) if r.strategy == "single"), None)
    for r in bench.of(model):
        css_class = "asa" if r.strategy == "asa" else "missing" if r.step_time_s is None else ""
        times.append((css_class, words.times(r)))
        costs.append((css_class, (r.strategy, *words.costs(r, bench.settings.num_classes, single))))
    tables = [
        html_table(f"{model}: time of a step, measured and predicted", words.TIMES, times),
        html_table(f"{model}: memory of the fullest rank, communication, learning", ("strategy", *words.COSTS), costs),
    ]
    rows = words.priced(bench, model)
    if rows:
        s = bench.settings
        caption = f"{model}: an epoch of {s.samples_per_epoch} samples at {s.price:g} for a device and hour"
        tables.append(html_table(caption, words.PRICED, [("asa" if r[0] == "asa" else "", r) for r in rows]))
    return tables


def _sealed(bench: Bench) -> str:
    columns = ("model", "strategy", "plan", "profile", "profile of", "cluster", "written")
    return html_table("Fingerprints and dates", columns, [("", row) for row in words.sealed(bench)])


def html_table(caption: str, columns: tuple[str, ...], rows: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    """A table that scrolls if it is too wide; rows are (class, cells), and the first cell is the row's heading."""
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in columns)
    body = "".join(
        f'<tr class="{css_class}"><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for css_class, row in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption><span>{escape(caption)}</span></caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


_MARGIN_INCHES = 0.1


def draw(chart: Chart, folder: Path) -> tuple[list[Path], str]:
    """Write SVG, PDF, PNG and CSV of one figure; returns the paths, and the SVG for inclusion in the page."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.name,
        "pdf.fonttype": 42,
        "font.family": "sans-serif",
        "font.size": 9,
        "text.parse_math": False,  # dollar signs in the name of a file are no formula
    }
    with rc_context(settings):
        figure = chart.draw(chart.rows)
        values = hovering(figure)
        figure.draw_without_rendering()
        figure.set_layout_engine(None)  # one layout serves all formats: it takes as long as drawing
        box = figure.get_tightbbox().padded(_MARGIN_INCHES)
        file = StringIO()
        figure.savefig(file, format="svg", bbox_inches=box, metadata={"Date": None})
        svg = titled(file.getvalue(), values)
        paths = [folder / f"{chart.name}.{kind}" for kind in ("svg", "pdf", "png", "csv")]
        codec.write(svg, paths[0])
        # Not by matplotlib, which ends in an error of its own where the disk is full.
        for path, options in ((paths[1], {"metadata": {"CreationDate": None}}), (paths[2], {"dpi": 150})):
            data = BytesIO()
            figure.savefig(data, format=path.suffix[1:], bbox_inches=box, **options)
            codec.write(data.getvalue(), path)
    words.write_csv(paths[3], chart.columns, chart.rows)
    return paths, inline(svg, chart.name)


def titled(svg: str, values: Mapping[str, str]) -> str:
    """``svg`` with a title on every element whose id is in ``values``, shown under the pointer."""
    for key, text in values.items():
        svg = svg.replace(f'<g id="{key}">', f'<g id="{key}"><title>{escape(text)}</title>', 1)
    return svg


def inline(svg: str, prefix: str) -> str:
    """An SVG document as an element of a page: without prolog, and with ids that are unique on the page."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', body)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", body).strip()
