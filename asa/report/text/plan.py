"""Text of a plan: assignment of components, cost, confidence, and comparison with every baseline."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from rich.console import RenderableType

from asa.ir.plan import KEPT_OUT, TOO_SLOW, Assignment, Baseline, Plan, Trial
from asa.ir.units import figures
from asa.report.text.tables import groups, line, runs, short, table
from asa.report.units import NOTHING, between, error, percent, rate, seconds, size

_POINTS = 5
"""Largest number of points of a search's curve that are shown."""
_PROVED = 1e-6
"""Gap that counts as zero."""
_ROWS, _NAMES, _BAR = 8, 4, 12
"""Largest number of whole strategies shown without ``-v``, of names of others, and of characters of a bar for a whole
step."""
_DEGREE = re.compile(r"([dtp])(\d+)")
_GRID = re.compile(r"(?<=:)([dtp]\d+)+")
_AXES = {"d": "shares of the batch", "t": "slices of tensors", "p": "pipeline stages"}
"""Abbreviations in names such as ``hybrid:d4t2``."""
_LEAST_AGAIN = "hybrid+ckpt"
"""The best uniform plan, which computes as little again as memory permits, often nothing."""


def render(plan: Plan, *, verbose: bool = False, shares: Sequence[float] = ()) -> list[RenderableType]:
    """The plan, its comparison and confidence, its components, and the best whole strategies.

    ``shares``: of a step, per component, if known. ``verbose``: every strategy with its refusal, the parts of the step,
    the space of the certificate and the course of the search.
    """
    blocks: list[RenderableType] = [headline(plan), *standing(plan), line("")]
    blocks += [assignments(plan, shares), line(""), *baselines(plan, verbose=verbose)]
    if verbose:
        blocks += [line(""), prediction(plan), certificate(plan), *search(plan), *doubt(plan)]
    return [*blocks, *measured(plan), *(line(f"note: {n}") for n in notes(plan))]


def notes(plan: Plan) -> tuple[str, ...]:
    """Notes of a plan, without the predicted gain over whole strategies, which screens and pages show by themselves."""
    return tuple(n for n in plan.notes if " faster than the best whole strategy, " not in n)


def headline(plan: Plan) -> RenderableType:
    """Model, devices, batch, size of an input and settings, in one line."""
    devices = f"{plan.gpus} x {plan.device_type}"
    if plan.num_processes < plan.gpus:
        devices = f"{plan.num_processes} of {devices}"
    if plan.groups > 1:
        devices += f" in {plan.groups} groups"
    return line(
        f"{plan.model_spec} on {devices} ({plan.cluster}, {plan.origin}), batch {plan.global_batch} of {_input(plan)}, "
        f"{plan.precision}, {plan.optimizer}"
        + (f", gradients as {plan.compression}" if plan.compression != "none" else ""),
        "bold",
    )


def _input(plan: Plan) -> str:
    """Size of one input: height and width of an image, or the number of tokens or of other values."""
    shape = plan.input_shape
    if len(shape) == 3 and shape[1] > 1:
        return "x".join(map(str, shape[1:]))
    return f"{prod(shape)} {'tokens' if len(shape) == 1 else 'numbers'}"


def standing(plan: Plan) -> list[RenderableType]:
    """Four lines: the plan's predicted values, what it is faster than, the proof, and the confidence."""
    p, c, sure = plan.prediction, plan.certificate, plan.confidence
    lines = [
        f"Plan     {seconds(p.step_time_s)} a step (90 %: {between(p.step_time_low_s, p.step_time_high_s)}), "
        f"{figures(p.samples_per_s)} samples/s, "
        f"{size(max(p.memory_bytes_per_rank))} a rank",
        f"Against  {_against(plan)}",
    ]
    if c.gap <= _PROVED:
        lines.append(f"Proof    optimal in {seconds(c.solve_s)}: nothing in the space is faster")
    else:
        saving = f"at most {percent(c.gap)}" if c.gap >= 0.0005 else "less than 0.1 %"
        lines.append(f"Proof    {c.status} after {seconds(c.solve_s)}: {saving} could be saved")
    if sure is not None and sure.finalists > 1 and plan.measured is None:
        lines.append(f"Doubt    {100 * sure.p_best:.0f} % that it is the best of {sure.finalists}, or within 1 % of it")
    return [line(text) for text in lines]


def _against(plan: Plan) -> str:
    """Text on how much faster the plan is than the best whole strategy and than plain data parallelism."""
    step = plan.prediction.step_time_s
    times = {b.name: b.step_time_s for b in plan.baselines if b.fits and b.step_time_s is not None}
    if not times:
        pinned = any(b.why_not == KEPT_OUT for b in plan.baselines)
        return "no whole strategy keeps to the pins" if pinned else "no whole strategy fits"
    name = min(times, key=lambda n: (times[n], n == "hybrid"))
    texts = [f"{_faster(times[name], step)} {name} (best whole strategy)"]
    if "ddp" in times and name != "ddp":
        texts.append(f"{_faster(times['ddp'], step)} ddp")
    elif "ddp" not in times and plan.gpus > 1:
        ddp = next((b for b in plan.baselines if b.name == "ddp"), None)
        pinned = ddp is not None and ddp.why_not == KEPT_OUT
        too_large = ddp is not None and ddp.step_time_s is not None
        texts.append(
            f"ddp is {KEPT_OUT}" if pinned else "ddp does not fit" if too_large else "ddp is not possible here"
        )
    return ", ".join(texts)


def _faster(other_s: float, step_s: float) -> str:
    gain = 1 - step_s / other_s
    return "as fast as" if abs(gain) < 5e-4 else f"{percent(abs(gain))} {'faster' if gain > 0 else 'slower'} than"


def assignments(plan: Plan, shares: Sequence[float] = ()) -> RenderableType:
    """Table of assignments; components with the same one share a line, with their share of the step if known."""
    staged = len(plan.stages) > 1
    result = table("", ("components", "runs as", *["stage"] * staged), left=2)
    if shares:
        result.add_column("of the step", justify="left", no_wrap=True, overflow="crop")
    at = 0
    for first, names in groups(plan.components):
        part = sum(shares[at : at + len(names)])
        at += len(names)
        cells = [runs(names), short(first), *[str(first.stage)] * staged]
        if shares:
            cells.append(f"{100 * part:3.0f} % {'#' * round(_BAR * part)}")
        result.add_row(*cells)
    result.title = None
    return result


def baselines(plan: Plan, *, verbose: bool = False) -> list[RenderableType]:
    """Whole strategies beside the plan, fastest first: the best ones, with equal ones joined.

    ``verbose``: all of them, with the reason for each that does not fit.
    """
    best = plan.prediction.step_time_s
    this_plan = Baseline(
        name="this plan", step_time_s=best, memory_bytes_max=max(plan.prediction.memory_bytes_per_rank), fits=True
    )
    order = sorted((this_plan, *plan.baselines), key=_rank)
    rows = [[b] for b in order] if verbose else _joined([b for b in order if b.fits and not _on_request(b)])
    shown = rows if verbose else _shown(rows, this_plan)
    result = table("", ("strategy", "step", "against", "memory", *["fits"] * verbose), left=1)
    result.title = None
    if verbose:
        result.columns[-1].justify = "left"
    for equals in shown:
        b = equals[0]
        cells = [
            " = ".join(x.name for x in equals),
            seconds(b.step_time_s),
            NOTHING if b is this_plan else error(b.step_time_s, best),
            size(b.memory_bytes_max),
        ]
        if verbose:
            is_request = b.why_not.startswith("not chosen")
            cells.append("yes" if b.fits else b.why_not if is_request else f"no: {b.why_not}" if b.why_not else "no")
        result.add_row(*cells, style="bold" if this_plan in equals else "" if b.fits else "dim")
    folded = [] if verbose else _folded(plan, len(rows) - len(shown))
    return [result, *_legend([b.name for equals in shown for b in equals]), *folded]


def _legend(names: Sequence[str]) -> list[RenderableType]:
    """One line on the abbreviations among shown names of strategies."""
    texts = []
    if any(name.endswith("+ckpt") for name in names if name != _LEAST_AGAIN):
        texts.append("+ckpt: activations are computed again in backward")
    if _LEAST_AGAIN in names:
        texts.append(f"{_LEAST_AGAIN}: computed again only where memory requires it")
    grid = next((found for name in names if (found := _GRID.search(name))), None)
    if grid is not None:
        texts.append(f"{grid[0]}: {' x '.join(f'{number} {_AXES[axis]}' for axis, number in _DEGREE.findall(grid[0]))}")
    return [line("; ".join(texts), "dim")] if texts else []


def _joined(order: Sequence[Baseline]) -> list[list[Baseline]]:
    """Strategies with equal time and memory, grouped."""
    rows: list[list[Baseline]] = []
    for b in order:
        if rows and (rows[-1][0].step_time_s, rows[-1][0].memory_bytes_max) == (b.step_time_s, b.memory_bytes_max):
            rows[-1].append(b)
        else:
            rows.append([b])
    return rows


def _shown(rows: list[list[Baseline]], this_plan: Baseline) -> list[list[Baseline]]:
    """The fastest rows; always including the plan, plain data parallelism and the single device."""
    ids = {id(r) for r in rows if any(b is this_plan or b.name in ("ddp", "single") for b in r)}
    for r in rows:
        if len(ids) < _ROWS:
            ids.add(id(r))
    return [r for r in rows if id(r) in ids]


def _folded(plan: Plan, more: int) -> list[RenderableType]:
    """One line on what the short table leaves out."""
    run = [b for b in plan.baselines if not _on_request(b)]
    texts = [f"{more} more"] if more else []
    for reason, names in (
        (KEPT_OUT, [b.name for b in run if b.why_not == KEPT_OUT]),
        ("too large", [b.name for b in run if not b.fits and b.step_time_s is not None and b.why_not != KEPT_OUT]),
        (TOO_SLOW, [b.name for b in run if b.why_not == TOO_SLOW]),
        ("not possible here", [b.name for b in run if not b.fits and b.step_time_s is None and b.why_not != TOO_SLOW]),
        ("only on request", [b.name for b in plan.baselines if _on_request(b)]),
    ):
        rest = f" and {len(names) - _NAMES} others" if len(names) > _NAMES else ""
        texts += [f"{reason}: {', '.join(names[:_NAMES])}{rest}"] if names else []
    return [line(f"-v shows: {'; '.join(texts)}", "dim")] if texts else []


def _on_request(b: Baseline) -> bool:
    """Whether a strategy is shown as a baseline of every plan but only chosen if the user names it."""
    return b.name.startswith("ps_")


def prediction(plan: Plan) -> RenderableType:
    """The prediction with its interval and its parts."""
    p = plan.prediction
    return line(
        f"step {seconds(p.step_time_s)} (90 %: {between(p.step_time_low_s, p.step_time_high_s)}), "
        f"{rate(p.samples_per_s)}: compute {seconds(p.compute_s)} (update {seconds(p.update_s)}), communication "
        f"{seconds(p.exposed_communication_s)} exposed and {seconds(p.hidden_communication_s)} hidden, "
        f"bubble {seconds(p.bubble_s)}"
    )


def doubt(plan: Plan) -> list[RenderableType]:
    """Confidence in the plan under uncertain costs."""
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
    """Measurements of the finalists, if they were run against each other, and what these changed."""
    m = plan.measured
    if m is None:
        return []
    columns = ("finalist", "predicted", "step", "10 to 90 %", "turns", "P(best) before", "and after")
    result = table("Measured", columns, left=1)
    names: dict[Trial, str] = {}
    for t in m.trials:
        same = sum(x.strategy == t.strategy for x in names)
        names[t] = f"{t.strategy} ({same + 1})" if same else t.strategy
    for t in sorted(m.trials, key=lambda t: t.step_time_s.median if t.step_time_s else float("inf")):
        s = t.step_time_s
        result.add_row(
            names[t],
            seconds(t.predicted_s),
            seconds(s.median if s else None),
            f"{seconds(s.p10)} to {seconds(s.p90)}" if s else NOTHING,
            str(s.n if s else 0),
            percent(t.p_best_before),
            percent(t.p_best_after),
            style="bold" if s == m.step_time_s else "",
        )
    machine = f"{m.num_devices} x {m.device_name}" + (f" on {m.cpu_cores} cores" if m.device_type == "cpu" else "")
    return [
        line(""),
        result,
        line(
            f"measured {seconds(m.step_time_s.median)} a step (prediction "
            f"{error(plan.prediction.step_time_s, m.step_time_s.median)}) over {m.step_time_s.n} steps, {m.created}, "
            f"{machine}, torch {m.torch_version}; {seconds(m.seconds)} for all finalists"
        ),
        line(
            f"P(best) {percent(m.before.p_best)} before and {percent(m.after.p_best)} after measuring; expected regret "
            f"{percent(m.before.expected_regret)} before and {percent(m.after.expected_regret)} after"
        ),
    ]


def certificate(plan: Plan) -> RenderableType:
    """The proved distance from the optimum."""
    c = plan.certificate
    return line(
        f"certificate: {c.status}, no plan in the space is faster than {seconds(c.lower_bound_s)} "
        f"(gap {percent(c.gap)}); {c.solver}, {seconds(c.solve_s)}; space: {c.space}"
    )


def search(plan: Plan) -> list[RenderableType]:
    """Progress of the search for plan and bound, in at most five points."""
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
    """The best plans side by side. The assignment comes last, because it wraps if it is long."""
    result = table("Best plans", ("plan", "step", "against best", "memory per rank", "schedule"), left=1)
    result.add_column("assignment", overflow="fold")
    for i, p in enumerate(plans):
        result.add_row(
            str(i + 1),
            seconds(p.prediction.step_time_s),
            NOTHING if i == 0 else error(p.prediction.step_time_s, plans[0].prediction.step_time_s),
            size(max(p.prediction.memory_bytes_per_rank)),
            p.schedule if p.num_microbatches == 1 else f"{p.schedule} x{p.num_microbatches}",
            summary(p.components),
        )
    return result


def summary(components: Sequence[Assignment]) -> str:
    """All assignments on one line."""
    return "; ".join(f"{runs(names)}: {short(first)}" for first, names in groups(components))


def _rank(b: Baseline) -> tuple[bool, float]:
    return (not b.fits, b.step_time_s if b.step_time_s is not None else float("inf"))
