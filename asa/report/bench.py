"""A comparison, for reading: every cell predicted and measured, and what the ratios are worth."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType

from asa.ir.bench import AccuracyPoint, Bench, BenchResult, Comparison
from asa.ir.intervals import FEWEST
from asa.report.plan import summary
from asa.report.tables import line, table
from asa.report.units import NOTHING, error, percent, rate, seconds, size

_WIDEST, _LEAST_SHARE = 0.25, 0.9
_CHANCE = 2.0
"""Accuracies below so many times that of guessing say nothing about learning."""
_BUSY = 0.1
"""Cores that others may take of each rank's before no verdict is given."""
AIM = 0.1
"""Relative error up to which a prediction counts as right."""
TIMES = ("strategy", "ranks", "step", "p10 - p90", "n", "predicted", "error", "samples/s")
COSTS = ("peak memory", "predicted memory", "memory error", "communication", "accuracy")


def render(bench: Bench, *, verbose: bool = False) -> list[RenderableType]:
    """What was fastest, beside what, how right predictions were and how loud noise was; then a row a strategy.

    ``verbose``: spreads, communication, every paired ratio, and what figures rest on.
    """
    said: list[RenderableType] = []
    for model in bench.settings.models:
        said += [line(headline(bench, model), "bold"), *(line(text) for text in standing(bench, model)), line("")]
        said += [*(_tables(bench, model) if verbose else [_brief(bench, model)]), line("")]
        if verbose:
            said += [line(text) for text in sentences(bench, model)]
        else:
            said += [line(f"{r.strategy} was not measured: {r.why_not}") for r in bench.of(model) if not r.step_time_s]
    if verbose:
        said += [line(f"data: {bench.settings.data_source}"), line(machine(bench))]
    said += [line(f"note: {n}") for n in bench.notes]
    return said if verbose else [*said, line("-v shows spreads, communication, every paired ratio, versions", "dim")]


def headline(bench: Bench, model: str) -> str:
    """What was compared, on what, for which batch."""
    e, s = bench.environment, bench.settings
    return (
        f"{model} on {e.num_devices} x {e.device_name}, batch {s.global_batch}, {s.precision}, {s.optimizer}, measured"
    )


def standing(bench: Bench, model: str) -> list[str]:
    """The fastest, what it was held against, how right predictions were, and what a ratio has to beat."""
    timed = [r for r in bench.of(model) if r.step_time_s is not None]
    if not timed:
        return ["Fastest  nothing could be measured"]
    best = min(timed, key=lambda r: r.step_time_s.median if r.step_time_s else 0.0)
    assert best.step_time_s is not None
    step, peak = best.step_time_s, best.peak_memory_bytes
    said = [
        f"Fastest  {best.strategy}, {seconds(step.median)} a step (80 %: {seconds(step.p10)} to {seconds(step.p90)}), "
        f"{rate(throughput(best))}" + (f", {size(peak)} a rank" if peak else "")
    ]
    own = [c for c in bench.comparisons if c.model == model]
    noise, disturbed = next((c for c in own if c.left == c.right), None), busy(bench, model)
    held = [against(c, noise, disturbed=bool(disturbed)) for c in own if c.left != c.right]
    said += [f"{'Against' if i == 0 else '':<8} {text}" for i, text in enumerate(held)]
    errors = [r.predicted_step_time_s / r.step_time_s.median - 1 for r in timed
              if r.predicted_step_time_s and r.step_time_s and r.step_time_s.median]  # fmt: skip
    if errors:
        within = sum(abs(e) <= AIM for e in errors)
        said.append(
            f"Promise  {within} of {len(errors)} steps within {100 * AIM:.0f} % of their prediction "
            f"({percent(min(errors), signed=True)} to {percent(max(errors), signed=True)})"
        )
    if noise is not None:
        said.append(
            f"Noise    {noise.left} against itself: {noise.low:.3f} to {noise.high:.3f} in {noise.pairs} pairs; "
            "inside, none is faster"
        )
    return said + ([f"Doubt    {disturbed}"] if disturbed else [])


def _brief(bench: Bench, model: str) -> RenderableType:
    """A row a strategy, in 80 columns."""
    made = table("", ("strategy", "ranks", "step", "samples/s", "predicted", "error", "memory", "learnt"))
    made.title = None
    for r in sorted(bench.of(model), key=lambda r: r.step_time_s.median if r.step_time_s else float("inf")):
        if r.step_time_s is None:
            continue
        name, ranks, step, _, _, predicted, off, speed = times(r)
        last = r.accuracy[-1] if r.accuracy else None
        learnt = NOTHING if last is None else _learnt(last, bench.settings.num_classes).partition(" after")[0]
        style = "bold" if r.strategy == "asa" else ""
        made.add_row(name, ranks, step, speed, predicted, off, size(r.peak_memory_bytes), learnt, style=style)
    return made


def times(r: BenchResult) -> tuple[str, ...]:
    """One row of the table of times, as text."""
    t = r.step_time_s
    return (
        r.strategy,
        str(r.ranks),
        seconds(t.median if t else None),
        f"{seconds(t.p10)} - {seconds(t.p90)}" if t else NOTHING,
        str(t.n if t else 0),
        seconds(r.predicted_step_time_s),
        error(r.predicted_step_time_s, t.median if t else None),
        rate(throughput(r)),
    )


def costs(r: BenchResult, num_classes: int) -> tuple[str, ...]:
    """Memory, communication, and accuracy (the loss where that is near chance) with the epochs it took."""
    last = r.accuracy[-1] if r.accuracy else None
    return (
        size(r.peak_memory_bytes),
        size(r.predicted_memory_bytes),
        error(r.predicted_memory_bytes, r.peak_memory_bytes),
        exposed(r),
        _learnt(last, num_classes) if last else NOTHING,
    )


def exposed(r: BenchResult) -> str:
    """The exposed share of communication with its interval, in per cent of a step."""
    share, low, high = communication_share(r), r.communication_low_s, r.communication_high_s
    if share is None or r.step_time_s is None:
        return NOTHING
    if r.ranks == 1 or low is None or high is None:
        return percent(share)
    step = r.step_time_s.median
    return f"{100 * share:.0f} ({100 * low / step:.0f} to {100 * high / step:.0f}) %"


def communication_share(r: BenchResult) -> float | None:
    """Exposed communication over step time; None where either is unknown."""
    if r.communication_s is None or r.step_time_s is None or not r.step_time_s.median:
        return None
    return r.communication_s / r.step_time_s.median


def told_apart(r: BenchResult, single: BenchResult | None) -> bool:
    """Whether the exposed communication of a cell is known well enough to be drawn.

    It is not where its interval is wider than a quarter of a step, nor where what is left for computation is less than
    a rank's share of the single device's step: no rank computes faster than that.
    """
    if r.communication_s is None or r.step_time_s is None:
        return False
    if r.ranks == 1:
        return True
    low, high, step = r.communication_low_s, r.communication_high_s, r.step_time_s.median
    if low is None or high is None or high - low > _WIDEST * step:
        return False
    alone = single.step_time_s.median if single is not None and single.step_time_s is not None else 0.0
    return step - r.communication_s >= _LEAST_SHARE * alone / r.ranks


def _learnt(last: AccuracyPoint, num_classes: int) -> str:
    if last.validation_accuracy <= _CHANCE / num_classes:
        return f"loss {last.validation_loss:.3f} after {last.epoch:.2g} epochs"
    return f"{percent(last.validation_accuracy)} after {last.epoch:.2g} epochs"


def throughput(r: BenchResult) -> float | None:
    """Samples per second at the median step."""
    if r.samples_per_s is not None:
        return r.samples_per_s
    return r.global_batch / r.step_time_s.median if r.step_time_s and r.step_time_s.median else None


def story(bench: Bench, model: str) -> str:
    """One sentence: how fast the fastest cell is, and what that is beside plain data parallelism and one device."""
    timed = {r.strategy: r.step_time_s.median for r in bench.of(model) if r.step_time_s is not None}
    if not timed:
        return f"{model}: nothing could be measured."
    best = min(timed, key=lambda s: (timed[s], s != "asa"))
    beside = [(s, name) for s, name in (("ddp", "plain data parallelism"), ("single", "one device")) if s in timed]
    ratios = [f"{timed[s] / timed[best]:.2f} times as fast as {name}" for s, name in beside if s != best]
    said = f"{model}: {best} is the fastest measured, {seconds(timed[best])} a step"
    if "asa" in timed and best != "asa":
        ratios.append(f"asa took {timed['asa'] / timed[best]:.2f} times as long")
    return said + (f"; {', '.join(ratios)}." if ratios else ".")


def sentences(bench: Bench, model: str) -> list[str]:
    """What the cells of one model say: the fastest, the failures, the ratios beside their noise."""
    said = []
    timed = [(r.step_time_s.median, r.strategy) for r in bench.of(model) if r.step_time_s is not None]
    if timed:
        time, strategy = min(timed)
        said.append(f"fastest for {model}: {strategy}, {seconds(time)} a step")
    said += [f"{r.strategy} was not measured: {r.why_not}" for r in bench.of(model) if r.step_time_s is None]
    said += [f"asa chose {summary(r.components)}" for r in bench.of(model) if r.strategy == "asa" and r.components]
    own = [c for c in bench.comparisons if c.model == model]
    noise = next((c for c in own if c.left == c.right), None)
    disturbed = busy(bench, model)
    return said + [comparison(c, noise, disturbed=bool(disturbed)) for c in own] + ([disturbed] if disturbed else [])


def busy(bench: Bench, model: str) -> str:
    """What other processes took while the cells of ``model`` were measured, where that is too much; else empty."""
    taken = next((c.others_cores for c in bench.comparisons if c.model == model and c.others_cores is not None), None)
    ranks = max((r.ranks for r in bench.of(model)), default=1)
    return crowded(taken, bench.environment.cpu_cores, ranks)


def crowded(taken: float | None, cores: int, ranks: int) -> str:
    """What is said of cores that others took while so many ranks were measured; empty where it is not too much."""
    if taken is None or taken <= max(0, cores - ranks) + _BUSY * min(ranks, cores):
        return ""
    return (
        f"other processes kept {taken:.1f} of {cores} cores busy while {ranks} ranks were measured: no verdict; "
        "measure again on a quiet machine"
    )


def against(c: Comparison, noise: Comparison | None, *, disturbed: bool = False) -> str:
    """How much less or more time the left one takes than the right one, in words of one line."""
    low, high = sorted((1 - c.low, 1 - c.high))
    spread = f"{'all' if c.pairs < FEWEST else '95 %'}: {100 * low:.1f} to {100 * high:.1f} %, {c.pairs} pairs"
    found = verdict(c, noise, disturbed=disturbed)
    if found in (c.left, c.right):
        word = "faster" if found == c.left else "slower"
        if found == c.right:
            spread = f"95 %: {-100 * high:.1f} to {-100 * low:.1f} %, {c.pairs} pairs"
        return f"{percent(abs(1 - c.ratio))} {word} than {c.right} ({spread})"
    return f"{c.right}: {percent(1 - c.ratio, signed=True)} ({spread}): {found or 'no verdict'}"


def verdict(c: Comparison, noise: Comparison | None, *, disturbed: bool = False) -> str:
    """The one that is faster, or why that cannot be told; empty on a busy machine."""
    if disturbed:
        return ""
    if c.pairs < FEWEST or (noise is not None and noise.pairs < FEWEST):
        return "too few pairs to tell"
    low, high = (min(1.0, noise.low), max(1.0, noise.high)) if noise is not None else (1.0, 1.0)
    if c.high < low or c.low > high:
        return c.left if c.high < low else c.right
    return "not told apart from noise"


def comparison(c: Comparison, noise: Comparison | None, *, disturbed: bool = False) -> str:
    """A paired ratio with its interval, and what it shows beside ``noise``, the A/A comparison."""
    few = c.pairs < FEWEST
    interval = f"{c.ratio:.3f} ({'all' if few else '95 %'}: {c.low:.3f} to {c.high:.3f}, {c.pairs} pairs)"
    if c.left == c.right:
        return f"A/A, {c.left} against itself: {interval}: a ratio inside this says nothing"
    found = verdict(c, noise, disturbed=disturbed)
    faster = " is faster" if found in (c.left, c.right) else ""
    return f"time of {c.left} over {c.right}: {interval}" + (f": {found}{faster}" if found else "")


def machine(bench: Bench) -> str:
    """Device, versions, settings: what a figure is worth nothing without."""
    e, s = bench.environment, bench.settings
    return (
        f"{e.num_devices} x {e.device_name} ({e.device_type}, {e.cpu_cores} cores), {e.backend}, torch "
        f"{e.torch_version}, Python {e.python_version}, asa {e.asa_version}; batch {s.global_batch}, {s.precision}, "
        f"{s.optimizer} lr {s.learning_rate:g}, seed {s.seed}, strategies take turns of {s.steps_per_turn} step"
        f"{'s' if s.steps_per_turn > 1 else ''}"
    )


def sealed(bench: Bench) -> list[tuple[str, ...]]:
    """Rows: model, strategy, plan, profile and cluster fingerprints, when each was written."""
    return [
        (p.model, p.strategy, p.plan_fingerprint, p.profile_fingerprint, p.profile_created, p.cluster, p.written)
        for p in bench.sealed
    ]


CSV_COLUMNS = (
    "model",
    "strategy",
    "ranks",
    "global_batch",
    "step_median_s",
    "step_p10_s",
    "step_p90_s",
    "n",
    "predicted_step_s",
    "samples_per_s",
    "communication_s",
    "peak_memory_bytes",
    "predicted_memory_bytes",
    "validation_accuracy",
    "plan_fingerprint",
    "why_not",
)


def csv_rows(bench: Bench) -> list[tuple[object, ...]]:
    """Every cell, in plain seconds and bytes."""
    found: list[tuple[object, ...]] = []
    for r in bench.results:
        t = r.step_time_s
        found.append(
            (
                r.model,
                r.strategy,
                r.ranks,
                r.global_batch,
                t.median if t else None,
                t.p10 if t else None,
                t.p90 if t else None,
                t.n if t else 0,
                r.predicted_step_time_s,
                throughput(r),
                r.communication_s,
                r.peak_memory_bytes,
                r.predicted_memory_bytes,
                r.accuracy[-1].validation_accuracy if r.accuracy else None,
                r.plan_fingerprint,
                r.why_not,
            )
        )
    return found


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A CSV file; None becomes an empty field."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def _tables(bench: Bench, model: str) -> list[RenderableType]:
    first = table(f"{model}: time of a step, measured and predicted", TIMES)
    second = table(f"{model}: memory of the fullest rank, exposed communication, validation", ("strategy", *COSTS))
    for r in bench.of(model):
        style = "bold" if r.strategy == "asa" else "dim" if r.step_time_s is None else ""
        first.add_row(*times(r), style=style)
        second.add_row(r.strategy, *costs(r, bench.settings.num_classes), style=style)
    return [first, line(""), second]
