"""Time to an equal loss over links of a stated bandwidth: local steps beside DDP and FSDP, on two ranks or more.

Each rank runs in a network namespace of its own (:mod:`namespaces`: Linux, root, ``ip`` and ``tc``), and trains whole
epochs of digits. A cell is one run of one plan with one seed; plans take turns within a seed, so that competing load
meets all of them. A cell is one JSON line: per epoch its seconds (with averages at the end of the epoch and the
validation in them, without checkpoints), validation loss and accuracy, and how often weights were averaged.

    python benchmarks/local_steps.py PLAN... -o CELLS [--megabits 1000] [--seeds 3] [--epochs 10] [--budget S]
    python benchmarks/local_steps.py --record FILE -o CELLS   # the table of all cells

A plan of :func:`wide`, whose 4.3 million weights are many for little computation, is made by, for example,

    PYTHONPATH=benchmarks python -m asa plan local_steps:wide --input 1x8x8 --classes 10 --gpus 2 --global-batch 32 \\
        --strategies local_sgd:growth=0.2 -o FILE
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from namespaces import leave_network, shaped
from torch import nn

from asa.executor.consistency.diloco import OuterSteps
from asa.executor.consistency.local_sgd import LocalSteps
from asa.executor.running.run import train
from asa.executor.training.settings import TrainSettings
from asa.ir import codec
from asa.ir.plan import Plan
from asa.launch import usable_cores
from asa.scheduler import adapt
from asa.strategies import offered

WIDTH = 2048
_AVERAGES = multiprocessing.RawArray("q", 1)
"""How often rank 0 has averaged weights in the current cell."""


def wide(num_classes: int = 10, **_: Any) -> nn.Module:
    """A perceptron for images of 1x8x8 with two hidden layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, num_classes)
    )


def counted(kind: type, name: str) -> None:
    """Count calls of method ``name`` of ``kind`` on rank 0, in ranks forked from here."""
    usual = getattr(kind, name)

    def call(self: Any, *args: Any) -> Any:
        _AVERAGES[0] += self.model.rank == 0
        return usual(self, *args)

    setattr(kind, name, call)


def cell(plan: Plan, seed: int, epochs: int) -> dict[str, Any]:
    """One run."""
    events: list[dict[str, Any]] = []
    _AVERAGES[0], load = 0, os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainSettings(
            out=str(Path(folder) / "run"), data="digits", epochs=epochs, seed=seed, observe=False, save_every_s=None
        )
        train(plan, settings, strategies=offered(), adapt=adapt, on_event=events.append)
    done = [e for e in events if e["event"] == "epoch"]
    return {
        "plan": plan.strategy, "optimizer": plan.optimizer, "model": plan.model_spec, "batch": plan.global_batch,
        "ranks": plan.num_processes, "seed": seed, "averages": _AVERAGES[0], "steps": done[-1]["step"],
        "load_before": load, "epoch_s": [e["seconds"] for e in done],
        "validation_loss": [e["validation_loss"] for e in done],
        "accuracy": [e["validation_accuracy"] for e in done],
        "step_s": statistics.median(e["measurements"]["step_time"]["median"] for e in done[1:]),
    }  # fmt: skip


def reached(found: dict[str, Any], name: str, target: float) -> float | None:
    """Seconds of training after which a cell first has a validation loss (or accuracy) of ``target``; None: never."""
    for seconds, value in zip(accumulate(found["epoch_s"]), found[name], strict=True):
        if value <= target if name == "validation_loss" else value >= target:
            return seconds
    return None


def spread(values: list[float]) -> dict[str, float]:
    """Mean and standard deviation."""
    return {"mean": statistics.fmean(values), "spread": statistics.stdev(values) if len(values) > 1 else 0.0}


def record(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures over seeds. Per optimizer, the target of a seed is the loss at the end of the plan that averages
    gradients in every step, or its best if that came before."""
    rows: dict[str, Any] = {}
    for plan in dict.fromkeys(c["plan"] for c in cells):
        mine = [c for c in cells if c["plan"] == plan]
        rows[plan] = {
            "optimizer": mine[0]["optimizer"], "epochs": [len(c["epoch_s"]) for c in mine],
            "seconds": spread([sum(c["epoch_s"]) for c in mine]), "averages": [c["averages"] for c in mine],
            "step_s": spread([c["step_s"] for c in mine]), "accuracy": spread([c["accuracy"][-1] for c in mine]),
            "loss": spread([c["validation_loss"][-1] for c in mine]),
        }  # fmt: skip
        for base in ("ddp", "fsdp"):
            pairs = [(c, b) for c in mine for b in cells if b["plan"] == base and b["seed"] == c["seed"]
                     and b["optimizer"] == c["optimizer"]]  # fmt: skip
            if not pairs or plan == base:
                continue
            ratios = [sum(b["epoch_s"]) / sum(c["epoch_s"]) for c, b in pairs]
            rows[plan][f"whole_run_over_{base}"] = spread(ratios)
            for name, best in (("validation_loss", min), ("accuracy", max)):
                targets = [best(b[name]) for _, b in pairs]
                took = [(reached(b, name, t), reached(c, name, t)) for (c, b), t in zip(pairs, targets, strict=True)]
                rows[plan][f"to_{name}_of_{base}"] = {
                    "targets": targets, "seconds": took,
                    "speed_up": spread(known) if (known := [b / c for b, c in took if b and c]) else None,
                    "never": sum(c is None for _, c in took),
                }  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="*", type=Path)
    parser.add_argument("--megabits", type=float, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no cell is begun")
    parser.add_argument("--record", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    cells = [json.loads(t) for t in args.output.read_text().splitlines()] if args.output.exists() else []
    if args.record:
        made = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{usable_cores()} CPU cores, torch {torch.__version__}, gloo, ranks in network namespaces",
            "megabits": args.megabits,
            "rows": record(cells),
            "cells": cells,
        }
        args.record.write_text(json.dumps(made, indent=1) + "\n")
        print(json.dumps(made["rows"], indent=1))
        return
    began = time.monotonic()
    plans = [codec.load(Plan, path) for path in args.plans]
    for kind, name in ((LocalSteps, "average_weights"), (OuterSteps, "_average_weighted")):
        counted(kind, name)
    leave_network()
    with shaped(plans[0].num_processes, args.megabits):
        for seed in range(args.seeds):
            for plan in plans:
                known = any(
                    (c["plan"], c["optimizer"], c["seed"]) == (plan.strategy, plan.optimizer, seed) for c in cells
                )
                if known or time.monotonic() - began > args.budget:
                    continue
                found = cell(plan, seed, args.epochs)
                with args.output.open("a") as stream:
                    stream.write(json.dumps(found) + "\n")
                brief = {k: found[k] for k in ("plan", "seed", "averages", "step_s", "load_before")}
                print(brief, sum(found["epoch_s"]), found["validation_loss"], found["accuracy"][-1], flush=True)


if __name__ == "__main__":
    main()
