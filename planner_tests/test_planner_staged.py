"""Pipelines: the price of a plan, the numbers of the solvers, the event simulator and the law of transfers agree."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import fake_strategies
import known_models
import nouns
import pytest
from floor_bounds import floors

from asa.cost.machine import presets
from asa.cost.machine.estimate import on_device
from asa.cost.memory.peak import needed
from asa.cost.planned import price_plan
from asa.cost.pricing import Pricer, times_of
from asa.cost.step import ComponentCost
from asa.errors import InvalidInputError
from asa.ir import codec
from asa.ir.layout import Layout
from asa.ir.plan import Plan
from asa.ir.units import GIB
from asa.planner import Request, plan, verify
from asa.planner.parallel import Exchange, Forked
from asa.planner.pipeline.staged import Skeleton, StagedSpace
from asa.planner.pipeline.whole import table
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.space import Space, anything
from asa.planner.stage import exhaustive
from asa.planner.stage.problem import MS
from asa.schedules import schedules
from asa.simulator.plan import play, simulate
from asa.strategies import offered

STAGED = replace(fake_strategies.FULL, schedules=schedules(), checkpoint=True)
CASES = [(known_models.resnet50(), "v100-dgx1-8"), (known_models.transformer(), "3090-pcie-8")]


def space(graph, cluster: str, gpus: int = 8, batch: int = 64, **asked) -> Prices:
    profile, links = known_models.profile(graph, 500.0, 64), presets.load(cluster)
    return Prices(Space(profile, links, STAGED, Request(gpus=gpus, global_batch=batch, **asked)))


def drawn(rng: random.Random, prices: Prices) -> tuple[StagedSpace, Candidate, tuple[tuple[int, ...], ...]]:
    """A pipeline at random, and its choices in the rows of its stages' chains."""
    staged, n = StagedSpace(prices, anything), len(prices.space.profile.graph)
    stages = rng.randint(2, 4)
    starts = (0, *sorted(rng.sample(range(1, n), stages - 1)))
    widths = tuple(rng.choice([1, 1, 2]) for _ in range(stages))
    m = rng.choice([1, 2, 4, 8])
    choices = []
    for s, (start, width) in enumerate(zip(starts, widths, strict=True)):
        stop = starts[s + 1] if s + 1 < stages else n
        rows = staged.chain(width, m).configs[start:stop]
        choices.append(tuple(rng.randrange(len(row)) for row in rows))
    schedule = rng.choice(["gpipe", "1f1b"])
    skeleton = Skeleton(starts=starts, widths=widths, num_microbatches=m, schedule=schedule)
    return staged, staged.candidate(skeleton, choices), tuple(choices)


@pytest.mark.parametrize(("graph", "cluster"), CASES)
def test_floors_count_what_hosts_hand_over_and_never_too_much(graph, cluster):
    prices = space(graph, cluster)
    quick = StagedSpace(prices, anything)
    steady = quick.limited(1, 8, [1])[0].steady
    begin, end = steady.first[0], steady.last[0]
    assert begin[0] == end[-1] == 0  # nothing comes from in front of the first, or goes behind the last
    assert min(begin[1:]) >= 0
    assert max(begin[1:]) > 0
    for seed in range(4):
        _, candidate, _ = drawn(random.Random(seed), prices)
        value = prices.of(candidate).cost.total_s * MS
        assert floors(quick, 1.5 * value)[candidate.num_microbatches] <= value * (1 + 1e-9)


@pytest.mark.parametrize(("graph", "cluster"), CASES)
def test_floors_with_the_memory_limit_are_below_every_plan_that_fits(graph, cluster):
    prices = space(graph, cluster)
    plans = sorted((drawn(random.Random(seed), prices)[1] for seed in range(60)), key=lambda x: prices.of(x).peak.total)
    fitting = plans[:12]
    limit = needed(prices.space.cluster.device, prices.of(fitting[-1]).peak.total, 8)
    limited = space(graph, cluster, memory_bytes=limit)
    tight, free = StagedSpace(limited, anything), StagedSpace(prices, anything)
    tight.likely_tight = True
    for candidate in fitting:
        assert limited.fits(candidate)
        m, value = candidate.num_microbatches, prices.of(candidate).cost.total_s * MS
        assert floors(tight, 1.5 * value)[m] <= value * (1 + 1e-9)
    without = floors(free)
    bounds = floors(tight, 2 * max(without.values()))
    assert max(bounds[m] / without[m] for m in bounds) > 1.2


@pytest.mark.parametrize(("graph", "cluster"), CASES)
@pytest.mark.parametrize("seed", range(8))
def test_prices_numbers_and_events_agree(graph, cluster, seed):
    prices = space(graph, cluster)
    staged, candidate, choices = drawn(random.Random(seed), prices)
    price, m = prices.of(candidate), candidate.num_microbatches
    overlap, schedule = prices.space.cluster.overlap, STAGED.schedules[candidate.schedule]
    names = [c.name for c in graph.components]
    events, seconds = play(price, names, m, overlap, schedule)
    assert seconds == pytest.approx(price.cost.total_s, rel=1e-9)
    assert price.cost.compute_s + price.cost.exposed_s + price.cost.bubble_s == pytest.approx(seconds, rel=1e-9)
    for s, (stage, choice) in enumerate(zip(price.stages, choices, strict=True)):
        in_flight = schedule.in_flight(s, len(choices), m)
        problem = staged.chain(candidate.widths[s], m).stage(stage.start, stage.start + len(choice), in_flight)
        assert exhaustive.value(problem, choice) / MS == pytest.approx(stage.cost.total_s, rel=1e-9)
        assert exhaustive.peak(problem, choice) * GIB <= stage.peak.total * (1 + 1e-9)
        picked = [row[c] for row, c in zip(problem.configs, choice, strict=True)]
        between = [e[a.layout, b.layout] for e, a, b in zip(problem.edges, picked, picked[1:], strict=False)]
        for name in ("forward", "backward"):
            total = sum(getattr(x, name) for x in (*picked, *between)) / MS
            assert total == pytest.approx(getattr(stage.times, name), rel=1e-9)
        mine = [e for e in events if e.stage == s]
        assert {e.name for e in mine if e.kind == "forward"} == set(names[stage.start : stage.start + len(choice)])
        assert sum(e.kind == "transfer" for e in mine) <= 2 * m


def test_a_pipeline_plan_survives_its_file_and_is_priced_from_it():
    graph, cluster = CASES[0]
    profile, links = known_models.profile(graph, 500.0, 64), presets.load(cluster)
    found = plan(profile, links, STAGED, Request(gpus=8, global_batch=64, strategies=("hybrid:d2p4",)))[0]
    assert found.schedule == "1f1b"
    assert [s.ranks for s in found.stages] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    again = codec.loads(Plan, codec.dumps(found), source="plan")
    assert again == found
    assert verify(again, profile, links, STAGED) == found.prediction
    assert simulate(again, profile, links, STAGED).step_time_s == pytest.approx(found.prediction.step_time_s)
    assert found.prediction.bubble_s > 0
    assert len(found.prediction.memory_bytes_per_rank) == 8


def test_stages_need_a_schedule_that_is_offered():
    graph, cluster = CASES[0]
    profile, links = known_models.profile(graph, 500.0, 64), presets.load(cluster)
    found = plan(profile, links, STAGED, Request(gpus=8, global_batch=64, strategies=("gpipe",)))[0]
    with pytest.raises(InvalidInputError, match="stages need a schedule"):
        price_plan(replace(found, schedule="none"), profile, links, STAGED)
    with pytest.raises(InvalidInputError, match="layers runs 1 microbatch"):
        price_plan(replace(found, schedule="layers", num_microbatches=2), profile, links, STAGED)


def test_every_pipeline_of_the_table_has_as_many_stages_as_it_says():
    prices = space(*CASES[1])
    rows = {r.name: r.candidate for r in table(prices)}
    assert len(rows["gpipe"].widths) == len(rows["1f1b"].widths) == len(rows["layers"].widths) == 8
    assert rows["layers"].num_microbatches == 1
    assert rows["hybrid:d2p4"].widths == (2, 2, 2, 2)
    assert rows["hybrid:t4p2"].widths == (4, 4)
    assert rows["hybrid:d2t2p2"].widths == (4, 4)


def test_a_checkpoint_trades_memory_for_a_second_forward():
    prices = space(*CASES[0])
    pricer = prices.pricer(1, 1)
    for index, component in enumerate(prices.space.profile.graph.components):
        ways = [w for w in prices.space.ways(index, 1, 1) if w.data.strategy == "replicate"]
        kept, forgotten = (pricer.component(index, w) for w in sorted(ways, key=lambda w: w.checkpoint))
        assert forgotten.backward_s == pytest.approx(kept.backward_s + kept.forward_s)
        assert forgotten.footprint.activations < kept.footprint.activations
        held = kept.footprint.activations + kept.footprint.transient
        assert forgotten.footprint.activations + forgotten.footprint.transient == pytest.approx(held), component.name


def test_a_transfer_leaves_a_node_more_slowly_and_shares_what_leaves_it():
    profile, cluster = nouns.profile(), presets.load("a100-nvlink-8")
    outer = replace(cluster.levels[0], name="network", devices=16, tables=tuple(
        replace(t, points=tuple((s, 10 * v) for s, v in t.points)) for t in cluster.levels[0].tables
    ))  # fmt: skip
    two = replace(cluster, num_devices=16, levels=(cluster.levels[0], outer))
    pricer = Pricer(
        profile, times_of(profile, STAGED), two, STAGED, width=4, global_batch=1 << 20, num_microbatches=1,
        optimizer="sgd", busy=16,
    )  # fmt: skip
    one, four = Layout(width=4, data=1, tensor=1), Layout(width=4, data=4, tensor=1)
    inside, _ = pricer.handover(1, four, four, 4)
    across, back = pricer.handover(1, four, four, 8)
    assert across == back
    assert across > 10 * inside
    alone, _ = pricer.handover(1, one, one, 8)
    assert alone <= across * 4.2


def test_stages_stay_inside_a_node_or_take_whole_ones():
    prices = space(CASES[0][0], "v100-dgx1-8")
    cluster = prices.space.cluster
    wide = replace(cluster.levels[0], name="network", devices=32)
    cluster = replace(cluster, num_devices=32, levels=(cluster.levels[0], wide))
    here = Space(prices.space.profile, cluster, STAGED, Request(gpus=32, global_batch=64))
    assert here.placed(0, 8)
    assert here.placed(8, 16)
    assert here.placed(3, 5)
    assert not here.placed(3, 6)
    assert not here.placed(4, 8)
    assert not here.placed(0, 12)


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_what_is_priced_once_for_all_microbatches_is_what_each_would_price(compression):
    prices = space(CASES[0][0], "l4-8x1-25g-rdma", compression=compression)
    s = prices.space
    for m in (1, 2, 8):
        alone = Pricer(
            s.profile, times_of(s.profile, STAGED), s.cluster, STAGED, width=4, global_batch=s.request.global_batch,
            num_microbatches=m, optimizer=s.request.optimizer, busy=8, compression=compression,
        )  # fmt: skip
        for i in range(len(s.profile.graph)):
            for way in s.ways(i, 4, m):
                assert prices.pricer(4, m, 8).component(i, way) == alone.component(i, way)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a copy of the process")
def test_two_processes_hear_of_each_others_number():
    exchange = Exchange()
    other = Forked(lambda: exchange.exchange(2.0), fork=True)
    assert exchange.exchange(3.0, other) == 2.0
    assert other.result() == 3.0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a copy of the process")
def test_nobody_waits_for_a_process_that_ended_without_a_word():
    exchange = Exchange()
    other = Forked(lambda: 1.0, fork=True)
    assert exchange.exchange(3.0, other) == float("inf")
    assert other.result() == 1.0
    other = Forked(lambda: exchange.exchange(2.0), fork=False)
    assert exchange.exchange(3.0, other) == float("inf"), "the work is done here when its result is asked for"


@pytest.mark.parametrize(
    ("node", "expected"), [(32, range(1, 9)), (8, range(1, 9)), (4, (1, 2, 3, 4, 8, 12)), (6, (*range(1, 7), 12))]
)
def test_a_pipeline_has_stages_of_whole_nodes_and_none_that_cannot_be_placed(node, expected):
    known = presets.load("h100-4x8-ib")
    inner, outer = known.levels
    levels = (replace(inner, devices=node), outer) if node < 32 else (replace(inner, devices=32),)
    request = Request(gpus=28, global_batch=64)
    prices = Prices(Space(known_models.profile(CASES[0][0], 500.0, 64), replace(known, levels=levels), STAGED, request))
    widths = StagedSpace(prices, anything).widths()
    assert [w for w in widths if w < 16] == list(expected)
    assert all(any(prices.space.placed(rank, w) for rank in range(28 - w + 1)) for w in widths)
    assert ("up to 16 in whole nodes" in prices.space.describe()) == (node in (4, 6))


@pytest.mark.parametrize(("graph", "cluster"), [
    (known_models.resnet50(), "a100-nvlink-8"), (known_models.vgg16(64), "v100-2x8-25g-tcp"),
])  # fmt: skip
def test_a_way_that_is_left_out_of_a_stage_holds_up_none_of_the_others_for_longer(graph, cluster) -> None:
    """Stages in front wait for the last backward, which a larger bucket makes longer."""
    profile = on_device(known_models.profile(graph, 2000.0, 64), presets.load(cluster))
    prices = Prices(
        Space(profile, presets.load(cluster), offered(), Request(gpus=8, global_batch=64, optimizer="adamw"))
    )
    kept, pricer, seen = StagedSpace(prices, anything).formulation(2, 1), prices.pricer(2, 1, 8), 0
    for i, row in enumerate(kept.ways):
        every = {*row, *(w for w in prices.space.ways(i, 2, 1) if not w.checkpoint)}
        times = {w: priced(pricer.component(i, w, 0)) for w in every}
        for way in set(times) - set(row):
            seen += 1
            assert any(
                all(a <= b * (1 + 1e-9) for a, b in zip(times[w], times[way], strict=True))
                for w in row if w.layout == way.layout
            ), (i, way)  # fmt: skip
    assert seen > 10


def priced(cost: ComponentCost) -> tuple[float, ...]:
    forward, backward = cost.forward_s + cost.forward_communication_s, cost.backward_s + cost.backward_communication_s
    return forward, backward, cost.bucket_s
