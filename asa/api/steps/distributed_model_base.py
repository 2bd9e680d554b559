"""The part of a distributed model's interface that code for its losses and attributes uses."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn

from asa.api.rank_context import RankContext
from asa.api.steps.batches import Share
from asa.api.steps.in_step import InStep
from asa.api.steps.watch import StepWatch
from asa.executor.model.parallel import ParallelModel
from asa.ir.plan import Plan


class DistributedModelBase(nn.Module):
    """One rank's part of a model, and how much this rank's samples count. ``origin`` is the original model, whose
    weights may have been moved; ``plan`` is the plan it runs under."""

    parallel: ParallelModel | None
    plan: Plan | None
    rank_context: RankContext
    origin: nn.Module
    share: Share | None
    """The batch that the loader yielded last."""
    mean_weight: float
    mean_rows: int
    """Weight of this rank's mean loss, and its number of samples, in the last call in training."""
    output_factor: float
    """Weight of the outputs in the last call."""
    least: list[int]
    """The fewest samples that a rank is to have of a batch; with fewer, every rank computes the whole batch."""
    watch: StepWatch | None
    """Observer of step times; None if there is none."""
    in_step: InStep | None
    """Exchange between ranks after every batch; None for a single rank."""
    learned: bool
    """Whether the call made last with gradients was of a batch whose mean is weighed."""
    beside: bool
    """Whether the call made last was an evaluation of other samples than the loader's."""
    warned_of_other_batches: bool
    """Whether the user was told that gradients come of other samples than the loader's."""

    @abstractmethod
    def call(self, method: str | None, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Result of a method (None: ``forward``) of a model that runs whole, for this rank's samples."""

    @abstractmethod
    def as_output(self, value: Tensor) -> Tensor:
        """A tensor that the last call left in an attribute of the model, treated as one of its outputs."""

    @abstractmethod
    def run_whole(self, why: str) -> None:
        """Continue as one component that is called like the model (collective).

        Raises:
            UsageError: that is impossible.
        """

    @property
    def full(self) -> bool:
        """Whether the batch that the loader yielded last has the plan's number of samples."""
        return self.share is not None and self.plan is not None and self.share.total == self.plan.global_batch

    def weight_now(self) -> float:
        """Weight of this rank's mean over the batch that the loader yielded last; the average over ranks is 1."""
        share, ranks, rank = self.share, self.rank_context.ranks, self.rank_context.rank
        if share is None:
            return self.mean_weight
        if ranks > 1 and len(share.rows) == share.total:  # every rank has all of it
            return float(ranks) if rank == 0 else 0.0
        if share.total < ranks:
            return ranks / share.total if rank < share.total else 0.0
        return len(share.rows) * ranks / share.total
