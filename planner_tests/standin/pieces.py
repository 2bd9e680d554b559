"""``make gpu``: its pieces, and the tests marked ``gpu``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from planner_tests.standin.plans import on_gpu, seal, small_plan, trained
from planner_tests.standin.registry import scenario


@scenario
def measures_all_that_a_machine_can_tell(folder: Path) -> None:
    """The pieces of ``make gpu``, each with its first few commands; taken up again, nothing is run twice."""
    import subprocess

    from planner_tests.standin import sites

    seal(folder / "sealed")
    small = [
        "--models",
        "cnn",
        "--memory-models",
        "cnn",
        "--input",
        "1x8x8",
        "--batch",
        "16",
        "--seconds",
        "1",
        "--strategies",
        "ddp",
        "--no-compile",
    ]
    script = str(sites.ROOT.parent / "benchmarks" / "gpu.py")
    pieces = "profiles,memory,rehearsal,speed,study"
    for named, most in ((pieces, "3"), (pieces, "3"), ("machine", "9")):
        argv = [sys.executable, "-W", "ignore", script, "--out", "gpu", *small, "--pieces", named, "--most", most]
        done = subprocess.run([*argv, "--sealed", "sealed"], capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stderr + (folder / "gpu" / "record.jsonl").read_text()[-2000:]
    names = [json.loads(line)["name"] for line in (folder / "gpu" / "record.jsonl").read_text().splitlines()]
    assert len(names) == len(set(names)), names
    score = [sys.executable, str(Path(script).with_name("gpu_report.py")), "gpu/record.jsonl", "--sealed", "sealed"]
    said = subprocess.run(score, capture_output=True, text=True, cwd=folder, check=True).stdout
    assert "cnn ddp on stand-in-2: sealed" in said, said
    assert said.strip() in (folder / "gpu" / "gpu-report.md").read_text()


NOT_HERE = {
    "test_events_time_the_device_and_the_host_apart": "work is done when a call returns",
    "test_tf32_is_taken_and_given_back": "the CPU's kernels have no TF32",
    "test_compiled_components_train_the_same": "torch's compiler writes kernels for a real device",
    "test_a_gpu_is_profiled_by_its_own_clock": "a quarter of ResNet-18's time is the stand-in's own",
}
"""Tests marked ``gpu`` that need a real one, and why; all others run."""


@scenario
def runs_the_tests_marked_gpu(folder: Path) -> None:
    """Every file that has such tests; with two devices, those that need two run, too."""
    import pytest

    tests = Path(__file__).parents[1]
    files = [str(f) for f in sorted(tests.glob("test_*.py")) if "pytest.mark.gpu" in f.read_text()]
    assert len(files) >= 6, files
    left = [f"not {name}" for name in NOT_HERE]
    argv = ["-q", "-x", "-m", "gpu", "-k", " and ".join(left), "-p", "no:cacheprovider", "-p", "no:xdist"]
    found = _Counted()
    code = pytest.main([*argv, "--rootdir", str(tests.parent), "-c", str(tests.parent / "pyproject.toml"),
                        "--basetemp", str(folder / "tmp"), *files], plugins=[found])  # fmt: skip
    assert code == 0, code
    assert found.passed >= 45, found.passed
    assert not found.skipped, found.skipped


class _Counted:
    """What pytest found, for a scenario to judge."""

    def __init__(self) -> None:
        self.passed, self.skipped = 0, list[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed += report.when == "call" and report.passed
        if report.skipped:
            self.skipped.append(report.nodeid)


@scenario
def computes_in_compiled_components_and_graphs(folder: Path) -> None:
    """What is asked of torch's compiler, which traces as ever, with kernels that are not compiled."""
    from dataclasses import replace

    import torch

    usual, told = torch.compile, folder / "asked"

    def traced_only(*args: Any, mode: str | None = None, **options: Any) -> Any:
        with told.open("a") as file:  # by ranks, which are processes of their own
            file.write(f"{mode}\n")
        return usual(*args, **(options | {"backend": "aot_eager"}))

    torch.compile = traced_only
    for compiled, mode in (("components", "None"), ("graphs", "reduce-overhead")):
        plan = replace(on_gpu(small_plan()), compiled=compiled)
        found = trained(folder / compiled, plan)
        assert set(told.read_text().split()) == {mode}
        told.unlink()
        eager = trained(folder / f"{compiled}.eager", on_gpu(small_plan()))
        assert abs(found["epochs"][0]["train_loss"] - eager["epochs"][0]["train_loss"]) < 1e-4, (found, eager)
