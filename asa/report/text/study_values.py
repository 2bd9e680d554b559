"""Derived values of a study's cells, and published numbers for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asa.ir.bench import AccuracyPoint, BenchResult
from asa.ir.study import Published, Study, StudyCell, StudyRow
from asa.report.text.bench import communication_share, has_diverged, learnt_in, near_chance, throughput
from asa.report.text.verdicts import NO_VERDICT
from asa.report.units import NOTHING, seconds, size

_TEN_EPOCHS = 10
_HOUR_S = 3600.0


SETTINGS: Mapping[str, Callable[[StudyCell], str]] = {
    "input": lambda c: "x".join(map(str, c.input_shape)),
    "precision": lambda c: c.precision,
    "optimizer": lambda c: c.optimizer,
    "rate": lambda c: f"{c.learning_rate:g}" if c.learning_rate else "",
    "microbatches": lambda c: str(c.microbatches or ""),
    "classes": lambda c: str(c.classes or ""),
    "memory limit": lambda c: size(c.memory_bytes) if c.memory_bytes else "",
    "run": lambda c: c.run,
    "seed": lambda c: str(c.seed),
}
"""Further settings of a cell, as text. Those of :data:`_AS_USUAL` are empty unless they were asked for. The others are
shown where cells of one model differ."""
_AS_USUAL = ("rate", "microbatches", "classes", "memory limit")
_OF_A_BLOCK = ("precision", "optimizer", "rate", "classes", "memory limit")
"""Settings that all strategies of a table have in common."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One row with derived values. Seconds and bytes; None if unknown.

    ``run_s``: training for all its epochs; ``target``: the first point of the run with the requested accuracy;
    ``missed``: there is none. ``settings``: those of :data:`SETTINGS` that are shown.
    ``published``: published numbers for the same, each with the value measured here.
    """

    row: StudyRow
    settings: Mapping[str, str] = field(default_factory=dict)
    step_s: float | None = None
    samples_per_s: float | None = None
    epoch_s: float | None = None
    run_s: float | None = None
    memory_bytes: int | None = None
    communication_share: float | None = None
    last: AccuracyPoint | None = None
    target: AccuracyPoint | None = None
    missed: bool = False
    cost_per_epoch: float | None = None
    cost_of_run: float | None = None
    cost_to_target: float | None = None
    published: tuple[tuple[Published, float | None], ...] = ()

    @property
    def heading(self) -> str:
        """Title of the table for this row."""
        c = self.row.cell
        shape = "x".join(map(str, c.input_shape))
        return f"{c.model}, {c.data} at {shape}, {c.devices}, {self._block()}"

    @property
    def panel(self) -> str:
        """Title of the panel for this row in figures."""
        return f"{self.row.cell.model}, {self.row.cell.data}, {self._block('input')}"

    def _block(self, *more: str) -> str:
        c = self.row.cell
        return f"batch {c.global_batch}{self._listed(*more, *_OF_A_BLOCK)}" + (f", seed {c.seed}" if c.seed else "")

    def _listed(self, *names: str) -> str:
        return "".join(f", {name} {self.settings[name]}" for name in names if name in self.settings)

    @property
    def strategy(self) -> str:
        """The strategy, with the settings that distinguish it from other rows of it in a table."""
        c, asked = self.row.cell, self.settings.get("microbatches")
        alone = ", alone" if c.alone and "run" in self.settings else ""
        return c.strategy + (f", m={asked}" if asked else "") + alone

    @property
    def variant(self) -> str:
        """The strategy with all settings that are shown, where rows of several tables are mixed."""
        return self.strategy + self._listed("input", *_OF_A_BLOCK, "seed")

    @property
    def learnt(self) -> str:
        """Accuracy, or the loss if accuracy is near chance or there are no classes, with the number of epochs."""
        if self.last is None:
            return NOTHING
        return f"{learnt_in(self.last, self.row.num_classes)} ({self.last.epoch:.3g} ep)"

    @property
    def diverged(self) -> bool:
        """Whether training went wrong."""
        return self.last is not None and has_diverged(self.last, self.row.num_classes)

    @property
    def accuracy(self) -> float | None:
        """Validation accuracy at the end; None if there is none, or guessing does about as well."""
        classes = self.row.num_classes
        if self.last is None or self.diverged or (classes and near_chance(self.last, classes)):
            return None
        return self.last.validation_accuracy

    @property
    def to_target(self) -> str:
        """Epochs, time and cost to the requested accuracy."""
        if self.target is None:
            return "not reached" if self.missed else NOTHING
        cost = "" if self.cost_to_target is None else f", cost {self.cost_to_target:.3g}"
        epochs = f"{self.target.epoch:.3g} epoch{'s' * (self.target.epoch != 1)}"
        return f"{epochs}, {seconds(self.target.seconds)}{cost}"


def of(study: Study) -> list[Figures]:
    """All rows with derived values, sorted by model and number of ranks, otherwise in the order of the study."""
    rows = sorted(study.rows, key=_order(study.rows))
    shown = _shown_settings(rows)
    figures = [replace(_figures(row, study), settings=shown(row.cell)) for row in rows]
    by_cell = {f.row.cell: f for f in figures}
    return [_with_published(f, by_cell, study.published) for f in figures]


def _shown_settings(rows: Sequence[StudyRow]) -> Callable[[StudyCell], dict[str, str]]:
    """A function with those settings of a cell that are shown in a table of ``rows``, by name."""
    values: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        for name, text_of in SETTINGS.items():
            values.setdefault((name, row.cell.model), set()).add(text_of(row.cell))
    shown = {*_AS_USUAL, *(name for (name, _), texts in values.items() if len(texts - {""}) > 1)}
    return lambda cell: {name: text for name, of in SETTINGS.items() if name in shown and (text := of(cell))}


def _order(rows: Sequence[StudyRow]) -> Callable[[StudyRow], Any]:
    """A sort key: models, places and strategies in their order of first appearance, counts by size."""
    ordinals: dict[str, dict[object, int]] = {}

    def ordinal(field: str, value: object) -> int:
        numbers = ordinals.setdefault(field, {})
        return numbers.setdefault(value, len(numbers))

    for row in rows:
        for name in ("model", "data", "devices", "strategy"):
            ordinal(name, getattr(row.cell, name))

    def key(row: StudyRow) -> tuple[object, ...]:
        c = row.cell
        return (ordinal("model", c.model), c.mode, ordinal("data", c.data), ordinal("devices", c.devices),
                c.input_shape, c.gpus, c.global_batch, c.precision, c.optimizer, c.learning_rate or 0.0, c.classes or 0,
                c.memory_bytes or 0, c.seed, c.epochs, ordinal("strategy", c.strategy), c.microbatches or 0,
                c.alone)  # fmt: skip

    return key


def _figures(row: StudyRow, study: Study) -> Figures:
    r = row.result
    if r is None:
        return Figures(row=row)
    measured = r.step_time_s.median if r.step_time_s is not None else None
    step = r.predicted_step_time_s if measured is None else measured
    speed = throughput(r) if measured is not None else r.global_batch / step if step else None
    epoch = row.samples_per_epoch / speed if row.samples_per_epoch and speed else None
    run = epoch * row.cell.epochs if epoch is not None else None
    target = None
    if study.target is not None:
        target = next((a for a in r.accuracy if a.validation_accuracy >= study.target), None)
    hourly = study.price * r.ranks / _HOUR_S if study.price is not None else None
    return Figures(
        row=row, step_s=step, samples_per_s=speed, epoch_s=epoch, run_s=run,
        memory_bytes=r.predicted_memory_bytes if r.peak_memory_bytes is None else r.peak_memory_bytes,
        communication_share=communication_share(r) if measured is not None else _predicted_share(r),
        last=r.accuracy[-1] if r.accuracy else None, target=target,
        missed=study.target is not None and target is None and bool(r.accuracy),
        cost_per_epoch=_times(hourly, epoch), cost_of_run=_times(hourly, run),
        cost_to_target=_times(hourly, target.seconds if target else None),
    )  # fmt: skip


def _times(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _predicted_share(r: BenchResult) -> float | None:
    if r.predicted_communication_s is None or not r.predicted_step_time_s:
        return None
    return r.predicted_communication_s / r.predicted_step_time_s


def _with_published(f: Figures, by_cell: dict[StudyCell, Figures], published: Iterable[Published]) -> Figures:
    c = f.row.cell
    if f.row.result is None:
        return f
    matches = [
        p
        for p in published
        if p.strategy == c.strategy
        and p.model in ("", c.model)
        and p.gpus == c.gpus
        # Predictions are compared only for equal data; measurements here are of another machine anyway.
        and (c.mode == "measured" or p.data == c.data)
    ]
    return replace(f, published=tuple((p, _local_value(p.metric, f, by_cell)) for p in matches)) if matches else f


def _local_value(metric: str, f: Figures, by_cell: dict[StudyCell, Figures]) -> float | None:
    """The value here to compare with a published one; None if the row has none."""
    r = f.row.result
    assert r is not None  # the caller has checked this
    if metric == "training_time_s_10_epochs":
        return None if f.epoch_s is None else _TEN_EPOCHS * f.epoch_s
    if metric == "samples_per_s":
        return f.samples_per_s
    if metric == "utilisation_percent":
        return None if r.utilisation is None else 100 * r.utilisation
    if metric == "accuracy_percent":
        return None if f.accuracy is None else 100 * f.accuracy
    if metric == "speedup_over_single":
        single = counterpart(f, by_cell, "single", gpus=1)
        return single.step_s / f.step_s if single is not None and single.step_s and f.step_s else None
    if metric == "gain_over_hybrid_percent":
        hybrid = counterpart(f, by_cell, "hybrid")
        return 100 * (hybrid.step_s / f.step_s - 1) if hybrid is not None and hybrid.step_s and f.step_s else None
    return None  # a time of unknown epochs


def counterpart(f: Figures, by_cell: dict[StudyCell, Figures], strategy: str, **changes: Any) -> Figures | None:
    """The row of another ``strategy`` for the same training, without microbatches; preferably measured as ``f`` was
    (in turns, or alone), otherwise in the other way."""
    wanted = replace(f.row.cell, strategy=strategy, microbatches=None, **changes)
    alone = f.row.cell.run == "alone"
    ways = (replace(wanted, alone=way) for way in (alone, not alone))
    return next((by_cell[way] for way in ways if way in by_cell), None)


def busy(row: StudyRow) -> bool:
    """Whether other processes took cores while it was measured, so that its times are compared with none."""
    return any(note.endswith(NO_VERDICT) for note in row.notes)


_SYNCHRONOUS = "ps_sync"
"""The strategy that other parameter servers are compared with."""


def against_synchronous(study: Study, rows: Sequence[Figures]) -> list[str]:
    """Time and accuracy of other parameter servers against synchronous ones, as published, and in the measured and the
    predicted ``rows``: a sentence for each, with the lowest and highest of all models and numbers of ranks. Times of
    more ranks than cores, and of a busy machine, are left out."""
    values_of = {(p.strategy, p.model, p.gpus, p.metric): p.value for p in study.published}
    times: dict[str, list[tuple[float, float]]] = {}
    hits: dict[str, list[tuple[float, float]]] = {}
    for (strategy, model, gpus, metric), value in values_of.items():
        base = values_of.get((_SYNCHRONOUS, model, gpus, metric))
        if strategy != _SYNCHRONOUS and base is not None:
            pairs = times if metric == "training_time_s" else hits if metric == "accuracy_percent" else {}
            pairs.setdefault(f"published: {strategy}", []).append((value, base))
    kinds = {"measured": "here", "predicted": "predicted"}
    synchronous = {f.row.cell: f for f in rows if f.row.cell.strategy == _SYNCHRONOUS and f.row.state in kinds}
    published = {name.removeprefix("published: ") for name in (*times, *hits)}
    for f in rows:
        other = synchronous.get(replace(f.row.cell, strategy=_SYNCHRONOUS))
        if f.row.cell.strategy in published and f.row.state in kinds and other is not None:
            name = f"{kinds[f.row.state]}: {f.row.cell.strategy}"
            if f.epoch_s and other.epoch_s and not f.row.oversubscribed and not (busy(f.row) or busy(other.row)):
                times.setdefault(name, []).append((f.epoch_s, other.epoch_s))
            if f.accuracy is not None and other.accuracy is not None:
                hits.setdefault(name, []).append((100 * f.accuracy, 100 * other.accuracy))
    return [
        f"{name} against {_SYNCHRONOUS}: "
        + ", ".join(
            f"{what} {_range(values)} {unit} ({len(values)} cells)"
            for what, unit, values in (
                ("time", "%", [100 * (a / b - 1) for a, b in times.get(name, ())]),
                ("accuracy", "points", [a - b for a, b in hits.get(name, ())]),
            )
            if values
        )
        for name in dict.fromkeys((*times, *hits))
    ]


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):+.1f}", f"{max(values):+.1f}"
    return low if low == high else f"{low} to {high}"


def conditions(published: Published) -> str:
    """Hardware of a published number, and a remark if the publication does not name the model."""
    return published.hardware if published.model else f"{published.hardware}, model not named"


def unmatched(study: Study, rows: Sequence[Figures]) -> list[Published]:
    """Published numbers without a corresponding row."""
    matched = {p for f in rows for p, value in f.published if value is not None}
    return [p for p in study.published if p not in matched]


def grouped(published: Sequence[Published]) -> str:
    """Short description of ``published``."""
    counts: dict[str, int] = {}
    for p in published:
        key = f"{p.strategy} {p.metric.replace('_', ' ')}"
        counts[key] = counts.get(key, 0) + 1
    return ", ".join(f"{key} ({n})" for key, n in counts.items())


COLUMNS = (
    "model", "data", "input", "devices", "ranks", "global_batch", "strategy", "schedule", "microbatches", "epochs",
    "seed", "precision", "optimizer", "learning_rate", "asked_microbatches", "classes", "memory_limit_bytes", "run",
    "state", "why", "step_s", "step_p10_s", "step_p90_s", "n", "predicted_step_s", "predicted_low_s",
    "predicted_high_s", "data_wait_s", "samples_per_s", "epoch_s", "run_s", "mean_age", "most_age",
    "utilisation", "flops_per_s", "mfu", "active_memory_bytes", "predicted_memory_bytes", "state_memory_bytes",
    "reserved_memory_bytes", "communication_share", "predicted_communication_s", "predicted_bubble_s",
    "energy_j_per_step", "clock_mhz", "throttled", "epochs_trained", "train_loss", "validation_loss",
    "validation_accuracy", "training_s", "epochs_to_target", "seconds_to_target", "cost_per_epoch", "cost_of_run",
    "cost_to_target", "published", "created",
)  # fmt: skip
"""Columns of the CSV: plain seconds, bytes and fractions from 0 to 1."""


def plain(f: Figures) -> tuple[object, ...]:
    """A row with the columns :data:`COLUMNS`."""
    c, r, last = f.row.cell, f.row.result, f.last
    t = r.step_time_s if r is not None else None
    return (
        c.model, c.data, "x".join(map(str, c.input_shape)), c.devices, c.gpus, c.global_batch, c.strategy,
        r and r.schedule, r and r.num_microbatches, c.epochs, c.seed, c.precision, c.optimizer, c.learning_rate,
        c.microbatches, c.classes, c.memory_bytes, c.run, f.row.state, f.row.why,
        t and t.median, t and t.p10, t and t.p90, t and t.n,
        r and r.predicted_step_time_s, r and r.predicted_low_s, r and r.predicted_high_s,
        r and r.data_wait_s, f.samples_per_s, f.epoch_s, f.run_s,
        r and r.mean_age, len(r.ages) - 1 if r and r.ages else None, r and r.utilisation, r and r.flops_per_s,
        r and r.mfu, r and r.peak_memory_bytes, r and r.predicted_memory_bytes,
        r and r.state_memory_bytes, r and r.reserved_memory_bytes, f.communication_share,
        r and r.predicted_communication_s, r and r.predicted_bubble_s, r and r.energy_j, r and r.clock_mhz,
        " ".join(r.throttled) if r is not None else None, last and last.epoch, last and last.train_loss,
        last and last.validation_loss, f.accuracy, last and last.seconds,
        f.target and f.target.epoch, f.target and f.target.seconds, f.cost_per_epoch, f.cost_of_run, f.cost_to_target,
        "; ".join(f"{p.metric}={p.value:g}" for p, _ in f.published), f.row.created,
    )  # fmt: skip
