"""How right predictions are: a grid of models, batches and strategies, predicted first and measured then.

    python benchmarks/prediction.py [--models resnet18,vgg11] [--batches 16,32,64] [--budget 40m] [--folder DIR]
    python benchmarks/prediction.py --budget 235s --folder DIR      # a piece; again until it says that nothing is left
    python benchmarks/prediction.py --budget 1s --folder DIR -o RECORD   # only score what there is, and write it
    python benchmarks/prediction.py --again --folder DIR      # price the very plans of an earlier run anew

A model is profiled right before its cells (one model at one batch each), anew after ten minutes; the links of the ranks
every half hour. All plans of a cell are written down, with their fingerprints, before its
first step is measured. Strategies take turns in groups of three, one device in each of them. A group that was measured
is kept in the folder, so that a run that was stopped, or had no more of its budget, goes on. Plans that memory does not
hold beside others run alone, and those that it does not hold at all are left out and named.

``--again`` measures nothing: it prices the stored plans with today's cost model, from the stored profiles, which shows
what a change of the model does. Such a table says so, and is no evidence: those measurements were known.

Scores: error of step time per cell and on average (MAPE), order of strategies wherever medians differ by more than
10 %, coverage and width of the 90 % intervals, memory, and skill over a naive model (a device's time over n, plus all
bytes over the bandwidth of the links, nothing hidden). Errors are also given in units of the step of one device in the
same turns: a shared machine's speed changes by a quarter within a minute, which is no error of a model's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from foreseen import choices, naive, scores, show
from turns import groups

from asa.cli import bench_setup
from asa.cli.heap import start_program_again
from asa.cost.planned import price_plan
from asa.errors import InfeasibleError
from asa.executor.measuring.benchmark import BenchOptions
from asa.executor.measuring.benchmark import measure as compete
from asa.ir import codec
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.ir.profile import Profile, Stat
from asa.ir.units import time_span
from asa.planner import Request, plan
from asa.planner.answer.prediction import predict
from asa.profiler.machine import choose_device, free_memory
from asa.strategies import offered
from asa.zoo.models import build

SIZES = {"alexnet": "3x64x64", "resnet18": "3x32x32", "resnet50": "3x32x32", "vgg11": "3x32x32",
         "mobilenet_v2": "3x32x32", "vit_b_16": "3x32x32"}  # fmt: skip
STRATEGIES = "single,ddp,zero1,zero2,fsdp,tensor,layers,gpipe,1f1b,hybrid,asa"

FRESH_S, LINKS_FRESH_S = 600.0, 1800.0
"""Profiles and links older than that are measured anew before another cell is planned."""
PROFILE_S, LINKS_S = 45.0, 45.0
START_S = 12.0
"""What ranks take before the first step."""
ROUNDS = 6
"""At least: a shared machine is half as slow again for seconds at a time, and three rounds may all be in them."""
STEPS = 17
"""Of every plan in a group, about: warm-up, the rounds (the anchor twice), memory and silent steps."""

Cell = dict[str, Any]


class Grid:
    """Cells in a folder, measured group by group until ``ends``."""

    def __init__(self, folder: Path, gpus: int, group_s: float, strategies: Sequence[str], ends: float) -> None:
        self.folder, self.gpus, self.group_s, self.strategies, self.ends = folder, gpus, group_s, strategies, ends

    def affords(self, seconds: float) -> bool:
        """Whether so long a piece of work ends in time."""
        return time.monotonic() + seconds <= self.ends

    def cell(self, model: str, batch: int, largest: int) -> bool:
        """Measure what is missing of a cell; whether all of it is there now."""
        sealed = self.folder / "sealed" / f"{model}.{batch}.json"
        if not sealed.is_file() and not self.prepare(model, batch, largest):
            return False
        document = json.loads(sealed.read_text(encoding="utf-8"))
        for number, names in enumerate(document["groups"]):
            path = self.folder / "groups" / f"{model}.{batch}.{number}.json"
            if path.is_file():
                continue
            plans = [codec.load(Plan, self.folder / "plans" / f"{model}.{batch}.{n}.json") for n in names]
            seconds = [p.prediction.step_time_s for p in plans]
            expected = max(START_S + STEPS * sum(seconds) + ROUNDS * seconds[0], self.group_s)
            if not self.affords(expected):
                say(f"{model}, global batch {batch}: {', '.join(names)} would take some {expected:.0f} s")
                return False
            say(f"{model}, global batch {batch}: {', '.join(names)}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.turns(model, plans), indent=1) + "\n", encoding="utf-8")
        return True

    def prepare(self, model: str, batch: int, largest: int) -> bool:
        """The plans of a cell and who takes turns with whom, written down; False where there is no time for it."""
        links, own = self.links(), self.profile(model, largest)
        if links is None or own is None:
            return False
        cluster, profile = codec.load(Cluster, links), codec.load(Profile, own)
        plans, missing = self.plans(model, batch, profile, cluster)
        # The ranks' own images and libraries take some of what is free.
        free = free_memory(choose_device("cpu")) - self.gpus * 2**30
        made, refused = groups(plans, profile, cluster, free)
        missing |= {p.strategy: why for p, why in refused}
        for strategy, why in missing.items():
            say(f"{model}, global batch {batch}, {strategy} is left out: {why}")
        kept = self.folder / "profiles" / f"{model}.{batch}.cpu.fp32.json"
        if own != kept:
            shutil.copyfile(own, kept)
        document = {
            "model": model, "global_batch": batch, "written": codec.now(), "profile": codec.fingerprint(profile),
            "profile_created": profile.provenance.created, "cluster": links.name,
            "plans": {p.strategy: codec.fingerprint(p) for p in plans},
            "groups": [[p.strategy for p in g] for g in made], "left_out": missing,
            "choice": self.choice(model, batch, profile, cluster, plans),
        }  # fmt: skip
        path = self.folder / "sealed" / f"{model}.{batch}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return True

    def links(self) -> Path | None:
        """The ranks' links, measured in the last half hour; None where there is no time to."""
        known = sorted((self.folder / "profiles").glob("cluster.*.json"), key=lambda p: p.stat().st_mtime)
        if known and time.time() - known[-1].stat().st_mtime < LINKS_FRESH_S:
            return known[-1]
        if not self.affords(2 * LINKS_S):
            return None
        say("measuring the links")
        path = Path("profiles") / f"cluster.{len(known)}.local-gloo-{self.gpus}.json"
        asa(self.folder, "cluster", "measure", "--gpus", str(self.gpus), "--time-limit", f"{LINKS_S:g}s",
            "-o", str(path))  # fmt: skip
        return self.folder / path

    def profile(self, model: str, largest: int) -> Path | None:
        """The model's profile, of the last ten minutes; None where there is no time to take it."""
        path = self.folder / "profiles" / f"{model}.cpu.fp32.json"
        if path.is_file() and time.time() - path.stat().st_mtime < FRESH_S:
            return path
        if not self.affords(1.5 * PROFILE_S):
            return None
        say(f"profiling {model}")
        asa(self.folder, "profile", model, "--input", SIZES.get(model, "3x32x32"), "--classes", "100",
            "--global-batch", str(largest), "--time-limit", f"{PROFILE_S:g}s",
            "-o", str(Path("profiles") / path.name))  # fmt: skip
        return path

    def plans(
        self, model: str, batch: int, profile: Profile, cluster: Cluster
    ) -> tuple[list[Plan], dict[str, str]]:  # fmt: skip
        """One of every strategy, the same conduct once, as files; and why there is none of the others."""
        found: list[Plan] = []
        missing: dict[str, str] = {}
        for strategy in self.strategies:
            request = Request(gpus=self.gpus, global_batch=batch, strategies=(strategy,))
            try:
                made = plan(profile, cluster, offered(), request)[0]
            except InfeasibleError as error:
                missing[strategy] = str(error)
                continue
            same = next((p.strategy for p in found if p.conduct == made.conduct), None)
            if same is not None:
                missing[strategy] = f"the very plan of {same}"
                continue
            found.append(made)
            codec.save(made, self.folder / "plans" / f"{model}.{batch}.{strategy}.json")
        return found, missing

    def choice(self, model: str, batch: int, profile: Profile, cluster: Cluster, plans: Sequence[Plan]) -> Cell | None:
        """What the planner says of its choice among all of these strategies; None where it was not asked for."""
        if "asa" not in self.strategies:
            return None
        made = plan(profile, cluster, offered(), Request(gpus=self.gpus, global_batch=batch))[0]
        same = next((p.strategy for p in plans if p.conduct == made.conduct), None)
        if made.confidence is None or same is None:
            return None
        return {"strategy": same, "p_best": made.confidence.p_best, "expected_regret": made.confidence.expected_regret}

    def turns(self, model: str, plans: Sequence[Plan]) -> list[Cell]:
        """What each plan of a group took; ``anchor_s``: what the first of them did, in the same rounds."""
        shape = plans[0].input_shape
        factory = partial(build, model, num_classes=plans[0].num_classes, input_shape=shape, seed=0)
        data = partial(bench_setup.images, "synthetic", None, shape)
        settings = BenchOptions(budget_s=self.group_s, evaluations=0, least_rounds=ROUNDS)
        taken = compete(plans, factory, offered(), data, settings)
        return [
            {
                "strategy": p.strategy, "steps": cell.steps, "anchor": plans[0].strategy,
                "anchor_s": taken[0].step_time.median, "communication_s": cell.communication_s,
                "peak_memory": max(cell.peak_memory_bytes or (0,)), "created": codec.now(),
            }
            for p, cell in zip(plans, taken, strict=True)
        ]  # fmt: skip


def say(text: str) -> None:
    """To standard error."""
    print(text, file=sys.stderr, flush=True)


def asa(folder: Path, *words: str) -> str:
    """Run a command in ``folder``; its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "asa", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"asa {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def cells(folder: Path, *, again: bool) -> list[Cell]:
    """Every cell measured, predicted as it was then, or ``again`` by today's model from the profiles of then.

    The anchor of several groups is one cell, of all its steps.
    """
    found = []
    for path in sorted(folder.glob("sealed/*.json")):
        sealed = json.loads(path.read_text(encoding="utf-8"))
        model, batch = sealed["model"], sealed["global_batch"]
        rows = [
            row
            for group in sorted(folder.glob(f"groups/{model}.{batch}.*.json"))
            for row in json.loads(group.read_text(encoding="utf-8"))
        ]
        for strategy in dict.fromkeys(r["strategy"] for r in rows):
            own = [r for r in rows if r["strategy"] == strategy]
            used = codec.load(Plan, folder / "plans" / f"{model}.{batch}.{strategy}.json")
            if codec.fingerprint(used) != sealed["plans"][strategy]:
                raise SystemExit(f"{model}, batch {batch}: the plan of {strategy} is not the one that was sealed")
            found.append(_cell(folder, sealed, used, own, again=again))
    return found


def _cell(folder: Path, sealed: Cell, used: Plan, rows: list[Cell], *, again: bool) -> Cell:
    profile = codec.load(
        Profile, folder / "profiles" / f"{sealed['model']}.{sealed['global_batch']}.cpu.fp32.json"
    )  # fmt: skip
    cluster = codec.load(Cluster, folder / "profiles" / sealed["cluster"])
    prediction = used.prediction
    if again:
        price = price_plan(used, profile, cluster, offered())
        widths = [len(s.ranks) for s in used.stages]
        prediction = predict(price, profile, cluster, widths=widths, global_batch=used.global_batch)
    apart = [r["communication_s"] for r in rows if r["communication_s"] is not None]
    return {
        "model": sealed["model"],
        "ranks": used.num_ranks,
        "global_batch": sealed["global_batch"],
        "strategy": rows[0]["strategy"],
        "predicted_s": prediction.step_time_s,
        "low_s": prediction.step_time_low_s,
        "high_s": prediction.step_time_high_s,
        "predicted_memory": max(prediction.memory_bytes_per_rank),
        "predicted_communication_s": prediction.exposed_communication_s,
        "naive_s": naive(used, profile, cluster),
        "plan": sealed["plans"][rows[0]["strategy"]],
        "planned": sealed["written"],
        "profiled": sealed["profile_created"],
        "created": rows[0]["created"],
        "measured": codec.to_data(Stat.of(s for r in rows for s in r["steps"])),
        "anchor": rows[0]["anchor"],
        "anchor_s": median(r["anchor_s"] for r in rows),
        "communication_s": median(apart) if apart else None,
        "peak_memory": max(r["peak_memory"] for r in rows),
    }


def record(folder: Path, found: list[Cell], *, again: bool) -> dict[str, Any]:
    """The document of a grid, with the machine it is of."""
    machine = bench_setup.machine("cpu", max(c["ranks"] for c in found))
    sealed = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("sealed/*.json"))]
    left_out = {f"{s['model']}.{s['global_batch']}": s["left_out"] for s in sealed if s["left_out"]}
    return {
        "schema_version": 1, "environment": codec.to_data(machine), "priced_again": again, "scores": scores(found),
        "left_out": left_out, "choices": list(choices(sealed, found)), "cells": found,
    }  # fmt: skip


def main() -> None:
    """Measure what is missing, score, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--batches", default="16,32,64")
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--budget", default="60m", help="for what is missing; a group that would end later waits")
    parser.add_argument("--group", type=float, default=30.0, help="seconds for three plans; three rounds at least")
    parser.add_argument("--folder", type=Path, default=Path("runs/prediction"))
    parser.add_argument("--again", action="store_true", help="measure nothing; price the stored plans anew")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    start_program_again()  # with the heap that `asa train` has
    batches = [int(b) for b in args.batches.split(",")]
    if not args.again:
        ends = time.monotonic() + time_span(args.budget)
        grid = Grid(args.folder, args.gpus, args.group, args.strategies.split(","), ends)
        (args.folder / "profiles").mkdir(parents=True, exist_ok=True)
        todo = [(m, b) for m in args.models.split(",") for b in batches]
        done = 0
        for model, batch in todo:
            if not grid.cell(model, batch, max(batches)):
                break
            done += 1
        say("nothing is left" if done == len(todo) else f"{len(todo) - done} of {len(todo)} cells are left")
    found = cells(args.folder, again=args.again)
    if not found:
        return
    show(found, args.again)
    if args.output is not None:
        args.output.write_text(
            json.dumps(record(args.folder, found, again=args.again), indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
