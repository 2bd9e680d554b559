"""``make gpu``: its pieces, and the tests marked ``gpu``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from planner_tests.standin.plans import on_gpu, seal, small_plan, trained
from planner_tests.standin.registry import scenario


@scenario
def measures_all_that_a_machine_can_tell(folder: Path) -> None:
    """The pieces of ``make gpu``, each with its first few commands: cut off, failed, taken up again; sent back."""
    os.environ["STANDIN_NAME"] = card = "NVIDIA A100-SXM4-80GB"
    seal(folder / "sealed", card)
    _pieces("profiles", 2, "--limit", "3", code=1)  # less than a process takes to start
    (late,) = _record()
    assert late["exit_code"] == 124, "it had a whole share; what was cut off after it is no answer"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _pieces("profiles", 1, "--failed", code=5)  # one line, and nothing for the record
    del os.environ["CUDA_VISIBLE_DEVICES"]
    os.environ["STANDIN_MEMORY"] = "1000"
    _pieces("profiles", 1, "--failed", code=1)
    del os.environ["STANDIN_MEMORY"]
    _, failed = _record()
    assert failed["exit_code"] == 5, failed
    page = (folder / "gpu" / "gpu-report.md").read_text()
    assert "FAILED with 5" in page, page
    _pieces("profiles", 1, code=1)
    assert len(_record()) == 2, "what failed was not asked for again"
    _pieces("profiles,memory,rehearsal", 4, "--failed", "--shares", "2", "--jobs", "2")
    _pieces("speed", 4)
    _pieces("study", 7, code=1)  # four components are no eight stages, and a failure in the record stays one
    _pieces("machine", 9, code=1)
    _pieces("profiles,memory,rehearsal,speed", 3, code=1)
    names = [entry["name"] for entry in _record()]
    assert len(names) == 2 + len(set(names)), f"taken up again, nothing is run twice: {names}"
    assert (folder / "profiles" / "cnn.nvidia-a100-sxm4-80gb.fp32.json").is_file(), "where plans look for it"
    said = _python("gpu_report.py", "gpu/record.jsonl", "--sealed", "sealed")
    assert "cnn ddp on stand-in-2: sealed" in said, said
    assert "a100-nvlink-8: 5 predictions made anew from profiles of this card, every hash holds" in said, said
    page = (folder / "gpu" / "gpu-report.md").read_text()
    assert said.strip() in page
    assert "reference's speed: " in page, page


def _record() -> list[dict[str, Any]]:
    record = Path("gpu/record.jsonl")
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def _pieces(names: str, most: int, *more: str, code: int = 0) -> None:
    """``benchmarks/gpu.py`` on a small network."""
    small = "--models cnn --memory-models cnn --input 1x8x8 --batch 16 --seconds 1 --strategies ddp --no-compile"
    argv = ["--out", "gpu", "--sealed", "sealed", *small.split(), "--pieces", names, "--most", str(most), *more]
    _python("gpu.py", *argv, code=code)


def _python(script: str, *argv: str, code: int = 0) -> str:
    """What a script of ``benchmarks`` prints."""
    file = str(Path(__file__).parents[2] / "benchmarks" / script)
    done = subprocess.run([sys.executable, "-W", "ignore", file, *argv], capture_output=True, text=True)
    assert done.returncode == code, (done.returncode, done.stderr, _record()[-1:])
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


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
    argv = ["-q", "-m", "gpu", "-k", " and ".join(left), "-p", "no:cacheprovider", "-p", "no:xdist"]
    found = _Counted()
    code = pytest.main([*argv, "--rootdir", str(tests.parent), "-c", str(tests.parent / "pyproject.toml"),
                        "--basetemp", str(folder / "tmp"), *files], plugins=[found])  # fmt: skip
    assert code == 0, code
    assert found.passed >= 44, found.passed
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
    for compiled, mode in (("components", "None"), ("whole", "None"), ("graphs", "reduce-overhead")):
        plan = replace(on_gpu(small_plan()), compiled=compiled)
        found = trained(folder / compiled, plan)
        assert set(told.read_text().split()) == {mode}
        told.unlink()
        eager = trained(folder / f"{compiled}.eager", on_gpu(small_plan()))
        assert abs(found["epochs"][0]["train_loss"] - eager["epochs"][0]["train_loss"]) < 1e-4, (found, eager)
