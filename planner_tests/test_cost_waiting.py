"""Waiting for the slowest rank, and what stock sharding costs beside its messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asa.cost.machine import presets
from asa.cost.pricing import Pricer, Way, times_of
from asa.cost.work.spread import slowest_rank, waiting, working
from asa.errors import InvalidInputError
from asa.ir.cluster import Contention, Sharding, Waiting
from asa.ir.codec import build
from asa.ir.layout import Layout
from asa.ir.plan import DataDegree, TensorDegree
from asa.profiler.waiting import _falling
from asa.strategies import offered
from planner_tests.nouns import profile as chain_profile

WAITS = (Waiting(ranks=2, points=((1e-3, 1.5), (1e-2, 1.3), (1e-1, 1.1))),)


@pytest.fixture(scope="module")
def cluster():
    return replace(presets.load("a100-nvlink-8"), waiting=WAITS)


def test_the_longest_stretch_is_the_measure_and_shorter_ones_wait_more(cluster):
    factors = [waiting(cluster, 2, s) for s in (1.0, 0.1, 0.01, 0.001, 1e-5)]
    assert factors == pytest.approx([1.0, 1.0, 1.3 / 1.1, 1.5 / 1.1, 1.5 / 1.1])
    assert waiting(cluster, 2, 3.1622776e-3) == pytest.approx(1.4 / 1.1)


def test_nobody_waits_alone_or_where_nothing_was_measured(cluster):
    assert waiting(cluster, 1, 1e-3) == 1.0
    assert waiting(replace(cluster, waiting=None), 2, 1e-3) == 1.0


@pytest.mark.parametrize("points", [(), ((1.0, 0.5),), ((2.0, 1.1), (1.0, 1.2)), ((1.0, 1e9),), ((0.0, 1.0),)])
def test_impossible_waits_are_refused(cluster, points):
    with pytest.raises(InvalidInputError, match="waiting"):
        replace(cluster, waiting=(Waiting(ranks=2, points=points),))


def _pricer(cluster, num_microbatches=1, width=2, optimizer="sgd", busy=None):
    profile = chain_profile()
    return Pricer(
        profile,
        times_of(profile, offered()),
        cluster,
        offered(),
        width=width,
        global_batch=8,
        num_microbatches=num_microbatches,
        optimizer=optimizer,
        busy=busy,
    )


def _component(cluster, data: DataDegree, tensor: TensorDegree):
    pricer = _pricer(cluster)
    layout = Layout(width=2, data=data.degree, tensor=tensor.degree)
    return pricer.component(1, Way(layout=layout, data=data, tensor=tensor))


@pytest.mark.parametrize(("optimizer", "passes"), [("sgd", 5), ("adamw", 7)])
@pytest.mark.parametrize("m", [1, 2, 8])
def test_all_microbatches_but_the_first_add_up_their_gradients(cluster, m, optimizer, passes):
    """Two are read and a sum is written, where the optimizer makes so many passes over as many bytes."""
    pricer = _pricer(cluster, m, width=1, optimizer=optimizer)
    alone, whole = DataDegree(strategy="replicate", degree=1), TensorDegree(strategy="none", degree=1)
    way = Way(layout=Layout(width=1, data=1, tensor=1), data=alone, tensor=whole)
    found = pricer.component(1, way)
    computed = found.forward_s + found.backward_s
    assert found.update_s > 0
    added = 3 / passes * found.update_s * (m - 1)
    assert m * computed == pytest.approx(m * sum(pricer.cell(1, way)[:2]) + added)


def test_tensor_parallel_components_wait_and_replicas_do_not(cluster):
    quiet = replace(cluster, waiting=None)
    whole, split = TensorDegree(strategy="none", degree=1), TensorDegree(strategy="tensor", degree=2)
    one, two = DataDegree(strategy="replicate", degree=1), DataDegree(strategy="replicate", degree=2)
    assert _component(cluster, two, whole) == _component(quiet, two, whole)
    waits, calm = _component(cluster, one, split), _component(quiet, one, split)
    assert waits.forward_communication_s > calm.forward_communication_s
    assert waits.backward_communication_s > calm.backward_communication_s
    assert waits.forward_s == calm.forward_s


def test_sharded_units_cost_their_handling(cluster):
    on_cpu = replace(cluster, waiting=None, device=replace(cluster.device, type="cpu"))
    quiet = replace(on_cpu, sharding=Sharding(unit_s=0.0, byte_s=0.0))
    costly = replace(quiet, sharding=Sharding(unit_s=1e-3, byte_s=1e-9))
    whole, sharded = TensorDegree(strategy="none", degree=1), DataDegree(strategy="zero3", degree=2)
    a, b = _component(quiet, sharded, whole), _component(costly, sharded, whole)
    size = chain_profile().graph.components[1].parameter_bytes
    assert size > 0
    assert b.forward_communication_s - a.forward_communication_s == pytest.approx(1e-3 + 1e-9 * size)
    assert b.backward_communication_s - a.backward_communication_s == pytest.approx(1e-3 + 1e-9 * size)
    assert b.bucket_s - a.bucket_s == pytest.approx(1e-3 + 1e-9 * size)
    replicas = DataDegree(strategy="replicate", degree=2)
    assert _component(quiet, replicas, whole) == _component(costly, replicas, whole)


def test_where_ranks_are_cpus_they_also_meet_at_scattered_gradients_and_weights_gathered_once(cluster):
    sharded = DataDegree(strategy="zero2", degree=2)
    whole = TensorDegree(strategy="none", degree=1)
    quiet = replace(cluster, waiting=None)
    a, b = _component(quiet, sharded, whole), _component(cluster, sharded, whole)
    assert a == b, "scatters of a GPU run beside backward"
    on_cpu = replace(cluster, device=replace(cluster.device, type="cpu"))
    a, b = _component(replace(on_cpu, waiting=None), sharded, whole), _component(on_cpu, sharded, whole)
    assert b.forward_communication_s > a.forward_communication_s == 0
    assert b.backward_communication_s > a.backward_communication_s == 0
    assert b.update_communication_s == a.update_communication_s


def test_sharded_tensors_are_handed_to_the_update_one_by_one(cluster):
    on_cpu = replace(cluster, waiting=None, device=replace(cluster.device, type="cpu"))
    quiet = replace(on_cpu, sharding=Sharding(unit_s=0.0, byte_s=0.0))
    costly = replace(quiet, sharding=Sharding(unit_s=0.0, byte_s=0.0, tensor_s=1e-4))
    whole = TensorDegree(strategy="none", degree=1)
    tensors = chain_profile().graph.components[1].num_parameter_tensors
    assert tensors > 0
    for name, slower in (("zero3", tensors * 1e-4), ("zero2", tensors * 1e-4), ("zero1", 0.0), ("replicate", 0.0)):
        data = DataDegree(strategy=name, degree=2)  # type: ignore[arg-type]
        found = [_component(c, data, whole).update_s for c in (quiet, costly)]
        assert found[1] - found[0] == pytest.approx(slower), name
    halves = [
        _component(quiet, DataDegree(strategy=name, degree=2), whole).update_s  # type: ignore[arg-type]
        for name in ("replicate", "zero3")
    ]
    assert halves[1] == pytest.approx(halves[0] / 2)


def test_units_of_many_tensors_cost_more_to_gather_and_scatter(cluster):
    on_cpu = replace(cluster, waiting=None, device=replace(cluster.device, type="cpu"))
    quiet = replace(on_cpu, sharding=Sharding(unit_s=1e-3, byte_s=0.0))
    costly = replace(quiet, sharding=Sharding(unit_s=1e-3, byte_s=0.0, moved_tensor_s=1e-4))
    sharded, whole = DataDegree(strategy="zero3", degree=2), TensorDegree(strategy="none", degree=1)
    a, b = _component(quiet, sharded, whole), _component(costly, sharded, whole)
    more = 1e-4 * chain_profile().graph.components[1].num_parameter_tensors
    assert more > 0
    assert b.forward_communication_s - a.forward_communication_s == pytest.approx(more)
    assert b.backward_communication_s - a.backward_communication_s == pytest.approx(more)
    assert b.bucket_s - a.bucket_s == pytest.approx(more)
    assert b.update_s == a.update_s


def test_clusters_measured_before_there_were_times_per_tensor_have_none():
    old = build(Sharding, {"unit_s": 1e-3, "byte_s": 1e-9}, source="test")
    assert (old.tensor_s, old.moved_tensor_s) == (0.0, 0.0)
    for name in ("tensor_s", "moved_tensor_s"):
        with pytest.raises(InvalidInputError, match="sharding"):
            replace(old, **{name: -1.0})


def test_longer_stretches_grow_no_more_than_shorter_ones():
    """Pooled where they are the wrong way round, whatever the noise."""
    assert _falling([(1.0, 1.5), (2.0, 1.2), (4.0, 1.1)]) == ((1.0, 1.5), (2.0, 1.2), (4.0, 1.1))
    found = _falling([(1.0, 1.2), (2.0, 1.4), (4.0, 1.0)])
    assert [s for s, _ in found] == [1.0, 2.0, 4.0]
    assert [f for _, f in found] == pytest.approx([1.3, 1.3, 1.0])


@pytest.mark.parametrize("m", [1, 4])
def test_a_stage_that_updates_holds_up_those_in_front(cluster, m):
    """Two stages of one rank: what moves memory takes 1.8 times as long on both at once, and one of them loses that."""
    together = Contention(ranks=2, slowdown=1.1, memory_slowdown=1.8)
    cluster = replace(cluster, contention=(Contention(ranks=1, slowdown=1.0), together))
    alone, whole = DataDegree(strategy="replicate", degree=1), TensorDegree(strategy="none", degree=1)
    way = Way(layout=Layout(width=1, data=1, tensor=1), data=alone, tensor=whole)
    one, stage = (_pricer(cluster, m, width=1, busy=busy).component(1, way) for busy in (1, 2))
    assert one.bucket_s == 0
    assert stage.bucket_s == pytest.approx(0.8 * stage.update_s)
    spread = slowest_rank(chain_profile(), replace(cluster, contention=()), working(1, 2, m))
    assert stage.update_s == pytest.approx(one.update_s * spread)
