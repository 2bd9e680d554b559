"""More devices never make the answer slower: plans of fewer are among the first that a search knows."""

from __future__ import annotations

import itertools
import random

import known_models
import nouns
import pytest
from test_unequal import few, unequal

from asa.cost.machine import presets
from asa.cost.machine.estimate import on_device
from asa.planner import Request, plan
from asa.planner.budget import Budget
from asa.planner.space.candidate import Prices
from asa.planner.space.narrower import by_width
from asa.planner.space.space import Space, anything
from asa.strategies import offered

INF = float("inf")
PROFILE = known_models.profile(known_models.transformer(4, 256), 2000.0, 64)
SLOW_LINKS = presets.load("v100-2x8-25g-tcp")


UNHURRIED = Budget(narrower_s=60.0)


def slow_links(**changes: int) -> Prices:
    request = Request(gpus=16, global_batch=64, **changes)
    return Prices(Space(on_device(PROFILE, SLOW_LINKS), SLOW_LINKS, offered(), request))


@pytest.mark.parametrize("seed", range(3))
def test_one_more_device_never_makes_the_answer_slower(seed):
    rng, strategies = random.Random(seed), few(offered(), "replicate", "zero1", schedules=("1f1b",))
    cluster = unequal(*sorted((rng.choice([1.0, 0.8, 0.3, 0.02]) for _ in range(4)), reverse=True))
    seconds = []
    for gpus in range(1, 5):
        request = Request(gpus=gpus, global_batch=12, prefer_simple=False, time_limit_s=60)
        seconds.append(plan(nouns.profile(), cluster, strategies, request, budget=UNHURRIED)[0].prediction.step_time_s)
    for fewer, more in itertools.pairwise(seconds):
        assert more <= fewer * 1.005  # a gap not worth searching on for


def test_without_time_to_search_the_answer_is_no_slower_than_data_parallelism_on_fewer():
    known = {}
    for gpus in (2, 4, 8, 16):
        request = Request(gpus=gpus, global_batch=64, prefer_simple=False, time_limit_s=1e-6)
        found = plan(PROFILE, SLOW_LINKS, offered(), request, budget=UNHURRIED)[0]
        ddp = next(b.step_time_s for b in found.baselines if b.name == "ddp")
        known[gpus] = found.prediction.step_time_s, ddp
    assert known[8][1] < 0.9 * known[16][1]
    for gpus, (step, _) in known.items():
        assert all(step <= ddp * (1 + 1e-9) for fewer, (_, ddp) in known.items() if fewer <= gpus)


def test_uniform_plans_of_few_widths_fit_and_come_fastest_first():
    prices = slow_links()
    found = by_width(prices, anything, INF)
    assert sorted(x.ranks for x in found) == [2, 3, 4, 5, 6, 7, 8, 16]
    seconds = [prices.of(x).cost.total_s for x in found]
    assert seconds == sorted(seconds)
    assert all(prices.of(x).peak.total <= prices.capacity(x) for x in found)
    assert by_width(prices, lambda _i, way: way.data.degree == 4, INF)[0].ranks in (4, 8, 16)
    assert by_width(prices, anything, -INF) == []
