"""Disciplines of consistency asked for by name: plain data parallelism, and who waits for whom.

They change what training converges to, so none is ever chosen among other strategies: it is the only one asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from asa.errors import UsageError
from asa.ir.consistency import CHANGES, WAITS_FOR, Discipline, is_discipline, parse
from asa.ir.plan import Plan
from asa.planner.space.request import Request


def asked(request: Request) -> Discipline | None:
    """The discipline that is asked for by name, if one is.

    Raises:
        UsageError: it is one of several strategies, or needs more ranks than there are.
    """
    wanted = request.strategies or ()
    named = [s for s in wanted if is_discipline(s)]
    if not named:
        return None
    if len(wanted) > 1:
        raise UsageError(
            f"{named[0]} changes what training converges to and is not chosen among {len(wanted)} strategies; ask for "
            f"--strategies {named[0]} alone, or compare them with asa bench"
        )
    return parse(named[0])


def planned(discipline: Discipline, request: Request, solve: Callable[[Request], list[Plan]]) -> list[Plan]:
    """Plans of ``request`` under ``discipline``: those of its workers that ``solve`` finds for plain data
    parallelism, and the discipline."""
    workers = discipline.workers(request.gpus)
    plain = solve(replace(request, strategies=("ddp" if workers > 1 else "single",), gpus=workers))
    return [disciplined(p, discipline, request.gpus) for p in plain]


def disciplined(plain: Plan, discipline: Discipline, gpus: int) -> Plan:
    """``plain`` data parallelism under ``discipline``, with ranks of their own for servers that are to have some."""
    name = discipline.name
    notes: tuple[str, ...] = (f"{name}: {WAITS_FOR[name]}", f"what changes: {CHANGES[name]}")
    priced = next((b.step_time_s for b in plain.baselines if b.name == name and b.step_time_s), None)
    prediction = plain.prediction
    if priced is not None:
        spread = priced / prediction.step_time_s if prediction.step_time_s else 1.0
        prediction = replace(
            prediction,
            step_time_s=priced,
            step_time_low_s=prediction.step_time_low_s * spread,
            step_time_high_s=prediction.step_time_high_s * spread,
            exposed_communication_s=max(0.0, priced - prediction.compute_s - prediction.bubble_s),
            samples_per_s=plain.global_batch / priced,
        )
    else:
        notes = (*notes, "the step time is that of ddp: what waiting less often saves is not in it")
    certificate = replace(plain.certificate, space=f"{discipline} alone: it was asked for by name")
    return replace(
        plain,
        strategy=str(discipline),
        gpus=gpus,
        prediction=prediction,
        certificate=certificate,
        notes=(*plain.notes, *notes),
        consistency=discipline,
    )
