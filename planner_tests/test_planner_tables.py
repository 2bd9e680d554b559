"""Bounds on stages under a memory limit: never above what brute force finds, and near it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import known_models
import numpy as np
import pytest
from random_pipelines import RandomPipelines

from asa.cost.machine import presets
from asa.ir.units import GIB
from asa.planner import Request
from asa.planner.pipeline.staged import stage_times
from asa.planner.pipeline.stages import Explorer
from asa.planner.pipeline.tables import OWN_LAST, limited, priced_memory, rates, relaxed, weights_of
from asa.planner.pipeline.thinning import Room
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space, anything
from asa.planner.stage import exhaustive, memory
from asa.planner.stage.floor import floor
from asa.planner.stage.formulate import formulate
from asa.planner.stage.labels import Solver
from asa.planner.stage.lattice import ACT, Numbers, PricedChain
from asa.strategies import offered

INF = float("inf")
FIELDS = ("steady", "forward", "whole", "single")


def truth(chain, a: int, b: int, in_flight: int) -> tuple[float, ...]:
    """Of a stage, the least of each field of a table over all choices that fit; infinite where none does."""
    problem, m = chain.stage(a, b, in_flight), chain.num_microbatches
    found = [INF] * len(FIELDS)
    for choice in product(*(range(len(c)) for c in problem.configs)):
        if exhaustive.peak(problem, choice) <= problem.capacity:
            x = stage_times(problem, choice)
            steady, once = x.forward + x.backward, x.last_backward_extra + x.after
            values = (steady, x.forward, m * steady + once, steady + once)
            found = [min(pair) for pair in zip(found, values, strict=True)]
    return tuple(found)


def test_tables_with_a_memory_limit_are_bounds_and_near():
    near, dearer, full, count = 0, 0, 0, 0
    for seed in range(8):
        pipelines = RandomPipelines(
            seed, components=3, gpus=4, most=4, speed=0.05, memory=(1.2, 0.8)[seed % 2], strategies=2, sp=1.2,
        )  # fmt: skip
        for w in (1, 2):
            chain = pipelines.chain(w, 4)
            assert chain is not None
            x = Numbers(chain)
            free = relaxed(x)
            flights = [1, 3]
            for f, table in zip(flights, limited(x, free, flights), strict=True):
                for a, b in ((0, 1), (0, 2), (1, 3), (0, 3)):
                    true = truth(chain, a, b, f)
                    for name, value in zip(FIELDS, true, strict=True):
                        exact = float(getattr(table, name)[a, b].min())
                        assert exact <= value * (1 + 1e-9)
                    low, least = float(table.steady[a, b].min()), float(free.steady[a, b].min())
                    count += 1
                    full += low == true[0] == INF
                    near += low < INF and low > 0.95 * true[0]
                    dearer += least * 1.02 < low < INF
    assert dearer > count / 8, "memory binds"
    assert near + full > 0.75 * count
    assert full > 0


@pytest.mark.parametrize("m", [1, 4])
def test_memory_may_be_priced_in_any_moments(m):
    """In whose backward it is held: shares of components, also of those that are in another stage."""
    draw, count = np.random.default_rng(m), 0
    for seed in range(4):
        chain = RandomPipelines(
            seed, components=4, gpus=2, most=3, speed=0.05, memory=(2.0, 1.2)[seed % 2], strategies=2
        ).chain(2, m)
        assert chain is not None
        x = Numbers(chain)
        shares = np.concatenate([np.eye(4), draw.dirichlet(np.ones(5), 8)[:, :4]])
        for flight, price in product((1, 2), (0.5, 5.0, 50.0)):
            rows = [(1.0, 0.0, 0.0, price, float(flight), 1.0, OWN_LAST)] * len(shares)
            weights = replace(weights_of(rows, 4), moments=shares)
            found = PricedChain(x, weights).intervals() - price * x.capacity
            for a, b in ((0, 1), (0, 2), (1, 3), (2, 4), (0, 4)):
                true = truth(chain, a, b, flight)[0]
                low = found[:, a, b].min(axis=(1, 2))
                assert (low <= true * (1 + 1e-9)).all()
                count += true < INF and bool((low > 0.5 * true).any())
    assert count > 5


def test_a_last_layer_that_is_small_hides_no_memory():
    """What decides is held in the backward of the one in front of it: so is where the bound comes from."""
    profile = known_models.profile(known_models.transformer(6, 512), 900.0, 32)
    cluster = presets.load("a100-nvlink-8")
    usable = Space(profile, cluster, offered(), Request(gpus=4, global_batch=64, memory_bytes=3 * GIB)).capacity(4)

    def chain(capacity: float):
        limit = 3 * GIB - usable + capacity * GIB
        prices = Prices(Space(profile, cluster, offered(), Request(gpus=4, global_batch=64, memory_bytes=int(limit))))
        return formulate(prices, 2, 1, busy=4).chain  # type: ignore[union-attr]

    n = len(profile.graph)
    least = memory.least_memory(chain(1e3).stage(n - 3, n)).value
    tight = chain(1.2 * least)
    x, solver = Numbers(tight), Solver(tight.stage(n - 3, n))
    solver.price()
    rows = priced_memory(x, 1)
    values = PricedChain(x, weights_of(rows, n)).intervals()[:, n - 3, n].min(axis=(1, 2))
    bounds = values - np.array([r[3] for r in rows]) * x.capacity
    whole = [k for k, r in enumerate(rows) if r[2] > 0]
    ahead = max(float(bounds[k]) for k in whole if rows[k][6] != OWN_LAST)
    last = max(float(bounds[k]) for k in whole if rows[k][6] == OWN_LAST)
    assert last < ahead <= solver.value * (1 + 1e-9)


def test_of_one_microbatch_all_of_a_step_is_a_single_one():
    x = Numbers(RandomPipelines(3, components=6, gpus=2, most=4, speed=0.05, memory=1.0).chain(2, 1))
    table = limited(x, relaxed(x), [1])[0]
    some = np.isfinite(table.whole)
    assert some.any()
    assert np.array_equal(table.single[some], table.whole[some])


def test_rates_of_repeated_blocks_are_those_of_a_block():
    x = Numbers(RandomPipelines(3, components=6, gpus=2, most=4, speed=0.05, memory=0.4, equal=True).chain(1, 4))
    row = x.rows[2]
    plain, again = (row[k, :2].sum() for k in (0, 1))
    kept, less = row[0, ACT], row[1, ACT]
    found = rates(x, 2, 5, per_step=False)
    assert any(r == pytest.approx((again - plain) / (2 * (kept - less)), rel=1e-3) for r in found)


def test_a_stage_is_explored_by_its_twin():
    x = Numbers(RandomPipelines(3, components=6, gpus=2, most=4, speed=0.05, memory=4.0, equal=True).chain(2, 4))
    assert [x.twin(a, a + 2) for a in range(5)] == [(0, 2), (1, 3), (2, 4), (2, 4), (4, 6)]
    caps = Room(1e3, 1e4)
    found = Explorer(x, 2).explore(2, {4: caps}, 10_000)[4]
    other = Explorer(x, 2).explore(3, {5: caps}, 10_000)[5]
    assert len(found) == len(other) > 1
    assert np.allclose(np.sort(found.least, axis=1), np.sort(other.least, axis=1), rtol=1e-12)
    drawn = Numbers(RandomPipelines(3, components=6, gpus=2, most=4, speed=0.05, memory=4.0).chain(2, 4))
    assert all(drawn.twin(a, b) == (a, b) for a in range(6) for b in range(a + 1, 7))


@pytest.mark.parametrize("model", ["vgg16", "transformer"])
def test_what_a_single_stage_takes_at_least(model):
    graph = known_models.vgg16(64, 10) if model == "vgg16" else known_models.transformer(4, 256)
    profile, cluster = known_models.profile(graph, 900.0, 32), presets.load("t4-8x1-25g-tcp")

    def prices(limit: int | None) -> Prices:
        return Prices(Space(profile, cluster, offered(), Request(gpus=4, global_batch=64, memory_bytes=limit)))

    free = floor(prices(None), 4, 1, anything)
    assert not free.may_bind
    least = memory.least_memory(formulate(prices(None), 4, 1, anything, every=True).problem).value  # type: ignore[union-attr]
    reserved = prices(2 * GIB).space.capacity(4)
    for m in (1, 4):
        tight = prices(int(1.3 * least * GIB + 2 * GIB - reserved))
        found, formulation = floor(tight, 4, m, anything), formulate(tight, 4, m)
        assert formulation is not None
        solver = Solver(formulation.problem)
        solver.price()
        assert found.may_bind
        assert free.whole < found.whole <= solver.value * (1 + 1e-9)
        assert found.whole > 0.6 * solver.bound
        assert found.memory <= memory.least_memory(formulation.problem).value * (1 + 1e-9)
    none = prices(int(0.3 * least * GIB + 2 * GIB - reserved))
    assert floor(none, 4, 1, anything).memory > none.space.capacity(4) / GIB
