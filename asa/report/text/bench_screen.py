"""A benchmark on a terminal: a few lines and a table of 80 columns, or everything."""

from __future__ import annotations

from rich.console import RenderableType

from asa.ir.bench import Bench, BenchResult
from asa.report.text.bench import COSTS, PRICED, TIMES, costs, learnt_by, machine, priced, sentences, throughput, times
from asa.report.text.tables import line, table
from asa.report.text.verdicts import against, busy, noise_of
from asa.report.units import NOTHING, percent, rate, seconds, size

AIM = 0.1
"""Relative error up to which a prediction counts as correct."""


def render(bench: Bench, *, verbose: bool = False) -> list[RenderableType]:
    """The fastest strategy and comparisons, accuracy of predictions, and noise; then one row per strategy.

    ``verbose``: also spreads, communication, every paired ratio, and the conditions of the measurement.
    """
    lines: list[RenderableType] = []
    for model in bench.settings.models:
        lines += [line(headline(bench, model), "bold"), *(line(text) for text in standing(bench, model)), line("")]
        lines += [*(_tables(bench, model) if verbose else [_brief(bench, model)]), line("")]
        lines += [*_costs(bench, model)]
        if verbose:
            lines += [line(text) for text in sentences(bench, model)]
        else:
            lines += [line(f"{r.strategy} was not measured: {r.why_not}") for r in bench.of(model) if not r.step_time_s]
    if verbose:
        lines += [line(f"data: {bench.settings.data_source}"), line(machine(bench))]
    lines += [line(f"note: {n}") for n in bench.notes]
    return lines if verbose else [*lines, line("-v shows spreads, communication, every paired ratio, versions", "dim")]


def headline(bench: Bench, model: str) -> str:
    """Model, devices, batch and settings, in one line."""
    e, s = bench.environment, bench.settings
    how = "nothing trained" if e.emulated else "measured"
    batch = next((r.global_batch for r in bench.of(model)), s.global_batch)
    return f"{model} on {e.num_devices} x {e.device_name}, batch {batch}, {s.precision}, {s.optimizer}, {how}"


def standing(bench: Bench, model: str) -> list[str]:
    """Lines on the fastest strategy, its comparisons, the accuracy of predictions, and the ratio that noise alone
    reaches."""
    timed = [r for r in bench.of(model) if r.step_time_s is not None]
    if not timed:
        return ["Fastest  nothing could be measured"]
    best = min(timed, key=lambda r: r.step_time_s.median if r.step_time_s else 0.0)
    assert best.step_time_s is not None
    step = best.step_time_s
    lines = [
        f"Fastest  {best.strategy} by median, {seconds(step.median)} a step (80 %: {seconds(step.p10)} to "
        f"{seconds(step.p90)}), {rate(throughput(best))}"
    ]
    noise, disturbed = noise_of(bench, model), busy(bench, model)
    pairs = [c for c in bench.comparisons if c.model == model and c.left != c.right]
    verdicts = [against(c, noise, disturbed=bool(disturbed)) for c in pairs]
    lines += [f"{'Against' if i == 0 else '':<8} {text}" for i, text in enumerate(verdicts)]
    errors = [r.predicted_step_time_s / r.step_time_s.median - 1 for r in timed
              if r.predicted_step_time_s and r.step_time_s and r.step_time_s.median]  # fmt: skip
    if errors:
        within = sum(abs(e) <= AIM for e in errors)
        lines.append(
            f"Promise  {within} of {len(errors)} steps within {100 * AIM:.0f} % of their prediction "
            f"({percent(min(errors), signed=True)} to {percent(max(errors), signed=True)})"
        )
    if noise is not None:
        lines.append(
            f"Noise    {noise.left} against itself: {noise.low:.3f} to {noise.high:.3f} in {noise.pairs} pairs; "
            "inside, none is faster"
        )
    lines += [f"{'Devices' if i == 0 else '':<8} {text}" for i, text in enumerate(filter(None, map(_devices, timed)))]
    return lines + ([f"Doubt    {disturbed}"] if disturbed else [])


def _devices(r: BenchResult) -> str:
    """Use, energy and clock of the devices under a strategy; empty where they do not report energy or clock."""
    if r.energy_j is None and r.clock_mhz is None:
        return ""
    parts = [] if r.utilisation is None else [f"{percent(r.utilisation)} busy"]
    parts += [] if r.energy_j is None else [f"{r.energy_j:.3g} J a step"]
    parts += [] if r.clock_mhz is None else [f"{r.clock_mhz:.0f} MHz"]
    parts += [f"clocks reduced: {', '.join(r.throttled)}"] if r.throttled else []
    return f"{r.strategy}: {', '.join(parts)}"


def _brief(bench: Bench, model: str) -> RenderableType:
    """A table with one row per strategy, in 80 columns."""
    result = table("", ("strategy", "ranks", "step", "samples/s", "predicted", "error", "memory", "learnt"))
    result.title = None
    for r in sorted(bench.of(model), key=lambda r: r.step_time_s.median if r.step_time_s else float("inf")):
        if r.step_time_s is None:
            continue
        name, ranks, step, _, _, predicted, off, speed = times(r)
        last = r.accuracy[-1] if r.accuracy else None
        learnt = NOTHING if last is None else learnt_by(last, bench.settings.num_classes).partition(" after")[0]
        style = "bold" if r.strategy == "asa" else ""
        result.add_row(name, ranks, step, speed, predicted, off, size(r.peak_memory_bytes), learnt, style=style)
    return result


def _costs(bench: Bench, model: str) -> list[RenderableType]:
    """A table of the costs of an epoch, if there is a price."""
    rows = priced(bench, model)
    if not rows:
        return []
    s = bench.settings
    result = table("", PRICED)
    result.title = None
    for row in rows:
        result.add_row(*row)
    return [line(f"an epoch of {s.samples_per_epoch} samples at {s.price:g} for a device and hour"), result, line("")]


def _tables(bench: Bench, model: str) -> list[RenderableType]:
    first = table(f"{model}: time of a step, measured and predicted", TIMES)
    second = table(f"{model}: memory of the fullest rank, exposed communication, validation", ("strategy", *COSTS))
    single = next((r for r in bench.of(model) if r.strategy == "single"), None)
    for r in bench.of(model):
        style = "bold" if r.strategy == "asa" else "dim" if r.step_time_s is None else ""
        first.add_row(*times(r), style=style)
        second.add_row(r.strategy, *costs(r, bench.settings.num_classes, single), style=style)
    return [first, line(""), second]
