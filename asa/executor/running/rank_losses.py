"""Recovery from a lost rank: the run restarts from its newest checkpoint, and continues without the rank if it fails
again.

Samples are counted from the checkpoint on, and the global batch stays. So every sample of an epoch is used exactly
once, whatever the number of ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from asa.errors import AsaError, WorkersFailedError
from asa.executor.running import stored_settings
from asa.executor.running.member import Job
from asa.executor.running.outdir import CHECKPOINTS
from asa.executor.training import checkpoint, snapshots
from asa.executor.training.logs import Event, RunLog
from asa.ir.codec import fingerprint
from asa.ir.plan import Plan
from asa.launch import launched
from asa.launch.devices import leave_device_out

Regroup = Callable[[Plan, int], Plan]
"""Function from a plan and a largest number of ranks to another plan."""


_LATELY = 5
"""Number of recent losses from which the mean time between losses is computed."""
MOST_STARTS = 20
"""Largest number of successive restarts of all ranks without a new checkpoint."""


@dataclass
class RankLosses:
    """Record of lost ranks, which determines what is done about the next loss. Without ``regroup``, any loss ends the
    run.

    - After a first loss, all ranks are restarted.
    - If the same rank is lost again in the same step, it will not come back, and the run continues under a plan without
      it. If it was killed and something newer was saved in between, this may be chance, so it is tried once more.
    - A rank that raises an error twice would do so under any plan, so it ends the run.
    - If losses differ in rank or step, all ranks are restarted up to :data:`MOST_STARTS` times before anything new is
      saved.

    The more often ranks are lost, the more often the run saves.
    """

    regroup: Regroup | None
    _ran_s: list[float] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _saved: int = -1
    _step: int | None = None
    _rank: int | None = None
    _starts: int = 0
    _repeated: bool = False

    def lost(self, job: Job) -> Job:
        """``job`` with the mean time between losses, of which one has just happened."""
        self._ran_s.append(time.monotonic() - self._began)
        self._began = time.monotonic()
        return replace(job, between_losses_s=fmean(self._ran_s[-_LATELY:]))

    def next_job(self, job: Job, plan: Plan, failure: WorkersFailedError, log: RunLog) -> Job:
        """The job to continue with after ``failure`` under ``plan``.

        Raises:
            WorkersFailedError: ``failure``, if nothing is left to try.
        """
        if self.regroup is None or not (failure.lost or failure.raised):
            raise failure
        job = self.lost(job)
        saved = checkpoint.newest_step(Path(job.settings.out) / CHECKPOINTS)
        snapshot = snapshots.newest(job.snapshots, fingerprint(plan))
        saved = max(snapshot, saved) if snapshot else saved
        same = (failure.step, failure.rank) == (self._step, self._rank)
        chance = failure.step != self._step or (failure.rank != self._rank and not failure.raised)
        if same and not self._repeated and failure.signal is not None and 0 <= self._saved < saved:
            chance = True
        self._repeated = same
        if not self._starts or (saved > self._saved and not same):
            chance, self._starts = True, 0
        self._saved, self._step, self._rank = saved, failure.step, failure.rank
        if chance and self._starts < MOST_STARTS:
            self._starts += 1
            log({"event": "note", "message": f"{failure}; all {plan.num_processes} ranks are started again"})
            if len(job.snapshots) != plan.num_processes:
                job = without_snapshots(job)
            return replace(job, plan=plan, snapshots=job.snapshots or _files(job, plan))
        if failure.raised or plan.num_ranks == 1 or failure.rank is None:
            raise failure
        try:
            fewer = self.regroup(plan, plan.num_ranks - 1)
        except AsaError as error:
            log({"event": "note", "message": f"no plan without rank {failure.rank}: {error}"})
            raise failure from error
        if job.device_type == "cuda":
            leave_device_out(failure.rank)
        self._starts = 0
        log(regroup_event(plan, fewer, str(failure), failure.rank))
        stored_settings.keep(fewer, Path(job.settings.out) / "plan.json")
        return replace(without_snapshots(job), plan=fewer, snapshots=_files(job, fewer))


def _files(job: Job, plan: Plan) -> tuple[int, ...]:
    """Files for the ranks' snapshots. None if workers run independently, on emulated devices or on CUDA, or under a
    launcher."""
    unsupported = plan.consistency is not None or job.emulated is not None or job.device_type != "cpu" or launched()
    return () if unsupported else snapshots.files(plan.num_processes)


def without_snapshots(job: Job) -> Job:
    """``job`` without snapshots; closes their files."""
    for file in job.snapshots:
        os.close(file)
    return replace(job, snapshots=())


def change_event(kind: str, old: Plan, new: Plan, why: str, **more: object) -> Event:
    """Event for a change of plan between two starts of the ranks, with the fields ``more``."""
    return {
        "event": "replan", "kind": kind, "why": why, "old": fingerprint(old), "new": fingerprint(new),
        "predicted_gain": None, "strategy": new.strategy, "ranks": new.num_ranks, **more,
    }  # fmt: skip


def regroup_event(old: Plan, new: Plan, why: str, rank: int | None = None) -> Event:
    """Event for a change to a plan for the ranks that are available. ``rank`` is the one that was lost."""
    return change_event("lost", old, new, why, rank=rank, ranks_before=old.num_ranks)
