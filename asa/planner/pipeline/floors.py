"""Lower bounds on pipeline plans from computation alone, plus the host's work for messages on asynchronous devices.
They are quick for any number of ranks.

Three bounds for one number of microbatches: all ranks always busy; one microbatch through all components; and the
slowest stage, which computes all microbatches, at the cuts and widths that make it fastest. A fourth combines them: the
first microbatch has to reach a stage and the last gradient has to leave it, so a step takes at least the time of all
microbatches in a stage plus the time of one microbatch in all stages in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asa.planner import clock
from asa.planner.budget import ROUNDING
from asa.planner.pipeline.staged import StagedSpace
from asa.planner.stage.lattice import INF

_NEVER = 1e18
_STEPS = 12
_PACED = 7
"""Bisections of the interval between a bound and the best plan."""
_MOST_RANKS, _NODE = 128, 8
"""Beyond so many ranks, ranks are counted in nodes of eight, and narrower stages count as no rank."""
_ONCE = 0.45
"""Share of the remaining time that may be used to price once-per-step work."""
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
        self._pipelines, self._widths, self._high = pipelines, widths, INF
        self._slots, self._slots_of = pipelines.gpus // unit, widths // unit
        self._sums = np.concatenate([np.zeros((len(widths), 1)), np.cumsum(compute_ms, axis=1)], axis=1)
        self._joints, self._whole = np.zeros((2, *compute_ms.shape)), np.zeros((2, 2, *compute_ms.shape))
        self._tables = self._build_tables()

    def step(self, best: float, ends: float, *, hosts: bool = True) -> None:
        """Raise the bound by one test. The first three ask whether any plan takes less than ``best`` ms: by compute
        alone, with the host's work at the ends of stages, and with once-per-step work. Further ones bisect the interval
        between the bound and the best plan."""
        self.level += 1 if hosts or self.level != 1 else 2  # their work is left out
        if self.level == 2:
            for k, w in enumerate(self._widths.tolist()):
                bounds = self._pipelines.ends(w, self.m) if clock.now() < ends else None
                if bounds is None:
                    break  # the ends of the other widths count as zero
                self._joints[:, k] = bounds
            self._tables = self._build_tables()
        if self.level == 3:
            until = min(ends, clock.now() + _ONCE * (ends - clock.now()))
            for k in np.argsort(-self._widths).tolist():  # widest first: they synchronise most
                bounds = self._pipelines.whole(int(self._widths[k]), self.m) if clock.now() < until else None
                if bounds is None:
                    break
                self._whole[:, :, k] = bounds
            self._tables = self._build_tables()
        middle = best if self.level < 4 else (self.bound + min(best, self._high)) / 2
        if _reachable(self._tables, self._slots, self.m, middle * (1 + ROUNDING)):
            self._high = middle
        else:
            self.bound = middle
        self.stuck = self.level > _PACED

    def _build_tables(self) -> dict[int, tuple[Any, Any, Any, Any]]:
        """The argument ``least`` of :func:`_reachable`, by the slots of a stage."""
        zero = np.zeros((*self._whole.shape[:-1], 1))
        whole, tables = np.concatenate([zero, np.cumsum(self._whole, axis=-1)], axis=-1), {}
        for k in sorted(set(self._slots_of.tolist())):
            mask = self._slots_of == k
            tables[k] = (self._sums[mask], *self._joints[:, mask], whole[:, :, mask])
        return tables


def _reachable(least: dict[int, tuple[Any, Any, Any, Any]], slots: int, m: int, most: float) -> bool:
    """Whether stages exist of which each, counted so, takes at most ``most`` ms. ``least``: for widths of so many
    slots, prefix sums of ms over components, ms of beginning and of ending with each component, and prefix sums of
    :meth:`asa.planner.pipeline.staged.StagedSpace.whole`.

    A stage ends after all its microbatches and its once-per-step work. It also ends after one microbatch has passed it
    and all stages behind it, plus its once-per-step work.
    """
    n = next(iter(least.values()))[0].shape[1] - 1
    front, last = np.full((2, n + 1, slots + 1), INF)
    """By cut and slots used in front of it: the least round trip in ms of a microbatch, and the least ms of a stage
    there with the round trip between it and the cut."""
    front[0] = last[0] = 0.0
    for stop in range(1, n + 1):
        for k, (sums, begin, end, whole) in least.items():
            inside = sums[:, stop, None] - sums[:, :stop]
            first = int(np.searchsorted(-inside.min(axis=0), -most / m))  # a stage that starts earlier is too slow
            if first == stop or k > slots:
                continue
            step_ms, single = (whole[..., stop, None] - whole[..., :stop]).max(axis=1)
            stage = np.where(step_ms <= most, inside + begin[:, :stop] + end[:, stop - 1, None], INF)
            in_front, least_ms = front[first:stop, : slots + 1 - k], stage.min(axis=0)[first:, None]
            ms = np.where(in_front + m * least_ms <= most, in_front + least_ms, INF).min(axis=0)
            np.minimum(front[stop, k:], ms, out=front[stop, k:])
            stage, single = stage[:, first:, None], single[:, first:, None]
            ms = np.maximum(last[first:stop, : slots + 1 - k] + stage, np.maximum(stage, single)).min(axis=(0, 1))
            np.minimum(last[stop, k:], ms, out=last[stop, k:])
        for reached in (front, last):
            np.minimum.accumulate(reached[stop], out=reached[stop])
    return bool(np.isfinite(front[n, slots]) and last[n, slots] <= most)


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
