"""Of plans that take equally long one is answered, whichever of them a search has met."""

from __future__ import annotations

import random
from dataclasses import replace

import known_models
import pytest

from asa.cost.machine import presets
from asa.cost.machine.estimate import on_device
from asa.planner import Request
from asa.planner.answer.canonical import TIE, _Around, canonical, improved
from asa.planner.budget import USUAL
from asa.planner.search import search
from asa.planner.space.baselines import uniform
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space, anything
from asa.strategies import offered

CASES = {
    "six ranks": (known_models.vgg16(32, 100), 8000.0, "3090-pcie-8", 8),
    "three ranks": (known_models.vgg16(32, 100), 8000.0, "l4-8x1-25g-rdma", 3),
    "one stage": (known_models.transformer(6, 256), 2000.0, "a100-nvlink-8", 4),
}


@pytest.fixture(scope="module", params=CASES)
def found(request):
    """Prices, and the fastest plan, with proof."""
    graph, rate, cluster, gpus = CASES[request.param]
    where = presets.load(cluster)
    profile = on_device(known_models.profile(graph, rate, 64), where)
    prices = Prices(Space(profile, where, offered(), Request(gpus=gpus, global_batch=256)))
    answer = search(prices, solver="dp", time_limit_s=60.0, budget=replace(USUAL, patience_s=60.0))
    assert answer.best is not None
    assert prices.of(answer.best).cost.total_s <= answer.lower_bound_s * (1 + 1e-6)
    return prices, answer.best


def test_an_answer_comes_first_among_the_plans_beside_it(found):
    prices, best = found
    assert canonical(prices, best, anything).key == best.key


def test_plans_that_take_as_long_lead_to_the_same_answer(found):
    prices, best = found
    around, drawn, met = _Around(prices, best, anything), random.Random(1), set()
    for _ in range(4):
        other = best
        for _ in range(3):
            tied = [x for x in around.changes(other) if around.seconds(x, around.limit_s) <= around.limit_s]
            other = drawn.choice(tied) if tied else other
        met.add(other.key)
        assert prices.of(other).cost.total_s == pytest.approx(prices.of(best).cost.total_s, rel=3 * TIE)
        again = canonical(prices, other, anything)
        assert again.key == best.key
    if len(best.widths) > 4:
        assert len(met) > 1, "nothing tied: nothing was tested"


def test_what_comes_first_is_no_slower_and_needs_no_more(found):
    prices, best = found
    p = len(best.widths)
    if p == 1:
        pytest.skip("one stage")
    lopsided = replace(best, starts=(0, *range(len(best.ways) - p + 1, len(best.ways))))
    if prices.of(lopsided).peak.total > prices.capacity(lopsided):
        pytest.skip("does not fit")
    before_s = prices.of(lopsided).cost.total_s
    after = canonical(prices, lopsided, anything)
    assert prices.of(after).cost.total_s <= before_s * (1 + 2 * TIE)
    assert (after.ranks, len(after.widths)) <= (lopsided.ranks, p)
    faster = improved(prices, lopsided, anything)
    assert prices.of(faster).cost.total_s < 0.999 * before_s


def test_pins_hold(found):
    prices, best = found
    held = dict(enumerate(best.ways))
    again = canonical(prices, best, lambda i, way: way.layout.width != held[i].layout.width or way == held[i])
    assert all(a == b or a.layout.width != b.layout.width for a, b in zip(again.ways, best.ways, strict=True))


def test_one_component_may_run_in_another_layout_than_the_rest():
    """Of stages with more than eight ranks the styles have no such layout."""
    cluster = presets.load("v100-2x8-25g-tcp")
    profile = on_device(known_models.profile(known_models.vgg16(), 2000.0, 64), cluster)
    prices = Prices(Space(profile, cluster, offered(), Request(gpus=16, global_batch=64)))
    before = uniform("ddp", prices, 1)
    after = improved(prices, before, anything)
    assert len({way.layout for way in after.ways}) > 1
    assert prices.of(after).cost.total_s < 0.5 * prices.of(before).cost.total_s
