"""Additions of ``asa plan --consistency any`` and ``--target`` to a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from asa.cli import places
from asa.cli.console import Console
from asa.cli.verb import Arguments
from asa.ir.cluster import Cluster
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.staleness import Staleness
from asa.planner import Request
from asa.planner.answer.consistency import Consistency, ConsistencyRow, compare, curves_for
from asa.report import consistency as report

__all__ = ["compared", "report"]


def _priced(row: ConsistencyRow, price: float | None, devices: int) -> ConsistencyRow:
    """``row`` with the cost of the time to the target on ``devices``; unchanged if either is unknown."""
    time = row.time_to_target
    if price is None or time is None or time.mean_s is None:
        return row
    return replace(row, time_to_target=replace(time, cost=price * devices * time.mean_s / 3600))


def compared(
    args: Arguments, console: Console, profile: Profile, cluster: Cluster, request: Request, answer: Plan
) -> tuple[Consistency, Staleness | None]:
    """Comparison of disciplines of consistency, and those of the staleness curves stored beside profiles that it uses.

    Raises:
        UsageError: there is only one worker.
    """
    from asa.strategies import offered

    named = Path(args.model) if args.model is not None and places.looks_like_file(args.model) else None
    curves = [curve for _, curve in places.staleness(console, named)] if args.target is not None else []
    table = compare(
        profile, cluster, offered(), request, answer, loosely=args.consistency == "any", target=args.target,
        curves=curves,
    )  # fmt: skip
    used = curves_for(curves, profile, request)
    devices = [answer.num_ranks, *([request.gpus] * (len(table.rows) - 1))]  # the plan comes first, and may use fewer
    rows = (_priced(row, args.price, count) for row, count in zip(table.rows, devices, strict=True))
    return replace(table, rows=tuple(rows)), used if isinstance(used, Staleness) else None
