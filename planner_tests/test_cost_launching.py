"""Sharding's work on the host of a device apart: who waits for it, and for how much of it."""

from __future__ import annotations

from dataclasses import replace

import known_models
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asa.cost.machine import presets
from asa.cost.planned import price_plan
from asa.cost.step import ComponentCost
from asa.cost.traffic.launching import Launches, awaited
from asa.ir.cluster import Cluster, Overlap, Sharding
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.planner import Request, plan
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
