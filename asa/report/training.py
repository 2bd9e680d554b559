"""A run, for reading: one line an epoch, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from asa.ir.measurements import EpochRecord, Measurements, Verdict
from asa.report.tables import table
from asa.report.units import error, percent, rate, seconds, size


def epoch_line(record: EpochRecord) -> str:
    """One epoch: loss, accuracy, step time predicted and measured."""
    m = record.measurements
    return (
        f"epoch {record.epoch}: loss {record.train_loss:.3f}, validation {record.validation_loss:.3f} "
        f"({percent(record.validation_accuracy)}), {seconds(record.seconds)}, {rate(m.samples_per_s)}; step predicted "
        f"{seconds(m.predicted_step_time_s)}, measured {seconds(m.step_time.median)} "
        f"({error(m.predicted_step_time_s, m.step_time.median)})"
    )


def verdict_line(verdict: Verdict) -> str:
    """Keep or re-plan, and why."""
    return f"{'keep the plan' if verdict.action == 'keep' else 're-plan'}: {verdict.reason}"


def epochs(records: Sequence[EpochRecord]) -> RenderableType:
    """The whole run as a table."""
    made = table(
        "Epochs", ("epoch", "train loss", "val. loss", "val. accuracy", "time", "step", "predicted", "error"), left=0
    )
    for r in records:
        m = r.measurements
        made.add_row(
            str(r.epoch),
            f"{r.train_loss:.3f}",
            f"{r.validation_loss:.3f}",
            percent(r.validation_accuracy),
            seconds(r.seconds),
            seconds(m.step_time.median),
            seconds(m.predicted_step_time_s),
            error(m.predicted_step_time_s, m.step_time.median),
        )
    return made


def memory_line(m: Measurements) -> str:
    """Peak memory of the fullest rank, predicted beside measured."""
    predicted = max(m.predicted_memory_bytes, default=None)
    if not m.peak_memory_bytes:
        return f"memory per rank: predicted {size(predicted)}, not tracked"
    measured = max(m.peak_memory_bytes)
    return f"memory per rank: predicted {size(predicted)}, measured {size(measured)} ({error(predicted, measured)})"
