"""A plan, for reading: who runs how, what that should cost, how sure that is, and every baseline beside it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from asa.ir.plan import Assignment, Baseline, Plan
from asa.report.tables import groups, line, runs, short, table
from asa.report.units import NOTHING, error, percent, rate, seconds, size


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
        *doubt(plan),
        *(line(f"note: {n}") for n in plan.notes),
    ]


def headline(plan: Plan) -> RenderableType:
    """What is planned, on what, for which batch."""
    where = f"{plan.num_ranks} of {plan.gpus} devices" if plan.num_ranks < plan.gpus else f"{plan.gpus} devices"
    return line(
        f"{plan.model_spec} on {where} ({plan.device_type}, {plan.cluster}), global batch {plan.global_batch}, "
        f"{plan.precision}, {plan.optimizer}, strategy {plan.strategy}",
        "bold",
    )


def assignments(plan: Plan) -> RenderableType:
    """Components with the same assignment share a line."""
    made = table("Assignment", ("components", "data", "tensor", "stage", "checkpoint"), left=3)
    for first, names in groups(plan.components):
        made.add_row(
            runs(names),
            _degree(first.data.strategy, first.data.degree, "whole batch"),
            _degree(first.tensor.strategy, first.tensor.degree, "whole weights"),
            str(first.stage),
            "yes" if first.checkpoint else "no",
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
    if c is None or c.finalists < 2:
        return []
    return [
        line(
            f"the best of {c.finalists} finalists with probability {percent(c.p_best)}, expected regret "
            f"{percent(c.expected_regret)} ({c.draws} joint draws of the errors of costs)"
        )
    ]


def certificate(plan: Plan) -> RenderableType:
    """How far from optimal the plan can be."""
    c = plan.certificate
    return line(
        f"certificate: {c.status}, no plan in the space is faster than {seconds(c.lower_bound_s)} "
        f"(gap {percent(c.gap)}); {c.solver}, {seconds(c.solve_s)}; space: {c.space}"
    )


def several(plans: Sequence[Plan]) -> RenderableType:
    """The best plans side by side."""
    made = table("Best plans", ("plan", "assignment", "step", "against best", "memory per rank"), left=2)
    for i, p in enumerate(plans):
        made.add_row(
            str(i + 1),
            "; ".join(f"{runs(names)}: {short(first)}" for first, names in groups(p.components)),
            seconds(p.prediction.step_time_s),
            NOTHING if i == 0 else error(p.prediction.step_time_s, plans[0].prediction.step_time_s),
            size(max(p.prediction.memory_bytes_per_rank)),
        )
    return made


def summary(components: Sequence[Assignment]) -> str:
    """All assignments on one line."""
    return "; ".join(f"{runs(names)}: {short(first)}" for first, names in groups(components))


def _rank(b: Baseline) -> tuple[bool, float]:
    return (not b.fits, b.step_time_s if b.step_time_s is not None else float("inf"))


def _degree(strategy: str, degree: int, alone: str) -> str:
    return alone if degree == 1 and strategy in ("replicate", "none") else f"{strategy} x{degree}"
