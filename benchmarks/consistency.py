"""Disciplines of consistency beside their clock: throughput with one slow rank, and accuracy after the same samples.

Every rank really runs (``asa train``, gloo), and rests a stated time in every backward: that is its speed, whatever
else the machine does, and ranks that rest do not take cores from each other, so four ranks run on two. One rank rests
twice as long. What a step takes beside the rest (computing, messages, the loop) is measured in a run of ``ps_sync`` and
one of ``ddp`` whose ranks all rest alike, and handed to the clock with the rests; nothing is fitted to the runs that
are foretold.

    python -m benchmarks.consistency [--ranks 2,4] [--rest 0.2] [--epochs 3] [--seeds 1] [--only A,B] [-o FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from asa.cost.consistency import Machine, Server, Worker, play
from asa.ir.consistency import Discipline, parse
from asa.launch import usable_cores

BATCH = 64
SAMPLES = 1437
"""Images of digits to train on."""
FORETOLD = ("ps_sync", "ps_async", "ps_bounded", "ps_bounded:window=100:max_age=100", "downpour", "local_sgd")
REST_MODEL = ("logistic", "--input", "1x8x8", "--classes", "10", "--data", "digits")


def run(strategy: str, rests: tuple[float, ...], epochs: int, seed: int) -> dict[str, Any]:
    """Seconds of every epoch but the first, accuracy after the last, and what the discipline counted."""
    fault = ";".join(f"hang:{rest}@rank={r},point=backward" for r, rest in enumerate(rests))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            sys.executable, "-m", "asa", "train", *REST_MODEL, "--strategies", strategy, "--gpus", str(len(rests)),
            "--global-batch", str(BATCH), "--epochs", str(epochs), "--seed", str(seed), "--out", str(out),
            "--no-replan", "--json",
        ]  # fmt: skip
        environment = {**os.environ, "ASA_FAULT": fault, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
        if done.returncode:
            raise SystemExit(f"{strategy} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
        lines = [json.loads(text) for text in (out / "log.jsonl").read_text().splitlines()]
    epochs_seen = [e for e in lines if e["event"] == "epoch"]
    counted = [e for e in lines if e["event"] == "consistency"]
    return {
        "epoch_s": [e["seconds"] for e in epochs_seen[1:]],
        "accuracy": epochs_seen[-1]["validation_accuracy"],
        "counted": {k: counted[-1][k] for k in ("steps_per_worker", "servers") if counted and k in counted[-1]},
    }


def per_batch(found: dict[str, Any]) -> float:
    """Seconds per global batch."""
    return statistics.median(found["epoch_s"]) * BATCH / SAMPLES


def over_seeds(row: dict[str, Any]) -> dict[str, Any]:
    """Mean and spread (standard deviation, None for one seed) over seeds of what a row lists for each."""
    per_seed = [statistics.median(seconds) * BATCH / SAMPLES for seconds in row["epoch_s"]]
    found: dict[str, Any] = {}
    for name, values in (("batch_s", per_seed), ("accuracy", row["accuracy"])):
        spread = statistics.stdev(values) if len(values) > 1 else None
        found[name] = {"mean": statistics.fmean(values), "spread": spread}
    return found


def foretold(discipline: Discipline | None, rests: tuple[float, ...], beside_s: float, sent_s: float) -> float:
    """Seconds per global batch by the clock: ``beside_s`` of a step are neither rest nor message, ``sent_s`` a push
    and a pull."""
    count = len(rests)
    steps = SAMPLES // BATCH * (1 if discipline is None else discipline.period)
    machine = Machine(
        workers=tuple(
            Worker(step_s=rest + beside_s, rows=BATCH / count, push_s=sent_s / 2, pull_s=sent_s / 2) for rest in rests
        ),
        servers=tuple(Server() for _ in range(0 if discipline is None else discipline.servers)),
        meeting_s=0.0 if discipline is None else sent_s,
    )
    played = play(discipline, machine, steps=steps)
    return played.seconds / played.steps  # an epoch from its start, as in the run: workers begin it together


def study(ranks: int, rest: float, epochs: int, seeds: int, only: tuple[str, ...]) -> dict[str, Any]:
    """All disciplines on so many ranks, the last of which rests twice as long."""
    alike, slow = (rest,) * ranks, (*(rest,) * (ranks - 1), 2 * rest)
    plain, served = run("ddp", alike, epochs, 0), run("ps_sync", alike, epochs, 0)
    beside_s = max(0.0, per_batch(plain) - rest)
    sent_s = max(0.0, per_batch(served) - per_batch(plain))
    rows = []
    for name in ("ddp", *only):
        discipline = None if name == "ddp" else parse(name)
        runs = [run(name, slow, epochs, seed) for seed in range(seeds)]
        measured = statistics.median(per_batch(r) for r in runs)
        said = foretold(discipline, slow, beside_s, sent_s)
        rows.append(
            {
                "strategy": name, "measured_s": measured, "foretold_s": said, "error": said / measured - 1,
                "accuracy": [r["accuracy"] for r in runs], "epoch_s": [r["epoch_s"] for r in runs],
                "counted": runs[-1]["counted"],
            }
        )  # fmt: skip
        off = f"{100 * (said / measured - 1):+.1f} %"
        print(f"{ranks} ranks  {name:36} measured {measured:.3f} s, clock {said:.3f} s ({off})", file=sys.stderr)
    naive = rows[0]["measured_s"]
    for row in rows:
        row["gain_over_ddp"] = naive / row["measured_s"]
        row["over_seeds"] = over_seeds(row)
    return {
        "ranks": ranks, "rests_s": slow, "beside_s": beside_s, "sent_s": sent_s, "alike": [plain, served],
        "uneven_batches_by_the_clock_s": _uneven(slow, beside_s), "rows": rows,
    }  # fmt: skip


def _uneven(rests: tuple[float, ...], beside_s: float) -> float:
    """Seconds per global batch of synchronous training if shares were as the speeds of ranks; not run, as a rest does
    not depend on a share."""
    return len(rests) / sum(1 / (r + beside_s) for r in rests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rest", type=float, default=0.2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default=",".join(FORETOLD), help="disciplines beside ddp, by name")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    made = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{usable_cores()} CPU cores, torch {torch.__version__}, gloo on one host",
        "slow": "the last rank rests twice as long in every backward (ASA_FAULT hang): added work, no competing load",
        "model": "logistic regression on digits 1x8x8, global batch 64",
        "load_before": os.getloadavg()[0],
        "studies": [
            study(int(n), args.rest, args.epochs, args.seeds, tuple(args.only.split(",")))
            for n in args.ranks.split(",")
        ],
    }
    text = json.dumps(made, indent=1) + "\n"
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
