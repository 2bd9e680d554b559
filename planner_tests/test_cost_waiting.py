"""Waiting for the slowest rank, and what stock sharding costs beside its messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asa.cost import presets
from asa.cost.pricing import Pricer, Way, times_of
from asa.cost.spread import waiting
from asa.errors import InvalidInputError
from asa.ir.cluster import Sharding, Waiting
from asa.ir.layout import Layout
from asa.ir.plan import DataDegree, TensorDegree
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


def _component(cluster, data: DataDegree, tensor: TensorDegree):
    profile = chain_profile()
    pricer = Pricer(
        profile,
        times_of(profile, offered()),
        cluster,
        offered(),
        width=2,
        global_batch=8,
        num_microbatches=1,
        optimizer="sgd",
    )
    layout = Layout(width=2, data=data.degree, tensor=tensor.degree)
    return pricer.component(1, Way(layout=layout, data=data, tensor=tensor))


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
    quiet = replace(cluster, waiting=None)
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
