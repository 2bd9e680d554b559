"""Coverage, its exact interval, and what the figure of reliability shows."""

from __future__ import annotations

import random

import pytest

from asa.report.pages.bench import draw
from benchmarks import reliability as c


def told(sigma: float, stated: float, count: int = 400) -> list[c.StatedInterval]:
    rng = random.Random(0)
    half = 1.6449 * stated
    return [c.StatedInterval(low_s=1 - half, high_s=1 + half, measured_s=1 + rng.gauss(0, sigma)) for _ in range(count)]


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [(9, 10, 0.5550, 0.9975), (0, 5, 0.0, 0.5218), (5, 5, 0.4782, 1.0), (1800, 2000, 0.8860, 0.9128)],
)
def test_the_binomial_interval_is_the_exact_one(hits, trials, low, high):
    assert c.binomial(hits, trials) == pytest.approx((low, high), abs=1e-4)


def test_honest_intervals_are_called_honest_and_narrow_ones_are_not():
    assert c.scores(told(0.1, 0.1), [])["honest"]
    assert not c.scores(told(0.1, 0.05), [])["honest"]
    assert not c.scores(told(0.1, 0.3), [])["honest"]
    assert not c.scores([], [])["honest"]


def test_wider_levels_hold_more():
    shares = [sum(t.inside(level) for t in told(0.1, 0.1)) for level in c.LEVELS]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


def test_choices_are_scored_against_what_was_said_of_them():
    said = [c.Outcome(p_best=1.0, expected_regret=0.0, best=True, regret=0.0)] * 3
    said += [c.Outcome(p_best=1.0, expected_regret=0.0, best=False, regret=0.2)]
    s = c.scores([], said)
    assert s["best"] == 0.75
    assert s["brier"] == pytest.approx(0.25)
    assert s["mean_regret"] == pytest.approx(0.05)


def test_the_figure_is_drawn_with_and_without_data(tmp_path):
    said = [c.Outcome(p_best=0.6, expected_regret=0.01, best=True, regret=0.0)]
    made = c.chart(told(0.1, 0.1, 20), said)
    assert {row[0] for row in made.rows} == set(c.PANELS)
    paths, svg = draw(made, tmp_path)
    assert "<svg" in svg
    assert all(p.is_file() for p in paths)
    assert "nothing was measured" in draw(c.chart([], []), tmp_path)[1]
