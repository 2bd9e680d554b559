"""Page of a run that needs no network: step time with changes of plan and findings, prediction and measurement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from asa.ir import codec
from asa.ir.plan import Plan
from asa.report.figures import drawing
from asa.report.figures import plan as plan_drawing
from asa.report.figures.charts import Chart
from asa.report.figures.drawing import Row
from asa.report.pages import bench as page
from asa.report.pages import plan as plan_page
from asa.report.pages import steps
from asa.report.text.story import CHANGES, PREFIX, Story
from asa.report.units import percent, seconds


def write(
    story: Story, events: Iterable[Mapping[str, Any]], folder: Path, plan: Plan | None = None, name: str = "",
    trace: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write ``report.html`` with ``figures/`` beside it to ``folder``; returns the page's path. ``name`` is
    that of the run (default: that of the folder); ``trace``: its traced steps beside those planned."""
    drawn = [[(c, page.draw(c, folder / "figures")[1]) for c in figures]
             for figures in (charts(list(events), plan), steps.charts(trace or {"traceEvents": ()}))]  # fmt: skip
    path = folder / "report.html"
    codec.write(html(story, drawn[0], name or folder.name, drawn[1]), path)
    return path


def html(story: Story, drawings: list[tuple[Chart, str]], name: str, traced: Sequence[tuple[Chart, str]] = ()) -> str:
    """The page; ``drawings`` contains the figures with their inline SVG, ``traced`` those of traced steps."""
    first, *others = drawings
    items = [
        f"after step {h.step}{'' if h.epoch is None else f' (epoch {h.epoch + 1})'}: {PREFIX.get(h.kind, '')}{h.line}"
        for h in story.happenings
    ]
    stretches = [("", (f"{s.first_step} to {s.last_step}", s.plan, seconds(s.step_s))) for s in story.stretches]
    links = [(f"{c.name}-title", c.title) for c, _ in drawings]
    links += [("steps", "Plan beside run")] * bool(traced) + [("happened", "What happened")]
    return "\n".join(
        [
            page.head(f"asa train: {name}"),
            f"<h1>{escape(name)}</h1>",
            f'<p class="first">{escape(first_sentence(story))}</p>',
            page.figure(*first, "log.jsonl"),
            page.contents(links),
            *(page.figure(c, svg, "log.jsonl") for c, svg in others),
            *steps.section(traced),
            '<h2 id="happened">What happened</h2>',
            "<ul>",
            *(f"<li>{escape(text)}</li>" for text in items),
            "</ul>",
            page.html_table("Step time between findings and changes", ("steps", "plan", "step"), stretches),
            "</main></body></html>\n",
        ]
    )


def first_sentence(story: Story) -> str:
    """The model, number and mean time of steps, and number of changes of plan with their gain."""
    steps = max((s.last_step for s in story.stretches), default=0)
    subject = next((h.line.partition(";")[0] + ": " for h in story.happenings if h.kind == "start"), "")
    counts = [1 + s.last_step - s.first_step for s in story.stretches]
    spent_s = sum(n * s.step_s for n, s in zip(counts, story.stretches, strict=True))
    each = f" of {seconds(spent_s / sum(counts))}" if spent_s else ""
    slow = sum(h.kind == "finding" for h in story.happenings)
    changes = f"changed {_times(story.times_changed)}" if story.times_changed else "never changed"
    sentence = f"{subject}{steps} step{'s' * (steps != 1)}{each}; the plan was {changes}"
    won = [c.won_s for c in story.changes if c.won_s is not None]
    gains = [c.measured_gain for c in story.changes if c.measured_gain is not None]
    sentence += f", which measured {', '.join(percent(g, signed=True) for g in gains)} of a step" if gains else ""
    sentence += f" and won {seconds(sum(won))}" if won else ""
    return f"{sentence}; something became slow {_times(slow)}." if slow else f"{sentence}."


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def charts(events: list[Mapping[str, Any]], plan: Plan | None = None) -> tuple[Chart, ...]:
    """Figures of a run: step time first, then learning, memory of the last epoch, and the first plan."""
    figures = [timeline(events)]
    learning_chart = learning(events)
    figures += [learning_chart] if learning_chart.rows else []
    memory_chart = memory(events)
    figures += [memory_chart] if memory_chart.rows else []
    figures += [plan_page.network(plan)] if plan is not None else []
    return tuple(figures)


def timeline(events: Iterable[Mapping[str, Any]]) -> Chart:
    """Measured and predicted step time over the steps, with marks for changes of plan and findings."""
    rows: list[Row] = []
    step = 0
    for event in events:
        try:
            match event["event"]:
                case "steps":
                    step = int(event["step"])
                    rows.append(("measured", step, float(event["step_time_s"]), None))
                case "epoch":
                    step = int(event["step"])
                    predicted_s = float(event["measurements"]["predicted_step_time_s"])
                    if not any(row[0] == "expected" for row in rows):
                        rows.append(("expected", 0, predicted_s, None))
                    rows.append(("expected", step, predicted_s, None))
                case "replan" if event["kind"] in CHANGES:
                    rows.append(("change", step, None, str(event["why"])))
                case "finding":
                    rows.append(("finding", step, None, str(event["line"])))
                case _:
                    pass
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return Chart(
        name="timeline",
        title="Step time over the run",
        caption="Solid: measured, the mean since the last line of the log. Dashed: predicted by the plan at the end of "
        "each epoch. Vertical lines: a change of plan, or something that became slow; the list below describes them.",
        columns=("kind", "step", "step_s", "words"),
        rows=tuple(rows),
        draw=plan_drawing.step_times,
    )


def learning(events: Iterable[Mapping[str, Any]]) -> Chart:
    """The validation figure, by default accuracy, or the loss if there is none, after every epoch."""
    rows: list[Row] = []
    elapsed_s, metric = 0.0, "accuracy"
    for event in events:
        if event.get("event") == "start" and isinstance(event.get("settings"), dict):
            metric = str(event["settings"].get("metric", metric))
        if event.get("event") != "epoch":
            continue
        try:
            elapsed_s += float(event["seconds"])
            if event["validation_loss"] is None:
                continue
            figure = event["validation_accuracy"]
            rows.append(("after every epoch", "validation", int(event["epoch"]) + 1, elapsed_s,
                         float(event["train_loss"]), float(event["validation_loss"]),
                         None if figure is None else float(figure)))  # fmt: skip
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    has_figure = any(isinstance(r[6], int | float) and math.isfinite(r[6]) and r[6] != 0 for r in rows)
    return Chart(
        name="learning",
        title=f"Validation {metric if has_figure else 'loss'} over training time",
        caption="One point for each epoch, over the seconds of whole epochs.",
        columns=("panel", "strategy", "epoch", "seconds", "train_loss", "validation_loss", "validation_accuracy"),
        rows=tuple(rows),
        draw=partial(drawing.accuracy_over_time, metric=metric) if has_figure else drawing.loss,
    )


def memory(events: Iterable[Mapping[str, Any]]) -> Chart:
    """Predicted and measured memory of every rank in the last epoch."""
    last = None
    for event in events:
        if event.get("event") == "epoch" and isinstance(event.get("measurements"), Mapping):
            last = event["measurements"]
    rows: list[Row] = []
    if last is not None:
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            predicted = [int(p) for p in last["predicted_memory_bytes"]]
            peaks = last.get("peak_memory_bytes") or [None] * len(predicted)
            measured = [None if m is None else int(m) for m in peaks]
            rows = [(i, p, m) for i, (p, m) in enumerate(zip(predicted, measured, strict=False))]
    return Chart(
        name="rank_memory",
        title="Memory of every rank",
        caption="Bars: measured active peak. Diamonds: predicted.",
        columns=("rank", "predicted_bytes", "measured_bytes"),
        rows=tuple(rows),
        draw=plan_drawing.rank_memory,
    )
