"""One rank's part of a training run, for ranks started here or by a launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from asa.errors import PreemptedError, WorkersFailedError
from asa.executor.measuring.emulation import EmulatedDevice, Emulation
from asa.executor.model.materialize import materialize
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.state import extra_states
from asa.executor.model.template import TracedTemplate
from asa.executor.model.votes import Votes
from asa.executor.running.asynchronous import AsynchronousExecutor
from asa.executor.running.emulated import EmulatedExecutor
from asa.executor.running.exhausted import NOTE, EnoughAgain, MemoryWatch, NearlyExhausted, explained
from asa.executor.running.loop import TrainingExecutor
from asa.executor.running.outdir import CHECKPOINTS, check_space
from asa.executor.running.prepare import Material
from asa.executor.training.logs import Announce, known
from asa.executor.training.settings import TrainSettings
from asa.executor.training.snapshots import SnapshotFile, newest, read
from asa.executor.training.stopping import StopRequest
from asa.instruments.devices import device_of_rank
from asa.interfaces.executor import Executor
from asa.interfaces.strategy import OPTIMIZER_WORDS, Strategies
from asa.ir.codec import fingerprint
from asa.ir.measurements import EpochRecord
from asa.ir.optimizers import planned_as
from asa.ir.plan import Plan
from asa.ir.shortage import Shortage
from asa.ir.units import GIB
from asa.launch import alive, give_back_freed_memory, latecomer
from asa.zoo.data import ImageSet
from asa.zoo.inputs import example
from asa.zoo.models import build
from asa.zoo.preload import ModelPreload

Adapt = Callable[[Executor, range, Announce], Iterator[EpochRecord]]
"""The loop over epochs: ``asa.scheduler.loop.adapt`` with some of its arguments given. It runs on every rank, saves
after each epoch, and announces changes of plan. It must be picklable if ranks are spawned."""

_RESIDENT_BYTES = 1 << 30
"""Image sets up to this size are kept on the GPU."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job, equal on every rank.

    Attributes:
        emulated: the device to emulate, if any.
        alike: whether all ranks make bitwise equal initial weights from the same seed.
        watchful: whether to stop (:attr:`Ending.tight`) before memory runs out, so that the run can be planned anew.
        awaited_bytes: free memory of the host with which the run stops (:attr:`Ending.enough`), to return to an earlier
            plan; None if there is none.
        model: the model for the first plan, if it is built already.
        between_losses_s: mean time in seconds between losses of ranks; None if there was none.
        snapshots: open files by rank, from which restarted ranks continue after a loss; none before the first loss.
    """

    plan: Plan
    settings: TrainSettings
    strategies: Strategies
    adapt: Adapt
    device_type: str
    emulated: EmulatedDevice | None = None
    alike: bool = False
    watchful: bool = False
    awaited_bytes: float | None = None
    model: ModelPreload | None = None
    between_losses_s: float | None = None
    snapshots: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a rank ended without failure. It is a result and not an exception, because the first rank to raise one would
    make the launcher kill the others.

    ``preempted`` is the message with the path of the saved state; None after a complete run. ``tight`` describes the
    memory of this rank, if all ranks stopped because one was about to run out. ``enough``: all stopped because memory
    suffices for an earlier plan again.
    """

    preempted: str | None = None
    tight: Shortage | None = None
    enough: bool = False

    @property
    def pressure(self) -> float:
        """Fraction of this rank's memory in use, if it is known; otherwise 0."""
        shortage = self.tight
        return (
            shortage.used_bytes / max(1, shortage.room_bytes)
            if shortage and shortage.used_bytes and shortage.room_bytes
            else 0.0
        )


def unsaved(names: Sequence[str]) -> str:
    """A sentence on states that checkpoints do not keep."""
    return (
        f"checkpoints do not keep {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} "
        "(get_extra_state): a resumed run, and exported weights, have that of a new model; make it a buffer"
    )


def work(job: Job, material: Material, votes: Votes, local_rank: int, announce: Announce) -> Ending:
    """Train to the end of the last epoch, or until all are asked to stop. ``announce`` is called on rank 0.

    Raises:
        AsaError: see :func:`asa.executor.running.run.train`.
    """
    device = device_of_rank(job.device_type, local_rank)
    watch = MemoryWatch(votes.rank, device, votes=job.watchful, awaited_bytes=job.awaited_bytes)
    executors: list[TrainingExecutor] = []

    def where() -> tuple[Plan, int, tuple[int, ...]]:
        return executors[0].place if executors else (job.plan, 0, ())

    with explained(watch, where, Path(job.settings.out) / NOTE):
        return _work(job, material, votes, device, announce, watch, executors)


class _ModelBuilder:
    """Builds what this process holds of the model under a plan. The model itself is needed once, if it can be copied.

    Attributes:
        parameter_bytes: size of all parameters of the model; 0 until it is built.
        unsaved: names of states that checkpoints do not keep (``get_extra_state``).
        emulation: that of the newest plan, on emulated devices.
    """

    def __init__(self, job: Job, votes: Votes, device: torch.device) -> None:
        self._job, self._votes, self._device = job, votes, device
        self._template: TracedTemplate | None = None
        self.parameter_bytes = 0
        self.unsaved: list[str] = []
        self.emulation: Emulation | None = None

    def __call__(self, plan: Plan, processes: tuple[int, ...]) -> ParallelModel:
        """The parts of the model under ``plan``, whose ranks run on ``processes`` (collective)."""
        job, settings = self._job, self._job.settings
        model = self._template or self._model(plan)
        alive.beat()
        if isinstance(model, nn.Module):
            self.parameter_bytes = sum(p.nbytes for p in model.parameters())
            self.unsaved = [*extra_states(model)]
        if job.emulated is not None:
            self.emulation = Emulation(job.emulated, job.strategies, plan)
        parts = materialize(
            plan,
            model,
            example(plan.sample_shape),
            rank=self._votes.rank,
            strategies=job.strategies,
            device=self._device,
            seed=settings.seed,
            batch_norm=settings.batch_norm,
            timeout_s=settings.timeout_s,
            alike=job.alike,
            keep_template=job.plan.consistency is None,
            processes=processes,
            runs_discipline=job.emulated is None,
            isolated=latecomer() is not None,
            **({} if self.emulation is None else self.emulation.hooks()),
        )
        del model
        self._template = parts.template
        alive.beat()
        give_back_freed_memory()  # the whole model was in memory for tracing
        return parts

    def _model(self, plan: Plan) -> nn.Module:
        model = None if self._job.model is None else self._job.model.take()
        if model is not None:
            return model
        # The plan is for such inputs, or the model was built before.
        tried = self._job.model is not None or self.parameter_bytes > 0
        shape, seed = plan.sample_shape, self._job.settings.seed
        return build(plan.model_spec, num_classes=plan.num_classes, input_shape=shape, seed=seed, tried=tried)


def _work(
    job: Job, material: Material, votes: Votes, device: torch.device, announce: Announce, watch: MemoryWatch,
    executors: list[TrainingExecutor],
) -> Ending:  # fmt: skip
    settings = job.settings
    say: Announce = (lambda event: announce(known(event))) if votes.rank == 0 else lambda _: None
    builder = _ModelBuilder(job, votes, device)

    def emulation() -> Emulation:
        assert builder.emulation is not None
        return builder.emulation

    def resident(images: ImageSet) -> ImageSet:
        return images.to(device) if device.type == "cuda" and images.images.nbytes <= _RESIDENT_BYTES else images

    with StopRequest().listening() as stop:
        folder = Path(settings.out) / CHECKPOINTS
        loose = job.plan.consistency is not None and not job.plan.consistency.lockstep
        usual = AsynchronousExecutor if loose else TrainingExecutor
        kind = usual if job.emulated is None else partial(EmulatedExecutor, emulation=emulation)
        executor = kind(
            job.plan,
            builder,
            settings,
            train=resident(material.train),
            test=resident(material.test),
            votes=votes,
            stop=stop,
            announce=say,
            folder=folder,
            run=material.run,
            watch=watch,
            between_losses_s=job.between_losses_s,
            snapshot_file=SnapshotFile(job.snapshots[votes.rank]) if job.snapshots else None,
        )
        executors.append(executor)
        if isinstance(executor, AsynchronousExecutor) and latecomer() is not None:
            if not executor.enter():
                return Ending()
            return _to_the_end(job, executor, say, watch)
        words = 1 + OPTIMIZER_WORDS[planned_as(settings.optimizer or job.plan.optimizer)]
        votes.once(lambda: check_space(folder.parent, words * builder.parameter_bytes, settings.keep))
        snapshot_step = newest(job.snapshots, fingerprint(job.plan))
        if snapshot_step > (0 if material.resume is None else material.resume[1].step):
            executor.recall(read(job.snapshots[votes.rank], snapshot_step))
        elif material.resume is not None:
            executor.restore(*material.resume)
        if device.type == "cuda" and material.train.images.nbytes > _RESIDENT_BYTES:
            size = material.train.images.nbytes / GIB
            say({"event": "note", "message": f"the images ({size:.1f} GiB) stay on the host, gathered a batch ahead"})
        if builder.unsaved:
            say({"event": "note", "message": unsaved(builder.unsaved)})
        executor.tell_unused_samples()
        return _to_the_end(job, executor, say, watch)


def _to_the_end(job: Job, executor: TrainingExecutor, say: Announce, watch: MemoryWatch) -> Ending:
    while True:
        try:
            for _ in job.adapt(executor, range(executor.next_epoch, job.settings.epochs), say):
                pass
            executor.close()
            return Ending()
        except PreemptedError as error:
            return Ending(preempted=str(error))
        except NearlyExhausted:
            return Ending(tight=watch.shortage(*executor.place))
        except EnoughAgain:
            return Ending(enough=True)
        except WorkersFailedError as error:
            if not isinstance(executor, AsynchronousExecutor) or not executor.was_left_behind(error):
                raise
            if not executor.enter():  # it was only late, and its process goes on
                return Ending()
