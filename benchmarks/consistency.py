"""Disciplines of consistency beside their clock and their curves of staleness: throughput and time to a target, when
one rank is slow.

Every rank really trains (gloo), and rests a stated time in every backward: that is its speed, whatever else the machine
does, and ranks that rest do not take cores from each other, so four ranks run on two. One rank rests twice as long. The
learning rate is constant, as in ``asa profile --staleness``. A cell is one run of one discipline with one seed, and one
JSON line; cells that are there already are not run again.

    python -m benchmarks.consistency -o CELLS [--ranks 4] [--rest 0.2] [--epochs 3] [--seeds 1] [--only A,B]
    python -m benchmarks.consistency -o CELLS --record FILE [--curves STALENESS --targets accuracy=0.8]

With ``--megabits`` (and ``--model local_steps:wide``) every rank has a network of its own, whose link carries so much.
Messages are then as long as the weights take on such a link, and only the time beside them is measured.

What a step takes beside the rest is measured in three runs whose ranks all rest alike, and handed to the clock with the
rests: one of workers that average once an epoch (computing and the loop), one of ``ddp`` (an average beside that) and
one of ``ps_async`` (a push and a pull beside that, without waiting for others). Steps to the target are from the
curves, which are measured on one device. Nothing is fitted to the runs that are foretold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from asa.cost.consistency import Machine, Played, Server, Worker, play
from asa.executor.running.run import train
from asa.executor.training.settings import TrainSettings
from asa.ir import codec
from asa.ir.consistency import Discipline, parse
from asa.ir.plan import Plan
from asa.ir.staleness import PLAIN, Staleness, Steps, Target, parse_target
from asa.launch import usable_cores
from asa.scheduler import adapt
from asa.strategies import offered

BATCH = 64
SAMPLES = 1437
"""Images of digits to train on."""
FORETOLD = ("ps_sync", "ps_async", "ps_bounded", "downpour", "local_sgd", "local_sgd:period=16", "diloco:period=22")
ALIKE = ("local_sgd:period=22", "ddp", "ps_async")
"""Runs of ranks that rest alike: workers that average once an epoch, in every step, and at a server."""
WIDE = "local_steps:wide"
"""A model whose messages are long: 4.35 million weights. It needs PYTHONPATH=benchmarks."""
WIDE_BYTES = 4 * (64 * 2048 + 2048 + 2048 * 2048 + 2048 + 2048 * 10 + 10)
MODELS = {name: (name, "--input", "1x8x8", "--classes", "10") for name in ("logistic", "cnn", WIDE)}


def run(
    strategy: str, rests: tuple[float, ...], epochs: int, seed: int, lr: float, model: str, cache: Path
) -> dict[str, Any]:  # fmt: skip
    """One cell."""
    plan = cache / f"{model.rpartition(':')[2]}.{strategy.replace(':', '-')}.{len(rests)}.json"
    if not plan.exists():
        command = ["plan", *MODELS[model], "--gpus", str(len(rests)), "--global-batch", str(BATCH)]
        command += ["--strategies", strategy, "-o", str(plan.resolve())]
        subprocess.run([sys.executable, "-m", "asa", *command], cwd=cache, check=True)
    os.environ["ASA_FAULT"] = ";".join(f"hang:{rest}@rank={r},point=backward" for r, rest in enumerate(rests))
    events: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainSettings(
            out=str(Path(folder) / "run"), data="digits", epochs=epochs, seed=seed, lr=lr, warmup=0.0,
            schedule="constant", observe=False, replan=False, save_every_s=None, threads=1,
        )  # fmt: skip
        train(codec.load(Plan, plan), settings, strategies=offered(), adapt=adapt, on_event=events.append)
    done = [e for e in events if e["event"] == "epoch"]
    counted = [e for e in events if e["event"] == "consistency"]
    return {
        "model": model, "lr": lr, "strategy": strategy, "rests_s": rests, "seed": seed, "load_before": load,
        "epoch_s": [e["seconds"] for e in done], "accuracy": [e["validation_accuracy"] for e in done],
        "validation_loss": [e["validation_loss"] for e in done],
        "counted": {k: counted[-1][k] for k in ("steps_per_worker", "servers") if counted and k in counted[-1]},
    }  # fmt: skip


def per_batch(cells: list[dict[str, Any]]) -> float:
    """Seconds per global batch: the median of all epochs but the first of each run."""
    return statistics.median(s for c in cells for s in c["epoch_s"][1:]) * BATCH / SAMPLES


def reached(cell: dict[str, Any], target: Target) -> float | None:
    """Seconds of training after which a run first reached the target at the end of an epoch; None: never."""
    values = cell["accuracy" if target.what == "accuracy" else "validation_loss"]
    for seconds, value in zip(itertools.accumulate(cell["epoch_s"]), values, strict=True):
        if value >= target.value if target.what == "accuracy" else value <= target.value:
            return seconds
    return None


def foretold(
    discipline: Discipline | None, rests: tuple[float, ...], beside_s: float, meeting_s: float, sent_s: float,
    link_s: float = 0.0,
) -> Played:  # fmt: skip
    """An epoch by the clock: ``beside_s`` of a step are neither rest nor message, ``meeting_s`` an average and
    ``sent_s`` a push and a pull. On slow links the weights take ``link_s`` on each link that they pass, beside that."""
    count = len(rests)
    steps = SAMPLES // BATCH * (1 if discipline is None else discipline.period)
    servers = 0 if discipline is None else discipline.servers
    sent = [sent_s / 2 + link_s * (servers - (w < servers)) / max(1, servers) for w in range(count)]
    machine = Machine(
        workers=tuple(
            Worker(step_s=rest + beside_s, rows=BATCH / count, push_s=s, pull_s=s)
            for rest, s in zip(rests, sent, strict=True)
        ),
        servers=tuple(
            Server(receive_s=link_s / servers, send_s=link_s / servers, beside=j if link_s else None)
            for j in range(servers)
        ),
        meeting_s=meeting_s + link_s * 2 * (count - 1) / count,
    )
    return play(discipline, machine, steps=steps)


def at_epochs(curves: Staleness) -> Staleness:
    """``curves`` as a run would see them, which looks at the end of each epoch: values at the looks nearest to those,
    so a step is an epoch."""
    count = int(curves.steps * BATCH / SAMPLES)
    looks = [round((n + 1) * SAMPLES / BATCH / curves.every) - 1 for n in range(count)]

    def seen(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(values[i] for i in looks if i < len(values))

    return replace(
        curves, every=1, steps=count,
        curves=tuple(
            replace(c, runs=tuple(replace(r, losses=seen(r.losses), accuracies=seen(r.accuracies)) for r in c.runs))
            for c in curves.curves
        ),
    )  # fmt: skip


def epochs_to(
    target: Target, curves: Staleness, discipline: Discipline | None, workers: int, age: float
) -> Steps | None:  # fmt: skip
    """Epochs to the target by the curves, as `asa plan --target` reads them."""
    if discipline is None or discipline.exact("sgd"):
        return curves.steps_to(target, PLAIN)
    return curves.under(discipline, workers, target, age)[0]


def study(
    cells: list[dict[str, Any]], megabits: float | None, curves: Staleness | None, targets: list[Target]
) -> dict[str, Any]:
    """Figures of the runs of one number of ranks. Runs whose ranks all rest alike give what a step takes beside."""
    slow = next(tuple(c["rests_s"]) for c in cells if len(set(c["rests_s"])) > 1)
    alike = {c["strategy"]: c for c in cells if len(set(c["rests_s"])) == 1}
    link_s = 8 * WIDE_BYTES / megabits / 1e6 if megabits else 0.0
    apart_s = per_batch([alike[ALIKE[0]]])
    meeting_s, sent_s = (0.0, 0.0) if megabits else (max(0.0, per_batch([alike[n]]) - apart_s) for n in ALIKE[1:])
    beside_s = max(0.0, apart_s - slow[0] - link_s * 2 * (len(slow) - 1) / len(slow) / (SAMPLES // BATCH))
    rows: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(c["strategy"] for c in cells if tuple(c["rests_s"]) == slow):
        mine = [c for c in cells if c["strategy"] == name and tuple(c["rests_s"]) == slow]
        discipline = None if name == "ddp" else parse(name)
        played, measured = foretold(discipline, slow, beside_s, meeting_s, sent_s, link_s), per_batch(mine)
        said = played.seconds / played.steps  # an epoch from its start, as in the run: workers begin it together
        rows[name] = row = {
            "seeds": len(mine), "measured_s": measured, "foretold_s": said, "error": said / measured - 1,
            "mean_age": played.mean_age, "accuracy": [c["accuracy"][-1] for c in mine],
        }  # fmt: skip
        for target in targets if curves is not None and curves.workers == len(slow) else ():
            steps = epochs_to(target, at_epochs(curves), discipline, len(slow), played.mean_age)
            counts = None if steps is None else (steps.low, steps.median, steps.high)
            row.setdefault("to_target", {})[str(target)] = {
                "foretold_epochs": counts, "measured_s": [reached(c, target) for c in mine],
                "foretold_s": counts and [n and n * SAMPLES / BATCH * said for n in counts],
            }  # fmt: skip
    for row in rows.values():
        row["gain_over_ddp"] = rows["ddp"]["measured_s"] / row["measured_s"]
    return {
        "ranks": len(slow), "rests_s": slow, "beside_s": beside_s, "meeting_s": meeting_s, "sent_s": sent_s,
        "uneven_batches_by_the_clock_s": len(slow) / sum(1 / (r + beside_s) for r in slow) + meeting_s, "rows": rows,
        "order": {t: order({n: r["to_target"][t] for n, r in rows.items()}) for t in rows["ddp"].get("to_target", {})},
    }  # fmt: skip


def order(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Pairs of disciplines whose measured times to the target are ``apart``, which do not overlap over seeds: which of
    them the medians foretold put in another order, and the same for those that are ``sure``, of which the times
    foretold do not overlap over seeds either. A seed that never arrived is later than all that did, and so is a
    discipline of which half of the curves or more do not arrive."""
    apart, wrong, close, sure, surely_wrong = 0, [], 0, 0, []
    known = {
        n: [math.inf if s is None else s for s in r["foretold_s"]] for n, r in rows.items() if r["foretold_s"]
    }  # fmt: skip
    seen = {n: sorted(math.inf if s is None else s for s in rows[n]["measured_s"]) for n in known}
    for pair in itertools.combinations(known, 2):
        first, last = sorted(pair, key=seen.__getitem__)
        if seen[last][0] <= seen[first][-1]:
            close += 1
            continue
        apart += 1
        is_wrong = known[first][1] >= known[last][1]
        wrong += [[first, last]] * is_wrong
        if known[first][2] < known[last][0] or known[last][2] < known[first][0]:
            sure += 1
            surely_wrong += [[first, last]] * is_wrong
    return {
        "apart": apart, "wrong": wrong, "sure": sure, "surely_wrong": surely_wrong, "overlapping": close,
        "not_foretold": [n for n in rows if n not in known],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="cnn")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rest", type=float, default=0.2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default=",".join(("ddp", *FORETOLD)), help="ddp and disciplines, by name")
    parser.add_argument("--megabits", type=float, help="of every rank's link, per second; usual: ranks of one host")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no cell is begun")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--curves", type=Path, help="file of asa profile --staleness")
    parser.add_argument("--targets", help="as in accuracy=0.8,loss=0.5", default="")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    cells = [json.loads(t) for t in args.output.read_text().splitlines()] if args.output.exists() else []
    if args.record:
        curves = codec.load(Staleness, args.curves) if args.curves else None
        targets = [parse_target(t) for t in args.targets.split(",") if t]
        ranks = sorted({len(c["rests_s"]) for c in cells})
        made = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{usable_cores()} CPU cores, torch {torch.__version__}, gloo on one host",
            "slow": "the last rank rests twice as long in every backward (ASA_FAULT hang): no competing load",
            "model": f"{cells[0]['model']} on digits 1x8x8, batch {BATCH}, SGD at a fixed rate of {cells[0]['lr']:g}",
            "megabits": args.megabits,
            "studies": [
                study([c for c in cells if len(c["rests_s"]) == n], args.megabits, curves, targets) for n in ranks
            ],
            "cells": cells,
        }
        args.record.write_text(json.dumps(made, indent=1) + "\n")
        print(json.dumps(made["studies"], indent=1))
        return
    cache = args.output.resolve().parent / "consistency.cache"
    cache.mkdir(exist_ok=True)
    began, rest, others = time.monotonic(), args.rest, (args.rest,) * (args.ranks - 1)
    asked = [(name, (*others, rest), 0) for name in (ALIKE[:1] if args.megabits else ALIKE)]
    asked += [(n, (*others, 2 * rest), seed) for seed in range(args.seeds) for n in args.only.split(",")]
    with ExitStack() as networks:
        if args.megabits:
            from namespaces import leave_network, shaped

            leave_network()
            networks.enter_context(shaped(args.ranks, args.megabits))
        for strategy, rests, seed in asked:
            if any((c["strategy"], tuple(c["rests_s"]), c["seed"]) == (strategy, rests, seed) for c in cells):
                continue
            if time.monotonic() - began > args.budget:
                return
            found = run(strategy, rests, args.epochs, seed, args.lr, args.model, cache)
            with args.output.open("a") as stream:
                stream.write(json.dumps(found) + "\n")
            print(
                strategy, rests, seed, round(per_batch([found]), 4), found["accuracy"], found["load_before"], flush=True
            )


if __name__ == "__main__":
    main()
