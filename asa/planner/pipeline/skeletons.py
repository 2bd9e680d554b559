"""All plans with lower bounds below a limit, built stage by stage from the front, and their times by the clock.

Lower bounds on the stages behind a cut prune the partial plans. The clock evaluates many plans at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from asa.cost.pipeline import makespans, shape
from asa.interfaces.schedule import Schedule
from asa.planner.pipeline.bounds import NEVER, Frame
from asa.planner.stage.lattice import INF
from asa.planner.stage.pareto import begins, lowest

MOST_ROWS = 60_000
"""Most partial plans; the bound of the best dropped one limits what is proved."""
MOST_LEAVES = 400_000
"""Most complete plans at a time."""
FEW = (8_000, 16_000)
"""Both maxima where only the combinations of cuts and widths matter."""
MOST_TURNS = 40_000_000
"""Most forwards and backwards that are timed, over all complete plans."""


@dataclass
class Options:
    """Choices for stages that begin with one component, r stages to the last: arrays with an entry for each choice.

    ``times``: forward, backward, what lengthens the last backward, once per step (that length included); ``least``:
    steady, whole and single as in :class:`asa.planner.stage.lattice.Table`; ``point`` is the way's point, or
    negative for a bound on all ways.
    """

    width: Any
    stop: Any
    entry: Any
    exit: Any
    times: Any
    least: Any
    point: Any


def sums_of(times: Any, m: int) -> Any:
    """Steady, whole and single ms from the ``times`` of options."""
    steady = times[0] + times[1]
    return np.stack([steady, m * steady + times[3], steady + times[3]])


@dataclass
class _Rows:
    """Partial plans: the remaining stages begin at ``cut`` on rank ``offset``. Bounds are those of :class:`Frame`.

    ``trip``: ms of a microbatch through the partial plan and back; ``most_ahead`` and ``most_back``: ms of its slowest
    stage or link in each direction. ``turns``: row x position from the last, the ms in a step of the round trips for
    which the schedule waits in that stage, without the time in later stages.
    """

    cut: Any
    offset: Any
    key: Any
    late: Any
    ahead: Any
    over: Any
    trip: Any
    most_ahead: Any
    most_back: Any
    turns: Any
    bound: Any
    parent: Any
    start: Any
    option: Any

    def select(self, index: Any) -> _Rows:
        return _Rows(**{name: value[index] for name, value in self.__dict__.items()})


@dataclass
class Leaves:
    """Complete plans of equally many stages, in order of their bounds. ``starts`` and ``options``: plan x stage;
    options are indices into the :class:`Options` of that start and position. ``values``: ms by the clock."""

    starts: Any
    options: Any
    values: Any


def _row_of_start(stages: int) -> _Rows:
    zero_ms, zeros = np.zeros(1), np.zeros(1, dtype=np.int64)
    return _Rows(
        cut=zeros, offset=zeros, key=zeros - 1, late=zero_ms + NEVER, ahead=zero_ms, over=zero_ms + NEVER, trip=zero_ms,
        most_ahead=zero_ms, most_back=zero_ms,
        turns=np.full((1, stages), NEVER), bound=zero_ms, parent=zeros - 1, start=zeros, option=zeros,
    )  # fmt: skip


def _joined(rows: list[_Rows]) -> _Rows:
    return _Rows(**{name: np.concatenate([r.__dict__[name] for r in rows]) for name in rows[0].__dict__})


def plans(
    frame: Frame, options: dict[tuple[int, int], Options], stages: Iterable[int], schedule: Schedule, limit: float,
    limits: tuple[int, int] = (MOST_ROWS, MOST_LEAVES),
) -> tuple[list[Leaves], float]:  # fmt: skip
    """All plans whose bound is below ``limit``, and that limit, lowered where plans were dropped.

    ``options[r, start]``: choices of a stage there; ``limits``: the largest numbers of partial and of complete plans.
    """
    levels: dict[int, _Rows] = {}
    wanted = set(stages)
    m = frame.m
    filled = all(lead == m for p in wanted for lead, _, _ in shape(schedule, p, m))
    for r in range(frame.stages, 0, -1):
        levels[r] = _joined(
            ([levels[r]] if r in levels else []) + ([_row_of_start(frame.stages)] if r in wanted else [])
        ) if r in levels or r in wanted else _row_of_start(frame.stages).select(np.zeros(0, np.int64))  # fmt: skip
        grown = _grown(frame, options, r, levels[r], limit, filled=filled)
        many = limits[0] if r > 1 else min(limits[1], MOST_TURNS // (2 * m * frame.stages))
        if len(grown.cut) > many:
            keep, dropped = lowest(grown.bound, many)
            grown, limit = grown.select(keep), min(limit, dropped)
        levels[r - 1] = grown
    return _leaves(frame, options, levels, schedule, limit), limit


def filled_up(trip: Any, ahead: Any, back: Any, m: int) -> Any:
    """Lower bound in ms where every stage computes all forwards before its first backward: a ``trip`` through all
    stages and back, plus m - 1 microbatches in the slowest stage or link of each direction."""
    return trip + (m - 1) * (ahead + back)


def _grown(
    frame: Frame, options: dict[tuple[int, int], Options], r: int, rows: _Rows, limit: float, *, filled: bool
) -> _Rows:  # fmt: skip
    """Partial plans with one more stage, r - 1 to come. ``filled``: :func:`filled_up` holds."""
    m, links, parts = frame.m, frame.links, []
    code = (rows.cut * (links.gpus + 1) + rows.offset) * (len(frame.keys) + 1) + rows.key + 1
    order = np.argsort(code, kind="stable")
    if not len(order):
        return rows
    first = begins(code[order])
    cached: dict[tuple[int, int], Any] = {}
    leads = [frame.lead(k + 1) for k in range(frame.stages)]
    times = np.array([(m - 1) // lead + 1 if lead else 0 for lead in leads])
    for begin, end in zip(first, [*first[1:], len(order)], strict=True):
        index = order[begin:end]
        cut, offset, key = int(rows.cut[index[0]]), int(rows.offset[index[0]]), int(rows.key[index[0]])
        x = options.get((r, cut))
        if x is None:
            continue
        if (cut, offset) not in cached:
            width_fits = np.zeros(int(x.width.max()) + 1, dtype=bool)
            for w in np.unique(x.width):
                room = offset + w < links.gpus if r > 1 else offset + w <= links.gpus
                width_fits[w] = room and offset in links.offsets[int(w)]
            indices = np.flatnonzero(width_fits[x.width])
            steady, whole, single = x.least[:, indices]
            after, trip = NEVER, 0.0
            done = np.full(len(indices), NEVER)
            if r > 1:
                at = (x.stop[indices], offset + x.width[indices], x.exit[indices])
                after = np.maximum(frame.behind_back[r - 1][at], frame.behind_crowd[r - 1][at])
                done, trip = frame.behind_done[r - 1][at], frame.behind_trip[r - 1][at]
            cached[cut, offset] = (indices, steady, whole, single, *x.times[:2, indices], after, done, trip)
        indices, steady, whole, single, forward, backward, after, done, behind = cached[cut, offset]
        if not len(indices):
            continue
        both = ahead_over = 0.0
        if key >= 0:
            hop = links.hops[offset]
            both = links.both[hop][cut, key, x.entry[indices]]
            ahead_over = links.ahead[hop][cut, key, x.entry[indices]]
        late, ahead = rows.late[index][:, None] + both, rows.ahead[index][:, None] + ahead_over
        over = np.maximum(rows.over[index][:, None], np.maximum(late + m * steady, ahead + whole))
        waits, own_wait = rows.turns[index], None
        if r > 1 and times[r - 1]:
            loops, steps = divmod(m - 1, frame.lead(r) or m)
            own_wait = np.maximum(late + steady, ahead + single)
            own_wait = own_wait + ((loops + steps) * steady if loops else steps * forward)
        late = np.maximum(late + steady, ahead + single)
        ahead = ahead + forward
        bound = np.maximum(over, np.maximum(late + after, ahead + done)) if r > 1 else over
        trip = rows.trip[index][:, None] + both + steady
        most_ahead = np.maximum(np.maximum(rows.most_ahead[index][:, None], ahead_over), forward)
        most_back = np.maximum(np.maximum(rows.most_back[index][:, None], both - ahead_over), backward)
        passage = both + steady
        for k in np.flatnonzero((waits > NEVER / 2).any(axis=0)).tolist():
            bound = np.maximum(bound, waits[:, k, None] + times[k] * (passage + behind))
        if own_wait is not None:
            bound = np.maximum(bound, own_wait + times[r - 1] * behind)
        if filled:
            bound = np.maximum(bound, filled_up(trip + behind, most_ahead, most_back, m))
        i, j = np.nonzero(bound < limit)
        if not len(i):
            continue
        k = indices[j]
        turns = waits[i] + times * np.broadcast_to(passage, bound.shape)[i, j][:, None]
        if own_wait is not None:
            turns[:, r - 1] = own_wait[i, j]
        parts.append(
            _Rows(
                cut=x.stop[k], offset=offset + x.width[k], key=x.exit[k], late=late[i, j], ahead=ahead[i, j],
                over=over[i, j], trip=trip[i, j], most_ahead=most_ahead[i, j], most_back=most_back[i, j], turns=turns,
                bound=bound[i, j], parent=index[i], start=np.full(len(i), cut), option=k,
            )
        )  # fmt: skip
    return _joined(parts) if parts else _row_of_start(frame.stages).select(np.zeros(0, dtype=np.int64))


def _leaves(
    frame: Frame, options: dict[tuple[int, int], Options], levels: dict[int, _Rows], schedule: Schedule, limit: float
) -> list[Leaves]:
    """The complete plans, traced back to their first stages and timed."""
    last = levels[0]
    below = np.flatnonzero(last.bound < limit)
    if not len(below):
        return []
    below = below[np.argsort(last.bound[below], kind="stable")]
    starts, picked = [last.start[below]], [last.option[below]]
    at, begun = last.parent[below], np.zeros(len(below), dtype=np.int64)
    for r in range(1, frame.stages + 1):
        level = levels[r]
        # A row at this level begins a plan, or extends a row of level r + 1.
        inside = at >= 0
        root = inside & (level.parent[np.where(inside, at, 0)] < 0)
        begun[root] = r
        inside &= ~root
        row = np.where(inside, at, 0)
        if not inside.any():
            break
        starts.append(np.where(inside, level.start[row], -1))
        picked.append(np.where(inside, level.option[row], -1))
        at = np.where(inside, level.parent[row], -1)
    leaves = []
    for p in np.unique(begun):
        which = np.flatnonzero(begun == p)
        begin = np.stack([s[which] for s in starts[:p]][::-1], axis=1)
        option = np.stack([o[which] for o in picked[:p]][::-1], axis=1)
        leaves.append(_timed(frame, options, begin, option, schedule, last.bound[below][which]))
    return leaves


def _timed(
    frame: Frame, options: dict[tuple[int, int], Options], starts: Any, picked: Any, schedule: Schedule, least: Any
) -> Leaves:
    count, p = starts.shape
    links = frame.links
    times, moves = np.zeros((p, 4, count)), np.zeros((p - 1, 2, count))
    offset, before = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for s in range(p):
        width, entry, leaving = (np.zeros(count, dtype=np.int64) for _ in range(3))
        for start in np.unique(starts[:, s]):
            rows = np.flatnonzero(starts[:, s] == start)
            x = options[p - s, int(start)]
            k = picked[rows, s]
            f, b, extra, once = x.times[:, k]
            times[s][:, rows] = f, b, extra, np.maximum(0.0, once - extra)
            width[rows], entry[rows], leaving[rows] = x.width[k], x.entry[k], x.exit[k]
        if s:
            for hop in np.unique(links.hops):
                rows = np.flatnonzero(links.hops[offset] == hop)
                transfer = (starts[rows, s], before[rows], entry[rows])
                moves[s - 1][:, rows] = links.ahead[hop][transfer], links.back[hop][transfer]
        offset += width
        before = leaving
    values = np.full(count, INF)
    for begin in range(0, count, 4096):
        part = slice(begin, begin + 4096)
        values[part] = makespans(times[:, :, part], moves[:, :, part], schedule, frame.m)
    return Leaves(starts=starts, options=picked, values=np.maximum(values, least))
