"""What cells of ``benchmarks/regret.py`` come to, over all of them and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

Row = dict[str, Any]


def scores(cells: Sequence[Row]) -> Row:
    """Over all cells; ratios by their geometric mean. A choice that is faster than what other rounds said is the best
    has all of the gain, and no more."""

    def figures(key: str) -> list[float]:
        return [c[key] for c in cells if c[key] is not None]

    def mean(key: str) -> float | None:
        found = figures(key)
        return math.exp(fmean(map(math.log, found))) if found else None

    def both(key: str) -> Row:
        found = figures(key)
        return {"median": median(found) if found else None, "worst": max(found, default=None)}

    shares, sure = ([min(1.0, x) for x in figures(key)] for key in ("share", "verified_share"))
    return {
        "cells": len(cells),
        "plans_run": sum(c["plans_run"] for c in cells),
        "regret": both("regret"),
        "verified_regret": both("verified_regret"),
        "share_of_gain": fmean(shares) if shares else None,
        "verified_share_of_gain": fmean(sure) if sure else None,
        "cells_with_gain": len(shares),
        "slower_than_ddp": sum(c["slower_than_ddp"] for c in cells),
        "verified_slower_than_ddp": sum(c["verified_slower_than_ddp"] for c in cells),
        "time_over_ddp": mean("over_ddp"),
        "time_over_best_hybrid": mean("over_hybrid"),
        "verified_time_over_best_hybrid": mean("verified_over_hybrid"),
    }


def show(cells: Sequence[Row]) -> None:
    """The table, on standard output."""
    columns = ("model", "ranks", "batch", "plans", "best", "answer", "best s", "regret", "verified", "of gain", "/ddp",
               "/hybrid")  # fmt: skip
    widths = (18, 5, 5, 5, 26, 9, 9, 7, 8, 7, 6, 7)
    print("  ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)))
    for c in cells:
        words = (
            c["model"], c["ranks"], c["global_batch"], c["plans_run"], c["best"], f"{c['answer_s']['median']:.4f}",
            f"{c['best_s']['median']:.4f}", _percent(c["regret"]), _percent(c["verified_regret"]), _percent(c["share"]),
            _ratio(c["over_ddp"]), _ratio(c["over_hybrid"]),
        )  # fmt: skip
        print("  ".join(str(x)[:w].ljust(w) for x, w in zip(words, widths, strict=True)))
    print(json.dumps(scores(cells), indent=1))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
