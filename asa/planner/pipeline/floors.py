"""Lower bounds on pipeline plans without transfers between stages: quick for any number of ranks.

Three bounds for one number of microbatches, from compute alone: all ranks always busy; one microbatch through all
components; and the slowest stage, which computes all microbatches, at the cuts and widths that make it fastest. A
fourth combines them (:class:`Paced`): the first microbatch has to reach a stage and the last gradient has to leave it,
so a step takes at least the time of all microbatches in a stage plus the time of one microbatch in all stages in front;
and a stage waits for microbatches to return from the stages behind, as often as its schedule says. It is raised by all
that a stage takes besides compute, with the memory limit (:mod:`asa.planner.stage.floor`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from asa.cost.pipeline import lead
from asa.interfaces.schedule import Schedule
from asa.planner import clock
from asa.planner.budget import ROUNDING
from asa.planner.pipeline.staged import StagedSpace
from asa.planner.stage.lattice import INF

_NEVER = 1e18
_STEPS = 12
_CLOSE, _DEPTHS, _TIGHT = 0.002, 32, 16
"""Share of a bound within which bisection ends, and numbers of stages behind a stage that are told apart, by what it
waits for (up to ``_MOST_RANKS``) and by its memory (in any case)."""
_MOST_RANKS, _NODE = 128, 8
"""Beyond so many ranks, ranks are counted in nodes of eight, and narrower stages count as no rank."""
_HARDLY = 0.01
"""Share of all compute up to which stages of a width are not worth being priced."""
_MOST_ENTRIES = 4e8
"""Most table entries of one bisection (seconds of work); with more, no bisection is made."""


def floors(
    pipelines: StagedSpace, best: float = INF, counts: Sequence[int] | None = None
) -> tuple[dict[int, float], list[Paced]]:
    """Lower bound in ms on every pipeline plan, by number of microbatches (those in ``counts``, or all where None);
    ``best`` where the bound is not below it. Also the items that can raise some of these bounds."""
    bounds = dict.fromkeys(pipelines.microbatches() if counts is None else counts, 0.0)
    paced, gpus = list[Paced](), pipelines.gpus
    unit = 1 if gpus <= _MOST_RANKS else _NODE
    for m in bounds:
        rows = {w: row for w in pipelines.widths() if w < gpus and (row := pipelines.compute(w, m)) is not None}
        if not rows:
            bounds[m] = best
            continue
        compute_ms = np.minimum(np.array(list(rows.values()), dtype=float), _NEVER)
        widths = np.array(list(rows), dtype=np.int64)
        area = m * float((compute_ms * widths[:, None]).min(axis=0).sum()) / gpus
        low = max(area, float(compute_ms.min(axis=0).sum()))
        if low >= min(best, _NEVER / 2):
            bounds[m] = best
            continue
        bounds[m] = max(low, m * _slowest(compute_ms, widths, gpus, low / m, best / m))
        entries = len(set((widths // unit).tolist())) * compute_ms.shape[1] ** 2 * (gpus // unit + 1)
        if bounds[m] < best < INF and entries <= _MOST_ENTRIES:
            paced.append(Paced(pipelines, compute_ms, widths, unit, m, bounds[m]))
    return bounds, paced


class Paced:
    """Plans with ``m`` microbatches, bounded by the slowest stage and the stages in front of it: an item for the queue
    of :mod:`asa.planner.pipeline.joint`. ``compute_ms``: by width and component; ranks count in units of ``unit``."""

    value = INF

    def __init__(self, pipelines: StagedSpace, compute_ms: Any, widths: Any, unit: int, m: int, low: float) -> None:
        self.m, self.bound, self.level, self.stuck = m, low, 0, False
        self._pipelines, self._widths, self._high = pipelines, widths.tolist(), INF
        self._slots, self._unit = pipelines.gpus // unit, unit
        self._n = compute_ms.shape[1]
        self._most = min(self._n, pipelines.gpus)
        self._depths = min(_DEPTHS if unit == 1 else _TIGHT, self._most)
        self._sums = np.concatenate([np.zeros((len(widths), 1)), np.cumsum(compute_ms, axis=1)], axis=1)
        self._offsets = {
            w // unit: np.array([o for o in range(self._slots + 1 - w // unit) if unit > 1 or pipelines.placed(o, w)])
            for w in self._widths
        }
        self._waits = _waits(list(pipelines.schedules.values()), self._depths, self._most, m)
        self._least = self._by_slots()

    def step(self, best: float, ends: float) -> None:
        """Raise the bound by one test. The first two ask whether any plan takes less than ``best`` ms, by compute alone
        (not where memory binds: it is hardly ever enough there) and with all that is known of stages. Further ones
        bisect the interval between the bound and the best plan."""
        self.level += 2 if not self.level and self._pipelines.likely_tight else 1
        if self.level == 2:
            self._least = self._by_slots(ends, best)
        middle = best if self.level < 3 else (self.bound + min(best, self._high)) / 2
        if _reachable(self._least, self._offsets, self._slots, self.m, middle * (1 + ROUNDING), self._waits):
            self._high = middle
        else:
            self.bound = middle
        self.stuck = self.level > 2 and min(best, self._high) - self.bound <= _CLOSE * self.bound

    def _by_slots(self, ends: float | None = None, best: float = INF) -> dict[int, tuple[Any, Any]]:
        """The argument ``least`` of :func:`_reachable`: by compute alone, or with all that is known of stages. Widths
        for which there is no time until ``ends`` count by compute, and so do those at which hardly any component runs
        within ``best`` ms."""
        x, m = self._pipelines, self.m
        depths = range(1, min(_TIGHT, self._depths) + 1 if ends is not None and x.likely_tight else 2)
        in_flight = [_least_in_flight(x.schedules.values(), r, self._most, m) for r in depths]
        depth = np.minimum(np.arange(self._depths), len(depths) - 1)
        least: dict[int, tuple[Any, Any]] = {}
        for k in range(len(self._widths) - 1, -1, -1):  # widest first: they synchronise most
            w = self._widths[k]
            compute_ms = self._sums[k] - self._sums[k][:, None]
            able = compute_ms[m * compute_ms <= best].max(initial=0.0) > _HARDLY * self._sums[k][-1]
            stages = x.limited(w, m, in_flight) if able and ends is not None and clock.now() <= ends else []
            steady = np.stack([s.steady.of_stages() for s in stages] or [compute_ms] * len(depths))
            whole = np.stack([s.whole.of_stages() for s in stages] or [m * compute_ms] * len(depths))
            steady, whole = steady[depth], np.maximum(whole, m * steady)[depth]
            slots = w // self._unit
            if slots in least:
                steady, whole = np.minimum(steady, least[slots][0]), np.minimum(whole, least[slots][1])
            least[slots] = steady, whole
        return least


def _least_in_flight(schedules: Iterable[Schedule], depth: int, most: int, m: int) -> int:
    """The least number of microbatches, ``_TIGHT`` at most, whose activations a stage holds in any schedule of at most
    ``most`` stages, if it is stage number ``depth`` from the last one, which is number 1."""
    every = [
        schedule.in_flight(stages - depth, stages, m)
        for schedule in schedules for stages in range(max(2, depth), most + 1) if not schedule.refusal(stages, m)
    ]  # fmt: skip
    return min([_TIGHT, *every]) if every else 1


def _waits(schedules: Sequence[Schedule], depths: int, most: int, m: int) -> Any:
    """What a stage waits for: round trips through the stages behind and passes of a microbatch through the stage itself
    that are done one after another while it works. Numbers of both, on an array 2 x schedule x pair of numbers x depth.

    A stage with ``lead`` microbatches in flight begins one after the round trip of the one ``lead`` before it
    (:func:`asa.cost.pipeline.lower_bound`); between these trips it may pass microbatches one by one. Where all forwards
    come first, the last microbatch makes one round trip. The greatest depth counts for all beyond, if these exist.
    """
    able = [(s, [p for p in range(2, most + 1) if not s.refusal(p, m)]) for s in schedules]
    able = [x for x in able if x[1]]
    waits = np.zeros((2, max(1, len(able)), 2, depths))
    waits[1] = m
    for k, (schedule, allowed) in enumerate(able):
        if lead(schedule, [(s, p) for p in allowed for s in range(p)], m) == m:
            waits[0, k] = 1
            continue
        for r in range(1, depths + 1 if depths == most else depths):
            ahead = lead(schedule, [(p - r, p) for p in allowed if p >= r], m) if r <= max(allowed) else None
            loops = (m - 1) // ahead if ahead else 0
            if ahead and loops:
                waits[:, k, :, r - 1] = np.transpose([(x + 1, m - x * (ahead - 1)) for x in (1, loops)])
    return waits


def _reachable(
    least: dict[int, tuple[Any, Any]], offsets: dict[int, Any], slots: int, m: int, most: float, waits: Any
) -> bool:
    """Whether stages exist of which each takes at most ``most`` ms, with the memory limit. ``least``: for stages of so
    many slots, ms of one microbatch and of a whole step, by depth, first component and the one behind the last. The
    depth is the number of stages from this one to the last; the greatest also counts for all beyond it. ``offsets``:
    the slots at which such stages may begin; ``waits`` as :func:`_waits` returns them.

    Stages are added in front. What is stored for the stages so far is the longest time that one microbatch may take in
    all stages in front of them: a stage begins when the first microbatch has passed those, and the last one has as long
    a way back from it. Once-per-step work of a stage may go on meanwhile. Besides, the shortest round trip of a
    microbatch through such stages is stored.
    """
    depths, n = next(iter(least.values()))[0].shape[0], next(iter(least.values()))[0].shape[1] - 1
    allowed = np.full((depths + 1, n + 1, slots + 1), -INF)
    trips = np.full_like(allowed, INF)
    allowed[0, n], trips[0, n] = INF, 0.0
    there, here = waits
    limits = []
    for k, (steady, whole) in least.items():
        left = np.where(whole <= most, most - m * steady, -INF)
        limits.append((k, steady, left, left.max(axis=0) >= 0))
    front, back = _fewest_slots({k: possible for k, _, _, possible in limits}, n)
    for start in range(n - 1, -1, -1):
        deep = min(depths, n - start)
        for k, steady, left, possible in limits:
            stops, at = np.flatnonzero(possible[start, start + 1 :]), offsets[k]
            at = at[(at >= front[start]) & (at <= slots - back[start])]
            if not len(stops) or not len(at):
                continue
            stage = np.s_[:deep, start, start + 1 : (stop := start + 2 + int(stops[-1])), None]
            behind, trip = (v[: deep + 1, start + 1 : stop, at + k] for v in (allowed, trips))
            np.maximum(behind[-2], behind[-1], out=behind[-2])
            np.minimum(trip[-2], trip[-1], out=trip[-2])
            each, behind, trip = steady[stage], behind[:-1], trip[:-1]
            away = np.where(trip < INF, trip, 0.0)
            busy = (there[..., :deep, None, None] * away + here[..., :deep, None, None] * each).max(axis=1)
            ms = np.minimum(np.minimum(left[stage], behind - each), most - busy.min(axis=0))
            trip = np.where(ms >= 0, trip + each, INF).min(axis=1)
            allowed[1 : deep + 1, start, at] = np.maximum(allowed[1 : deep + 1, start, at], ms.max(axis=1))
            trips[1 : deep + 1, start, at] = np.minimum(trips[1 : deep + 1, start, at], trip)
    return bool((allowed[1:, 0, 0] >= 0).any())


def _fewest_slots(possible: dict[int, Any], n: int) -> tuple[Any, Any]:
    """The fewest slots for all components in front of each one, and for those from it on; ``possible``: the stages that
    exist, by slots, start and stop."""
    front, back = np.full((2, n + 1), 1 << 40)
    front[0] = back[n] = 0
    for at in range(n):
        end = n - 1 - at
        for k, stages in possible.items():
            here, there = stages[at, at + 1 :], stages[end, end + 1 :]
            front[at + 1 :][here] = np.minimum(front[at + 1 :][here], front[at] + k)
            back[end] = min(back[end], back[end + 1 :][there].min(initial=1 << 40) + k)
    return front, back


def _slowest(compute_ms: Any, widths: Any, gpus: int, low: float, high: float) -> float:
    """Lower bound in ms on the slowest stage, between ``low`` and ``high``; ``compute_ms``: by width, component."""
    sums = np.concatenate([np.zeros((len(widths), 1)), np.cumsum(compute_ms, axis=1)], axis=1)
    if high < INF and not _possible(sums, widths, gpus, high):
        return high
    high = min(high, float(sums[:, -1].min()))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _possible(sums, widths, gpus, middle):
            high = middle
        else:
            low = middle
    return low


def _possible(sums: Any, widths: Any, gpus: int, most: float) -> bool:
    """Whether stages of at most ``most`` ms need no more than ``gpus`` ranks."""
    n = sums.shape[1] - 1
    reach = np.array([np.searchsorted(row, row[:-1] + most * (1 + 1e-12), side="right") - 1 for row in sums])
    fewest = np.full(n + 1, 1 << 40)
    fewest[n] = 0
    for i in range(n - 1, -1, -1):
        stop = reach[:, i]
        fewest[i] = np.where(stop > i, widths + fewest[stop], 1 << 40).min()
    return bool(fewest[0] <= gpus)
