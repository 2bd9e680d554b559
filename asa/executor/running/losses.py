"""A rank that is lost: the run starts again from its newest checkpoint, and goes on without it where that fails, too.

Samples are counted from the checkpoint on, and the global batch stays: whatever ranks there are, every sample of an
epoch comes exactly once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from asa.errors import AsaError, WorkersFailedError
from asa.executor.running.member import Job
from asa.executor.running.outdir import CHECKPOINTS
from asa.executor.running.prepare import write_plan
from asa.executor.training import checkpoint, snapshots
from asa.executor.training.logs import Event, RunLog
from asa.ir.codec import fingerprint
from asa.ir.plan import Plan
from asa.launch import launched
from asa.launch.devices import leave_device_out

Regroup = Callable[[Plan, int], Plan]
"""Another plan for a run under a plan: the plan, and how many ranks it may have at most."""


_LATELY = 5
"""Losses that say how often ranks are lost."""
MOST_STARTS = 20
"""In a row, of all ranks, without a new checkpoint."""


@dataclass
class Losses:
    """What has been done about ranks lost so far. Without a ``regroup`` a loss is the end.

    The first loss is answered by starting all ranks again. One more of the same rank in the same step is
    that of a rank that will not come back, and is answered by a plan without it; a rank that raises an error twice
    would do so under any plan, and ends the run. Ranks that are lost by chance, now one and now another, or elsewhere
    each time, are started again :data:`MOST_STARTS` times before anything new is saved. The more often ranks are lost,
    the more often the run saves.
    """

    regroup: Regroup | None
    _ran_s: list[float] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _saved: int = -1
    _step: int | None = None
    _rank: int | None = None
    _starts: int = 0

    def answered(self, job: Job, plan: Plan, failure: WorkersFailedError, log: RunLog) -> Job:
        """The job to go on with after ``failure`` under ``plan``.

        Raises:
            WorkersFailedError: ``failure``, where nothing is left to be tried.
        """
        if self.regroup is None or not (failure.lost or failure.raised):
            raise failure
        self._ran_s.append(time.monotonic() - self._began)
        self._began = time.monotonic()
        job = replace(job, between_losses_s=fmean(self._ran_s[-_LATELY:]))
        manifest = checkpoint.newest_manifest(Path(job.settings.out) / CHECKPOINTS)
        kept = snapshots.newest(job.snapshots, fingerprint(plan))
        saved = max(kept, -1 if manifest is None else manifest.step) if kept or manifest is not None else -1
        same = (failure.step, failure.rank) == (self._step, self._rank)
        chance = failure.step != self._step or (failure.rank != self._rank and not failure.raised)
        if not self._starts or (saved > self._saved and not same):
            chance, self._starts = True, 0
        self._saved, self._step, self._rank = saved, failure.step, failure.rank
        if chance and self._starts < MOST_STARTS:
            self._starts += 1
            log({"event": "note", "message": f"{failure}; all {plan.num_processes} ranks are started again"})
            if len(job.snapshots) != plan.num_processes:
                job = forgotten(job)
            return replace(job, plan=plan, snapshots=job.snapshots or _files(job, plan))
        if failure.raised or plan.num_ranks == 1 or failure.rank is None:
            raise failure
        try:
            fewer = self.regroup(plan, plan.num_ranks - 1)
        except AsaError as error:
            log({"event": "note", "message": f"no plan for the {plan.num_ranks - 1} ranks left: {error}"})
            raise failure from error
        if job.device_type == "cuda":
            leave_device_out(failure.rank)
        self._starts = 0
        log(regrouped(plan, fewer, str(failure), failure.rank))
        write_plan(fewer, Path(job.settings.out))
        return replace(forgotten(job), plan=fewer, snapshots=_files(job, fewer))


def _files(job: Job, plan: Plan) -> tuple[int, ...]:
    """Where ranks that are started again keep what they have; not where they wait for nobody, or leave the host."""
    apart = plan.consistency is not None or job.emulated is not None or job.device_type != "cpu" or launched()
    return () if apart else snapshots.files(plan.num_processes)


def forgotten(job: Job) -> Job:
    """``job`` without what its ranks have kept."""
    for file in job.snapshots:
        os.close(file)
    return replace(job, snapshots=())


def regrouped(old: Plan, new: Plan, why: str, rank: int | None = None) -> Event:
    """The event that tells of a plan for the ranks that are there. ``rank``: which was lost."""
    return {
        "event": "replan",
        "kind": "lost",
        "why": why,
        "rank": rank,
        "old": fingerprint(old),
        "new": fingerprint(new),
        "predicted_gain": None,
        "strategy": new.strategy,
        "ranks": new.num_ranks,
        "ranks_before": old.num_ranks,
    }
