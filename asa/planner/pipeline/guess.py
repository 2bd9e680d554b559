"""Plans of a case before its stages are explored: intervals as if their least values came together, filled in in a
hurry."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from asa.planner.pipeline.bounds import Frame
from asa.planner.pipeline.points import Room
from asa.planner.pipeline.skeletons import Leaves, Options, plans, sums_of

if TYPE_CHECKING:
    from asa.planner.pipeline.case import Case


def likely(case: Case, frame: Frame, best: float, ends: float) -> None:
    """A few likely plans, chosen in a hurry, handed to :meth:`Case.tell`, as far as the monotonic clock leaves time
    until ``ends``."""
    base = frame.value(case.stages)
    for share in (0.0005, 0.01, 0.05, 0.2, 1.0):
        if time.monotonic() > ends:
            break
        options: dict[tuple[int, int], Options] = {}
        limit = min(best, base * (1 + share) + 1e-9)
        for r in range(1, case.most + 1):
            _options(case, frame, r, limit, options)
        leaves, _ = plans(frame, options, case.stages, case.schedule, limit)
        ranked = sorted(
            ((float(x.values[i]), x, i) for x in leaves for i in np.argsort(x.values)[:6]), key=lambda t: t[0]
        )[:6]  # fmt: skip
        for _, leaf, i in ranked:
            if time.monotonic() > ends:
                break
            _hurry(case, leaf, int(i), options)
        if ranked:
            break


def _options(case: Case, frame: Frame, r: int, limit: float, into: dict[tuple[int, int], Options]) -> None:
    """Intervals as if their least values came together."""
    parts: list[Any] = []
    for w in case.widths:
        table = case.tables.get((w, r))
        if table is None:
            continue
        first = case.keys.of[w].start
        start, stop = np.nonzero(frame.through(w, r) < limit)
        which, entry, leaving = np.nonzero(np.isfinite(table.steady[start, stop]))
        if not len(which):
            continue
        at = (start[which], stop[which], entry, leaving)
        steady = table.steady[at]
        forward = np.minimum(table.forward[at], steady)
        once = np.maximum(0.0, table.whole[at] - case.m * steady)
        times = np.stack([forward, steady - forward, 0 * once, once])
        parts.append((at[0], np.full(len(which), w), at[1], entry + first, leaving + first, times))
    if not parts:
        return
    start, width, stop, entry, leaving, times = (np.concatenate(x, axis=-1) for x in zip(*parts, strict=True))
    order = np.argsort(start, kind="stable")
    for some in np.split(order, np.flatnonzero(np.diff(start[order])) + 1):
        into[r, int(start[some[0]])] = Options(
            width[some], stop[some], entry[some], leaving[some], times[:, some],
            sums_of(times[:, some], case.m), stop[some],
        )  # fmt: skip


def _hurry(case: Case, leaf: Leaves, i: int, options: dict[tuple[int, int], Options]) -> None:
    """Fill in one skeleton."""
    p, choices, widths = leaf.starts.shape[1], [], []
    for s in range(p):
        r, start = p - s, int(leaf.starts[i, s])
        x, k = options[r, start], int(leaf.options[i, s])
        w, stop = int(x.width[k]), int(x.stop[k])
        steady, whole = (
            float(x.times[0, k] + x.times[1, k]),
            float(case.m * (x.times[0, k] + x.times[1, k]) + x.times[3, k]),
        )
        place = case.shop.place(w, case.m, case.in_flight[r])
        a, b = case.shop.twin(w, case.m, start, stop)
        key = (*place, a, b)
        points = case.shop.hurried.get(key)
        for more in (1.02, 1.2, 2.0) if points is None else ():
            explorer = case.shop.explorer(place)
            points = explorer.explore(a, {b: Room(steady * more, whole * more)}, 60, hurry=True).get(b)
            if points is not None:
                case.shop.hurried[key] = points
                break
        if points is None:
            return
        value = case.m * (points.least[0] + points.least[1]) + points.least[3]
        first = case.keys.of[w].start
        off = (points.entry + first != x.entry[k]).astype(float) + (points.exit + first != x.exit[k])
        choices.append(points.choice(int(np.lexsort((value, off))[0])))
        widths.append(w)
    case.tell(tuple(int(a) for a in leaf.starts[i]), tuple(widths), tuple(choices))
