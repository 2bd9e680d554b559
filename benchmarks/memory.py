"""Active peaks of ranks, measured and predicted: models x strategies x optimizers x ranks, no clock involved.

    python benchmarks/memory.py [--models cnn,bert] [--strategies ddp,zero1] [--optimizers sgd,adamw] [--ranks 2,3,4]
                                [--keep DIR] [--reprice] [-o records/memory.json]

A model is profiled here; every cell is a plan, priced from that profile, and its third step on real gloo ranks, whose
allocations are recorded (:mod:`asa.executor.observing.footprint`). ``mixed`` are plans drawn at random: per component a
layout, a data strategy, recomputation, and one or two microbatches. The record is written after every model and number
of ranks; cells in it are replaced. ``--keep``: where profiles, plans and what was measured stay; with ``--reprice``
what is there is priced anew, and nothing is run.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asa.errors import AsaError
from asa.executor.measuring.benchmark import BenchOptions, Entrant, _memory
from asa.executor.model.votes import Votes
from asa.executor.observing.random_inputs import random_inputs
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.graph import Component
from asa.ir.plan import Assignment, DataDegree, Plan, TensorDegree
from asa.ir.profile import Profile
from asa.launch import run_ranks
from asa.planner import Request, plan, verify
from asa.profiler.measure import profile_model
from asa.strategies import offered
from asa.zoo.data import GlobalOrder
from asa.zoo.models import build

ROOT = Path(__file__).parent
RECORD = ROOT / "records" / "memory.json"
CLUSTER = ROOT.parent / "profiles" / "cluster.local-gloo-4.json"
CLASSES = 10
MODELS = {"cnn": 32, "bert": 24, "unet": 12, "resnet18": 24, "small_models:vit": 24, "small_models:wide": 24}
"""Global batches; inputs are 3x32x32."""
STRATEGIES = "ddp,zero1,zero2,fsdp,tensor,sequence,gpipe,1f1b,mixed,mixed2"
SHAPE = (3, 32, 32)

Cell = dict[str, Any]


def profiled(model: str, batch: int, most: int, seconds: float) -> Profile:
    """Taken by a process of its own."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_profiled, (model, batch, most, seconds))


def _profiled(model: str, batch: int, most: int, seconds: float) -> Profile:
    return profile_model(
        model, input_shape=SHAPE, num_classes=CLASSES, global_batch=batch, device="cpu", time_limit_s=seconds,
        max_tensor_degree=most,
    )  # fmt: skip


def _drawn(draw: random.Random, c: Component, width: int, before: Assignment | None) -> Assignment:
    """A component's way, half of the time that of the one in front."""
    split = c.split.max_degree if c.split is not None and not c.tied else 1
    layouts = [(d, t) for d in range(1, width + 1) for t in range(1, width + 1) if width % (d * t) == 0 and t <= split]
    d, t = (width, 1) if c.tied else draw.choice(layouts)
    strategy = draw.choice(("replicate", "zero1", "zero2", "zero3"))
    if before is not None and draw.random() < 0.5:
        same = (before.data.degree, before.tensor.degree)
        d, t = same if same in layouts and not c.tied else (d, t)
        strategy = before.data.strategy
    if d == 1 or not c.parameter_bytes:
        strategy = "replicate"
    return Assignment(
        name=c.name, stage=0, data=DataDegree(strategy=strategy, degree=d),  # type: ignore[arg-type]
        tensor=TensorDegree(strategy="tensor" if t > 1 else "none", degree=t), checkpoint=draw.random() < 0.15,
    )  # fmt: skip


def _mixed(profile: Profile, base: Plan, seed: str) -> Plan:
    draw, ways = random.Random(seed), list[Assignment]()
    for c in profile.graph.components:
        ways.append(_drawn(draw, c, base.gpus, ways[-1] if ways else None))
    return replace(base, strategy="asa", components=tuple(ways), num_microbatches=draw.choice((1, 1, 2)))


def made(profile: Profile, cluster: Cluster, strategy: str, optimizer: Any, ranks: int) -> Plan:
    """The plan of a cell.

    Raises:
        AsaError: the model has none of that kind on so many ranks.
    """
    drawn = strategy.startswith("mixed")
    request = Request(
        gpus=ranks, global_batch=profile.global_batch, optimizer=optimizer,
        strategies=("ddp",) if drawn else (strategy,),
    )  # fmt: skip
    found = plan(profile, cluster, offered(), request)[0]
    return _mixed(profile, found, f"{profile.model_spec}/{strategy}/{optimizer}/{ranks}") if drawn else found


def _peaks(rank: int, plans: Sequence[Plan]) -> list[int]:
    votes, found = Votes(60), []
    device = torch.device("cpu")
    for each in plans:
        images = random_inputs(each, device)
        order = GlobalOrder(len(images), each.global_batch, 0, drop_last=True)
        factory = partial(build, each.model_spec, num_classes=each.num_classes, input_shape=each.input_shape)
        entrant = Entrant(each, factory, offered(), rank, votes, BenchOptions(), device)
        entrant.turn(images, order, 2)
        found.append(_memory(entrant, images, order))
        if entrant.worker is not None:
            entrant.worker.model.close()
        del entrant
        gc.collect()
    return found


def measured(plans: Sequence[Plan], ranks: int) -> list[list[int]]:
    """Peaks of every plan's ranks, in bytes."""
    by_rank = run_ranks(ranks, _peaks, list(plans), threads=1, timeout_s=120)
    return [list(row) for row in zip(*by_rank, strict=True)]


def cell(each: Plan, strategy: str, peaks: Sequence[int], profile: Profile, cluster: Cluster) -> Cell:
    """What was measured beside what is predicted now."""
    predicted = verify(each, profile, cluster, offered()).memory_bytes_per_rank
    ratios = [p / m for p, m in zip(predicted, peaks, strict=False) if m]
    return {
        "model": each.model_spec, "strategy": strategy, "optimizer": each.optimizer, "ranks": each.gpus,
        "global_batch": each.global_batch, "microbatches": each.num_microbatches,
        "measured_bytes": list(peaks), "predicted_bytes": list(predicted),
        "over": round(max(predicted) / max(peaks) - 1, 4), "least_over_of_a_rank": round(min(ratios) - 1, 4),
    }  # fmt: skip


def _shown(c: Cell) -> str:
    mib = [max(c[k]) / 2**20 for k in ("measured_bytes", "predicted_bytes")]
    return (
        f"{c['model']:18} {c['strategy']:8} {c['optimizer']:5} {c['ranks']} ranks, {c['microbatches']:2} microbatches:"
        f" {mib[0]:7.1f} MiB, predicted {mib[1]:7.1f} ({c['over']:+.1%}; of any rank {c['least_over_of_a_rank']:+.1%})"
    )


def _key(c: Cell) -> tuple[Any, ...]:
    return tuple(c[k] for k in ("model", "strategy", "optimizer", "ranks"))


def kept(path: Path, cells: list[Cell]) -> Cell:
    """The record with ``cells`` in it, in place of those of the same name."""
    before = json.loads(path.read_text())["cells"] if path.exists() else []
    new = {_key(c) for c in cells}
    together = sorted([c for c in before if _key(c) not in new] + cells, key=_key)
    over = [c["over"] for c in together]
    document = {
        "kind": "memory", "torch": torch.__version__, "num_cells": len(together),
        "under": sum(c["least_over_of_a_rank"] < 0 for c in together), "over_10_percent": sum(x > 0.1 for x in over),
        "mean_over": round(sum(over) / max(1, len(over)), 4), "most_over": max(over, default=0.0), "cells": together,
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def run(folder: Path | None, profile: Profile, cluster: Cluster, names: Sequence[str], optimizers: Sequence[str],
        ranks: int) -> list[Cell]:  # fmt: skip
    """The cells of one model on so many ranks."""
    plans = []
    for name in names:
        for optimizer in optimizers:
            try:
                plans.append((name, made(profile, cluster, name, optimizer, ranks)))
            except AsaError as error:
                told = f"{profile.model_spec:18} {name:8} {optimizer:5} {ranks} ranks: no plan: {error}"
                print(told[:150], flush=True)
    found = []
    for (name, each), peaks in zip(plans, measured([p for _, p in plans], ranks), strict=True):
        found.append(cell(each, name, peaks[: each.num_ranks], profile, cluster))
        if folder is not None:
            stem = folder / f"{each.model_spec.replace(':', '.')}.{name}.{each.optimizer}.{ranks}"
            codec.save(each, stem.with_name(f"{stem.name}.plan.json"))
            stem.with_name(f"{stem.name}.peaks.json").write_text(json.dumps({"strategy": name, "peaks": peaks}))
    return found


def repriced(folder: Path, cluster: Cluster, models: Sequence[str]) -> list[Cell]:
    """What was measured before, priced anew."""
    found = []
    for path in sorted(folder.glob("*.plan.json")):
        each = codec.load(Plan, path)
        if each.model_spec not in models:
            continue
        profile = codec.load(Profile, folder / f"{each.model_spec.replace(':', '.')}.profile.json")
        known = json.loads(path.with_name(path.name.replace(".plan.", ".peaks.")).read_text())
        found.append(cell(each, known["strategy"], known["peaks"][: each.num_ranks], profile, cluster))
    return found


def main() -> None:
    """Profile, plan, measure, print, and keep the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--optimizers", default="sgd,adamw")
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--seconds", type=float, default=12.0, help="of profiling a model")
    parser.add_argument("--keep", type=Path, default=None, help="folder of profiles, plans and measured peaks")
    parser.add_argument("--reprice", action="store_true", help="price what is in --keep, and run nothing")
    parser.add_argument("-o", "--output", type=Path, default=RECORD)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cluster, models = codec.load(Cluster, CLUSTER), args.models.split(",")
    counts = [int(r) for r in args.ranks.split(",")]
    if args.reprice:
        cells = repriced(args.keep, cluster, models)
        print("\n".join(_shown(c) for c in cells))
        kept(args.output, cells)
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    for model in [] if args.reprice else models:
        stored = None if args.keep is None else args.keep / f"{model.replace(':', '.')}.profile.json"
        if stored is not None and stored.exists():
            profile = codec.load(Profile, stored)
        else:
            profile = profiled(model, MODELS.get(model, 16), max(counts), args.seconds)
            if stored is not None:
                codec.save(profile, stored)
        for ranks in counts:
            cells = run(args.keep, profile, cluster, args.strategies.split(","), args.optimizers.split(","), ranks)
            print("\n".join(_shown(c) for c in cells), flush=True)
            kept(args.output, cells)
    document = json.loads(args.output.read_text())
    print(
        f"{document['num_cells']} cells, {document['under']} with a rank above its prediction, "
        f"{document['over_10_percent']} more than 10 % over; {document['mean_over']:+.1%} on average, "
        f"{document['most_over']:+.1%} at most"
    )


if __name__ == "__main__":
    main()
