"""First plans: one of a single stage, like the best whole strategy, is there before anything is bounded."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import known_models
import label_program
import pytest

from asa.cost.machine import presets
from asa.cost.machine.estimate import on_device
from asa.cost.memory.peak import needed
from asa.ir.units import GIB
from asa.planner import Request, decide, plan
from asa.planner.answer import infeasible
from asa.planner.pipeline import joint
from asa.planner.pipeline.whole import table
from asa.planner.space import baselines
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import Space, anything
from asa.planner.stage import exhaustive, memory
from asa.planner.stage.formulate import formulate
from asa.planner.stage.lookup import StageLookup
from asa.planner.stage.problem import MS
from asa.planner.stage.singles import first_plan, singles
from asa.strategies import offered

INF = float("inf")
CLUSTERS = ("a100-nvlink-8", "t4-8x1-25g-tcp")
PROFILES = {
    "vgg16": known_models.profile(known_models.vgg16(32), 4000.0, 64),
    "transformer": known_models.profile(known_models.transformer(4, 256), 2000.0, 64),
}


REQUEST = Request(gpus=4, global_batch=64)


@cache
def leanest(model: str, cluster: str) -> float:
    """Bytes that the leanest plan of one stage of four devices needs."""
    where, peaks = presets.load(cluster), []
    roomy = Prices(Space(on_device(PROFILES[model], where), where, offered(), REQUEST))
    for m in (1, 2, 4):
        formulation = formulate(roomy, 4, m, every=True)
        assert formulation is not None
        peaks.append(memory.least_memory(formulation.problem).value * GIB)
    return min(peaks)


def tight(model: str, cluster: str, share: float) -> Prices:
    """Four devices with so many times the memory that the leanest plan of one stage of all of them needs."""
    where = presets.load(cluster)
    limit = int(needed(where.device, share * leanest(model, cluster), 4))
    profile = on_device(PROFILES[model], where)
    return Prices(Space(profile, where, offered(), replace(REQUEST, memory_bytes=limit)))


def whole(prices: Prices) -> Candidate:
    """The fastest whole strategy of one stage of all devices that fits."""
    rows = [r for r in table(prices) if r.fits and r.candidate.widths == (4,)]
    return min(rows, key=lambda r: r.seconds).candidate


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", PROFILES)
@pytest.mark.parametrize("share", [1.2, 1.5])
def test_a_first_plan_fits_and_is_close_to_the_best_of_its_kind(model, cluster, share):
    prices = tight(model, cluster, share)
    alone = singles(StageLookup(prices, anything, (4,)), "ilp")
    value = first_plan(alone, whole(prices), INF, 64)
    found = min(alone, key=lambda x: x.value)
    assert value == found.value < INF
    problem, choice = found.stage.problem, found.solution.choice
    assert exhaustive.peak(problem, choice) <= problem.capacity
    assert exhaustive.value(problem, choice) == pytest.approx(value)
    assert prices.of(found.stage.formulation.candidate(choice)).cost.total_s * MS == pytest.approx(value)
    best = label_program.solve(problem, time_limit_s=1.0)
    assert best.bound * (1 - 1e-9) <= value <= 1.25 * best.value


@pytest.mark.parametrize("model", PROFILES)
def test_what_a_search_proves_does_not_depend_on_where_it_begins(model):
    prices, found = tight(model, CLUSTERS[1], 1.3), []
    for begun in (False, True):
        alone, best = singles(StageLookup(prices, anything), "dp"), joint.Incumbent(None, INF)
        if begun:
            best.note_other(first_plan(alone, whole(prices), INF, 64))
            assert best.limit < INF
        joint.best_first(alone, best, INF, patience=INF)
        found.append((best.limit, best.bound))
    assert found[0] == pytest.approx(found[1])
    assert found[1][0] == pytest.approx(found[1][1])


def test_nothing_slower_than_what_is_known_is_begun_with_nor_all_ranks_where_memory_is_plenty():
    prices = tight("vgg16", CLUSTERS[1], 1.3)
    known, alone = whole(prices), singles(StageLookup(prices, anything), "ilp")
    value = first_plan(alone, known, INF, 64)
    assert value < INF
    assert first_plan(singles(StageLookup(prices, anything), "ilp"), known, 0.5 * value, 64) == INF
    assert first_plan(singles(StageLookup(prices, anything), "ilp"), None, INF, 64) < INF, "memory binds"
    roomy = Prices(Space(prices.space.profile, prices.space.cluster, offered(), Request(gpus=4, global_batch=64)))
    assert first_plan(singles(StageLookup(roomy, anything), "ilp"), None, INF, 64) == INF


def test_a_search_without_time_answers_with_it_all_the_same():
    prices = tight("vgg16", CLUSTERS[1], 1.3)
    space = prices.space
    hurried = plan(space.profile, space.cluster, offered(), replace(space.request, time_limit_s=1e-3))[0]
    alone = singles(StageLookup(prices, anything), "ilp")
    assert hurried.prediction.step_time_s * MS <= first_plan(alone, whole(prices), INF, 64) * (1 + 1e-9)
    fastest = min(b.step_time_s for b in hurried.baselines if b.fits and b.step_time_s is not None)
    assert hurried.prediction.step_time_s < 0.8 * fastest


def test_ranks_that_do_not_divide_the_batch_begin_with_the_most_that_do():
    where = presets.load(CLUSTERS[0])
    profile = on_device(PROFILES["vgg16"], where)
    prices = Prices(Space(profile, where, offered(), Request(gpus=8, global_batch=6)))
    alone = singles(StageLookup(prices, anything), "ilp")
    value = first_plan(alone, None, INF, 6)
    assert [(x.width, x.num_microbatches) for x in alone if x.value == value] == [(6, 1)]


def test_a_plan_near_the_fastest_one_takes_its_place_where_that_one_does_not_fit():
    """ResNet-50 on 8 L4 over Ethernet with 30 % of the memory of data parallelism: what components hold at least fits,
    what neighbours that run alike hold together does not."""
    where, request = presets.load("l4-8x1-25g-rdma"), Request(gpus=8, global_batch=256)
    profile = on_device(known_models.profile(known_models.resnet50(), 938.0, 64), where)
    stock = Prices(Space(profile, where, offered(), request))
    limit = needed(where.device, 0.3 * stock.of(baselines.uniform("ddp", stock, 1)).peak.total, 8)
    prices = Prices(Space(profile, where, offered(), replace(request, memory_bytes=limit)))
    stages = singles(StageLookup(prices, anything), "dp")
    value = first_plan(stages, None, INF, 256)
    widest = next(x for x in stages if x.width == 8 and x.num_microbatches == 1)
    refused = exhaustive.value(widest.stage.problem, widest.refused[0])
    assert not widest.stage.fits_exactly(widest.refused[0])
    plan_of_it = widest.origin.formulation.candidate(widest.solution.choice)
    assert prices.fits(plan_of_it)
    assert prices.of(plan_of_it).cost.total_s * MS == pytest.approx(value)
    assert refused <= value < 1.001 * refused


@pytest.mark.parametrize("gib", [14, 20, 28])
def test_a_first_plan_has_as_many_microbatches_as_make_it_fast(gib: int) -> None:
    """One microbatch fits, but recomputes more than several, each of which holds less."""
    where = presets.load("a100-nvlink-8")
    profile = known_models.profile(known_models.transformer(24, 2048, 2048), 5.0, 64)
    asked = Request(gpus=8, global_batch=64, optimizer="adamw", memory_bytes=gib * GIB)
    lookup = StageLookup(Prices(Space(profile, where, offered(), asked)), anything)
    value, several = first_plan(singles(lookup, "dp"), None, INF, 64), list[float]()
    for m in (1, 2, 4, 8, 16):
        stage = lookup.get(8, m)
        assert stage is not None
        if stage.solver is not None:
            stage.solver.price()
            several.append(stage.solver.answer().value)
    assert value <= min(several) * 1.001 < 0.9 * several[0]


def test_a_plan_that_needs_little_memory_is_looked_for_until_one_fits():
    where = presets.load("a100-nvlink-8")
    request = replace(REQUEST, memory_bytes=1, offload="never", time_limit_s=1e-9)
    least = infeasible.leanest(Prices(Space(PROFILES["transformer"], where, offered(), request)))
    limit = needed(where.device, least.price.peak.total, least.candidate.ranks) + 1
    prices = Prices(Space(PROFILES["transformer"], where, offered(), replace(request, memory_bytes=limit)))
    assert not prices.fits(next(iter(infeasible.low_peak_plans(prices))).candidate)
    assert prices.fits(decide._least(prices, proved=False)[0])
