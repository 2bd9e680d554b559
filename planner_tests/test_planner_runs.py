"""Runs of neighbours that are wrapped as one hold more than the sum over components: what is printed decides, and no
bound is above the fastest plan that fits."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import known_models

from asa.cost.machine import presets
from asa.cost.memory.peak import needed
from asa.cost.way import Way
from asa.planner import Request
from asa.planner.clock import now
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space
from asa.planner.stage import exhaustive
from asa.planner.stage.formulate import formulate
from asa.planner.stage.lookup import StageLookup
from asa.planner.stage.singles import Single
from asa.strategies import offered


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


def replicas(_index: int, way: Way) -> bool:
    """Whole tensors, the batch over all ranks, with the optimizer's state on every rank or on one."""
    return way.layout.data == 8 and way.data.strategy in ("replicate", "zero1") and not way.checkpoint


def test_no_bound_is_above_the_fastest_stage_that_fits_where_the_sum_lets_others_through():
    whole, refused = space("h100-nvlink-8", microbatches=1, components=8), 0
    found = formulate(Prices(whole), 8, 1, replicas, crowded=True, every=True)
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
            if single.bound >= single.value or single.stuck:
                break
            single.step(float("inf"), now() + 5)
        assert single.bound <= truth * (1 + 1e-6)
        assert single.value >= truth * (1 - 1e-6)
        refused += bool(single.refused)
    assert refused > 1, "the draw must refuse what the sum lets through"
