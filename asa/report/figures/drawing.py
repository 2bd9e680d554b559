"""Drawing of figures: one panel per model, the same colour for a strategy everywhere, no global plotting state."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from asa.report.units import SHARES

Row = tuple[str | float | int | None, ...]
"""A row of the data of a figure."""

# Okabe and Ito's palette can be distinguished with any colour vision, and in print. Its yellow is darker here, because
# figures are white.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8C6D00", "#999999", "#332288", "#117733", "#882255")
ASA = "#D55E00"
INK = "#333333"
MORE = ("#AA4499", "#44AA99", "#A39000", "#661100", "#6699CC", "#3E9BC4", "#999933", "#CC6677")
KNOWN = (
    "ddp", "hybrid", "tensor", "fsdp", "zero1", "gpipe", "single", "zero2", "1f1b", "hsdp",
    "layers", "sequence", "interleaved", "asa+replan", "zero_bubble", "ps_sync", "ps_async", "ps_bounded",
)  # fmt: skip
MARKERS = "osD^vPX*<>"
_MAX_TEXTS = 12
"""Most points of a line that have texts under the pointer."""
_MAX_COLUMNS = 3
"""Largest number of panels side by side."""
_TITLE, _LABEL = 46, 30
"""Number of characters of a line of a panel's title, and of a label beside its axis; longer texts have more lines."""


def colour(strategy: str) -> str:
    """The colour of a strategy, the same in every figure."""
    if strategy == "asa":
        return ASA
    shades = PALETTE + MORE
    name = strategy.partition(",")[0].partition(":")[0]
    family = name if name in KNOWN else name.partition("+")[0]
    return shades[KNOWN.index(family) if family in KNOWN else len(family) % len(shades)]


def training_time(rows: Sequence[Row]) -> Figure:
    """Figure of rows: model, strategy, median, p10, p90, predicted, epoch."""
    figure, panels = _panels(rows, height=_bar_height(rows))
    for axes, panel_rows in panels:
        for y, row in enumerate(panel_rows):
            median, p10, p90, predicted = (_number(row[i]) for i in (2, 3, 4, 5))
            if median is not None and p10 is not None and p90 is not None:
                axes.barh(y, median, color=colour(str(row[1])), height=0.62)
                axes.errorbar(median, y, xerr=[[median - p10], [p90 - median]], color=INK, capsize=3, linewidth=1)
            _predicted(axes, predicted, y, missing=median is None)
        _strategies(axes, panel_rows)
        axes.set_xlabel("seconds per step")
    return figure


def predicted_measured(rows: Sequence[Row]) -> Figure:
    """Figure of rows: model, strategy, measured, predicted, low, high."""
    figure, panels = _panels(rows, height=3.6)
    for axes, panel_rows in panels:
        times = [v for row in panel_rows for i in (2, 3) if (v := _number(row[i])) is not None]
        ends = [0.8 * min(times), 1.25 * max(times)] if times else [0.1, 1.0]
        axes.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="#DDDDDD", linewidth=0)
        axes.plot(ends, ends, color="#999999", linewidth=1)
        strategies = list(dict.fromkeys(str(row[1]) for row in panel_rows))
        for row in panel_rows:
            measured, predicted, low, high = (_number(row[k]) for k in (2, 3, 4, 5))
            if measured is None or predicted is None:
                continue
            if low is not None and high is not None:
                axes.plot([measured, measured], [low, high], color=colour(str(row[1])), linewidth=1, alpha=0.7)
            mark = MARKERS[strategies.index(str(row[1])) % len(MARKERS)]
            axes.plot(measured, predicted, marker=mark, color=colour(str(row[1])), linestyle="none", label=str(row[1]))
        _plain_log(axes, "x", "y")
        axes.set_xlim(*ends)
        axes.set_xlabel("measured, seconds per step")
        axes.set_ylabel("predicted, seconds per step")
        handles, labels = axes.get_legend_handles_labels()
        handle_by_label = dict(zip(labels, handles, strict=True))  # a strategy on several numbers of ranks
        axes.legend(handle_by_label.values(), handle_by_label.keys(), frameon=False, fontsize=7)
    return figure


def byte_unit(values: Iterable[float]) -> tuple[float, str]:
    """Bytes of the unit in which the largest of ``values`` is written, and its name."""
    largest = max(values, default=0.0)
    return (2.0**30, "GiB") if largest >= 2**30 else (2.0**20, "MiB") if largest >= 2**20 else (2.0**10, "KiB")


def memory(rows: Sequence[Row]) -> Figure:
    """Figure of rows: model, strategy, ranks, measured bytes, predicted bytes."""
    figure, panels = _panels(rows, height=_bar_height(rows))
    unit, name = byte_unit(v for row in rows for i in (3, 4) if (v := _number(row[i])) is not None)
    for axes, panel_rows in panels:
        for y, row in enumerate(panel_rows):
            measured, predicted = ((v / unit if (v := _number(row[i])) is not None else None) for i in (3, 4))
            if measured is not None:
                axes.barh(y, measured, color=colour(str(row[1])), height=0.62)
            _predicted(axes, predicted, y, missing=measured is None)
        _strategies(axes, panel_rows)
        axes.set_xlabel(f"{name} on the fullest device")
    return figure


def compute_communication(rows: Sequence[Row]) -> Figure:
    """Figure of rows: model, strategy, compute, communication, share, lowest and highest communication (None:
    unknown)."""
    figure, panels = _panels(rows, height=_bar_height(rows))
    for axes, panel_rows in panels:
        for y, row in enumerate(panel_rows):
            compute, communication, share = (_number(row[i]) or 0.0 for i in (2, 3, 4))
            axes.barh(y, compute, color="#8DA0B3", height=0.62, label="computation" if y == 0 else None)
            axes.barh(
                y,
                communication,
                left=compute,
                color=ASA,
                height=0.62,
                label="exposed communication" if y == 0 else None,
            )
            low, high = _number(row[5]), _number(row[6])
            end = compute + communication
            if low is not None and high is not None:
                spread = [[max(0.0, communication - low)], [max(0.0, high - communication)]]
                axes.errorbar(end, y, xerr=spread, color=INK, capsize=3, linewidth=1)
                end = compute + max(communication, high)
            axes.annotate(f"{100 * share:.0f} %", (end, y), (4, 0), textcoords="offset points", va="center")
        _strategies(axes, panel_rows)
        axes.set_xlabel("seconds per step")
        axes.margins(x=0.14)
        if panel_rows:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, frameon=False)
    return figure


def speedup(rows: Sequence[Row]) -> Figure:
    """Figure of rows: model, strategy, ranks, predicted and measured seconds, predicted and measured speed-up."""
    figure, panels = _panels(rows, height=3.4)
    for axes, panel_rows in panels:
        counts = sorted({int(n) for row in panel_rows if (n := _number(row[2])) is not None})
        axes.plot(counts, counts, color="#BBBBBB", linewidth=1, linestyle=":", label="perfect")
        curves: dict[Any, list[str]] = {}  # strategies with the same figures have one line
        for strategy in dict.fromkeys(str(row[1]) for row in panel_rows):
            matches = sorted((row for row in panel_rows if row[1] == strategy), key=lambda row: _number(row[2]) or 0)
            predicted = tuple((row[2], row[5]) for row in matches if row[5] is not None)
            measured = tuple((row[2], row[6]) for row in matches if row[6] is not None)
            curves.setdefault((predicted, measured), []).append(strategy)
        for i, ((predicted, measured), names) in enumerate(curves.items()):
            name = "asa" if "asa" in names else names[0]
            style: dict[str, Any] = {"color": colour(name), "zorder": 4 if name == "asa" else 3}
            axes.plot(*_columns(predicted), linestyle="--", label=" = ".join(names), linewidth=1.6, **style)
            axes.plot(*_columns(measured), linestyle="none", marker=MARKERS[i % len(MARKERS)], markersize=7, **style)
        axes.set_xlabel("ranks")
        axes.set_ylabel("times one device")
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.legend(frameon=False)
    return figure


def over_ranks(rows: Sequence[Row]) -> Figure:
    """Figure of rows: panel, strategy, ranks, state, samples per second, devices."""
    figure, panels = _panels(rows, height=3.4)
    for axes, panel_rows in panels:
        counts = sorted({int(n) for row in panel_rows if (n := _number(row[2])) is not None})
        for i, (strategy, state, devices) in enumerate(dict.fromkeys((row[1], row[3], row[5]) for row in panel_rows)):
            matches = [row for row in panel_rows if (row[1], row[3], row[5]) == (strategy, state, devices)]
            points = sorted((_number(row[2]) or 0.0, _number(row[4]) or 0.0) for row in matches)
            measured = state == "measured"
            axes.plot(
                *_columns(points), color=colour(str(strategy)), marker=MARKERS[i % len(MARKERS)], markersize=6,
                markerfacecolor=colour(str(strategy)) if measured else "white", linewidth=1.4,
                linestyle="-" if measured else "--", label=str(strategy) if measured else f"{strategy} on {devices}",
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.xaxis.set_minor_formatter(NullFormatter())
        rates = [v for row in panel_rows if (v := _number(row[4]))]
        if rates and max(rates) > _WIDE * min(rates):
            _plain_log(axes, "y")
        else:
            axes.set_ylim(0, 1.06 * axes.dataLim.y1)  # the largest mark is inside, also of values that hardly differ
        axes.set_xlabel("ranks")
        axes.set_ylabel("samples per second")
        axes.legend(frameon=False, fontsize=7)
    return figure


def accuracy_over_time(rows: Sequence[Row], metric: str = "accuracy") -> Figure:
    """Figure over seconds of training; rows as for :func:`accuracy`, with figures of ``metric``."""
    scale, unit = (_PERCENT, ", %") if metric in SHARES else (1.0, "")
    return _over(rows, 3, "seconds of training", 6, scale, f"validation {metric}{unit}")


def accuracy(rows: Sequence[Row]) -> Figure:
    """Figure of rows: model, strategy, epoch, seconds, train loss, validation loss, validation accuracy."""
    return _over(rows, 2, "epochs", 6, _PERCENT, "validation accuracy, %")


def loss(rows: Sequence[Row]) -> Figure:
    """Figure of the validation loss; rows as for :func:`accuracy`."""
    return _over(rows, 2, "epochs", 5, 1.0, "validation loss")


def _over(rows: Sequence[Row], x_column: int, x_label: str, column: int, scale: float, label: str) -> Figure:
    figure, panels = _panels(rows, height=3.4)
    for axes, panel_rows in panels:
        for i, strategy in enumerate(dict.fromkeys(str(row[1]) for row in panel_rows)):
            points = [(row[x_column], scale * value) for row in panel_rows
                      if row[1] == strategy and (value := _number(row[column])) is not None]  # fmt: skip
            axes.plot(
                *_columns(points),
                color=colour(strategy),
                marker=MARKERS[i % len(MARKERS)],
                # Equivalent strategies lie on top of each other: smaller marks go above larger ones.
                markersize=11 - 1.6 * min(i, 5),
                linewidth=1.4,
                label=strategy,
            )
        axes.set_xlabel(x_label)
        axes.set_xlim(0, 1.05 * axes.dataLim.x1 if axes.dataLim.x1 > 0 else None)  # the last mark is inside
        if x_label == "epochs" and all((_number(row[x_column]) or 0.0).is_integer() for row in panel_rows):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(label)
        if scale == _PERCENT:
            axes.set_ylim(0, max(10.0, 1.05 * axes.dataLim.y1))  # a flat curve looks flat
        else:
            axes.ticklabel_format(axis="y", useOffset=False)
            low, high = axes.dataLim.y0, axes.dataLim.y1
            if 0 <= high - low < _FLAT * high:
                axes.set_ylim(high * (1 - _FLAT), high * (1 + _FLAT))
        axes.legend(frameon=False)
    return figure


_PERCENT = 100.0
_FLAT = 0.05
"""Relative range below which losses are drawn as a flat curve."""
_WIDE = 20.0
"""Ratio of the largest value to the smallest above which an axis is logarithmic."""


def _plain_log(axes: Any, *which: str) -> None:
    """Make axes logarithmic, with plain numbers close enough that even a narrow range has one."""
    for name in which:
        low, high = (float(getattr(axes.dataLim, f"{name}{end}")) for end in (0, 1))
        decades = math.log10(high / low) if 0 < low < high < math.inf else 0.0
        getattr(axes, f"set_{name}scale")("log")
        axis = getattr(axes, f"{name}axis")
        subs = (1, 1.5, 2, 3, 5, 7) if decades < 1 else (1, 3) if decades < 3 else (1,)  # numbers do not overlap
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def assignment(rows: Sequence[Row]) -> Figure:
    """Figure of rows: model, strategy, index, component, data, degree, tensor, degree, label."""
    labels = list(dict.fromkeys(str(row[8]) for row in rows))
    shade = {label: PALETTE[i % len(PALETTE)] for i, label in enumerate(labels)}
    figure, panels = _panels(rows, height=0.6 + 0.2 * max((int(_number(row[2]) or 0) for row in rows), default=8))
    for axes, panel_rows in panels:
        strategies = list(dict.fromkeys(str(row[1]) for row in panel_rows))
        names = {int(_number(row[2]) or 0): str(row[3]) for row in panel_rows}
        for row in panel_rows:
            x, y = strategies.index(str(row[1])), int(_number(row[2]) or 0)
            axes.add_patch(Rectangle((x + 0.03, y + 0.05), 0.94, 0.9, facecolor=shade[str(row[8])], linewidth=0))
        axes.set_xlim(0, len(strategies))
        axes.set_ylim(len(names), 0)
        axes.set_xticks([i + 0.5 for i in range(len(strategies))], strategies)
        if len(strategies) * max(map(len, strategies), default=0) > _TITLE:  # side by side they would overlap
            axes.tick_params(axis="x", labelrotation=90)
        axes.set_yticks([i + 0.5 for i in names], list(names.values()), fontsize=7)
        axes.tick_params(length=0)
        axes.grid(False)
    if labels:
        figure.legend(
            handles=[Patch(facecolor=shade[label], label=label) for label in labels],
            loc="outside lower center",
            ncols=min(1 + len(panels), 3, len(labels)),
            frameon=False,
        )
    return figure


def _panels(rows: Sequence[Row], *, height: float) -> tuple[Figure, list[tuple[Any, list[Row]]]]:
    models = list(dict.fromkeys(str(row[0]) for row in rows))
    columns = min(_MAX_COLUMNS, max(1, len(models)))
    lines = -(-max(1, len(models)) // columns)
    figure = Figure(figsize=(4.6 * columns, (height + 0.9) * lines), layout="constrained")
    if not models:
        figure.text(0.5, 0.5, "nothing was measured", ha="center", va="center", color=INK)
        return figure, []
    panels = []
    for i, model in enumerate(models):
        axes = figure.add_subplot(lines, columns, i + 1)
        axes.set_title(_wrapped(model, _TITLE), fontsize=10, loc="left", color=INK)
        _style(axes)
        panels.append((axes, [row for row in rows if row[0] == model]))
    return figure, panels


def single(height: float, *, width: float = 6.4) -> tuple[Figure, Any]:
    """A figure with one panel (sizes in inches), and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    _style(axes)
    return figure, axes


def _wrapped(text: str, width: int) -> str:
    """``text`` in lines of at most ``width`` characters, with nothing left out."""
    lines = textwrap.wrap(text, width, drop_whitespace=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\n ", " \n")  # a space ends a line, and begins none


def _style(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def hovering(figure: Figure) -> dict[str, str]:
    """Texts for bars and lines of ``figure`` under the pointer, by the ids that these get in its SVG."""
    texts: dict[str, str] = {}

    def add_text(artist: Any, text: str) -> None:
        artist.set_gid(f"value-{len(texts)}")
        texts[artist.get_gid()] = text

    for axes in figure.axes:
        for bars in axes.containers:
            if not isinstance(bars, BarContainer):
                continue
            is_horizontal = bars.orientation == "horizontal"
            axis = axes.yaxis if is_horizontal else axes.xaxis
            names = dict(zip(axis.get_ticklocs(), (t.get_text() for t in axis.get_ticklabels()), strict=False))
            unit = axes.get_xlabel() if is_horizontal else axes.get_ylabel()
            for bar in bars:
                middle = bar.get_y() + bar.get_height() / 2 if is_horizontal else bar.get_x() + bar.get_width() / 2
                bar_name = names.get(min(names, key=lambda at: abs(at - middle), default=0.0), "").replace("\n", "")
                size = bar.get_width() if is_horizontal else bar.get_height()
                legend = f" ({bars.get_label()})" if _named(bars) else ""
                add_text(bar, f"{bar_name}{legend}: {size:.3g} {unit}".strip(": "))
        for line in axes.get_lines():
            x_data, y_data = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
            points = list(zip(x_data.tolist(), y_data.tolist(), strict=True))
            if str(line.get_marker()) in ("None", "|", "_", "") or not 1 <= len(points) <= _MAX_TEXTS:
                continue
            name = f"{line.get_label()}: " if _named(line) else ""
            add_text(line, name + "; ".join(f"{_short(x)}, {_short(y)}" for x, y in points))
    return texts


def _named(artist: Any) -> bool:
    """Whether ``artist`` is in the legend."""
    return not str(artist.get_label()).startswith("_")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _bar_height(rows: Sequence[Row]) -> float:
    return 0.7 + 0.34 * max(4, len({str(row[1]) for row in rows}))


def _strategies(axes: Any, rows: Sequence[Row]) -> None:
    axes.set_yticks(range(len(rows)), [_wrapped(str(row[1]), _LABEL) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))  # numbers of many digits have room


def _predicted(axes: Any, value: float | None, y: int, *, missing: bool) -> None:
    if value is not None:
        axes.plot(value, y, marker="D", markersize=6, markerfacecolor="white", markeredgecolor=INK, linestyle="none")
    if missing:
        axes.annotate("not measured", (value or 0, y), (8, 0), textcoords="offset points", va="center", fontsize=7)


def _columns(points: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [p[0] for p in points], [p[1] for p in points]


def _number(value: str | float | int | None) -> float | None:
    return None if value is None or isinstance(value, str) else float(value)
