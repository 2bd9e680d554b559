"""Language models from structure alone, against training steps that others measured."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from asa.strategies import offered
from benchmarks.truth.language import Predictor, expressible, read, tokens_per_second

TRUTH = Path(__file__).resolve().parent.parent.parent / "shared" / "truth" / "llm_b200.csv"
here = pytest.mark.skipif(not TRUTH.is_file(), reason="the measured steps (../shared/truth) are not here")
_CLEAR = 0.15
"""Measured times that are further apart than this are in a known order."""


@pytest.fixture(scope="module")
def judged():
    """(run, predicted seconds, predicted bytes)."""
    predictor = Predictor(offered())
    return [(r, predictor.seconds(r), predictor.memory_bytes(r)) for r in read(TRUTH) if expressible(r)]


@here
def test_steps_are_within_a_fifth_and_in_order(judged):
    assert len(judged) == 21
    assert {r.case: s / r.seconds for r, s, _ in judged if abs(s / r.seconds - 1) > 0.2} == {}
    wrong = [
        (a.case, b.case)
        for (a, s, _), (b, t, _) in combinations(judged, 2)
        if abs(a.seconds / b.seconds - 1) > _CLEAR and (a.seconds > b.seconds) != (s > t)
    ]
    assert wrong == []


@here
def test_memory_is_never_under_and_seldom_a_seventh_over(judged):
    over = sorted(m / r.memory_bytes - 1 for r, _, m in judged)
    assert over[0] >= 0
    assert over[-2] <= 0.15  # one run, of 131,072 tokens, is 0.16 over
    assert over[-1] <= 0.18


def test_llama_8b_on_eight_h100_is_near_what_torchtitan_publishes():
    assert tokens_per_second(offered()) == pytest.approx(5762, rel=0.1)
