"""What the adaptive loop needs of whatever runs the training; the real one and a test's fake both fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from asa.ir.codec import noun
from asa.ir.measurements import Measurements, Transfer
from asa.ir.plan import Plan


@noun
class Placement:
    """A plan and who runs it: process ``processes[i]`` of the run is rank ``i`` of the plan.

    Processes that are not named hold no state and compute nothing; they take part in votes, ``agree`` and ``save``.
    """

    plan: Plan
    processes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(set(self.processes)) != self.plan.num_ranks or len(self.processes) != self.plan.num_ranks:
            raise ValueError(f"a plan for {self.plan.num_ranks} ranks is placed on processes {self.processes}")


@noun
class EpochOutcome:
    """One epoch as the executor saw it. ``measurements``: of the steps since the plan in force took effect."""

    step: int
    seconds: float
    train_loss: float
    validation_loss: float
    validation_accuracy: float
    learning_rate: float
    measurements: Measurements


@noun
class Probe:
    """A small test of all processes at the same time, working and idle ones.

    ``compute_s``: by process, seconds for the same fixed piece of computing; only ratios between processes have a
    meaning. ``links``: of collectives among all of them, or those of one host, one or more for every level of links.
    """

    compute_s: tuple[float, ...] = ()
    links: tuple[Transfer, ...] = ()


Look = Callable[[Measurements, int], None]
"""Called on every process with the same figures, between two steps: what was measured since the last call under the
plan in force, and the steps since the start of the run. It may call ``agree``, ``probe`` and ``migrate``."""


class Executor(ABC):
    """Trains under one plan at a time. Every process holds one; calls are collective."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """The plan in force."""

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
        """Steps of a whole epoch; None where that is not known before its end."""
        return None

    @property
    def rebuild_s(self) -> float | None:
        """Seconds that it took to build the first plan's part of the model; None where nobody timed it."""
        return None

    @property
    def leads(self) -> bool:
        """Whether this process decides for all: the one that solves again."""
        return True

    @abstractmethod
    def run_epoch(self, epoch: int, look: Look | None = None) -> EpochOutcome:
        """Train one epoch, validate, and say what it took. An executor that can stop between two steps calls ``look``
        about once a line of its log, and goes on under whatever plan is in force afterwards."""

    @abstractmethod
    def save(self, epoch: int) -> None:
        """Commit a checkpoint from which ``epoch + 1`` can start."""

    @abstractmethod
    def migrate(self, plan: Plan, processes: tuple[int, ...] | None = None) -> None:
        """Continue under another plan, on ``processes`` (None: the first ones, in order): same weights, same optimizer
        state, same sample order."""

    @abstractmethod
    def agree(self, target: Placement | None) -> Placement | None:
        """The leading process's target (or None) on every process."""

    def probe(self) -> Probe:
        """What all processes, idle ones included, can do right now; an empty one where this executor cannot tell."""
        return Probe()
