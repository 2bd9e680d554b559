"""Data of all figures, as rows that can be plotted again. Drawing is in :mod:`asa.report.figures.drawing`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from asa.ir.bench import Bench
from asa.report.figures import drawing
from asa.report.figures.drawing import Row
from asa.report.text.bench import clear_communication, communication_share, epoch_s, near_chance
from asa.report.text.tables import short

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One figure: its data, its caption, and how it is drawn."""

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    draw: Callable[[tuple[Row, ...]], Figure]


def charts(bench: Bench) -> tuple[Chart, ...]:
    """Figures of a benchmark: training time first, then predictions, speed-up, communication, learning, memory,
    strategies. Captions say so if devices were emulated."""
    made = (
        training_time(bench),
        predicted_measured(bench),
        speedup(bench),
        compute_communication(bench),
        accuracy(bench),
        accuracy_time(bench),
        loss(bench),
        memory(bench),
        assignment(bench),
    )
    if not bench.environment.emulated:
        return made
    return tuple(replace(chart, caption=f"{_EMULATED} {chart.caption}") for chart in made)


_EMULATED = "Emulated devices: ranks slept for the times of a profile, only messages were real, nothing was trained."


def training_time(bench: Bench) -> Chart:
    """Measured step time with spread, its prediction, and the time of an epoch."""
    rows: list[Row] = []
    for r in bench.results:
        t = r.step_time_s
        rows.append(
            (
                r.model,
                r.strategy,
                t.median if t else None,
                t.p10 if t else None,
                t.p90 if t else None,
                r.predicted_step_time_s,
                epoch_s(r, bench.settings.samples_per_epoch),
            )
        )
    return Chart(
        name="training_time",
        title="Training time per strategy",
        caption="Bars: median measured step, whiskers from the 10th to the 90th percentile. Diamonds: the prediction.",
        columns=("model", "strategy", "step_median_s", "step_p10_s", "step_p90_s", "predicted_step_s", "epoch_s"),
        rows=tuple(rows),
        draw=drawing.training_time,
    )


def predicted_measured(bench: Bench) -> Chart:
    """Predicted against measured step time of every cell, with the interval of the prediction."""
    rows: list[Row] = [
        (r.model, r.strategy, r.step_time_s.median, r.predicted_step_time_s, r.predicted_low_s, r.predicted_high_s)
        for r in bench.results
        if r.step_time_s is not None and r.predicted_step_time_s is not None
    ]
    return Chart(
        name="predicted_measured",
        title="Predicted against measured",
        caption="One point for each cell, with the 90 % interval of its prediction. Inside the grey band the error is "
        "at most 10 %.",
        columns=("model", "strategy", "measured_s", "predicted_s", "low_s", "high_s"),
        rows=tuple(rows),
        draw=drawing.predicted_measured,
    )


def speedup(bench: Bench) -> Chart:
    """Speed-up over a single device: predicted for 1, 2, 4, 8 ranks, measured where that many ran."""
    predicted_single = {p.model: p.predicted_s for p in bench.scaling if p.strategy == "single" and p.ranks == 1}
    measured_single = {p.model: p.measured_s for p in bench.scaling if p.strategy == "single" and p.ranks == 1}
    rows: list[Row] = [
        (
            p.model,
            p.strategy,
            p.ranks,
            p.predicted_s,
            p.measured_s,
            ratio(predicted_single.get(p.model), p.predicted_s),
            ratio(measured_single.get(p.model), p.measured_s),
        )
        for p in bench.scaling
        if p.strategy != "single"
    ]
    return Chart(
        name="speedup",
        title="Speed-up over one device",
        caption=(
            f"Lines: predicted for {', '.join(str(n) for n in sorted({p.ranks for p in bench.scaling}))} ranks. Filled "
            "points: measured, where that many ranks ran."
        ),
        columns=("model", "strategy", "ranks", "predicted_s", "measured_s", "predicted_speedup", "measured_speedup"),
        rows=tuple(rows),
        draw=drawing.speedup,
    )


def compute_communication(bench: Bench) -> Chart:
    """A measured step, divided into computation and exposed communication."""
    rows: list[Row] = []
    single = {r.model: r for r in bench.results if r.strategy == "single"}
    for r in bench.results:
        if r.step_time_s is not None and r.communication_s is not None and clear_communication(r, single.get(r.model)):
            total = r.step_time_s.median
            low, high = (None, None) if r.ranks == 1 else (r.communication_low_s, r.communication_high_s)
            rows.append(
                (r.model, r.strategy, total - r.communication_s, r.communication_s, communication_share(r), low, high)
            )
    return Chart(
        name="compute_communication",
        title="Computation against communication",
        caption=(
            "Measured median step: computation, and communication that does not overlap with it. Cells are left out if "
            "noise hides how much that is. Whiskers: 95 % interval of the communication."
        ),
        columns=("model", "strategy", "compute_s", "communication_s", "communication_share", "low_s", "high_s"),
        rows=tuple(rows),
        draw=drawing.compute_communication,
    )


def accuracy(bench: Bench) -> Chart:
    """Validation accuracy after every epoch."""
    rows: list[Row] = [
        (r.model, r.strategy, a.epoch, a.seconds, a.train_loss, a.validation_loss, a.validation_accuracy)
        for r in bench.results
        if r.accuracy and not near_chance(r.accuracy[-1], bench.settings.num_classes)
        for a in r.accuracy
    ]
    return Chart(
        name="accuracy",
        title="Validation accuracy over epochs",
        caption="Data, order, dropout masks and seed are the same for every strategy, so different curves mean "
        "different numerics. Runs that end near the accuracy of guessing are not shown.",
        columns=("model", "strategy", "epoch", "seconds", "train_loss", "validation_loss", "validation_accuracy"),
        rows=tuple(rows),
        draw=drawing.accuracy,
    )


def accuracy_time(bench: Bench) -> Chart:
    """Validation accuracy over the seconds of training."""
    return replace(
        accuracy(bench),
        name="accuracy_time",
        title="Validation accuracy over training time",
        caption="The same points over the seconds of steps and of waiting for data, without the turns of other "
        "strategies.",
        draw=drawing.accuracy_over_time,
    )


def loss(bench: Bench) -> Chart:
    """Validation loss over the epochs."""
    return replace(
        accuracy(bench),
        name="loss",
        title="Validation loss over epochs",
        caption="Loss of the same cells. It shows learning while accuracy is still near that of guessing.",
        draw=drawing.loss,
    )


def memory(bench: Bench) -> Chart:
    """Peak of active memory on the fullest rank, and its prediction."""
    rows: list[Row] = [
        (r.model, r.strategy, r.ranks, r.peak_memory_bytes, r.predicted_memory_bytes) for r in bench.results
    ]
    return Chart(
        name="memory",
        title="Peak memory per device",
        caption="Bars: measured active peak of the fullest rank. Diamonds: the prediction.",
        columns=("model", "strategy", "ranks", "peak_memory_bytes", "predicted_memory_bytes"),
        rows=tuple(rows),
        draw=drawing.memory,
    )


def assignment(bench: Bench) -> Chart:
    """Assignment of every component under every strategy."""
    rows: list[Row] = [
        (r.model, r.strategy, i, c.name, c.data.strategy, c.data.degree, c.tensor.strategy, c.tensor.degree, short(c))
        for r in bench.results
        for i, c in enumerate(r.components)
    ]
    return Chart(
        name="assignment",
        title="Strategy chosen per component",
        caption="Columns: strategies. Rows: components, the first one on top. Colour: how the component runs.",
        columns=(
            "model",
            "strategy",
            "index",
            "component",
            "data",
            "data_degree",
            "tensor",
            "tensor_degree",
            "runs_as",
        ),
        rows=tuple(rows),
        draw=drawing.assignment,
    )


def ratio(single: float | None, parallel: float | None) -> float | None:
    """The speed-up; None if a time is unknown."""
    return single / parallel if single and parallel else None
