"""Lower bounds on plans of several stages from computation alone, and the host's work for messages on asynchronous
devices. They are quick for any number of ranks.

For one number of microbatches: every rank always busy; one microbatch through all components; and the slowest stage,
which has all microbatches to do, at the cuts and widths that make it fastest. Then both at once: before a stage begins
the first microbatch has to reach it, and afterwards the last gradient has to go back, so a step takes at least what all
microbatches take in a stage plus what one takes in all stages in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asa.planner import clock
from asa.planner.budget import ROUNDING
from asa.planner.pipeline.lattice import INF
from asa.planner.pipeline.pipelines import Pipelines

_NEVER = 1e18
_LEAST_S = 0.1
_STEPS = 12
PACED = 7
"""Halvings of what is left between a bound and the best plan."""
_NEAR = 0.5
"""Share of the best plan: a bound further below it is not raised here, where closer bounds follow anyway."""
_MOST_RANKS, _NODE = 128, 8
"""Beyond so many ranks they are counted in nodes of eight, and narrower stages as none at all."""
_ONCE = 0.45
"""Share of the time that is left to price what stages pay once per step."""
_MOST_ENTRIES = 4e8
"""Most entries of all tables of one halving (seconds of work); beyond, none is made."""


def floors(
    pipelines: Pipelines, best: float = INF, ends: float = INF, *, halvings: int = PACED,
    counts: Sequence[int] | None = None,
) -> dict[int, float]:  # fmt: skip
    """A bound in ms on every plan of several stages, for each number of microbatches (of ``counts``, all where None);
    ``best`` where it is no less.

    ``halvings``: how often what is left between a bound and ``best`` is halved, where the bound does not reach ``best``
    at once; 1 for none, where closer bounds follow. The time ``ends`` (a tenth of a second from now at least) limits
    only these halvings, which take longest: without the others nothing is proved.
    """
    ends = max(ends, clock.now() + _LEAST_S)
    found, left = begun(pipelines, best, counts, halvings=halvings)
    for x in left:
        while x.bound < best and not x.stuck and clock.now() <= ends:
            x.step(best, ends)
        found[x.m] = x.bound
    return found


def begun(
    pipelines: Pipelines, best: float, counts: Sequence[int] | None = None, *, halvings: int = PACED
) -> tuple[dict[int, float], list[Paced]]:
    """Bounds as those of :func:`floors` before anything is halved, and what can raise some of them."""
    found = dict.fromkeys(pipelines.microbatches() if counts is None else counts, 0.0)
    left, gpus = list[Paced](), pipelines.gpus
    unit = 1 if gpus <= _MOST_RANKS else _NODE
    for m in found:
        rows = {w: row for w in pipelines.widths() if w < gpus and (row := pipelines.compute(w, m)) is not None}
        if not rows:
            found[m] = best
            continue
        own = np.minimum(np.array(list(rows.values()), dtype=float), _NEVER)
        widths = np.array(list(rows), dtype=np.int64)
        area = m * float((own * widths[:, None]).min(axis=0).sum()) / gpus
        low = max(area, float(own.min(axis=0).sum()))
        if low >= min(best, _NEVER / 2):
            found[m] = best
            continue
        found[m] = max(low, m * _slowest(own, widths, gpus, low / m, best / m))
        entries = len(set((widths // unit).tolist())) * own.shape[1] ** 2 * (gpus // unit + 1)
        if found[m] < best < INF and (halvings > 1 or found[m] > _NEAR * best) and entries <= _MOST_ENTRIES:
            left.append(Paced(pipelines, own, widths, unit, m, found[m], halvings))
    return found, left


class Paced:
    """Plans with ``m`` microbatches, by the slowest stage and what is in front of it: an item for the queue of
    :mod:`asa.planner.pipeline.joint`. ``own``: ms by width and component; ranks count in ``unit``s."""

    value = INF

    def __init__(
        self, pipelines: Pipelines, own: Any, widths: Any, unit: int, m: int, low: float, halvings: int
    ) -> None:
        self.m, self.bound, self.level, self.stuck = m, low, 0, False
        self._pipelines, self._widths, self._halvings, self._high = pipelines, widths, halvings, INF
        self._slots, self._taken = pipelines.gpus // unit, widths // unit
        self._sums = np.concatenate([np.zeros((len(widths), 1)), np.cumsum(own, axis=1)], axis=1)
        self._joints, self._whole = np.zeros((2, *own.shape)), np.zeros((2, 2, *own.shape))
        self._least = self._with()

    def step(self, best: float, ends: float) -> None:
        """Ask whether any plan takes less than ``best`` ms, without what hosts take at the ends of stages, and then
        with that, and with what is paid once per step; and halve what is left between the bound and the best plan,
        again and again."""
        self.level += 1
        if self.level == 2:
            for k, w in enumerate(self._widths.tolist()):
                found = self._pipelines.ends(w, self.m) if clock.now() < ends else None
                if found is None:
                    break  # the others begin and end in no time
                self._joints[:, k] = found
            self._least = self._with()
        if self.level == 3:
            until = min(ends, clock.now() + _ONCE * (ends - clock.now()))
            for k in np.argsort(-self._widths).tolist():  # where most has to be synchronised first
                found = self._pipelines.whole(int(self._widths[k]), self.m) if clock.now() < until else None
                if found is None:
                    break
                self._whole[:, :, k] = found
            self._least = self._with()
        middle = best if self.level < 4 else (self.bound + min(best, self._high)) / 2
        if _reachable(self._least, self._slots, self.m, middle * (1 + ROUNDING)):
            self._high = middle
        else:
            self.bound = middle
        self.stuck = self.level > self._halvings

    def _with(self) -> dict[int, tuple[Any, Any, Any, Any]]:
        """By slots of a stage what :func:`_reachable` takes."""
        before = np.zeros((*self._whole.shape[:-1], 1))
        whole, found = np.concatenate([before, np.cumsum(self._whole, axis=-1)], axis=-1), {}
        for k in sorted(set(self._taken.tolist())):
            own = self._taken == k
            found[k] = (self._sums[own], *self._joints[:, own], whole[:, :, own])
        return found


def _reachable(least: dict[int, tuple[Any, Any, Any, Any]], slots: int, m: int, most: float) -> bool:
    """Whether stages fit of which each, counted so, takes no more than ``most`` ms. ``least``: for widths that count as
    so many slots, running sums of ms over components, ms of beginning and of ending with each, and running sums of what
    :meth:`asa.planner.pipeline.pipelines.Pipelines.whole` gives.

    A stage ends no earlier than after all its microbatches and what it pays once per step; nor before one microbatch
    has been through it and all stages behind it, and that is paid.
    """
    n = next(iter(least.values()))[0].shape[1] - 1
    front, last = np.full((2, n + 1, slots + 1), INF)
    """By cut and slots used in front of it, the least ms of a microbatch's way there and back, and the least that a
    stage there takes with the way from it to the cut and back."""
    front[0] = last[0] = 0.0
    for stop in range(1, n + 1):
        for k, (sums, begin, end, whole) in least.items():
            inside = sums[:, stop, None] - sums[:, :stop]
            first = int(np.searchsorted(-inside.min(axis=0), -most / m))  # further in front a stage alone is too slow
            if first == stop or k > slots:
                continue
            every, one = (whole[..., stop, None] - whole[..., :stop]).max(axis=1)
            own = np.where(every <= most, inside + begin[:, :stop] + end[:, stop - 1, None], INF)
            before, least_own = front[first:stop, : slots + 1 - k], own.min(axis=0)[first:, None]
            found = np.where(before + m * least_own <= most, before + least_own, INF).min(axis=0)
            np.minimum(front[stop, k:], found, out=front[stop, k:])
            own, one = own[:, first:, None], one[:, first:, None]
            found = np.maximum(last[first:stop, : slots + 1 - k] + own, np.maximum(own, one)).min(axis=(0, 1))
            np.minimum(last[stop, k:], found, out=last[stop, k:])
        for reached in (front, last):
            np.minimum.accumulate(reached[stop], out=reached[stop])
    return bool(np.isfinite(front[n, slots]) and last[n, slots] <= most)


def _slowest(own: Any, widths: Any, gpus: int, low: float, high: float) -> float:
    """A bound on the slowest stage between ``low`` and ``high`` ms; ``own``: ms by width and component."""
    sums = np.concatenate([np.zeros((len(widths), 1)), np.cumsum(own, axis=1)], axis=1)
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
    """Whether stages of at most ``most`` ms need no more than the ranks there are."""
    n = sums.shape[1] - 1
    reach = np.array([np.searchsorted(row, row[:-1] + most * (1 + 1e-12), side="right") - 1 for row in sums])
    fewest = np.full(n + 1, 1 << 40)
    fewest[n] = 0
    for i in range(n - 1, -1, -1):
        stop = reach[:, i]
        fewest[i] = np.where(stop > i, widths + fewest[stop], 1 << 40).min()
    return bool(fewest[0] <= gpus)
