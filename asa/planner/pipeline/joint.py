"""The joint search over stages, cuts, widths, microbatches, schedules and layouts.

Every pair of a number of microbatches and a schedule is a case with a lower bound that rises in steps
(:mod:`asa.planner.pipeline.case`). The search always advances the case with the lowest bound. It ends when this bound
reaches the incumbent: no faster plan exists then.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from asa.interfaces.schedule import Schedule
from asa.planner import clock
from asa.planner.budget import ROUNDING, USUAL, Effort
from asa.planner.pipeline.floors import Paced, floors
from asa.planner.pipeline.open_list import OpenList
from asa.planner.pipeline.stage_cache import StageCache
from asa.planner.pipeline.staged import Pipelined, Skeleton, StagedSpace
from asa.planner.stage import exhaustive
from asa.planner.stage.lattice import INF
from asa.planner.stage.problem import Choice

MOST_COMPONENTS, MOST_RANKS = 100, 128
"""With more, pipeline plans are bounded by compute, but not searched in full."""
SLACK_GIB = 1e-9
"""Amount by which a plan may exceed the memory limit (rounding)."""


class Item(Protocol):
    """A part of the space with a lower bound in ms on all its plans that rises in steps: a case, or plans of one stage.

    ``value``: ms of its own best plan, for parts that store it. ``stuck``: the bound rises no further.
    """

    level: int
    stuck: bool

    @property
    def bound(self) -> float: ...
    @property
    def value(self) -> float: ...

    def step(self, best: float, ends: float) -> None:
        """Raise the bound until the time ``ends`` at most. Plans of ``best`` ms or more do not count."""


class Incumbent:
    """The best plan so far, and the curve of best plan and bound over time. ``limit``: ms of the best plan of all
    kinds; ``value``: ms of the best pipeline plan."""

    def __init__(self, pipelines: StagedSpace | None, incumbent_ms: float, started: float | None = None) -> None:
        self.pipelines = pipelines
        self.limit, self.value = incumbent_ms, float("inf")
        self.skeleton: Skeleton | None = None
        self.choices: tuple[Choice, ...] = ()
        self.started = clock.now() if started is None else started
        self.curve: list[tuple[float, float, float]] = []
        self.bound = 0.0

    def note_other(self, value: float) -> None:
        """Note a plan of ``value`` ms that another part of the search stores."""
        if value < self.limit:
            self.limit, self.value, self.skeleton, self.choices = value, float("inf"), None, ()
            self.note(self.bound)

    def offer(self, value: float, skeleton: Skeleton, choices: tuple[Choice, ...]) -> bool:
        """Make a plan the incumbent if it is faster and fits; returns whether it did."""
        if value >= self.limit or not self._fits(skeleton, choices):
            return False
        self.limit = self.value = value
        self.skeleton, self.choices = skeleton, choices
        self.note(self.bound)
        return True

    def note(self, bound: float) -> None:
        """Raise the bound, and add a point to the curve."""
        self.bound = max(self.bound, min(bound, self.limit))
        point = (clock.now() - self.started, self.limit, self.bound)
        if not self.curve or point[1:] != self.curve[-1][1:]:
            self.curve.append(point)

    def _fits(self, skeleton: Skeleton, choices: tuple[Choice, ...]) -> bool:
        x, p = self.pipelines, len(skeleton.widths)
        assert x is not None
        schedule = x.schedules[skeleton.schedule]
        if any(x.crossing(start) < 0 for start in skeleton.starts[1:]):
            return False
        for s, (w, start, choice) in enumerate(zip(skeleton.widths, skeleton.starts, choices, strict=True)):
            chain = x.chain(w, skeleton.num_microbatches)
            if chain is None:
                return False
            problem = chain.chosen(start, choice, schedule.in_flight(s, p, skeleton.num_microbatches))
            if exhaustive.peak(problem, (0,) * len(choice)) > problem.capacity + SLACK_GIB:
                return False
        return x.fits(skeleton, choices)


def searched(pipelines: StagedSpace) -> bool:
    """Whether pipeline plans are searched in full, not only bounded."""
    return len(pipelines.names) <= MOST_COMPONENTS and pipelines.gpus <= MOST_RANKS


def search(
    pipelines: StagedSpace,
    *,
    incumbent_ms: float = float("inf"),
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    patience_s: float = 0.0,
    others: Sequence[Item] = (),
    started: float | None = None,
    floor: dict[int, float] | None = None,
    near: Mapping[int, Paced] | None = None,
    effort: Effort = USUAL.effort,
) -> Pipelined:
    """The fastest pipeline plan below ``incumbent_ms``, if any, with a lower bound.

    ``others`` are searched along with it. They store their own plans; the bound covers them, too. The search ends when
    the bound reaches the best plan, after ``patience_s`` when it reaches the share ``1 - gap`` of it, or when time is
    up. ``started``: where the curve begins. ``floor``: a bound for each number of microbatches to search
    (:mod:`asa.planner.pipeline.floors`); all where None. ``near`` raises some of these bounds.
    """
    best = Incumbent(pipelines, incumbent_ms, started)
    ends = clock.now() + time_limit_s
    queue: list[Item] = [*others]
    floor = floors(pipelines, incumbent_ms)[0] if floor is None else floor
    if searched(pipelines):
        cache = StageCache(pipelines, effort=effort)
        for m in floor:
            for name, schedule in _distinct(pipelines.schedules, min(cache.n, cache.gpus), m).items():
                for stages in _alike(schedule, min(cache.n, cache.gpus), m):
                    queue.append(OpenList(cache, m, name, schedule, stages, best.offer, floor[m], (near or {}).get(m)))
    closed = INF if searched(pipelines) else min(floor.values(), default=incumbent_ms)
    best_first(queue, best, ends, gap=gap, patience=clock.now() + patience_s, closed=closed)
    return Pipelined(
        skeleton=best.skeleton,
        choices=best.choices,
        value=best.value,
        bound=best.bound,
        curve=tuple(best.curve),
    )


def joined(a: Pipelined, b: Pipelined) -> Pipelined:
    """The result of two searches over two parts of a space."""
    better = min(a, b, key=lambda x: x.value)
    curve, now = [], [(INF, 0.0), (INF, 0.0)]
    for at, value, bound, k in sorted((t, v, low, k) for k, x in enumerate((a, b)) for t, v, low in x.curve):
        now[k] = (value, bound)
        curve.append((at, min(v for v, _ in now), min(low for _, low in now)))
    return replace(better, bound=min(a.bound, b.bound), curve=tuple(curve))


def best_first(
    items: Sequence[Item], best: Incumbent, ends: float, *, gap: float = 0.0, patience: float, closed: float = INF
) -> None:
    """Advance the item with the lowest bound until that bound reaches the best plan.

    From the time ``patience`` on, the share ``1 - gap`` of it suffices. ``best.bound`` becomes the bound on all items.
    ``closed``: a bound on the plans that no item covers.
    """
    queue = [(item.bound, k, item) for k, item in enumerate(items)]
    heapq.heapify(queue)
    lowest = closed
    while queue:
        bound, number, item = queue[0]
        best.note(min(bound, lowest))
        allowed = gap if clock.now() >= patience else 0.0
        if bound >= best.limit * (1 - max(allowed, ROUNDING)) or clock.now() > ends:
            break
        if item.bound > bound:  # another case has raised it
            heapq.heapreplace(queue, (item.bound, number, item))
            continue
        heapq.heappop(queue)
        item.step(best.limit * (1 - ROUNDING), ends)
        best.note_other(item.value)
        if item.stuck:
            lowest = min(lowest, item.bound)  # this bound is final; other items may still hold better plans
        else:
            heapq.heappush(queue, (item.bound, number, item))
    proved = min([best.limit, lowest, *(item.bound for _, _, item in queue)])
    if proved >= best.limit * (1 - 2 * ROUNDING):
        proved = best.limit
    best.note(proved)


def _alike(schedule: Schedule, most: int, m: int) -> list[list[int]]:
    """Numbers of stages that can be searched together: microbatches in flight depend only on the stages behind."""
    allowed = [p for p in range(2, most + 1) if not schedule.refusal(p, m)]
    if not allowed:
        return []
    in_flight = {p: [schedule.in_flight(p - r, p, m) for r in range(1, p + 1)] for p in allowed}
    longest = in_flight[allowed[-1]]
    if all(h == longest[: len(h)] for h in in_flight.values()):
        return [allowed]
    return [[p] for p in allowed]


def _distinct(schedules: dict[str, Schedule], most: int, m: int) -> dict[str, Schedule]:
    """Schedules that differ; with a single microbatch most have the same order."""
    if m > 1:
        return schedules
    name_of: dict[tuple[object, ...], str] = {}
    for name, schedule in schedules.items():
        allowed = [p for p in range(2, most + 1) if not schedule.refusal(p, m)]
        key = tuple(
            (p, s, schedule.in_flight(s, p, m), tuple(schedule.order(s, p, m))) for p in allowed for s in range(p)
        )
        name_of.setdefault(key, name)
    return {name: schedules[name] for name in name_of.values()}
