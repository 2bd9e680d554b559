"""One number of microbatches and one schedule: a bound on all plans with them that rises in steps, and plans.

First components one by one bound them, then prices without the memory limit, then prices of memory; where that may
bind, sums of least values at prices of memory, then all of it. After that, limit by limit: every stage that could be
part of a plan below the limit is explored in full, which raises the bounds of the others; what is left is listed, and
timed by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from asa.cost.pipeline import shape
from asa.interfaces.schedule import Schedule
from asa.planner.pipeline import guess
from asa.planner.pipeline.bounds import Frame, Keys, Links
from asa.planner.pipeline.explored import Explored
from asa.planner.pipeline.lattice import INF, Table, divisors
from asa.planner.pipeline.outlines import Key
from asa.planner.pipeline.pipelines import Skeleton, value_of
from asa.planner.pipeline.shop import MANY, Shop
from asa.planner.pipeline.skeletons import FEW, Leaves, Options, plans
from asa.planner.stage.pareto import OutOfTimeError
from asa.planner.stage.problem import Choice

_CLOSE = 1e-9
_FOREVER = 1e15
"""Ms that no plan takes: a limit where none is known."""
_FAR = 0.99
"""Of the best plan: a bound below it calls for better plans, too."""
_LEAST = 1e-4
"""Of a bound: the least step upwards."""
_STRIDE, _LEAP, _HOP = 0.3, 0.28, 0.06
"""Of the way from the bound to the best plan, at least, at a time; and up to which share of the bound that is all of
it (where memory may bind, labels grow in number with it): what is explored up to one limit is explored anew up to the
next."""
_NEAR = 0.002
"""By how much a plan may exceed what its stages were taken for, and not be looked at more closely."""
_NEARER = 0.03
"""Beyond the bound plans are looked for no further, where memory binds and labels were too many."""
_TRIED = 12
"""Plans filled in at a time, where stages are known as bounds only."""


_NOTHING = Table(steady=None, forward=None, whole=None, single=None)


class Case:
    """Plans of ``stages`` stages (any of them), all else open. ``bound`` holds for all; ``found`` is called with plans:
    (ms, skeleton, choices), and says whether it takes them."""

    value = INF

    def __init__(
        self, shop: Shop, m: int, name: str, schedule: Schedule, stages: Sequence[int],
        found: Callable[[float, Skeleton, tuple[Choice, ...]], bool], bound: float = 0.0,
    ) -> None:  # fmt: skip
        self.shop, self.m, self.name, self.schedule, self.stages = shop, m, name, schedule, tuple(stages)
        self.most = max(stages)
        self.found = found
        self.bound, self.level = bound, 0
        self.in_flight = {
            r: min(schedule.in_flight(p - r, p, m) for p in stages if p >= r) for r in range(1, self.most + 1)
        }  # fmt: skip
        self._leads = {r: self._lead(r) for r in range(1, self.most + 1)}
        self.widths = tuple(w for w in shop.offsets if w < shop.gpus)
        self.keys = Keys(self.widths)
        self.tables: dict[tuple[int, int], Table | None] = {}
        self._links: Links | None = None
        every = np.arange(shop.n + 1)[None, :] > np.arange(shop.n)[:, None]
        self._near = {(w, r): every for w in self.widths for r in range(1, self.most + 1)}
        self._known = Explored(shop, m, self.in_flight)
        self.stuck = False
        self.share, self._short = 0.003, False
        self._unsure = set[Key]()
        self._tight = False

    def _lead(self, r: int) -> int | None:
        """Microbatches in flight with r stages to the last, where the schedule waits for each to come back."""
        found = {shape(self.schedule, p, self.m)[p - r] for p in self.stages if p >= r}
        lead, _, strict = next(iter(found))
        return lead if len(found) == 1 and strict else None

    def frame(self, links: Links, keys: Keys) -> Frame:
        """Bounds by the tables of now."""

        def tables(w: int, r: int) -> Table | None:
            return self.tables.get((w, r))

        def near(w: int, r: int) -> Any:
            return self._near[w, r]

        return Frame(self.shop.n, self.m, keys, links, tables, self.most, self._leads.__getitem__, near)

    def step(self, best: float, ends: float) -> None:
        """Raise the bound. ``best``: what is known already, plans from there on are of no interest."""
        if self.level == 0:
            self._by_components(best, ends)
        elif self.level in (1, 2):
            try:
                self._by_prices(best, ends, limit=self.level == 2)
            except OutOfTimeError:
                if self.level == 1:
                    self._roughly(best, 0.0)
                return
        elif self.level == 3 and (best >= _FOREVER or (self._tight and self.bound < best * _FAR)):
            guess.likely(self, self._frame, best, ends)
        else:
            before = self.bound
            with suppress(OutOfTimeError):
                self._by_plans(best, ends)
            if self.bound > before and not self.stuck and self.bound < best * _FAR and time.monotonic() < ends:
                guess.likely(self, self._frame, best, ends)
        self.level += 1

    def _by_components(self, best: float, ends: float) -> None:
        if self.shop.crowded:
            for w in self.shop.alone(self.m):
                self.tables.update({(w, r): _NOTHING for r in range(1, self.most + 1)})
            return
        frame = self.shop.by_components(self.m, ends)
        for w, r in frame.parts:
            self.tables[w, r] = _NOTHING
        self._alive(frame, best)

    def _alive(self, frame: Frame, best: float) -> None:
        """Note the bound, and drop the widths that are in no plan below ``best``."""
        self.bound = max(self.bound, frame.value(self.stages))
        if self.bound >= best:
            return
        if not len(frame.front_late):
            frame.look_ahead(self.stages)
        alive = []
        for w in self.widths:
            some = False
            for r in range(1, self.most + 1):
                near = self._near[w, r] = frame.through(w, r) < best
                if near.any():
                    some = True
                else:
                    self.tables[w, r] = None
            if some:
                alive.append(w)
        self.widths = tuple(alive)
        self.most = max((r for r in range(1, self.most + 1) if any(self._near[w, r].any() for w in alive)), default=1)
        self.stages = tuple(p for p in self.stages if p <= self.most)
        self._frame = frame

    def _roughly(self, best: float, ends: float) -> None:
        """By prices of stages without what lies between them, whatever the degrees at their ends: as far as there is
        time for prices, by compute alone beyond."""
        keys = Keys(self.widths, lambda _w: (1,))
        alive = {w: [r for r in range(1, self.most + 1) if self.tables.get((w, r)) is not None] for w in self.widths}
        tight = self._tight or self.shop.crowded
        rough = {
            w: self.shop.rough(w, self.m, [self.in_flight[r] for r in alive[w]], ends, tight=tight) for w in self.widths
        }

        def tables(w: int, r: int) -> Table | None:
            return rough[w][self.in_flight[r]] if r in alive[w] else None

        links = self.shop.links(self.m, keys, free=True)
        self._alive(
            Frame(
                self.shop.n, self.m, keys, links, tables, self.most, self._leads.__getitem__,
                lambda w, r: self._near[w, r],
            ),
            best,
        )  # fmt: skip

    def _by_prices(self, best: float, ends: float, *, limit: bool) -> None:
        """Without the memory limit, and then with it. Where it may bind, roughly first, and then with it at once."""
        if not limit:
            if not self.shop.crowded and sum(len(divisors(w)) for w in self.widths) > MANY:
                self._roughly(best, ends)
                if self.bound >= best:
                    return
            for w in self.widths:
                if time.monotonic() > ends:
                    raise OutOfTimeError
                self.shop.numbers(w, self.m)
            self._tight = any(self.shop.tight(w, self.m, max(self.in_flight.values())) for w in self.widths)
            if self._tight:
                self._roughly(best, ends)
                return
        if self._tight or not limit:
            self.keys = Keys(self.widths)
            self._links = self.shop.links(self.m, self.keys, ends=ends)
            self._priced(ends)
            self._alive(self.frame(self._links, self.keys), best)
        self._base = dict(self.tables)

    def _priced(self, ends: float) -> None:
        """Tables of prices, with the memory limit where it may bind."""
        for w in self.widths:
            if time.monotonic() > ends:
                raise OutOfTimeError
            places = [r for r in range(1, self.most + 1) if self.tables.get((w, r)) is not None]
            limited = self.shop.limited(w, self.m, [self.in_flight[r] for r in places]) if self._tight else {}
            for r in places:
                self.tables[w, r] = limited[self.in_flight[r]] if self._tight else self.shop.relaxed(w, self.m)

    def tell(self, starts: tuple[int, ...], widths: tuple[int, ...], choices: tuple[Choice, ...]) -> tuple[float, bool]:
        skeleton = Skeleton(starts=starts, widths=widths, num_microbatches=self.m, schedule=self.name)
        value = value_of(self.shop.pipelines, skeleton, choices)
        return value, self.found(value, skeleton, choices)

    def _by_plans(self, best: float, ends: float) -> None:
        """All plans up to a limit, a little further each time."""
        if self.bound > 0 and best < _FOREVER and not self._short:  # far from the best plan, in longer strides
            left = best / self.bound - 1
            leap = _HOP if self._tight else _LEAP
            self.share = max(self.share, left if left <= leap else left * _STRIDE)
        limit = min(best, self.bound * (1 + self.share)) if self.share < 10 else best
        limit = min(limit, _FOREVER)
        self.share *= 4
        while True:
            self.tables = self._known.tightened(self._base, limit)
            frame = self.frame(self._links, self.keys)  # type: ignore[arg-type]
            if self._below(frame.value(self.stages), limit):
                return
            frame.look_ahead(self.stages)
            self._frame = frame
            if self._unsure:
                self._known.outlines.draw(frame, self._unsure, limit, ends)
                self._unsure = set()
                continue
            options = self._known.options(frame, limit)
            leaves, told = plans(frame, options, self.stages, self.schedule, limit, FEW)
            vague: set[Key] | None = None
            if told >= limit:
                if self._below(min((float(x.values.min()) for x in leaves), default=INF), limit):
                    return
                vague = self._known.vague(leaves, options, limit)
                if not vague:
                    break
            if not self._known.explore(frame, limit, ends, vague):
                leaves, told = plans(frame, options, self.stages, self.schedule, limit)
                break
            if time.monotonic() > ends:
                return
        self._fill_in(leaves, options, best, limit, told)

    def _below(self, low: float, limit: float) -> bool:
        """Note a bound on all plans below ``limit``; whether there are none."""
        if low < limit:
            self.bound = max(self.bound, low)
            return False
        self.bound = max(self.bound, limit if limit < _FOREVER else INF)
        return True

    def _fill_in(
        self, leaves: Sequence[Leaves], options: dict[tuple[int, int], Options], best: float, limit: float, told: float
    ) -> None:
        """The plans behind the best of all leaves below ``told``, where all below ``limit`` were looked for, and which
        stages are to be known better."""
        proved, again = told, False
        blurred, nearly = set[Key](), set[Key]()
        if told < limit and self.bound > 0:  # too many: not as far, the next time
            self.share, self._short = min(self.share, limit / self.bound - 1) / 8, True
            again = self.share > _LEAST
        for x in leaves:
            for i in np.argsort(x.values, kind="stable")[:_TRIED]:
                if x.values[i] >= min(best, told):
                    break
                proved = min(proved, float(x.values[i]))
                value, vague, taken = self._fill(x, int(i), options)
                near = value <= float(x.values[i]) * (1 + _NEAR) and (taken or value >= best)
                best = min(best, value)
                if near and value > float(x.values[i]) * (1 + _CLOSE):
                    nearly.update(vague)
                if near or not vague:
                    break
                efforts = [self._known.effort(key, limit) for key in vague]
                blurred.update(key for key, e in zip(vague, efforts, strict=True) if e == min(efforts))
        if proved <= self.bound and not again and not blurred:  # that close, and no further: once in more detail
            blurred = {key for key in nearly if self._known.effort(key, limit) <= 1}
        nearer = False
        for key in blurred:  # the next time in more detail
            if self._tight and self.m > 1 and not self._known.outlines.known(key, limit):
                self._unsure.add(key)
                again = True
            else:
                again = self._known.refine(key) or again
                if self._tight:
                    nearer = True
        if nearer:  # and not as far at first
            self.share, self._short = _NEARER, True
        self.stuck = self.stuck or (proved <= self.bound and not again)
        self.bound = max(self.bound, proved if proved < _FOREVER else INF)

    def _fill(self, leaf: Leaves, i: int, options: dict[tuple[int, int], Options]) -> tuple[float, list[Key], bool]:
        """The time of the plan behind a leaf, which of its stages may not be what they were taken for, and whether it
        was taken."""
        p, choices, widths = leaf.starts.shape[1], [], []
        vague: list[Key] = []
        for s in range(p):
            r, start = p - s, int(leaf.starts[i, s])
            x, k = options[r, start], int(leaf.options[i, s])
            w, stop = int(x.width[k]), int(x.stop[k])
            points = self._known.points((w, r, start, stop))
            choices.append(points.choice(int(x.point[k])))
            widths.append(w)
            if not points.exact:
                vague.append((w, r, start, stop))
        value, taken = self.tell(tuple(int(a) for a in leaf.starts[i]), tuple(widths), tuple(choices))
        return value, vague, taken
