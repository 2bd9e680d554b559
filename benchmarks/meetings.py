"""What a busy core costs a plan that meets often: is a rank slowed down, or is every meeting late as well?

    python benchmarks/meetings.py [--alone] [-o benchmarks/records/meetings.json]

Two gloo ranks, each bound to a core, compute for so much processor time a step and meet in so many all-reduces on the
way; then the same while a busy loop has the core of rank 1, too. Beside the measured step stands what the adaptive loop
would say: the rank with most to do, whose computing takes as many times as long as its own was measured to, and
transfers as they were without the loop. A wait for a time slice at every meeting would show as a difference that grows
with their number. ``--alone`` as of ``benchmarks/adapt.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adapt import alone

from asa.launch import run_ranks

SPLITS = ((0.05, 0.05), (0.07, 0.03))
"""Seconds of processor time in a step, by rank."""
MEETINGS = ((1, 1 << 20), (4, 1 << 20), (16, 1 << 20), (2, 8 << 20))
"""How many in a step, and their bytes."""
STEPS = 20


def _compute(seconds: float, matrix: torch.Tensor) -> float:
    began, until = time.perf_counter(), time.thread_time() + seconds
    while time.thread_time() < until:
        torch.mm(matrix, matrix)
    return time.perf_counter() - began


def _measure(rank: int) -> list[tuple[float, float]]:
    """Medians of a step and of this rank's own computing in it, for every split and number of meetings."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    matrix, found = torch.randn(96, 96), []
    for split in SPLITS:
        for count, size in MEETINGS:
            message, steps, own = torch.zeros(size // 4), [], []
            for _ in range(STEPS):
                dist.barrier()
                began, mine = time.perf_counter(), 0.0
                for _ in range(count):
                    mine += _compute(split[rank] / count, matrix)
                    dist.all_reduce(message)
                steps.append(time.perf_counter() - began)
                own.append(mine)
            found.append((statistics.median(steps[1:]), statistics.median(own[1:])))
    return found


def _rows(calm: list[Any], busy: list[Any]) -> list[dict[str, Any]]:
    rows = []
    cases = [(split, *meeting) for split in SPLITS for meeting in MEETINGS]
    for i, (split, count, size) in enumerate(cases):
        before, after = calm[0][i][0], busy[0][i][0]
        # Between two meetings everybody waits for the rank that computes longest.
        transfers = before - max(rank[i][1] for rank in calm)
        rows.append(
            {
                "computing_s": split, "meetings": count, "bytes": size, "calm_s": before, "busy_s": after,
                "own_busy_s": [rank[i][1] for rank in busy],
                "expected_s": max(rank[i][1] for rank in busy) + transfers,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--alone", action="store_true", help="before all other processes on every core")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    core = sorted(os.sched_getaffinity(0))[1]
    with alone() if args.alone else nullcontext():
        calm = run_ranks(2, _measure, threads=1)
        code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
        loop = subprocess.Popen([sys.executable, "-c", code])
        try:
            busy = run_ranks(2, _measure, threads=1)
        finally:
            loop.kill()
            loop.wait()
    rows = _rows(calm, busy)
    for row in rows:
        print(
            f"{row['computing_s']} s, {row['meetings']:>2} meetings of {row['bytes'] >> 20} MiB: "
            f"{1e3 * row['calm_s']:.1f} ms, with a busy core {1e3 * row['busy_s']:.1f} ms, "
            f"expected {1e3 * row['expected_s']:.1f} ms ({100 * (row['expected_s'] / row['busy_s'] - 1):+.0f} %)"
        )
    if args.output:
        args.output.write_text(json.dumps({"taken": time.strftime("%Y-%m-%d"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
