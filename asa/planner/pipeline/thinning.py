"""Ways to run a stage: labels while it is explored, how their number is limited, and the points that result.

Dominated labels are dropped. If too many are left, their numbers are rounded down a little, so that more of them
dominate each other. If that is not enough, similar ones are merged, with the least of each number. The choice behind a
merged label is only one of those that it stands for, but none of these is better than the label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from asa.planner.budget import ROUNDING
from asa.planner.stage import lattice as at
from asa.planner.stage.lattice import Numbers
from asa.planner.stage.pareto import begins, efficient
from asa.planner.stage.pricing_problem import Labels, traced
from asa.planner.stage.problem import Choice

_ROUNDED, _ROUNDED_MEMORY = 5e-4, 2e-4
"""By what part of a stage's time, and of the memory, all its components together are rounded down at most."""

# Columns of a label.
FWD, BWD, BKT, V, C, P, PEAK, LAST, HELD, SUM, MOVING = range(11)
_ANY = 1e15
"""Ms that no stage takes."""


class Room(NamedTuple):
    """The most ms that a stage may take: a microbatch forward and back; all of a step; one microbatch with what is paid
    once per step."""

    steady: float
    whole: float
    single: float = _ANY

    def union(self, other: Room) -> Room:
        """The room that covers both."""
        return Room(*map(max, self, other))

    def larger(self, factor: float) -> Room:
        """The room multiplied by ``factor``."""
        return Room(*(x * factor for x in self))


@dataclass(frozen=True, kw_only=True)
class Points:
    """Ways to run one stage of which none is better in everything: arrays with an entry for each way, in ms.

    ``least`` holds forward, backward, what lengthens the last backward, and all that is paid once per step (that length
    included), never more than the truth; ``exact`` says whether they are the truth. ``entry`` and ``exit`` are data
    degrees by number. ``origin`` and ``history`` lead back to the choices.
    """

    least: Any
    entry: Any
    exit: Any
    exact: bool
    origin: Any
    stop: int
    history: list[tuple[Any, Any]]

    def __len__(self) -> int:
        return len(self.entry)

    def within(self, m: int, room: Room) -> Points | None:
        """Points that take no longer than ``room`` allows."""
        forward, backward, _, once = self.least
        mask = forward + backward <= room.steady * (1 + ROUNDING)
        mask &= m * (forward + backward) + once <= room.whole * (1 + ROUNDING)
        mask &= forward + backward + once <= room.single * (1 + ROUNDING)
        if mask.all():
            return self
        if not mask.any():
            return None
        keep = np.flatnonzero(mask)
        return replace(
            self, least=self.least[:, keep], entry=self.entry[keep], exit=self.exit[keep], origin=self.origin[keep],
        )  # fmt: skip

    def choice(self, index: int) -> Choice:
        """The choice that a point stands for."""
        return tuple(traced(self.history, int(self.origin[index])))


class Thinning:
    """A filter for the labels of a chain; memory counts where it is ``tight``. ``leading``: stages begin a pipeline, so
    no other stage waits for their last backward. ``last``: stages end it. ``rounded``: labels are less than the truth.
    ``ends``: when :class:`asa.planner.stage.pareto.OutOfTimeError` is raised.

    A path through the clock of a pipeline that comes back through a stage has gone forward through it. So what
    lengthens its last backward counts together with a microbatch forward and back, where there are stages in front, and
    so does what is paid once per step. Forward and backward also count by themselves in the paths of several
    microbatches; of a single one only forward does, where there are stages behind.
    """

    def __init__(self, numbers: Numbers, *, tight: bool) -> None:
        self.numbers, self.tight = numbers, tight
        self.leading = self.last = self.rounded = False
        self.ends = float("inf")
        self.slowed = numbers.saving > 0 and numbers.sp > 1
        ends = np.where(np.isfinite(numbers.outlets), numbers.outlets, 0.0)
        self.outlets_hold = bool(ends[:, at.ESTATE :].any())

    def best(self, labels: Any, group: Any, *, arriving: bool, ending: bool = False) -> Any:
        """Indices of labels that no other one of their group equals or beats in everything. ``arriving``: over an edge;
        ``ending``: where a stage may stop."""
        columns = [np.where(np.isfinite(x), x, 0.0) for x in self._paths(labels)]
        if self.tight:
            if arriving:
                columns.append(labels[:, [PEAK, HELD, MOVING]])
            elif ending and self.outlets_hold:
                columns.append(labels[:, [PEAK, LAST, HELD]])
            else:
                columns += [np.maximum(labels[:, PEAK, None], labels[:, LAST, None]), labels[:, HELD, None]]
        return efficient(np.concatenate(columns, axis=1), group, self.ends)

    def _paths(self, labels: Any) -> list[Any]:
        """What the rest of a plan sees of a label's times: sums along the paths that go through the stage.

        What is paid once per step is the largest of the clocks, each plus something that is the same for all labels of
        a group. What lengthens backward grows with what is hidden, so with the least of what these leave of the sum.
        """
        x, both, clocks = self.numbers, labels[:, FWD, None] + labels[:, BWD, None], labels[:, [V, C, P]]
        sums = [both + clocks]
        if not self.leading:
            longer = both + labels[:, BKT, None]
            if self.slowed and not self.rounded:  # labels that are rounded count without it, in what comes of them
                longer = longer + (labels[:, SUM, None] - clocks) * (1 - 1 / x.sp) / x.saving
            sums.append(longer)
        if x.m > 1:
            sums.append(labels[:, [FWD, BWD]])
        elif not self.last:
            sums.append(labels[:, FWD, None])
        return sums

    def along_paths(self, forward: Any, backward: Any, longer: Any, once: Any) -> Any:
        """Sums along paths for stages that have ended, where ``once`` is all that is paid once per step: stage x
        sum."""
        both = forward + backward
        sums = [forward, both + longer, both + once]
        return np.stack(sums if self.numbers.m == 1 else [*sums, backward], axis=1)

    def grain(self, start: int, caps: Mapping[int, Room]) -> Any:
        """The amounts by which each number of a label may be rounded behind each component, in stages from
        ``start``."""
        amounts = np.full(10, _ROUNDED * max(1e-9, min(whole / (b - start) for b, (_, whole, _) in caps.items())))
        amounts[[FWD, BWD]] = _ROUNDED * max(1e-9, min(steady / (b - start) for b, (steady, _, _) in caps.items())) / 2
        amounts[[PEAK, LAST, HELD]] = _ROUNDED_MEMORY * self.numbers.capacity / self.numbers.n if self.tight else 1.0
        return amounts

    def thinned(self, front: Labels, ending: bool, most: int, grain: Any) -> tuple[Labels, bool]:
        """At most ``most`` labels, and whether they are less than the truth."""
        group = front.entry * self.numbers.count + front.layout
        if len(front.columns) > 1:
            front = front.select(self.best(front.columns, group, arriving=False, ending=ending))
        if len(front.columns) <= most:
            return front, False
        total = front.columns[:, SUM].copy()
        front.columns = (np.floor(front.columns / grain) - 1e-9) * grain
        front.columns[:, SUM] = total
        self.rounded = True
        group = front.entry * self.numbers.count + front.layout
        front = front.select(self.best(front.columns, group, arriving=False, ending=ending))
        return (front if len(front.columns) <= most else self._merged(front, most)), True

    def _merged(self, front: Labels, most: int) -> Labels:
        """At most ``most`` labels: similar ones become one, with the least of each number and one of their choices."""
        group = front.entry * self.numbers.count + front.layout
        labels = front.columns
        steady = labels[:, FWD] + labels[:, BWD]
        keys = np.stack([self.numbers.m * steady + np.maximum(labels[:, V], labels[:, C]),
                         labels[:, HELD] if self.tight else steady], axis=1)  # fmt: skip
        low, span = keys.min(axis=0), np.maximum(np.ptp(keys, axis=0), 1e-12)
        cells = 64
        while True:
            cell = ((keys - low) / span * (cells - 1e-6)).astype(np.int64)
            code = (group * cells + cell[:, 0]) * cells + cell[:, 1]
            order = np.lexsort((keys[:, 1 if self.tight else 0], code))
            first = begins(code[order])
            if len(first) <= most or cells == 1:
                break
            cells = max(1, cells * 2 // 3)
        merged = front.select(order[first])
        merged.columns = np.minimum.reduceat(labels[order], first, axis=0)
        merged.columns[:, SUM] = labels[order[first], SUM]
        return merged
