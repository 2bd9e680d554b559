"""Additions of ``asa plan --consistency any`` and ``--target`` to a plan."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from asa.cli import places
from asa.cli.console import Console
from asa.cli.verb import Arguments
from asa.errors import AsaError
from asa.ir.cluster import Cluster
from asa.ir.consistency import is_discipline
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.staleness import Staleness
from asa.planner import Request
from asa.planner.answer.consistency import Consistency, ConsistencyRow, compare, curves_for
from asa.report.text import consistency as report
from asa.report.units import seconds
from asa.strategies import offered

__all__ = ["chosen", "compared", "report"]


def _priced(row: ConsistencyRow, price: float | None, devices: int) -> ConsistencyRow:
    """``row`` with the cost of the time to the target on ``devices``; unchanged if either is unknown."""
    time = row.time_to_target
    if price is None or time is None or time.median_s is None:
        return row
    return replace(row, time_to_target=replace(time, cost=price * devices * time.median_s / 3600))


def compared(
    args: Arguments, console: Console, profile: Profile, cluster: Cluster, request: Request, answer: Plan
) -> tuple[Consistency, Staleness | None]:
    """Comparison of disciplines of consistency, and those of the staleness curves stored beside profiles that it uses.

    Raises:
        UsageError: there is only one worker.
    """
    named = Path(args.model) if args.model is not None and places.looks_like_file(args.model) else None
    curves = [curve for _, curve in places.staleness(console, named)] if args.target is not None else []
    table = compare(
        profile, cluster, offered(), request, answer, loosely=args.consistency == "any", target=args.target,
        curves=curves,
    )  # fmt: skip
    used = curves_for(curves, profile, request)
    devices = [answer.num_processes, *([request.gpus] * (len(table.rows) - 1))]  # the plan, first, may use fewer
    rows = (_priced(row, args.price, count) for row, count in zip(table.rows, devices, strict=True))
    return replace(table, rows=tuple(rows)), used if isinstance(used, Staleness) else None


def chosen(
    table: Consistency, console: Console, profile: Profile, cluster: Cluster, request: Request
) -> tuple[list[Plan], Consistency]:
    """Plans under the discipline that ``table`` says reaches the target surely before all synchronous training, and the
    table for them. No plans where there is no such discipline, or the user named strategies: plans stay synchronous."""
    from asa.planner import plan

    row = next((r for r in table.rows if r.name == table.first), None)
    if row is None or row.exact or not table.surely or not is_discipline(row.name) or request.strategies:
        return [], table
    try:
        plans = plan(profile, cluster, offered(), replace(request, strategies=(row.name,)))
    except AsaError as error:
        console.say(f"asa: {row.name} reaches {table.target} first, and there is no plan under it: {error}")
        return [], table
    first, *others = table.rows
    table = replace(table, rows=(replace(first, name=first.name.replace("this plan", "synchronous plan")), *others))
    best = min((r for r in table.rows if r.exact), key=_median)
    reason = (
        f"chosen for {table.target}: {row.name} takes {seconds(_median(row))} to it, {best.name} "
        f"{seconds(_median(best))}; --consistency synchronous keeps to plans that train as one device does"
    )
    space = f"{row.name} alone: it reaches {table.target} first"
    plans = [replace(p, certificate=replace(p.certificate, space=space), notes=(*p.notes, reason)) for p in plans]
    return plans, table


def _median(row: ConsistencyRow) -> float:
    time = row.time_to_target
    return math.inf if time is None or time.median_s is None else time.median_s
