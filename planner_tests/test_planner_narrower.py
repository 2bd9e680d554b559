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
from asa.planner.pipeline.practice import on_fewer
from asa.planner.space.baselines import uniform
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space, anything
from asa.planner.stage.lookup import StageLookup
from asa.planner.stage.problem import MS
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


def test_the_best_uniform_plan_on_fewer_devices_fits_and_is_allowed():
    prices = slow_links()
    found = on_fewer(prices, anything, INF, INF)
    assert found is not None
    assert prices.fits(found)
    taken_s = prices.of(found).cost.total_s
    assert taken_s < prices.of(uniform("ddp", prices, 1)).cost.total_s
    for width in range(2, 9):
        assert taken_s <= prices.of(uniform(f"hybrid:d{width}", prices, 1)).cost.total_s * (1 + 1e-9)
    four = on_fewer(prices, lambda _i, way: way.data.degree == 4, INF, INF)
    assert four is not None
    assert {way.data.degree for way in four.ways} == {4}
    assert on_fewer(prices, anything, taken_s, INF) is None, "nothing is faster than the best"
    assert on_fewer(prices, anything, INF, -INF) is None, "there was no time"


def test_of_many_devices_a_first_plan_has_as_many_as_divide_the_batch():
    many = presets.load("h100-4x8-ib")
    prices = Prices(Space(on_device(PROFILE, many), many, offered(), Request(gpus=32, global_batch=20)))
    taken_s = prices.of(uniform("hybrid:d20", prices, 1)).cost.total_s
    assert taken_s < min(prices.of(uniform(f"hybrid:d{width}", prices, 1)).cost.total_s for width in (8, 10, 16))
    found = on_fewer(prices, anything, INF, INF)
    assert found is not None
    assert prices.of(found).cost.total_s <= taken_s * (1 + 1e-9)


def test_unequal_devices_in_tight_memory_get_shares_of_weights_and_state_on_fewer():
    cluster = unequal(1.0, 1.0, 0.9, 0.9, 0.3)
    free = Prices(Space(nouns.profile(), cluster, offered(), Request(gpus=5, global_batch=40, optimizer="adamw")))
    memory = int(0.7 * free.of(uniform("ddp", free, 1)).peak.total)
    asked = Request(gpus=5, global_batch=40, optimizer="adamw", memory_bytes=memory)
    prices = Prices(Space(nouns.profile(), cluster, offered(), asked))
    found = on_fewer(prices, anything, INF, INF)
    assert found is not None
    assert found.ranks == 4
    assert len(set(found.ways[0].layout.weights)) == 2
    assert prices.fits(found)


def test_once_per_step_work_of_wide_stages_is_that_of_their_own_number_of_microbatches():
    """With fewer samples a microbatch, a wide stage has layouts that it does not have with one microbatch."""
    many = presets.load("h100-4x8-ib")
    graph = known_models.transformer(12, 768)
    profile = on_device(known_models.profile(graph, 20_000.0, 64, floor_s=1e-6), many)
    prices = Prices(Space(profile, many, offered(), Request(gpus=32, global_batch=64, optimizer="adamw")))
    stages, lower = StageLookup(prices, anything), 0
    for width, m in itertools.product((22, 24, 32), (2, 16, 64)):
        compute_ms = m * sum(prices.compute(width, m)) * MS
        once = stages.floor(width, m).once
        least = max(compute_ms, compute_ms * (1 - 1 / m) + once)
        assert stages.independent_bound(width, m, compute_ms) <= least * (1 + 1e-9)
        lower += once < stages.floor(width, 1).once
    assert lower > 1
