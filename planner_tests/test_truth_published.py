"""Steps of language models on A100 and H100 that others measured, against estimates from structure alone."""

from __future__ import annotations

import pytest

from asa.strategies import offered
from benchmarks.truth.published import accuracy, predicted, read


@pytest.fixture(scope="module")
def judged():
    """(step, predicted seconds) of the steps on one node, and of those of other sources."""
    return [(s, predicted(s, offered())) for s in read() if s.gpus == 8 or s.source != "mpt"]


def test_steps_are_estimated_about_right_and_in_order(judged):
    found = accuracy(judged)
    assert set(found) == {"mpt a100", "mpt h100", "titan a100", "ibm a100"}
    assert {name: a for name, a in found.items() if not 0.85 < a.ratio < 1.15} == {}
    assert {name: a for name, a in found.items() if a.spread > 0.28} == {}
    assert {name: a for name, a in found.items() if a.ordered < 0.95 * a.pairs} == {}


def test_no_sequence_is_so_long_that_its_step_is_estimated_at_half(judged):
    assert {(s.device, s.model, s.tokens): p / s.seconds for s, p in judged if p < 0.54 * s.seconds} == {}
