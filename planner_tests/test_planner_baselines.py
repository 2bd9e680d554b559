"""Whole strategies: the cuts of a uniform pipeline."""

from __future__ import annotations

import random
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest

from asa.planner.space.baselines import _first_stages


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
