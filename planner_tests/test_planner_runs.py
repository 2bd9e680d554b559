"""Runs of neighbours that are wrapped as one: what the ILP is told they hold is never more than what is printed, and
with it the fastest plan that fits is found and proved."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import known_models
import numpy as np
import pytest

from asa.cost.machine import presets
from asa.cost.memory.peak import needed
from asa.cost.way import Way
from asa.planner import Request
from asa.planner.clock import now
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space, anything
from asa.planner.stage import exhaustive
from asa.planner.stage.formulate import Formulation, formulate
from asa.planner.stage.lookup import StageLookup
from asa.planner.stage.problem import Choice, Problem
from asa.planner.stage.runs import RunCharge, Runs
from asa.planner.stage.singles import Single
from asa.strategies import offered


def charged(charge: RunCharge, choice: tuple[int, ...]) -> bool:
    """Whether a choice has the run of ``charge``."""
    a, b = charge.start, charge.start + len(charge.members)
    if any(choice[a + i] not in row for i, row in enumerate(charge.members)):
        return False
    return not (a and choice[a - 1] in charge.front) and not (b < len(choice) and choice[b] in charge.behind)


def space(cluster: str, *, microbatches: int | None = None, components: int = 18, gpus: int = 8) -> Space:
    """ResNet-50 on small images, the last ``components`` of it."""
    profile = known_models.profile(known_models.resnet50(32, 100), 9000.0, 64)
    keep = slice(-components, None)
    names = {c.name for c in profile.graph.components[keep]}
    profile = replace(
        profile, graph=replace(profile.graph, components=profile.graph.components[keep]),
        timings=tuple(t for t in profile.timings if t.component in names),
    )  # fmt: skip
    request = Request(gpus=gpus, global_batch=256, optimizer="adamw", microbatches=microbatches)
    return Space(profile, presets.load(cluster), offered(), request)


def peaks(problem: Problem, choice: Choice, told: list[RunCharge]) -> float:
    """GiB of the sum over components, with what the runs of a choice hold beyond it."""
    free = replace(problem, capacity=float("inf"))
    more = np.sum([c.more for c in told if charged(c, choice)] or [[0.0] * len(choice)], axis=0)
    rows = [
        [replace(row[c], transient=row[c].transient + m)] for row, c, m in zip(free.configs, choice, more, strict=True)
    ]
    return exhaustive.peak(replace(free, configs=tuple(map(tuple, rows))), (0,) * len(choice))


def drawn(rng: random.Random, found: Formulation) -> Choice:
    """A choice in runs of a few components each."""
    choice, want, left = [], 0.0, 0
    for i, row in enumerate(found.ways):
        if not left:
            want, left = rng.random(), rng.randint(1, 6)
        left -= 1
        before = found.ways[i - 1][choice[-1]] if choice else None
        same = [
            c
            for c, w in enumerate(row)
            if before and (w.layout, w.data, w.tensor) == (before.layout, before.data, before.tensor)
        ]
        choice.append(rng.choice(same) if same and left else int(want * len(row)))
    return tuple(choice)


@pytest.mark.parametrize("cluster", ["h100-nvlink-8", "l4-8x1-25g-rdma"])
@pytest.mark.parametrize("m", [1, 2])
def test_what_runs_are_said_to_hold_is_never_more_than_is_printed(cluster, m):
    prices = Prices(space(cluster, microbatches=m))
    found = formulate(prices, 8, m, anything, likely_tight=True, wrapped=True)
    runs, rng, told = Runs(prices, found), random.Random(m), []
    exact = short = 0
    for _ in range(30):
        choice = drawn(rng, found)
        if not np.isfinite(exhaustive.value(found.problem, choice)):
            continue
        printed = prices.of(found.candidate(choice)).peak.total / 2**30
        assert exhaustive.peak(found.problem, choice) <= printed * (1 + 1e-9)
        short += exhaustive.peak(found.problem, choice) < printed * (1 - 1e-6)
        told += runs.of(choice)
        said = peaks(found.problem, choice, list(dict.fromkeys(told)))
        assert said <= printed * (1 + 1e-9)
        exact += said == pytest.approx(printed, rel=1e-9)
    assert short > 3, "the sum must be less than what is printed, of some"
    assert exact > short // 2, "and what runs hold must often be all that lacks"


def replicas(_index: int, way: Way) -> bool:
    """Whole tensors, the batch over all ranks, with the optimizer's state on every rank or on one."""
    return way.layout.data == 8 and way.data.strategy in ("replicate", "zero1") and not way.checkpoint


def test_the_fastest_stage_that_fits_is_found_and_proved_beyond_those_that_do_not():
    whole, refused = space("h100-nvlink-8", microbatches=1, components=8), 0
    found = formulate(Prices(whole), 8, 1, replicas, likely_tight=True, wrapped=True, every=True)
    choices = list(product(*map(range, map(len, found.chain.configs))))
    values = {c: exhaustive.value(found.problem, c) for c in choices}
    printed = {c: Prices(whole).of(found.candidate(c)).peak.total for c in random.Random(0).sample(choices, 40)}
    low, high = min(printed.values()), max(printed.values())
    for share in (0.2, 0.35, 0.5, 0.65, 0.8):
        room = needed(whole.cluster.device, low + share * (high - low), 8)
        prices = Prices(Space(whole.profile, whole.cluster, offered(), replace(whole.request, memory_bytes=room)))
        truth = next(values[c] for c in sorted(choices, key=values.__getitem__) if prices.fits(found.candidate(c)))
        single = Single(StageLookup(prices, replicas), 0.0, 8, 1, "ilp")
        for _ in range(40):
            if single.bound >= single.value:
                break
            single.step(float("inf"), now() + 5)
        assert (single.bound, single.value) == pytest.approx((truth, truth), rel=1e-6)
        refused += bool(single.refused)
    assert refused > 1, "the draw must refuse what the sum lets through"
