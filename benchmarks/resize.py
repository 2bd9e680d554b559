"""How long does a run stand still when a node leaves, and when it comes back? ``asa train`` under torchrun elastic.

    asa plan MODEL --gpus 4 --cluster local-gloo-4 -o plan.json
    python benchmarks/resize.py plan.json [--epochs 12] [--steps 40] [-o RECORD]

Every rank is a node with an agent of its own (``torchrun --nnodes 3:4 --nproc-per-node 1``). Once the first epoch is
saved, the last agent and its rank are killed; ten lines of the log after the run goes on, the agent is started again.
*Back*: seconds from the kill (or the start of the agent) to the next line of the log on the other number of ranks;
*started*: the part of them until the new ranks begin, in which torchrun finds out, meets and starts processes, and
those import. The steps at the end of every epoch tell that the global batch stayed, and that none was left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from asa.ir import codec
from asa.ir.plan import Plan

LINES = 10
CONF = "last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=3,join_timeout=120"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def agent(plan: Path, out: Path, args: argparse.Namespace, ranks: int, port: int, name: str) -> subprocess.Popen[bytes]:
    """One node: an agent with one rank, in a process group of its own."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{ranks - 1}:{ranks}", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "resize",
        "--rdzv-conf", f"{CONF},is_host={name == 'agent0'}",
        "--max-restarts", "5", "-m", "asa", "train", str(plan), "--data", "synthetic", "--epochs", str(args.epochs),
        "--steps-per-epoch", str(args.steps), "--lr", "0.01", "--out", str(out), "--timeout", "20s",
    ]  # fmt: skip
    log = (out.parent / f"{name}.txt").open("wb")
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def children(pid: int) -> list[int]:
    """All processes that descend from ``pid``, which may lead sessions of their own."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def kill(process: subprocess.Popen[bytes]) -> None:
    """The agent and its rank, at once, as a machine that loses its power."""
    for pid in (process.pid, *children(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def events(out: Path) -> list[dict[str, Any]]:
    """What is in the log by now; the line that is being written is left out."""
    log = out / "log.jsonl"
    if not log.is_file():
        return []
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]


def examine(plan_file: Path, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run with a node that leaves and comes back."""
    plan = codec.load(Plan, plan_file)
    ranks, port, out = plan.num_processes, free_port(), folder / "run"
    deadline = time.monotonic() + args.limit
    agents = [agent(plan_file.absolute(), out, args, ranks, port, f"agent{i}") for i in range(ranks)]

    def until(what: str, found: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        while not found(now := events(out)):
            if time.monotonic() > deadline or all(a.poll() is not None for a in agents[:-1]):
                raise SystemExit(f"no {what} after {args.limit:g} s; see {folder}")
            time.sleep(0.02)
        return now

    def back(since: float, began: int) -> dict[str, float]:
        def lines(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
            starts = [i for i, e in enumerate(log) if e["event"] == "start"]
            return [e for e in log[starts[-1] :] if e["event"] == "steps"] if len(starts) > began else []

        log = until("step after the change", lambda log: bool(lines(log)))
        first = lines(log)[0]
        start = [e for e in log if e["event"] == "start"][-1]
        until("ten lines", lambda log: len(lines(log)) >= LINES or log[-1]["event"] == "end")
        return {"back_s": first["time"] - since, "started_s": start["time"] - since, "step": first["step"]}

    try:
        before = until("checkpoint", lambda log: any(e["event"] == "checkpoint" for e in log))
        lost = time.time()
        kill(agents[-1])
        row: dict[str, Any] = {"fewer": back(lost, sum(e["event"] == "start" for e in before))}
        now = events(out)
        row["last_step_before"] = max(e["step"] for e in now if e["event"] == "steps" and e["time"] <= lost)
        came = time.time()
        agents[-1] = agent(plan_file.absolute(), out, args, ranks, port, "again")
        row["more"] = back(came, sum(e["event"] == "start" for e in now))
        log = until("end", lambda log: log[-1]["event"] == "end")
    finally:
        for a in agents:
            with suppress(ProcessLookupError, FileNotFoundError):
                kill(a)
    return row | {
        "exit_code": log[-1]["exit_code"],
        "replans": [(e["ranks_before"], e["ranks"], e["strategy"]) for e in log if e.get("kind") == "lost"],
        "batches": sorted({e["measurements"]["global_batch"] for e in log if e["event"] == "epoch"}),
        "steps_at_epoch_ends": [e["step"] for e in log if e["event"] == "epoch"],
    }  # fmt: skip


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40, help="of an epoch")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of all")
    parser.add_argument("--keep", type=Path, help="a folder for the run")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(exist_ok=True, parents=True)
        row = examine(args.plan, args, folder)
    plan = codec.load(Plan, args.plan)
    row = {"model": plan.model_spec, "global_batch": plan.global_batch, "ranks": plan.num_processes} | row
    print(json.dumps(row, indent=1))
    if args.output:
        args.output.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
