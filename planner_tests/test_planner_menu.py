"""All ways priced at once are what each of them is priced at by itself."""

from __future__ import annotations

import gc
from dataclasses import replace

import known_models
import nouns
import numpy as np
import pytest
import test_sequence
import test_unequal

from asa.cost.machine import presets
from asa.cost.planned import price_stage
from asa.cost.step import BoundaryCost, ComponentCost
from asa.cost.work.spread import waiting
from asa.ir.cluster import Cluster, Sharding, Waiting
from asa.ir.profile import Profile
from asa.ir.units import GIB
from asa.planner import Request, clock, plan
from asa.planner.pipeline.sketch import Sketch
from asa.planner.pipeline.staged import StagedSpace
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space, anything
from asa.planner.stage.formulate import formulate
from asa.planner.stage.problem import JOINT, MS, Edge
from asa.strategies import offered

WAITING = (Waiting(ranks=4, points=((1e-5, 1.5), (1e-3, 1.2), (1.0, 1.0))),)


def vit() -> Profile:
    profile = known_models.profile(known_models.transformer(3, 256), 300.0, 16)
    timings = (replace(t, spared_s=0.3 * t.forward.median) for t in profile.timings)
    return replace(profile, timings=tuple(timings))


def noisy() -> Cluster:
    """CPUs whose ranks wait for each other, and on which stock sharding costs something."""
    costs = Sharding(unit_s=1e-3, byte_s=1e-9, tensor_s=1e-4, moved_tensor_s=2e-5)
    return replace(nouns.cluster(4), waiting=WAITING, sharding=costs)


def spaces() -> dict[str, Space]:
    tiny, strategies = nouns.profile(), offered()
    uneven = Space(tiny, test_unequal.unequal(1, 1, 0.5), strategies, Request(gpus=3, global_batch=16))
    tokens = Request(gpus=4, global_batch=16, strategies=("asa", "sequence"))
    return {
        "slow links": Space(vit(), presets.load("t4-8x1-25g-tcp"), strategies, Request(gpus=4, global_batch=48)),
        "processors": Space(tiny, noisy(), strategies, Request(gpus=4, global_batch=16, optimizer="adamw")),
        "host": Space(
            vit(), presets.load("a100-4x8-roce"), strategies, Request(gpus=16, global_batch=64, offload="always")
        ),
        "halves": Space(vit(), noisy(), strategies, Request(gpus=4, global_batch=16, compression="fp16")),
        "tokens": Space(test_sequence.encoder(), test_sequence.CLUSTER, strategies, tokens),
        "unequal": uneven,
        "weights": uneven.weighted({3: (2, 2, 1)}),
    }


def check(exact: ComponentCost, found: dict[str, float]) -> None:
    held = exact.footprint
    said = {
        "forward": exact.forward_s + exact.forward_communication_s,
        "backward": exact.backward_s + exact.backward_communication_s,
        "bucket": exact.bucket_s,
        "once": exact.bucket_s + exact.update_s + exact.update_communication_s,
        "prompt": exact.prompt_sync_s,
        "late": exact.late_sync_s,
        "window": exact.window_s,
        "state": held.state,
        "activations": held.activations,
        "gradients": held.gradients,
        "transient": held.transient,
    }
    assert found == pytest.approx(said, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", list(spaces()))
def test_at_once_and_one_by_one(name: str) -> None:
    space = spaces()[name]
    prices, gpus, seen = Prices(space), space.request.gpus, 0
    for width, m in ((gpus, 1), (gpus, 4), (gpus // 2, 2)):
        for busy in {width, gpus}:
            pricer = prices.pricer(width, m, busy)
            menu = prices.menu(pricer, anything)
            samples = [space.samples(x, m) for x in menu.layouts]
            which = np.flatnonzero(menu.enough(samples, prices.fewest))
            found = menu.priced(pricer, which)
            ways = [list(space.ways(i, width, m)) for i in range(len(space.profile.graph))]
            assert [menu.ways[w] for w in which] == [w for row in ways for w in row]
            for k, w in enumerate(which.tolist()):
                exact = pricer.component(int(menu.component[w]), menu.ways[w])
                named = {field: float(values[k]) for field, values in vars(found).items()}
                least, added = (named.pop("least_state"), named.pop("least_transient")), named.pop("added")
                check(exact, named)
                assert 0 <= least[0] <= named["state"]
                assert least[1] <= named["transient"]
                assert added == (
                    pricer.states.state_cost(int(menu.component[w]), menu.ways[w]).costs.added if m > 1 else 0.0
                )
                seen += 1
    assert seen > 50


def test_a_second_forward_takes_less_by_what_it_leaves_out() -> None:
    space = spaces()["slow links"]
    pricer = Prices(space).pricer(4, 1)
    for i, component in enumerate(space.profile.graph.components):
        costs = {w: pricer.cost(i, w) for w in space.ways(i, 4, 1)}
        for way, cost in costs.items():
            if way.checkpoint:
                work, slow = pricer.longest(component, way.layout)
                plain = costs[replace(way, checkpoint=False)]
                assert work.spared_s == pytest.approx(0.3 * work.forward_s)
                assert cost.backward_s - plain.backward_s == pytest.approx(slow * (work.forward_s - work.spared_s))


@pytest.mark.parametrize("name", list(spaces()))
def test_a_boundary_does_not_depend_on_those_it_is_priced_with(name: str) -> None:
    space = spaces()[name]
    prices, gpus, seen = Prices(space), space.request.gpus, 0
    for width, m in ((gpus, 1), (gpus, 4), (gpus // 2, 2)):
        found = formulate(prices, width, m, busy=gpus)
        if found is None:
            continue
        pricer, layouts = prices.pricer(width, m, gpus), found.chain.layouts
        for i, joints in enumerate(found.chain.edges, 1):
            for (a, b), edge in joints.items():
                agree(edge, pricer.edges.boundary(i, layouts[a], layouts[b]))
                seen += edge.cost > 0
        for price, ends in ((pricer.edges.inlet, found.chain.inlets), (pricer.edges.outlet, found.chain.outlets)):
            for i, edges in enumerate(ends):
                assert set(edges) == {c.layout for c in found.chain.configs[i]}
                for a, edge in edges.items():
                    agree(edge, price(i, layouts[a]))
                    seen += edge.cost > 0
    assert seen > 20


def agree(edge: Edge, exact: BoundaryCost) -> None:
    held = exact.footprint
    seconds = (exact.blocking_s, exact.forward_s, exact.backward_s, exact.wrapper_s)
    said = (*(MS * x for x in seconds), *(x / GIB for x in (held.state, held.activations, held.transient)))
    assert tuple(getattr(edge, field) for field in JOINT) == said


@pytest.mark.parametrize("name", ["slow links", "host"])
def test_what_stages_take_to_begin_and_end_is_the_least_of_all_layouts(name: str) -> None:
    space = spaces()[name]
    prices, gpus = Prices(space), space.request.gpus
    for width, m in ((gpus // 2, 1), (gpus // 2, 4), (1, 2)):
        pricer, steady = prices.pricer(width, m, gpus), StagedSpace(prices, anything).limited(width, m, [1])[0].steady
        for price, row in ((pricer.edges.inlet, steady.first[0]), (pricer.edges.outlet, steady.last[0])):
            for i, value in enumerate(row):
                costs = [price(i, x) for x in space.layouts(width, m)]
                assert value == pytest.approx(MS * min(c.forward_s + c.backward_s for c in costs), rel=1e-12)


@pytest.mark.parametrize("name", ["slow links", "processors", "halves"])
def test_stages_that_run_alike(name: str) -> None:
    space = spaces()[name]
    prices, overlap, count = Prices(space), space.cluster.overlap, len(space.profile.graph)
    sketch = Sketch(prices, anything, clock.now() + 600)
    for width, m in ((2, 1), (4, 4), (1, 2)):
        for style in sketch.styles(width, m, save_memory=True):
            alike, pricer = sketch.uniform(width, m, style), prices.pricer(width, m, space.request.gpus)
            for start, stop, in_flight in ((0, count, 1), (1, count, 2), (0, 2, 3)):
                exact = price_stage(pricer, start, alike.ways[start:stop], overlap, in_flight)
                times, peak = alike.stage(start, stop, in_flight)
                assert vars(times) == pytest.approx(vars(exact.times), rel=1e-9, abs=1e-15)
                if any(map(pricer.joint, alike.ways)):  # what neighbours share is not known
                    assert exact.peak.total <= peak * 1.02
                else:
                    assert peak == pytest.approx(exact.peak.total, rel=1e-9)


def test_waiting_for_many_stretches() -> None:
    cluster = noisy()
    stretches = [0.0, 1e-7, 1e-5, 3e-4, 1e-3, 0.5, 1.0, 9.0]
    for ranks in (2, 4, 8):
        assert waiting(cluster, ranks, np.array(stretches)).tolist() == [waiting(cluster, ranks, s) for s in stretches]


def test_the_collector_is_as_it_was() -> None:
    assert gc.isenabled()
    plan(nouns.profile(), nouns.cluster(2), offered(), Request(gpus=2, global_batch=8))
    assert gc.isenabled()
    gc.disable()
    try:
        plan(nouns.profile(), nouns.cluster(2), offered(), Request(gpus=2, global_batch=8))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_equal_components_share_a_price_and_it_is_the_price_of_each():
    graph = known_models.transformer(8, 256)
    large = replace(graph.components[2], parameter_bytes=9 * graph.components[2].parameter_bytes)
    mixed = replace(
        graph, components=(*graph.components[:2], large, *graph.components[3:])
    )  # more in front than behind
    for model in (graph, mixed):
        profile = known_models.profile(model, 300.0, 16)
        for cluster, gpus in ((presets.load("t4-8x1-25g-tcp"), 4), (noisy(), 4)):
            prices = Prices(Space(profile, cluster, offered(), Request(gpus=gpus, global_batch=48)))
            for pricer in (prices.pricer(gpus, m, busy) for m, busy in ((1, None), (4, 4))):
                for layout in prices.space.layouts(gpus, 1):
                    for i in range(len(model)):
                        for way in prices.space.ways_in(i, layout, 1):
                            own = pricer.price(pricer.figures(i, way))
                            assert pricer.component(i, way) == own
                    for way in prices.space.ways_in(5, layout, 1):
                        if way.data.strategy in ("zero2", "zero3"):  # nothing is sent in buckets
                            assert len({id(pricer.cost(k, way)) for k in (5, 6, 7)}) == 1
