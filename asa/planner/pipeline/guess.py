"""Plans of a case before its stages are explored: intervals as if their least values came together, filled in in a
hurry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from asa.planner.pipeline.bounds import Frame
from asa.planner.pipeline.skeletons import Leaves, Options, plans

if TYPE_CHECKING:
    from asa.planner.pipeline.case import Case


def likely(case: Case, frame: Frame, best: float) -> None:
    """A few likely plans, chosen in a hurry, handed to :meth:`Case.tell`."""
    base = frame.value(case.stages)
    for share in (0.0005, 0.01, 0.05, 0.2, 1.0):
        options: dict[tuple[int, int], Any] = {}
        limit = min(best, base * (1 + share) + 1e-9)
        for r in range(1, case.most + 1):
            _options(case, frame, r, limit, options)
        leaves, _ = plans(frame, {k: v for k, (v, _) in options.items()}, case.stages, case.schedule, limit)
        ranked = sorted(
            ((float(x.values[i]), x, i) for x in leaves for i in np.argsort(x.values)[:6]), key=lambda t: t[0]
        )[:6]  # fmt: skip
        for _, leaf, i in ranked:
            _hurry(case, leaf, int(i), options)
        if ranked:
            break


def _options(case: Case, frame: Frame, r: int, limit: float, into: dict[tuple[int, int], Any]) -> None:
    """Intervals as if their least values came together."""
    parts: dict[int, list[Any]] = {}
    for w in case.widths:
        table = case.tables.get((w, r))
        if table is None:
            continue
        k = case.keys.of[w].start
        near = frame.through(w, r) < limit
        for a, b in np.argwhere(near):
            entry, leaving = np.nonzero(np.isfinite(table.steady[a, b]))
            if not len(entry):
                continue
            steady = table.steady[a, b, entry, leaving]
            forward = np.minimum(table.forward[a, b, entry, leaving], steady)
            once = np.maximum(0.0, table.whole[a, b, entry, leaving] - case.m * steady)
            times = np.stack([forward, steady - forward, 0 * once, once])
            size = np.full(len(entry), 1)
            parts.setdefault(int(a), []).append((size * w, size * b, entry + k, leaving + k, times))
    for a, found in parts.items():
        width, stop, entry, leaving, times = (np.concatenate(x, axis=-1) for x in zip(*found, strict=True))
        into[r, a] = (Options(width, stop, entry, leaving, times, stop, stop), None)


def _hurry(case: Case, leaf: Leaves, i: int, options: dict[tuple[int, int], Any]) -> None:
    """Fill in one skeleton."""
    p, choices, widths = leaf.starts.shape[1], [], []
    for s in range(p):
        r, start = p - s, int(leaf.starts[i, s])
        x, k = options[r, start][0], int(leaf.options[i, s])
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
            points = explorer.explore(a, {b: (steady * more, whole * more)}, 60, hurry=True).get(b)
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
