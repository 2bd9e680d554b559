"""What was foreseen against what was measured: errors, order, skill over a naive model, intervals, memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from statistics import fmean, median
from typing import Any

from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.ir.profile import Profile

FAR = 0.10
"""By how much two medians differ before their order counts."""

Cell = dict[str, Any]


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


def choices(sealed: list[Cell], found: list[Cell]) -> Iterator[Cell]:
    """Of every cell that is complete, what was said of the planner's choice and what it cost over the fastest, each in
    units of the anchor in its own turns."""
    for one in sealed:
        chosen = one.get("choice")
        own = {
            c["strategy"]: 1.0 if c["strategy"] == c["anchor"] else c["measured"]["median"] / c["anchor_s"]
            for c in found
            if (c["model"], c["global_batch"]) == (one["model"], one["global_batch"])
        }
        wanted = {s for group in one["groups"] for s in group}
        if chosen and wanted and wanted <= set(own) and chosen["strategy"] in own:
            best = min(own, key=lambda s: own[s])
            yield {
                "model": one["model"], "global_batch": one["global_batch"], **chosen, "best": best,
                "regret": own[chosen["strategy"]] / own[best] - 1,
            }  # fmt: skip


def beside_one(found: list[Cell]) -> Iterator[float]:
    """Errors of what is predicted in units of the same model's step on one device, measured in the same turns: how fast
    the machine was in those minutes, as against when it was profiled, drops out."""
    one = {(c["model"], c["global_batch"]): c["predicted_s"] for c in found if c["strategy"] == "single"}
    for c in found:
        known = one.get((c["model"], c["global_batch"]))
        if known is not None and c["strategy"] != "single" and c["anchor"] == "single":
            yield (1 + error(c)) * c["anchor_s"] / known - 1


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
        "half_width": median((c["high_s"] / c["low_s"]) ** 0.5 - 1 for c in found),
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
