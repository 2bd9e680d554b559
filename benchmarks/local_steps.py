"""Local steps beside data parallelism over links of a stated bandwidth: seconds per step of two ranks.

Each rank runs in a network namespace of its own (:mod:`namespaces`: Linux, root, ``ip`` and ``tc``). The plans are run
in turns, so that competing load meets all of them. The time of a step is the mean over all steps of the epochs but the
first, with the averages in them, and without validation and what an epoch's end adds.

    python benchmarks/local_steps.py PLAN... [--megabits 1000] [--rounds 2] [--steps 20] [--epochs 2] [-o FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from namespaces import leave_network, shaped

from asa.executor.running.run import train
from asa.executor.training.settings import TrainSettings
from asa.ir import codec
from asa.ir.plan import Plan
from asa.launch import usable_cores
from asa.scheduler import adapt
from asa.strategies import offered


def run(plan: Plan, steps: int, epochs: int) -> tuple[float, float]:
    """(seconds, loss): mean time of a step in all epochs but the first, and the training loss of the last epoch."""
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainSettings(
            out=str(Path(folder) / "run"), data="digits", epochs=epochs, steps_per_epoch=steps, observe=False
        )
        done = train(plan, settings, strategies=offered(), adapt=adapt, on_event=events.append)
    seconds, before = 0.0, 0
    for e in (e for e in events if e["event"] == "steps"):
        seconds += (e["step"] - before) * e["step_time_s"] if e["epoch"] else 0.0
        before = e["step"]
    return seconds / (steps * (epochs - 1)), float(done["epochs"][-1]["train_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="+", type=Path)
    parser.add_argument("--megabits", type=float, default=1000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    plans = [codec.load(Plan, path) for path in args.plans]
    rows: dict[str, dict[str, Any]] = {p.strategy: {"step_s": [], "train_loss": []} for p in plans}
    load = os.getloadavg()[0]
    leave_network()
    with shaped(plans[0].num_processes, args.megabits):
        for _ in range(args.rounds):
            for plan in plans:
                step_s, loss = run(plan, args.steps, args.epochs)
                row = rows[plan.strategy]
                row["step_s"].append(step_s)
                row["train_loss"].append(loss)
                print(plan.strategy, row, flush=True)
                _write(args, plans[0], rows, load)


def _write(args: argparse.Namespace, plan: Plan, rows: dict[str, dict[str, Any]], load: float) -> None:
    for row in rows.values():
        row["median_step_s"] = statistics.median(row["step_s"]) if row["step_s"] else None
    made = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{usable_cores()} CPU cores, torch {torch.__version__}, gloo, ranks in network namespaces",
        "model": plan.model_spec,
        "input": plan.input_shape,
        "global_batch": plan.global_batch,
        "megabits": args.megabits,
        "steps_per_epoch": args.steps,
        "load_before": load,
        "rows": rows,
    }
    if args.output:
        args.output.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
