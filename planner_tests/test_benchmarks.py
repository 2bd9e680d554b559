"""The scripts in ``benchmarks`` that measure the executor do what they say, in small."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tables import some

from asa.ir import codec
from asa.ir.bench import Bench

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tax() -> Any:
    found = script("tax")
    found.WARM_UP, found.PYTHON_PAIRS = 3, 3
    found.BATCH["tensor"] = 32
    return found


def test_planned_and_hand_written_steps_move_the_same(tax: Any) -> None:
    found = tax.compare("tensor", 2, 2)
    assert len(found["times"]["asa"]) == len(found["times"]["again"]) == 2
    assert found["calls"] == {"all_reduce": 12}
    assert found["low"] <= found["ratio"] <= found["high"]
    assert found["python_calls"] > 50


def test_a_collective_more_is_noticed(tax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = tax.by_hand

    def with_one_more(*args: Any, **options: Any) -> Any:
        step = usual(*args, **options)

        def longer(indices: torch.Tensor, number: int) -> None:
            step(indices, number)
            dist.all_reduce(torch.ones(3))

        return longer

    monkeypatch.setattr(tax, "by_hand", with_one_more)
    with pytest.raises(AssertionError, match="tensor, rank 0"):
        tax.compare("tensor", 0, 2)


def test_python_added_is_the_difference_of_two_steps(tax: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(tax.time, "thread_time", lambda: clock[0])

    def taking(seconds: float) -> Any:
        def step() -> None:
            clock[0] += seconds

        return step

    def meet() -> None:
        clock[0] += 5.0  # is in neither

    assert tax.added_python(taking(3.0), taking(1.0), meet, 5) == 2.0
    assert tax.own_calls(lambda: None) == 0
    assert tax.own_calls(lambda: tax.bounds(7, 2, 1)) == 1


def test_a_thin_network_has_every_module_and_little_to_compute(tax: Any) -> None:
    thin, whole = tax.network("ddp", slim=True), tax.network("ddp")
    assert [n for n, _ in thin.named_parameters()] == [n for n, _ in whole.named_parameters()]
    assert 100 * sum(p.numel() for p in thin.parameters()) < sum(p.numel() for p in whole.parameters())
    assert thin(torch.zeros(2, *tax.INPUT)).shape == (2, tax.CLASSES)


def test_the_interval_is_that_of_the_median(tax: Any) -> None:
    median, low, high = tax.interval([1.0 + 0.01 * (i % 7 - 3) for i in range(210)])
    assert median == 1.0
    assert 0.98 <= low <= 1.0 <= high <= 1.02


CELLS = {"3 to 2": (3, 2, "adamw", "zero", "tensor", "zero3"), "1 to 3": (1, 3, "sgd", "mixed", "pipeline", "zero1")}


@pytest.mark.parametrize("cell", some(CELLS, ["3 to 2"]))
def test_checkpoints_cross_plans_and_numbers_of_ranks(tmp_path: Path, cell: str) -> None:
    """Cells of the matrix that ``benchmarks/checkpoints.py`` runs in full."""
    matrix = script("checkpoints")
    assert len(matrix.cells()) == len(set(matrix.cells())) == 160
    assert {(c.source, c.target) for c in matrix.cells()} == {(a, b) for a in matrix.KINDS for b in matrix.KINDS}
    assert matrix.check(matrix.Cell(*CELLS[cell]), tmp_path) <= matrix.TOLERANCE


def test_a_cell_that_is_measured_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    memory = script("memory")

    def cell(strategy: str, least: float, over: float) -> Any:
        key = {"model": "cnn", "strategy": strategy, "optimizer": "sgd", "ranks": 2}
        return key | {"least_over_of_a_rank": least, "over": over}

    memory.kept(tmp_path / "m.json", [cell("ddp", -0.1, 0.0), cell("zero1", 0.0, 0.2)])
    found = memory.kept(tmp_path / "m.json", [cell("ddp", 0.01, 0.02)])
    assert [c["strategy"] for c in found["cells"]] == ["ddp", "zero1"]
    assert (found["num_cells"], found["under"], found["over_10_percent"], found["most_over"]) == (2, 0, 1, 0.2)


@pytest.mark.parametrize("path", sorted(SCRIPTS.rglob("*.py")), ids=lambda p: str(p.relative_to(SCRIPTS)))
def test_what_benchmarks_import_of_the_package_is_there(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "asa":
            module = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "records").glob("bench.*.json")), ids=lambda p: p.stem)
def test_records_of_comparisons_can_be_read(path: Path) -> None:
    assert codec.load(Bench, path).results
