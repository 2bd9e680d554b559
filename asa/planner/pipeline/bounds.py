"""Lower bounds on all pipeline plans with one number of microbatches and one schedule.

They are arrays over the first component of a stage, its first rank, and the number of stages from it to the last one. A
step of a pipeline is a longest path (:mod:`asa.cost.pipeline`). Let T be the time of a microbatch forward and backward
in a stage, C the time of its activations and gradients over a link, and D the once-per-step time of a stage. Three
kinds of path need only T, C and D:

* all microbatches through one stage, which the first microbatch has to reach and the last one has to leave;
* one microbatch through all stages, and all microbatches over one link;
* the round trip of a microbatch from a stage to the last one, as often as the schedule waits for it in that stage.

Each path ends with the once-per-step work of a stage that it passes backward. Three arrays look towards the last stage:
``back`` is the least time from a microbatch's arrival at a stage to the last gradient that leaves it, ``done`` the
least time to the end of all stages from there on, and ``trip`` the least round trip of one microbatch. ``late`` looks
towards the first stage: the least time from the start of the step to the end of the stages in front, without the time
in later stages. Each array is a minimum of its own, so their sums are lower bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asa.planner.space.space import divisors
from asa.planner.stage.lattice import INF, Table
from asa.planner.stage.pareto import begins

NEVER = -1e30
"""Minus infinity in effect; finite, so that it can be added to infinity."""

Tables = Callable[[int, int], Table | None]
"""Lower bound table for stages of a width (first argument), by the number of stages to the last one (second)."""


class Keys:
    """Numbered pairs of width and data degree that a stage may have at its ends."""

    def __init__(self, widths: Sequence[int], degrees: Callable[[int], tuple[int, ...]] = divisors) -> None:
        self.widths = tuple(sorted(widths))
        self.pairs = [(w, d) for w in self.widths for d in degrees(w)]
        self.of: dict[int, slice] = {}
        at = 0
        for w in self.widths:
            self.of[w] = slice(at, at + len(degrees(w)))
            at += len(degrees(w))

    def __len__(self) -> int:
        return len(self.pairs)


class StageLinks:
    """Transfer times in ms between stages, forward and backward: arrays cut x key in front x key behind for each link
    level. ``offsets``: the ranks at which a stage of each width may begin."""

    def __init__(self, gpus: int, hops: Sequence[int], ahead: Any, back: Any, m: int, offsets: dict[int, Any]) -> None:
        self.gpus = gpus
        self.hops = np.array(hops)
        self.ahead, self.back = ahead, back
        self.both = ahead + back
        self.crowd = np.maximum(m * ahead + back, ahead + m * back)
        self.offsets = offsets


@dataclass
class Stages:
    """Stages of one width and one position from the last that may be in a plan, in order of their starts. Values by
    entry and exit degree as in :class:`Table`; ``offsets``: ranks on which they may begin; ``groups``: the index at
    which each start begins."""

    start: Any
    stop: Any
    steady: Any
    forward: Any
    whole: Any
    single: Any
    backward: Any
    offsets: Any
    groups: Any
    back: Any = None
    done: Any = None


class Frame:
    """The arrays of this module. ``lead(r)``: microbatches in the warm-up of the stage with r stages to the last
    (itself included); None where the schedule does not wait for one to return before the next starts. ``usable(w, r)``:
    mask start x stop of the stages that may be in a plan at all."""

    def __init__(
        self, n: int, m: int, keys: Keys, links: StageLinks, tables: Tables, stages: int,
        lead: Callable[[int], int | None], usable: Callable[[int, int], Any],
    ) -> None:  # fmt: skip
        self.n, self.m, self.keys, self.links = n, m, keys, links
        self.stages, self.lead = stages, lead
        self.parts: dict[tuple[int, int], Stages] = {}
        for r in range(1, stages + 1):
            for w in keys.widths:
                table = tables(w, r)
                part = None if table is None else self._part(w, r, table, usable(w, r))
                if part is not None:
                    self.parts[w, r] = part
        shape = (stages + 1, n + 1, links.gpus + 1, len(keys))
        self.back, self.done, self.trip = (np.full(shape, INF) for _ in range(3))
        self.behind_back, self.behind_done, self.behind_trip, self.behind_crowd = (
            np.full(shape, INF) for _ in range(4)
        )
        self._look_behind()
        self.front_late = self.front_ahead = self.front_over = np.zeros(0)
        self._through: dict[tuple[int, int], Any] = {}

    def _part(self, w: int, r: int, table: Table, mask: Any) -> Stages | None:
        offsets = self.links.offsets[w]
        if r > 1:
            offsets = offsets[offsets + w < self.links.gpus]
        start, stop = np.nonzero(mask)
        keep = (stop == self.n) if r == 1 else (stop < self.n)
        start, stop = start[keep], stop[keep]
        if not len(start) or not len(offsets):
            return None
        steady = table.steady[start, stop]
        keep = np.isfinite(steady).any(axis=(1, 2))
        start, stop = start[keep], stop[keep]
        if not len(start):
            return None
        return Stages(
            start=start, stop=stop, steady=steady[keep], forward=table.forward[start, stop],
            whole=table.whole[start, stop], single=table.single[start, stop],
            backward=None if table.backward is None else table.backward[start, stop], offsets=offsets,
            groups=begins(start),
        )  # fmt: skip

    def _look_behind(self) -> None:
        m, keys = self.m, self.keys
        for r in range(1, self.stages + 1):
            if r > 1:
                self._over_links(r - 1)
            for w in keys.widths:
                x = self.parts.get((w, r))
                if x is None:
                    continue
                k, at = keys.of[w], x.start[x.groups]
                where = (r, at[:, None], x.offsets[None, :], k)
                if r == 1:
                    for into, values in ((self.back, m * x.steady), (self.done, x.whole), (self.trip, x.steady)):
                        into[where] = values.min(axis=-1)[:, None]
                    continue
                # stage x offset x entry key x exit key
                steady, whole, single, forward = (v[:, None] for v in (x.steady, x.whole, x.single, x.forward))
                behind = (r - 1, x.stop[:, None], x.offsets[None, :] + w, k)
                trip = self.behind_trip[behind][:, :, None, :]
                x.back = np.maximum(self.behind_back[behind], self.behind_crowd[behind])
                x.done = self.behind_done[behind]
                rest, done = x.back[:, :, None, :], x.done[:, :, None, :]
                back = np.maximum(m * steady, steady + rest)
                whole_done = np.maximum(np.maximum(whole, single + rest), forward + done)
                lead = self.lead(r)
                if lead:
                    loops, steps = divmod(m - 1, lead)
                    round_trips = (loops + 1) * trip
                    if loops:
                        round_trips = round_trips + (loops + steps) * steady
                    elif steps:  # warm-up: forwards in a row
                        round_trips = round_trips + steps * forward
                    back = np.maximum(back, round_trips + steady)
                    whole_done = np.maximum(whole_done, round_trips + single)
                for into, values in (
                    (self.back, back), (self.done, whole_done), (self.trip, steady + trip),
                ):  # fmt: skip
                    into[where] = np.minimum.reduceat(values.min(axis=-1), x.groups, axis=0)

    def _over_links(self, r: int) -> None:
        """Fill in the arrays behind a cut, its link included, by the key in front of the cut."""
        links = self.links
        cuts, used = _used(self.trip[r])
        for hop in sorted(set(links.hops[used].tolist())):
            o = used[links.hops[used] == hop]
            where = np.ix_(cuts, o)
            both, ahead, crowd = (v[hop][cuts][:, None] for v in (links.both, links.ahead, links.crowd))
            # cut x offset x key in front x key behind
            back, done, trip = (v[r][where][:, :, None, :] for v in (self.back, self.done, self.trip))
            self.behind_back[r][where] = (both + back).min(axis=-1)
            self.behind_done[r][where] = (ahead + done).min(axis=-1)
            self.behind_trip[r][where] = (both + trip).min(axis=-1)
            self.behind_crowd[r][where] = (crowd + trip).min(axis=-1)

    def look_ahead(self, stages: Iterable[int]) -> None:
        """Fill in the arrays towards the first stage, for plans with these numbers of stages."""
        n, m, keys, links = self.n, self.m, self.keys, self.links
        wanted = set(stages)
        shape = (self.stages + 1, n + 1, links.gpus + 1, len(keys))
        self.front_late, self.front_ahead = np.full(shape, INF), np.full(shape, INF)
        self.front_over = np.full(shape[:3], INF)
        late, ahead, over = (np.full(shape[1:], INF) for _ in range(3))
        for r in range(self.stages, 0, -1):
            front_late, front_ahead, front_over = self.front_late[r], self.front_ahead[r], self.front_over[r]
            cuts, used = _used(ahead)
            for hop in sorted(set(links.hops[used].tolist())):
                o = used[links.hops[used] == hop]
                where = np.ix_(cuts, o)
                both, forward_link = links.both[hop][cuts][:, None], links.ahead[hop][cuts][:, None]
                front_late[where] = (late[where][..., None] + both).min(axis=2)
                front_ahead[where] = (ahead[where][..., None] + forward_link).min(axis=2)
            front_over[:] = over.min(axis=-1)
            if r in wanted:
                front_late[0, 0], front_ahead[0, 0], front_over[0, 0] = NEVER, 0.0, NEVER
            late, ahead, over = (np.full(shape[1:], INF) for _ in range(3))
            if r == 1:
                break
            for w in keys.widths:
                x = self.parts.get((w, r))
                if x is None:
                    continue
                k = keys.of[w]
                where = (x.start[:, None], x.offsets[None, :])
                into_late, into_ahead = (v[(*where, k)][..., None] for v in (front_late, front_ahead))
                into_over = front_over[where][:, :, None, None]
                steady, whole, single, forward = (v[:, None] for v in (x.steady, x.whole, x.single, x.forward))
                order = np.argsort(x.stop, kind="stable")
                groups = begins(x.stop[order])
                at_stop = (x.stop[order][groups][:, None], x.offsets[None, :] + w, k)
                for into, values in (
                    (late, np.maximum(into_late + steady, into_ahead + single)),
                    (ahead, into_ahead + forward),
                    (over, np.maximum(into_over, np.maximum(into_late + m * steady, into_ahead + whole))),
                ):
                    into[at_stop] = np.minimum.reduceat(values.min(axis=2)[order], groups, axis=0)

    def value(self, stages: Iterable[int]) -> float:
        """Lower bound in ms on every plan with one of these numbers of stages."""
        return min((float(self.done[p, 0, 0].min(initial=INF)) for p in stages), default=INF)

    def through(self, w: int, r: int) -> Any:
        """Lower bound in ms on every plan that contains such a stage, r stages to the last; array start x stop."""
        if (w, r) in self._through:
            return self._through[w, r]
        bounds = self._through[w, r] = np.full((self.n, self.n + 1), INF)
        x = self.parts.get((w, r))
        if x is None:
            return bounds
        m, k = self.m, self.keys.of[w]
        where = (r, x.start[:, None], x.offsets[None, :])
        late, ahead = (v[(*where, k)][..., None] for v in (self.front_late, self.front_ahead))
        over = self.front_over[where][:, :, None, None]
        steady, whole, single, forward = (v[:, None] for v in (x.steady, x.whole, x.single, x.forward))
        least = np.maximum(over, np.maximum(late + m * steady, ahead + whole))
        if r > 1:
            rest = np.maximum(late + steady, ahead + single) + x.back[:, :, None, :]
            least = np.maximum(least, np.maximum(rest, ahead + forward + x.done[:, :, None, :]))
        bounds[x.start, x.stop] = least.min(axis=(1, 2, 3))
        return bounds

    def room(self, w: int, r: int, cut: float) -> Any:
        """The most ms that stages may take in a plan that takes ``cut`` ms: figure
        (:class:`asa.planner.pipeline.thinning.Room`) x start x stop."""
        rooms = np.zeros((3, self.n, self.n + 1))
        x = self.parts.get((w, r))
        if x is None:
            return rooms
        k = self.keys.of[w]
        where = (r, x.start[:, None], x.offsets[None, :], k)
        late = np.maximum(self.front_late[where], 0.0).min(axis=(1, 2))
        ahead = self.front_ahead[where].min(axis=(1, 2))
        most, single = np.minimum((cut - late) / self.m, (cut - ahead) / self.m), cut - ahead
        if r > 1:
            back = x.back.min(axis=(1, 2))
            most, single = np.minimum(most, cut - late - back), single - back
        rooms[:, x.start, x.stop] = most, cut - ahead, single
        return rooms


def _used(values: Any) -> tuple[Any, Any]:
    """Cuts and offsets at which an array cut x offset x key has a finite value."""
    some = np.isfinite(values).any(axis=-1)
    return np.flatnonzero(some.any(axis=1)), np.flatnonzero(some.any(axis=0))
