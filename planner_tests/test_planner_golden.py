"""Golden plans: a change of the cost model shows here first, and ``make golden`` makes its diff."""

from __future__ import annotations

import importlib.util
import json
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_script", ROOT / "benchmarks" / "golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sample(expected: dict[str, dict[str, Any]]) -> list[str]:
    """Of each cluster a proved case, with all its memory where there is one, and a tight one: those take seconds, and
    ``make golden`` solves all."""
    proved = sorted((k for k, e in expected.items() if e.get("gap", 0) == 0), key=lambda k: zlib.crc32(k.encode()))
    found: dict[str, str] = {}
    for key in sorted(proved, key=lambda k: not k.endswith("slack")):
        found.setdefault(key.split()[1], key)
    return [*found.values(), next(k for k in proved if k.endswith("30%"))]


def test_plans_are_the_golden_ones():
    golden = script()
    expected = json.loads(golden.GOLDEN.read_text())
    cases = dict(golden.cases())
    assert list(cases) == list(expected), "make golden"
    chosen = sample(expected)
    assert {key.split()[1] for key in chosen} == {key.split()[1] for key in expected}
    for key in chosen:
        figures = cases[key]()
        if figures.get("gap", 0) > 0 or expected[key].get("gap", 0) > 0:
            # A search that was not finished: no two machines end it alike, but neither disproves the other.
            for one, other in ((figures, expected[key]), (expected[key], figures)):
                assert one["step_ms"] * (1 - one["gap"]) <= other["step_ms"] * (1 + 1e-4), f"{key}; make golden"
            continue
        for name, value in expected[key].items():
            if isinstance(value, float):
                assert figures[name] == pytest.approx(value, rel=1e-4, abs=1e-4), f"{key}: {name}; make golden"
            else:
                assert figures[name] == value, f"{key}: {name}; make golden"


def test_golden_plans_tell_fast_links_from_slow_ones():
    expected = json.loads(script().GOLDEN.read_text())
    assert len({e.get("ways") for e in expected.values()}) > 5, "different clusters, different plans"
    assert sum(e.get("gap", 0) <= 0.005 for e in expected.values()) > 0.5 * len(expected)
    golden = script()
    assert len(golden.CLUSTERS) >= 8
    assert len(golden.SHARES) >= 4
    limited = {k for k, e in expected.items() if not k.endswith("slack") and "infeasible" not in e}
    assert len(limited) > len(golden.CLUSTERS), "tight memory still has plans"
    for key, e in expected.items():
        if "step_ms" in e and e["best_baseline_ms"] is not None:
            assert e["step_ms"] <= e["best_baseline_ms"] + 1e-3, key
