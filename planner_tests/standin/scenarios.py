"""What a user does with GPUs, on the stand-in's: each in a process of its own, and what of it failed.

``python -m planner_tests.standin.scenarios LOG [NAME ...]`` prints one JSON document, by scenario null or the error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

SCENARIOS: dict[str, Callable[[Path], None]] = {}
_MIB = 2**20
_MODEL = "cnn --input 1x8x8 --classes 10 --global-batch 16"


def scenario(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Enter ``function``, which is called in an empty folder, by its name."""
    SCENARIOS[function.__name__] = function
    return function


def _settings(out: Path, **changes: Any) -> Any:
    from planner_tests import training

    return training.settings(out, **({"epochs": 1, "steps_per_epoch": 2, "timeout_s": 60.0} | changes))


def _trained(out: Path, plan: Any, **changes: Any) -> dict[str, Any]:
    from asa.executor.running.run import train
    from asa.scheduler import adapt
    from asa.strategies import offered

    hooks = {k: changes.pop(k) for k in ("relieve", "regroup") if k in changes}
    result = train(plan, _settings(out, **changes), strategies=offered(), adapt=adapt, **hooks)
    assert result["exit_code"] == 0, result
    return result


def _plan(**changes: Any) -> Any:
    from planner_tests import training

    training.fingerprint_of = _fingerprint_of
    return training.plan(**({"batch": 16} | changes))


def _traced(model: str) -> str:
    import torch

    from asa.tracing import trace
    from asa.zoo.models import build

    built = build(model, num_classes=10, input_shape=(1, 8, 8))
    return trace(built, torch.zeros(2, 1, 8, 8), name=model).model_fingerprint


@cache
def _fingerprint_of(model: str) -> str:
    """What tracing the model gives, from a process of its own: autograd's threads for the devices survive no fork."""
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(here, _traced(model).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(there, 100).decode()


def _on_gpu(plan: Any) -> Any:
    return replace(plan, device_type="cuda")


def _pipeline(schedule: str = "1f1b") -> Any:
    from asa.ir.plan import DataDegree, Stage

    plan = _plan(ranks=2, microbatches=2)
    alone = DataDegree(strategy="replicate", degree=1)
    components = tuple(replace(c, stage=int(i >= 2), data=alone) for i, c in enumerate(plan.components))
    return replace(plan, components=components, stages=(Stage(ranks=(0,)), Stage(ranks=(1,))), schedule=schedule)


def _state(plan: Any, strategy: str) -> Any:
    """``plan`` with its components' state kept by the ranks together."""
    from asa.ir.plan import DataDegree

    return replace(
        plan,
        components=tuple(replace(c, data=DataDegree(strategy=strategy, degree=c.data.degree)) for c in plan.components),
    )


def _same_losses(folder: Path, plan: Any, close: float = 1e-4, **changes: Any) -> None:
    """``plan`` trained on GPUs and on cores: every epoch's loss."""
    gpu = _trained(folder / "gpu", _on_gpu(plan), **changes)
    cpu = _trained(folder / "cpu", plan, **changes)
    for ours, theirs in zip(gpu["epochs"], cpu["epochs"], strict=True):
        assert abs(ours["train_loss"] - theirs["train_loss"]) <= close, (ours, theirs)


@scenario
def trains_data_parallel_with_a_timeline(folder: Path) -> None:
    _same_losses(folder, _plan(ranks=2), trace_steps=1, steps_per_epoch=5)
    events = [json.loads(text) for text in (folder / "gpu" / "log.jsonl").read_text().splitlines()]
    told = next(e for e in events if e["event"] == "steps")["gpu"]
    assert told["clock_mhz"] == 1410
    assert told["utilisation"] == 0.75
    (epoch,) = json.loads((folder / "gpu" / "result.json").read_text())["epochs"]
    assert 0 < epoch["measurements"]["energy_j"] < 2 * 110 * epoch["seconds"]


@scenario
def trains_in_bf16_with_state_on_the_host(folder: Path) -> None:
    plan = _plan(precision="bf16", optimizer="adamw")
    _trained(folder, replace(_on_gpu(plan), components=tuple(replace(c, offload=True) for c in plan.components)))


@scenario
def trains_in_fp16_with_loss_scaling(folder: Path) -> None:
    _trained(folder, _on_gpu(_plan(ranks=2, precision="fp16", microbatches=2)))


@scenario
def trains_sharded(folder: Path) -> None:
    for strategy in ("zero1", "zero2", "zero3"):
        (folder / strategy).mkdir()
        _same_losses(folder / strategy, _state(_plan(ranks=2), strategy))


@scenario
def trains_tensor_parallel(folder: Path) -> None:
    _same_losses(folder, _plan(ranks=2, split=("classifier", "features.2.conv")))


@scenario
def trains_a_pipeline(folder: Path) -> None:
    _same_losses(folder, _pipeline())


@scenario
def trains_on_data_that_stay_on_the_host(folder: Path) -> None:
    from asa.executor.running import member

    member._RESIDENT_BYTES = 0
    _trained(folder, _on_gpu(_plan()))


@scenario
def verifies(folder: Path) -> None:
    from asa.executor.measuring.equivalence import verify
    from asa.strategies import offered
    from asa.zoo.models import build

    for plan in (_state(_plan(ranks=2), "zero3"), _pipeline(), _plan(ranks=2, split=("classifier",))):
        found = verify(
            _on_gpu(plan), lambda: build("cnn", num_classes=10, input_shape=(1, 8, 8)), offered(), device="cuda"
        )
        assert found.equivalent, found


@scenario
def rehearses_a_rank_of_eight(folder: Path) -> None:
    import torch

    from asa.executor.measuring.rehearsal import rehearse
    from asa.strategies import offered
    from asa.zoo.models import build

    for plan in (
        _plan(ranks=8, batch=32),
        _state(_plan(ranks=8, batch=32), "zero3"),
        _plan(ranks=8, batch=32, split=("classifier",)),
    ):
        model = build("cnn", num_classes=10, input_shape=(1, 8, 8))
        found = rehearse(_on_gpu(plan), model, rank=3, strategies=offered(), device=torch.device("cuda"), steps=2)
        assert found.components


@scenario
def looks_at_the_machine(folder: Path) -> None:
    from planner_tests.forked import asa

    said = asa("doctor", cwd=folder).stdout
    assert "Stand-In GPU, Stand-In GPU" in said
    os.environ["STANDIN_NVLINK"] = "4"
    assert "1 over NVLink" in asa("doctor", cwd=folder).stdout
    os.environ |= {"STANDIN_MIG": "1"}
    assert "MIG on" in asa("doctor", cwd=folder).stdout


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
    from planner_tests.forked import asa

    model = ("cnn", "--input", "1x8x8", "--classes", "10", "--global-batch", "16", "--device", "cuda")
    os.environ["STANDIN_CAPABILITY"] = "75"
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    said = asa("profile", *model, "--precision", "bf16", cwd=folder, code=5).stderr
    assert "has no bf16; choose --precision fp16" in said, said
    said = asa("bench", "--models", "cnn", "--gpus", "2", "--device", "cuda", cwd=folder, code=5).stderr
    assert "2 ranks need 2 CUDA devices, this machine has 1" in said, said
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    said = asa("profile", *model, cwd=folder, code=5).stderr
    assert "no CUDA device is usable here" in said, said


@scenario
def benches_and_checks_what_was_sealed(folder: Path) -> None:
    from planner_tests.forked import asa

    argv = f"{_MODEL} --gpus 2 --data digits --strategies ddp,fsdp --device cuda --budget 15s --json".split()
    found = json.loads(asa("bench", "--models", *argv, cwd=folder).stdout)["results"]
    assert {r["strategy"] for r in found} >= {"ddp", "fsdp"}, found
    assert all(r["energy_j"] > 0 for r in found if r["step_time_s"]), found
    _sealed(folder / "sealed")
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
    grid = [
        "--data",
        "digits",
        "--strategies",
        "ddp",
        "--epochs",
        "1",
        "--device",
        "cuda",
        "--cluster",
        "c.json",
        "--out",
        "out",
        "--budget",
        "20s",
    ]
    asa("bench", "--study", "grid", "--models", "cnn", *small, "--gpus", "2", *grid, cwd=folder)
    late = [
        "--staleness",
        "--steps",
        "4",
        "--seeds",
        "1",
        "--staleness-limit",
        "10s",
        "--time-limit",
        "1s",
        "--max-tensor-degree",
        "1",
    ]
    asa("profile", "cnn", *small, "--device", "cuda", *late, cwd=folder)


def _sealed(folder: Path) -> None:
    """A prediction of the stand-in's own two GPUs, written down before."""
    from asa.ir.sealed import FIRST, Claim, sealed

    claim = Claim(
        machine="stand-in-2", device_name="Stand-In GPU", num_devices=2, num_nodes=1, strategy="ddp",
        plan=_on_gpu(_plan(ranks=2)), place=1, among=1,
    )  # fmt: skip
    folder.mkdir()
    line = sealed(claim, revision=1, written="2025-01-01T00:00:00+00:00", asa_version="0", previous=FIRST)
    (folder / "stand-in-2.jsonl").write_text(line)


@scenario
def measures_all_that_a_machine_can_tell(folder: Path) -> None:
    """The pieces of ``make gpu``, each with its first few commands; taken up again, nothing is run twice."""
    import subprocess

    from planner_tests.standin import sites

    _sealed(folder / "sealed")
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

    codec.save(_on_gpu(_plan(ranks=2)), folder / "plan.json")
    assert json.loads(asa("verify", "plan.json", "--device", "cuda", "--json", cwd=folder).stdout)["equivalent"]
    for how in ("slurm", "k8s", "ray"):
        asa("launch", how, "plan.json", cwd=folder)


@scenario
def names_what_draws_by_itself(folder: Path) -> None:
    """Noise of a model's own comes from the device's generator, and is seen there."""
    import torch

    from asa.profiler.measure import profile_module

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), _Noise(), torch.nn.Linear(8, 4))
    found = profile_module(
        model,
        torch.randn(2, 8),
        spec="noisy",
        num_classes=4,
        global_batch=8,
        device=torch.device("cuda", 0),
        time_limit_s=1.0,
    )
    assert any("random numbers" in note for note in found.graph.notes), found.graph.notes


@scenario
def shows_what_processes_can_do(folder: Path) -> None:
    from asa.launch import run_ranks

    run_ranks(2, _probed, backend="nccl", threads=1, timeout_s=60)


class _Noise:
    """Made when torch is there."""

    def __new__(cls) -> Any:
        import torch

        class Noise(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return x + torch.randn_like(x)

        return Noise()


def _probed(rank: int) -> None:
    import torch

    from asa.executor.model.votes import Votes
    from asa.executor.training.probe import probe

    found = probe(Votes(60.0), torch.device("cuda", rank))
    assert len(found.compute_s) == 2
    assert found.links


@scenario
def profiles_what_the_device_cannot_hold(folder: Path) -> None:
    """A microbatch does not fit after all: it is named, the others are measured."""
    import torch

    from asa.profiler import components, measure

    usual = components.measure_memory

    def more_than_there_is(chain: Any, x: Any) -> Any:
        if len(x) == 8:
            torch.empty(1 << 40, dtype=torch.uint8, device=x.device)
        return usual(chain, x)

    components.measure_memory = more_than_there_is
    found = measure.profile_model(
        "cnn",
        input_shape=(1, 8, 8),
        num_classes=10,
        global_batch=16,
        device="cuda",
        time_limit_s=5.0,
        max_tensor_degree=1,
    )
    assert "microbatch 8: the device has not enough memory for it" in found.skipped, found.skipped
    assert {t.microbatch for t in found.timings} >= {4, 16}
    assert 8 not in {t.microbatch for t in found.timings}


@scenario
def runs_out_of_memory_and_plans_again(folder: Path) -> None:
    os.environ["STANDIN_MEMORY"] = str(64 * _MIB)
    heard = []

    def less(shortage: Any, attempt: int, gpus: int) -> Any:
        heard.append(shortage)
        return _on_gpu(_plan(batch=16))

    import torch

    from asa.executor.training import worker

    usual = worker.played

    def hungry(model: Any, samples: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        if not heard and step == 1 and len(samples) > 16:
            torch.empty(128 * _MIB, dtype=torch.uint8, device=model.device)
        return usual(model, samples, step, *args, **kwargs)

    worker.played = hungry
    _trained(folder, _on_gpu(_plan(batch=32)), relieve=less)
    assert heard, "nobody was asked for another plan"
    assert heard[0].asked_bytes == 128 * _MIB, heard


@scenario
def loses_a_device(folder: Path) -> None:
    from asa.launch import faults

    os.environ["ASA_FAULT"] = "kill@rank=1,step=1,point=forward"
    faults.arm()
    _trained(
        folder, _on_gpu(_plan(ranks=2)), steps_per_epoch=2, regroup=lambda plan, ranks: _on_gpu(_plan(ranks=ranks))
    )
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


@scenario
def trains_a_loop_of_ones_own(folder: Path) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    failed = _apart(lambda _: _own_loop(device="cuda"), folder)
    assert "no CUDA device is usable here; choose device='cpu'" in str(failed), failed
    del os.environ["CUDA_VISIBLE_DEVICES"]
    (folder / "error").unlink()
    _own_loop(device="cuda")


@scenario
def trains_a_loop_of_ones_own_under_a_launcher(folder: Path) -> None:
    """Each strategy on two GPUs gives the weights of a plain loop on a core."""
    _launched(2, _own_loops)


@scenario
def trains_a_model_of_several_inputs_under_a_launcher(folder: Path) -> None:
    """What cannot be cut runs whole, and is measured as such."""
    _launched(2, _two_inputs)


@scenario
def trains_a_job(folder: Path) -> None:
    """A training that is handed over: an epoch on two GPUs, its state saved and read back."""
    _launched(2, _job)


def _launched(ranks: int, function: Callable[[], None]) -> None:
    """``function`` on each of ``ranks`` processes that know each other as torchrun's do."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                    "TORCHELASTIC_RUN_ID": "standin",
                }  # fmt: skip
                function()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * ranks


def _own() -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), loader


def _epoch(model: Any, optimizer: Any, loader: Any) -> dict[str, Any]:
    import torch

    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def _own_loop(**options: Any) -> dict[str, Any]:
    import asa

    model, optimizer, loader = asa.parallelize(*_own(), **options)
    assert next(iter(loader))[0].device.type == "cuda"
    state = _epoch(model, optimizer, loader)
    model.close()
    return state


def _own_loops() -> None:
    import torch

    alone = _epoch(*_own())
    for strategy in ("ddp", "zero1", "fsdp", "tensor"):
        state = _own_loop(strategies=(strategy,), time_limit_s=5)
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4, msg=f"{strategy}: {name}")
    _own_loop(time_limit_s=5, cache=None)  # links are measured


def _two_inputs() -> None:
    import torch

    import asa

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

        def forward(self, x: Any, z: Any) -> Any:
            return self.a(x) * self.b(z)

    def trained(model: Any, optimizer: Any, loader: Any) -> Any:
        for x, z, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x, z), y).backward()
            optimizer.step()
        return {name: value.cpu() for name, value in model.state_dict().items()}

    def made() -> tuple[Any, Any, Any]:
        model = Two()
        data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 8), torch.randn(32, 4))
        loader = torch.utils.data.DataLoader(data, batch_size=8)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), loader

    alone = trained(*made())
    for options in ({}, {"strategies": ("fsdp",)}):
        placed = asa.parallelize(*made(), time_limit_s=5, **options)
        for name, value in trained(*placed).items():
            torch.testing.assert_close(value, alone[name], rtol=1e-3, atol=1e-4)
        placed[0].close()


def _job() -> None:
    import torch

    import asa

    alone = _epoch(*_own())
    for strategies in (("ddp",), ("gpipe",)):
        folder = Path(strategies[0])
        job = asa.Job(
            *_own(), torch.nn.functional.cross_entropy, out=folder, strategies=strategies, time_limit_s=5, max_norm=1.0
        )
        job.run(epochs=1)
        for name, value in job.state_dict().items():
            torch.testing.assert_close(value.cpu(), alone[name], rtol=1e-3, atol=1e-4, msg=f"{strategies}: {name}")
        job.close()


def begin() -> None:
    """Have this process see the stand-in's GPUs, with the package marked and what is measured small."""
    from planner_tests.standin import sites, sizes, start

    start.load()
    sites.watch(Path(os.environ["STANDIN_LOG"]))
    sizes.shrink()


def main(log: Path, names: list[str]) -> None:
    """Run them; a scenario that takes too long has failed."""
    here = Path(__file__).parent
    os.environ |= {"OMP_NUM_THREADS": "1", "STANDIN_LOG": str(log), "STANDIN_ROOT": str(here.parents[1])}
    os.environ["PYTHONPATH"] = str(here / "site")
    os.environ.setdefault("STANDIN_GPUS", "2")
    sys.path.insert(0, str(here.parent))
    begin()
    found: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory(prefix="standin-") as root:
        os.environ["STANDIN_NCCL"] = root
        for name in names or SCENARIOS:
            folder = Path(root) / name
            folder.mkdir()
            began = time.monotonic()
            found[name] = _apart(SCENARIOS[name], folder)
            print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(found))


def _apart(function: Callable[[Path], None], folder: Path) -> str | None:
    """The error of ``function`` in a child of this process; None where it went through."""
    told = folder / "error"
    pid = os.fork()
    if pid == 0:
        try:
            with open(folder / "said", "w") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            os.chdir(folder)
            function(folder)
        except BaseException:
            told.write_text(traceback.format_exc())
        finally:
            sys.stdout.flush()
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    if told.exists():
        return told.read_text() + (folder / "said").read_text()[-3000:]
    return None if status == 0 else f"ended with {os.waitstatus_to_exitcode(status)}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
