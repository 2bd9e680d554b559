"""One slow rank by a CPU quota: DDP beside disciplines, when the last of four ranks has half the processor time.

Each rank is in a cgroup of its own with a quota of one core (Linux, root, cgroup v1 or v2 with ``cpu``), so four ranks
have less than two cores together and take nothing from each other. Their groups come before all other processes of the
machine. A quota holds for all that a rank does: computing, messages, and its part as a server. Cells (a strategy and a
seed) take turns; each is one JSON line.

    python benchmarks/quota.py -o CELLS [--only ddp,ps_bounded] [--seeds 5] [--share 0.4] [--period 20000] [--budget S]
    python benchmarks/quota.py --record FILE -o CELLS
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from asa.cli import entry
from asa.launch import usable_cores
from asa.launch.environments import Environment, started_in

RANKS, BATCH, SAMPLES = 4, 64, 1437
MODEL = ("cnn", "--input", "3x32x32", "--classes", "10", "--data", "digits")
_FIRST = (1 << 18, 10_000)
"""The largest weights of a group, of either version."""
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def group(name: str, share: float, period_us: int) -> Path:
    """A new cgroup whose processes together get ``share`` of a core, in every period anew."""
    old = (_V1 / "cpu.cfs_quota_us").exists()
    made = (_V1 if old else _V2) / name
    made.mkdir()
    if old:
        (made / "cpu.cfs_period_us").write_text(str(period_us))
        (made / "cpu.cfs_quota_us").write_text(str(int(share * period_us)))
        (made / "cpu.shares").write_text(str(_FIRST[0]))
    else:
        (made / "cpu.weight").write_text(str(_FIRST[1]))
        (made / "cpu.max").write_text(f"{int(share * period_us)} {period_us}")
    return made


def within(shares: Sequence[float], period_us: int, arguments: list[str]) -> int:
    """Run the ``asa`` command ``arguments``, whose rank r gets ``shares[r]`` of a core."""
    groups = [group(f"asa-{os.getpid()}-{rank}", share, period_us) for rank, share in enumerate(shares)]

    def enter(rank: int) -> None:
        (groups[rank] / "cgroup.procs").write_text(str(os.getpid()))

    try:
        with started_in(Environment(enter=enter)):
            return entry.run(arguments)
    finally:
        for made in groups:
            made.rmdir()


def cell(strategy: str, seed: int, share: float, period_us: int, epochs: int, cache: Path) -> dict[str, Any]:
    """One run: seconds of every epoch, accuracy after the last, and what the discipline counted."""
    plan, shares = cache / f"{strategy.replace(':', '-')}.json", (*[share] * (RANKS - 1), share / 2)
    if not plan.exists():
        command = ["plan", *MODEL[:5], "--gpus", str(RANKS), "--global-batch", str(BATCH), "--strategies", strategy]
        subprocess.run([sys.executable, "-m", "asa", *command, "-o", str(plan)], cwd=cache, check=True)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            sys.executable, __file__, "--shares", json.dumps(shares), "--period", str(period_us), "-o", os.devnull,
            "--", "train", str(plan),
            *MODEL[5:], "--epochs", str(epochs), "--seed", str(seed), "--out", str(out), "--no-replan",
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
        if done.returncode:
            raise SystemExit(f"{strategy} ended with {done.returncode}: {done.stderr.strip().splitlines()[-3:]}")
        lines = [json.loads(text) for text in (out / "log.jsonl").read_text().splitlines()]
    seen = [e for e in lines if e["event"] == "epoch"]
    counted = [e for e in lines if e["event"] == "consistency"]
    return {
        "strategy": strategy, "seed": seed, "shares": shares, "period_us": period_us, "load_before": load,
        "step_s": [(e["measurements"].get("mean_step_s") or e["measurements"]["step_time"]["median"])
                   + e["measurements"]["data_wait_s"] for e in seen],
        "accuracy": seen[-1]["validation_accuracy"],
        "counted": {k: counted[-1][k] for k in ("steps_per_worker", "servers") if counted and k in counted[-1]},
    }  # fmt: skip


def record(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and standard deviations over seeds; the first epoch is not timed."""
    rows: dict[str, Any] = {}
    batch_s = {(c["strategy"], c["seed"]): statistics.fmean(c["step_s"][1:]) for c in cells}
    for strategy in dict.fromkeys(c["strategy"] for c in cells):
        mine = [c for c in cells if c["strategy"] == strategy]
        figures = {
            "batch_s": [batch_s[strategy, c["seed"]] for c in mine], "accuracy": [c["accuracy"] for c in mine],
            "gain_over_ddp": [batch_s["ddp", c["seed"]] / batch_s[strategy, c["seed"]] for c in mine
                              if ("ddp", c["seed"]) in batch_s],
        }  # fmt: skip
        rows[strategy] = {
            name: {"mean": statistics.fmean(v), "spread": statistics.stdev(v) if len(v) > 1 else None, "seeds": len(v)}
            for name, v in figures.items()
            if v
        }
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="ddp,ps_bounded", help="strategies by name")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.4, help="of a core, for all ranks but the last")
    parser.add_argument("--period", type=int, default=20_000, help="microseconds between two shares")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no cell is begun")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--shares", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("command", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.shares:
        return within(args.shares, args.period, args.command)
    cells = [json.loads(t) for t in args.output.read_text().splitlines()] if args.output.exists() else []
    if args.record:
        made = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{usable_cores()} CPU cores, torch {torch.__version__}, gloo on one host",
            "slow": f"CPU quota by cgroup, period {cells[0]['period_us']} us: the last rank has half of the others'",
            "model": " ".join(MODEL), "global_batch": BATCH, "rows": record(cells), "cells": cells,
        }  # fmt: skip
        args.record.write_text(json.dumps(made, indent=1) + "\n")
        print(json.dumps(made["rows"], indent=1))
        return 0
    cache = args.output.resolve().parent / "quota.cache"
    cache.mkdir(exist_ok=True)
    began = time.monotonic()
    for seed in range(args.seeds):
        for strategy in args.only.split(","):
            if any((c["strategy"], c["seed"]) == (strategy, seed) for c in cells):
                continue
            if time.monotonic() - began > args.budget:
                return 0
            found = cell(strategy, seed, args.share, args.period, args.epochs, cache)
            with args.output.open("a") as stream:
                stream.write(json.dumps(found) + "\n")
            print({k: found[k] for k in ("strategy", "seed", "step_s", "accuracy", "load_before")}, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
