"""Declared traffic is intercepted traffic for neighbours of any two configurations; ``benchmarks/traffic.py`` runs
them all, this a sample."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from asa.launch import run_ranks
from planner_tests.traffic_checks import configurations, declared, every_pair, intercepted, plan_of, stretches

COMPONENTS = 12


def test_the_walk_meets_every_pair_once() -> None:
    for width in (2, 4):
        every = configurations(width)
        met = list(pairwise(every_pair(every)))
        assert len(met) == len(set(met)) == len(every) ** 2
        assert sum(len(s) - 1 for s in stretches(width, COMPONENTS)) == len(met)


@pytest.mark.parametrize(("width", "sample"), [(2, 2), (4, 2)])
def test_what_is_declared_is_what_runs(width: int, sample: int) -> None:
    drawn = random.Random(width).sample(stretches(width, COMPONENTS)[:-1], sample)
    plans = [plan_of(stretch) for stretch in drawn]
    ran = run_ranks(width, intercepted, plans, [len(s) for s in drawn], threads=1, timeout_s=120)
    for i, stretch in enumerate(drawn):
        said = dict(declared(stretch))
        assert [seen[i] for seen in ran] == [said] * width, " | ".join(x.text for x in stretch)


def test_a_changed_declaration_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from asa.strategies.zero3 import FullyShard

    honest = FullyShard.traffic
    monkeypatch.setattr(FullyShard, "traffic", lambda self, s, d, k: honest(self, s, d, k)[1:])
    with pytest.raises(AssertionError, match="zero3"):
        test_what_is_declared_is_what_runs(2, 2)
