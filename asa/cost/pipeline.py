"""Step time of a synchronous pipeline, from the times of its stages and of the links between them.

Every stage performs the actions of its schedule in order. A microbatch can go forward once it has arrived from the
stage in front, and backward once its gradient has arrived from the stage behind. The link between two neighbours
carries one message at a time in each direction, in the order they were sent, and holds up neither sender nor receiver.
The last backward of a stage is longer (gradient synchronisation overlaps it); the work paid once per step follows it.
The step ends with the last stage to finish: ranks wait for each other between steps.

:func:`makespan` computes this exactly, and never falls as a time grows; :func:`lower_bound` never exceeds it. All times
have one unit, which may be any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from typing import Any

import numpy as np

from asa.interfaces.schedule import Action, Schedule
from asa.ir.codec import noun


@noun
class StageTimes:
    """Times of one stage. ``forward`` and ``backward`` are those of one microbatch; the last backward takes
    ``last_backward_extra`` longer. ``after`` follows it once per step: exposed gradient synchronisation, optimizer."""

    forward: float
    backward: float
    last_backward_extra: float = 0.0
    after: float = 0.0


@lru_cache(maxsize=16384)
def program(schedule: Schedule, stages: int, num_microbatches: int) -> tuple[tuple[int, bool, int, bool], ...]:
    """All actions of a step in topological order: tuples (stage, whether forward, microbatch, whether it is the last
    action of its stage).

    Raises:
        ValueError: the schedule has a deadlock.
    """
    orders = [schedule.order(s, stages, num_microbatches) for s in range(stages)]
    done = [0] * stages
    finished: set[tuple[int, bool, int]] = set()
    actions: list[tuple[int, bool, int, bool]] = []
    while len(actions) < sum(len(o) for o in orders):
        before = len(actions)
        for s, order in enumerate(orders):
            while done[s] < len(order):
                ahead, k = order[done[s]].direction == "forward", order[done[s]].microbatch
                needed = (s - 1, True, k) if ahead else (s + 1, False, k)
                if 0 <= needed[0] < stages and needed not in finished:
                    break
                done[s] += 1
                finished.add((s, ahead, k))
                actions.append((s, ahead, k, done[s] == len(order)))
        if len(actions) == before:
            raise ValueError(f"schedule {schedule.identifier} waits for itself")
    return tuple(actions)


def makespan(
    stages: Sequence[StageTimes],
    transfers: Sequence[tuple[float, float]],
    schedule: Schedule,
    num_microbatches: int,
) -> float:
    """The time of a step. ``transfers[i]`` are the times of one microbatch from stage i to stage i + 1, and of its
    gradient back."""
    times = [(s.forward, s.backward, s.last_backward_extra, s.after) for s in stages]
    total: float = played(times, transfers, schedule, num_microbatches, max)
    return total


def makespans(times: Any, transfers: Any, schedule: Schedule, num_microbatches: int) -> Any:
    """The step times of many pipelines with the same number of stages: an array with an entry for each pipeline.

    ``times`` has shape (stages, 4, pipelines): forward, backward, last_backward_extra, after; ``transfers`` has shape
    (stages - 1, 2, pipelines).
    """
    return played([[*x] for x in times], [[*x] for x in transfers], schedule, num_microbatches, np.maximum)


def played(times: Any, transfers: Any, schedule: Schedule, num_microbatches: int, later: Callable[..., Any]) -> Any:
    """The time of a step, a number or an array; ``later`` is the greater of two."""
    count = len(times)
    now, ahead_free, back_free = [0.0] * count, [0.0] * count, [0.0] * count
    arrived: dict[tuple[int, int], Any] = {}
    returned: dict[tuple[int, int], Any] = {}
    for s, ahead, k, last in program(schedule, count, num_microbatches):
        clock = now[s]
        if ahead:
            clock = later(clock, arrived.pop((s, k))) if s else clock
            clock += times[s][0]
            if s + 1 < count:
                sent = later(clock, ahead_free[s])
                sent += transfers[s][0]
                ahead_free[s] = arrived[s + 1, k] = sent
        else:
            clock = later(clock, returned.pop((s, k))) if s + 1 < count else clock
            clock += times[s][1]
            if last:
                clock += times[s][2]
            if s:
                sent = later(clock, back_free[s])
                sent += transfers[s - 1][1]
                back_free[s] = returned[s - 1, k] = sent
        now[s] = clock
    return reduce(later, (clock + stage[3] for clock, stage in zip(now, times, strict=True)))


@lru_cache(maxsize=16384)
def shape(schedule: Schedule, stages: int, num_microbatches: int) -> tuple[tuple[int, int, bool], ...]:
    """For each stage (lead, trail, strict): forwards before its first backward (warm-up), backwards after its last
    forward (cool-down), and whether forwards and backwards alternate in between. If they do, the forward of microbatch
    k follows the backward of microbatch k - lead."""
    return tuple(_shape(schedule.order(s, stages, num_microbatches)) for s in range(stages))


def _shape(order: Sequence[Action]) -> tuple[int, int, bool]:
    kinds = [a.direction == "forward" for a in order]
    lead = kinds.index(False)
    trail = kinds[::-1].index(True)
    pairs = kinds[lead : len(kinds) - trail]
    return lead, trail, pairs == [False, True] * (len(pairs) // 2)


def lead(schedule: Schedule, positions: Iterable[tuple[int, int]], num_microbatches: int) -> int | None:
    """The lead (:func:`shape`) of stages at these positions (stage, number of stages); None where leads differ, or
    where forwards and backwards do not alternate after the warm-up."""
    orders = {id(x): x for x in (schedule.order(s, p, num_microbatches) for s, p in positions)}
    shapes = {_shape(x) for x in orders.values()}
    first, _, strict = next(iter(shapes))
    return first if len(shapes) == 1 and strict else None


def lower_bound(
    stages: Sequence[StageTimes],
    transfers: Sequence[tuple[float, float]],
    schedule: Schedule,
    num_microbatches: int,
) -> float:
    """A lower bound on :func:`makespan`: the longest of a few paths through the step.

    A path through stage i has five parts: the first microbatch arrives; the stage warms up, or waits for the first
    gradient; it alternates between forwards and backwards; it cools down, or waits for the last gradient; this gradient
    travels to a stage in front, whose once-per-step work follows. In a stage with ``lead`` microbatches in flight, a
    microbatch enters after the round trip of the one ``lead`` before it. A link carries every microbatch both ways.
    """
    count, m = len(stages), num_microbatches
    shapes = shape(schedule, count, m)
    first, last, trip = [0.0] * count, [0.0] * count, [0.0] * count
    # first, last, trip: from the arrival of the first (last, any) microbatch at stage i until its gradient leaves it.
    for i in range(count - 1, -1, -1):
        f, b = stages[i].forward, stages[i].backward
        lead, trail, _ = shapes[i]
        away = sum(transfers[i]) if i + 1 < count else 0.0
        behind = (first[i + 1], last[i + 1], trip[i + 1]) if i + 1 < count else (0.0, 0.0, 0.0)
        first[i] = max(lead * f, f + away + behind[0]) + b
        last[i] = f + max(trail * b, away + behind[1] + b) + stages[i].last_backward_extra
        trip[i] = f + away + behind[2] + b
    reach = 0.0
    finish = 0.0
    best = 0.0
    for i, stage in enumerate(stages):
        f, b, extra = stage.forward, stage.backward, stage.last_backward_extra
        lead, trail, strict = shapes[i]
        # Time from the end of the last backward of stage i to the end of the step.
        finish = stage.after if i == 0 else max(stage.after, finish)
        if lead == m:
            busy = max(first[i] - b + m * b + extra, (m - 1) * f + last[i])
        else:
            busy = first[i] - b + (m - trail) * b + (m - 1 - lead) * f + last[i]
            if strict:
                loops, steps = divmod(m - 1, lead)
                busy = max(busy, loops * trip[i] + steps * (f + b) + trip[i] + extra)
        best = max(best, reach + busy + finish)
        if i + 1 < count:
            ahead, back = transfers[i]
            leaves = finish + stage.backward + extra  # the last gradient reaches stage i, and on
            best = max(best, reach + f + m * ahead + last[i + 1] + back + leaves)
            best = max(best, reach + f + ahead + first[i + 1] + m * back + leaves)
            reach += f + ahead
            finish = leaves + back
    if all(lead == m for lead, _, _ in shapes):
        best = max(best, reach + stages[-1].forward + _drained(stages, transfers, m))
    return best


def _drained(stages: Sequence[StageTimes], transfers: Sequence[tuple[float, float]], m: int) -> float:
    """The part of a step after the first forward of the last stage, for schedules in which all ``m`` forwards of a
    stage come before its backwards: two flow shops of equal jobs, one after the other.

    Forward, the slowest stage or link has m - 1 more microbatches to do; backward, the same holds for the slowest one
    on the way back. From there the last microbatch travels to the front, with the longer last backwards.
    """
    ahead = max([s.forward for s in stages] + [t[0] for t in transfers])
    path, slowest, lengthened, best = 0.0, 0.0, 0.0, 0.0
    for i in range(len(stages) - 1, -1, -1):
        stage = stages[i]
        # lengthened: m - 1 backwards of the slowest stage or link so far, and the longer last backwards from there on.
        path += stage.backward
        lengthened = max(lengthened, slowest * (m - 1), (m - 1) * stage.backward) + stage.last_backward_extra
        best = max(best, path + lengthened + stage.after)
        if i:
            slowest = transfers[i - 1][1]
            path += slowest
    return (m - 1) * ahead + best
