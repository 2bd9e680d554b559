"""Does a run under a memory limit at its predicted reserved peak survive?

    python benchmarks/memory_limit.py [--models resnet18,alexnet] [--strategies ddp,fsdp] [--steps 4] [-o FILE]

Every cell is a run of ``asa train`` from start to checkpoint, its plan made from a profile taken here: model x
strategy, on two gloo ranks. First, without a limit, what its ranks take; then, ``--repeats`` times, under a limit of

    the predicted reserved peak (``asa.cost.memory.peak.reserved`` of the active peak the plan promises, of the weights
    that it gathers and lets go of, and of the component with the most of them)
  + the base: what a rank takes that imports everything, joins its group, reads the data and trains a model of one
    linear layer, less what that model itself is predicted to take.

per rank. The limit is that of a control group of its own, where one may be made (``memory.limit_in_bytes`` of version 1
or ``memory.max`` of version 2): the kernel then kills whoever oversteps it. Elsewhere it is ``RLIMIT_DATA``, under
which allocations fail, and which also counts what was mapped and never touched. A cell is *killed* where the run does
not end with exit code 0. Nothing is planned again. ``--phase steps`` (the default) limits training, which is what the
prediction is of: from the first step on to the checkpoint; ``--phase run`` also how the model is built and saved, for
which a rank holds more of it than its part.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from asa.cli.heap import start_program_again
from asa.cost.memory.peak import reserved as reserved_peak
from asa.errors import AsaError
from asa.executor.running import run
from asa.executor.training.checkpointer import Checkpointer
from asa.executor.training.settings import TrainSettings
from asa.executor.training.worker import Worker
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.plan import Assignment, Plan
from asa.ir.profile import Profile
from asa.launch import worker as launch
from asa.planner import Request, plan
from asa.profiler.measure import profile_model
from asa.scheduler import adapt
from asa.strategies import offered

RANKS, CLASSES = 2, 100
ROOT = Path(__file__).parent
RECORD = ROOT / "records" / "memory_limit.json"
CLUSTER = ROOT.parent / "profiles" / "cluster.local-gloo-2.json"
CELLS = {"resnet18": (3, 32, 64), "alexnet": (3, 64, 64), "mobilenet_v2": (3, 32, 64), "vgg11": (3, 32, 32),
         "cnn": (3, 32, 128), "unet": (3, 32, 16), "vit_b_32": (3, 32, 16)}  # fmt: skip
"""Channels, pixels and global batch."""
STRATEGIES = "single,ddp,zero1,zero2,fsdp,tensor,layers,gpipe,1f1b,asa"
MIB = 1 << 20

Cell = dict[str, Any]


class Groups:
    """Control groups of one run, a rank each; None of the operating system's where they cannot be made."""

    def __init__(self) -> None:
        root = Path("/sys/fs/cgroup")
        self.v1 = (root / "memory" / "memory.limit_in_bytes").exists()
        self.root = root / "memory" if self.v1 else root
        self.top = "memory.limit_in_bytes" if self.v1 else "memory.max"
        self.peak = "memory.max_usage_in_bytes" if self.v1 else "memory.peak"
        try:
            with self.made(1, [None]) as folders:
                self.usable = (folders[0] / self.top).exists()
        except OSError:
            self.usable = False

    @contextmanager
    def made(self, ranks: int, limits: list[int | None]) -> Iterator[list[Path]]:
        """A group per rank with its limit, gone afterwards."""
        folders = [self.root / f"asa-limit-{os.getpid()}-{rank}" for rank in range(ranks)]
        try:
            for folder, limit in zip(folders, limits, strict=True):
                folder.mkdir()
                if limit is not None:
                    (folder / self.top).write_text(str(limit))
            yield folders
        finally:
            for folder in folders:
                for _ in range(50):
                    with suppress(OSError):
                        folder.rmdir()
                    if not folder.exists():
                        break
                    time.sleep(0.1)


def _held() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmData"))
    return 1024 * int(line.split()[1])


def trained(made: Plan, groups: Groups, limits: list[int | None], steps: int, phase: str = "run") -> Cell:
    """A run under the limits (bytes beyond what a rank inherits; None: none): whether it ended well, and the peaks, of
    the whole run or (``phase``) up to its last step."""
    folder = Path(tempfile.mkdtemp(prefix="asa-limit-"))
    usual = run._rank
    first = [None] * made.num_ranks if phase == "steps" else limits
    with groups.made(made.num_ranks, first) if groups.usable else nullcontext([]) as folders:

        def limited(rank: int, *args: Any) -> Any:
            if groups.usable:
                (folders[rank] / "cgroup.procs").write_text(str(os.getpid()))
                if phase == "steps":
                    _around_steps(groups, folders[rank], limits[rank], folder / f"peak{rank}")
            elif limits[rank] is not None:
                top = _held() + int(limits[rank] or 0)
                resource.setrlimit(resource.RLIMIT_DATA, (top, top))
            ending = usual(rank, *args)
            if not groups.usable:
                (folder / f"peak{rank}").write_text(str(_held()))
            return ending

        run._rank = limited
        settings = TrainSettings(
            out=str(folder / "run"), data="synthetic", steps_per_epoch=steps, epochs=1, device="cpu", replan=False,
            timeout_s=60,
        )  # fmt: skip
        error = ""
        active: list[int] | None = None
        try:
            result = run.train(made, settings, strategies=offered(), adapt=adapt)
            active = result["summary"]["memory_bytes_per_rank"]["measured"]
        except AsaError as caught:
            error = f"{type(caught).__name__}: {caught}"[:300]
        finally:
            run._rank = usual
        if groups.usable and phase == "run":
            peaks = [int((f / groups.peak).read_text()) for f in folders]
        else:
            peaks = [int(p.read_text()) for p in sorted(folder.glob("peak*"))]
    shutil.rmtree(folder, ignore_errors=True)
    return {"killed": bool(error), "error": error, "peak_bytes": peaks, "active_bytes": active}


def _around_steps(groups: Groups, group: Path, limit: int | None, peak: Path) -> None:
    """In a rank: the limit holds from the first step to the checkpoint; ``peak`` is written down in front of that."""
    train, save = Worker.train, Checkpointer.save

    def limited(worker: Worker, *args: Any, **more: Any) -> bool:
        if not peak.exists():
            peak.write_text("0")
            if groups.v1:
                (group / groups.peak).write_text("0")  # counts from here
            if limit is not None:
                (group / groups.top).write_text(str(limit))  # refused where more is held already
        return train(worker, *args, **more)

    def lifted(keeper: Checkpointer, *args: Any, **more: Any) -> Path:
        peak.write_text((group / groups.peak).read_text())
        (group / groups.top).write_text("-1" if groups.v1 else "max")
        return save(keeper, *args, **more)

    Worker.train, Checkpointer.save = limited, lifted  # type: ignore[assignment, method-assign]


def profiled(model: str, cell: tuple[int, int, int], seconds: float) -> Profile:
    """Taken by a process of its own: what this one holds, ranks inherit."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_profiled, (model, cell, seconds))


def _profiled(model: str, cell: tuple[int, int, int], seconds: float) -> Profile:
    channels, pixels, batch = cell
    return profile_model(
        model, input_shape=(channels, pixels, pixels), num_classes=CLASSES, global_batch=batch, device="cpu",
        time_limit_s=seconds, max_tensor_degree=RANKS,
    )  # fmt: skip


def base_bytes(groups: Groups, cluster: Cluster, shape: tuple[int, int, int], steps: int, phase: str) -> int:
    """Of a rank that has everything but a model, at the same input and batch."""
    profile = profiled("logistic", shape, 5.0)
    made = plan(profile, cluster, offered(), Request(gpus=RANKS, global_batch=shape[2], strategies=("ddp",)))[0]
    found = trained(made, groups, [None] * RANKS, steps, phase)
    if found["killed"]:
        raise SystemExit(f"not even one linear layer trains: {found['error']}")
    return max(found["peak_bytes"]) - min(made.prediction.memory_bytes_per_rank)


def gathered(made: Plan, profile: Profile) -> list[float]:
    """Bytes of weights that each rank gathers and lets go of in a step."""
    held = {c.name: float(c.parameter_bytes) for c in profile.graph.components}
    sharded = [c for c in made.components if c.data.strategy in ("zero2", "zero3", "hsdp") and c.data.degree > 1]
    sums = [sum(held[c.name] / c.tensor.degree for c in sharded if c.stage == s) for s in range(len(made.stages))]
    return [found for found, stage in zip(sums, made.stages, strict=True) for _ in stage.ranks]


def largest(made: Plan, profile: Profile) -> list[float]:
    """Bytes of the gradients that a rank makes in one piece: those of its largest component; twice where it gathers the
    weights, too."""
    held = {c.name: float(c.parameter_bytes) for c in profile.graph.components}

    def pieces(c: Assignment) -> float:
        twice = c.data.strategy in ("zero2", "zero3", "hsdp") and c.data.degree > 1
        return (2 if twice else 1) * held[c.name] / c.tensor.degree

    found = [max(pieces(c) for c in made.components if c.stage == s) for s in range(len(made.stages))]
    return [size for size, stage in zip(found, made.stages, strict=True) for _ in stage.ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet18,alexnet,mobilenet_v2,vgg11,cnn")
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--phase", choices=("steps", "run"), default="steps", help="what is limited")
    parser.add_argument("--stock-heap", action="store_true", help="ranks give freed memory back, as glibc does unasked")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1, help="limited runs of every cell")
    parser.add_argument("--seconds", type=float, default=15.0, help="of profiling a model")
    parser.add_argument("-o", "--output", type=Path, default=RECORD)
    args = parser.parse_args()
    start_program_again()  # with the heap that `asa train` has
    torch.set_num_threads(1)
    if args.stock_heap:
        launch.keep_freed_memory = lambda: False
    groups, cluster = Groups(), codec.load(Cluster, CLUSTER)
    how = f"a control group per rank, {groups.top}" if groups.usable else "RLIMIT_DATA"
    cells: list[Cell] = []
    document: Cell = {}
    for model in args.models.split(","):
        shape = CELLS[model]
        profile = profiled(model, shape, args.seconds)
        base = base_bytes(groups, cluster, shape, args.steps, args.phase)
        for strategy in args.strategies.split(","):
            request = Request(gpus=RANKS, global_batch=shape[2], strategies=(strategy,))
            try:
                made = plan(profile, cluster, offered(), request)[0]
            except AsaError as error:
                print(f"{model:14} {strategy:8} no plan: {error}"[:160], flush=True)
                continue
            predicted = made.prediction.memory_bytes_per_rank
            pieces = zip(predicted, gathered(made, profile), largest(made, profile), strict=True)
            reserved = [reserved_peak(cluster.device, *of_rank) for of_rank in pieces]
            free = trained(made, groups, [None] * made.num_ranks, args.steps, args.phase)
            limits = [base + r for r in reserved]
            runs = [trained(made, groups, list(limits), args.steps, args.phase) for _ in range(args.repeats)]
            cells.append(
                {
                    "model": model, "strategy": strategy, "phase": args.phase,
                    "global_batch": shape[2], "ranks": made.num_ranks,
                    "base_bytes": base, "predicted_active_bytes": predicted, "predicted_reserved_bytes": reserved,
                    "limit_bytes": [base + r for r in reserved], "unlimited": free, "limited": runs,
                }
            )  # fmt: skip
            spare = [(base + r - p) / MIB for r, p in zip(reserved, free["peak_bytes"], strict=False)]
            kills = sum(r["killed"] for r in runs)
            print(
                f"{model:14} {strategy:8} predicted {max(predicted) / MIB:7.1f} MiB active, "
                f"limit {(base + max(reserved)) / MIB:7.1f} MiB, without one {max(free['peak_bytes']) / MIB:7.1f} MiB "
                f"({min(spare):+.1f}), {kills} of {len(runs)} killed {runs[-1]['error'][:90]}",
                flush=True,
            )
        document = kept(args.output, how, args.steps, cells)
    print(f"{document['kills']} kills in {document['runs']} runs under {how}, in {args.output.name}")


def kept(path: Path, how: str, steps: int, cells: list[Cell]) -> Cell:
    """The record with ``cells`` in it, in place of those of the same model and strategy."""
    before = json.loads(path.read_text())["cells"] if path.exists() else []
    new = {(c["model"], c["strategy"], c["phase"]) for c in cells}
    together = [c for c in before if (c["model"], c["strategy"], c["phase"]) not in new] + cells
    runs = [r for c in together for r in c["limited"]]
    document = {
        "kind": "memory_limit", "limit": how, "runs": len(runs), "kills": sum(r["killed"] for r in runs),
        "steps": steps, "torch": torch.__version__, "machine": platform.machine(), "cells": together,
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=1) + "\n")
    return document


if __name__ == "__main__":
    main()
