"""Recovery from a shortage of memory: all ranks stop, another plan is made, and the run continues from a checkpoint.

A rank that fails in a step leaves the others inside collectives, from which there is no safe way back: half of a step
may be done, and a communicator that has lost a member cannot be used. So the launcher ends all ranks, which takes no
longer than a collective, and starts them again under the new plan (docs/decisions/0015-out-of-memory.md). Samples are
counted from the checkpoint on, so none is lost and none is used twice.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from asa.errors import (
    AsaError,
    ExhaustedError,
    InfeasibleError,
    InvalidInputError,
    NoCheckpointError,
    PreemptedError,
    WorkersFailedError,
)
from asa.executor.running import stored_settings
from asa.executor.running.exhausted import NOTE
from asa.executor.running.member import Ending, Job
from asa.executor.running.outdir import CHECKPOINTS
from asa.executor.running.prepare import Material
from asa.executor.running.rank_losses import RankLosses, Regroup, change_event, regroup_event, without_snapshots
from asa.executor.training import checkpoint
from asa.executor.training.logs import Event, RunLog
from asa.executor.training.snapshots import newest
from asa.instruments.memory_limits import free_on_host, kernel_kills
from asa.ir import codec
from asa.ir.codec import fingerprint
from asa.ir.plan import Plan
from asa.ir.shortage import Shortage
from asa.ir.units import binary
from asa.launch import cuda_devices, launched, signals
from asa.launch.torchrun import RESTARTS

Relieve = Callable[[Shortage, int, int], Plan]
"""Function that makes another plan after a shortage. Its arguments are the shortage, the number of the attempt (from 1)
and the largest number of ranks."""
T = TypeVar("T")
Start = Callable[[Job, Material], Ending]

MOST_ATTEMPTS = 3
"""Largest number of successive plans under which no further epoch was completed, or nothing was saved."""
_MOST_RETURNS = 3
"""Largest number of times that a run returns to a plan for which its host once had too little memory."""
_MORE = 1.1
"""Free memory of the host with which a run returns to that plan, as a multiple of what was free when it failed."""


def _stopped(failure: WorkersFailedError | None, saved: int) -> AsaError:
    """The error that ends a run which was asked to stop, and lost a rank or ran short of memory before it stopped."""
    if failure is not None and saved < 0:
        return failure
    lost = "" if failure is None else f", but {failure}"
    return PreemptedError(
        f"stopped on request{lost}: the newest checkpoint is of step {saved}; --resume continues from it"
    )


def run_with_recovery(
    job: Job, material: Material, log: RunLog, relieve: Relieve | None, regroup: Regroup | None, start: Start
) -> Ending:  # fmt: skip
    """Run ``start``, and run it again after each shortage of memory and each loss of a rank from which recovery is
    possible. If the memory of the host ran short and is there again, the run returns to its earlier plan.

    Raises:
        InfeasibleError: no plan fits the available memory.
        PreemptedError: the run was asked to stop while ranks were lost or started again, and there is a checkpoint.
        AsaError: what ``start`` raised.
    """
    job = replace(job, watchful=relieve is not None)
    attempt, losses, folder = 0, RankLosses(regroup), Path(job.settings.out) / CHECKPOINTS
    short = _ShortOfMemory()
    failure: WorkersFailedError | None = None
    while True:
        if signals.missed:
            signals.missed = False
            raise _stopped(failure, checkpoint.newest_step(folder))
        kills, epochs, saved = kernel_kills(), len(log.epochs), checkpoint.newest_step(folder)
        failure = None
        try:
            ending = start(job, material)
            if ending.enough:
                job, attempt = short.over(without_snapshots(job), log), 0
                material = _newest(material, log, job)
                continue
            shortage = ending.tight
            if shortage is None:
                without_snapshots(job)
                return ending
        except WorkersFailedError as error:
            if error.stopping:
                raise _stopped(error, checkpoint.newest_step(folder)) from error
            shortage, failure = _shortage(error, job, log, kernel_kills() > kills), error
            if shortage is None:
                job = losses.next_job(job, _plan_for_all(job, log), error, log)
                log.changed = False
                material = _newest(material, log, job, newest(job.snapshots, fingerprint(job.plan)))
                continue
        progress = len(log.epochs) > epochs and checkpoint.newest_step(folder) > saved
        attempt = 1 if progress else attempt + 1
        if failure is not None:
            job = losses.lost(job)
        if shortage is None or relieve is None or attempt > MOST_ATTEMPTS:
            assert failure is not None
            raise failure
        job = _replan(without_snapshots(job), shortage, failure, attempt, log, relieve)
        job = replace(job, awaited_bytes=short.began(shortage.plan, job.plan))
        material = _newest(material, log, job)


class _ShortOfMemory:
    """The plan for which the memory of the host does not suffice at present, and what was free when it failed."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._free_bytes = self._returns = 0

    def began(self, failed: Plan, plan: Plan) -> float | None:
        """Remember ``failed``, unless a plan is waiting already; all ranks have ended. Returns the free memory with
        which the run returns to it from ``plan``, None for never."""
        free = free_on_host()
        if free is None or failed.device_type != "cpu" or plan == failed or self._returns >= _MOST_RETURNS:
            return None
        if self._plan is None:
            self._plan, self._free_bytes = failed, free
        return _MORE * self._free_bytes

    def over(self, job: Job, log: RunLog) -> Job:
        """The job under the plan that was waiting."""
        assert self._plan is not None
        old, plan, self._plan = job.plan, self._plan, None
        self._returns += 1
        free = f"{binary(free_on_host() or 0)} of memory are free"
        log(change_event("enough", old, plan, f"{free}, {binary(self._free_bytes)} when that plan ran short"))
        record_plan(Path(job.settings.out), plan)
        return replace(job, plan=plan, watchful=True, awaited_bytes=None)


def _shortage(error: WorkersFailedError, job: Job, log: RunLog, kernel: bool) -> Shortage | None:
    """The shortage of memory behind ``error``; None if it has another cause. ``kernel`` says that the kernel has just
    killed a process for lack of memory."""
    if isinstance(error, ExhaustedError):
        return error.shortage if isinstance(error.shortage, Shortage) else None
    if error.signal != signal.SIGKILL or not kernel or error.rank is None:
        return None
    return Shortage(
        plan=_current_plan(job, log), rank=error.rank, step=0, cause="killed", used_bytes=None, asked_bytes=0,
        room_bytes=None, free_bytes=free_on_host() if job.device_type == "cpu" else None,
    )  # fmt: skip


def _current_plan(job: Job, log: RunLog) -> Plan:
    """The plan of a killed rank: that of the newest checkpoint if the plan has changed since the start."""
    if log.changed:
        try:
            return checkpoint.find(Path(job.settings.out) / CHECKPOINTS).manifest.plan
        except NoCheckpointError:
            pass
    return job.plan


def _plan_for_all(job: Job, log: RunLog) -> Plan:
    """The plan with which all processes start again: the current one, unless that leaves some of them out. Which ones
    were slow is not stored, and they may have recovered."""
    current = _current_plan(job, log)
    return current if current.num_processes == job.plan.num_processes else job.plan


def _replan(
    job: Job, shortage: Shortage, failure: WorkersFailedError | None, attempt: int, log: RunLog, relieve: Relieve
) -> Job:
    """The job under another plan. If memory was only nearly full and no other plan is better, the same job, whose ranks
    do not compare their memory any more.

    Raises:
        InfeasibleError: no plan fits any more.
        WorkersFailedError: ``failure``, if no plan could be made.
    """
    try:
        plan = relieve(shortage, attempt, most_ranks(job))
    except AsaError as error:
        if failure is None:
            log({"event": "note", "message": f"the plan stays: {error}"})
            return replace(job, plan=shortage.plan, watchful=False)
        if isinstance(error, InfeasibleError):
            raise InfeasibleError(f"{shortage_line(shortage)}; no other plan fits: {error}") from failure
        log({"event": "note", "message": f"no other plan: {error}"})
        raise failure from error
    log(shortage_event(shortage, plan, attempt))
    record_plan(Path(job.settings.out), plan)
    return replace(job, plan=plan, watchful=attempt < MOST_ATTEMPTS)


def most_ranks(job: Job) -> int:
    """Largest number of ranks for which a new plan can be made on the devices of this machine."""
    gpus = max(job.plan.gpus, job.plan.num_processes)
    return max(job.plan.num_processes, min(gpus, cuda_devices())) if job.device_type == "cuda" else gpus


@dataclass(frozen=True, kw_only=True)
class Pending:
    """The plan under which a restarted run continues. ``event`` is the change of plan, if it is due to a shortage or a
    loss."""

    plan: Plan
    event: Event | None = None


def pending(job: Job, relieve: Relieve | None) -> Pending | None:
    """The plan for a resumed run, or for one that torchrun has restarted by the same command; None otherwise.

    Under torchrun no process outlives the ranks. The rank that ran out of memory has written a note to the run's
    folder.

    Raises:
        InfeasibleError: no plan fits the available memory.
    """
    out = Path(job.settings.out)
    attempt = int(os.environ.get(RESTARTS, "0")) if launched() else 0
    if not attempt and not job.settings.resume:
        return None
    recorded = _load_or_none(Plan, out / "plan.json")
    same_model = recorded is not None and recorded.model_fingerprint == job.plan.model_fingerprint
    plan = recorded if attempt and same_model and recorded is not None else job.plan
    shortage = None if relieve is None else _load_or_none(Shortage, out / NOTE)
    of_this = shortage is not None and (plan in (shortage.plan, recorded))
    if relieve is None or shortage is None or not of_this:
        return None if plan is job.plan else Pending(plan=plan)
    gpus = int(os.environ["WORLD_SIZE"]) if attempt else most_ranks(job)
    try:
        answer = relieve(shortage, max(1, attempt), gpus)
    except InfeasibleError as error:
        raise InfeasibleError(f"{shortage_line(shortage)}; no other plan fits: {error}") from None
    return Pending(plan=answer, event=shortage_event(shortage, answer, max(1, attempt)))


def plan_for_ranks(restart: Pending | None, job: Job, ranks: int, regroup: Regroup | None) -> Pending | None:
    """``restart``, unless the run continues with a number of ``ranks`` that differs from its plan's. Then a plan for
    that number: the one given with the job, if it fits."""
    old = job.plan if restart is None else restart.plan
    restarted = job.settings.resume or os.environ.get(RESTARTS, "0") != "0"
    short_of_memory = restart is not None and restart.event is not None and old.num_processes < ranks
    if regroup is None or not restarted or old.num_processes == ranks or old.consistency is not None or short_of_memory:
        return restart
    try:
        new = job.plan if job.plan.num_processes == ranks else regroup(job.plan, ranks)
    except InvalidInputError:  # the plan's files are gone; the later check of the number of ranks says what to do
        return restart
    return Pending(plan=new, event=regroup_event(old, new, f"{ranks} ranks are here now"))


def _load_or_none(kind: type[T], path: Path) -> T | None:
    """The record at ``path``; None if it is missing or unreadable."""
    try:
        return codec.load(kind, path) if path.is_file() else None
    except InvalidInputError:
        return None


def record_plan(out: Path, plan: Plan) -> None:
    """Record that the run continues under ``plan``, and remove the note of the shortage."""
    stored_settings.keep(plan, out / "plan.json")
    (out / NOTE).unlink(missing_ok=True)


def shortage_line(shortage: Shortage) -> str:
    """Description of a shortage in one line."""
    used = "" if shortage.used_bytes is None else f", {binary(shortage.used_bytes)} were in use"
    more = f" and {binary(shortage.asked_bytes)} asked for" if shortage.asked_bytes else ""
    room = "" if shortage.room_bytes is None else f", of {binary(shortage.room_bytes)}"
    what = {
        "exhausted": f"ran out of memory in step {shortage.step}",
        "killed": "was killed by the kernel for its memory",
        "tight": f"was about to run out of memory before step {shortage.step}",
    }[shortage.cause]
    return f"rank {shortage.rank} {what}: {binary(shortage.promised_bytes)} were promised{used}{more}{room}"


def shortage_event(shortage: Shortage, plan: Plan, attempt: int) -> Event:
    """Event for a change of plan after a shortage of memory."""
    fields = {k: v for k, v in codec.to_data(shortage).items() if k != "plan"}
    return change_event(
        "memory", shortage.plan, plan, shortage_line(shortage), attempt=attempt,
        shortage=fields | {"promised_bytes": shortage.promised_bytes}, memory_bytes=plan.memory_bytes,
        memory_scale=plan.memory_scale, promised_bytes=max(plan.prediction.memory_bytes_per_rank),
    )  # fmt: skip


def _newest(material: Material, log: RunLog, job: Job, snapshot_step: int = 0) -> Material:
    """``material`` with the newest complete checkpoint, or none to start anew. ``snapshot_step`` is the step of the
    ranks' snapshots, which are used if they are newer. ``job`` goes on from there."""
    folder = Path(job.settings.out) / CHECKPOINTS
    checkpoint.sweep(folder)
    resume = None
    if any(folder.glob("step_*")):
        latest = checkpoint.find(folder)
        resume = (latest.path, latest.manifest)
        for note in latest.notes:
            log({"event": "note", "message": note})
    step, epoch = (0, 0) if resume is None else (resume[1].step, resume[1].position // len(material.train))
    log.recall(epoch)
    step = max(step, snapshot_step)
    message = f"continuing after step {step}" if step else "starting again: nothing was saved yet"
    log(
        {"event": "note", "message": message, "resumed_step": step, "plan_fingerprint": fingerprint(job.plan),
         "ranks": job.plan.num_processes}
    )  # fmt: skip
    return replace(material, resume=resume, run=secrets.token_hex(4))
