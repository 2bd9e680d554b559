"""P(best) and expected regret: laws over the joint draws."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import fake_strategies
import known_models
import pytest

from asa.cost.machine import presets
from asa.planner import Request, plan
from asa.planner.answer.confidence import confidence
from asa.planner.pipeline.whole import table
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space
from asa.schedules import schedules

STAGED = replace(fake_strategies.FULL, schedules=schedules())


def finalists(cluster: str):
    profile, links = known_models.profile(known_models.transformer(), 500.0, 64), presets.load(cluster)
    prices = Prices(Space(profile, links, STAGED, Request(gpus=8, global_batch=64)))
    rows = [(r.candidate, r.price) for r in table(prices) if r.candidate is not None and r.price is not None]
    return rows, profile, links.overlap


@pytest.mark.parametrize("cluster", ["a100-nvlink-8", "3090-pcie-8"])
def test_somebody_is_the_best_in_every_draw(cluster, monkeypatch):
    monkeypatch.setattr("asa.planner.answer.confidence.SAMPLES", 1 << 16)  # every order of plans has draws of its own
    monkeypatch.setattr("asa.planner.answer.confidence.TIE", 1e-9)
    rows, profile, overlap = finalists(cluster)
    distinct = list({c.key: (c, p) for c, p in rows}.values())
    found = [
        confidence([row, *(x for x in distinct if x is not row)], profile, STAGED, overlap) for row in distinct
    ]  # fmt: skip
    assert sum(f.p_best for f in found) == pytest.approx(1, abs=0.01)
    assert all(f.expected_regret >= 0 for f in found)
    assert all((f.p_best == 1) == (f.expected_regret < 1e-12) for f in found)


def test_plans_that_nobody_can_tell_apart_are_both_the_best(monkeypatch):
    rows, profile, overlap = finalists("a100-nvlink-8")
    ordered = sorted({c.key: (c, p) for c, p in rows}.values(), key=lambda row: row[1].cost.total_s)
    two = list(min(pairwise(ordered), key=lambda pair: pair[1][1].cost.total_s / pair[0][1].cost.total_s))

    def likely() -> float:
        return sum(confidence(both, profile, STAGED, overlap).p_best for both in (two, two[::-1]))

    told = likely()
    assert 1.01 < told <= 2
    monkeypatch.setattr("asa.planner.answer.confidence.TIE", 1e-9)
    assert likely() == pytest.approx(1, abs=0.01)


def test_a_plan_alone_is_the_best_and_a_copy_of_it_changes_nothing():
    rows, profile, overlap = finalists("a100-nvlink-8")
    alone = confidence(rows[:1], profile, STAGED, overlap)
    assert (alone.p_best, alone.expected_regret) == (1, 0)
    assert confidence([rows[0], rows[0]], profile, STAGED, overlap).p_best == 1
    assert confidence(rows, profile, STAGED, overlap) == confidence(rows, profile, STAGED, overlap)


def test_every_plan_says_how_sure_it_is():
    profile, links = known_models.profile(known_models.transformer(), 500.0, 64), presets.load("3090-pcie-8")
    for found in plan(profile, links, STAGED, Request(gpus=8, global_batch=64, top_k=2, time_limit_s=1.0)):
        assert found.confidence is not None
        assert 0 <= found.confidence.p_best <= 1
        assert found.confidence.finalists > 5
