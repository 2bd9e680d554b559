"""A run, for reading: one line an epoch, predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from asa.ir.measurements import EpochRecord, Measurements
from asa.report.tables import table
from asa.report.units import error, percent, rate, seconds, size


def epoch_line(record: EpochRecord) -> str:
    """One epoch: loss, accuracy, speed, and the scheduler's words on predicted against measured."""
    return (
        f"epoch {record.epoch + 1}: loss {record.train_loss:.3f}, validation {record.validation_loss:.3f} "
        f"({percent(record.validation_accuracy)}), {seconds(record.seconds)}, "
        f"{rate(record.measurements.samples_per_s)}; {record.verdict.reason}"
    )


def replan_line(event: Mapping[str, Any]) -> str:
    """A change of plan, its roll-back, or what came of it, from the event that announced it."""
    gain = percent(event.get("predicted_gain"), signed=True)
    if event["kind"] == "outcome":
        return f"the new plan: {gain} of a step promised, {percent(event['measured_gain'], signed=True)} measured"
    if event["kind"] == "rollback":
        return f"back to the old plan {event['new']}: {event['why']}"
    return f"new plan {event['new']}, {gain} of a step promised: {event['why']}"


def epochs(records: Sequence[EpochRecord]) -> RenderableType:
    """The whole run as a table."""
    made = table(
        "Epochs", ("epoch", "train loss", "val. loss", "val. accuracy", "time", "step", "predicted", "error"), left=0
    )
    for r in records:
        m = r.measurements
        made.add_row(
            str(r.epoch + 1),
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
