"""The menu that the planner's choice is held against, and the scores of a contest."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import fake_strategies
import nouns
import pytest

from asa.planner import Request
from asa.schedules import schedules

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))


@pytest.fixture(scope="module")
def menu():
    from dataclasses import replace

    strategies = replace(fake_strategies.FULL, schedules=schedules())
    return importlib.import_module("menu").Menu(
        nouns.profile(), nouns.cluster(2), strategies, Request(gpus=2, global_batch=8)
    )


def test_every_change_is_of_one_component(menu):
    changes = menu.changes()
    assert changes
    for p in changes:
        differing = [a.name for a, b in zip(p.components, menu.answer.components, strict=True) if a != b]
        assert p.strategy == f"change:{differing[0]}"
        assert len(differing) == 1
    assert len({p.conduct for p in changes}) == len(changes)


def test_random_plans_are_feasible_distinct_and_the_same_for_the_same_seed(menu):
    drawn = menu.random(12, seed=3)
    assert len({p.conduct for p in drawn}) == len(drawn) == 12
    assert [p.conduct for p in menu.random(12, seed=3)] == [p.conduct for p in drawn]
    assert {len(p.stages) for p in drawn} == {1, 2}


def test_whole_strategies_carry_their_own_predictions(menu):
    static = {p.strategy: p for p in menu.static()}
    assert {"single", "ddp"} <= set(static)
    assert set(menu.hybrids()) & set(static)
    assert min(p.prediction.step_time_s for p in static.values()) >= menu.answer.certificate.lower_bound_s * 0.999
