"""Drawing of the figures of one plan, and of one run. Rows come from :mod:`asa.report.pages.plan` and ``run_page``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch
from matplotlib.ticker import MaxNLocator

from asa.report.figures.drawing import ASA, INK, MARKERS, PALETTE, Row, byte_unit, colour, single
from asa.report.text.tables import fitted

_MAX_COLUMNS = 5
"""Number of boxes of a network side by side."""
_COMPUTE, _SENT = "#8DA0B3", ASA


def network(rows: Sequence[Row]) -> Figure:
    """Figure of rows: index, component, assignment, stage, share of the step. Boxes in the order of the data, line by
    line."""
    num_lines = -(-len(rows) // _MAX_COLUMNS)
    figure, axes = single(0.8 + 0.72 * num_lines, width=8.4)
    labels = list(dict.fromkeys(str(row[2]) for row in rows))
    shade = {label: PALETTE[i % len(PALETTE)] for i, label in enumerate(labels)}
    for i, row in enumerate(rows):
        x, y = _position(i)
        axes.add_patch(
            FancyBboxPatch((x + 0.06, y + 0.2), 0.88, 0.6, boxstyle="round,pad=0,rounding_size=0.06",
                           facecolor=shade[str(row[2])], alpha=0.55, linewidth=0)
        )  # fmt: skip
        name = str(row[1])
        axes.text(x + 0.5, y + 0.42, fitted(name, 17), ha="center", va="center",
                  fontsize=8, color="black")  # fmt: skip
        if row[4] is not None:
            axes.text(x + 0.5, y + 0.65, f"{100 * float(row[4]):.0f} %", ha="center", va="center", fontsize=8,
                      color="black")  # fmt: skip
        if i:
            last = _position(i - 1)
            start = (last[0] + 0.94, last[1] + 0.5) if last[1] == y else (last[0] + 0.5, last[1] + 0.82)
            end = (x + 0.06, y + 0.5) if last[1] == y else (x + 0.5, y + 0.18)
            is_new_stage = row[3] != rows[i - 1][3]
            axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": ASA if is_new_stage else INK,
                                                      "linewidth": 1.8 if is_new_stage else 0.8})  # fmt: skip
    axes.set_xlim(0, _MAX_COLUMNS)
    axes.set_ylim(num_lines, 0)
    axes.set_axis_off()
    handles = [Patch(facecolor=shade[label], alpha=0.55, label=label) for label in labels]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(3, max(1, len(labels))), frameon=False)
    return figure


def _position(index: int) -> tuple[int, int]:
    return index % _MAX_COLUMNS, index // _MAX_COLUMNS


def component_times(rows: Sequence[Row]) -> Figure:
    """Figure of rows: component, seconds computing, seconds communicating."""
    figure, axes = single(0.9 + 0.22 * max(4, len(rows)))
    ys = range(len(rows))
    computes, sends = ([1e3 * float(row[i] or 0.0) for row in rows] for i in (1, 2))
    axes.barh(ys, computes, color=_COMPUTE, height=0.68, label="computing")
    axes.barh(ys, sends, left=computes, color=_SENT, height=0.68, label="communicating, hidden or not")
    axes.set_yticks(ys, [str(row[0]) for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("milliseconds of a step, predicted")
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    return figure


def search(rows: Sequence[Row]) -> Figure:
    """Figure of rows: seconds of search, best step time (None: none yet), lower bound."""
    figure, axes = single(3.2)
    times = [float(row[0] or 0.0) for row in rows]
    best = [(t, float(row[1])) for t, row in zip(times, rows, strict=True) if row[1] is not None]
    axes.step([t for t, _ in best], [1e3 * v for _, v in best], where="post", color=ASA, marker="o", markersize=4,
              label="best plan so far")  # fmt: skip
    bounds = [1e3 * float(row[2] or 0.0) for row in rows]
    axes.step(times, bounds, where="post", color=INK, linestyle="--", label="lower bound: no plan is faster")
    axes.set_xlabel("seconds of search")
    axes.set_ylabel("milliseconds a step, predicted")
    _from_zero(axes, "y")
    axes.legend(frameon=False, fontsize=8)
    return figure


def trade(rows: Sequence[Row]) -> Figure:
    """Figure of rows: kind (``plan``, ``strategy``, ``frontier``), name, bytes, seconds. Memory is horizontal, time
    vertical."""
    figure, axes = single(3.6)
    unit, unit_name = byte_unit(float(r[2] or 0) for r in rows)
    curve = sorted((float(r[2] or 0) / unit, 1e3 * float(r[3] or 0)) for r in rows if r[0] == "frontier")
    if curve:
        axes.step(
            *zip(*curve, strict=True),
            where="post",
            color=INK,
            linewidth=1.2,
            marker=".",
            label="fastest within that memory",
        )
    for i, row in enumerate(r for r in rows if r[0] != "frontier"):
        is_plan = row[0] == "plan"
        recomputes = str(row[1]).endswith("+ckpt")  # has the colour of the strategy without
        axes.plot(
            float(row[2] or 0) / unit, 1e3 * float(row[3] or 0), linestyle="none", label=str(row[1]),
            marker="*" if is_plan else MARKERS[i % 4], markersize=13 if is_plan else 6,
            color=ASA if is_plan else colour(str(row[1])), fillstyle="none" if recomputes else "full",
        )  # fmt: skip
    axes.set_xlabel(f"{unit_name} on the fullest device, predicted")
    axes.set_ylabel("milliseconds a step, predicted")
    _from_zero(axes, "x", "y")
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def cost(rows: Sequence[Row]) -> Figure:
    """Figure of rows: devices, seconds of an epoch, its cost, whether it is on the frontier."""
    figure, axes = single(3.2)
    for row in rows:
        axes.plot(float(row[1] or 0), float(row[2] or 0), marker="o", markersize=7, linestyle="none",
                  markerfacecolor=ASA if row[3] else "white", markeredgecolor=ASA)  # fmt: skip
        axes.annotate(f"{row[0]}", (float(row[1] or 0), float(row[2] or 0)), (6, 4), textcoords="offset points",
                      fontsize=8)  # fmt: skip
    axes.set_xlabel("seconds of an epoch, predicted")
    axes.set_ylabel("cost of an epoch")
    _from_zero(axes, "x", "y")
    return figure


def comparison(rows: Sequence[Row]) -> Figure:
    """Figure of rows: term, seconds in this plan, seconds in the other; the first row is (term, this name, other
    name)."""
    figure, axes = single(0.9 + 0.5 * max(3, len(rows) - 1))
    names, terms = rows[0][1:3], rows[1:]
    for side, shade in ((0, ASA), (1, PALETTE[0])):
        values = [1e3 * float(row[1 + side] or 0.0) for row in terms]
        ys = [i + 0.38 * side for i in range(len(terms))]
        axes.barh(ys, values, height=0.36, color=shade, label=str(names[side]))
    axes.set_yticks([i + 0.19 for i in range(len(terms))], [str(row[0]) for row in terms], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a step, predicted")
    axes.legend(frameon=False, fontsize=8)
    return figure


def step_times(rows: Sequence[Row]) -> Figure:
    """Figure of rows: kind (``measured``, ``expected``, ``change``, ``finding``), step, seconds, words."""
    figure, axes = single(3.6, width=8.4)
    for kind, style in (
        ("measured", {"color": INK, "linewidth": 1.3, "label": "measured"}),
        ("expected", {"color": PALETTE[0], "linewidth": 1.3, "linestyle": "--", "label": "predicted by the plan"}),
    ):
        points = [(float(r[1] or 0), 1e3 * float(r[2] or 0)) for r in rows if r[0] == kind]
        if points:
            points = [(0.0, points[0][1]), *points]  # the first line of a log is of all steps before it
            step_style: dict[str, Any] = {**style, "drawstyle": "steps-pre"}
            axes.plot(*zip(*points, strict=True), **step_style)
    labelled = set()
    for row in rows:
        if row[0] in ("change", "finding"):
            shade, label = (ASA, "another plan") if row[0] == "change" else (PALETTE[1], "something became slow")
            axes.axvline(float(row[1] or 0), color=shade, linewidth=1.6 if row[0] == "change" else 1.0,
                         linestyle="-" if row[0] == "change" else ":",
                         label=None if label in labelled else label)  # fmt: skip
            labelled.add(label)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("milliseconds a step")
    _from_zero(axes, "y")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def rank_memory(rows: Sequence[Row]) -> Figure:
    """Figure of rows: rank, bytes predicted, bytes measured (None: not measured)."""
    figure, axes = single(0.9 + 0.34 * max(3, len(rows)))
    unit, unit_name = byte_unit(float(n or 0) for row in rows for n in row[1:3])
    for y, row in enumerate(rows):
        if row[2] is not None:
            axes.barh(y, float(row[2]) / unit, color=PALETTE[0], height=0.6)
        axes.plot(float(row[1] or 0) / unit, y, marker="D", markersize=6, markerfacecolor="white",
                  markeredgecolor=INK, linestyle="none")  # fmt: skip
    axes.set_yticks(range(len(rows)), [f"rank {row[0]}" for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _from_zero(axes, "x")
    axes.set_xlabel(unit_name)
    return figure


def _from_zero(axes: Any, *which: str) -> None:
    """Make axes begin at 0, with room for the marks of the largest values."""
    for name in which:
        largest = float(getattr(axes.dataLim, f"{name}1"))
        getattr(axes, f"set_{name}lim")(0, 1.06 * largest if 0 < largest < math.inf else None)
