"""The two programs of the baseline for slow devices, against every answer there is."""

from __future__ import annotations

import itertools
import random

import pytest
from test_benchmarks import script

malleus = script("malleus")


@pytest.mark.parametrize("seed", range(4))
def test_the_programs_find_what_trying_everything_finds(seed: int) -> None:
    draw = random.Random(seed)
    rates = [draw.choice((1.0, 1.3, 2.0, 4.0)) for _ in range(3)]
    batch = draw.randint(4, 12)
    shares = malleus.samples(rates, batch)
    every = [n for n in itertools.product(range(batch + 1), repeat=3) if sum(n) == batch]
    least = min(max(r * n for r, n in zip(rates, found, strict=True)) for found in every)
    assert sum(shares) == batch
    assert max(r * n for r, n in zip(rates, shares, strict=True)) == pytest.approx(least)

    seconds = [draw.uniform(0.1, 1.0) for _ in range(7)]
    stages = malleus.cut(rates, seconds)
    assert list(stages) == sorted(stages)
    assert set(stages) == {0, 1, 2}

    def slowest(ends: tuple[int, int]) -> float:
        parts = seconds[: ends[0]], seconds[ends[0] : ends[1]], seconds[ends[1] :]
        return max(r * sum(p) for r, p in zip(rates, parts, strict=True))

    found = slowest((stages.index(1), stages.index(2)))
    assert found == pytest.approx(min(slowest(x) for x in itertools.combinations(range(1, 7), 2)))
