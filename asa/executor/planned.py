"""What every executor that trains under a plan shares: the plan in force, and how ranks agree on another."""

from __future__ import annotations

from asa.errors import UsageError
from asa.executor.parallel import ParallelModel
from asa.executor.votes import Votes
from asa.executor.worker import Worker
from asa.interfaces.executor import Executor, Placement
from asa.ir import codec
from asa.ir.plan import Plan
from asa.launch import faults


class PlannedExecutor(Executor):
    """Trains a :class:`Worker` under one plan at a time. Every rank holds one, and every call is collective."""

    _votes: Votes
    _worker: Worker

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._worker.model.plan

    @property
    def leads(self) -> bool:
        """Rank 0."""
        return self._votes.rank == 0

    @property
    def model(self) -> ParallelModel:
        """This rank's part of the model."""
        return self._worker.model

    def agree(self, target: Placement | None) -> Placement | None:
        """Rank 0's target (or None) on every rank."""
        faults.reached("replan.agree")
        text = self._votes.tell(None if target is None else codec.dumps(target))
        return None if text is None else codec.loads(Placement, text, source="the plan from rank 0")

    def _continues(self, plan: Plan, processes: tuple[int, ...] | None = None) -> None:
        """Whether this run can go on under ``plan`` on ``processes``.

        Raises:
            UsageError: it is for another model, batch or number of ranks, or on other processes.
        """
        if processes is not None and processes != self.processes:
            raise UsageError(f"cannot continue on processes {processes}: this run has {self.processes}")
        for what in ("num_ranks", "global_batch", "model_fingerprint", "precision"):
            new, old = getattr(plan, what), getattr(self.plan, what)
            if new != old:
                raise UsageError(f"cannot continue under a plan with {what} {new}: this run has {old}")
