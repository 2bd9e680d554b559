"""What a search with something forced begins with."""

from __future__ import annotations

from dataclasses import replace

import known_models
import pytest

from asa.cost.machine import presets
from asa.cost.machine.estimate import on_device
from asa.planner import Request, parse_pin, plan, why_not
from asa.planner.pipeline.whole import table
from asa.planner.search import search
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.nearest import nearest, single_changes, start
from asa.planner.space.space import Space, pinned
from asa.strategies import offered

CLUSTER = presets.load("t4-8x1-25g-tcp")
PROFILE = on_device(known_models.profile(known_models.vgg16(32), 4000.0, 64), CLUSTER)
PRICES = Prices(Space(PROFILE, CLUSTER, offered(), Request(gpus=4, global_batch=64)))
WHOLE = {r.name: r.candidate for r in table(PRICES) if r.fits}


@pytest.mark.parametrize("pin", ["classifier=tensor@4", "*=zero1", "features.0=none"])
def test_only_what_is_not_allowed_is_changed_and_all_of_it(pin):
    allowed = pinned(PROFILE, (parse_pin(pin),))
    before = WHOLE["ddp"]
    after = nearest(PRICES.space, before, allowed)
    assert after is not None
    for i, (a, b) in enumerate(zip(before.ways, after.ways, strict=True)):
        assert allowed(i, b)
        assert b == a or not allowed(i, a)
        assert b in PRICES.space.ways(i, 4, before.num_microbatches)


def test_a_stage_of_one_rank_cannot_be_split_and_another_plan_is_begun_with():
    allowed = pinned(PROFILE, (parse_pin("classifier=tensor@2"),))
    assert nearest(PRICES.space, WHOLE["single"], allowed) is None
    assert start(PRICES, [WHOLE["single"]], allowed) is None
    found = start(PRICES, [WHOLE["single"], None, WHOLE["ddp"]], allowed)
    assert found is not None
    assert all(map(allowed, range(len(found.ways)), found.ways))


def test_where_nothing_is_faster_the_search_answers_with_what_it_began_with():
    begin = WHOLE["ddp"]
    found = search(PRICES, solver="dp", time_limit_s=60.0, start=begin)
    assert found.best is not None
    best = PRICES.of(found.best).cost.total_s
    again = search(PRICES, solver="dp", time_limit_s=60.0, start=found.best)
    assert again.best is not None
    assert PRICES.of(again.best).cost.total_s == pytest.approx(best)
    assert again.lower_bound_s == pytest.approx(found.lower_bound_s, rel=0.01)
    assert best <= PRICES.of(begin).cost.total_s


def test_what_is_forced_costs_as_much_as_a_plan_that_is_pinned_so():
    request = Request(gpus=4, global_batch=64, prefer_simple=False)
    free = plan(PROFILE, CLUSTER, offered(), request)[0]
    for pin in ("classifier=replicate@4", "classifier=tensor@4"):
        held = plan(PROFILE, CLUSTER, offered(), replace(request, pins=(parse_pin(pin),)))[0]
        found = why_not(free, PROFILE, CLUSTER, offered(), pin)
        assert found.other_s == pytest.approx(held.prediction.step_time_s, rel=0.02)
        assert found.other_s >= free.certificate.lower_bound_s * (1 - 1e-9)


def test_plans_beside_one_are_its_fastest_single_changes_that_fit():
    middle = WHOLE["ddp"]
    found = single_changes(PRICES, middle, PRICES.space.pinned, 5, float("inf"))
    seconds = [PRICES.of(x).cost.total_s for x in found]
    every = [
        PRICES.of(middle.with_way(i, way))
        for i, own in enumerate(middle.ways)
        for way in PRICES.space.ways(i, 4, middle.num_microbatches)
        if way != own
    ]
    fitting = sorted(p.cost.total_s for p in every if p.peak.total <= PRICES.capacity(middle))
    assert seconds == fitting[:5]
    for x in found:
        assert sum(a != b for a, b in zip(x.ways, middle.ways, strict=True)) == 1
        assert x.origin == "asa"


def test_the_best_plans_are_not_slower_than_single_changes_of_the_first_where_time_is_short():
    asked = Request(gpus=4, global_batch=64, top_k=4, time_limit_s=0.5, solver="dp")
    found = plan(PROFILE, CLUSTER, offered(), asked)
    first = Candidate.of(found[0], PROFILE, offered())
    near = [PRICES.of(x).cost.total_s for x in single_changes(PRICES, first, PRICES.space.pinned, 3, float("inf"))]
    assert all(p.prediction.step_time_s <= s * (1 + 1e-9) for p, s in zip(found[1:], near, strict=True))


@pytest.mark.parametrize("cut", [(2, 2, 2, 1), (5, 5, 5, 1)])
def test_what_is_changed_cuts_its_batch_as_the_rest_of_the_stage_does(cut):
    """A space that cuts batches evenly may hold a plan of unequal shares, found in a space with those weights."""
    even = WHOLE["ddp"]
    uneven = replace(even, ways=tuple(replace(w, layout=replace(w.layout, weights=cut)) for w in even.ways))
    found = single_changes(PRICES, uneven, PRICES.space.pinned, 5, float("inf"))
    assert len(found) == 5
    assert {w.layout.weights for x in found for w in x.ways} == {cut}
    pinned_so = nearest(PRICES.space, uneven, pinned(PROFILE, (parse_pin("classifier=tensor@4"),)))
    assert pinned_so is not None
    assert {w.layout.weights for w in pinned_so.ways} == {cut}
