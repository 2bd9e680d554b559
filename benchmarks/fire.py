"""A run under fire: random ranks are killed at random moments, and it must end as if nothing had happened.

    python benchmarks/fire.py [--kills 20] [--every 2.0] [--ranks 2] [-o benchmarks/records/fire.json]

``asa train`` on a tiny network, a checkpoint every second, or as often as kills are worth. Whenever the run has gone on
for a drawn while (around ``--every`` seconds from the first line that it logs) a drawn rank gets SIGKILL, ``--kills``
times in all. Then an undisturbed run of the same command. Counted: steps that count over steps done in all (what a kill
undoes is done again), seconds from each kill to the next line of the log, whether the run ended well, and how far the
final weights are from those of the undisturbed run (which says nothing where a run changed its plan).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from asa.executor.training import checkpoint


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(p) for p in task.read_text().split()]
    return found


def _ranks(pid: int) -> list[int]:
    """Children that compute: their affinity is one core, or they are as many as there are threads of the log."""
    return sorted(p for p in _children(pid) if "resource_tracker" not in Path(f"/proc/{p}/cmdline").read_text())


def _lines(folder: Path) -> list[dict[str, Any]]:
    log = folder / "log.jsonl"
    text = log.read_text() if log.is_file() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def _run(plan: Path, out: Path, args: argparse.Namespace, draw: random.Random | None) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "asa", "train", str(plan), "--data", args.data, "--epochs", str(args.epochs),
        "--steps-per-epoch", str(args.steps), "--lr", "0.01", "--out", str(out), "--save-every", "1s",
        "--timeout", "20s",
    ]  # fmt: skip
    with (out.parent / f"{out.name}.txt").open("wb") as said:
        run = subprocess.Popen(command, stdout=said, stderr=said)
        kills: list[tuple[float, int]] = []
        while run.poll() is None and draw is not None and len(kills) < args.kills:
            seen = sum(e["event"] == "steps" for e in _lines(out))
            while run.poll() is None and seen == sum(e["event"] == "steps" for e in _lines(out)):
                time.sleep(0.05)
            until = time.monotonic() + draw.uniform(0.5, 1.5) * args.every
            while run.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            ranks = _ranks(run.pid) if run.poll() is None else []
            if ranks:
                victim = draw.randrange(len(ranks))
                os.kill(ranks[victim], signal.SIGKILL)
                kills.append((time.time(), victim))
        code = run.wait()
    events = _lines(out)
    back = []
    for at, _ in kills:
        after = [e["time"] for e in events if e["event"] == "steps" and e["time"] > at + 0.2]
        back += [after[0] - at] if after else []
    done, last = 0, 0
    for e in events:
        if e["event"] == "steps":
            done += max(0, e["step"] - last) if e["step"] > last else 0
            last = e["step"]
        elif e["event"] == "note" and ("continuing after step" in e["message"] or "starting again" in e["message"]):
            now = int(e["message"].split()[-1]) if "continuing" in e["message"] else 0
            done, last = done + max(0, now - last), now  # done, though no line of the log had told it
    return {
        "exit": code, "kills": [v for _, v in kills], "steps_done": done, "last_step": last,
        "changes_of_plan": sum(e["event"] == "replan" and e["kind"] in ("switch", "rollback") for e in events),
        "back_s": [round(s, 2) for s in back], "notes": [e["message"] for e in events if e["event"] == "note"],
    }  # fmt: skip


def _kept_under_fire(found: dict[str, Any]) -> float | None:
    """Like ``kept``, of the steps up to the last kill alone: what comes after it is no merit. None without a kill."""
    reached = [int(note.split()[3]) for note in found["notes"] if note.startswith("continuing after step")]
    if not reached:
        return None
    return reached[-1] / max(1, reached[-1] + found["steps_done"] - found["last_step"])


def _weights(out: Path) -> dict[str, torch.Tensor]:
    folder = checkpoint.find(out / "checkpoints").path
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fire, calm = Path(folder) / "fire", Path(folder) / "calm"
        found = _run(args.plan, fire, args, random.Random(args.seed))
        print(json.dumps(found), flush=True)
        still = _run(args.plan, calm, args, None)
        apart = statistics_apart = None
        if found["exit"] == still["exit"] == 0:
            mine, theirs = _weights(fire), _weights(calm)
            far = {k: (mine[k].double() - theirs[k].double()).abs().max().item() for k in theirs}
            # BatchNorm's statistics are averaged over ranks whenever a run saves, which goes by the clock.
            apart = max(v for k, v in far.items() if "running_" not in k)
            statistics_apart = max((v for k, v in far.items() if "running_" in k), default=None)
        steps = found["last_step"]
        back = found["back_s"]
        record = {
            **found, "steps": steps, "undisturbed_changes_of_plan": still["changes_of_plan"],
            "kept": steps / max(1, found["steps_done"]),
            "kept_under_fire": _kept_under_fire(found), "weights_apart": apart, "statistics_apart": statistics_apart,
            "undisturbed_exit": still["exit"], "back_median_s": statistics.median(back) if back else None,
        }  # fmt: skip
        print(json.dumps(record, indent=1))
        if found["exit"]:
            print((fire.parent / "fire.txt").read_text()[-2000:])
        if args.output:
            args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
