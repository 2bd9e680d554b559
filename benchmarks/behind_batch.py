"""What it costs a loop that ranks tell each other behind every batch what they did: steps with and without it.

    python -m benchmarks.behind_batch [--rounds 12] [--batches 40] [--seconds 200] [-o records/behind_batch.json]

Two gloo ranks train a small network under two plans: plain data parallelism, where ranks hear of one another a batch
later, and a mixed plan, where they hear at once. Three arms take turns, an epoch each, in an order that turns around
from round to round: with the exchange, with it again (A/A), and without. Ratios are of epochs of one round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import asa
from asa.launch import run_ranks
from planner_tests.programs import Program, classes, cross_entropy, numbers

RECORD = Path(__file__).parent / "records" / "behind_batch.json"
ARMS = ("with", "with again", "without")
PLANS = ("ddp", "mixed")


def program(batches: int) -> Program:
    """Perceptron of 0.15 M parameters, float64; ``batches`` of 32 samples."""

    def model() -> torch.nn.Module:
        layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))

    return Program(model=model, x=numbers(32 * batches, 64), y=classes(32 * batches, 8), batch=32, loop=dict)


def epoch(net: Any, opt: Any, batches: Any) -> float:
    """Seconds of an epoch, all ranks having come to its beginning."""
    dist.barrier()
    began = time.perf_counter()
    for x, y in batches:
        opt.zero_grad()
        cross_entropy(net, x, y).backward()
        opt.step()
    dist.barrier()
    return time.perf_counter() - began


def timed(_rank: int, rounds: int, batches: int, plans: list[Any], seconds: float) -> dict[str, list[dict[str, float]]]:
    """Milliseconds a batch by plan, round and arm."""
    warnings.simplefilter("ignore")
    found: dict[str, list[dict[str, float]]] = {}
    for name, plan in zip(PLANS, plans, strict=True):
        made = program(batches).made()
        net, opt, loader = asa.parallelize(*made, plan=plan, observe=False)
        pace = net.in_step
        for _ in range(3):  # losses are compared in the first
            epoch(net, opt, loader)
        began, rows = time.perf_counter(), []
        for number in range(rounds):
            row = {}
            for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
                net.__dict__["in_step"] = None if arm == "without" else pace
                row[arm] = 1000 * epoch(net, opt, loader) / batches
            rows.append(row)
            over = torch.tensor([float(time.perf_counter() - began > seconds / len(PLANS))])
            dist.broadcast(over, 0)
            if over.item():
                break
        found[name] = rows
        net.__dict__["in_step"] = pace
        net.close()
    return found


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("-o", type=Path, default=RECORD)
    args = parser.parse_args()
    plans = [program(args.batches).plan(name) for name in PLANS]
    rows = run_ranks(
        2, timed, args.rounds, args.batches, plans, args.seconds, threads=1, timeout_s=60, limit_s=args.seconds + 120
    )[0]
    record: dict[str, Any] = {"ranks": 2, "batches": args.batches, "plans": {}}
    for name, each in rows.items():
        ratios = {arm: [r[arm] / r["with"] - 1 for r in each] for arm in ARMS[1:]}
        record["plans"][name] = {
            "rounds": len(each),
            "ms": {arm: round(statistics.median(r[arm] for r in each), 4) for arm in ARMS},
            "against with, median": {arm: round(statistics.median(r), 4) for arm, r in ratios.items()},
            "against with, least and most": {arm: [round(min(r), 4), round(max(r), 4)] for arm, r in ratios.items()},
            "rows": [{arm: round(ms, 4) for arm, ms in r.items()} for r in each],
        }
        print(name, {k: v for k, v in record["plans"][name].items() if k != "rows"})
    args.o.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
