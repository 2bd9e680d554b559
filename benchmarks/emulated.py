"""Predicted against measured step times of 8-rank plans on emulated GPUs, over real links of a stated bandwidth.

    sudo python benchmarks/emulated.py [--models a,b] [--ranks 8] [--megabits 400,1000] [-o FILE]

Everything is real but the kernels: processes, gloo, buckets, boundaries, messages of full size over links shaped by the
kernel (a network namespace a rank, a token bucket on both ends of its link); a component's computation is a sleep as
long as its profile says (:mod:`asa.executor.measuring.emulation`), here ``--dilation`` times as long, which makes one
megabit per
second of link stand for as many. The profile is an estimate from the GPU's data sheet unless ``--profiles DIR`` has a
measured one (``MODEL.cuda.fp32.json``). The links are measured in place, with the code of ``asa cluster measure``,
before anything is planned; then every whole strategy, a mixed plan and ASA's own choice are planned, and only then run.

Scored per model, width and bandwidth: error of each plan, order of plans whose measured times differ by more than 5 %,
and by how much ASA's choice misses the best. The record of a full run is ``benchmarks/records/emulated.json``.
Needs Linux, root and ``iproute2``; elsewhere it says so and stops.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from statistics import fmean

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a namespace has no name service, which torch would remark

import torch
import torch.distributed as dist
from namespaces import NotPermitted, leave_network, rooms, shape

import asa
from asa.cli.emulated import joined
from asa.cost.machine import presets
from asa.cost.machine.estimate import estimate
from asa.cost.machine.what_if import slower_profile
from asa.errors import InfeasibleError
from asa.executor.measuring.emulation import EmulatedDevice
from asa.executor.running.emulated import EmulationOptions, measure_emulated
from asa.ir import codec
from asa.ir.cluster import Cluster, CollectiveTable, Level
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.units import KIB
from asa.launch import run_ranks
from asa.planner import Request, parse_pin
from asa.planner import plan as solve
from asa.profiler.clock import clock_of
from asa.profiler.collectives import measure_tables
from asa.profiler.rounds import agree
from asa.strategies import offered
from asa.tracing import TracedModel, trace
from asa.zoo.models import build

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "records" / "emulated.json"
MODELS = ("resnet50", "vit_b_16", "vgg16")
GPU = "a100-nvlink-8"
BATCH = 512
STRATEGIES = {
    "resnet50": ("ddp", "fsdp", "hybrid", "1f1b", "asa"),
    "vit_b_16": ("ddp", "tensor", "hybrid", "1f1b", "asa"),
    "vgg16": ("ddp", "hybrid", "1f1b", "asa"),
}
MIXED = {"vgg16": "classifier*=tensor@{n}", "vit_b_16": "encoder*=tensor@2", "resnet50": "layer4*=tensor@2"}
"""A pin that makes a plan mixed whatever the planner would have chosen."""
SIZES = tuple(KIB << (2 * k) for k in range(2, 8))  # 16 KiB to 16 MiB
FAR = 0.05
AIM, CLOSE = 0.08, 0.02


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan, predicted and measured; seconds per step."""

    model: str
    ranks: int
    megabits: float
    strategy: str
    conduct: str
    predicted_s: float
    predicted_compute_s: float
    predicted_exposed_s: float
    measured_s: float
    lowest_s: float
    highest_s: float
    steps: int

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_s / self.measured_s - 1


def profile_of(model: str, folder: Path | None, dilation: float) -> tuple[Profile, str]:
    """The GPU's profile of ``model``, dilated, and where it is from."""
    if folder is not None and (path := folder / f"{model}.cuda.fp32.json").is_file():
        return slower_profile(codec.load(Profile, path), dilation), f"measured, {path.name}"
    shipped = codec.load(Profile, ROOT / "profiles" / f"{model}.cpu.fp32.json")
    device = presets.load(GPU).device
    found = estimate(
        shipped.graph, device, model_spec=model, model_fingerprint=shipped.model_fingerprint, global_batch=BATCH
    )  # fmt: skip
    return slower_profile(found, dilation), f"estimated for {device.name}"


def traced_of(profile: Profile) -> TracedModel:
    """The model in pieces, made once: ranks are forked with it."""
    channels, height, width = profile.graph.input_shape
    model = build(
        profile.model_spec, num_classes=profile.graph.num_classes, input_shape=(channels, height, width)
    )  # fmt: skip
    return trace(model, torch.zeros((2, channels, height, width)), name=profile.model_spec)


def _tables_on(rank: int, sizes: Sequence[int], limit_s: float, source: str) -> tuple[CollectiveTable, ...]:
    world = dist.get_world_size()
    counts = sorted({n for n in (2, 4, 8, 16) if n <= world} | {world})
    groups = {n: dist.new_group(list(range(n))) for n in counts}
    found: list[CollectiveTable] = []
    device = torch.device("cpu")
    for n, group in groups.items():
        if rank < n:
            assert isinstance(group, dist.ProcessGroup)
            found += measure_tables(
                group, device, clock_of(device), sizes=sizes, slice_s=limit_s / len(counts), source=source,
                report=lambda *_: None,
            )  # fmt: skip
        agree()
    return tuple(found)


def links(num_ranks: int, megabits: float, limit_s: float) -> Cluster:
    """The links as ranks find them, between devices that do not matter yet."""
    source = f"measured in place over {megabits:g} Mbit/s links, torch {torch.__version__}, gloo"
    tables = run_ranks(num_ranks, _tables_on, SIZES, limit_s, source, threads=1, limit_s=300 + 5 * limit_s)[0]
    preset = presets.load(GPU)
    return replace(
        preset,
        name=f"emulated-{num_ranks}x{megabits:g}Mbit",
        backend="gloo",
        num_devices=num_ranks,
        levels=(Level(name="shaped links", devices=num_ranks, tables=tables),),
        status="measured",
        source=source,
    )


def plans_of(profile: Profile, cluster: Cluster, ranks: int, chosen: Sequence[str]) -> dict[str, Plan]:
    """Every plan to run by name; those that do the same as an earlier one are left out, ASA's own is last."""
    model = profile.model_spec
    wanted: dict[str, Request] = {
        name: Request(gpus=ranks, global_batch=BATCH, strategies=(name,), time_limit_s=4.0)
        for name in chosen or STRATEGIES.get(model, ("ddp", "hybrid", "1f1b", "asa"))
    }
    if model in MIXED and not chosen:
        pin = parse_pin(MIXED[model].format(n=ranks))
        wanted["mixed"] = Request(gpus=ranks, global_batch=BATCH, strategies=("asa",), pins=(pin,), time_limit_s=4.0)
    found: dict[str, Plan] = {}
    for name, request in wanted.items():
        try:
            found[name] = solve(profile, cluster, offered(), request)[0]
        except InfeasibleError as error:
            print(f"  {name}: {error}")
    return found


def conduct(plan: Plan) -> str:
    """What a plan does, in one line."""
    ways: list[str] = []
    for c in plan.components:
        word = f"{c.data.strategy}{c.data.degree}" + (f"t{c.tensor.degree}" if c.tensor.degree > 1 else "")
        word += "c" if c.checkpoint else ""
        if not ways or ways[-1].split("*")[0] != word:
            ways.append(f"{word}*1")
        else:
            ways[-1] = f"{word}*{int(ways[-1].split('*')[1]) + 1}"
    stages = "" if len(plan.stages) == 1 else f"{plan.schedule} {[len(s.ranks) for s in plan.stages]} "
    return f"{stages}m{plan.num_microbatches} {' '.join(ways)}"


def compare(
    profile: Profile, traced: TracedModel, cluster: Cluster, ranks: int, megabits: float, args: argparse.Namespace
) -> list[Row]:
    """Plan everything, then run everything."""
    named = plans_of(profile, cluster, ranks, args.strategies.split(",") if args.strategies else ())
    distinct: dict[str, Plan] = {}
    for name, plan in named.items():
        if all(conduct(plan) != conduct(p) for p in distinct.values()):
            distinct[name] = plan
    twin = {n: next(d for d, p in distinct.items() if conduct(p) == conduct(named[n])) for n in named}
    options = EmulationOptions(budget_s=args.budget, most_steps=args.steps)
    device = EmulatedDevice(profile=profile, memory_bandwidth=cluster.device.memory_bandwidth)
    start = time.monotonic()

    def heard(number: int, steps: list[float]) -> None:
        name = [*distinct][number]
        print(f"  {name}: {' '.join(f'{s:.3f}' for s in steps)}  after {time.monotonic() - start:.0f} s", flush=True)

    stats = measure_emulated([*distinct.values()], traced, device, offered(), options, on_plan=heard)
    measured = dict(zip(distinct, stats, strict=True))
    print(f"  {len(distinct)} plans in {time.monotonic() - start:.0f} s")
    rows = []
    for name, plan in named.items():
        stat = measured[twin[name]]
        rows.append(
            Row(
                model=profile.model_spec, ranks=ranks, megabits=megabits, strategy=name, conduct=conduct(plan),
                predicted_s=plan.prediction.step_time_s, predicted_compute_s=plan.prediction.compute_s,
                predicted_exposed_s=plan.prediction.exposed_communication_s, measured_s=stat.median,
                lowest_s=stat.p10, highest_s=stat.p90, steps=stat.n,
            )
        )  # fmt: skip
    return rows


def _table(rows: Sequence[Row]) -> None:
    for r in rows:
        print(
            f"  {r.strategy:8s} predicted {r.predicted_s:7.3f}  measured {r.measured_s:7.3f} "
            f"({r.lowest_s:.3f}-{r.highest_s:.3f}, {r.steps})  {100 * r.error:+6.1f} %   compute "
            f"{r.predicted_compute_s:.3f} exposed {r.predicted_exposed_s:.3f}   {r.conduct}",
            flush=True,
        )


def score(rows: Sequence[Row]) -> dict[str, object]:
    """Error, order and choice over all rows; a plan that goes by two names counts once."""
    cells: dict[tuple[str, int, float], list[Row]] = {}
    for r in rows:
        cells.setdefault((r.model, r.ranks, r.megabits), []).append(r)
    once = {(r.model, r.ranks, r.megabits, r.conduct): r for r in rows}
    pairs = right = 0
    choices = []
    for (model, ranks, megabits), found in cells.items():
        for a, b in combinations({r.conduct: r for r in found}.values(), 2):
            if abs(a.measured_s / b.measured_s - 1) > FAR:
                pairs += 1
                right += (a.predicted_s < b.predicted_s) == (a.measured_s < b.measured_s)
        own = next((r for r in found if r.strategy == "asa"), None)
        best = min(found, key=lambda r: r.measured_s)
        if own is not None:
            regret = own.measured_s / best.measured_s - 1
            choices.append({"model": model, "ranks": ranks, "megabits": megabits, "best": best.strategy,
                            "regret": regret, "close": regret <= CLOSE})  # fmt: skip
    return {
        "plans": len(once),
        "mape": fmean(abs(r.error) for r in once.values()),
        "mean_error": fmean(r.error for r in once.values()),
        "pairs": pairs,
        "order_right": right / pairs if pairs else 1.0,
        "choices": choices,
        "choices_close": sum(bool(c["close"]) for c in choices),
    }


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Predicted against measured steps of plans on emulated GPUs.")
    made.add_argument("--models", default=",".join(MODELS))
    made.add_argument("--ranks", default="8", help="world sizes, as in 4,8")
    made.add_argument("--megabits", default="400,1000", help="bandwidths of a rank's link, Mbit/s")
    made.add_argument("--dilation", type=float, default=200.0, help="how many times slower than the GPU")
    made.add_argument("--profiles", type=Path, help="folder with profiles measured on a GPU")
    made.add_argument("--budget", type=float, default=8.0, help="seconds of steps per plan; at least two steps")
    made.add_argument("--tables", type=float, default=100.0, help="seconds to measure one set of links")
    made.add_argument("--steps", type=int, default=6, help="the most steps of a plan")
    made.add_argument("--strategies", help="whole strategies instead of the usual and the mixed one")
    made.add_argument("-o", "--output", type=Path)
    return made


def main() -> int:
    """Measure, print, and write the record."""
    args = _parser().parse_args()
    widths, rates = [int(n) for n in args.ranks.split(",")], [float(m) for m in args.megabits.split(",")]
    torch.set_num_threads(1)  # ranks are forked from here
    try:
        leave_network()
    except NotPermitted as why:
        print(f"skipped: no shaped links here: {why}", file=sys.stderr)
        return 0
    profiles = {m: profile_of(m, args.profiles, args.dilation) for m in args.models.split(",")}
    began = time.monotonic()
    rows: list[Row] = []
    measured: list[Cluster] = []
    for ranks in widths:
        with rooms(ranks):
            clusters = {}
            for megabits in rates:
                shape(ranks, megabits)
                clusters[megabits] = links(ranks, megabits, args.tables)
                measured.append(clusters[megabits])
                print(f"{clusters[megabits].name}: links measured, {time.monotonic() - began:.0f} s", flush=True)
            for model, (profile, origin) in profiles.items():
                traced = traced_of(profile)
                for megabits, cluster in clusters.items():
                    shape(ranks, megabits)
                    emulated = joined(profile, cluster, cluster.device, args.dilation)
                    print(f"{model} ({origin}, {args.dilation:g} times slower) on {cluster.name}", flush=True)
                    found = compare(profile, traced, emulated, ranks, megabits, args)
                    _table(found)
                    rows += found
                del traced
    scores = score(rows)
    print(json.dumps(scores, indent=1))
    print(f"aim: MAPE of {AIM:g} or less; {time.monotonic() - began:.0f} s in all")
    if args.output:
        record = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"), "asa": asa.__version__,
            "torch": torch.__version__, "batch": BATCH, "dilation": args.dilation,
            "profiles": {m: origin for m, (_, origin) in profiles.items()}, "seconds": time.monotonic() - began,
            "links": [codec.to_data(c) for c in measured], "scores": scores,
            "rows": [{**asdict(r), "error": r.error} for r in rows],
        }  # fmt: skip
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
