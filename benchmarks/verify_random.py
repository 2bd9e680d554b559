"""Randomly drawn plans, verified: whatever stages, widths, layouts, strategies and schedules, the numbers are the same.

    python benchmarks/verify_random.py [--count 200] [--seed 0] [--models cnn,unet] [--budget 140]
                                       [--keep runs/answers] [-o records/verify_random.json]

A draw: a model, 2 to 4 ranks, stages of any widths cut anywhere the model may be cut, a schedule, 1 to 4 microbatches
of uneven sizes, and per component a layout, a data strategy, recomputation; SGD or AdamW. Each is checked as ``asa
verify`` does (:mod:`asa.executor.measuring.equivalence`), but that ranks take copies of a model traced before they
were forked;
one device's answers are kept for the plans that share them (``--keep``: also for later calls). BatchNorm over the few
samples of a draw may amplify rounding a hundredfold a step: what differs is verified again on as many as ``asa verify``
takes, and the record keeps both. Draw i is a function of
the seed, i and the models, so ``--only 17`` repeats one. The record is written after every draw, and what it holds is
not done again; no draw begins after ``--budget`` seconds, none that needs more memory than is free, and with ``--of``
only those begin that fall on these models.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import torch

from asa.cost.machine import presets
from asa.cost.machine.estimate import estimate
from asa.errors import AsaError
from asa.executor.measuring.equivalence import (
    STEPS,
    OneDevice,
    Trace,
    _run,
    confirmed,
    default_samples,
    first_gradients,
    judge,
    on_one_device,
)
from asa.executor.measuring.model_copies import ModelCopies
from asa.ir.codec import to_data
from asa.ir.equivalence import Equivalence
from asa.ir.graph import Component, LayerGraph
from asa.ir.plan import Assignment, DataDegree, Plan, Stage, TensorDegree
from asa.launch import run_ranks
from asa.planner import Request, plan
from asa.sharding.layers.describe import layer_graph
from asa.strategies import offered
from asa.tracing import TracedModel, trace
from asa.zoo.models import build, default_input

CLASSES = 10
MODELS = {
    "cnn": 6, "lstm": 5, "gru": 2, "bert": 5, "unet": 5, "resnet18": 6, "googlenet": 2, "densenet121": 2, "resnet50": 2,
    "vgg16": 1, "vit_b_16": 1,
}  # fmt: skip
"""How often each is drawn: those that take seconds more often than those that take minutes."""
SMALLEST = ("cnn", "lstm", "bert", "unet")
LARGE = 50e6
"""Parameters from which on one device's answers, gigabytes of them, are not kept."""
_FIGURES = ("max_rel_error", "noise_floor", "allowed")
RECORD = Path(__file__).parent / "records" / "verify_random.json"


@cache
def subject(model: str) -> tuple[TracedModel, LayerGraph, Plan]:
    """The model as traced, its graph, and any plan of it."""
    shape, _ = default_input(model)
    traced = trace(build(model, num_classes=CLASSES, input_shape=shape), torch.zeros(2, *shape), name=model)
    graph = layer_graph(traced, model=model, input_shape=shape, num_classes=CLASSES)
    cluster = presets.load("a100-nvlink-8")
    profile = estimate(
        graph, cluster.device, model_spec=model, model_fingerprint=traced.model_fingerprint, global_batch=64
    )
    request = Request(gpus=2, global_batch=64, strategies=("ddp",))
    return traced, graph, plan(profile, cluster, offered(), request)[0]


def copies(model: str) -> Callable[[], TracedModel]:
    """What makes a model to train, each with equal weights of its own."""
    traced = subject(model)[0]
    return lambda: copy.deepcopy(traced)


def _widths(draw: random.Random, ranks: int, most: int) -> list[int]:
    stages = draw.randint(1, min(ranks, most))
    cuts = sorted(draw.sample(range(1, ranks), stages - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, ranks], strict=True)]


def _assigned(draw: random.Random, c: Component, width: int, stage: int, before: Assignment | None) -> Assignment:
    """A component's way; as its neighbour's layout half of the time, so that segments of several come about."""
    choices = [
        (d, t)
        for d in range(1, width + 1)
        for t in range(1, width + 1)
        if width % (d * t) == 0 and (t == 1 or (c.split is not None and t <= c.split.max_degree))
    ]
    d, t = draw.choice(choices)
    if c.tied:
        d, t = width, 1
    strategies = list(offered().data)
    if before is not None and before.stage == stage and draw.random() < 0.5:
        same = (before.data.degree, before.tensor.degree)
        d, t = same if same in choices and not c.tied else (d, t)
        strategies = [before.data.strategy]
    if d == 1 or not c.parameter_bytes:
        strategies = ["replicate"]
    strategy = draw.choice(strategies)
    shards = None
    if strategy == "hsdp":
        parts = [s for s in range(2, d) if d % s == 0]
        strategy, shards = ("hsdp", draw.choice(parts)) if parts else ("zero3", None)
    if offered().data[strategy].refusal(c, d):
        strategy, shards = "replicate", None
    data = DataDegree(strategy=strategy, degree=d, shards=shards)  # type: ignore[arg-type]
    return Assignment(
        name=c.name, stage=stage, data=data,
        tensor=TensorDegree(strategy="tensor" if t > 1 else "none", degree=t), checkpoint=draw.random() < 0.2,
    )  # fmt: skip


def drawn(model: str, draw: random.Random, most_ranks: int) -> tuple[Plan, int]:
    """A plan, and the samples to verify it on."""
    _, graph, base = subject(model)
    starts = [i for i in range(1, len(graph)) if graph.cuttable(i)]
    ranks = draw.randint(2, most_ranks)
    widths = _widths(draw, ranks, 1 + len(starts))
    begins = [0, *sorted(draw.sample(starts, len(widths) - 1))]
    microbatches = draw.randint(1, 4)
    schedule = "none"
    if len(widths) > 1:
        known = offered().schedules
        able = [n for n, s in known.items() if not s.refusal(len(widths), microbatches)]
        schedule = draw.choice(able)
    components: list[Assignment] = []
    for i, c in enumerate(graph.components):
        stage = max(s for s, first in enumerate(begins) if first <= i)
        before = components[-1] if components else None
        components.append(_assigned(draw, c, widths[stage], stage, before))
    stages, first = [], 0
    for width in widths:
        stages.append(Stage(ranks=tuple(range(first, first + width))))
        first += width
    made = replace(
        base, components=tuple(components), stages=tuple(stages), gpus=ranks, strategy="asa",
        schedule=schedule,  # type: ignore[arg-type]
        num_microbatches=microbatches, optimizer=draw.choice(("sgd", "adamw")),
    )  # fmt: skip
    # Two of every shard at least, an odd number on top: uneven microbatches and shards.
    samples = microbatches * 4 * max(2, ranks // 2) + draw.choice((0, 0, 1, 3))
    return made, samples


def _reference(path: Path, made: Plan, factory: Any, samples: int) -> dict[str, Trace]:
    """One device's answers, those on the disk where there are any."""
    if path.is_file():
        return {k: Trace(**v) for k, v in torch.load(path, weights_only=True).items()}
    one, cpu = on_one_device(made, samples), torch.device("cpu")
    run = partial(_run, one, ModelCopies(one, factory), offered(), 0, cpu, samples=samples)
    found = {
        "one64": run(dtype=torch.float64, steps=STEPS),
        "one32": run(dtype=torch.float32, steps=1),
        "permuted64": run(dtype=torch.float64, steps=STEPS, permute=True),
        "permuted32": run(dtype=torch.float32, steps=1, permute=True),
    }
    if sum(t.numel() for t in found["one32"].gradients.values()) < LARGE:
        torch.save({k: vars(t) for k, t in found.items()}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    return found


def _on_rank(rank: int, made: Plan, factory: Any, samples: int, path: Path) -> Equivalence | None:
    cpu, copies = torch.device("cpu"), ModelCopies(made, factory)
    spread64 = _run(made, copies, offered(), rank, cpu, samples=samples, dtype=torch.float64, steps=STEPS)
    spread32 = _run(made, copies, offered(), rank, cpu, samples=samples, dtype=torch.float32, steps=1)
    if rank:
        return None
    return judge(made, samples, spread64, spread32, OneDevice(**_reference(path, made, factory, samples)))


def in_words(made: Plan) -> str:
    """A plan in a line."""
    parts = []
    for s, stage in enumerate(made.stages):
        ways = [
            f"{c.data.strategy[0]}{c.data.strategy[-1]}{c.data.degree}t{c.tensor.degree}"
            + ("c" if c.checkpoint else "")
            for c in made.components
            if c.stage == s
        ]
        parts.append(f"{len(stage.ranks)}[" + " ".join(ways[:8]) + (" ..." if len(ways) > 8 else "") + "]")
    return f"{made.schedule} m{made.num_microbatches} {made.optimizer} " + " ".join(parts)


def begun(index: int, seed: int, models: Sequence[str]) -> tuple[str, random.Random]:
    """Draw number ``index``: its model, and what decides the rest."""
    draw = random.Random(f"{seed}/{index}")
    return draw.choices(models, [MODELS.get(m, 1) for m in models])[0], draw


def check(index: int, seed: int, models: Sequence[str], most_ranks: int, folder: Path) -> dict[str, Any]:
    """Draw number ``index``, verified; nothing where it needs more memory than is free."""
    model, draw = begun(index, seed, models)
    made, samples = drawn(model, draw, most_ranks)
    weights = sum(p.numel() for c in subject(model)[0].components for p in c.parameters())
    # float64: weights, gradients, two moments, and on some ranks full copies.
    if weights > LARGE and psutil.virtual_memory().available < weights * 8 * 6 * made.num_ranks:
        return {}
    began = time.monotonic()
    found = verified(model, made, samples, folder)
    row: dict[str, Any] = {"draw": index, "model": model, "samples": samples, "plan": in_words(made)}
    enough = default_samples(made)
    if not found["equivalent"] and "reason" not in found and samples < enough:
        row |= {"samples": enough, "before": {"samples": samples} | {k: found[k] for k in _FIGURES}}
        found = verified(model, made, enough, folder)
    return row | found | {"seconds": round(time.monotonic() - began, 1)}


def verified(model: str, made: Plan, samples: int, folder: Path) -> dict[str, Any]:
    """The verdict on a plan, on so many samples; or why there is none."""
    path = folder / f"{model}.{made.num_microbatches}.{samples}.{made.optimizer}.pt"
    factory = copies(model)
    start = partial(run_ranks, made.num_ranks, threads=1, timeout_s=900)
    try:
        verdict = start(_on_rank, made, factory, samples, path)[0]
        assert verdict is not None
        verdict = confirmed(
            verdict, lambda first: start(first_gradients, made, factory, offered(), "cpu", samples, first)[0]
        )
        found = dict(to_data(verdict))
        del found["tensors"]
    except AsaError as error:
        found = {"equivalent": False, "reason": f"{type(error).__name__}: {error}"[:400]}
    return found


def main() -> None:
    """Draw, verify, print, and keep the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--only", type=int, default=None, help="this draw alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--of", default="", help="do those draws that fall on these models")
    parser.add_argument("--ranks", type=int, default=4, help="the most")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no draw begins")
    parser.add_argument("--keep", type=Path, default=None, help="folder of one device's answers, for later calls")
    parser.add_argument("-o", "--output", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    indices = [args.only] if args.only is not None else range(args.first, args.first + args.count)
    rows: list[dict[str, Any]] = []
    if args.output is not None and args.output.is_file():
        rows = json.loads(args.output.read_text())["draws"]
    done = {row["draw"] for row in rows}
    print(f"{'draw':>4} {'model':12} same {'error':>8} {'floor':>8} seconds  plan", flush=True)
    models = args.models.split(",")
    wanted = args.of.split(",") if args.of else models
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as passing:
        folder = args.keep or Path(passing)
        folder.mkdir(parents=True, exist_ok=True)
        for index in indices:
            if index in done or begun(index, args.seed, models)[0] not in wanted:
                continue
            if time.monotonic() - began > args.budget:
                break
            gc.collect()
            gc.freeze()  # what is here is not looked through in every rank
            row = check(index, args.seed, models, args.ranks, folder)
            if not row:
                print(f"{index:4} needs more memory than is free", flush=True)
                continue
            row |= {} if args.models == parser.get_default("models") else {"models": args.models}
            rows.append(row)
            figures = f"{row.get('max_rel_error', float('nan')):8.0e} {row.get('noise_floor', float('nan')):8.0e}"
            same = "yes" if row["equivalent"] else "NO"
            told = f"{row['plan']} {row.get('reason', '')}"
            print(f"{index:4} {row['model']:12} {same:4} {figures} {row['seconds']:7.1f}  {told}", flush=True)
            if args.output is not None:
                known = parser.get_default("models")
                header = {"torch": torch.__version__, "seed": args.seed, "models": known, "classes": CLASSES}
                ordered = sorted(rows, key=lambda r: int(r["draw"]))
                args.output.parent.mkdir(parents=True, exist_ok=True)
                args.output.write_text(json.dumps({**header, "draws": ordered}, indent=1) + "\n")
    good = sum(row["equivalent"] for row in rows)
    print(f"{good} of {len(rows)} draws train as one device does")
    raise SystemExit(0 if good == len(rows) else 1)


if __name__ == "__main__":
    main()
