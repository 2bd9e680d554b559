"""Writes the files of a study: values for other programs, tables for papers, and a page for readers."""

from __future__ import annotations

from pathlib import Path

from asa.ir import codec
from asa.ir.study import Study
from asa.report import study as words
from asa.report import study_figures as figures
from asa.report import study_page
from asa.report.bench import write_csv


def write(study: Study, folder: Path) -> list[Path]:
    """Write ``study.csv`` with all values, ``study.md`` and ``study.tex`` with the main ones, and the page to
    ``folder``; returns the paths."""
    rows = figures.of(study)
    write_csv(folder / "study.csv", figures.COLUMNS, [figures.plain(f) for f in rows])
    codec.write(words.markdown(study, rows), folder / "study.md")
    codec.write(words.latex(study, rows), folder / "study.tex")
    return [folder / "study.csv", folder / "study.md", folder / "study.tex", *study_page.write(study, folder)]
