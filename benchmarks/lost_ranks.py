"""What happens to a run under each discipline if a rank is killed, or stopped for 20 s: one JSON line a cell.

A cell is a way to start the ranks, a discipline, a fault and a rank. Three ranks really train (logistic regression on
digits) and rest 0.1 s in every backward; the fault comes in the second epoch. Cells that the file has are left out.

- ``train``: ``asa train`` starts the ranks. ``torchrun``: torchrun does, with one restart.
- ``job``: a program with :class:`asa.Job` under torchrun with one restart; it resumes if it was started again.
- ``alone``: the same program, as processes that nobody ends; a killed one is started again after 2 s.

    python benchmarks/lost_ranks.py -o FILE [--ways A,B] [--only DISCIPLINES] [--faults kill,stop] [--ranks 0,2]
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
from pathlib import Path
from typing import Any

RANKS, STOPPED_S, LIMIT_S, EPOCHS = 3, 20.0, 200.0, 4
DISCIPLINES = (
    "ps_sync", "ps_async", "ps_bounded", "hogwild", "local_sgd", "diloco:period=5", "fedavg:period=5",
    "local_sgd:quorum=2", "diloco:period=5:quorum=2", "fedavg:period=5:quorum=2",
)  # fmt: skip
FAULTS = (("kill", 2), ("kill", 0), ("stop", 2), ("stop", 0))
MODEL = ("logistic", "--input", "1x8x8", "--classes", "10", "--data", "digits")

PROGRAM = """
import os, sys, torch, asa
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from asa.zoo.data import open_split

out, discipline, cache, epochs = sys.argv[1:]
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
train = open_split("digits", split="train", root=None, input_shape=(1, 8, 8), download=False)
images, labels = train.images.float() / 16, train.labels
loader = DataLoader(TensorDataset(images.reshape(-1, 1, 8, 8), labels), 60, shuffle=True)
resume = os.path.isdir(out) and any(n.startswith("step_") for n in os.listdir(out + "/checkpoints"))
job = asa.Job(
    net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), loader, nn.functional.cross_entropy,
    strategies=(discipline,), out=out, resume=resume, cache=cache, timeout_s=60,
    on_event=lambda e: print("event", e["event"], e.get("message", e.get("epoch", "")), flush=True),
)
for record in job.epochs(int(epochs)):
    print(f"rank {os.environ['RANK']} epoch {record.epoch} loss {record.train_loss:.3f}", flush=True)
"""


def stopped_below(parent: int) -> list[int]:
    """Processes that ``parent`` or its descendants have started and that are stopped."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, above = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            children.setdefault(int(above), []).append((int(entry.name), state))
    found, look = [], [parent]
    while look:
        for process, state in children.get(look.pop(), []):
            look.append(process)
            found += [process] if state == "T" else []
    return found


def planned(discipline: str, cache: Path) -> Path:
    """The file of a plan under ``discipline``, in a folder with the profile for all of them."""
    plan = cache / f"{discipline.replace(':', '-')}.json"
    command = ["plan", MODEL[0], *MODEL[1:5], "--gpus", str(RANKS), "--global-batch", "60", "--strategies", discipline]
    if not plan.exists():
        subprocess.run([sys.executable, "-m", "asa", *command, "-o", str(plan)], cwd=cache, check=True,
                       capture_output=True)  # fmt: skip
    return plan


def commands(way: str, discipline: str, folder: Path, cache: Path) -> list[list[str]]:
    """The command of the run; of every rank, if nobody starts them."""
    out, program = str(folder / "run"), folder / "program.py"
    program.write_text(PROGRAM)
    asa = ["-m", "asa", "train", str(planned(discipline, cache)), *MODEL[-2:], "--epochs", str(EPOCHS), "--out", out]
    job = [str(program), out, discipline, str(cache), str(4 * EPOCHS if way == "alone" else EPOCHS)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
                "--max-restarts", "1"]  # fmt: skip
    if way == "train":
        return [[sys.executable, *asa]]
    if way == "torchrun":
        return [[*torchrun, *asa]]
    return [[*torchrun, *job]] if way == "job" else [[sys.executable, *job]] * RANKS


def cell(way: str, discipline: str, kind: str, rank: int, cache: Path) -> dict[str, Any]:
    """Exit codes, seconds and last words of one run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fault = f"{kind}@rank={rank},step=30,point=backward,once={folder / 'once'};hang:0.1@point=backward"
        around = {**os.environ, "ASA_FAULT": fault, "OMP_NUM_THREADS": "1"}
        if way == "alone":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            around |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS),
                       "LOCAL_WORLD_SIZE": str(RANKS)}  # fmt: skip
        said = [(folder / f"said.{i}") for i in range(RANKS)]
        lines = commands(way, discipline, folder, cache)
        began = time.monotonic()

        def start(i: int, command: list[str]) -> subprocess.Popen[bytes]:
            mine = {**around, "RANK": str(i), "LOCAL_RANK": str(i)} if way == "alone" else around
            with said[i].open("ab") as stream:
                return subprocess.Popen(command, env=mine, stdout=stream, stderr=stream, cwd=folder,
                                        start_new_session=True)  # fmt: skip

        running = [start(i, line) for i, line in enumerate(lines)]
        stopped_at: float | None = None
        fault_at, again, ended = None, False, [None] * len(running)
        while any(p.poll() is None for p in running) and time.monotonic() - began < LIMIT_S:
            time.sleep(0.2)
            now = time.monotonic()
            if fault_at is None and (folder / "once").exists():
                fault_at = now
            for i, p in enumerate(running):
                if p.poll() is not None and ended[i] is None:
                    ended[i] = round(now - began, 1)
            if way == "alone" and kind == "kill" and fault_at and not again and now > fault_at + 2:
                again = True
                running.append(start(rank, lines[rank]))
                ended.append(None)
            if kind == "stop" and fault_at is not None and stopped_at is None:
                stopped_at = now
            if stopped_at is not None and now > stopped_at + STOPPED_S:
                for p in running:
                    for process in (*stopped_below(p.pid), *([p.pid] if way == "alone" else [])):
                        os.kill(process, signal.SIGCONT)
                stopped_at = float("inf")
        hung = [i for i, p in enumerate(running) if p.poll() is None]
        for i in hung:
            os.killpg(running[i].pid, signal.SIGKILL)
        for p in running:
            p.wait()
        texts = [f.read_text(errors="replace") if f.exists() else "" for f in said]
        texts = ["\n".join(t for t in text.splitlines() if "FAULT: hang" not in t) for text in texts]
        log = folder / "run" / "log.jsonl"
        events = [json.loads(t) for t in log.read_text().splitlines()] if log.exists() else []
        return {
            "way": way, "discipline": discipline, "fault": kind, "rank": rank, "hung": hung,
            "codes": [p.returncode for p in running], "ended_s": ended, "fault_s": fault_at and fault_at - began,
            "seconds": time.monotonic() - began, "tracebacks": sum(t.count("Traceback") for t in texts),
            "said": [t.splitlines()[-30:] for t in texts if t],
            "events": [
                e.get("message", e["event"]) for e in events
                if e["event"] in ("note", "lost", "returned", "epoch") and "handed out" not in e.get("message", "")
            ],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default="train,torchrun,job,alone")
    parser.add_argument("--only", default=",".join(DISCIPLINES))
    parser.add_argument("--faults", default="kill,stop")
    parser.add_argument("--ranks", default="0,2")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    cache = args.output.resolve().parent / "lost_ranks.cache"
    cache.mkdir(exist_ok=True)
    known = [json.loads(t) for t in args.output.read_text().splitlines()] if args.output.exists() else []
    done = {(c["way"], c["discipline"], c["fault"], c["rank"]) for c in known}
    for way in args.ways.split(","):
        for discipline in args.only.split(","):
            for kind, rank in FAULTS:
                wanted = kind in args.faults.split(",") and str(rank) in args.ranks.split(",")
                if wanted and (way, discipline, kind, rank) not in done:
                    found = cell(way, discipline, kind, rank, cache)
                    with args.output.open("a") as stream:
                        stream.write(json.dumps(found) + "\n")
                    brief = {k: found[k] for k in ("codes", "hung", "ended_s", "tracebacks")}
                    print(way, discipline, kind, rank, brief, flush=True)


if __name__ == "__main__":
    main()
