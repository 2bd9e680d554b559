"""Common part of all executors that train under a plan: the current plan, and how ranks agree on another."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable

from asa.errors import UsageError, WorkersFailedError
from asa.executor.consistency.star import StarVotes
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.votes import Votes
from asa.executor.training.checkpointer import Checkpointer
from asa.executor.training.logs import Announce
from asa.executor.training.precision import LossScale
from asa.executor.training.probe import measure_idle, probe
from asa.executor.training.settings import TrainSettings
from asa.executor.training.worker import Worker
from asa.interfaces.executor import Executor, Placement, Probe
from asa.ir import codec
from asa.ir.plan import Plan
from asa.launch import faults, give_back_freed_memory
from asa.sharding.collectives.waits import waits

Build = Callable[[Plan, tuple[int, ...]], ParallelModel]
"""Function that builds a plan's part of the model on this process, with the run's initial weights. Its arguments are
the plan and the processes that run its ranks. Collective."""

_LEAST_WINDOW_S = 0.5
"""Shortest time between two votes in which an idle process measures its speed; others then need not wait for it."""


class PlannedExecutor(Executor):
    """Trains a :class:`Worker` under one plan at a time. Every rank has one, and every method is collective."""

    _votes: Votes
    _worker: Worker
    _build: Build
    _settings: TrainSettings
    _announce: Announce
    _checkpointer: Checkpointer
    _step = _warm = 0
    _rebuild_s: float | None = None
    _state_s: float | None = None
    _has_moved = False
    _agreed_at = 0.0
    _idle_s: float | None = None

    @abstractmethod
    def _worker_of(self, model: ParallelModel, scale: LossScale) -> Worker:
        """This rank's part of training ``model``."""

    def _start(self, plan: Plan) -> None:
        """Build the worker of the first plan (collective)."""
        waits.start(on=self._settings.observe)
        began = time.perf_counter()
        self._worker = self._worker_of(self._build(plan, tuple(range(plan.num_ranks))), LossScale(plan.precision))
        again_s = self.model.from_template_s
        self._rebuild_s = time.perf_counter() - began if again_s is None else again_s

    @property
    def step(self) -> int:
        """Optimizer steps since the start of the run."""
        return self._step

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

    def _move_to(self, plan: Plan, runs: tuple[int, ...]) -> None:
        """Continue under ``plan`` on the processes ``runs``. All processes move, or none does.

        Raises:
            WorkersFailedError: a rank could not move; the current plan stays.
        """
        old_worker, scale = self._worker, self._worker.scale
        self._worker, moved = self._checkpointer.move(
            old_worker, lambda: self._worker_of(self._build(plan, runs), scale)
        )
        self._warm, self._state_s = 0, moved.seconds
        old_worker.model.close()
        del old_worker
        give_back_freed_memory()

    def _tell_of_lost(self, then: str) -> list[str]:
        """Announce, on rank 0, which ranks were lost and which have come back since the last call. ``then`` is what
        the others do without a lost one. Returns what was said of lost ones."""
        coordinator = self._votes.coordinator if isinstance(self._votes, StarVotes) else None
        if coordinator is None:
            return []
        lost = [(rank, f"rank {rank} {how}; {then}") for rank, how in coordinator.lost_since()]
        for rank, message in lost:
            self._announce({"event": "lost", "rank": rank, "message": message})
        for rank in coordinator.returned_since():
            assert self._worker.conduct is not None
            self._announce({"event": "returned", "rank": rank, "message": self._worker.conduct.returned(rank)})
        return [message for _, message in lost]

    def probe(self, *, compute: bool = True) -> Probe:
        """Current speed of all processes, including idle ones (collective): seconds of a small computation (if
        ``compute``), and of a collective among them. All compute at once, except for idle processes that did since the
        last vote."""
        return probe(self._votes, self.model.device, self._idle_s, compute=compute)
