"""A handful of the plans that ``benchmarks/verify_random.py`` draws by the hundred, on the smallest models."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from asa.ir.plan import Plan

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("verify_random_script", ROOT / "benchmarks" / "verify_random.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("model", "draw"), [("cnn", 1), ("cnn", 4), ("lstm", 2)])
def test_a_drawn_plan_trains_as_one_device_does(script: Any, model: str, draw: int, tmp_path: Path) -> None:
    row = script.check(draw, 7, [model], 3, tmp_path)
    assert row["equivalent"], row


def test_draws_cover_what_there_is(script: Any) -> None:
    made: list[Plan] = [script.drawn("cnn", random.Random(i), 4)[0] for i in range(60)]
    components = [c for p in made for c in p.components]
    assert {p.num_ranks for p in made} == {2, 3, 4}
    assert {len(p.stages) for p in made} >= {1, 2, 3}
    assert {p.schedule for p in made} >= {"none", "1f1b", "gpipe"}
    assert {c.data.strategy for c in components} >= {"replicate", "zero1", "zero2", "zero3"}
    assert {c.tensor.degree for c in components} >= {1, 2, 3}
    assert {c.checkpoint for c in components} == {True, False}
