"""What communication costs the host of a device apart: who waits for it, and for how much of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import known_models
import nouns
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asa.cost import constants
from asa.cost.machine import presets
from asa.cost.machine.estimate import estimate
from asa.cost.planned import price_plan
from asa.cost.pricing import times_of
from asa.cost.step import ComponentCost
from asa.cost.traffic.launching import Launches, awaited, launched
from asa.ir.cluster import Cluster, Overlap, Sharding
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.planner import Request, plan
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space
from asa.simulator import simulate
from asa.strategies import offered

UNIT_S = 250e-6
SMALL = known_models.profile(known_models.transformer(4, 256), 300.0, 16)
ZERO = Launches(forward=0.0, backward=0.0, update=0.0, gradient=0.0)
times = st.floats(0.0, 1.0)


def cluster(unit_s: float) -> Cluster:
    found = presets.load("a100-nvlink-8")
    overlap = Overlap(compute_slowdown=2.0, communication_slowdown=2.0)  # nothing is gathered ahead
    return replace(found, overlap=overlap, sharding=Sharding(unit_s=unit_s, byte_s=0.0))


def made(strategy: str, profile: Profile = SMALL) -> Plan:
    request = Request(gpus=8, global_batch=64, strategies=(strategy,))
    return plan(profile, cluster(UNIT_S), offered(), request)[0]


def components(found: Plan, unit_s: float, profile: Profile = SMALL) -> list[ComponentCost]:
    (stage,) = price_plan(found, profile, cluster(unit_s), offered()).stages
    return list(stage.components)


def scaled(profile: Profile, factor: float) -> Profile:
    def times(stat):
        return replace(stat, median=factor * stat.median, p10=factor * stat.p10, p90=factor * stat.p90)

    timings = tuple(replace(t, forward=times(t.forward), backward=times(t.backward)) for t in profile.timings)
    return replace(profile, timings=timings)


def test_components_no_larger_than_their_launch_pay_all_of_it():
    tiny = replace(scaled(SMALL, 1e-9), dispatch_floor_s=0.0)
    for strategy, forward, backward, once in (("fsdp", 1, 1, 1), ("zero2", 0, 0, 2), ("ddp", 0, 0, 0)):
        found = made(strategy, tiny)
        for free, paid in zip(components(found, 0.0, tiny), components(found, UNIT_S, tiny), strict=True):
            ahead = paid.forward_communication_s - free.forward_communication_s
            back = paid.backward_communication_s - free.backward_communication_s
            assert (ahead, back) == pytest.approx((forward * UNIT_S, backward * UNIT_S), rel=1e-4)
            bucket = paid.bucket_s - free.bucket_s
            update = paid.update_communication_s - free.update_communication_s
            assert bucket + update == pytest.approx(once * UNIT_S, rel=1e-4)


def test_large_components_hide_it():
    large = scaled(SMALL, 100.0)
    found = made("fsdp", large)
    assert components(found, UNIT_S, large) == components(found, 0.0, large)
    assert components(found, UNIT_S) != components(found, 0.0), "small ones do not"


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_the_simulator_waits_as_long(strategy):
    tiny, links = replace(scaled(SMALL, 1e-9), dispatch_floor_s=0.0), cluster(UNIT_S)
    found = made(strategy, tiny)
    price = price_plan(found, tiny, links, offered())
    assert price.cost.total_s > price_plan(found, tiny, cluster(0.0), offered()).cost.total_s
    assert simulate(found, tiny, links, offered()).step_time_s == pytest.approx(price.cost.total_s, rel=1e-9)
    assert price.cost.compute_s + price.cost.exposed_s == pytest.approx(price.cost.total_s)


def test_ranks_on_processors_compute_and_launch_in_turn():
    links = cluster(UNIT_S)
    links = replace(links, device=replace(links.device, type="cpu"))
    found = plan(SMALL, links, offered(), Request(gpus=8, global_batch=64, strategies=("fsdp",)))[0]
    (stage,) = price_plan(found, SMALL, links, offered()).stages
    (free,) = price_plan(found, SMALL, replace(links, sharding=cluster(0.0).sharding), offered()).stages
    for paid, before in zip(stage.components, free.components, strict=True):
        assert paid.forward_communication_s - before.forward_communication_s == pytest.approx(UNIT_S)


@given(own=times, longer=times, floor=times, gather=times, scatter=times)
def test_longer_compute_never_ends_sooner(own, longer, floor, gather, scatter):
    launches = Launches(forward=gather, backward=gather, update=scatter, gradient=scatter)

    def ends(compute: float) -> float:
        host = awaited(launches, forward=compute, backward=compute, floor=floor)
        assert min(host.forward, host.backward, host.update, host.gradient) >= -1e-12
        assert host.forward + host.update <= gather + scatter + 1e-12
        return compute + host.forward + host.update

    assert ends(own + longer) >= ends(own) - 1e-12
    assert awaited(ZERO, forward=own, backward=own, floor=floor) == ZERO


GPUS = presets.load("a100-nvlink-8")


def priced(found: Plan, profile: Profile = SMALL) -> float:
    return price_plan(found, profile, GPUS, offered()).cost.total_s


@contextmanager
def free(*names: str) -> Iterator[None]:
    """As if hosts took no time for these."""
    before = dict(constants.everything())
    try:
        for name in names:
            constants.everything()[name] = replace(before[name], value=0.0)
        yield
    finally:
        constants.everything().update(before)


HOST = ("collective_launch_s", "handover_launch_s")
WHOLE = ("hybrid:d2p2", "hybrid:d2t2", "hybrid:d1t2p2", "gpipe", "1f1b", "layers", "tensor")


def whole(strategy: str, profile: Profile = SMALL) -> Plan:
    return plan(profile, GPUS, offered(), Request(gpus=4, global_batch=64, strategies=(strategy,)))[0]


@pytest.mark.parametrize("strategy", WHOLE)
def test_a_host_that_launches_messages_is_never_faster(strategy):
    tiny, large = replace(scaled(SMALL, 1e-9), dispatch_floor_s=0.0), scaled(SMALL, 1e3)
    for profile, hidden in ((tiny, False), (SMALL, None), (large, True)):
        found = whole(strategy, profile)
        paid = priced(found, profile)
        with free(*HOST):
            without = priced(found, profile)
        assert paid >= without
        if hidden is not None:
            assert (paid == pytest.approx(without, rel=1e-12)) == hidden, "large components hide all of it"


@pytest.mark.parametrize("strategy", ["ddp", "single", "zero2", "fsdp"])
def test_replicas_launch_no_such_messages(strategy):
    found = whole(strategy)
    with free(*HOST):
        without = priced(found)
    assert priced(found) == without


def test_a_stage_pays_for_every_message_of_every_microbatch():
    tiny = replace(scaled(SMALL, 1e-9), dispatch_floor_s=0.0)
    found = whole("1f1b", tiny)
    stages = price_plan(found, tiny, GPUS, offered()).stages
    with free(*HOST):
        before = price_plan(found, tiny, GPUS, offered()).stages
    each = constants.constant("handover_launch_s")
    for s, (paid, was) in enumerate(zip(stages, before, strict=True)):
        messages = (s > 0) + (s + 1 < len(stages))
        assert paid.times.forward - was.times.forward == pytest.approx(messages * each, rel=1e-6)
        assert paid.times.backward - was.times.backward == pytest.approx(messages * each, rel=1e-6)


@pytest.mark.parametrize("strategy", [*WHOLE, "fsdp"])
def test_slower_devices_stay_slower(strategy):
    found = whole(strategy)
    times = [priced(found, scaled(SMALL, 1.3**k)) for k in range(-24, 25)]
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(times))


@pytest.mark.parametrize("strategy", WHOLE)
def test_the_simulator_launches_the_same(strategy):
    found = whole(strategy)
    assert simulate(found, SMALL, GPUS, offered()).step_time_s == pytest.approx(priced(found), rel=1e-9)


def test_no_way_launches_more_for_itself_than_what_is_kept_from_its_ends():
    prices = Prices(Space(SMALL, GPUS, offered(), Request(gpus=8, global_batch=64)))
    pricer, seen = prices.pricer(8, 1, 8), 0
    states = pricer.states
    for i in range(len(SMALL.graph)):
        for way in prices.space.ways(i, 8, 1):
            most, own = states.most_launched(way.layout)[i], Launches(*states.state_cost(i, way).costs.launches)
            inner = [states.collective_s * launched(pricer.inner(i, way), p) for p in ("forward", "backward")]
            assert own.forward + own.update + inner[0] <= most[0] + 1e-12
            assert own.backward + own.gradient + inner[1] + way.checkpoint * inner[0] <= most[1] + 1e-12
            seen += 1
    assert seen > 50


def test_on_processors_nothing_of_it_is_priced():
    cpu = nouns.cluster(4)
    for strategy in ("tensor", "1f1b"):
        found = plan(nouns.profile(), cpu, offered(), Request(gpus=2, global_batch=16, strategies=(strategy,)))[0]
        paid = price_plan(found, nouns.profile(), cpu, offered())
        with free(*HOST, "estimate_launch_cuda_s", "fsdp_launch_s"):
            assert price_plan(found, nouns.profile(), cpu, offered()) == paid


def test_small_microbatches_of_an_estimate_take_as_long_as_their_launch():
    graph = known_models.resnet50(32, 100)
    modules = tuple(replace(c, modules=tuple(f"{c.name}.{k}" for k in range(8))) for c in graph.components)
    graph = replace(graph, components=modules)
    found = estimate(graph, GPUS.device, model_spec="resnet50", model_fingerprint="0123456789abcdef", global_batch=64)
    launch = constants.constant("estimate_launch_cuda_s") * 8
    times = times_of(found, offered())
    for i, component in enumerate(graph.components):
        one, many = times.work(component, 1, 1), times.work(component, 8192, 1)
        assert one.forward_s == pytest.approx(launch)
        assert one.backward_s == pytest.approx(launch)
        assert times.launches[i] == pytest.approx(launch)
        twice = times.work(component, 16384, 1)
        if component.name != "classifier":
            assert 1.9 < twice.forward_s / many.forward_s < 2.1, "the device bounds what is large"
