"""Groups that take turns, the scores of predictions, and a grid that goes on where its budget ended."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import nouns
import pytest

from asa.ir import codec
from asa.ir.plan import Plan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

GIB = 2**30


def made(name: str, gib: float, microbatches: int) -> Plan:
    plan = nouns.plan()
    return replace(
        plan, strategy=name, num_microbatches=microbatches,
        prediction=replace(plan.prediction, memory_bytes_per_rank=(round(gib * GIB), 0)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def turns() -> Any:
    return importlib.import_module("turns")


def grouped(turns: Any, plans: list[Plan], free: float) -> tuple[list[list[str]], list[str]]:
    groups, refused = turns.groups(plans, nouns.profile(), nouns.cluster(2), round(free * GIB))
    return [[p.strategy for p in g] for g in groups], [p.strategy for p, _ in refused]


def test_groups_of_three_hold_the_anchor(turns: Any) -> None:
    plans = [made(n, 1, i + 1) for i, n in enumerate(("ddp", "zero1", "single", "zero2", "tensor"))]
    groups, refused = grouped(turns, plans, 100)
    assert groups == [["single", "ddp", "zero1"], ["single", "zero2", "tensor"]]
    assert not refused


def test_what_does_not_fit_beside_others_runs_alone_and_what_fits_nowhere_is_named(turns: Any) -> None:
    plans = [made("single", 2, 1), made("ddp", 1, 2), made("fsdp", 8.5, 4), made("zero2", 30, 8)]
    groups, refused = grouped(turns, plans, 10)
    assert sorted(map(tuple, groups)) == [("fsdp",), ("single", "ddp")]
    assert refused == ["zero2"]


def test_an_anchor_by_itself_is_measured_too(turns: Any) -> None:
    assert grouped(turns, [made("single", 1, 1)], 10) == ([["single"]], [])
    assert grouped(turns, [made("single", 20, 1)], 10) == ([], ["single"])


def cell(strategy: str, measured: float, predicted: float, **changes: Any) -> dict[str, Any]:
    return {
        "model": "m", "global_batch": 8, "strategy": strategy, "ranks": 2, "predicted_s": predicted,
        "low_s": predicted / 1.1, "high_s": predicted * 1.1, "naive_s": 2.0, "measured": {"median": measured},
        "predicted_memory": 101, "peak_memory": 100, "communication_s": 0.1, "predicted_communication_s": 0.2,
        "anchor": "single", "anchor_s": 2.0, **changes,
    }  # fmt: skip


def test_scores_by_hand() -> None:
    foreseen = importlib.import_module("foreseen")
    found = [cell("single", 2.0, 1.0), cell("ddp", 1.0, 0.5, anchor_s=2.0), cell("zero1", 1.5, 1.5, anchor_s=1.0)]
    s = foreseen.scores(found)
    assert s["mape"] == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert s["mape_beside_one_device"] == pytest.approx((0 + 0) / 2)
    assert (s["order"], s["order_pairs"]) == (pytest.approx(2 / 3), 3)
    assert s["coverage_90"] == pytest.approx(1 / 3)
    assert s["half_width"] == pytest.approx(0.1)
    assert s["memory_under"] == 0


def test_a_choice_counts_where_all_its_rivals_were_measured() -> None:
    foreseen = importlib.import_module("foreseen")
    sealed = {
        "model": "m", "global_batch": 8, "groups": [["single", "ddp"], ["single", "zero1"]],
        "choice": {"strategy": "zero1", "p_best": 0.9, "expected_regret": 0.01},
    }  # fmt: skip
    found = [cell("single", 2.0, 1.0), cell("ddp", 1.0, 0.5), cell("zero1", 1.2, 0.4)]
    (choice,) = foreseen.choices([sealed], found)
    assert choice["best"] == "ddp"
    assert choice["regret"] == pytest.approx(0.2)
    assert not list(foreseen.choices([sealed], found[:2]))


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A grid of fake measurements; ``grid.measured`` are the groups that took turns."""
    prediction = importlib.import_module("prediction")
    found = prediction.Grid(tmp_path, 2, 10.0, ["ddp"], 0.0)
    found.measured = []

    def fake(model: str, plans: list[Plan]) -> list[dict[str, Any]]:
        found.measured.append([p.strategy for p in plans])
        found.left -= 1
        return [{"strategy": p.strategy, "steps": [1.0, 2.0], "anchor": plans[0].strategy, "anchor_s": 1.5,
                 "communication_s": 0.0, "peak_memory": 1, "created": ""} for p in plans]  # fmt: skip

    monkeypatch.setattr(found, "turns", fake)
    monkeypatch.setattr(found, "affords", lambda _: found.left > 0)
    plans = [made(n, 1, i + 1) for i, n in enumerate(("single", "ddp", "zero1"))]
    for p in plans:
        codec.save(p, tmp_path / "plans" / f"m.8.{p.strategy}.json")
    codec.save(nouns.profile(), tmp_path / "profiles" / "m.8.cpu.fp32.json")
    codec.save(nouns.cluster(2), tmp_path / "profiles" / "cluster.0.json")
    sealed = {
        "model": "m", "global_batch": 8, "written": "", "profile_created": "", "cluster": "cluster.0.json",
        "plans": {p.strategy: codec.fingerprint(p) for p in plans}, "left_out": {}, "choice": None,
        "groups": [["single", "ddp"], ["single", "zero1"]],
    }  # fmt: skip
    (tmp_path / "sealed").mkdir()
    (tmp_path / "sealed" / "m.8.json").write_text(json.dumps(sealed))
    return prediction, found


def test_a_grid_goes_on_where_its_budget_ended(grid: Any, tmp_path: Path) -> None:
    prediction, found = grid
    found.left = 1
    assert not found.cell("m", 8, 8)
    assert found.measured == [["single", "ddp"]]
    found.left = 5
    assert found.cell("m", 8, 8)
    assert found.cell("m", 8, 8)
    assert found.measured == [["single", "ddp"], ["single", "zero1"]]
    cells = {c["strategy"]: c for c in prediction.cells(tmp_path, again=False)}
    assert cells["single"]["measured"]["n"] == 4
    assert cells["zero1"]["measured"]["n"] == 2


def test_a_plan_that_is_not_the_sealed_one_is_refused(grid: Any, tmp_path: Path) -> None:
    prediction, found = grid
    found.left = 5
    found.cell("m", 8, 8)
    codec.save(made("ddp", 3, 2), tmp_path / "plans" / "m.8.ddp.json")
    with pytest.raises(SystemExit, match="not the one that was sealed"):
        prediction.cells(tmp_path, again=False)
