"""Calibration of predictions: intervals compared with measurements, P(best) and regret compared with the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp, lgamma, log, log1p, sqrt
from statistics import NormalDist, fmean, median
from typing import Any

from matplotlib.figure import Figure

from asa.ir.codec import noun
from asa.report.figures.charts import Chart
from asa.report.figures.drawing import ASA, INK, Row

LEVELS = (0.1, 0.25, 0.5, 0.68, 0.8, 0.9, 0.95, 0.99)
STATED = 0.9
"""Level of the intervals in predictions."""
BINS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
_SURE = 0.95
PANELS = ("intervals", "P(best)", "regret")


@noun
class StatedInterval:
    """A 90 % interval and the measurement, in seconds."""

    low_s: float
    high_s: float
    measured_s: float

    @property
    def least(self) -> float:
        """The lower end, at least slightly above zero."""
        return max(self.low_s, 1e-9 * self.high_s)

    @property
    def half_width(self) -> float:
        """Factor by which the interval reaches beyond its middle, minus 1."""
        return sqrt(self.high_s / self.least) - 1

    def inside(self, level: float = STATED) -> bool:
        """Whether the measurement lies in the interval of ``level``, if errors are log-normal factors."""
        middle, half = log(self.least * self.high_s) / 2, log(self.high_s / self.least) / 2
        wider = NormalDist().inv_cdf((1 + level) / 2) / NormalDist().inv_cdf((1 + STATED) / 2)
        return abs(log(self.measured_s) - middle) <= wider * half * (1 + 1e-9)


@noun
class Outcome:
    """The stated confidence in a choice, whether it was the best of all plans that ran, and its regret."""

    p_best: float
    expected_regret: float
    best: bool
    regret: float


def binomial(hits: int, trials: int) -> tuple[float, float]:
    """Exact confidence interval of a probability (Clopper and Pearson 1934).

    >>> [round(x, 3) for x in binomial(9, 10)]
    [0.555, 0.997]
    """
    tail = (1 - _SURE) / 2

    def at_most(k: int, p: float) -> float:
        ways = (lgamma(trials + 1) - lgamma(i + 1) - lgamma(trials - i + 1) for i in range(k + 1))
        return sum(exp(w + i * log(p) + (trials - i) * log1p(-p)) for i, w in enumerate(ways))

    low = 0.0 if hits == 0 else _largest_where(lambda p: at_most(hits - 1, p) > 1 - tail)
    high = 1.0 if hits == trials else _largest_where(lambda p: at_most(hits, p) > tail)
    return low, high


def _largest_where(holds: Callable[[float], bool]) -> float:
    """Largest p in 0 to 1 for which ``holds`` is true, if it is true up to some point."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def scores(intervals: Sequence[StatedInterval], choices: Sequence[Outcome]) -> dict[str, Any]:
    """Coverage with its exact interval; for choices, stated and observed frequency of the best, and regret.

    ``brier``: mean of (P(best) - outcome)^2; ``brier_constant``: the same for always stating the overall frequency.
    """
    inside = sum(t.inside() for t in intervals)
    low, high = binomial(inside, len(intervals)) if intervals else (0.0, 1.0)
    share = fmean(c.best for c in choices) if choices else None
    return {
        "intervals": len(intervals),
        "inside": inside,
        "coverage": inside / len(intervals) if intervals else None,
        "coverage_low": low,
        "coverage_high": high,
        "stated": STATED,
        "half_width": median(t.half_width for t in intervals) if intervals else None,
        "honest": bool(intervals) and low <= STATED <= high,
        "choices": len(choices),
        "best": share,
        "mean_p_best": fmean(c.p_best for c in choices) if choices else None,
        "brier": fmean((c.p_best - c.best) ** 2 for c in choices) if choices else None,
        "brier_constant": share * (1 - share) if share is not None else None,
        "mean_regret": fmean(c.regret for c in choices) if choices else None,
        "mean_expected_regret": fmean(c.expected_regret for c in choices) if choices else None,
    }


def chart(intervals: Sequence[StatedInterval], choices: Sequence[Outcome]) -> Chart:
    """Stated against observed values in three panels; bars are exact 95 % intervals."""
    rows: list[Row] = []
    for level in LEVELS if intervals else ():
        hits = sum(t.inside(level) for t in intervals)
        rows.append((PANELS[0], level, hits / len(intervals), *binomial(hits, len(intervals)), len(intervals)))
    for left, right in pairwise(BINS):
        selected = [c for c in choices if left <= c.p_best < right or (right == BINS[-1] == c.p_best)]
        if selected:
            hits = sum(c.best for c in selected)
            mean = fmean(c.p_best for c in selected)
            rows.append((PANELS[1], mean, hits / len(selected), *binomial(hits, len(selected)), len(selected)))
    rows += [(PANELS[2], c.expected_regret, c.regret, c.regret, c.regret, 1) for c in choices]
    return Chart(
        name="calibration",
        title="Do predictions know how sure they are?",
        caption="Observed against stated, on the diagonal where predictions are calibrated: share of measurements in "
        "intervals of a level; share of choices that were the best, by their P(best); regret of each choice against "
        "the regret it expected. Bars: exact 95 % intervals.",
        columns=("panel", "stated", "observed", "low", "high", "count"),
        rows=tuple(rows),
        draw=reliability,
    )


def reliability(rows: Sequence[Row]) -> Figure:
    """Figure of rows: panel, stated, observed, low, high, count."""
    figure = Figure(figsize=(11.4, 3.9), layout="constrained")
    words = {
        PANELS[0]: ("level of the interval", "share of measurements inside"),
        PANELS[1]: ("P(best) stated", "share that was the best"),
        PANELS[2]: ("expected regret, %", "regret measured, %"),
    }
    for i, panel in enumerate(PANELS):
        axes = figure.add_subplot(1, len(PANELS), i + 1)
        scale = 100.0 if panel == PANELS[2] else 1.0
        selected = [tuple(scale * float(v or 0.0) for v in row[1:5]) for row in rows if row[0] == panel]
        top = max([1.0, *(1.1 * max(x[0], x[1]) for x in selected)]) if panel == PANELS[2] else 1.0
        axes.plot((0, top), (0, top), color="#BBBBBB", linewidth=1, linestyle=":")
        for stated, observed, low, high in selected:
            axes.errorbar(
                stated, observed, yerr=[[max(0.0, observed - low)], [max(0.0, high - observed)]], color=INK, capsize=3,
                linewidth=1, marker="o", markersize=6, markerfacecolor=ASA, markeredgecolor=ASA,
            )  # fmt: skip
        if not selected:
            axes.text(0.5 * top, 0.5 * top, "nothing was measured", ha="center", va="center", color=INK)
        axes.set_title(panel, fontsize=10, loc="left", color=INK)
        axes.set_xlabel(words[panel][0])
        axes.set_ylabel(words[panel][1])
        axes.set_xlim(0, top)
        axes.set_ylim(0, 1.02 * top)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    return figure
