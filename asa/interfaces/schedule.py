"""A schedule is one page: in which order the ranks of a stage run the microbatches of a step.

The order is data. The cost model bounds it, the simulator plays it, and the executor performs it: what is priced is
what runs. A contract test holds every page to its word: each microbatch goes forward once and backward once, in that
order, on every stage, and no more are in flight than declared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from asa.ir.codec import noun
from asa.ir.plan import ScheduleName


@noun
class Action:
    """A microbatch (from 0) goes forward, or backward, through a stage."""

    direction: Literal["forward", "backward"]
    microbatch: int


class Schedule(ABC):
    """Stages count from 0, the one that reads the data; ``stages`` is their number."""

    identifier: ClassVar[ScheduleName]

    @abstractmethod
    def refusal(self, stages: int, num_microbatches: int) -> str:
        """Why so many stages cannot run so many microbatches this way; empty when they can."""

    @abstractmethod
    def order(self, stage: int, stages: int, num_microbatches: int) -> tuple[Action, ...]:
        """All of a step, as this stage does it."""

    @abstractmethod
    def in_flight(self, stage: int, stages: int, num_microbatches: int) -> int:
        """The most microbatches whose activations the stage holds at once."""
