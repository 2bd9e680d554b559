"""What a change of plan takes: bytes and seconds of moving only what is missed, beside gathering everything.

    python benchmarks/migrate.py [--models resnet50,vit_b_16,vgg16] [--optimizers sgd,adamw] [--ranks 2] [-o FILE]
    python benchmarks/migrate.py --pairs 2

Real ranks, real weights and moments. For every change:

* the bytes that the busiest process sends or receives, and the seconds that they take at the bandwidth of one message
  of 64 MiB between two of the ranks, measured in the same run;
* the same with the seconds in which all processes write that much optimizer state into new memory, measured alike;
* the seconds of the move, and of making the new plan's groups and modules, which any way of moving needs;
* the memory above the old state and the new that the move took at its peak (resident memory, as the kernel counts it).

Beside it, in the same run: full weights and moments gathered on every rank and cut again (not where a rank idles, whom
nobody then tells), and written to a file and read back.

``--pairs N`` goes from every plan that ``planner_tests/test_migration.py`` knows for N processes to every other, in
float64 at learning rate 0, and says where a bit changed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from asa.executor.model.materialize import materialize
from asa.executor.model.state import full_optimizer_state, full_state, load_full_optimizer_state, load_full_state
from asa.executor.model.template import TracedTemplate
from asa.executor.model.votes import Votes
from asa.executor.training.migration import move, parts_of, target_parts
from asa.executor.training.optimizer import build_optimizer
from asa.executor.training.precision import LossScale
from asa.executor.training.worker import Worker
from asa.ir.plan import Plan
from asa.ir.units import MIB
from asa.launch import give_back_freed_memory, run_ranks, tell
from asa.strategies import offered
from asa.zoo.models import build

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "planner_tests"))

SHAPE = {"vit_b_16": (3, 224, 224)}
CHANGES = (
    ("ddp", "mixed"), ("mixed", "ddp"), ("ddp", "stages"), ("stages", "ddp"), ("ddp", "fsdp"), ("fsdp", "mixed"),
    ("ddp", "one rank"), ("one rank", "ddp"),
)  # fmt: skip


def _made(name: str) -> nn.Module:
    return build(name, num_classes=100, input_shape=SHAPE.get(name, (3, 64, 64)), seed=0)


def plans(name: str, ranks: int, optimizer: str) -> dict[str, Plan]:
    """By what they are called here: every component alike, or split where it is large, or in stages."""
    from hand_plans import hand_plan
    from stage_plans import staged

    shape = SHAPE.get(name, (3, 64, 64))
    large = {n.rsplit(".", 1)[0] for n, p in _made(name).named_parameters() if p.numel() > 1_000_000}

    def plan(width: int, choose: Any, strategy: str = "replicate") -> Plan:
        return hand_plan(
            _made(name), width, choose, input_shape=shape, num_classes=100, optimizer=optimizer, spec=name,
            global_batch=8 * ranks, data_strategy=lambda _: strategy,
        )  # fmt: skip

    def mixed(_index: int, component: str) -> tuple[int, int]:
        return (1, ranks) if any(n.startswith(component) for n in large) else (ranks, 1)

    one = plan(1, lambda *_: (1, 1))
    return {
        "ddp": plan(ranks, lambda *_: (ranks, 1)), "mixed": plan(ranks, mixed), "one rank": one,
        "fsdp": plan(ranks, lambda *_: (ranks, 1), "zero3"), "stages": staged(one, [1] * ranks),
    }  # fmt: skip


def worker_of(plan: Plan, rank: int, votes: Votes, template: TracedTemplate | None = None) -> Worker:
    """A rank's part, from ``template`` if there is one, as in a run."""
    model = materialize(
        plan, template or _made(plan.model_spec), torch.zeros(2, *plan.input_shape), rank=rank, strategies=offered(),
        device=torch.device("cpu"), processes=tuple(range(plan.num_ranks)), timeout_s=120, alike=True,
        keep_template=True,
    )  # fmt: skip
    return Worker(
        model=model, optimizer=build_optimizer(plan.optimizer, model.updated, lr=0.0), scale=LossScale("fp32"),
        votes=votes, precision="fp32", seed=0,
    )  # fmt: skip


def _step(worker: Worker) -> None:
    for p in worker.model.updated:
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    worker.optimizer.step()
    for p in worker.model.parameters():
        p.grad = None


def _memory(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(field)).split()[1]) << 10


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _bandwidth(votes: Votes) -> float:
    """Bytes per second of one message from process 0 to process 1, the best of five."""
    data, best = torch.zeros(64 * MIB, dtype=torch.uint8), 0.0
    for _ in range(5):
        votes.gather([0.0])
        start = time.perf_counter()
        if votes.rank < 2:
            for work in votes.started((data, 1) if votes.rank == 0 else None, (data, 0) if votes.rank == 1 else None):
                if work is not None:
                    work.wait()
        best = max(best, data.nbytes / max(v[0] for v in votes.gather([time.perf_counter() - start])[:2]))
    return best


def _first_writes(votes: Votes) -> float:
    """Bytes per second at which every process at once writes memory that it did not have before, the median of five."""
    found = []
    for _ in range(5):
        give_back_freed_memory()
        found.append(_timed(votes, lambda: torch.empty(128 * MIB, dtype=torch.uint8).fill_(1))[1])
    return 128 * MIB / statistics.median(found)


def _timed(votes: Votes, action: Any) -> tuple[Any, float]:
    """What ``action`` gives, and how long the slowest process takes for it."""
    votes.gather([0.0])
    start = time.perf_counter()
    found = action()
    return found, max(v[0] for v in votes.gather([time.perf_counter() - start]))


def _gather_all(old: Worker, new: Worker) -> int:
    """As one would without knowing who holds what: everything to everybody. Bytes on this process."""
    weights, moments = full_state(old.model), full_optimizer_state(old.model, old.optimizer)
    load_full_state(new.model, weights)
    load_full_optimizer_state(new.model, new.optimizer, moments)
    return sum(t.nbytes for t in (*weights.values(), *moments.values()))


def _through_file(old: Worker, new: Worker, folder: str, votes: Votes) -> None:
    """Rank 0 writes what was gathered, all read it."""
    path = Path(folder) / "state.safetensors"
    if not old.model.idle:
        weights, moments = full_state(old.model), full_optimizer_state(old.model, old.optimizer)
        if votes.rank == 0:
            everything = {f"w/{n}": t for n, t in weights.items()} | {f"m/{n}": t for n, t in moments.items()}
            safetensors.torch.save_file({n: t.contiguous().clone() for n, t in everything.items()}, path)
    votes.gather([0.0])
    if not new.model.idle:
        read = safetensors.torch.load_file(path)
        load_full_state(new.model, {n[2:]: t for n, t in read.items() if n.startswith("w/")})
        moments = {n[2:]: t for n, t in read.items() if n.startswith("m/")}
        load_full_optimizer_state(new.model, new.optimizer, moments)


def measure(rank: int, name: str, optimizer: str, ranks: int, folder: str) -> list[dict[str, Any]]:
    """All changes of one model; figures of the slowest or busiest process, the same on all."""
    votes, known, found = Votes(300), plans(name, ranks, optimizer), []
    bandwidth, first_writes, template = _bandwidth(votes), _first_writes(votes), None
    for before, after in CHANGES:
        old = worker_of(known[before], rank, votes, template)
        template = old.model.template
        if not old.model.idle:
            _step(old)
        for p in old.model.parameters():
            torch.nn.init.ones_(p)
        new, build_s = _timed(votes, lambda after=after, t=template: worker_of(known[after], rank, votes, t))
        for p in new.model.parameters():
            torch.nn.init.zeros_(p)  # memory of a template is given where it is written first
        give_back_freed_memory()

        def moving(old: Worker = old, new: Worker = new) -> Any:
            return move(
                parts_of(old.model, old.optimizer), target_parts(new.model), new.model, new.optimizer, votes
            )  # fmt: skip

        _forget_peak()
        resident = _memory("VmRSS")
        moved, seconds = _timed(votes, moving)
        held = {p.tensor.data_ptr() for p in parts_of(old.model, old.optimizer)}
        moments = [p.tensor for p in parts_of(new.model, new.optimizer) if "/" in p.name]
        state = sum(t.nbytes for t in moments if t.data_ptr() not in held)
        extra = _memory("VmHWM") - resident - state  # weights were there
        everything, gather_s = 0, 0.0
        if known[before].num_ranks == known[after].num_ranks:
            everything, gather_s = _timed(votes, lambda old=old, new=new: _gather_all(old, new))
        _, file_s = _timed(votes, lambda old=old, new=new: _through_file(old, new, folder, votes))
        told = votes.gather([moved.sent_bytes, moved.received_bytes, moved.copied_bytes, extra, everything, state])
        busiest = max(max(r[0], r[1]) for r in told)
        record = {
            "model": name, "optimizer": optimizer, "ranks": ranks, "from": before, "to": after, "bytes": busiest,
            "copied_bytes": max(r[2] for r in told), "bandwidth": bandwidth, "bound_s": busiest / bandwidth,
            "new_bytes": max(r[5] for r in told), "first_writes": first_writes,
            "floor_s": max(max(r[0], r[1]) / bandwidth + r[5] / first_writes for r in told),
            "move_s": seconds, "build_s": build_s, "extra_bytes": max(r[3] for r in told),
            "gather_all_bytes": max(r[4] for r in told), "gather_all_s": gather_s, "file_s": file_s,
        }  # fmt: skip
        found.append(record)
        if rank == 0:
            tell(record)
        old.model.close()
        new.model.close()
        del old, new
        give_back_freed_memory()
    return found


def _say(r: dict[str, Any]) -> None:
    gathered = f"{r['gather_all_bytes'] / MIB:7.1f} MiB  {r['gather_all_s']:6.3f} s" if r["gather_all_s"] else ""
    print(
        f"{r['model']:10} {r['optimizer']:5} {r['from']:>8} to {r['to']:8}  {r['bytes'] / MIB:7.1f} MiB  "
        f"{r['bound_s']:6.3f} s  {r['floor_s']:6.3f} s  {r['move_s']:6.3f} s  {r['build_s']:6.2f} s  "
        f"{max(0, r['extra_bytes']) / MIB:6.1f} MiB  {gathered:21}  {r['file_s']:6.3f} s",
        flush=True,
    )


def _all_pairs(processes: int) -> int:
    """From every plan to every other; how many of them changed a bit."""
    from test_migration import _plans, _walk

    wrong = 0
    for name in ("blocks", "vision_transformer"):
        count = len(_plans(name, processes))
        stops = [place for i in range(count) for j in range(i + 1, count) for place in (i, j)] + [0]
        for first in range(0, len(stops) - 1, 100):  # new ranks now and then
            part = stops[first : first + 101]
            with tempfile.TemporaryDirectory() as folder:
                found = run_ranks(processes, _walk, name, processes, part, Path(folder), threads=1, timeout_s=120)
            wrong += len(found[0])
            print(f"{name}: {first + len(part) - 1} of {len(stops) - 1} moves; wrong: {found[0] or 'none'}", flush=True)
    return wrong


def main() -> None:
    """Move, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default="resnet50,vit_b_16,vgg16")
    parser.add_argument("--optimizers", default="sgd,adamw")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=0, metavar="N")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    if args.pairs:
        sys.exit(1 if _all_pairs(args.pairs) else 0)
    print(
        f"{'model':10} {'optim.':6} {'change':>18}  {'bytes':>12}  {'at best':>8}  {'written':>8}  {'moved':>8}  "
        f"{'built':>8}  {'memory':>10}  {'gather-all':>21}  {'by file':>8}"
    )
    records = []
    for name in args.models.split(","):
        for optimizer in args.optimizers.split(","):
            with tempfile.TemporaryDirectory() as folder:
                body = partial(measure, name=name, optimizer=optimizer, ranks=args.ranks, folder=folder)
                found = run_ranks(
                    args.ranks, body, threads=1, timeout_s=300, on_message=lambda _, record: _say(record)
                )  # fmt: skip
            records += found[0]
    if args.output:
        Path(args.output).write_text(json.dumps({"taken": time.strftime("%Y-%m-%d"), "results": records}) + "\n")


if __name__ == "__main__":
    main()
