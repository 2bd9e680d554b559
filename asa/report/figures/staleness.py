"""Figures of late gradients and rare averages: how training converges, and the time to a target by discipline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import zip_longest

from matplotlib.figure import Figure

from asa.ir.staleness import PLAIN, Curve, Setting, Staleness
from asa.planner.answer.consistency import Consistency
from asa.report.figures.charts import Chart
from asa.report.figures.drawing import ASA, INK, MORE, PALETTE, Row, single


def charts(compared: Consistency | None, curves: Staleness | None) -> tuple[Chart, ...]:
    """The figures for which there are values."""
    figures = [time_to_target(compared)] if compared is not None and compared.target else []
    figures += [] if curves is None else [convergence(curves, late=True), convergence(curves, late=False)]
    return tuple(f for f in figures if f.rows)


def time_to_target(compared: Consistency) -> Chart:
    """Predicted seconds to the target for every discipline for which they are known."""
    times = [(r.name, r.time_to_target) for r in compared.rows if r.fits]
    rows: list[Row] = [(name, t.low_s, t.median_s, t.high_s) for name, t in times if t is not None and t.median_s]
    return Chart(
        name="time_to_target",
        title=f"Time to {compared.target}",
        caption="Global batches to the target, measured on one device, times the predicted time of one. Whiskers: from "
        "the fastest to the slowest seed, times the interval of the step; an arrow if a seed did not reach it.",
        columns=("discipline", "low_s", "median_s", "high_s"),
        rows=tuple(sorted(rows, key=lambda row: float(row[2] or 0))),
        draw=_times,
    )


def convergence(curves: Staleness, *, late: bool) -> Chart:
    """Validation accuracy over global batches by setting: those with ``late`` gradients, or all others, beside plain
    training. Lowest, mean and highest of the seeds."""

    def is_shown(s: Setting) -> bool:
        return s == PLAIN or (s.period == 0 and s.pushed == 1) == late

    rows = [row for c in curves.curves if is_shown(c.setting) for row in _points(c, curves.every)]
    seeds = max((len(c.runs) for c in curves.curves), default=0)
    return Chart(
        name="late_gradients" if late else "rare_averages",
        title="Learning with late gradients" if late else "Learning with rare averages or pushes",
        caption=f"{curves.model_spec} on {curves.data}, {curves.optimizer} at {curves.learning_rate:g}, batch "
        f"{curves.global_batch}: mean of {seeds} seeds, and from the lowest to the highest. A run that diverged counts "
        "until then.",
        columns=("setting", "global_batches", "lowest", "mean", "highest"),
        rows=tuple(rows) if len({row[0] for row in rows}) > 1 else (),
        draw=_accuracies,
    )


def _points(curve: Curve, every: int) -> list[Row]:
    rows: list[Row] = []
    for i, several in enumerate(zip_longest(*(r.accuracies for r in curve.runs)), 1):
        known = [a for a in several if a is not None]
        rows.append((curve.setting.words, every * i, min(known), statistics.fmean(known), max(known)))
    return rows


def _times(rows: Sequence[Row]) -> Figure:
    figure, axes = single(0.9 + 0.3 * max(3, len(rows)))
    for y, (_, low, mean, high) in enumerate(rows):
        x, known = float(mean or 0), float(high or 0)
        axes.barh(y, x, color=PALETTE[0], height=0.6)
        axes.plot((float(low or 0), known or 1.15 * x), (y, y), color=INK, linewidth=1.2)
        axes.plot(known or 1.15 * x, y, marker="|" if known else ">", color=INK, linestyle="none")
    axes.set_yticks(range(len(rows)), [str(row[0]) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0)
    axes.set_xlabel("seconds to the target, predicted")
    return figure


def _accuracies(rows: Sequence[Row]) -> Figure:
    figure, axes = single(3.6, width=8.4)
    shades = (ASA, *PALETTE, *MORE)
    for i, setting in enumerate(dict.fromkeys(row[0] for row in rows)):
        batches, low, mean, high = zip(*((float(x or 0) for x in row[1:]) for row in rows if row[0] == setting),
                                       strict=True)  # fmt: skip
        shade = shades[i % len(shades)]
        axes.fill_between(batches, low, high, color=shade, alpha=0.15, linewidth=0)
        axes.plot(batches, mean, color=shade, linewidth=1.3, label=str(setting))
    axes.set_xlabel("global batches")
    axes.set_ylabel("validation accuracy")
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
