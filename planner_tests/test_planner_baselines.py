"""Whole strategies: the cuts of a uniform pipeline."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import known_models
import numpy as np
import pytest

from asa.cost.machine import presets, widen
from asa.errors import InvalidInputError
from asa.planner import Request, plan, verify
from asa.planner.pipeline.whole import table
from asa.planner.space.baselines import even
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space
from asa.strategies import offered


@pytest.mark.parametrize("seed", range(40))
def test_even_cuts_have_the_least_maximum(seed):
    """Against every way to cut, for stages of equal and of unequal speed."""
    rng = random.Random(seed)
    n = rng.randint(2, 9)
    costs = [rng.choice((0.0, 1.0, 1.0, 2.0, rng.random())) for _ in range(n)]
    for stages in range(1, n + 1):
        equal = np.array([0.0, *accumulate(costs)])
        before = [equal / rng.choice((1.0, 1.0, 2.5)) if seed % 2 else equal for _ in range(stages)]

        def slowest(starts, before=before):
            return max(row[b] - row[a] for row, (a, b) in zip(before, pairwise((*starts, n)), strict=True))

        starts = even(before)
        assert starts == sorted(set(starts))
        assert slowest(starts) == pytest.approx(min(slowest((0, *c)) for c in combinations(range(1, n), stages - 1)))


def test_no_whole_strategy_has_stages_across_nodes() -> None:
    """Three nodes of 8: four stages of 6 would lie across them, and their collectives be priced as if they did not."""
    nodes = presets.load("a100-3x8-ib")
    profile = known_models.profile(known_models.transformer(), 500.0, 96)
    space = Space(profile, nodes, offered(), Request(gpus=24, global_batch=96))
    rows = {r.name: r for r in table(Prices(space), ("hybrid:d6p4", "hybrid:d8p3"))}
    for name, row in rows.items():
        widths = row.candidate.widths if row.candidate is not None else ()
        offsets = [0, *accumulate(widths)]
        for offset, width in zip(offsets, widths, strict=False):
            inside = offset // 8 == (offset + width - 1) // 8
            assert inside or offset % 8 == width % 8 == 0, name
    assert rows["hybrid:d6p4"].why_not == "its stages of 6 devices would lie across nodes"
    assert rows["hybrid:d8p3"].candidate is not None


def test_a_plan_file_with_a_stage_across_nodes_is_refused() -> None:
    nodes = presets.load("a100-3x8-ib")
    profile = known_models.profile(known_models.transformer(), 500.0, 96)
    asked = Request(gpus=24, global_batch=96, strategies=("hybrid:d8p3",))
    found = plan(profile, nodes, offered(), asked)[0]
    assert verify(found, profile, nodes, offered()).step_time_s == pytest.approx(found.prediction.step_time_s)
    six = plan(
        profile, replace(nodes, levels=nodes.levels[-1:]), offered(), replace(asked, strategies=("hybrid:d6p4",))
    )
    with pytest.raises(InvalidInputError, match=r"stage 1 \(ranks 6 to 11\) is neither inside a node nor in whole"):
        verify(six[0], profile, nodes, offered())


def test_a_whole_strategy_is_optimal_only_among_those_that_were_priced() -> None:
    """Where the time ends before all splits are priced, their compute is the bound."""
    profile = known_models.profile(known_models.transformer(4, 512), 400.0, 64)
    nodes = widen.widened(presets.load("h100-4x8-ib"), 64)
    asked = Request(gpus=64, global_batch=256, strategies=("hybrid",))
    short, long = (plan(profile, nodes, offered(), replace(asked, time_limit_s=s))[0] for s in (1e-4, 120.0))
    assert (short.certificate.status, long.certificate.status) == ("feasible", "optimal")
    assert short.certificate.lower_bound_s <= long.prediction.step_time_s <= short.prediction.step_time_s
