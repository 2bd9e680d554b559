"""Checkpoints across plans: saved under any of them on n ranks, continued under any other on m.

    python benchmarks/checkpoints.py [--cells 40] [--seed 0] [--budget 120] [-o records/checkpoints.json]

{1, 2, 3, 4} x {1, 2, 3, 4} ranks x SGD, AdamW x data parallel, ZeRO, tensor parallel, pipeline, mixed (the plan that
continues; the one that saves goes through all of them in turn). Every cell is two real runs of ``asa train`` on
handwritten digits: one stopped by request in the middle of the epoch, one that resumes. Held against it: the state
gathered after loading is that of the file to the bit; the weights at the end are those of an uninterrupted run on one
device (float32, BatchNorm over the whole batch); every sample of the epoch was trained on exactly once. Where a value
lies so close to the kink of a ReLU or a maximum that rounding decides, runs part ways, on one kind of processor or
another: the seed is the first with which an uninterrupted run ends the same on one device as on two.
About 3 s a cell on two cores, 160 cells in all. The record is written after every cell, and what it holds already is
not done again; no cell begins after ``--budget`` seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported: its profiler is talkative

import torch
from torch import Tensor

from asa.errors import PreemptedError
from asa.executor.model.state import full_optimizer_state, full_state
from asa.executor.running import outdir
from asa.executor.running.run import train
from asa.executor.training import checkpoint, worker
from asa.executor.training.settings import TrainSettings
from asa.ir.measurements import EpochRecord
from asa.ir.plan import Assignment, Certificate, DataDegree, OptimizerName, Plan, Prediction, Stage, TensorDegree
from asa.launch import tell
from asa.scheduler import adapt
from asa.strategies import offered
from asa.tracing import trace
from asa.zoo.models import build

KINDS = ("ddp", "zero", "tensor", "pipeline", "mixed")
OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "adamw")
SAMPLES, BATCH, STOP = 1437, 240, 3
TOLERANCE = 1e-3
SEEDS = 5
_ZERO = ("zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Cell:
    """Saved under ``source`` on n ranks, continued under ``target`` on m."""

    n: int
    m: int
    optimizer: OptimizerName
    source: str
    target: str
    zero: str

    def __str__(self) -> str:
        return f"{self.source} x{self.n} -> {self.target} x{self.m}, {self.optimizer} ({self.zero})"


def cells() -> list[Cell]:
    """All of them."""
    found = []
    for i, (n, m, optimizer, target) in enumerate(itertools.product(range(1, 5), range(1, 5), OPTIMIZERS, KINDS)):
        source = KINDS[(i + i // len(KINDS)) % len(KINDS)]
        found.append(Cell(n, m, optimizer, source, target, _ZERO[i % 3]))
    return found


@cache
def _traced() -> tuple[tuple[str, ...], str]:
    model = build("cnn", num_classes=10, input_shape=(1, 8, 8))
    found = trace(model, torch.zeros(2, 1, 8, 8), name="cnn")
    return tuple(c.name for c in found.components), found.model_fingerprint


def plan_of(kind: str, ranks: int, optimizer: OptimizerName, zero: str) -> Plan:
    """A plan of the zoo's ``cnn``; its prediction is empty."""
    names, fingerprint = _traced()
    widths = [ranks]
    if kind == "pipeline" and ranks > 1:
        widths = [1, 1, 1] if ranks == 3 else [ranks // 2, ranks - ranks // 2]
    starts = [round(len(names) * i / len(widths)) for i in range(len(widths))]
    components = []
    for i, name in enumerate(names):
        stage = max(s for s, start in enumerate(starts) if start <= i)
        width = widths[stage]
        split = kind == "tensor" or (kind == "mixed" and i % 2 == 1)
        strategy = zero if kind == "zero" or (kind == "mixed" and i == 0) else "replicate"
        components.append(
            Assignment(
                name=name,
                stage=stage,
                data=DataDegree(strategy="replicate" if split else strategy, degree=1 if split else width),  # type: ignore[arg-type]
                tensor=TensorDegree(strategy="tensor" if split and width > 1 else "none", degree=width if split else 1),
            )
        )
    firsts = [0, *itertools.accumulate(widths)]
    stages = tuple(Stage(ranks=tuple(range(a, b))) for a, b in itertools.pairwise(firsts))
    return Plan(
        model_spec="cnn", model_fingerprint=fingerprint, profile_fingerprint="0" * 16, cluster="none",
        cluster_fingerprint="0" * 16, input_shape=(1, 8, 8), num_classes=10, strategy="asa", gpus=ranks,
        global_batch=BATCH, precision="fp32", optimizer=optimizer, device_type="cpu", components=tuple(components),
        stages=stages, schedule="gpipe" if len(stages) > 1 else "none", num_microbatches=1,
        prediction=Prediction(
            step_time_s=100.0, step_time_low_s=0.0, step_time_high_s=100.0, compute_s=100.0,
            exposed_communication_s=0.0, hidden_communication_s=0.0, update_s=0.0, bubble_s=0.0,
            memory_bytes_per_rank=(1 << 40,) * ranks, samples_per_s=1.0,
        ),
        certificate=Certificate(solver="hand", status="feasible", lower_bound_s=0.0, gap=1.0, space="", solve_s=0.0),
        baselines=(), origin="estimated",
    )  # fmt: skip


class _StopAfter:
    """A request to stop that comes after so many steps, on every rank."""

    def __init__(self, executor: Any, steps: int) -> None:
        self._executor, self._steps = executor, steps

    @property
    def requested(self) -> bool:
        """Whether it has come."""
        return bool(self._executor.step >= self._steps)


def _watched(executor: Any, epochs: range, announce: Any, *, stop: int | None) -> Iterator[EpochRecord]:
    """The usual loop on one rank, telling what was loaded and which samples are fetched for which step."""
    weights = full_state(executor.model)
    moments = full_optimizer_state(executor.model, executor._worker.optimizer)
    announce({"event": "note", "message": "loaded " + json.dumps(_sums(weights) | _sums(moments))})
    if stop is not None:
        executor._stop = _StopAfter(executor, stop)
    usual = worker.fetch

    def fetch(images: Any, indices: Tensor, **options: Any) -> Any:
        if options["train"]:
            tell({"event": "seen", "step": executor.step, "samples": indices.tolist()})
        return usual(images, indices, **options)

    worker.fetch = fetch
    yield from adapt(executor, epochs, announce)


def _sums(named: dict[str, Tensor]) -> dict[str, str]:
    """A digest of the bytes of each tensor."""
    import hashlib

    return {
        name: hashlib.sha256(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, t in named.items()
        if t.numel()
    }


def _run(
    plan: Plan, out: Path, seed: int, *, resume: bool = False, stop: int | None = None
) -> tuple[dict[str, str], dict[int, set[int]]]:
    """Train; what was in the ranks at first, and the samples of every step."""
    from functools import partial

    loaded: dict[str, str] = {}
    seen: dict[int, set[int]] = {}

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "seen":
            seen.setdefault(event["step"], set()).update(event["samples"])
        elif event["event"] == "note" and event["message"].startswith("loaded "):
            loaded.update(json.loads(event["message"][7:]))

    settings = TrainSettings(
        out=str(out), data="digits", epochs=1, lr=0.02 if plan.optimizer == "sgd" else 1e-3, warmup=0.5,
        batch_norm="exact", log_every=1, resume=resume, replan=False, timeout_s=60.0, seed=seed,
    )  # fmt: skip
    try:
        train(plan, settings, strategies=offered(), adapt=partial(_watched, stop=stop), on_event=hear)
    except PreemptedError:
        assert stop is not None
    return loaded, seen


def _stored(out: Path) -> dict[str, Tensor]:
    path = checkpoint.find(out / outdir.CHECKPOINTS).path
    return checkpoint.read(path, checkpoint.MODEL) | checkpoint.read(path, checkpoint.OPTIMIZER)


def _uninterrupted(ranks: int, optimizer: OptimizerName, seed: int) -> dict[str, Tensor]:
    """The end of a run that was not."""
    with tempfile.TemporaryDirectory() as name:
        _run(plan_of("ddp", ranks, optimizer, "zero1"), Path(name) / "run", seed)
        return _stored(Path(name) / "run")


def _apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a tensor, relative to its norm."""
    return max(
        float((found[name].double() - value.double()).norm() / max(float(value.double().norm()), 1e-3))
        for name, value in expected.items()
    )


@cache
def reference(optimizer: OptimizerName) -> tuple[int, dict[str, Tensor]]:
    """A seed, and the end of an uninterrupted run on one device with it."""
    found = []
    for seed in range(SEEDS):
        one = _uninterrupted(1, optimizer, seed)
        found.append(_apart(_uninterrupted(2, optimizer, seed), one))
        if found[-1] <= TOLERANCE / 10:
            return seed, one
    raise AssertionError(f"one device and two end apart with every seed: {', '.join(f'{x:.1e}' for x in found)}")


def check(cell: Cell, folder: Path) -> float:
    """Run one cell in ``folder`` (new); the largest difference of a tensor from the reference, relative to its norm.

    Raises:
        AssertionError: bits changed, a sample came twice or never, or the end is another.
    """
    seed, expected = reference(cell.optimizer)
    _, first = _run(plan_of(cell.source, cell.n, cell.optimizer, cell.zero), folder, seed, stop=STOP)
    saved = _sums(_stored(folder))
    loaded, rest = _run(plan_of(cell.target, cell.m, cell.optimizer, cell.zero), folder, seed, resume=True)
    changed = sorted(n for n in saved if loaded.get(n) != saved[n]) + sorted(loaded.keys() - saved.keys())
    assert not changed, f"{cell}: {changed[:3]} are not those of the checkpoint"
    steps = [*first.values(), *rest.values()]
    trained = [s for step in steps for s in step]
    assert len(trained) == len(set(trained)) == SAMPLES, f"{cell}: {len(trained)} samples, {len(set(trained))} distinct"
    worst = _apart(_stored(folder), expected)
    assert worst <= TOLERANCE, f"{cell}: a tensor is {worst:.2g} off after the steps that follow"
    return worst


def main() -> None:
    """Run the matrix or a sample of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cells", type=int, help="a random sample of so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no cell begins")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    chosen = cells()
    if args.cells:
        chosen = random.Random(args.seed).sample(chosen, min(args.cells, len(chosen)))
    output = Path(args.output) if args.output else None
    records: list[dict[str, Any]] = json.loads(output.read_text())["cells"] if output and output.is_file() else []
    done, failed, began = {r["cell"] for r in records}, 0, time.monotonic()
    chosen = [cell for cell in chosen if str(cell) not in done]
    tried = 0
    for cell in chosen:
        if time.monotonic() - began > args.budget:
            break
        tried += 1
        with tempfile.TemporaryDirectory() as name:
            try:
                worst, error = check(cell, Path(name) / "run"), ""
            except Exception as caught:
                worst, error = None, " ".join(f"{type(caught).__name__}: {caught}".split())
        failed += bool(error)
        records.append({"cell": str(cell), "worst": worst, "error": error})
        print(f"{'FAILED' if error else 'ok':6}  {cell}  {error or f'{worst:.1e}'}", flush=True)
        if output is not None:
            seeds = {o: reference(o)[0] for o in OPTIMIZERS if any(f", {o} " in r["cell"] for r in records)}
            document = {"torch": torch.__version__, "seeds": seeds, "cells": records}
            output.write_text(json.dumps(document, indent=1) + "\n")
    print(
        f"{tried - failed} of {tried} cells hold, in {time.monotonic() - began:.0f} s, {len(chosen) - tried} are left"
    )
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
