"""A training run from start to end: starts the ranks or is one of them, writes the log, and reports the outcome."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asa.errors import AsaError, InvalidInputError, PreemptedError
from asa.executor.consistency.star import StarVotes
from asa.executor.measuring.emulation import EmulatedDevice
from asa.executor.model.votes import Votes
from asa.executor.running.member import Adapt, Ending, Job, work
from asa.executor.running.outdir import begin, begun_by
from asa.executor.running.prepare import Material, open_images, prepare
from asa.executor.running.rank_losses import Regroup
from asa.executor.running.recovery import (
    Pending,
    Relieve,
    pending,
    plan_for_ranks,
    record_plan,
    run_with_recovery,
)
from asa.executor.training import checkpoint, snapshots
from asa.executor.training.checkpoint import Manifest
from asa.executor.training.logs import Announce, Event, RunLog, Work
from asa.executor.training.settings import TrainSettings
from asa.executor.training.snapshots import RowSnapshots
from asa.interfaces.strategy import Strategies
from asa.ir import codec
from asa.ir.codec import fingerprint
from asa.ir.plan import Plan, wrong_number
from asa.launch import bind_to_core, faults, join, latecomer, launched, run_ranks, tell
from asa.launch.forking import ranks_can_fork
from asa.launch.torchrun import RESTARTS, agent, stop_with_agent
from asa.launch.worker import others_may_leave
from asa.zoo.preload import ModelPreload

Prepare = Callable[[Plan], tuple[RunLog, Material]]


def train(
    plan: Plan,
    settings: TrainSettings,
    *,
    strategies: Strategies,
    adapt: Adapt,
    relieve: Relieve | None = None,
    regroup: Regroup | None = None,
    on_event: Announce | None = None,
    command: Sequence[str] = (),
    emulated: EmulatedDevice | None = None,
    model: ModelPreload | None = None,
    work: Work | None = None,
) -> Event:
    """Train under ``plan``, on ranks started here, or as one of the ranks that a launcher started.

    Under ``settings.out`` it writes ``log.jsonl``, ``result.json``, ``plan.json`` and ``checkpoints/``. Nothing is
    printed: ``on_event`` gets the events listed in :mod:`asa.executor.training.logs` (under a launcher, on rank 0).

    Args:
        relieve: makes another plan if a rank runs out of memory, or is about to; without it, that ends the run.
        regroup: makes a plan for fewer ranks if one is lost for good; without it, the first loss ends the run.
        command: the arguments of ``python -m asa`` that would do the same, for the equivalent torchrun line.
        emulated: a device to emulate on the cores of this machine. Nothing is trained, and nothing saved.
        work: FLOPs of a sample and of the device, for MFU in the log.
        model: the plan's model, built with the settings' seed; it is consumed. If None, ranks build their own.

    Returns:
        The document of ``result.json`` (under a launcher, on rank 0; on other ranks only its ``exit_code``).

    Raises:
        UsageError, InvalidInputError, UnavailableError, NoCheckpointError: before training, on every rank.
        WorkersFailedError: a rank died, hung or disagreed, or training diverged.
        InfeasibleError: a rank ran out of memory, and no other plan needs less.
        PreemptedError: stopped by SIGTERM, with everything saved.
    """
    faults.arm()
    device_type = plan.device_type if settings.device == "auto" else settings.device
    device_type = device_type if emulated is None else "cpu"
    # Different kinds of processors may round differently, and a user's factory need not use the seed.
    alike = not launched() and ":" not in plan.model_spec
    job = Job(
        plan=plan, settings=settings, strategies=strategies, adapt=adapt, device_type=device_type, emulated=emulated,
        alike=alike, model=model,
    )  # fmt: skip
    with ExitStack() as stack:

        def ready(plan: Plan) -> tuple[RunLog, Material]:
            return prepare(
                stack, plan, settings, device_type=device_type, on_event=on_event, command=command, work=work
            )

        return (
            _run_as_rank(job, ready, relieve, regroup)
            if launched()
            else _start_ranks_and_run(job, ready, relieve, regroup)
        )


def _threads(job: Job) -> int | None:
    """Threads per rank. On a CPU it is 1 unless set otherwise, because components were profiled with one thread."""
    return 1 if job.settings.threads is None and job.device_type == "cpu" else job.settings.threads


def _bind(job: Job, local_rank: int, local_ranks: int) -> None:
    """Bind a rank that computes on one core to a core."""
    if job.device_type == "cpu" and job.emulated is None and _threads(job) == 1:
        bind_to_core(local_rank, local_ranks)


def _backend(job: Job) -> str:
    return "nccl" if job.device_type == "cuda" else "gloo"


def _start_ranks_and_run(job: Job, ready: Prepare, relieve: Relieve | None, regroup: Regroup | None) -> Event:
    """Start the ranks, and receive their messages."""
    restart = pending(job, relieve)
    log, material = ready(job.plan if restart is None else restart.plan)
    if restart is not None:
        job = replace(job, plan=restart.plan)
        _note(log, restart, job)

    def release_model() -> None:
        if job.model is not None:
            job.model.take()  # the ranks have their copies

    def start(job: Job, material: Material) -> Ending:
        files = _files_of_servers(job)
        try:
            endings = run_ranks(
                job.plan.num_processes,
                _rank,
                job,
                material,
                files,
                backend=_backend(job),
                threads=_threads(job),
                timeout_s=job.settings.timeout_s,
                watched=True,
                forward_sigterm=True,
                idle_until_begun=not job.snapshots,
                on_message=lambda _, event: log(event),
                spare=_expendable_ranks(job.plan),
                returns=partial(_can_be_restarted, job.plan, files),
                once_started=release_model,
            )
        finally:
            for file in files.values():
                os.close(file)
        return max((e for e in endings if e is not None), key=lambda ending: ending.pressure)

    return _run_and_log(log, lambda: run_with_recovery(job, material, log, relieve, regroup, start))


def _rank(rank: int, job: Job, material: Material, files: dict[int, int]) -> Ending:
    plan = job.plan
    _bind(job, rank, plan.num_processes)
    own_snapshots = RowSnapshots(files[rank], fingerprint(plan)) if rank in files else None
    returning = [r for r in range(plan.num_processes) if _can_be_restarted(plan, files, r)]
    votes = _votes(plan, job.settings.timeout_s, returning=returning, snapshots=own_snapshots)
    return work(job, material, votes, rank, tell)


def _votes(plan: Plan, timeout_s: float, **returns: Any) -> Votes:
    """Votes of the run's ranks; :class:`StarVotes`, with the options ``returns``, if the plan tolerates lost ranks."""
    return StarVotes(timeout_s, **returns) if _tolerates_lost_ranks(plan) else Votes(timeout_s)


def _tolerates_lost_ranks(plan: Plan) -> bool:
    return plan.consistency is not None and not plan.consistency.lockstep


def _servers(plan: Plan) -> tuple[int, ...]:
    d = plan.consistency
    return d.server_ranks(plan.num_processes) if d is not None and d.served else ()


def _files_of_servers(job: Job) -> dict[int, int]:
    """An open file for the snapshots of each rank that serves and can be started again while the others continue. Rank
    0 cannot, because all ranks ask it for samples."""
    ranks = [r for r in _servers(job.plan) if r]
    if not ranks or not _tolerates_lost_ranks(job.plan) or job.device_type != "cpu" or not ranks_can_fork():
        return {}
    return dict(zip(ranks, snapshots.files(len(ranks)), strict=False))


def _can_be_restarted(plan: Plan, files: Collection[int], rank: int) -> bool:
    """Whether ``rank`` is started again while the others continue. Under hogwild it needs Linux, to find the memory of
    the weights in the files of rank 0."""
    d = plan.consistency
    if d is None or not _tolerates_lost_ranks(plan) or rank == 0 or (rank in _servers(plan) and rank not in files):
        return False
    return d.name != "hogwild" or Path("/proc/self/fd").is_dir()


def _expendable_ranks(plan: Plan) -> Callable[[int], bool] | None:
    """Predicate for ranks that may be lost: workers for which no rank waits and that serve no other. None if there are
    none."""
    if not _tolerates_lost_ranks(plan):
        return None
    needed = {0, *_servers(plan)}
    return lambda rank: rank not in needed


def _run_as_rank(job: Job, ready: Prepare, relieve: Relieve | None, regroup: Regroup | None) -> Event:
    """Run as a rank that a launcher started. Rank 0 owns the run, and its errors are raised on all ranks."""
    settings = job.settings
    stop_with_agent()
    with join(backend=_backend(job), timeout_s=settings.timeout_s) as worker, others_may_leave():
        if (threads := _threads(job)) is not None:
            torch.set_num_threads(threads)
        _bind(job, worker.local_rank, int(os.environ.get("LOCAL_WORLD_SIZE") or 0))
        if latecomer() is not None:
            return _as_latecomer(job, worker.local_rank)
        votes = _votes(job.plan, settings.timeout_s)
        # An elastic launcher counts the restarts of each node separately, and counts none if a node has joined or left.
        # Then the agent that began the run is the one that continues it.
        local_restarts = max(int(os.environ.get(RESTARTS, "0")), int(begun_by(Path(settings.out)) == (agent() or "")))
        restarts = max(int(rank[0]) for rank in votes.gather([float(local_restarts)]))
        os.environ[RESTARTS] = str(restarts)
        restart = votes.once(lambda: plan_for_ranks(pending(job, relieve), job, votes.num_ranks, regroup))
        text = votes.tell(None if restart is None else codec.dumps(restart.plan))
        plan = job.plan if text is None else codec.loads(Plan, text, source="the plan from rank 0")
        job = replace(job, plan=plan)
        wrong = None
        # A plan made here for the available ranks may leave some of them idle, if fewer are faster.
        if votes.num_ranks < plan.num_processes or (votes.num_ranks > plan.num_processes and text is None):
            wrong = wrong_number(plan, votes.num_ranks)
        votes.agree(wrong)
        owner = votes.patiently(lambda: ready(plan) if votes.rank == 0 else None)
        try:
            material = _agree_on_material(job, votes, owner[1] if owner is not None else None)
        except AsaError as error:
            if owner is not None:
                owner[0].finish(exit_code=error.exit_code, message=str(error))
            raise
        if owner is not None:
            log = owner[0]
            begin(Path(settings.out), agent())
            if restart is not None:
                _note(log, restart, job)
            return _run_and_log(log, lambda: work(job, material, votes, worker.local_rank, log))
        return {"exit_code": _run_to_end(lambda: work(job, material, votes, worker.local_rank, lambda _: None))}


def _as_latecomer(job: Job, local_rank: int) -> Event:
    """Take the place of a lost rank of a running job, under its plan."""
    plan = codec.load(Plan, Path(job.settings.out) / "plan.json")
    train, test = open_images(plan, job.settings)
    votes = _votes(plan, job.settings.timeout_s)
    material = Material(train=train, test=test, run="", resume=None)
    job = replace(job, plan=plan)
    return {"exit_code": _run_to_end(lambda: work(job, material, votes, local_rank, lambda _: None))}


def _note(log: RunLog, restart: Pending, job: Job) -> None:
    """Log the change of plan after a shortage that ended this run before."""
    if restart.event is not None:
        log(restart.event)
        record_plan(Path(job.settings.out), restart.plan)


def _agree_on_material(job: Job, votes: Votes, own_material: Material | None) -> Material:
    """Rank 0's choice of checkpoint, on every rank. The other ranks read the same files themselves."""
    choice = None
    if own_material is not None:
        choice = [own_material.run, None if own_material.resume is None else str(own_material.resume[0])]
    run, path = votes.tell(choice)

    def read() -> Material:
        if own_material is not None:
            return own_material
        train, test = open_images(job.plan, job.settings)
        resume = None
        if path is not None:
            resume = (Path(path), codec.load(Manifest, Path(path) / checkpoint.MANIFEST))
        return Material(train=train, test=test, run=run, resume=resume)

    material = votes.patiently(read)
    digests = votes.exchange([images.digest() for images in (material.train, material.test)])
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise InvalidInputError(
            f"rank {other} reads other samples than rank 0 from --data {job.settings.data}: its files must be the same "
            "everywhere, and a function must return the same samples in every process (seed what it draws)"
        )
    return material


def _run_and_log(log: RunLog, body: Callable[[], Ending]) -> Event:
    """Run ``body`` and write its outcome to the log.

    Raises:
        AsaError: what ``body`` raised, or that it was preempted.
    """
    try:
        _run_to_end(body)
    except AsaError as error:
        log.finish(exit_code=error.exit_code, message=str(error), rank=getattr(error, "rank", None))
        raise
    except KeyboardInterrupt:
        message = "interrupted" + (f"; --resume continues from {log.checkpoint}" if log.checkpoint else "")
        log.finish(exit_code=130, message=message)  # what the command ends with
        raise KeyboardInterrupt(message) from None
    except BaseException as error:
        log.finish(exit_code=1, message=f"{type(error).__name__}: {error}".rstrip(": "))
        raise
    return log.finish(exit_code=0)


def _run_to_end(body: Callable[[], Ending]) -> int:
    """Run ``body`` and return exit code 0. An error of a collective after a lost rank becomes one line.

    Raises:
        PreemptedError: the ranks were asked to stop.
    """
    with others_may_leave():
        ending = body()
    if ending.preempted is not None:
        raise PreemptedError(ending.preempted)
    return 0
