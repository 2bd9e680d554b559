"""The clock of a synchronous pipeline: what a step takes, given what its stages and the links between them take.

Every stage performs the actions of its schedule in order. A microbatch can go forward once it has arrived from the
stage in front, and backward once its gradient has arrived from the stage behind. The link between two neighbours
carries one message at a time in each direction, in the order they were sent, and holds up neither sender nor receiver.
The last backward of a stage is longer (synchronisation runs beside it), and after it comes what is paid once per step.
The step ends with the last stage to finish: ranks wait for each other between steps.

:func:`makespan` is that clock, and monotone in every time; :func:`lower_bound` never exceeds it. Any unit of time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import Any

import numpy as np

from asa.interfaces.schedule import Schedule
from asa.ir.codec import noun


@noun
class StageTimes:
    """The times of one stage. ``forward`` and ``backward`` are of one microbatch. The last backward takes
    ``last_backward_extra`` longer. ``after`` is paid once per step behind it (gradient synchronisation that is not
    hidden, the optimizer)."""

    forward: float
    backward: float
    last_backward_extra: float = 0.0
    after: float = 0.0


@lru_cache(maxsize=16384)
def program(schedule: Schedule, stages: int, num_microbatches: int) -> tuple[tuple[int, bool, int, bool], ...]:
    """All actions of a step in an order in which each follows what it waits for: (stage, whether forward, microbatch,
    whether it is the last action of its stage).

    Raises:
        ValueError: the schedule waits for itself.
    """
    orders = [schedule.order(s, stages, num_microbatches) for s in range(stages)]
    done = [0] * stages
    over: set[tuple[int, bool, int]] = set()
    found: list[tuple[int, bool, int, bool]] = []
    while len(found) < sum(len(o) for o in orders):
        before = len(found)
        for s, order in enumerate(orders):
            while done[s] < len(order):
                ahead, k = order[done[s]].direction == "forward", order[done[s]].microbatch
                needed = (s - 1, True, k) if ahead else (s + 1, False, k)
                if 0 <= needed[0] < stages and needed not in over:
                    break
                done[s] += 1
                over.add((s, ahead, k))
                found.append((s, ahead, k, done[s] == len(order)))
        if len(found) == before:
            raise ValueError(f"schedule {schedule.identifier} waits for itself")
    return tuple(found)


def makespan(
    stages: Sequence[StageTimes],
    transfers: Sequence[tuple[float, float]],
    schedule: Schedule,
    num_microbatches: int,
) -> float:
    """The time of a step. ``transfers[i]`` is the time of one microbatch from stage i to the next, and of its gradient
    back."""
    times = [(s.forward, s.backward, s.last_backward_extra, s.after) for s in stages]
    found: float = _played(times, transfers, schedule, num_microbatches, max)
    return found


def makespans(times: Any, transfers: Any, schedule: Schedule, num_microbatches: int) -> Any:
    """The times of steps of many pipelines with equally many stages, an array with an entry for each pipeline.

    ``times`` has shape (stages, 4, pipelines): forward, backward, last_backward_extra, after; ``transfers`` has shape
    (stages - 1, 2, pipelines).
    """
    return _played([[*x] for x in times], [[*x] for x in transfers], schedule, num_microbatches, np.maximum)


def _played(times: Any, transfers: Any, schedule: Schedule, num_microbatches: int, later: Callable[..., Any]) -> Any:
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
    return reduce(later, (clock + own[3] for clock, own in zip(now, times, strict=True)))


@lru_cache(maxsize=16384)
def shape(schedule: Schedule, stages: int, num_microbatches: int) -> tuple[tuple[int, int, bool], ...]:
    """For each stage: how many forwards come before its first backward, how many backwards follow its last forward, and
    whether in between forwards and backwards alternate, so that microbatch k goes forward only when k - lead has come
    back."""
    found = []
    for s in range(stages):
        order = schedule.order(s, stages, num_microbatches)
        kinds = [a.direction == "forward" for a in order]
        lead = kinds.index(False)
        trail = kinds[::-1].index(True)
        pairs = kinds[lead : len(kinds) - trail]
        found.append((lead, trail, pairs == [False, True] * (len(pairs) // 2)))
    return tuple(found)


def lower_bound(
    stages: Sequence[StageTimes],
    transfers: Sequence[tuple[float, float]],
    schedule: Schedule,
    num_microbatches: int,
) -> float:
    """A lower bound on :func:`makespan`: the longest of a few paths through the step.

    A path through stage i: the first microbatch must get there; then the stage fills up, or waits for the first
    gradient; it has forwards and backwards in turn; it drains, or waits for the last gradient; and that gradient
    travels to some stage in front, whose once-per-step work is left. A stage that holds at most f microbatches lets one
    in only when the one f before it has made its round trip. Every link carries every microbatch twice.
    """
    count, m = len(stages), num_microbatches
    shapes = shape(schedule, count, m)
    first, last, trip = [0.0] * count, [0.0] * count, [0.0] * count
    # From the arrival of the first (last, any) microbatch at stage i to its gradient leaving it.
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
        # What is left when the last backward of stage i has ended.
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
    """The part of a step behind the first forward of the last stage, where every stage goes forward with all
    microbatches first: two flow shops of equal jobs, one after the other.

    The slowest stage or link has m - 1 more to do, then they turn round, and so has the slowest one on the way back.
    From there the last microbatch travels, with longer backwards.
    """
    ahead = max([s.forward for s in stages] + [t[0] for t in transfers])
    path, slowest, lengthened, best = 0.0, 0.0, 0.0, 0.0
    for i in range(len(stages) - 1, -1, -1):
        stage = stages[i]
        # The time from the slowest place so far to here; its own longer backward counts if it is a stage.
        path += stage.backward
        lengthened = max(lengthened, slowest * (m - 1), (m - 1) * stage.backward) + stage.last_backward_extra
        best = max(best, path + lengthened + stage.after)
        if i:
            slowest = transfers[i - 1][1]
            path += slowest
    return (m - 1) * ahead + best
