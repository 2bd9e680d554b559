"""How right predictions are: a grid of models, batches and strategies, predicted first and measured then.

    python benchmarks/prediction.py [--models resnet18,vgg11] [--batches 16,32,64] [--budget 40s] [--folder DIR]
    python benchmarks/prediction.py --again --folder DIR      # price the very plans of an earlier run anew

Per model a profile, then per batch one comparison as in ``asa bench``: every plan is written down before the first step
is measured, and strategies take turns. A finished cell is kept in the folder, so that a run that was stopped goes on.
``--again`` measures nothing: it prices the stored plans with today's cost model, from the stored profiles, which shows
what a change of the model does. Such a table says so, and is no evidence: those measurements were known.

Scores: error of step time per cell and on average (MAPE), order of strategies wherever medians differ by more than
10 %, coverage of the 90 % intervals, memory, and skill over a naive model (a device's time over n, plus all bytes over
the bandwidth of the links, nothing hidden). Where one device is among the strategies, errors are also given in units of
its step: a shared machine's speed changes by a quarter within a minute, which is no error of a model's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

from asa.cli import ground
from asa.cost.planned import price_plan
from asa.errors import InfeasibleError
from asa.executor.benchmark import BenchOptions
from asa.executor.benchmark import measure as compete
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.planner import Request, plan
from asa.planner.prediction import predict
from asa.strategies import offered
from asa.zoo.models import build

SIZES = {"alexnet": "3x64x64", "resnet18": "3x32x32", "resnet50": "3x32x32", "vgg11": "3x32x32",
         "mobilenet_v2": "3x32x32", "vit_b_16": "3x32x32"}  # fmt: skip
STRATEGIES = "single,ddp,zero1,zero2,fsdp,tensor,layers,gpipe,1f1b,hybrid,asa"
FAR = 0.10
"""By how much two medians differ before their order counts."""

Cell = dict[str, Any]


def asa(folder: Path, *words: str) -> str:
    """Run a command in ``folder``; its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "asa", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"asa {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def measure(
    folder: Path, models: list[str], batches: list[int], gpus: int, budget_s: float, strategies: list[str]
) -> None:
    """Profiles, plans and measurements of the whole grid, into ``folder``; what is there already is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = f"profiles/cluster.local-gloo-{gpus}.json"
    if not (folder / cluster).is_file():
        print("measuring the cluster", file=sys.stderr, flush=True)
        asa(folder, "cluster", "measure", "--gpus", str(gpus), "-o", cluster)
    for model in models:
        profile = f"profiles/{model}.cpu.fp32.json"
        if not (folder / profile).is_file():
            print(f"profiling {model}", file=sys.stderr, flush=True)
            shape = ("--input", SIZES.get(model, "3x32x32"), "--classes", "100")
            asa(folder, "profile", model, *shape, "--global-batch", str(max(batches)), "-o", profile)
    for batch in batches:
        for model in models:
            if not (folder / "cells" / f"{model}.{batch}.json").is_file():
                print(f"measuring {model}, global batch {batch}", file=sys.stderr, flush=True)
                run(folder, model, batch, codec.load(Cluster, folder / cluster), gpus, budget_s, strategies)


def run(
    folder: Path, model: str, batch: int, cluster: Cluster, gpus: int, budget_s: float, strategies: list[str]
) -> None:
    """One model at one batch: plans into ``folder/plans``, then what they took into ``folder/cells``."""
    profile = codec.load(Profile, folder / "profiles" / f"{model}.cpu.fp32.json")
    plans: list[Plan] = []
    for strategy in strategies:
        request = Request(gpus=gpus, global_batch=batch, strategies=(strategy,))
        try:
            found = plan(profile, cluster, offered(), request)[0]
        except InfeasibleError as error:
            print(f"{model} {strategy}: {error}", file=sys.stderr)
            continue
        if _conduct(found) not in map(_conduct, plans):
            plans.append(found)
            codec.save(found, folder / "plans" / f"{model}.{batch}.{strategy}.json")
    shape = profile.graph.input_shape
    factory = partial(build, model, num_classes=profile.graph.num_classes, input_shape=shape, seed=0)
    data = partial(ground.images, "synthetic", None, shape)
    options = BenchOptions(budget_s=budget_s, evaluations=0, threads=1)
    taken = compete(plans, factory, offered(), data, options)
    rows = [
        {
            "strategy": p.strategy,
            "measured": codec.to_data(cell.step_time),
            "communication_s": cell.communication_s,
            "peak_memory": max(cell.peak_memory_bytes or (0,)),
        }
        for p, cell in zip(plans, taken, strict=True)
    ]
    (folder / "cells").mkdir(exist_ok=True)
    (folder / "cells" / f"{model}.{batch}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def cells(folder: Path, *, again: bool) -> list[Cell]:
    """Every cell measured, predicted as it was then, or ``again`` by today's model from the profiles of then."""
    found = []
    cluster = codec.load(Cluster, next(folder.glob("profiles/cluster.*.json")))
    for path in sorted(folder.glob("cells/*.json")):
        model, batch, _ = path.name.split(".")
        profile = codec.load(Profile, folder / "profiles" / f"{model}.cpu.fp32.json")
        for row in json.loads(path.read_text(encoding="utf-8")):
            used = codec.load(Plan, folder / "plans" / f"{model}.{batch}.{row['strategy']}.json")
            prediction = used.prediction
            if again:
                price = price_plan(used, profile, cluster, offered())
                widths = [len(s.ranks) for s in used.stages]
                prediction = predict(price, profile, widths=widths, global_batch=used.global_batch)
            found.append(
                {
                    "model": model,
                    "ranks": used.num_ranks,
                    "global_batch": int(batch),
                    "predicted_s": prediction.step_time_s,
                    "low_s": prediction.step_time_low_s,
                    "high_s": prediction.step_time_high_s,
                    "predicted_memory": max(prediction.memory_bytes_per_rank),
                    "predicted_communication_s": prediction.exposed_communication_s,
                    "naive_s": naive(used, profile, cluster),
                    "plan": codec.fingerprint(used),
                    **row,
                }
            )
    return found


def _conduct(plan: Plan) -> str:
    return repr((plan.components, plan.stages, plan.num_microbatches, plan.schedule))


def naive(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    """Seconds by a model without overlap, launch costs or contention: compute / n, and all gradients by alpha-beta."""
    largest = max(profile.whole, key=lambda w: w.microbatch)
    compute = largest.whole.median * plan.global_batch / largest.microbatch / plan.num_ranks
    if plan.num_ranks == 1:
        return compute
    table = next(t for t in cluster.levels[-1].tables if t.op == "all_reduce" and t.ranks == plan.num_ranks)
    latency, (size, seconds) = table.points[0][1], table.points[-1]
    return compute + latency + profile.graph.parameter_bytes * seconds / size


def error(cell: Cell, key: str = "predicted_s") -> float:
    """Of the prediction, over what was measured."""
    return float(cell[key] / cell["measured"]["median"] - 1)


def pairs(found: list[Cell], key: str = "predicted_s") -> Iterator[bool]:
    """Of every two cells of one model and batch further apart than FAR: whether their order was foreseen."""
    for a, b in combinations(found, 2):
        if (a["model"], a["global_batch"]) != (b["model"], b["global_batch"]):
            continue
        ours, theirs = a["measured"]["median"], b["measured"]["median"]
        if max(ours, theirs) > (1 + FAR) * min(ours, theirs):
            yield (ours < theirs) == (a[key] < b[key])


def beside_one(found: list[Cell]) -> Iterator[float]:
    """Errors of what is predicted in units of the same model's step on one device, measured in the same turns: how fast
    the machine was in those minutes, as against when it was profiled, drops out."""
    one = {(c["model"], c["global_batch"]): 1 + error(c) for c in found if c["strategy"] == "single"}
    for c in found:
        known = one.get((c["model"], c["global_batch"]))
        if known is not None and c["strategy"] != "single":
            yield (1 + error(c)) / known - 1


def scores(found: list[Cell]) -> dict[str, Any]:
    """The figures of the module's text."""
    told = [c for c in found if c["peak_memory"]]
    inside = [c["low_s"] <= c["measured"]["median"] <= c["high_s"] for c in found]
    ordered, naively = list(pairs(found)), list(pairs(found, "naive_s"))
    memory = [c["predicted_memory"] / c["peak_memory"] - 1 for c in told]
    exposed = [
        abs(c["predicted_communication_s"] - c["communication_s"]) / c["measured"]["median"]
        for c in found
        if c["communication_s"] is not None and c["ranks"] > 1
    ]
    mape, other = fmean(abs(error(c)) for c in found), fmean(abs(error(c, "naive_s")) for c in found)
    relative = [abs(e) for e in beside_one(found)]
    return {
        "cells": len(found),
        "mape": mape,
        "mape_beside_one_device": fmean(relative) if relative else None,
        "median_error": median(error(c) for c in found),
        "order": fmean(ordered) if ordered else None,
        "order_pairs": len(ordered),
        "naive_mape": other,
        "naive_order": fmean(naively) if naively else None,
        "skill": 1 - mape / other,
        "coverage_90": fmean(inside),
        "memory_error": [min(memory, default=0.0), max(memory, default=0.0)],
        "memory_under": sum(m < 0 for m in memory),
        "exposed_communication_error": fmean(exposed) if exposed else None,
    }


def show(found: list[Cell], again: bool) -> None:
    """Both tables, on standard output."""
    if again:
        print("priced anew after the measurement: what a change of the model does, and no evidence")
    print(
        f"{'model':14}{'batch':>6} {'strategy':10}{'measured':>10}{'predicted':>10}{'error':>8}{'in 90 %':>8}"
        f"{'memory':>8}"
    )
    for c in found:
        inside = c["low_s"] <= c["measured"]["median"] <= c["high_s"]
        memory = f"{c['predicted_memory'] / c['peak_memory'] - 1:+.1%}" if c["peak_memory"] else "-"
        print(
            f"{c['model']:14}{c['global_batch']:>6} {c['strategy']:10}{c['measured']['median']:>10.4f}"
            f"{c['predicted_s']:>10.4f}{error(c):>+8.1%}{'yes' if inside else 'no':>8}{memory:>8}"
        )
    for part in sorted({c["strategy"] for c in found}):
        own = [c for c in found if c["strategy"] == part]
        print(f"{part:10} MAPE {fmean(abs(error(c)) for c in own):6.1%}  mean {fmean(error(c) for c in own):+6.1%}")
    print(json.dumps(scores(found), indent=1))


def record(folder: Path, found: list[Cell], *, again: bool) -> dict[str, Any]:
    """The document of a grid, with the machine it is of."""
    cluster = codec.load(Cluster, next(folder.glob("profiles/cluster.*.json")))
    machine = ground.environment("cpu", cluster, max(c["ranks"] for c in found))
    return {
        "schema_version": 1, "environment": codec.to_data(machine), "priced_again": again, "scores": scores(found),
        "cells": found,
    }  # fmt: skip


def main() -> None:
    """Measure what is missing, score, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--batches", default="16,32,64")
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for one model at one batch")
    parser.add_argument("--folder", type=Path, default=Path("runs/prediction"))
    parser.add_argument("--again", action="store_true", help="measure nothing; price the stored plans anew")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    batches = [int(b) for b in args.batches.split(",")]
    if not args.again:
        measure(args.folder, args.models.split(","), batches, args.gpus, args.budget, args.strategies.split(","))
    found = cells(args.folder, again=args.again)
    show(found, args.again)
    if args.output is not None:
        args.output.write_text(
            json.dumps(record(args.folder, found, again=args.again), indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
