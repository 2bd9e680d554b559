"""What it costs that every rank notes what it computes and whom it waits for: the same step with and without, in turns.

    python benchmarks/observe.py [--strategies ddp,fsdp,tensor,1f1b] [--pairs 200] [--ranks 2] [-o records/observe.json]

One model is trained; a pair is a step that is observed and one that is not, in changing order, and the latter once
more: its ratio to itself (A/A) is what noise alone makes. A step takes as long as its slowest rank. Printed: the median
of paired ratios with its 95 % interval (bootstrap), and the CPU time of the rank's own thread that observing adds to a
step of the same network with a sixteenth of its channels, in which waiting does not count (``own_python.py``). What is
added to a line of the log (some figures more in the message that ranks exchange anyway) is measured by itself.

Networks, batches and threads are those of ``tax.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from own_python import added_python
from tax import BATCH, SEED, STRATEGIES, THIN_BATCH, WARM_UP, Planned, interval

from asa.executor.model.votes import Votes
from asa.executor.training.epoch_timer import EpochTimer
from asa.executor.training.worker import LossCounter
from asa.launch import run_ranks, tell
from asa.sharding.collectives import direct, segment
from asa.sharding.collectives.waits import waits
from asa.zoo.data import GlobalOrder, ImageSet

LOG_EVERY = 50


def _images() -> ImageSet:
    generator = torch.Generator().manual_seed(SEED)
    return ImageSet(
        images=torch.randint(256, (1024, 3, 32, 32), dtype=torch.uint8, generator=generator),
        labels=torch.randint(100, (1024,), generator=generator), num_classes=100, mean=(0.5,) * 3, std=(0.25,) * 3,
        name="noise", source="noise", shape=(3, 32, 32),
    )  # fmt: skip


def _step(planned: Planned, indices: torch.Tensor, number: int, *, on: bool) -> None:
    waits.on = on
    planned(indices, number)
    planned.worker.clock.collect()
    if number % LOG_EVERY == 0:
        waits.transfers()


def _python(strategy: str, rank: int, votes: Votes, ranks: int) -> float:
    """CPU seconds of this thread that observing adds to a step of the thin network, with a step's share of what is done
    once a line. Ranks sleep while they wait: awake, they would seem to work."""
    planned = Planned(strategy, rank, votes, _images(), ranks, slim=True)
    indices = GlobalOrder(1024, THIN_BATCH, SEED, drop_last=True).batch(0, 0)
    on, off = (partial(_step, planned, indices, 1, on=on) for on in (True, False))
    with patch.object(direct, "AWAKE_S", 0.0), patch.object(segment, "AWAKE_S", 0.0):
        for _ in range(WARM_UP):
            on()
            off()
        found = added_python(on, off, lambda: votes.gather([0.0]), 200)
        waits.start(on=True)
        for _ in range(LOG_EVERY):
            on()
        began = time.thread_time()
        waits.transfers()
        return found + (time.thread_time() - began) / LOG_EVERY


def _line(planned: Planned, votes: Votes) -> tuple[float, float]:
    """Seconds of an exchange behind ``LOG_EVERY`` steps, observed and not (medians)."""
    found: dict[bool, list[float]] = {True: [], False: []}
    tally = LossCounter(torch.device("cpu"))
    plan = planned.worker.model.plan
    pace = EpochTimer(plan, planned.worker.model.processes, votes, planned.worker.clock, LOG_EVERY, 10)
    for turn in range(40):
        waits.on = turn % 2 == 0
        for _ in range(LOG_EVERY):
            for _ in range(3):
                planned.worker.clock.mark()
            pace.stepped(full=True)
        votes.gather([0.0])
        start = time.perf_counter()
        pace.exchange(tally, step=turn, stop=False)
        found[waits.on].append(time.perf_counter() - start)
    return statistics.median(found[True]), statistics.median(found[False])


def measure(rank: int, strategy: str, pairs: int, ranks: int) -> dict[str, Any]:
    """One strategy on one rank; times are those of the slowest rank, and the same on all."""
    votes = Votes()
    python = _python(strategy, rank, votes, ranks)
    order = GlobalOrder(1024, BATCH[strategy], SEED, drop_last=True)
    planned = Planned(strategy, rank, votes, _images(), ranks, slim=False)
    number = 0

    def turn(on: bool) -> float:
        nonlocal number
        number += 1
        votes.gather([0.0])
        start = time.perf_counter()
        _step(planned, order.batch(0, number % order.steps_per_epoch), number, on=on)
        return max(v[0] for v in votes.gather([time.perf_counter() - start]))

    for _ in range(WARM_UP):
        turn(True)
        turn(False)
    names = {"observed": True, "not": False, "again": False}
    times: dict[str, list[float]] = {name: [] for name in names}
    for pair in range(pairs):
        turns = list(names)
        turns = turns[pair % 3 :] + turns[: pair % 3]
        for name in turns if pair % 2 else reversed(turns):
            times[name].append(turn(names[name]))
        if rank == 0 and (pair + 1) % 20 == 0:
            tell({"strategy": strategy, "pair": pair + 1, "pairs": pairs})
    return {"times": times, "python_s": python, "line_s": _line(planned, votes)}


def compare(strategy: str, pairs: int, ranks: int, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure one strategy; the record of it."""
    found = run_ranks(
        ranks, partial(measure, strategy=strategy, pairs=pairs, ranks=ranks), threads=1, timeout_s=300,
        on_message=lambda _, m: say(f"{m['strategy']}: {m['pair']} of {m['pairs']} pairs"),
    )  # fmt: skip
    times = found[0]["times"]
    ratios = {}
    for name in ("observed", "again"):
        ratios[name] = interval([a / b for a, b in zip(times[name], times["not"], strict=True)])
    step = statistics.median(times["not"])
    python = max(one["python_s"] for one in found)
    return {
        "strategy": strategy, "ranks": ranks, "pairs": pairs, "step_s": step, "ratio": ratios["observed"],
        "a_a": ratios["again"], "python_s": python, "python_share": python / step,
        "line_s": max(one["line_s"][0] - one["line_s"][1] for one in found),
    }  # fmt: skip


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    records = []
    print("strategy  step      observed/not (95 %)         A/A (95 %)                 Python a step      a line")
    for strategy in args.strategies.split(","):
        r = compare(strategy, args.pairs, 2 if strategy == "1f1b" else args.ranks)
        records.append(r)
        (ratio, low, high), (same, same_low, same_high) = r["ratio"], r["a_a"]
        print(
            f"{strategy:8}  {1e3 * r['step_s']:5.1f} ms  {ratio:.4f} ({low:.4f} - {high:.4f})  "
            f"{same:.4f} ({same_low:.4f} - {same_high:.4f})  "
            f"{1e3 * r['python_s']:.3f} ms {100 * r['python_share']:.2f} %  {1e3 * r['line_s']:.2f} ms",
            flush=True,
        )
    if args.output:
        Path(args.output).write_text(json.dumps({"taken": time.strftime("%Y-%m-%d"), "results": records}) + "\n")


if __name__ == "__main__":
    main()
