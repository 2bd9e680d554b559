"""Text of sealed predictions compared with measurements, failures included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Any

from rich.console import RenderableType

from asa.ir.sealed import CheckedCell, SealedCheck
from asa.report.text.tables import line, table
from asa.report.units import NOTHING, error, percent, seconds, size

FAR = 0.1
"""Relative difference of two medians from which on their order counts."""


def render(check: SealedCheck) -> list[RenderableType]:
    """All cells, then the score; one line if there are no predictions for this machine."""
    environment = check.environment
    machine = f"{environment.num_devices} x {environment.device_name} ({environment.device_type})"
    if not check.cells:
        return [
            line(
                f"none of {check.sealed} sealed predictions is of a machine like this one, {machine}; they are of "
                f"{', '.join(check.machines)}"
            )
        ]
    columns = ("model", "strategy", "batch", "sealed", "predicted", "measured", "error", "in 90 %", "memory error")
    result = table(f"Sealed predictions on {machine}", columns, left=2)
    for c in check.cells:
        m = c.measured
        result.add_row(
            f"{c.model} at {'x'.join(map(str, c.input_shape))}",
            c.strategy,
            str(c.global_batch),
            c.sealed[:10],
            seconds(c.predicted_s),
            seconds(m.median) if m else f"failed: {c.why_not}",
            error(c.predicted_s, m.median) if m else NOTHING,
            ("yes" if inside(c) else "no") if m else NOTHING,
            error(c.predicted_memory_bytes, c.peak_memory_bytes) if c.peak_memory_bytes else size(None),
        )
    s = scores(check)
    return [
        result,
        line(""),
        line(
            f"{s['measured']} of {s['cells']} cells measured, {s['failed']} failed; mean absolute error "
            f"{percent(s['mape'])}, median error {percent(s['median_error'], signed=True)}; "
            f"{percent(s['coverage_90'])} in their 90 % intervals"
        ),
        line(
            f"order predicted correctly in {percent(s['order'])} of {s['order_pairs']} pairs that differ by more than "
            f"{percent(FAR)}; the plan predicted fastest costs {percent(s['regret_mean'])} over the fastest measured "
            f"on average, {percent(s['regret_worst'])} at worst; memory predicted too low in {s['memory_under']} cells"
        ),
    ]


def scores(check: SealedCheck) -> dict[str, Any]:
    """Numbers of the summary; None if no cell determines them."""
    cells = [c for c in check.cells if c.measured is not None]
    errors = [_error(c) for c in cells]
    ordered = list(_pairs(cells))
    regrets = [r for group in _contests(check.cells) if (r := _regret(group)) is not None]
    return {
        "cells": len(check.cells),
        "measured": len(cells),
        "failed": len(check.cells) - len(cells),
        "mape": fmean(map(abs, errors)) if errors else None,
        "median_error": median(errors) if errors else None,
        "coverage_90": fmean(map(inside, cells)) if cells else None,
        "order": fmean(ordered) if ordered else None,
        "order_pairs": len(ordered),
        "regret_mean": fmean(regrets) if regrets else None,
        "regret_worst": max(regrets, default=None),
        "memory_under": sum((c.peak_memory_bytes or 0) > c.predicted_memory_bytes for c in cells),
    }


def inside(cell: CheckedCell) -> bool:
    """Whether the measurement lies in the predicted interval."""
    return cell.measured is not None and cell.low_s <= cell.measured.median <= cell.high_s


def _error(cell: CheckedCell) -> float:
    assert cell.measured is not None
    return cell.predicted_s / cell.measured.median - 1


def _contests(cells: Sequence[CheckedCell]) -> list[list[CheckedCell]]:
    contests: dict[tuple[object, ...], list[CheckedCell]] = {}
    for c in cells:
        contests.setdefault((c.machine, c.model, c.input_shape, c.global_batch), []).append(c)
    return list(contests.values())


def _pairs(cells: Sequence[CheckedCell]) -> Iterator[bool]:
    for group in _contests(cells):
        for a, b in combinations(group, 2):
            assert a.measured is not None
            assert b.measured is not None
            first, second = a.measured.median, b.measured.median
            if max(first, second) > (1 + FAR) * min(first, second):
                yield (first < second) == (a.predicted_s < b.predicted_s)


def _regret(group: Sequence[CheckedCell]) -> float | None:
    """Regret of the cell predicted fastest; None if it could not be measured."""
    times = [c.measured.median for c in group if c.measured is not None]
    first = min(group, key=lambda c: c.predicted_s)
    return first.measured.median / min(times) - 1 if first.measured is not None else None
