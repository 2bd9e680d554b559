"""Common part of all executors that train under a plan: the current plan, and how ranks agree on another."""

from __future__ import annotations

import time

from asa.errors import UsageError, WorkersFailedError
from asa.executor.consistency.star import StarVotes
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.votes import Votes
from asa.executor.training.probe import measure_idle, probe
from asa.executor.training.worker import Worker
from asa.interfaces.executor import Executor, Placement, Probe
from asa.ir import codec
from asa.ir.plan import Plan
from asa.launch import faults

_LEAST_WINDOW_S = 0.5
"""Shortest time between two votes in which an idle process measures its speed; others then need not wait for it."""


class PlannedExecutor(Executor):
    """Trains a :class:`Worker` under one plan at a time. Every rank has one, and every method is collective."""

    _votes: Votes
    _worker: Worker
    _rebuild_s: float | None = None
    _state_s: float | None = None
    _has_moved = False
    _agreed_at = 0.0
    _idle_s: float | None = None

    @property
    def plan(self) -> Plan:
        """The current plan."""
        return self._worker.model.whole_plan

    @property
    def processes(self) -> tuple[int, ...]:
        """The process that runs each rank of the plan."""
        return self._worker.model.all_processes

    @property
    def num_processes(self) -> int:
        """Number of processes of the run, including idle ones."""
        return self._votes.num_ranks

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self._votes.rank == 0

    @property
    def rebuild_s(self) -> float | None:
        """Seconds that building another plan's worker takes, by the first one."""
        return self._rebuild_s

    @property
    def state_s(self) -> float | None:
        """Seconds in which the last change of plan moved state between processes."""
        return self._state_s

    @property
    def model(self) -> ParallelModel:
        """This rank's part of the model."""
        return self._worker.model

    def was_left_behind(self, error: WorkersFailedError) -> bool:
        """Whether ``error`` says that the others continued without this rank, which may enter again."""
        return isinstance(self._votes, StarVotes) and error.lost and error.rank == self._votes.rank

    def close(self) -> None:
        """Close connections and the plan's process groups (collective). Groups that may have lost a member are not
        closed."""
        if isinstance(self._votes, StarVotes):
            self._votes.gather([0.0])
        if self._worker.conduct is not None:
            self._worker.conduct.close()
        if isinstance(self._votes, StarVotes):
            self._votes.close()
        else:
            self.model.close()

    def tell(self, value: bool) -> bool:
        """Rank 0's ``value``, on every rank."""
        return bool(self._votes.tell(value))

    def agree(self, target: Placement | None) -> Placement | None:
        """Rank 0's ``target`` (or None), on every rank."""
        faults.reached("replan.agree")
        text = self._votes.tell(None if target is None else codec.dumps(target))
        last, self._agreed_at = self._agreed_at, time.monotonic()
        self._idle_s = None
        if text is not None:
            self._has_moved = True
            return codec.loads(Placement, text, source="the plan from rank 0")
        if self._has_moved and self.model.idle and self._agreed_at - last > _LEAST_WINDOW_S:
            self._idle_s = measure_idle(self.model.device)
        return None

    def _continues(self, plan: Plan, processes: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The processes that can run ``plan`` from here: ``processes``, or the first ones.

        Raises:
            UsageError: the plan is for another model or batch, or for more ranks than there are processes.
        """
        for what in ("global_batch", "model_fingerprint", "precision"):
            new, old = getattr(plan, what), getattr(self.plan, what)
            if new != old:
                raise UsageError(f"cannot continue under a plan with {what} {new}: this run has {old}")
        runs = tuple(range(plan.num_ranks)) if processes is None else tuple(processes)
        available = range(self.num_processes)
        if plan.num_ranks > len(available):
            raise UsageError(f"cannot continue under a plan for {plan.num_ranks} ranks: this run has {len(available)}")
        if len(set(runs)) != plan.num_ranks or len(runs) != plan.num_ranks or not all(p in available for p in runs):
            raise UsageError(
                f"cannot continue under a plan for {plan.num_ranks} ranks on processes {list(runs)} of {len(available)}"
            )
        return runs

    def probe(self, *, compute: bool = True) -> Probe:
        """Current speed of all processes, including idle ones (collective): seconds of a small computation (if
        ``compute``), and of a collective among them. All compute at once, except for idle processes that did since the
        last vote."""
        return probe(self._votes, self.model.device, self._idle_s, compute=compute)
