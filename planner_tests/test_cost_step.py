"""The closed form of a step against the event simulation, and the laws of buckets."""

from __future__ import annotations

from dataclasses import replace

import known_models
import nouns
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asa.cost.memory.peak import Footprint, peak
from asa.cost.pipeline import StageTimes
from asa.cost.planned import Price, StagePrice
from asa.cost.step import BoundaryCost, ComponentCost, StepCost, step
from asa.cost.traffic.buckets import bucket_bytes, releases
from asa.ir.cluster import Overlap
from asa.ir.units import MIB
from asa.simulator.plan import play

times = st.floats(0, 5).map(lambda x: round(x, 3))


@st.composite
def stages(draw):
    n = draw(st.integers(1, 8))
    m = draw(st.integers(1, 3))
    components, release = [], 0
    for i in range(n):
        release = draw(st.sampled_from([release, max(0, i - 1), i]))
        components.append(
            ComponentCost(
                num_microbatches=m,
                forward_s=draw(times),
                backward_s=draw(times),
                forward_communication_s=draw(times),
                backward_communication_s=draw(times),
                bucket_s=draw(times),
                prompt_sync_s=draw(times),
                late_sync_s=draw(times) if release < i else 0.0,
                release=release,
                update_s=draw(times),
                update_communication_s=draw(times),
                error_s=0.0,
                link_error_s=0.0,
                footprint=Footprint(),
            )
        )
    boundaries = [
        BoundaryCost(
            num_microbatches=m,
            forward_s=draw(times),
            backward_s=draw(times),
            wrapper_s=draw(times),
            link_error_s=0.0,
            footprint=Footprint(),
        )
        for _ in range(n + 1)
    ]
    return components, boundaries


def simulated(components, boundaries, overlap) -> float:
    nothing = StepCost(total_s=0, compute_s=0, exposed_s=0, hidden_s=0, update_s=0, overlap_s=0)
    stage = StagePrice(
        start=0,
        cost=nothing,
        times=StageTimes(forward=0.0, backward=0.0),
        peak=peak([Footprint()], [Footprint()]),
        components=tuple(components),
        boundaries=tuple(boundaries),
    )
    price = Price(cost=nothing, peak=stage.peak, stages=(stage,), handovers=(), compute_error_s=0.0, link_error_s=0.0)
    names = [f"c{i}" for i in range(len(components))]
    return play(price, names, components[0].num_microbatches, overlap)[1]


@settings(max_examples=200)
@given(stages(), st.sampled_from([(1.0, 1.0), (1.2, 1.1), (1.19, 1.0), (1.5, 1.8)]))
def test_simulation_agrees_with_the_closed_form(stage, slowdowns):
    components, boundaries = stage
    overlap = Overlap(compute_slowdown=slowdowns[0], communication_slowdown=slowdowns[1])
    found = step(components, boundaries, overlap)
    assert found.total_s == pytest.approx(simulated(components, boundaries, overlap), abs=1e-9)
    assert found.compute_s + found.exposed_s == pytest.approx(found.total_s)


@settings(max_examples=100)
@given(stages())
def test_forced_overlap_is_never_priced_too_low(stage):
    components, boundaries = stage
    overlap = Overlap(compute_slowdown=2.5, communication_slowdown=2.5)
    assert overlap.saving < 0
    assert step(components, boundaries, overlap).total_s >= simulated(components, boundaries, overlap) - 1e-9


@settings(max_examples=100)
@given(stages())
def test_without_slowdown_it_is_the_two_machine_flow_shop(stage):
    components = [replace(c, late_sync_s=0.0) for c in stage[0]]
    makespan, done = 0.0, 0.0
    for c in reversed(components):
        done += c.window_s
        makespan = max(makespan, done) + c.prompt_sync_s
    makespan = max(makespan, done)
    total = sum(c.window_s + c.prompt_sync_s for c in components) - step(components, [], Overlap()).overlap_s
    assert total == pytest.approx(makespan)


def test_no_synchronisation_no_overlap():
    def nothing() -> ComponentCost:
        return ComponentCost(
            num_microbatches=2, forward_s=1.0, backward_s=2.0, forward_communication_s=0.0,
            backward_communication_s=0.0, bucket_s=0.0, prompt_sync_s=0.0, late_sync_s=0.0, release=0, update_s=0.5,
            update_communication_s=0.0, error_s=0.0, link_error_s=0.0, footprint=Footprint(),
        )  # fmt: skip

    quiet = BoundaryCost(
        num_microbatches=2, forward_s=0, backward_s=0, wrapper_s=0, link_error_s=0, footprint=Footprint()
    )
    found = step([nothing()] * 3, [quiet] * 4, Overlap())
    assert (found.total_s, found.exposed_s, found.overlap_s) == (3 * (2 * 3.0 + 0.5), 0.0, 0.0)


def test_buckets_of_resnet50_are_those_of_stock_data_parallelism():
    graph = known_models.resnet50()
    found = releases(graph)
    # 97.5 MiB in buckets of 1 and then 25 MiB: four more, the last of which leaves with the stem.
    assert len({r.index for r, c in zip(found, graph.components, strict=True) if r.prompt < 1}) == 4
    assert found[0].prompt == 1
    assert all(0 <= r.index <= i and 0 <= r.prompt <= 1 for i, r in enumerate(found))
    assert all(r.index in (i, i - 1, found[i - 1].index) for i, r in enumerate(found) if i)


def test_a_component_without_parameters_does_not_close_a_bucket():
    graph = nouns.profile().graph
    stem, body, head = graph.components
    empty = replace(stem, name="pool", parameter_bytes=0, num_parameter_tensors=0)
    found = releases(replace(graph, components=(stem, body, empty, replace(head, parameter_bytes=2 * MIB))))
    assert found[2].index <= found[3].index
    assert found[2].prompt == 1


def test_messages_are_buckets_or_single_tensors_larger_than_one():
    graph = known_models.vgg16()
    assert bucket_bytes(graph, 10 * MIB, 2) == 25 * MIB
    assert bucket_bytes(graph, 400 * MIB, 2) == 200 * MIB
    assert bucket_bytes(nouns.profile().graph, MIB, 2) == 25 * MIB
