"""Page of a plan that needs no network: its components, where time goes, the search, and comparisons."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from asa.ir import codec
from asa.ir.plan import Plan
from asa.planner.questions.explain import Difference, Explanation
from asa.planner.questions.frontier import CostPoint, Frontier, MemoryPoint
from asa.report.figures import plan as plan_drawing
from asa.report.figures.charts import Chart
from asa.report.figures.drawing import Row
from asa.report.pages import bench as page
from asa.report.text import plan as words
from asa.report.text.explain import communicates, computes
from asa.report.text.tables import plain, short
from asa.report.units import seconds, size


def write(
    plan: Plan, folder: Path, explanation: Explanation | None = None, other: Difference | None = None,
    curves: Frontier | None = None, more: Sequence[Chart] = (),
) -> Path:  # fmt: skip
    """Write ``report.html``, with ``plan.json`` and ``figures/`` beside it, and ``more`` figures; returns the page's
    path."""
    codec.save(plan, folder / "plan.json")
    shown = (*charts(plan, explanation, other, curves), *more)
    figures = [(c, page.draw(c, folder / "figures")[1]) for c in shown]
    path = folder / "report.html"
    codec.write(html(plan, figures), path)
    return path


def html(plan: Plan, figures: list[tuple[Chart, str]]) -> str:
    """The page; ``figures`` contains the figures with their inline SVG."""
    summary = plain([words.headline(plan), *words.standing(plan)], width=1000)
    sentences = [re.sub(r" {2,}", ": ", text) for text in summary.splitlines()]
    first, *others = figures
    links = [(f"{c.name}-title", c.title) for c, _ in figures] + [("strategies", "Whole strategies")]
    rows = [
        ("asa" if b is None else "" if b.fits else "missing",
         (plan.strategy if b is None else b.name,
          seconds(plan.prediction.step_time_s if b is None else b.step_time_s),
          size(max(plan.prediction.memory_bytes_per_rank) if b is None else b.memory_bytes_max),
          "yes" if b is None or b.fits else b.why_not or "no"))
        for b in (None, *plan.baselines)
    ]  # fmt: skip
    return "\n".join(
        [
            page.head(f"asa plan: {plan.model_spec}"),
            f"<h1>{escape(sentences[0])}</h1>",
            "<ul>", *(f"<li>{escape(text)}</li>" for text in sentences[1:] if text), "</ul>",
            page.figure(*first, "plan.json"),
            page.contents(links),
            *(page.figure(c, svg, "plan.json") for c, svg in others),
            '<h2 id="strategies">Whole strategies</h2>',
            page.html_table("This plan and whole strategies, predicted", ("strategy", "step", "memory", "fits"), rows),
            "</main></body></html>\n",
        ]
    )  # fmt: skip


def charts(
    plan: Plan, explanation: Explanation | None = None, other: Difference | None = None, curves: Frontier | None = None
) -> tuple[Chart, ...]:
    """Figures of the plan, as far as known: network, time per component, another plan, search, time against memory and
    cost."""
    figures = [network(plan, explanation)]
    figures += [component_times(explanation)] if explanation is not None else []
    figures += [comparison(other)] if other is not None and other.other_s is not None else []
    figures += [search(plan)] if len(plan.certificate.curve or ()) > 1 else []
    figures.append(trade(plan, curves.memory if curves is not None else ()))
    figures += [cost(curves.cost)] if curves is not None and curves.cost else []
    return tuple(figures)


def network(plan: Plan, explanation: Explanation | None = None) -> Chart:
    """Components in the order of the data, coloured by assignment."""
    times = _times(explanation) if explanation is not None else {}
    total = sum(a + b for a, b in times.values())
    rows: list[Row] = [
        (i, c.name, short(c), c.stage, sum(times[c.name]) / total if c.name in times and total else None)
        for i, c in enumerate(plan.components)
    ]
    return Chart(
        name="network",
        title="Strategy of every component",
        caption="Components in the order of the data, with their share of the work of a step if it is known. Colour: "
        "how each one runs. A red arrow leads to the next stage.",
        columns=("index", "component", "runs_as", "stage", "share"),
        rows=tuple(rows),
        draw=plan_drawing.network,
    )


def _times(explanation: Explanation) -> dict[str, tuple[float, float]]:
    """Seconds computing and communicating, by component."""
    return {c.name: (computes(c), communicates(c)) for c in explanation.components}


def component_times(explanation: Explanation) -> Chart:
    """Seconds of a step per component on the busiest rank."""
    return Chart(
        name="component_times",
        title="Time per component",
        caption="Predicted for the busiest rank. Communication may overlap with computation.",
        columns=("component", "compute_s", "communicate_s"),
        rows=tuple((name, *pair) for name, pair in _times(explanation).items()),
        draw=plan_drawing.component_times,
    )


def search(plan: Plan) -> Chart:
    """The best plan and the lower bound over the time of the search."""
    return Chart(
        name="search",
        title="Course of the search",
        caption="Where the lines meet, the plan is proved optimal in its space.",
        columns=("seconds", "best_s", "lower_bound_s"),
        rows=tuple((p.seconds, p.best_s, p.lower_bound_s) for p in plan.certificate.curve or ()),
        draw=plan_drawing.search,
    )


def trade(plan: Plan, points: Sequence[MemoryPoint] = ()) -> Chart:
    """Step time against memory: the plan, whole strategies, and the frontier if known."""
    p = plan.prediction
    rows: list[Row] = [("plan", "this plan", max(p.memory_bytes_per_rank), p.step_time_s)]
    rows += [
        ("strategy", b.name, b.memory_bytes_max, b.step_time_s)
        for b in plan.baselines
        if b.fits and b.step_time_s is not None and b.memory_bytes_max
    ]
    rows += [("frontier", m.changed, m.memory_bytes_max, m.step_time_s) for m in points]
    return Chart(
        name="trade",
        title="Time against memory",
        caption="Further left and lower is better. The star is the plan."
        + (" The line: the fastest plan for each amount of memory." * bool(points)),
        columns=("kind", "name", "memory_bytes", "step_s"),
        rows=tuple(rows),
        draw=plan_drawing.trade,
    )


def cost(points: Sequence[CostPoint]) -> Chart:
    """Time and cost of an epoch on increasing numbers of devices."""
    rows = [(p.gpus, p.epoch_s, p.epoch_cost, p.on_frontier) for p in points if p.epoch_s and p.epoch_cost is not None]
    return Chart(
        name="cost",
        title="Time against cost of an epoch",
        caption="Each point is a number of devices. Filled: no other number is both as fast and as cheap.",
        columns=("devices", "epoch_s", "cost", "on_frontier"),
        rows=tuple(rows),
        draw=plan_drawing.cost,
    )


def comparison(difference: Difference) -> Chart:
    """The step of the plan and of another one, term by term."""
    rows: list[Row] = [("term", "this plan", difference.other)]
    rows += [(t.name, t.plan_s, t.other_s) for t in difference.terms]
    return Chart(
        name="beside",
        title=f"This plan compared with {difference.other}",
        caption=f"Predicted parts of a step: {seconds(difference.plan_s)} in all here, "
        f"{seconds(difference.other_s)} there.",
        columns=("term", "plan_s", "other_s"),
        rows=tuple(rows),
        draw=plan_drawing.comparison,
    )
