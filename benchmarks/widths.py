"""How wide step intervals must be: what grids of predictions, day by day, say of each other.

    python benchmarks/widths.py [-o FILE]

Reads every grid of ``benchmarks/records/prediction*.2xcpu.json`` that was ever committed (git keeps those that later
ones replaced). An interval is

    sigma^2 = rest^2 + worked^2 (step_error^2 + max(floor, growth * shown)^2)

with ``rest`` what the recorded interval holds beside these (errors of measured times and links), and ``shown`` the
spread of the profile's readings. Each day is predicted with the constants that hold 90 % of the cells of the other days
with the least median width; 23 November 2026, on which cores were restless and readings calm, fits nothing. Records
from before and after decision 0040 state their widths by other constants, from which ``shown`` is found where it can
be; where a floor hid it, it was less than the floor and is taken as a calm machine's.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median

Z90 = 1.6449
FOLDER = "benchmarks/records"
GRIDS = ("prediction.2xcpu", "prediction.awake.2xcpu", "prediction.memory.2xcpu")
LEFT_OUT = "2026-11-23"
FLOORED = "2026-11-23T20"
"""From when recorded intervals hold a fifth at least."""
CALM, HIDDEN = 0.02, 0.03
CHOICES = [
    (s, f, g) for s in (0.05, 0.06, 0.065, 0.07, 0.08, 0.1) for f in (0.03, 0.05, 0.07, 0.1) for g in (1.2, 1.5, 2.0)
]
BEFORE, NOW = (0.1, 0.2, 1.2), (0.06, 0.05, 2.0)

Cell = tuple[float, float, float, float]
"""Error (a logarithm), share of the step that is work, variance of the rest, what the machine had shown."""


def git(*words: str) -> str:
    return subprocess.run(("git", *words), capture_output=True, text=True, check=True).stdout


def grids() -> dict[str, list[Cell]]:
    """Cells by day; of a grid that was committed twice, once."""
    found: dict[str, list[Cell]] = defaultdict(list)
    known = set()
    for name in GRIDS:
        path = f"{FOLDER}/{name}.json"
        for commit in git("log", "--format=%h", "--", path).split():
            rows = [
                c for c in json.loads(git("show", f"{commit}:{path}"))["cells"] if c.get("measured") and "low_s" in c
            ]
            rows = [c for c in rows if c.get("created", "") and (name, c["created"]) not in known]
            known |= {(name, c["created"]) for c in rows}
            for one in cells(rows):
                found[one[0]].append(one[1])
    return dict(found)


def cells(rows: list[dict]) -> list[tuple[str, Cell]]:
    """Day and figures of the cells of one grid."""
    floored = bool(rows) and min(c["created"] for c in rows) >= FLOORED
    groups = defaultdict(list)
    for c in rows:
        groups[c["model"], c["global_batch"]].append(c)
    made = []
    for group in groups.values():
        worked = [1 - (c["predicted_communication_s"] or 0.0) / c["predicted_s"] for c in group]
        stated = [(math.log(c["high_s"] / c["predicted_s"]) / Z90) ** 2 for c in group]
        spread = math.sqrt(median(max(0.0, s - (0.1 * w) ** 2) for s, w in zip(stated, worked, strict=True)))
        shown = CALM if floored else spread / 1.2 if spread > 0.075 else HIDDEN
        for c, w, s in zip(group, worked, stated, strict=True):
            rest = min(0.01, max(0.0, s - w * w * 0.05)) if floored else 0.0
            made.append((c["created"][:10], (math.log(c["measured"]["median"] / c["predicted_s"]), w, rest, shown)))
    return made


def sigma(cell: Cell, step: float, floor: float, growth: float) -> float:
    return math.sqrt(cell[2] + cell[1] ** 2 * (step**2 + max(floor, growth * cell[3]) ** 2))


def scores(some: list[Cell], how: tuple[float, float, float]) -> dict[str, float]:
    """Coverage of 90 % intervals, and the median of half their width."""
    widths = [Z90 * sigma(c, *how) for c in some]
    inside = fmean(abs(c[0]) <= w for c, w in zip(some, widths, strict=True))
    return {"coverage": round(inside, 3), "half_width": round(math.exp(median(widths)) - 1, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    days, table = grids(), []
    for day, some in sorted(days.items()):
        others = [c for d, more in days.items() if d not in (day, LEFT_OUT) for c in more]
        holding = [how for how in CHOICES if scores(others, how)["coverage"] >= 0.9]
        best = min(holding, key=lambda how: scores(others, how)["half_width"])
        row = {"day": day, "cells": len(some), "by_other_days": best, "held_out": scores(some, best)}
        table.append(row | {"constants": scores(some, NOW), "before": scores(some, BEFORE)})
        print(json.dumps(table[-1]))
    if args.output:
        args.output.write_text(json.dumps({"constants": NOW, "before": BEFORE, "days": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
