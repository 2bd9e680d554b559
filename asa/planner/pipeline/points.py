"""Ways to run a stage, as the search over pipelines sees them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from asa.planner.budget import ROUNDING
from asa.planner.stage.problem import Choice

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

    def covers(self, other: Room) -> bool:
        """Whether it is at least as large as the other in everything."""
        return all(a >= b for a, b in zip(self, other, strict=True))


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
    extra: Any
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
            self, least=self.least[:, keep], entry=self.entry[keep], exit=self.exit[keep], extra=self.extra[keep],
            origin=self.origin[keep],
        )  # fmt: skip

    def choice(self, index: int) -> Choice:
        """The choice that a point stands for."""
        choice: list[int] = []
        label = int(self.origin[index])
        for parents, configs in reversed(self.history):
            choice.append(int(configs[label]))
            label = int(parents[label])
        return tuple(reversed(choice))
