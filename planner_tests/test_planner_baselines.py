"""Whole strategies: the cuts of a uniform pipeline."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import known_models
import numpy as np
import pytest

from asa.cost.machine import presets
from asa.errors import InvalidInputError
from asa.planner import Request, plan, verify
from asa.planner.pipeline.whole import table
from asa.planner.space.baselines import _first_stages
from asa.planner.space.candidate import Prices
from asa.planner.space.space import Space
from asa.strategies import offered


@pytest.mark.parametrize("seed", range(40))
def test_balanced_cuts_have_the_least_maximum(seed):
    """The bisection against every way to cut: the same maximum, for every start and number of stages."""
    rng = random.Random(seed)
    n = rng.randint(2, 9)
    costs = [rng.choice((0.0, 1.0, 1.0, 2.0, rng.random())) for _ in range(n)]
    before = np.array([0.0, *accumulate(costs)])
    behind = before[n] - before[:n]
    for stages in range(2, n + 1):
        last = n - stages + 1
        behind, ends = _first_stages(before, behind, n - stages)
        cuts = [(0, *c, n) for c in combinations(range(1, n), stages - 1)]
        best = min(max(before[b] - before[a] for a, b in pairwise(c)) for c in cuts)
        assert behind[0] == pytest.approx(best)
        assert 1 <= ends[0] <= last


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
