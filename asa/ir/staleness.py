"""Effect of stale gradients and local steps on convergence: curves of training on one device, stored beside a profile.

Every run has the same global batches. A *setting* says how they are applied:

- A whole batch at once: one worker without delay, plain training.
- In the shares of ``workers`` workers, each applied ``delay`` updates after it was computed.
- By workers that train independently for ``period`` global batches and then average their weights.

Runs of one setting differ in their seed. Values outside the measured range are unknown; nothing is extrapolated.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

from asa.errors import InvalidInputError, UsageError
from asa.ir.codec import later, noun
from asa.ir.consistency import Discipline, parse
from asa.ir.plan import OptimizerName
from asa.ir.units import MOST_CLASSES, MOST_SAMPLES

MOST_RUNS, MOST_POINTS, MOST_SETTINGS = 1000, 10_000, 200
_WORKERS = 1 << 16


@noun
class Setting:
    """How global batches are applied.

    Attributes:
        workers: number of shares of a global batch. Each share is an update by itself, at the learning rate over
            ``workers``. If ``period`` is above 0: number of models that train independently.
        delay: number of other updates between the computation of a gradient and its own update.
        weighted: whether an update of age a (whole global batches of others' gradients) is weighted by 1 / (1 + a).
        period: global batches between two averages; 0 if gradients are applied to one model.
        momentum: momentum of SGD; None for the run's own.
        outer_rate, outer_momentum: learning rate and momentum of the outer optimizer (SGD with Nesterov momentum),
            whose gradient is the mean change of weights.
        pushed: global batches of which a worker sums the gradients of its shares before they are an update.
    """

    workers: int = 1
    delay: int = 0
    weighted: bool = False
    period: int = 0
    momentum: float | None = None
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    pushed: int = later(1)

    def __post_init__(self) -> None:
        if not 1 <= self.pushed <= MOST_POINTS or (self.period and self.pushed > 1):
            raise ValueError(f"pushed is 1 to {MOST_POINTS} batches, and 1 with a period, got {self.pushed}")
        if not (1 <= self.workers <= _WORKERS and 0 <= self.delay <= _WORKERS and 0 <= self.period <= MOST_POINTS):
            raise ValueError(
                f"a setting needs workers of 1 to {_WORKERS}, a delay of 0 to {_WORKERS} and a period of 0 to "
                f"{MOST_POINTS}, got {self.workers}, {self.delay}, {self.period}"
            )
        if self.period and self.delay:
            raise ValueError("a setting has a delay or a period, not both")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError("a momentum is at least 0 and below 1")
        if not (0 < self.outer_rate <= 100 and 0 <= self.outer_momentum < 1):
            raise ValueError("an outer rate is above 0 and at most 100, an outer momentum at least 0 and below 1")

    @property
    def age(self) -> float:
        """Number of global batches of other gradients applied between the computation of a gradient and its update."""
        return self.delay * self.pushed / self.workers

    @property
    def words(self) -> str:
        """Description of the setting."""
        if self.period:
            outer = f", outer rate {self.outer_rate:g}" if self.outer_rate != 1 else ""
            return f"{self.workers} workers meet every {self.period} batches{outer}"
        if self.workers == 1 and not self.delay:
            return "whole batches, no delay"
        momentum = f", momentum {self.momentum:.3g}" if self.momentum is not None else ""
        several = f"{self.pushed} " * (self.pushed > 1)
        return f"{several}batches in {self.workers}, {self.delay} updates late{', weighted' * self.weighted}{momentum}"


PLAIN = Setting()
ONE_LATE = Setting(delay=1)
"""Every update is delayed by one, as in a pipeline that is not drained."""


@noun
class TrainingRun:
    """Validation losses and accuracies (0 to 1) of one run, at regular intervals. A run that diverged ends early."""

    seed: int
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    diverged: bool = False

    def __post_init__(self) -> None:
        if len(self.losses) != len(self.accuracies) or len(self.losses) > MOST_POINTS:
            raise ValueError(f"a run has as many losses as accuracies, at most {MOST_POINTS}")
        if any(not 0 <= a <= 1 for a in self.accuracies) or any(x < 0 for x in self.losses):
            raise ValueError("accuracies are 0 to 1, losses at least 0")


@noun
class Target:
    """Goal of a training: a validation accuracy of at least ``value``, or a loss of at most ``value``."""

    what: str
    value: float

    def __str__(self) -> str:
        return f"{self.what}={self.value:g}"


def parse_target(text: str) -> Target:
    """Parse ``accuracy=0.9`` or ``loss=0.5``.

    >>> str(parse_target("accuracy=0.9"))
    'accuracy=0.9'

    Raises:
        ValueError: another form, or an impossible value.
    """
    match = re.fullmatch(r"\s*(accuracy|loss)\s*=\s*([0-9.eE+-]+)\s*", text)
    try:
        value = float(match[2]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise ValueError(f"{text!r} is not a target; write accuracy=0.9 or loss=0.5")
    if value <= 0 or (match[1] == "accuracy" and value > 1):
        raise ValueError(f"{text!r}: an accuracy is above 0 and at most 1, a loss is above 0")
    return Target(what=match[1], value=value)


@noun
class Steps:
    """Number of global batches to a target over several seeds: median, minimum and maximum. Values are None if unknown.

    ``reached`` of the ``seeds`` runs reach the target. The others are later than those. So the maximum is unknown if
    not all reach it, and so is the median if half of them or more do not.
    """

    median: float | None
    low: float | None
    high: float | None
    reached: int
    seeds: int


@noun
class Curve:
    """Validation curves of the runs of one setting."""

    setting: Setting
    runs: tuple[TrainingRun, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.runs) <= MOST_RUNS or len({r.seed for r in self.runs}) != len(self.runs):
            raise ValueError(f"a curve has 1 to {MOST_RUNS} runs, each with a seed of its own")


@noun
class Staleness:
    """Convergence of one model, data set, optimizer and global batch under stale gradients.

    Attributes:
        workers: number of workers of its delayed and averaged settings.
        every: global batches between two evaluations.
        steps: largest number of global batches of a run.
        skipped: descriptions of runs for which there was no time.
        schedule: course of the learning rate over the ``steps`` of a run: ``constant``, or ``as in training`` (warm-up
            and cosine). Its peak is ``learning_rate``.
    """

    model_spec: str
    model_fingerprint: str
    input_shape: tuple[int, ...]
    num_classes: int
    data: str
    optimizer: OptimizerName
    learning_rate: float
    momentum: float
    weight_decay: float
    global_batch: int
    workers: int
    steps: int
    every: int
    curves: tuple[Curve, ...]
    created: str
    asa_version: str
    torch_version: str
    device: str
    skipped: tuple[str, ...] = ()
    schedule: str = later("constant")

    def __post_init__(self) -> None:
        counts = (self.global_batch, self.workers, self.steps, self.every, self.num_classes)
        if not all(n >= 1 for n in counts) or self.global_batch > MOST_SAMPLES or self.num_classes > MOST_CLASSES:
            raise InvalidInputError("global_batch, workers, steps, every and num_classes are at least 1", where="$")
        if not (self.learning_rate > 0 and 0 <= self.momentum < 1 and self.weight_decay >= 0):
            raise InvalidInputError("a learning rate is above 0, momentum 0 to 1, weight decay at least 0", where="$")
        if self.steps > self.every * MOST_POINTS or len(self.curves) > MOST_SETTINGS:
            raise InvalidInputError(
                f"at most {MOST_POINTS} evaluations per run and {MOST_SETTINGS} curves", where="$.curves"
            )
        if len({c.setting for c in self.curves}) != len(self.curves):
            raise InvalidInputError("a setting appears twice", where="$.curves")
        most = self.steps // self.every
        for i, c in enumerate(self.curves):
            if any(len(r.losses) > most for r in c.runs):
                raise InvalidInputError(
                    f"a run of {self.steps} steps has at most {most} evaluations", where=f"$.curves[{i}].runs"
                )

    def curve(self, setting: Setting) -> Curve | None:
        """The runs of a setting; None if it was not measured."""
        return next((c for c in self.curves if c.setting == setting), None)

    def steps_to(self, target: Target, setting: Setting) -> Steps | None:
        """Global batches to ``target`` under a measured setting; None if it was not measured."""
        curve = self.curve(setting)
        if curve is None:
            return None
        reached = [s for r in curve.runs if (s := self._first(r, target)) is not None]
        return _of(reached, len(curve.runs))

    def _first(self, run: TrainingRun, target: Target) -> int | None:
        values = run.accuracies if target.what == "accuracy" else run.losses
        sign = 1 if target.what == "accuracy" else -1
        return next((self.every * (i + 1) for i, v in enumerate(values) if sign * v >= sign * target.value), None)

    def at_age(
        self, target: Target, age: float, *, weighted: bool = False, momentum: float | None = None, pushed: int = 1
    ) -> Steps | None:
        """Global batches to ``target`` if gradients are ``age`` global batches old on average and are applied with
        ``momentum`` (None: the run's own), those of ``pushed`` batches at once. None outside the measured range.

        The value is interpolated between the two nearest measured ages. A gradient of an age below 1 has weight 1, so
        unweighted settings count as weighted ones there.
        """
        settings = {
            c.setting.age: c.setting
            for c in sorted(self.curves, key=lambda c: c.setting.weighted)
            if not c.setting.period and c.setting.workers == self.workers and c.setting.pushed == pushed
            and abs(self._momentum(c.setting) - (self.momentum if momentum is None else momentum)) < 1e-9
            and (c.setting.weighted == weighted or (weighted and c.setting.age < 1))
        }  # fmt: skip
        return self._between(target, settings, age)

    def _momentum(self, setting: Setting) -> float:
        return self.momentum if setting.momentum is None else setting.momentum

    def at_period(
        self, target: Target, period: float, *, outer_rate: float = 1.0, outer_momentum: float = 0.0
    ) -> Steps | None:
        """Global batches to ``target`` if workers average every ``period`` global batches; interpolated as in
        :meth:`at_age`."""
        settings = {
            float(c.setting.period): c.setting
            for c in self.curves
            if c.setting.period and c.setting.workers == self.workers
            and (c.setting.outer_rate, c.setting.outer_momentum) == (outer_rate, outer_momentum)
        }  # fmt: skip
        return self._between(target, settings, period)

    def under(self, discipline: Discipline, workers: int, target: Target, age: float) -> tuple[Steps | None, str]:
        """(steps, reason): global batches to ``target`` of ``workers`` workers under ``discipline``, where gradients
        are ``age`` global batches old on average. Steps that were not measured are None, and ``reason`` says why."""
        command = f"`asa profile {self.model_spec} --staleness --workers {workers}"
        if self.workers != workers:
            return None, f"curves are of {self.workers} workers: {command}`"
        if _is_aged(discipline):
            momentum = discipline.momentum_at(self.momentum, workers) if self.momentum else 0.0
            weighted, pushed = discipline.name == "ps_bounded", _pushed(discipline)
            steps = self.at_age(target, age, weighted=weighted, momentum=momentum, pushed=pushed)
            missing = f"no curve at age {age:.2g} and momentum {momentum:.3g}" + f" of {pushed} batches" * (pushed > 1)
            within = age <= _OLDEST * pushed
            return steps, f"{missing}: {command} --strategies {discipline}`" if within else missing
        if _is_averaged(discipline):
            rate, outer = discipline.outer_rate, discipline.outer_momentum
            steps = self.at_period(target, discipline.period, outer_rate=rate, outer_momentum=outer)
            return steps, f"no curve of a period of {discipline.period}: {command} --strategies {discipline}`"
        return None, "what it does to convergence was not measured"

    def _between(self, target: Target, settings: dict[float, Setting], at: float) -> Steps | None:
        below, above = [x for x in settings if x <= at + 1e-9], [x for x in settings if x >= at - 1e-9]
        if not below or not above:
            return None
        low, high = max(below), min(above)
        a, b = self.steps_to(target, settings[low]), self.steps_to(target, settings[high])
        assert a is not None, "it was found among the curves"
        assert b is not None, "it was found among the curves"
        share = (at - low) / (high - low) if high > low else 0.0

        def mixed(x: float | None, y: float | None) -> float | None:
            return None if x is None or y is None else x + share * (y - x)

        worse = a if a.reached * b.seeds <= b.reached * a.seeds else b
        return Steps(
            median=mixed(a.median, b.median), low=mixed(a.low, b.low), high=mixed(a.high, b.high),
            reached=worse.reached, seeds=worse.seeds,
        )  # fmt: skip


def _of(reached: Sequence[int], seeds: int) -> Steps:
    middle = statistics.median([*reached, *[math.inf] * (seeds - len(reached))])
    return Steps(
        median=None if middle == math.inf else float(middle),
        low=float(min(reached)) if reached else None,
        high=float(max(reached)) if reached and len(reached) == seeds else None,
        reached=len(reached),
        seeds=seeds,
    )


_OLDEST = 4
"""Highest measured age of gradients, in updates of every worker."""


def _is_aged(discipline: Discipline) -> bool:
    """Whether gradients are applied late, by servers or to shared memory."""
    return discipline.name in ("ps_async", "ps_bounded", "hogwild", "downpour")


def _pushed(discipline: Discipline) -> int:
    return discipline.period if discipline.name == "downpour" else 1


def _is_averaged(d: Discipline) -> bool:
    """Whether workers average in whole numbers at a fixed period, on data of the same distribution."""
    fixed = d.waiting == "local" and not d.growth and not d.spread and d.fraction == 1
    return fixed and d.message == "fp32" and d.fragments == 1 and d.overlap == 0 and d.quorum is None


def settings_of(discipline: Discipline, workers: int, momentum: float) -> tuple[Setting, ...]:
    """Settings whose curves the time to a target under ``discipline`` is read from. ``momentum``: the run's own.

    Raises:
        UsageError: no setting trains as the discipline does.
    """
    if _is_aged(discipline):
        less = discipline.momentum_at(momentum, workers) if momentum else None
        ages = dict.fromkeys((0, workers - 1, workers, 2 * workers, _OLDEST * workers))
        weighted = discipline.name == "ps_bounded"
        return tuple(
            Setting(
                workers=workers, delay=d, momentum=less, weighted=weighted and d >= workers, pushed=_pushed(discipline)
            )
            for d in ages
        )  # fmt: skip
    if _is_averaged(discipline):
        rate, outer = discipline.outer_rate, discipline.outer_momentum
        return (Setting(workers=workers, period=discipline.period, outer_rate=rate, outer_momentum=outer),)
    raise UsageError(
        f"what {discipline} does to convergence is not measured on one device; ask for ps_async, ps_bounded, hogwild, "
        "downpour, local_sgd, diloco or fedavg, without growth, fragments, overlap, quorum, fraction, spread or int8"
    )


def usual_settings(workers: int, momentum: float = 0.0, asked: Sequence[Discipline] = ()) -> tuple[Setting, ...]:
    """Default settings of a curve: plain training, averaging, and ages up to 4 global batches, with ``momentum``
    reduced as at servers (:meth:`asa.ir.consistency.Discipline.momentum_at`). Those of disciplines that were ``asked``
    for follow plain training.

    Raises:
        UsageError: fewer than 2 workers, which have no staleness, or a discipline that no setting trains as.
    """
    if workers < 2:
        raise UsageError(f"staleness among {workers} workers: at least 2 are needed")
    averaged = (f"local_sgd:period={p}" for p in (1, 4, 16))
    usual = [parse(d) for d in ("ps_async", "ps_bounded", *averaged, "diloco", "downpour")]
    settings = [s for d in (*asked, *usual) for s in settings_of(d, workers, momentum)]
    return tuple(dict.fromkeys((PLAIN, ONE_LATE, *settings)))
