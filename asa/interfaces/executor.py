"""The interface between the scheduler's adaptive loop and the executor that trains; tests implement it with a fake."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from asa.ir.codec import noun
from asa.ir.measurements import Measurements, Transfer
from asa.ir.plan import Plan


@noun
class Placement:
    """A plan and the processes that run it: process ``processes[i]`` of the run is rank ``i`` of the plan.

    Processes that are not listed are idle: no state, no computation. They take part in votes, ``agree`` and ``save``.
    """

    plan: Plan
    processes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(set(self.processes)) != self.plan.num_ranks or len(self.processes) != self.plan.num_ranks:
            raise ValueError(f"a plan for {self.plan.num_ranks} ranks is placed on processes {self.processes}")


@noun
class EpochOutcome:
    """Results of one epoch. ``measurements`` covers the steps since the current plan took effect."""

    step: int
    seconds: float
    train_loss: float
    validation_loss: float
    validation_accuracy: float
    learning_rate: float
    measurements: Measurements


@noun
class Probe:
    """Results of a short test that all processes, idle ones included, run at the same time.

    ``compute_s``: seconds of the same fixed computation on each process; only ratios between processes are meaningful.
    ``links``: timed collectives among all processes, or those of one host. ``took_s``: seconds of the test itself, the
    same on all processes.
    """

    compute_s: tuple[float, ...] = ()
    links: tuple[Transfer, ...] = ()
    took_s: float = 0.0


Look = Callable[[Measurements, int], None]
"""Callback between two steps, called on every process with the same arguments: the measurements under the current plan
since the last call, and the steps since the start of the run. It may call ``agree``, ``probe`` and ``migrate``."""


class Executor(ABC):
    """Trains under one plan at a time. Every process has its own instance; all calls are collective."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """The current plan."""

    @property
    def processes(self) -> tuple[int, ...]:
        """The process that runs each rank of the plan."""
        return tuple(range(self.plan.num_ranks))

    @property
    def num_processes(self) -> int:
        """Processes of the run, idle ones included."""
        return max(self.processes) + 1

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of a whole epoch; None if that is not known before the epoch ends."""
        return None

    def steps_left(self, epoch: int) -> int | None:
        """Steps of ``epoch`` that are still to be taken; None if that is not known before it ends."""
        return None

    @property
    def rebuild_s(self) -> float | None:
        """Seconds that building this process's part of the model again takes, by the first plan; None if not timed."""
        return None

    @property
    def state_s(self) -> float | None:
        """Seconds in which the last change of plan moved state between processes; None if not timed."""
        return None

    def clock(self) -> float:
        """Seconds on the clock by which changes of plan are timed."""
        return time.monotonic()

    @property
    def leads(self) -> bool:
        """Whether this is the leading process, which runs the planner and decides for all."""
        return True

    @abstractmethod
    def run_epoch(self, epoch: int, look: Look | None = None) -> EpochOutcome:
        """Train one epoch, validate, and return the results. An executor that can stop between two steps calls ``look``
        about once per log line, and continues under the plan that is current afterwards."""

    @abstractmethod
    def save(self, epoch: int) -> None:
        """Commit a checkpoint from which ``epoch + 1`` can start."""

    @abstractmethod
    def migrate(self, plan: Plan, processes: tuple[int, ...] | None = None) -> None:
        """Continue under another plan on ``processes`` (None: the first ones, in order), with the same weights,
        optimizer state and sample order."""

    @abstractmethod
    def agree(self, target: Placement | None) -> Placement | None:
        """Return the leading process's target (or None) on every process."""

    def tell(self, value: bool) -> bool:
        """Return the leading process's ``value`` on every process (collective)."""
        return value

    def probe(self, *, compute: bool = True) -> Probe:
        """Measure the speed of all processes, idle ones included, unless ``compute`` is False, and of the links between
        them (collective); empty if this executor cannot."""
        return Probe()
