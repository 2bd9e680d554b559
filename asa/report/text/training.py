"""Text of a run: two lines of 80 columns per epoch, with prediction and measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asa.ir.measurements import EpochRecord
from asa.report.text.tables import folded
from asa.report.units import NOTHING, SHARES, error, percent, ranks, rate, seconds, size


def _scored(metric: str, value: float | None) -> str:
    """A figure of validation with the name of its metric."""
    return f"{metric} {percent(value) if metric in SHARES or value is None else f'{value:.4g}'}"


def epoch_line(record: EpochRecord, *, trained: bool = True, metric: str = "accuracy") -> str:
    """One epoch: loss, ``metric``, speed; below it the slowest rank, and the scheduler's verdict on prediction and
    measurement."""
    learning = (
        f"loss {record.train_loss:.3f}, validation loss {_figure(record.validation_loss)}, "
        f"{_scored(metric, record.validation_accuracy)}"
        if trained
        else "emulated, nothing trained"
    )
    slowest = record.measurements.slowest
    slowest_text = "" if slowest is None else f"; others waited {percent(slowest[1])} of a step for rank {slowest[0]}"
    joules, rate_of_use = record.measurements.energy_j, record.measurements.utilisation
    energy = "" if joules is None else f", {joules / 1e3:.3g} kJ"
    energy += "" if rate_of_use is None else f", devices busy {percent(rate_of_use)}"
    head = f"epoch {record.epoch + 1}: {learning}, {seconds(record.seconds)}{energy}, "
    return f"{head}{rate(record.measurements.samples_per_s)}\n" + folded(f"    {record.verdict.reason}{slowest_text}")


def replan_line(event: Mapping[str, Any]) -> str:
    """A change of plan, its roll-back, or its outcome, from the event that announced it."""
    gain = percent(event.get("predicted_gain"), signed=True)
    outline = f" ({event['outline']})" if event.get("outline") else ""
    if event["kind"] == "outcome":
        return f"the new plan: {gain} of a step promised, {percent(event['measured_gain'], signed=True)} measured"
    if event["kind"] == "keep":
        return f"the plan stays: {event['why']}"
    if event["kind"] == "wait":
        return f"another plan is faster, and waits: {event['why']}"
    if event["kind"] == "rollback":
        return f"back to the old plan {event['new']}{outline}: {event['why']}"
    if event["kind"] == "memory":
        return (
            f"new plan {event['new']} ({event['strategy']} on {ranks(event['ranks'])}, {size(event['promised_bytes'])} "
            f"per rank): {event['why']}"
        )
    if event["kind"] == "enough":
        return f"back to plan {event['new']} ({event['strategy']} on {ranks(event['ranks'])}): {event['why']}"
    if event["kind"] == "lost":
        return (
            f"new plan {event['new']} ({event['strategy']} on {ranks(event['ranks'])} instead of "
            f"{event['ranks_before']}): {event['why']}"
        )
    where = _on_ranks(event)
    norms = f"; {event['batch_norm']}" if event.get("batch_norm") else ""
    return f"new plan {event['new']}{outline}{where}, {gain} of a step promised: {event['why']}{norms}"


def _on_ranks(event: Mapping[str, Any]) -> str:
    """The ranks of a plan, if their number has changed."""
    if event.get("rung") not in ("fewer", "more"):
        return ""
    numbers = ", ".join(map(str, sorted(event["processes"])))
    return f" on rank {numbers}" if len(event["processes"]) == 1 else f" on ranks {numbers}"


def _figure(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _error_text(predicted: float | None, measured: float | None) -> str:
    """The error of a prediction in words.

    >>> _error_text(1.1, 1.0), _error_text(0.5, 1.0), _error_text(None, 1.0)
    ('10.0 % too high', '50.0 % too low', 'no comparison')
    """
    text = error(predicted, measured)
    if text == NOTHING:
        return "no comparison"
    if text[1:] == "0.0 %":
        return "as predicted"
    return f"{text[1:]} too {'high' if text[0] == '+' else 'low'}"


def aim(document: Mapping[str, Any], metric: str = "accuracy") -> list[str]:
    """Lines on the cost of a run and on the way to its target (``aim`` of ``result.json``), which is one of
    ``metric``."""
    lines = []
    if document["cost_per_epoch"] is not None:
        lines.append(
            f"cost: {document['cost_per_epoch']:.3g} an epoch, {document['cost_of_run']:.3g} for "
            f"{_epochs(document['epochs'])} in {seconds(document['seconds'])}, at {document['price']:g} per device and "
            "hour"
        )
    target, reached = document["target_accuracy"], document["epochs_to_target"]
    if target is not None and reached is None:
        lines.append(f"target: {_scored(metric, target)} not reached in {_epochs(document['epochs'])}")
    elif target is not None:
        cost = "" if document["cost_to_target"] is None else f", cost {document['cost_to_target']:.3g}"
        after = f"{_epochs(reached)}, {seconds(document['seconds_to_target'])}"
        lines.append(f"target: {_scored(metric, target)} after {after}{cost}")
    return lines


def _epochs(count: int) -> str:
    return "1 epoch" if count == 1 else f"{count} epochs"


def summary(result: Mapping[str, Any]) -> list[str]:
    """Lines comparing prediction and measurement (``summary`` of ``result.json``): step, memory per rank, waiting."""
    step, memory = result["step_time_s"], result["memory_bytes_per_rank"]
    lines = [
        f"step: predicted {seconds(step['predicted'])}, measured {seconds(step['measured'])} "
        f"({_error_text(step['predicted'], step['measured'])}, {step['n']} step{'s' * (step['n'] != 1)}); "
        f"{percent(result['data_wait_share'])} of the time waiting for data"
    ]
    predicted, measured = memory["predicted"], memory["measured"]
    if measured is None:
        return [*lines, f"memory per rank: predicted {size(max(predicted, default=None))}, not tracked"]
    pairs = [(p, m) for p, m in zip(predicted, measured, strict=True)]
    alike: dict[tuple[str, str, str], list[int]] = {}
    for rank, (p, m) in enumerate(pairs):
        alike.setdefault((size(p), size(m), _error_text(p, m)), []).append(rank)
    for (p, m, error_text), members in alike.items():
        lines.append(f"memory of rank {', '.join(map(str, members))}: predicted {p}, measured {m} ({error_text})")
    return lines
