"""The joint search over stages, cuts, widths, microbatches, schedules and configurations.

Every (microbatches, schedule) is a case with a bound that rises in steps (:mod:`asa.planner.case`). Always the one with
the lowest bound is taken a step further, until that bound has reached the best plan: nothing faster is left.
"""

from __future__ import annotations

import heapq
import time

import numpy as np

from asa.interfaces.schedule import Schedule
from asa.planner import exhaustive
from asa.planner.case import Case
from asa.planner.pipelines import Pipelined, Pipelines, Skeleton
from asa.planner.problem import Choice
from asa.planner.shop import Shop

_CLOSE = 1e-9
MOST_COMPONENTS, MOST_RANKS = 100, 128
"""Beyond these, plans of several stages are bounded, but not searched."""
SLACK_GIB = 1e-9
"""By how much a plan may overstep the memory limit (rounding)."""


class _Best:
    """The best plan so far, and the curve."""

    def __init__(self, pipelines: Pipelines, incumbent_ms: float) -> None:
        self.pipelines = pipelines
        self.limit, self.value = incumbent_ms, float("inf")
        self.skeleton: Skeleton | None = None
        self.choices: tuple[Choice, ...] = ()
        self.started = time.monotonic()
        self.curve: list[tuple[float, float, float]] = []
        self.bound = 0.0

    def found(self, value: float, skeleton: Skeleton, choices: tuple[Choice, ...]) -> None:
        """Take it if it is better and fits."""
        if value < self.limit and self._fits(skeleton, choices):
            self.limit = self.value = value
            self.skeleton, self.choices = skeleton, choices
            self.note(self.bound)

    def note(self, bound: float) -> None:
        """A point of the curve."""
        self.bound = max(self.bound, min(bound, self.limit))
        point = (time.monotonic() - self.started, self.limit, self.bound)
        if not self.curve or point[1:] != self.curve[-1][1:]:
            self.curve.append(point)

    def _fits(self, skeleton: Skeleton, choices: tuple[Choice, ...]) -> bool:
        x, p = self.pipelines, len(skeleton.widths)
        schedule = x.schedules[skeleton.schedule]
        stops = skeleton.stops(len(x.names))
        for s, (w, start, stop, choice) in enumerate(
            zip(skeleton.widths, skeleton.starts, stops, choices, strict=True)
        ):  # fmt: skip
            chain = x.chain(w, skeleton.num_microbatches)
            if chain is None:
                return False
            problem = chain.stage(start, stop, schedule.in_flight(s, p, skeleton.num_microbatches))
            if exhaustive.peak(problem, choice) > problem.capacity + SLACK_GIB:
                return False
        return True


def search(
    pipelines: Pipelines,
    *,
    incumbent_ms: float = float("inf"),
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    patience_s: float = 0.0,
) -> Pipelined:
    """The fastest plan of two or more stages, if it beats ``incumbent_ms``, and a proof of how good it is.

    The search ends when the bound has reached the best, or after ``patience_s`` ``(1 - gap)`` of it, or time is up.
    """
    best = _Best(pipelines, incumbent_ms)
    floor = min(area(pipelines), incumbent_ms)
    if len(pipelines.names) > MOST_COMPONENTS or pipelines.gpus > MOST_RANKS:
        best.note(floor)
        return Pipelined(skeleton=None, choices=(), value=float("inf"), bound=floor, curve=tuple(best.curve))
    ends = best.started + time_limit_s
    shop = Shop(pipelines)
    queue: list[tuple[float, int, Case]] = []
    for m in pipelines.microbatches():
        for name, schedule in pipelines.schedules.items():
            for stages in _alike(schedule, min(shop.n, shop.gpus), m):
                case = Case(shop, m, name, schedule, stages, best.found)
                queue.append((floor, len(queue), case))
    steps = cases = len(queue)
    lowest = float("inf")
    while queue:
        bound, number, case = heapq.heappop(queue)
        best.note(min(bound, lowest))
        allowed = gap if time.monotonic() - best.started >= patience_s else 0.0
        if bound >= best.limit * (1 - max(allowed, _CLOSE)):
            heapq.heappush(queue, (bound, number, case))
            break
        if time.monotonic() > ends:
            heapq.heappush(queue, (bound, number, case))
            break
        case.step(best.limit * (1 - _CLOSE), ends)
        steps += 1
        if case.level == 3 and best.skeleton is None and case.bound < best.limit:
            case.step(best.limit * (1 - _CLOSE), ends)  # a first plan, early
        if case.stuck:
            lowest = min(lowest, case.bound)  # as far as it goes; the others may still hold better plans
        else:
            heapq.heappush(queue, (case.bound, number, case))
    bound = min([best.limit, lowest, *(b for b, _, _ in queue)])
    if bound >= best.limit * (1 - 2 * _CLOSE):
        bound = best.limit
    best.note(bound)
    return Pipelined(
        skeleton=best.skeleton,
        choices=best.choices,
        value=best.value,
        bound=bound,
        curve=tuple(best.curve),
        counts={"cases": cases, "steps": steps},
    )


def area(pipelines: Pipelines) -> float:
    """Ms of a step if nothing but computation took time, and every rank always had some: a bound on every plan."""
    lowest = float("inf")
    for m in pipelines.microbatches():
        least: np.ndarray | None = None
        for w in pipelines.widths():
            row = pipelines.compute(w, m) if w < pipelines.gpus else None
            if row is not None:
                own = w * np.asarray(row, dtype=float)
                least = own if least is None else np.minimum(least, own)
        if least is not None:
            lowest = min(lowest, m * float(least.sum()) / pipelines.gpus)
    return lowest


def _alike(schedule: Schedule, most: int, m: int) -> list[list[int]]:
    """Numbers of stages that may be searched together: memory and order depend on the stages behind alone."""
    allowed = [p for p in range(2, most + 1) if not schedule.refusal(p, m)]
    if not allowed:
        return []
    held = {p: [schedule.in_flight(p - r, p, m) for r in range(1, p + 1)] for p in allowed}
    longest = held[allowed[-1]]
    if all(h == longest[: len(h)] for h in held.values()):
        return [allowed]
    return [[p] for p in allowed]
