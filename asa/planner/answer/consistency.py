"""A table of disciplines of consistency: seconds per step and, where curves of staleness are known, time to a target.

Synchronous training with uneven batches is in every table. Where the speeds of devices are known it has no straggler
and no staleness, so a discipline that is not faster is not worth its cost in convergence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from asa.cost.consistency import Played, play
from asa.cost.machine.estimate import on_device
from asa.cost.planned import Price
from asa.errors import UsageError
from asa.interfaces.strategy import Strategies
from asa.ir.cluster import Cluster
from asa.ir.codec import noun
from asa.ir.consistency import CHANGES, NAMES, WAITS_FOR, Discipline, parse
from asa.ir.layout import Layout, lowest_terms
from asa.ir.plan import Plan
from asa.ir.profile import Profile
from asa.ir.staleness import ONE_LATE, PLAIN, Staleness, Steps, Target
from asa.planner.answer.disciplines import undrained
from asa.planner.answer.prediction import memory_max, predict
from asa.planner.pipeline.whole import row
from asa.planner.space.candidate import Candidate, Prices
from asa.planner.space.consistency import Disciplined, disciplined, machine
from asa.planner.space.request import Request
from asa.planner.space.space import Space

EVEN, UNEVEN = "ddp", "ddp, uneven batches"
_ALL = "every worker waits in every step"


@noun
class TimeToTarget:
    """Seconds to the target. ``median_s`` is the median number of steps over seeds times the predicted step time;
    ``low_s`` and ``high_s`` are those of the lowest and the highest of both; ``cost`` is that of ``median_s``. None:
    unknown."""

    median_s: float | None
    low_s: float | None
    high_s: float | None
    cost: float | None = None


@noun
class ConsistencyRow:
    """One way in which workers wait for each other.

    Attributes:
        name: the discipline as in ``--strategies``, or a kind of synchronous training.
        exact: whether it trains as plain data parallelism does.
        step_time_s: seconds per global batch, with its 90 % interval.
        mean_age, max_age: age of gradients, in global batches of others' gradients.
        waited: share of the time for which the worker that waits most is waiting.
        steps: global batches to the target; None where unknown, and ``unknown`` says why.
        fits: whether the devices have enough memory.
    """

    name: str
    waits_for: str
    changes: str
    exact: bool
    step_time_s: float | None
    step_time_low_s: float | None = None
    step_time_high_s: float | None = None
    samples_per_s: float | None = None
    memory_bytes_max: int | None = None
    fits: bool = True
    why_not: str = ""
    mean_age: float = 0.0
    max_age: int = 0
    waited: float = 0.0
    rejected: float = 0.0
    steps: Steps | None = None
    time_to_target: TimeToTarget | None = None
    unknown: str = ""


@noun
class Consistency:
    """The table. ``fastest`` has the shortest step of those that fit; ``first`` reaches the target first by the median.
    ``surely``: the slowest of 3 or more seeds of ``first`` is faster than the fastest of synchronous training, at their
    predicted step times, since an error of the machine's speed is common to both."""

    rows: tuple[ConsistencyRow, ...]
    fastest: str
    target: str = ""
    curves: str = ""
    first: str = ""
    surely: bool = False


def compare(
    profile: Profile, cluster: Cluster, strategies: Strategies, request: Request, answer: Plan, *,
    loosely: bool, target: Target | None = None, curves: Sequence[Staleness] = (),
    asked: Sequence[Discipline] = (),
) -> Consistency:  # fmt: skip
    """The table with the plan ``answer`` and synchronous training and, with ``loosely``, every discipline at its usual
    settings and those ``asked`` for. ``curves`` are searched for those of this model, optimizer and batch.

    Raises:
        UsageError: plain data parallelism cannot run, for example with fewer than 2 devices.
    """
    order = cluster.fastest_first()
    ordered = cluster if order is None else cluster.ordered(order)
    used = on_device(profile, ordered)
    prices = Prices(Space(used, ordered, strategies, replace(request, strategies=None)))
    workers = row("ddp", prices)
    if workers.candidate is None:
        raise UsageError(f"no discipline of consistency can run: data parallelism {workers.why_not}")
    judged = _Judge(prices, workers.candidate, target, curves_for(curves, profile, request))
    rows = [judged.planned(answer), judged.synchronous(EVEN, workers.candidate)]
    uneven = _uneven(prices, workers.candidate)
    rows.append(
        judged.synchronous(UNEVEN, uneven)
        if uneven is not None
        else replace(rows[-1], name=UNEVEN, waits_for="devices are equally fast: shares are even already")
    )
    if loosely:
        texts = dict.fromkeys((*NAMES, *map(str, asked)))
        disciplines = [parse(text) for text in texts]
        rows += [judged.discipline(d) for d in disciplines]
    ready = [r for r in rows if r.fits and r.step_time_s is not None]
    with_target = [r for r in ready if r.time_to_target is not None and r.time_to_target.median_s is not None]
    first = min(with_target, key=_median, default=None)
    return Consistency(
        rows=tuple(rows),
        fastest=min(ready, key=lambda r: r.step_time_s or math.inf).name if ready else "",
        target=str(target) if target is not None else "",
        curves=judged.curves_in_words,
        first=first.name if first is not None else "",
        surely=first is not None and _surely(first, with_target),
    )


def _aged(row: ConsistencyRow, played: Played) -> ConsistencyRow:
    """``row`` with the ages and the waiting of a simulated run."""
    waited = max(played.waited, default=0.0)
    return replace(row, mean_age=played.mean_age, max_age=played.max_age, waited=waited, rejected=played.rejected)


def _seconds(steps: float | None, step_s: float | None) -> float | None:
    """Seconds of so many steps; None where either is unknown."""
    return None if steps is None or step_s is None else steps * step_s


def _median(r: ConsistencyRow) -> float:
    assert r.time_to_target is not None
    return r.time_to_target.median_s or math.inf


def _surely(first: ConsistencyRow, rows: Sequence[ConsistencyRow]) -> bool:
    """Whether ``first`` is exact, or its slowest of 3 or more seeds is faster than the fastest of every exact row."""
    worst = _seconds(first.steps.high, first.step_time_s) if first.steps and first.steps.seeds > 2 else None
    others = [_seconds(r.steps.low, r.step_time_s) for r in rows if r.exact and r.steps]
    return first.exact or (worst is not None and bool(others) and all(o is not None and worst < o for o in others))


def curves_for(curves: Sequence[Staleness], profile: Profile, request: Request) -> Staleness | str:
    """The first of ``curves`` for this model, optimizer and batch, if possible of as many workers as devices; or the
    reason why there are none."""
    same = [c for c in curves if c.model_fingerprint == profile.model_fingerprint and c.optimizer == request.optimizer]
    fitting = [c for c in same if c.global_batch == request.global_batch]
    if fitting:
        return min(fitting, key=lambda c: c.workers != request.gpus)
    if same:
        return f"curves are of a global batch of {same[0].global_batch}, not {request.global_batch}"
    return f"no curves of {profile.model_spec} with {request.optimizer}: `asa profile {profile.model_spec} --staleness`"


def _uneven(prices: Prices, replicated: Candidate) -> Candidate | None:
    """``replicated`` with shares in proportion to device speeds; None for equal speeds or several microbatches."""
    ranks, batch = replicated.ranks, prices.space.request.global_batch
    speeds = prices.space.cluster.speeds(range(ranks))
    if len(set(speeds)) < 2 or replicated.num_microbatches > 1:
        return None
    exact_shares = [batch * s / sum(speeds) for s in speeds]
    shares = [max(1, int(x)) for x in exact_shares]
    for i in sorted(range(ranks), key=lambda i: shares[i] - exact_shares[i])[: max(0, batch - sum(shares))]:
        shares[i] += 1
    layout = Layout(width=ranks, data=ranks, tensor=1, weights=lowest_terms(tuple(shares)))
    return replace(replicated, ways=tuple(replace(w, layout=layout) for w in replicated.ways))


class _Judge:
    """Makes the rows of one table."""

    def __init__(self, prices: Prices, workers: Candidate, target: Target | None, curves: Staleness | str) -> None:
        self._prices, self._workers, self._target = prices, workers, target
        self._curves = curves
        self.curves_in_words = "" if target is None else curves if isinstance(curves, str) else _source(curves)
        space = prices.space
        usual = predict(
            prices.of(workers), space.profile, space.cluster, widths=workers.widths,
            global_batch=space.request.global_batch,
        )  # fmt: skip
        self._factor = usual.step_time_high_s / usual.step_time_s if usual.step_time_s > 0 else 1.0

    def planned(self, plan: Plan) -> ConsistencyRow:
        """The row of the planner's answer."""
        d, p = plan.consistency, plan.prediction
        words = (_ALL, "nothing") if d is None else (WAITS_FOR[d.name], CHANGES[d.name])
        row = ConsistencyRow(
            name=f"this plan ({plan.strategy})", waits_for=words[0], changes=words[1],
            exact=d is None or self._exact(d), step_time_s=p.step_time_s, step_time_low_s=p.step_time_low_s,
            step_time_high_s=p.step_time_high_s, samples_per_s=p.samples_per_s,
            memory_bytes_max=max(p.memory_bytes_per_rank),
        )  # fmt: skip
        if d is None:
            return self._with_time(row, *self._synchronous_steps())
        if d.waiting == "pipelined":
            return self._with_time(replace(row, mean_age=1.0, max_age=1), *self._late_by_one())
        if d.groups is None:
            row = _aged(row, disciplined(self._prices, self._workers, d).played)
        return self._with_time(row, *self._steps(d, row))

    def synchronous(self, name: str, candidate: Candidate) -> ConsistencyRow:
        """The row of synchronous data parallelism with the shares of ``candidate``."""
        price = self._prices.of(candidate)
        row = replace(
            self._row(name, price, _ALL, "nothing", exact=True),
            fits=self._prices.fits(candidate),
            waited=max(play(None, machine(self._prices, candidate, None), steps=8).waited) if name == EVEN else 0.0,
        )
        return self._with_time(row, *self._synchronous_steps())

    def discipline(self, d: Discipline) -> ConsistencyRow:
        """The row of a discipline on the workers of data parallelism, or of a pipelined one on a ``1f1b`` pipeline."""
        words = WAITS_FOR[d.name], CHANGES[d.name]
        try:
            d.workers(self._workers.ranks)
            if d.waiting == "pipelined":
                price = undrained(self._prices)
                row = replace(self._row(str(d), price, *words, exact=False), mean_age=1.0, max_age=1)
                row = replace(row, fits=price.peak.total <= self._prices.capacity(self._workers))
                return self._with_time(row, *self._late_by_one())
            priced: Disciplined = disciplined(self._prices, self._workers, d)
        except UsageError as error:
            return ConsistencyRow(
                name=str(d), waits_for=words[0], changes=words[1], exact=self._exact(d), step_time_s=None, fits=False,
                why_not=str(error),
            )  # fmt: skip
        row = _aged(self._row(str(d), priced.price, *words, exact=self._exact(d)), priced.played)
        row = replace(row, fits=priced.price.peak.total <= self._prices.capacity(self._workers))
        return self._with_time(row, *self._steps(d, row))

    def _exact(self, d: Discipline) -> bool:
        return d.exact(self._prices.space.request.optimizer)

    def _row(self, name: str, price: Price, waits: str, changes: str, *, exact: bool) -> ConsistencyRow:
        step = price.cost.total_s
        return ConsistencyRow(
            name=name, waits_for=waits, changes=changes, exact=exact, step_time_s=step,
            step_time_low_s=step / self._factor, step_time_high_s=step * self._factor,
            samples_per_s=self._prices.space.request.global_batch / step if step > 0 else None,
            memory_bytes_max=memory_max(price, self._prices.space.cluster),
        )  # fmt: skip

    def _synchronous_steps(self) -> tuple[Steps | None, str]:
        if self._target is None:
            return None, ""
        if isinstance(self._curves, str):
            return None, self._curves
        return self._curves.steps_to(self._target, PLAIN), "plain training was not measured"

    def _late_by_one(self) -> tuple[Steps | None, str]:
        """Global batches to the target where every update is one batch late, or the reason why they are unknown."""
        if self._target is None or isinstance(self._curves, str):
            return self._synchronous_steps()
        return self._curves.steps_to(self._target, ONE_LATE), f"no curve of {ONE_LATE.words}"

    def _steps(self, d: Discipline, row: ConsistencyRow) -> tuple[Steps | None, str]:
        """Global batches to the target under ``d``, or the reason why they are unknown."""
        curves, target = self._curves, self._target
        if target is None or self._exact(d) or isinstance(curves, str):
            return self._synchronous_steps()
        return curves.under(d, d.workers(self._workers.ranks), target, row.mean_age)

    def _with_time(self, row: ConsistencyRow, steps: Steps | None, unknown: str) -> ConsistencyRow:
        if self._target is None:
            return row
        if steps is None:
            return replace(row, unknown=unknown)
        if steps.reached == 0:
            unknown = "no run reached it"
        elif steps.median is None or steps.high is None:
            unknown = f"{steps.reached} of {steps.seeds} seeds reached it"
        else:
            unknown = ""
        return replace(
            row, steps=steps, unknown=unknown,
            time_to_target=TimeToTarget(
                median_s=_seconds(steps.median, row.step_time_s), low_s=_seconds(steps.low, row.step_time_low_s),
                high_s=_seconds(steps.high, row.step_time_high_s),
            ),
        )  # fmt: skip


def _source(curves: Staleness) -> str:
    seeds = max((len(c.runs) for c in curves.curves), default=0)
    return (
        f"{curves.data}, {curves.optimizer} at {curves.learning_rate:g} ({curves.schedule}), batch "
        f"{curves.global_batch}, {curves.workers} workers, up to {seeds} seeds, {curves.steps} global batches"
    )
