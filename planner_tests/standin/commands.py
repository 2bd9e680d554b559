"""What a user types: every command that asks for GPUs."""

from __future__ import annotations

import json
import os
from pathlib import Path

from planner_tests.standin.plans import on_gpu, seal, small_plan
from planner_tests.standin.registry import scenario

_MODEL = "cnn --input 1x8x8 --classes 10 --global-batch 16"


@scenario
def looks_at_the_machine(folder: Path) -> None:
    from planner_tests.forked import asa

    said = asa("doctor", cwd=folder).stdout
    assert "Stand-In GPU, Stand-In GPU" in said
    os.environ["STANDIN_NVLINK"] = "4"
    assert "1 over NVLink" in asa("doctor", cwd=folder).stdout
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    assert "Stand-In GPU, Stand-In GPU" not in asa("doctor", cwd=folder).stdout
    os.environ |= {"STANDIN_MIG": "1", "STANDIN_GPUS": "1", "CUDA_VISIBLE_DEVICES": "0"}
    said = asa("doctor", cwd=folder).stdout
    assert "MIG on" in said
    assert "fewer than two GPUs" in said


@scenario
def uses_an_instance_of_mig(folder: Path) -> None:
    """A part of the second card, by name: CUDA shows a process one, and NVML tells of it what it tells of parts."""
    from planner_tests.forked import asa

    os.environ |= {"STANDIN_MIG": "1", "CUDA_VISIBLE_DEVICES": "MIG-01010000-0000-0000-0000-000000000000"}
    assert "Stand-In GPU MIG 1g.10gb" in asa("doctor", cwd=folder).stdout
    said = asa(*f"profile {_MODEL} --device cuda --time-limit 1s -v -o p.json".split(), cwd=folder).stdout
    assert "Stand-In GPU MIG 1g.10gb" in said, said
    assert "GPU clock 1410 of 1410 MHz" in said, said
    asa("plan", "p.json", "--gpus", "1", "-o", "plan.json", cwd=folder)
    short = ("--data", "digits", "--steps-per-epoch", "2", "--epochs", "1")
    said = asa("train", "plan.json", *short, "--out", "run", cwd=folder).stdout
    assert "kJ" not in said, said
    told = [json.loads(text) for text in (folder / "run" / "log.jsonl").read_text().splitlines()]
    assert next(e["gpu"] for e in told if e["event"] == "steps") == {"clock_mhz": 1410}
    said = asa("bench", "--models", *_MODEL.split(), "--gpus", "2", "--device", "cuda", cwd=folder, code=5).stderr
    assert "2 ranks need 2 CUDA devices, this machine has 1" in said, said
    os.environ["CUDA_VISIBLE_DEVICES"] = "MIG-ff010000-0000-0000-0000-000000000000"
    said = asa("profile", *_MODEL.split(), "--device", "cuda", cwd=folder, code=5).stderr
    assert "no CUDA device is usable here" in said, said


@scenario
def profiles_and_plans(folder: Path) -> None:
    from planner_tests.forked import asa

    model = ("cnn", "--input", "1x8x8", "--classes", "10", "--global-batch", "16", "--device", "cuda")
    for precision in ("fp32", "bf16", "fp16"):
        asa("profile", *model, "--precision", precision, "--time-limit", "2s", "-o", f"{precision}.json", cwd=folder)
    asa("cluster", "measure", "--gpus", "2", "--device", "cuda", "--time-limit", "1s", "-o", "c.json", cwd=folder)
    asa("plan", "fp32.json", "--gpus", "2", "--cluster", "c.json", "-o", "plan.json", cwd=folder)
    asa("train", "plan.json", "--data", "digits", "--steps-per-epoch", "2", "--out", "run", cwd=folder)
    asa("train", "plan.json", "--rehearse", "0", cwd=folder)
    small = ("cnn", "--input", "1x8x8", "--classes", "10", "--time-limit", "2s")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    said = asa("plan", *small, "--gpus", "2", "--cluster", "c.json", "-o", "unasked.json", cwd=folder).stdout
    assert "estimated" in said, "where no GPU is to be seen none is asked to measure"
    del os.environ["CUDA_VISIBLE_DEVICES"]
    asa("plan", *small, "--gpus", "2", "--cluster", "c.json", "-o", "unasked.json", cwd=folder)
    assert json.loads((folder / "unasked.json").read_text())["global_batch"] == 256, "what a GPU is given"
    os.environ["STANDIN_NAME"] = "NVIDIA that no preset has"
    asa("profile", *model, "--time-limit", "2s", "-o", "other.json", cwd=folder)
    asa("plan", "other.json", "--gpus", "1", "-o", "alone.json", cwd=folder)
    assert json.loads((folder / "alone.json").read_text())["cluster"] == "alone"


@scenario
def says_what_disturbed_a_measurement(folder: Path) -> None:
    """Clocks held back by heat, and another process on the card."""
    from planner_tests.forked import asa

    argv = f"profile {_MODEL} --device cuda --time-limit 1s --max-tensor-degree 1 -v -o p.json".split()
    said = asa(*argv, cwd=folder).stdout
    assert "GPU clock 1410 of 1410 MHz" in said, said
    assert "meanwhile" not in said, said
    os.environ |= {"STANDIN_REASONS": "0x20", "STANDIN_OTHERS": "1:1000", "STANDIN_CLOCK": "600"}
    said = asa(*argv, cwd=folder).stdout
    assert "held back by heat, and 1 other process was on the GPU meanwhile: plans take these times for" in said, said
    assert "GPU clock 600 of 1410 MHz" in said, said
    plan = asa("plan", "p.json", "--gpus", "1", "--cluster", "a100-nvlink-8", cwd=folder).stdout
    assert "held back by heat" in plan, plan
    assert "1 processes" in asa("doctor", cwd=folder).stdout


@scenario
def refuses_what_the_devices_cannot(folder: Path) -> None:
    import pytest

    from asa.errors import UnavailableError
    from asa.profiler.machine import choose_device
    from planner_tests.forked import asa

    model = ("cnn", "--input", "1x8x8", "--classes", "10", "--global-batch", "16", "--device", "cuda")
    os.environ["STANDIN_CAPABILITY"] = "75"
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    said = asa("profile", *model, "--precision", "bf16", cwd=folder, code=5).stderr
    assert "has no bf16; choose --precision fp16" in said, said
    said = asa("profile", *model, "--precision", "tf32", cwd=folder, code=5).stderr
    assert "has no TF32; choose --precision fp32" in said, said
    said = asa("bench", "--models", "cnn", "--gpus", "2", "--device", "cuda", cwd=folder, code=5).stderr
    assert "2 ranks need 2 CUDA devices, this machine has 1" in said, said
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    said = asa("profile", *model, cwd=folder, code=5).stderr
    assert "no CUDA device is usable here" in said, said
    with pytest.raises(UnavailableError, match="no CUDA device is usable here"):
        choose_device("cuda")


@scenario
def refuses_more_ranks_than_devices(folder: Path) -> None:
    from asa.ir import codec
    from planner_tests.forked import asa

    codec.save(on_gpu(small_plan(ranks=2)), folder / "two.json")
    codec.save(on_gpu(small_plan()), folder / "one.json")
    asa("profile", *_MODEL.split(), "--device", "cuda", "--time-limit", "1s", "-o", "profiles/p.json", cwd=folder)
    asa("plan", "profiles/p.json", "--gpus", "1", "-o", "known.json", cwd=folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    for remedy, *argv in (
        ("verify with --device cpu", "verify", "two.json", "--device", "cuda"),
        ("plan with --gpus 1", "train", "two.json", "--data", "digits"),
        ("2 ranks need 2 CUDA devices", "cluster", "measure", "--gpus", "2", "--device", "cuda"),
        (
            "run it on the machine",
            "plan",
            *_MODEL.split(),
            "--gpus",
            "2",
            "--cluster",
            "a100-nvlink-8",
            "--verify",
            "2",
        ),
    ):
        said = asa(*argv, cwd=folder, code=5).stderr
        assert "this machine has 1" in said, said
        assert remedy in said, said
    import pytest

    from asa.errors import UnavailableError
    from asa.launch import run_ranks

    with pytest.raises(UnavailableError, match="2 nccl ranks need 2 CUDA devices, this machine has 1"):
        run_ranks(2, print, backend="nccl")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    said = asa("bench", "--models", "cnn", "--gpus", "1", "--device", "cuda", cwd=folder, code=5).stderr
    assert "no CUDA device is usable here" in said, said
    said = asa("train", "known.json", "--rehearse", "0", cwd=folder, code=5).stderr
    assert "the plan is for CUDA devices and there is none here" in said, said
    said = asa("train", "one.json", "--data", "digits", cwd=folder, code=5).stderr
    assert "this machine has 0; train with --device cpu" in said, said


@scenario
def benches_and_checks_what_was_sealed(folder: Path) -> None:
    from planner_tests.forked import asa

    argv = f"{_MODEL} --gpus 2 --data digits --strategies ddp,fsdp --device cuda --budget 15s --json".split()
    found = json.loads(asa("bench", "--models", *argv, cwd=folder, timeout_s=900).stdout)["results"]
    assert {r["strategy"] for r in found} >= {"ddp", "fsdp"}, found
    assert all(r["energy_j"] > 0 for r in found if r["step_time_s"]), found
    seal(folder / "sealed")
    argv = [
        "bench",
        "--check-sealed",
        "--sealed",
        "sealed",
        "--gpus",
        "2",
        "--device",
        "cuda",
        "--budget",
        "15s",
        "--json",
    ]
    (cell,) = json.loads(asa(*argv, cwd=folder).stdout)["cells"]
    assert cell["measured"]["median"] > 0, cell


@scenario
def foresees_studies_and_seals(folder: Path) -> None:
    """The command line's other ways to GPUs: studies, plans tried out, stale gradients."""
    from planner_tests.forked import asa

    small = ["--input", "1x8x8", "--classes", "10", "--global-batch", "16"]
    asa("cluster", "measure", "--gpus", "2", "--device", "cuda", "--time-limit", "1s", "-o", "c.json", cwd=folder)
    asa("plan", "cnn", *small, "--gpus", "2", "--cluster", "c.json", "--verify", "2", "--budget", "8s", cwd=folder)
    grid = ("--data", "digits", "--epochs", "1", "--device", "cuda", "--cluster", "c.json", "--budget", "60s")
    for strategies in ("ddp,ps_sync", "asa,ddp"):  # what waits differently is trained one after the other
        out = ("--strategies", strategies, "--out", strategies)
        asa("bench", "--study", "grid", "--models", "cnn", *small, "--gpus", "2", *grid, *out, cwd=folder)
    late = ("--staleness", "--steps", "4", "--seeds", "1", "--staleness-limit", "10s")
    short = ("--time-limit", "1s", "--max-tensor-degree", "1")
    asa("profile", "cnn", *small, "--device", "cuda", *late, *short, cwd=folder)


@scenario
def measures_when_nvml_cannot_say(folder: Path) -> None:
    """Errors that NVML returns: a question that the GPU does not know, rights that are missing, a GPU that was lost."""
    from planner_tests.forked import asa

    for code in ("3", "4", "15"):
        os.environ["STANDIN_NVML_ERROR"] = code
        said = asa(*f"profile {_MODEL} --device cuda --time-limit 1s --max-tensor-degree 1".split(), cwd=folder).stdout
        assert "GPU clock" not in said, said
        asa("doctor", cwd=folder)


@scenario
def verifies_on_the_command_line(folder: Path) -> None:
    from asa.ir import codec
    from planner_tests.forked import asa

    codec.save(on_gpu(small_plan(ranks=2)), folder / "plan.json")
    assert json.loads(asa("verify", "plan.json", "--device", "cuda", "--json", cwd=folder).stdout)["equivalent"]
    for how in ("slurm", "k8s", "ray"):
        asa("launch", how, "plan.json", cwd=folder)
