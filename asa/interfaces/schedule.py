"""A pipeline schedule is one page: the order in which a stage takes its microbatches, and what stays in flight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from asa.ir.codec import noun
from asa.ir.plan import ScheduleName


@noun
class Turn:
    """One unit of a stage's work: forward or backward of one microbatch, both counting from 0."""

    phase: Literal["forward", "backward"]
    microbatch: int


class Schedule(ABC):
    """Turn-taking between ``stages`` stages over ``microbatches`` microbatches."""

    identifier: ClassVar[ScheduleName]

    @abstractmethod
    def turns(self, stage: int, stages: int, microbatches: int) -> tuple[Turn, ...]:
        """What ``stage`` does, in order."""

    @abstractmethod
    def in_flight(self, stage: int, stages: int, microbatches: int) -> int:
        """The most microbatches whose activations ``stage`` holds at once."""
