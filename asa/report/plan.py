"""A plan, for reading: who runs how, what that should cost, how sure that is, and every baseline beside it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from asa.ir.plan import Assignment, Baseline, Plan, Trial
from asa.report.tables import groups, line, runs, short, table
from asa.report.units import NOTHING, error, percent, rate, seconds, size

_POINTS = 5
"""Most points shown of the curve of a search."""


def render(plan: Plan) -> list[RenderableType]:
    """The whole plan."""
    return [
        headline(plan),
        line(""),
        assignments(plan),
        line(""),
        baselines(plan),
        line(""),
        prediction(plan),
        certificate(plan),
        *search(plan),
        *doubt(plan),
        *measured(plan),
        *(line(f"note: {n}") for n in plan.notes),
    ]


def headline(plan: Plan) -> RenderableType:
    """What is planned, on what, for which batch."""
    where = f"{plan.gpus} device{'s' if plan.gpus > 1 else ''}"
    if plan.num_ranks < plan.gpus:
        where = f"{plan.num_ranks} of {where}"
    return line(
        f"{plan.model_spec} on {where} ({plan.device_type}, {plan.cluster}), global batch {plan.global_batch}, "
        f"{plan.precision}, {plan.optimizer}, strategy {plan.strategy}"
        + (f", gradients as {plan.compression}" if plan.compression != "none" else ""),
        "bold",
    )


def assignments(plan: Plan) -> RenderableType:
    """Components with the same assignment share a line."""
    away = any(c.offload for c in plan.components)
    made = table("Assignment", ("components", "data", "tensor", "stage", "checkpoint", *["offload"] * away), left=3)
    for first, names in groups(plan.components):
        made.add_row(
            runs(names),
            "whole batch" if first.data.degree == 1 else first.data.text,
            _degree(first.tensor.strategy, first.tensor.degree, "whole weights"),
            str(first.stage),
            "yes" if first.checkpoint else "no",
            *["yes" if first.offload else "no"] * away,
        )
    return made


def baselines(plan: Plan) -> RenderableType:
    """Every whole strategy beside the plan, fastest first, with what it would cost and whether it fits."""
    made = table("Predicted", ("strategy", "step", "against plan", "memory per rank", "fits"), left=1)
    best = plan.prediction.step_time_s
    here = Baseline(
        name=f"this plan ({plan.strategy})",
        step_time_s=best,
        memory_bytes_max=max(plan.prediction.memory_bytes_per_rank),
        fits=True,
    )
    for b in sorted((here, *plan.baselines), key=_rank):
        made.add_row(
            b.name,
            seconds(b.step_time_s),
            NOTHING if b is here else error(b.step_time_s, best),
            size(b.memory_bytes_max),
            "yes" if b.fits else f"no: {b.why_not}" if b.why_not else "no",
            style="bold" if b is here else "" if b.fits else "dim",
        )
    return made


def prediction(plan: Plan) -> RenderableType:
    """The prediction with its interval, and what it is made of."""
    p = plan.prediction
    return line(
        f"step {seconds(p.step_time_s)} (90 %: {seconds(p.step_time_low_s)} to {seconds(p.step_time_high_s)}), "
        f"{rate(p.samples_per_s)}: compute {seconds(p.compute_s)} (update {seconds(p.update_s)}), communication "
        f"{seconds(p.exposed_communication_s)} exposed and {seconds(p.hidden_communication_s)} hidden, "
        f"bubble {seconds(p.bubble_s)}"
    )


def doubt(plan: Plan) -> list[RenderableType]:
    """What uncertain costs leave of the certificate."""
    c = plan.confidence
    if c is None or c.finalists < 2 or plan.measured is not None:
        return []
    return [
        line(
            f"the best of {c.finalists} finalists, or within 1 % of it, with probability {percent(c.p_best)}, expected "
            f"regret {percent(c.expected_regret)} ({c.draws} joint draws of the errors of costs)"
        )
    ]


def measured(plan: Plan) -> list[RenderableType]:
    """What the finalists took where they were run against each other, and what that changed."""
    m = plan.measured
    if m is None:
        return []
    columns = ("finalist", "predicted", "step", "10 to 90 %", "turns", "P(best) before", "and after")
    made = table("Measured", columns, left=1)
    names: dict[Trial, str] = {}
    for t in m.trials:
        same = sum(x.strategy == t.strategy for x in names)
        names[t] = f"{t.strategy} ({same + 1})" if same else t.strategy
    for t in sorted(m.trials, key=lambda t: t.step_time_s.median if t.step_time_s else float("inf")):
        s = t.step_time_s
        made.add_row(
            names[t],
            seconds(t.predicted_s),
            seconds(s.median if s else None),
            f"{seconds(s.p10)} to {seconds(s.p90)}" if s else NOTHING,
            str(s.n if s else 0),
            percent(t.p_best_before),
            percent(t.p_best_after),
            style="bold" if s == m.step_time_s else "",
        )
    where = f"{m.num_devices} x {m.device_name}" + (f" on {m.cpu_cores} cores" if m.device_type == "cpu" else "")
    return [
        line(""),
        made,
        line(
            f"measured {seconds(m.step_time_s.median)} a step (prediction "
            f"{error(plan.prediction.step_time_s, m.step_time_s.median)}) over {m.step_time_s.n} steps, {m.created}, "
            f"{where}, torch {m.torch_version}; {seconds(m.seconds)} for all finalists"
        ),
        line(
            f"P(best) {percent(m.before.p_best)} before and {percent(m.after.p_best)} after measuring; expected regret "
            f"{percent(m.before.expected_regret)} before and {percent(m.after.expected_regret)} after"
        ),
    ]


def certificate(plan: Plan) -> RenderableType:
    """How far from optimal the plan can be."""
    c = plan.certificate
    return line(
        f"certificate: {c.status}, no plan in the space is faster than {seconds(c.lower_bound_s)} "
        f"(gap {percent(c.gap)}); {c.solver}, {seconds(c.solve_s)}; space: {c.space}"
    )


def search(plan: Plan) -> list[RenderableType]:
    """How the search came to its plan and to its bound, in at most five points."""
    curve = plan.certificate.curve or ()
    if len(curve) < 2:
        return []
    shown = (
        [curve[round(k * (len(curve) - 1) / (_POINTS - 1))] for k in range(_POINTS)] if len(curve) > _POINTS else curve
    )
    points = (
        f"{seconds(p.best_s) if p.best_s is not None else 'nothing'} against {seconds(p.lower_bound_s)} "
        f"after {seconds(p.seconds)}"
        for p in shown
    )
    return [line(f"search, best against bound: {'; '.join(points)}")]


def several(plans: Sequence[Plan]) -> RenderableType:
    """The best plans side by side. What they are goes last: it folds where it is long, and numbers stay in sight."""
    made = table("Best plans", ("plan", "step", "against best", "memory per rank", "schedule"), left=1)
    made.add_column("assignment", overflow="fold")
    for i, p in enumerate(plans):
        made.add_row(
            str(i + 1),
            seconds(p.prediction.step_time_s),
            NOTHING if i == 0 else error(p.prediction.step_time_s, plans[0].prediction.step_time_s),
            size(max(p.prediction.memory_bytes_per_rank)),
            p.schedule if p.num_microbatches == 1 else f"{p.schedule} x{p.num_microbatches}",
            summary(p.components),
        )
    return made


def summary(components: Sequence[Assignment]) -> str:
    """All assignments on one line."""
    return "; ".join(f"{runs(names)}: {short(first)}" for first, names in groups(components))


def _rank(b: Baseline) -> tuple[bool, float]:
    return (not b.fits, b.step_time_s if b.step_time_s is not None else float("inf"))


def _degree(strategy: str, degree: int, alone: str) -> str:
    return alone if degree == 1 and strategy in ("replicate", "none") else f"{strategy} x{degree}"
