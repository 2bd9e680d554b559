"""Weights gathered while the neighbour computes: what is hidden, where, and what that leaves for gradients."""

from __future__ import annotations

from dataclasses import replace

import known_models
import pytest

from asa.cost.constants import constant
from asa.cost.machine import presets
from asa.cost.planned import price_plan
from asa.cost.step import ComponentCost
from asa.cost.traffic.prefetch import Gathers, hidden
from asa.ir.cluster import Cluster, Overlap, Sharding
from asa.ir.plan import Plan
from asa.planner import Request, plan
from asa.simulator import simulate
from asa.strategies import offered

PROFILE = known_models.profile(known_models.transformer(4, 256), 300.0, 16)


def cluster() -> Cluster:
    """Streams that do not hold each other up, copies that cost nothing."""
    found = presets.load("a100-nvlink-8")
    return replace(found, overlap=Overlap(), sharding=Sharding(unit_s=0.0, byte_s=0.0))


def made(strategy: str, links: Cluster) -> Plan:
    return plan(PROFILE, links, offered(), Request(gpus=8, global_batch=64, strategies=(strategy,)))[0]


def components(found: Plan, links: Cluster) -> list[ComponentCost]:
    (stage,) = price_plan(found, PROFILE, links, offered()).stages
    return list(stage.components)


def on_cpus(links: Cluster) -> Cluster:
    """The same links between devices without a stream for gathers."""
    return replace(links, device=replace(links.device, type="cpu"))


def test_a_gather_is_exposed_only_where_it_outlasts_the_neighbour():
    links = cluster()
    found = made("fsdp", links)
    ahead = components(found, links)
    whole = components(found, replace(links, overlap=Overlap(compute_slowdown=2.0, communication_slowdown=2.0)))
    assert whole[0].prefetched_s == 0, "two streams that halve each other hide nothing"
    assert ahead[0].forward_communication_s == pytest.approx(whole[0].forward_communication_s), "nothing is in front"
    assert ahead[-1].backward_communication_s == pytest.approx(whole[-1].backward_communication_s)
    for i in range(1, len(ahead)):
        gather = whole[i].forward_communication_s
        left = max(0.0, gather - ahead[i - 1].forward_s)
        assert ahead[i].forward_communication_s == pytest.approx(left, abs=1e-12)
        behind = whole[i - 1].backward_communication_s
        left = max(0.0, behind - ahead[i].backward_s)
        assert ahead[i - 1].backward_communication_s == pytest.approx(left, abs=1e-12)
        assert ahead[i].covered_s == pytest.approx(behind - left, abs=1e-12)
    assert any(c.prefetched_s > 0 for c in ahead)


def test_compute_beside_a_gather_hides_no_gradients():
    links = cluster()
    for c in components(made("fsdp", links), links):
        assert c.window_s == pytest.approx(c.backward_s + c.bucket_s - c.covered_s)
        assert 0 <= c.covered_s <= c.backward_s * (1 + 1e-12)


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_the_step_is_shorter_by_what_is_prefetched_and_the_simulator_agrees(strategy):
    links = presets.load("v100-dgx1-8")
    found = made(strategy, links)
    price = price_plan(found, PROFILE, links, offered())
    assert sum(c.prefetched_s for c in price.stages[0].components) > 0
    assert simulate(found, PROFILE, links, offered()).step_time_s == pytest.approx(price.cost.total_s, rel=1e-9)
    assert price.cost.compute_s + price.cost.exposed_s == pytest.approx(price.cost.total_s)


def test_what_is_gathered_is_copied_out_and_what_is_scattered_copied_in():
    launches = Sharding(unit_s=constant("fsdp_launch_s"), byte_s=0.0)
    free, links = replace(cluster(), sharding=launches), replace(cluster(), sharding=None)
    found = made("fsdp", free)
    for before, after, c in zip(
        components(found, free), components(found, links), PROFILE.graph.components, strict=True
    ):
        copied = 2 * c.parameter_bytes / links.device.memory_bandwidth
        assert after.forward_communication_s - before.forward_communication_s == pytest.approx(copied)
        assert after.backward_communication_s - before.backward_communication_s == pytest.approx(copied)
        assert after.bucket_s - before.bucket_s == pytest.approx(copied)


def test_replicas_and_processors_gather_nothing_ahead():
    links = cluster()
    assert all(c.prefetched_s == c.covered_s == 0 for c in components(made("ddp", links), links))
    slow = on_cpus(links)
    assert all(c.prefetched_s == c.covered_s == 0 for c in components(made("fsdp", slow), slow))


def test_slower_streams_save_less_and_never_lose():
    gathers = Gathers(forward=2.0, backward=3.0, once=0.5, front=1.0)
    before = 1e9
    for slow in (1.0, 1.2, 1.5, 1.9):
        overlap = Overlap(compute_slowdown=slow, communication_slowdown=slow)
        found = hidden(gathers, overlap, ahead=1.5, behind=4.0, own=2.0)
        total = found.forward + found.backward + found.once
        assert 0 <= total < before
        assert found.covered == pytest.approx(min(1.0, 2.0)), "as long as the gather, counted alone"
        before = total
