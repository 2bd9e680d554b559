"""Text of a benchmark: predictions and measurements of every cell, and what the ratios show."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asa.ir import codec
from asa.ir.bench import AccuracyPoint, Bench, BenchResult
from asa.report.text.plan import summary
from asa.report.text.verdicts import between, busy, comparison, noise_of, paired
from asa.report.units import NOTHING, error, percent, rate, seconds, size

_WIDEST, _LEAST_SHARE = 0.25, 0.9
_CHANCE = 2.0
"""Multiple of the accuracy of guessing below which an accuracy shows nothing about learning."""
_LOST = 10.0
"""Multiple of the loss of guessing above which a training loss, or a validation loss, is no longer one of learning."""
TIMES = ("strategy", "ranks", "step", "p10 - p90", "n", "predicted", "error", "samples/s")
COSTS = ("peak memory", "predicted memory", "memory error", "communication", "accuracy")


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


def costs(r: BenchResult, num_classes: int, single: BenchResult | None = None) -> tuple[str, ...]:
    """Memory, exposed communication, and accuracy of a cell, as text. Communication is shown if it can be told from
    noise and from computing (bounded by ``single``, the cell of one device); near chance, the loss replaces the
    accuracy."""
    last = r.accuracy[-1] if r.accuracy else None
    return (
        size(r.peak_memory_bytes),
        size(r.predicted_memory_bytes),
        error(r.predicted_memory_bytes, r.peak_memory_bytes),
        exposed(r) if clear_communication(r, single) else NOTHING if r.communication_s is None else "not told apart",
        learnt_by(last, num_classes) if last else NOTHING,
    )


PRICED = ("strategy", "ranks", "epoch", "its cost")


def epoch_s(r: BenchResult, samples: int) -> float | None:
    """Seconds of an epoch of ``samples``; None if nothing was measured."""
    speed = throughput(r)
    return samples / speed if speed else None


def epoch_cost(r: BenchResult, price: float | None, samples: int) -> float | None:
    """Cost of an epoch of ``samples`` at ``price`` for a device and hour; None without a price or a measurement."""
    duration_s = epoch_s(r, samples)
    return None if price is None or duration_s is None else price * r.ranks * duration_s / 3600


def priced(bench: Bench, model: str) -> list[tuple[str, ...]]:
    """Rows with the columns :data:`PRICED` of the cells that ran, cheapest first; none without a price."""
    samples, rows = bench.settings.samples_per_epoch, []
    for r in bench.of(model):
        cost = epoch_cost(r, bench.settings.price, samples)
        if cost is not None:
            rows.append((cost, (r.strategy, str(r.ranks), seconds(epoch_s(r, samples)), f"{cost:.4g}")))
    return [texts for _, texts in sorted(rows)]


def exposed(r: BenchResult) -> str:
    """Exposed communication with its interval, in per cent of a step."""
    share, low, high = communication_share(r), r.communication_low_s, r.communication_high_s
    if share is None or r.step_time_s is None:
        return NOTHING
    if r.ranks == 1 or low is None or high is None:
        return percent(share)
    step = r.step_time_s.median
    return f"{100 * share:.0f} ({100 * low / step:.0f} to {100 * high / step:.0f}) %"


def communication_share(r: BenchResult) -> float | None:
    """Exposed communication over step time; None if either is unknown."""
    if r.communication_s is None or r.step_time_s is None or not r.step_time_s.median:
        return None
    return r.communication_s / r.step_time_s.median


def clear_communication(r: BenchResult, single: BenchResult | None) -> bool:
    """Whether the exposed communication of a cell is known well enough to be shown.

    It is not if its interval is wider than a quarter of a step, or if the rest for computation is less than a rank's
    share of the single device's step, because no rank computes faster than that.
    """
    if r.communication_s is None or r.step_time_s is None:
        return False
    if r.ranks == 1:
        return True
    low, high, step = r.communication_low_s, r.communication_high_s, r.step_time_s.median
    if low is None or high is None or high - low > _WIDEST * step:
        return False
    single_step_s = single.step_time_s.median if single is not None and single.step_time_s is not None else 0.0
    return step - r.communication_s >= _LEAST_SHARE * single_step_s / r.ranks


def near_chance(last: AccuracyPoint, num_classes: int) -> bool:
    """Whether guessing does about as well, so that only the loss shows learning: less than half of the way from
    guessing to 100 % with few classes, where twice the accuracy of guessing would be no mark."""
    guessing = 1 / num_classes
    return last.validation_accuracy <= min(_CHANCE * guessing, (1 + guessing) / 2)


def has_diverged(last: AccuracyPoint, num_classes: int | None) -> bool:
    """Whether training went wrong: its loss is not a number, or far above that of guessing while the accuracy is near
    it. Without ``num_classes``, only the first is known."""
    if not num_classes or last.train_loss is None:
        return last.train_loss is None
    return near_chance(last, num_classes) and last.train_loss > _LOST * math.log(num_classes)


def learnt_in(last: AccuracyPoint, num_classes: int | None) -> str:
    """Accuracy, or the loss if accuracy is near chance or there are no classes; for a run that learnt nothing, that it
    diverged. A validation loss far above that of guessing gives way to the training loss: statistics of BatchNorm are
    of few steps."""
    if has_diverged(last, num_classes):
        return "diverged"
    if last.validation_accuracy > 0 and not (num_classes and near_chance(last, num_classes)):
        return percent(last.validation_accuracy)
    loss, limit = last.validation_loss, _LOST * math.log(num_classes) if num_classes else math.inf
    return f"training loss {last.train_loss:.4g}" if loss is None or loss > limit else f"loss {loss:.4g}"


def learnt_by(last: AccuracyPoint, num_classes: int) -> str:
    """What a run learnt, with the number of epochs."""
    return f"{learnt_in(last, num_classes)} after {last.epoch:.2g} epochs"


def throughput(r: BenchResult) -> float | None:
    """Samples per second at the median step; None if it was not measured."""
    if r.samples_per_s is not None:
        return r.samples_per_s
    return r.global_batch / r.step_time_s.median if r.step_time_s and r.step_time_s.median else None


def story(bench: Bench, model: str) -> str:
    """One sentence: the fastest cell, compared with plain data parallelism and one device where they were measured in
    pairs, as far as these differ by more than noise."""
    timed = {r.strategy: r.step_time_s.median for r in bench.of(model) if r.step_time_s is not None}
    if not timed:
        return f"{model}: nothing could be measured."
    best = min(timed, key=lambda s: (timed[s], s != "asa"))
    lines = [f"{model}: {best} has the lowest median, {seconds(timed[best])} a step"]
    references = (("ddp", "plain data parallelism"), ("single", "one device"), ("asa", "asa"))
    for other, name in references:
        if other == best or other not in timed or not paired(bench, model, best, other):
            continue
        if between(bench, model, best, other) == best:
            lines.append(f"{timed[other] / timed[best]:.2f} times as fast as {name}")
        else:
            lines.append(f"not told apart from {name}")
    disturbed = busy(bench, model)
    no_verdict = f" {disturbed[0].upper()}{disturbed[1:]}." if disturbed else ""
    ended = "".join(f" It {n.removeprefix(f'{model}: ')}." for n in bench.notes if n.startswith(f"{model}: ended"))
    return "; ".join(lines[:1] + [", ".join(lines[1:])] * (len(lines) > 1)) + f".{no_verdict}{ended}"


def sentences(bench: Bench, model: str) -> list[str]:
    """Sentences on the cells of one model: the fastest, the failures, the ratios and their noise."""
    lines = []
    timed = [(r.step_time_s.median, r.strategy) for r in bench.of(model) if r.step_time_s is not None]
    if timed:
        time, strategy = min(timed)
        lines.append(f"lowest median for {model}: {strategy}, {seconds(time)} a step")
    lines += [f"{r.strategy} was not measured: {r.why_not}" for r in bench.of(model) if r.step_time_s is None]
    lines += [f"asa chose {summary(r.components)}" for r in bench.of(model) if r.strategy == "asa" and r.components]
    pairs = [c for c in bench.comparisons if c.model == model]
    noise = noise_of(bench, model)
    disturbed = busy(bench, model)
    return lines + [comparison(c, noise, disturbed=bool(disturbed)) for c in pairs] + ([disturbed] if disturbed else [])


def machine(bench: Bench) -> str:
    """Device, versions and settings, in one line."""
    e, s = bench.environment, bench.settings
    return (
        f"{e.num_devices} x {e.device_name} ({e.device_type}, {e.cpu_cores} cores), {e.backend}, torch "
        f"{e.torch_version}, Python {e.python_version}, asa {e.asa_version}; batch {s.global_batch}, {s.precision}, "
        f"{s.optimizer} lr {s.learning_rate:g}, seed {s.seed}, strategies take turns of {s.steps_per_turn} step"
        f"{'s' if s.steps_per_turn > 1 else ''}"
    )


def sealed(bench: Bench) -> list[tuple[str, ...]]:
    """Rows: model, strategy, fingerprints of plan, profile and cluster, and when each was written."""
    return [
        (p.model, p.strategy, p.plan_fingerprint, p.profile_fingerprint, p.profile_created, p.cluster, p.written)
        for p in bench.sealed
    ]


_CSV: Mapping[str, Callable[[BenchResult, Bench], object]] = {
    "model": lambda r, _: r.model,
    "strategy": lambda r, _: r.strategy,
    "ranks": lambda r, _: r.ranks,
    "global_batch": lambda r, _: r.global_batch,
    "step_median_s": lambda r, _: r.step_time_s and r.step_time_s.median,
    "step_p10_s": lambda r, _: r.step_time_s and r.step_time_s.p10,
    "step_p90_s": lambda r, _: r.step_time_s and r.step_time_s.p90,
    "n": lambda r, _: r.step_time_s.n if r.step_time_s else 0,
    "predicted_step_s": lambda r, _: r.predicted_step_time_s,
    "samples_per_s": lambda r, _: throughput(r),
    "communication_s": lambda r, _: r.communication_s,
    "peak_memory_bytes": lambda r, _: r.peak_memory_bytes,
    "predicted_memory_bytes": lambda r, _: r.predicted_memory_bytes,
    "epochs_trained": lambda r, _: r.accuracy[-1].epoch if r.accuracy else None,
    "validation_loss": lambda r, _: r.accuracy[-1].validation_loss if r.accuracy else None,
    "validation_accuracy": lambda r, _: r.accuracy[-1].validation_accuracy if r.accuracy else None,
    "plan_fingerprint": lambda r, _: r.plan_fingerprint,
    "why_not": lambda r, _: r.why_not,
    "epoch_s": lambda r, bench: epoch_s(r, bench.settings.samples_per_epoch),
    "cost_per_epoch": lambda r, bench: epoch_cost(r, bench.settings.price, bench.settings.samples_per_epoch),
    "data_wait_s": lambda r, _: r.data_wait_s,
    "utilisation": lambda r, _: r.utilisation,
    "mfu": lambda r, _: r.mfu,
    "state_memory_bytes": lambda r, _: r.state_memory_bytes,
    "reserved_memory_bytes": lambda r, _: r.reserved_memory_bytes,
    "energy_j_per_step": lambda r, _: r.energy_j,
}
CSV_COLUMNS = tuple(_CSV)


def csv_rows(bench: Bench) -> list[tuple[object, ...]]:
    """Rows of all cells, in plain seconds and bytes."""
    return [tuple(value(r, bench) for value in _CSV.values()) for r in bench.results]


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write a CSV file; None becomes an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    codec.write(text.getvalue(), path)
