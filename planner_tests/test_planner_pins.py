"""Pins that no single stage suits: stages of a pipeline may each have the width of their own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import known_models
import nouns
import pytest
from test_unequal import few

from asa.cost.machine import presets
from asa.cost.machine.estimate import on_device
from asa.planner import Request, parse_pin, plan
from asa.planner.pipeline.climb import first_plans
from asa.planner.pipeline.practice import on_fewer, practice
from asa.planner.pipeline.staged import StagedSpace
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import Space
from asa.strategies import offered

STRATEGIES = few(offered(), "replicate", "zero1", schedules=("1f1b", "gpipe"))


def pinned_pipelines(space: Space) -> Iterator[Candidate]:
    """Every plan of several stages that the pins allow, one by one."""
    n, gpus = len(space.profile.graph), space.request.gpus
    for stages, m in itertools.product(range(2, n + 1), [1, 2, 4, 8]):
        for widths in itertools.product(range(1, gpus), repeat=stages):
            for cuts in itertools.combinations(range(1, n), stages - 1) if sum(widths) <= gpus else ():
                of = [widths[sum(cut <= i for cut in cuts)] for i in range(n)]
                for ways in itertools.product(*(list(space.ways(i, w, m, space.pinned)) for i, w in enumerate(of))):
                    for name in space.schedules:
                        yield Candidate(
                            origin="asa", widths=widths, starts=(0, *cuts), schedule=name, num_microbatches=m, ways=ways
                        )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "pins",
    [
        ("stem=replicate@2", "head=zero1@3"),
        ("stem=zero1@3", "head=replicate@2"),
    ],
)
def test_pins_to_degrees_of_different_stages_are_planned_as_well_as_can_be(pins):
    gpus = 5
    request = Request(
        gpus=gpus, global_batch=12, pins=tuple(map(parse_pin, pins)), prefer_simple=False, time_limit_s=60
    )
    space = Space(nouns.profile(), nouns.cluster(gpus), STRATEGIES, request)
    found = plan(nouns.profile(), space.cluster, STRATEGIES, request)[0]
    assert {len(s.ranks) for s in found.stages} >= {2, 3}
    for pin in request.pins:
        for c in found.components:
            choice = c.data if pin.axis == "data" else c.tensor
            assert not pin.matches(c.name) or pin.allows(choice.strategy, choice.degree)
    prices = Prices(space)
    best = min(prices.of(x).cost.total_s for x in pinned_pipelines(space))
    assert found.certificate.lower_bound_s <= best * (1 + 1e-9)
    assert found.prediction.step_time_s <= best * (1 + 1e-9)


def test_a_model_of_one_component_is_planned_with_a_pin_that_does_not_suit_one_rank():
    whole = nouns.profile()
    only = whole.graph.components[-1]  # its gradients take long, so one rank is faster
    profile = replace(
        whole, graph=replace(whole.graph, components=(only,)), whole=(), skipped=(),
        timings=tuple(t for t in whole.timings if t.component == only.name),
        updates=tuple(u for u in whole.updates if u.component == only.name),
    )  # fmt: skip
    request = Request(gpus=4, global_batch=2, pins=(parse_pin(f"{only.name}=replicate@2"),), prefer_simple=False)
    (found,) = plan(profile, nouns.cluster(4), STRATEGIES, request)
    assert (found.components[0].data.strategy, found.components[0].data.degree) == ("replicate", 2)


def test_what_is_kept_out_of_a_stage_fits_none_of_its_width():
    request = Request(gpus=5, global_batch=12, pins=(parse_pin("stem=replicate@2"), parse_pin("head=zero1@3")))
    prices = Prices(Space(nouns.profile(), nouns.cluster(5), STRATEGIES, request))
    staged = StagedSpace(prices, prices.space.pinned)
    for width, out in ((2, "head"), (3, "stem"), (1, "stem")):
        chain = staged.chain(width, 1)
        assert chain is not None
        at = chain.names.index(out)
        assert min(c.state for c in chain.configs[at]) > 100 * chain.capacity
    assert StagedSpace(prices, prices.space.pinned, every=True).chain(2, 1) is None


@pytest.mark.parametrize("pin", ["encoder.1=zero1", "encoder.1=tensor", "embedding=replicate@2"])
def test_first_plans_keep_to_pins(pin):
    """The search has them before it has looked at anything, however little time there is."""
    cluster = presets.load("v100-2x8-25g-tcp")
    profile = on_device(known_models.profile(known_models.transformer(4, 256), 2000.0, 64), cluster)
    prices = Prices(Space(profile, cluster, offered(), Request(gpus=16, global_batch=64, pins=(parse_pin(pin),))))
    pinned, inf = prices.space.pinned, float("inf")
    several = first_plans(prices, pinned, inf, inf)
    assert several
    for found in (on_fewer(prices, pinned, inf, inf), practice(prices, pinned)[0], *several):
        assert found is not None
        assert prices.fits(found)
        assert all(pinned(i, way) for i, way in enumerate(found.ways))
