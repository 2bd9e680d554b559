"""What the adaptive loop needs of whatever runs the training; the real one and a test's fake both fit."""

from __future__ import annotations

from abc import ABC, abstractmethod

from asa.ir.codec import noun
from asa.ir.measurements import Measurements
from asa.ir.plan import Plan


@noun
class EpochOutcome:
    """One epoch as the executor saw it."""

    step: int
    seconds: float
    train_loss: float
    validation_loss: float
    validation_accuracy: float
    learning_rate: float
    measurements: Measurements


class Executor(ABC):
    """Trains under one plan at a time. Every rank holds one; calls are collective."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """The plan in force."""

    @property
    def leads(self) -> bool:
        """Whether this rank decides for all: the one that solves again."""
        return True

    @abstractmethod
    def run_epoch(self, epoch: int) -> EpochOutcome:
        """Train one epoch, validate, and say what it took."""

    @abstractmethod
    def save(self, epoch: int) -> None:
        """Commit a checkpoint from which ``epoch + 1`` can start."""

    @abstractmethod
    def migrate(self, plan: Plan) -> None:
        """Continue under another plan: same weights, same optimizer state, same sample order."""

    @abstractmethod
    def agree(self, plan: Plan | None) -> Plan | None:
        """Rank 0's plan (or None) on every rank."""
