"""Slow-down factors of each process and of each level of links, relative to the original profile and cluster.

A factor is measured time over the time that the *original* profile and cluster predict for the current plan. So factors
measured under several plans are comparable, and a correction is never applied twice.

A factor is the logarithm of a ratio with a variance (a one-dimensional Kalman filter): a new window is weighted by its
certainty, and older ones are forgotten as the variance grows from window to window. A window that differs by more than
:data:`LIKE` and by more than three standard deviations begins a new estimate: a change point.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from asa.interfaces.executor import Probe
from asa.ir.codec import noun
from asa.ir.measurements import Measurements, Transfer
from asa.scheduler.shape import Message, Shape, ShapeFit, total_ratio

LIKE = math.log(1.1)
"""Difference of logarithms below which ranks count as equally fast, and levels as unchanged. Differences of up to four
standard deviations count as equal, too, so that no rank is excluded because of noise."""
STOLEN_SHARE, _MOST_STOLEN = 0.1, 0.25
"""Fractions of the time in which other programs used a rank's core. Above the first this is reported. Above the second
the rank's transfers are not used for links, because a busy core that copies messages delays other ranks. Where cores
copy messages, they are taken to be as slow as the rank's computation (:meth:`asa.scheduler.model.Model.corrected`)."""
MIN_STEPS = 10
"""Number of steps, in one window or several successive ones, that can show a change."""
_PROBES = 3
"""Number of successive probes of which the shortest counts."""
_PRIOR = 0.3**2
_FORGETTING = 0.01**2
"""Variance added to the logarithm of a factor in :data:`_USUAL` steps without a measurement."""
_USUAL = 20
"""Number of steps of a usual window."""
_FLOOR = 0.03**2
"""Variance of the logarithm of a value from any number of steps, because slow changes do not average out."""
_UNLIKE = 0.15**2
"""Largest variance added because kinds of transfers differ, so that no single factor fits all."""
_SURE, _SURER = 3.0, 4.0
"""Numbers of standard deviations that are required for a change point, and for a difference that plans are based on."""
_NORMAL_P90 = 1.2816


@noun
class Factor:
    """Estimate of one factor: ``mean`` and ``variance`` of the logarithm of measured over expected, after ``steps``
    steps. ``doubt``: mean over the last ``doubtful`` steps, if they differ from it but are too few for a change
    point."""

    mean: float = 0.0
    variance: float = _PRIOR
    steps: int = 0
    doubt: float = 0.0
    doubtful: int = 0

    @property
    def known(self) -> bool:
        """Whether it is based on enough steps for a decision."""
        return self.steps >= MIN_STEPS

    @property
    def ratio(self) -> float:
        """Ratio of measured to expected time."""
        return math.exp(self.mean)

    def aged(self, steps: int) -> Factor:
        """The estimate after ``steps`` steps without a measurement."""
        return replace(self, variance=min(_PRIOR, self.variance + _FORGETTING * steps / _USUAL))

    def update(self, value: float, variance: float, steps: int) -> Factor:
        """The estimate after a window of ``steps`` steps with logarithm ``value`` and variance ``variance``."""
        if not self.steps:
            return Factor(mean=value, variance=variance, steps=steps)
        distance = abs(value - self.mean)
        if distance <= LIKE or distance <= _SURE * math.sqrt(self.variance + variance):
            gain = self.variance / (self.variance + variance)
            mean = self.mean + gain * (value - self.mean)
            return Factor(mean=mean, variance=(1 - gain) * self.variance, steps=self.steps + steps)
        if self.doubtful and (value - self.mean) * (self.doubt - self.mean) > 0:
            total = self.doubtful + steps
            value, steps = (self.doubt * self.doubtful + value * steps) / total, total
        if steps >= MIN_STEPS:
            return Factor(mean=value, variance=variance, steps=steps)
        return replace(self, doubt=value, doubtful=steps)


@noun
class Slowness:
    """Estimated slowdowns, as logarithms: ``common`` to all computation, ``ranks`` by process in addition, ``levels``
    by level of links. ``residual``: of the step, beyond what these explain. ``sharing``: groups of processes with one
    core, and how many of each worked during the measurements. ``stolen``: processes whose core other programs use so
    much that their transfers were not measured. ``shapes``: how the additional time of each level depends on the
    message; by default, all times are multiplied."""

    common: float
    ranks: tuple[float, ...]
    levels: tuple[float, ...]
    shapes: tuple[Shape, ...] = ()
    residual: float = 0.0
    sharing: tuple[tuple[tuple[int, ...], int], ...] = ()
    stolen: tuple[int, ...] = ()

    def under(self, processes: Sequence[int]) -> Slowness:
        """Slowness if only ``processes`` work, corrected for the numbers of processes that share a core."""
        if not self.sharing:
            return self
        ranks = list(self.ranks)
        for group, worked in self.sharing:
            shift = sharing_shift(group, processes, worked)
            for p in group:
                ranks[p] += shift
        least = min(ranks)  # logarithms in addition to the common one are never below 0
        return replace(self, common=self.common + least, ranks=tuple(r - least for r in ranks), sharing=())

    def distance(self, other: Slowness) -> float:
        """Largest difference between the two in any estimate that affects the choice of a plan."""
        if [g for g, _ in self.sharing] != [g for g, _ in other.sharing]:
            return math.inf
        pairs = [(self.common, other.common), *zip(self.ranks, other.ranks, strict=True)]
        return max(abs(a - b) for a, b in [*pairs, *zip(self.levels, other.levels, strict=True)])

    def imbalance(self, other: Slowness) -> float:
        """Largest difference between the two in a rank or a level, relative to what is common to all."""
        mine, others = ([*s.ranks, *(level - s.common for level in s.levels)] for s in (self, other))
        return max(abs(a - b) for a, b in zip(mine, others, strict=True))


class Promise(Protocol):
    """Expected times of a plan; see :class:`asa.scheduler.expected.Expected`."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        ...

    @property
    def own_s(self) -> Sequence[float]:
        """Seconds of computation of each rank."""
        ...

    def message(self, transfer: Transfer) -> Message | None:
        """The transfer with its expected seconds; None if those are unknown."""
        ...


def sharing_shift(group: Sequence[int], processes: Sequence[int], worked: int) -> float:
    """Logarithm of the change in the times of ``group``, which has one core, if ``processes`` work instead of
    ``worked`` of its members."""
    return math.log(max(1, sum(p in group for p in processes)) / max(1, worked))


class Costs:
    """Estimates of the factors of ``processes`` processes and ``levels`` levels of links.

    ``by_rank``: whether ranks were ever measured separately; until then one factor of the whole step is used for all.
    """

    def __init__(self, processes: int, levels: int) -> None:
        self.ranks = [Factor() for _ in range(processes)]
        self.levels = [Factor() for _ in range(levels)]
        self.shapes = [ShapeFit() for _ in range(levels)]
        self.step_factor = Factor()
        """Factor of the whole step under the current plan."""
        self.biases = [0.0] * levels
        """Slowdown of transfers by level, as logarithms, that is not confirmed by the step time under the current
        plan."""
        self.by_rank = False
        self._stolen: set[int] = set()
        self._probes: dict[int, deque[float]] = {}
        self.probed_levels = set[int]()
        """Levels whose links were probed under the current plan."""
        self._last: Slowness | None = None

    def moved(self) -> None:
        """Discard estimates that are valid only for the previous plan."""
        self.step_factor, self.biases = Factor(), [0.0] * len(self.levels)
        self._probes, self.probed_levels = {}, set()

    def shift_group(self, group: Sequence[int], shift: float) -> None:
        """Change the estimates of ``group`` by ``shift``, because its members get more or less of their common core."""
        for p in group:
            self.ranks[p] = replace(self.ranks[p], mean=self.ranks[p].mean + shift)

    def _age(self, steps: int) -> None:
        self.step_factor = self.step_factor.aged(steps)
        self.ranks = [f.aged(steps) for f in self.ranks]
        self.levels = [f.aged(steps) for f in self.levels]

    def observe(
        self, measured: Measurements, expected: Promise, processes: Sequence[int], steps: int, ignored: Iterable[int],
        exposed: tuple[int, float] | None = None,
    ) -> None:  # fmt: skip
        """Update the estimates from a window of ``steps`` steps under a plan with the expected times ``expected``, run
        by ``processes``; values of the processes ``ignored`` are not used. ``exposed``: a level and its logarithm,
        derived from exposed communication, if single transfers do not show it."""
        variance = (spread(measured) + _FLOOR * max(0, MIN_STEPS - steps)) / steps + _FLOOR
        self._age(steps)
        self.step_factor = self.step_factor.update(math.log(typical(measured) / expected.step_s), variance, steps)
        if not measured.per_rank:
            if not self.by_rank:
                value = math.log(typical(measured) / expected.step_s)
                self.ranks = [f.update(value, variance, steps) for f in self.ranks]
                self.levels = [f.update(value, variance, steps) for f in self.levels]
            return
        self.by_rank = True
        ignored_ranks = set(ignored)
        for rank, process in enumerate(processes):
            own = own_s(measured, process)
            if process not in ignored_ranks and expected.own_s[rank] > 0 and own > 0:
                self.ranks[process] = self.ranks[process].update(math.log(own / expected.own_s[rank]), variance, steps)
        working = [p for p in processes if p < len(measured.per_rank)]
        stolen = {p for p in working if (measured.per_rank[p].stolen_share or 0.0) >= _MOST_STOLEN}
        self._stolen = self._stolen - set(working) | stolen
        if not stolen:
            for level, messages in _by_level(measured.links, expected).items():
                if total_ratio(messages) > math.exp(LIKE):
                    self.shapes[level].update(messages)
                else:
                    self.shapes[level] = ShapeFit()
            if exposed is None:
                self._transfers(measured.links, expected, steps)
            elif exposed[0] not in self.probed_levels:  # under this plan; a message of its own says more
                self.levels[exposed[0]] = self.levels[exposed[0]].update(exposed[1], _UNLIKE, steps)

    def probed(self, probe: Probe, processes: Sequence[int], expected: Promise, steps: int) -> None:
        """Update the estimates from a probe: of idle processes, compared with those that run the plan, and of levels
        the plan does not cross. It counts as much as the ``steps`` of the last window, and at least half of what shows
        a change."""
        steps = max(steps, MIN_STEPS // 2)
        for p, seconds in enumerate(probe.compute_s[: len(self.ranks)]):
            if seconds > 0 and math.isfinite(seconds):
                self._probes.setdefault(p, deque(maxlen=_PROBES)).append(math.log(seconds))
        # Other programs can disturb a short probe, so the shortest of several successive ones counts.
        shortest = {p: min(logs) for p, logs in self._probes.items()}
        working = [p for p in processes if p in shortest and self.ranks[p].known]
        if working:
            base = sum(self.ranks[p].mean - shortest[p] for p in working) / len(working)
            for p, log in shortest.items():
                if p not in processes:
                    self.ranks[p] = self.ranks[p].update(base + log, 2 * _FLOOR, steps)
        self.probed_levels |= {t.level for t in probe.links}
        self._transfers(probe.links, expected, steps)

    def _transfers(self, links: Sequence[Transfer], expected: Promise, steps: int) -> None:
        for level, messages in _by_level(links, expected).items():
            shape = self.shapes[level].shape
            value = shape.log_factor(messages)
            fitted = [shape.seconds(m.expected_s, m.carried_bytes, math.exp(value)) for m in messages]
            errors = [m.seconds * m.n * math.log(m.seconds / s) ** 2 for m, s in zip(messages, fitted, strict=True)]
            scatter = sum(errors) / sum(m.seconds * m.n for m in messages)
            if value < self.biases[level] - LIKE:  # what made its transfers seem slow is over
                self.biases[level] = max(0.0, value)
            value -= self.biases[level]
            variance = _FLOOR + min(scatter / len(messages), _UNLIKE)
            self.levels[level] = self.levels[level].update(value, variance, steps)

    def slowness(self) -> Slowness:
        """The estimates to plan with: the fastest ranks define what is common to all; similar ranks count as equal, and
        estimates within :data:`LIKE` of the original files are set to those.

        A rank that counted as different the last time counts as similar again only within half that distance, so that
        estimates near the limit do not alternate.
        """
        self._last = slowness = self._slowness()
        return slowness

    def _slowness(self) -> Slowness:
        measured = sorted((f.mean, p) for p, f in enumerate(self.ranks) if f.known)
        groups: list[list[tuple[float, int]]] = []
        for mean, p in measured:
            if groups and mean - sum(m for m, _ in groups[-1]) / len(groups[-1]) <= self._tolerance(p, groups[-1]):
                groups[-1].append((mean, p))
            else:
                groups.append([(mean, p)])
        centres = [sum(m for m, _ in g) / len(g) for g in groups]
        common = self._stable_common(centres[0], groups[0]) if centres else 0.0
        beyond = {p: centre - centres[0] for g, centre in zip(groups, centres, strict=True) for _, p in g}
        levels = [self._level(i, f) if self.by_rank else common for i, f in enumerate(self.levels)]
        used = [log for log, f in zip(levels, self.levels, strict=True) if f.known]
        floor = min([common, *used]) if used else 0.0
        if floor > LIKE:  # everything that was tried is slower: so is what no plan has used yet, as far as is known
            levels = [log if f.known else floor for log, f in zip(levels, self.levels, strict=True)]
        return Slowness(
            common=common, ranks=tuple(beyond.get(p, 0.0) for p in range(len(self.ranks))), levels=tuple(levels),
            shapes=tuple(fit.shape for fit in self.shapes), stolen=tuple(sorted(self._stolen)),
        )  # fmt: skip

    def _stable_common(self, common: float, group: Sequence[tuple[float, int]]) -> float:
        """``common``, or its previous value if it differs from that by more than :data:`LIKE` but neither significantly
        nor by twice as much."""
        previous = 0.0 if self._last is None else self._last.common
        deviation = math.sqrt(sum(self.ranks[p].variance for _, p in group)) / len(group)
        return previous if LIKE < abs(common - previous) <= min(_SURER * deviation, 2 * LIKE) else common

    def doubts(self) -> tuple[float, ...]:
        """By process, by how much the logarithm over the last steps differs from the estimate; 0 if it does not."""
        return tuple(f.doubt - f.mean if f.doubtful else 0.0 for f in self.ranks)

    def _level(self, index: int, factor: Factor) -> float:
        was_different = self._last is not None and self._last.levels[index] != 0
        slow = factor.known and abs(factor.mean) > _least_difference(factor.variance) / (2 if was_different else 1)
        return factor.mean if slow else 0.0

    def _tolerance(self, process: int, group: Sequence[tuple[float, int]]) -> float:
        """How far the logarithm of a process may be above the mean of a group to belong to it."""
        variances = [self.ranks[p].variance for _, p in group]
        last = self._last
        was_different = last is not None and any(last.ranks[p] != last.ranks[process] for _, p in group)
        variance = self.ranks[process].variance + sum(variances) / len(variances) ** 2
        return _least_difference(variance) / (2 if was_different else 1)

    def deviations(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Standard deviations of the logarithms of ranks and of levels."""
        return tuple(math.sqrt(f.variance) for f in self.ranks), tuple(math.sqrt(f.variance) for f in self.levels)


def _by_level(links: Iterable[Transfer], expected: Promise) -> dict[int, list[Message]]:
    """The transfers with known expected times, by level."""
    by_level: dict[int, list[Message]] = {}
    for t in links:
        message = expected.message(t)
        if message is not None and t.n > 0 and t.seconds > 0 and math.isfinite(t.seconds):
            by_level.setdefault(t.level, []).append(message)
    return by_level


def _least_difference(variance: float) -> float:
    """The smallest difference of a logarithm with this variance that counts as a difference."""
    return max(LIKE, _SURER * math.sqrt(variance))


def typical(measured: Measurements) -> float:
    """Typical seconds of a step: its mean, but at most the 90th percentile, so that outliers count little. The median
    if no mean was measured."""
    step = measured.step_time
    mean = step.median if measured.mean_step_s is None else measured.mean_step_s
    return min(mean, max(step.p90, step.median))


def own_s(measured: Measurements, process: int) -> float:
    """Typical seconds that a process computes in a step, like :func:`typical`; 0 if it did not report any."""
    if process >= len(measured.per_rank):
        return 0.0
    rank, step = measured.per_rank[process], measured.step_time
    if not (rank.mean_own_s and rank.mean_own_s > 0) or rank.own_s <= 0 or step.median <= 0:
        return rank.own_s
    return min(rank.mean_own_s, rank.own_s * max(1.0, step.p90 / step.median))


def spread(measured: Measurements) -> float:
    """Variance of the logarithm of one step's time."""
    step = measured.step_time
    if step.median <= 0:
        return 1.0
    return float((1.2533 * (step.p90 - step.p10) / (2 * _NORMAL_P90 * step.median)) ** 2)
