"""The interface of pipeline schedules: the order in which a stage runs the microbatches of a step. One file each.

The order is data. The cost model bounds its makespan, the simulator replays it, and the executor runs it: what is
priced is what runs. A contract test checks every schedule: each microbatch runs forward once and then backward once on
every stage, and no more microbatches are in flight than declared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from asa.ir.codec import noun
from asa.ir.plan import ScheduleName

Direction = Literal["forward", "backward"]


@noun
class Action:
    """Forward or backward of one microbatch (counted from 0) on a stage."""

    direction: Direction
    microbatch: int


class Schedule(ABC):
    """Order of microbatches on each of ``stages`` stages, counted from 0, the stage that reads the data."""

    identifier: ClassVar[ScheduleName]

    @abstractmethod
    def refusal(self, stages: int, num_microbatches: int) -> str:
        """Why this schedule cannot run this number of stages and microbatches; empty if it can."""

    @abstractmethod
    def order(self, stage: int, stages: int, num_microbatches: int) -> tuple[Action, ...]:
        """All actions of one step on this stage, in order."""

    @abstractmethod
    def in_flight(self, stage: int, stages: int, num_microbatches: int) -> int:
        """The largest number of microbatches whose activations the stage holds at the same time."""
