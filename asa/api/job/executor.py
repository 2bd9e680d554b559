"""Training under a plan on the user's own loader, driven by the loop over epochs."""

from __future__ import annotations

import math
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from asa.api.calls import arguments
from asa.api.job.loss import JobLoss, LossWeight
from asa.api.job.schedules import FILE, Schedules
from asa.api.job.validation import Metric, validated
from asa.api.messages import say
from asa.api.model.optimizers import Rebinding
from asa.api.rank_context import RankContext
from asa.api.steps.batches import GlobalBatches, Place, Share, cloned, moved, rows_of, samples_in, warn_of_squares
from asa.api.tensors.clipping import clip, clip_own, understood_by_torch
from asa.errors import AsaError, PreemptedError, UsageError
from asa.executor.consistency import conduct_of
from asa.executor.consistency.parameter_servers import put_statistics, statistics_of
from asa.executor.consistency.star import StarVotes
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.step import microbatch_rows, microbatches_of, played
from asa.executor.running.planned import Build, PlannedExecutor
from asa.executor.training import checkpoint
from asa.executor.training.checkpoint import Manifest
from asa.executor.training.checkpointer import Checkpointer
from asa.executor.training.epoch_timer import EpochTimer, Interval, who_is_late
from asa.executor.training.logs import Announce
from asa.executor.training.precision import LossScale
from asa.executor.training.saving import SaveClock
from asa.executor.training.settings import TrainSettings
from asa.executor.training.stopping import VOTE_EVERY_S, StopRequest
from asa.executor.training.worker import LossCounter, Worker
from asa.interfaces.executor import EpochOutcome, Look
from asa.ir.plan import Plan
from asa.launch import faults
from asa.sharding.layers.batchnorm import SynchronisedBatchNorm
from asa.tracing.autocast import LOWER, autocast

_ENTRY = "entry"
"""Name of the state that a rank receives when it enters again."""
_UNCOUNTED = 1 << 40
"""Number of samples in an epoch, for positions in checkpoints, if the loader does not know it."""


@dataclass(frozen=True, kw_only=True)
class UserData:
    """The user's data: training batches, the function that splits a batch into input and labels, the validation loader
    (or None), the loss and the metric (None: accuracy). ``changed``: forward changes its inputs in place, so that
    microbatches, which are views of one batch, are copied."""

    batches: GlobalBatches
    split: Callable[[Any], tuple[Any, Any]]
    validation: Any
    loss_fn: Callable[[Any, Any], Tensor]
    weight: LossWeight = None
    metric: Metric | None = None
    changed: bool = False

    def rows(self, part: Literal[0, 1], values: Any, rows: Sequence[int], total: int) -> Any:
        """These rows of the inputs (0) or labels (1) of ``total`` samples."""
        if (places := self._places[part]) is None and len(rows) < total:
            warn_of_squares(values, total)
        return rows_of(values, rows, total, places)

    @cached_property
    def _places(self) -> tuple[frozenset[Place] | None, frozenset[Place] | None]:
        def one(part: int) -> frozenset[Place] | None:
            return self.batches.places(lambda batch: self.split(batch)[part])

        return one(0), one(1)


class UserExecutor(PlannedExecutor):
    """Trains under one plan at a time. Every rank has one, and every method is collective."""

    def __init__(
        self,
        plan: Plan,
        build: Build,
        settings: TrainSettings,
        *,
        rebinding: Rebinding,
        data: UserData,
        context: RankContext,
        announce: Announce,
        folder: Path | None,
        run: str,
        schedules: Schedules,
        max_norm: float | None = None,
        needs: int = 1,
    ) -> None:
        self._max_norm, self._schedules = max_norm, schedules
        self._build, self._settings, self._rebinding, self._data = build, settings, rebinding, data
        self._context, self._votes, self._announce, self._folder = context, context.votes, announce, folder
        self.stop = StopRequest()
        self._samples = data.batches.epoch_samples or _UNCOUNTED
        self._epoch = self._samples_done = 0
        self._saved: tuple[int, Path] | None = None
        self._saving = SaveClock(settings.save_every_s)
        self._running: Iterator[Share] | None = None
        self._checkpointer = Checkpointer(
            folder=folder or Path(), run=run, settings=settings, num_samples=self._samples, votes=self._votes,
            announce=announce, more=lambda: {FILE: schedules.state()},
        )  # fmt: skip
        self._loss = JobLoss(data.loss_fn, data.weight, context)
        self._fewest = needs
        self._start(plan)
        norms = any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) and not issubclass(type(m), SynchronisedBatchNorm)
            for c in self.model.components
            for m in c.modules()
        )
        self._fewest = self.model.needs = max(needs, 2 if self._votes.anyone(norms) else 1)

    def _worker_of(self, model: ParallelModel, scale: LossScale) -> Worker:
        understood_by_torch(model, job=True)
        model.needs = self._fewest
        optimizer = self._rebinding.apply(model)
        discipline = model.whole_plan.consistency
        if discipline is not None and discipline.groups is not None:
            raise UsageError(f"{discipline}: groups of ranks run under `asa train` only; leave groups out")
        if discipline is not None and discipline.served and self._max_norm is not None:
            raise UsageError(
                f"max_norm is over all gradients of a step, and servers under {discipline} have them in slices; leave "
                "it out, or train under ddp"
            )
        if discipline is not None and discipline.served and not self._rebinding.elementwise:
            raise UsageError(
                f"{type(optimizer).__name__} is not known to update element by element, and servers under {discipline} "
                "update slices of all weights: say elementwise=True if it does, or train under ddp, local_sgd or diloco"
            )
        if discipline is not None and (discipline.waiting == "pipelined" or discipline.spread > 0):
            what = discipline.name if discipline.spread == 0 else "fedavg with a spread, which deals out a data set,"
            raise UsageError(f"{what} runs under `asa train` only; a job takes its batches from a loader in turn")
        conduct = conduct_of(model, optimizer, self._votes)
        if conduct is not None:
            for note in conduct.notes():
                say(self._context, note)
            if self._max_norm is not None and discipline is not None and not discipline.synchronous:
                say(self._context, f"max_norm clips gradients of each worker's own batch under {discipline}")
        return Worker(
            model=model, optimizer=optimizer, scale=scale, votes=self._votes, precision=model.plan.precision,
            seed=self._settings.seed, conduct=conduct,
        )  # fmt: skip

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer over what this rank updates."""
        return self._rebinding.optimizer

    @property
    def next_epoch(self) -> int:
        """The epoch to run next, or to continue."""
        return self._epoch

    def rows(self, total: int) -> list[int]:
        """Rows of a batch of ``total`` samples that this rank reads, or for which it needs labels."""
        rows_read: set[int] = set()
        for part in microbatch_rows(self.model, total):
            for rows in (part.read, part.kept):
                rows_read.update(range(rows.start, rows.stop))
        return sorted(rows_read)

    def trainable(self, total: int) -> bool:
        """Whether a batch of ``total`` samples gives every rank a sample of every microbatch, or two for BatchNorm
        (fewer if the plan's own batch has no more)."""
        plan = self.plan

        def least(samples: int) -> int:
            return plan.fewest(samples, microbatches_of(plan, samples, self._fewest))

        return least(total) >= min(self._fewest, least(plan.global_batch)) > 0

    @property
    def entered(self) -> bool:
        """Whether this rank takes part. One that takes the place of a lost rank does so after :meth:`enter`."""
        return not isinstance(self._votes, StarVotes) or self._votes.entered

    def enter(self) -> bool:
        """Enter the run at the start of an epoch, in the place of a lost rank; returns False if the run is over."""
        votes, conduct = self._votes, self._worker.conduct
        assert isinstance(votes, StarVotes)
        assert conduct is not None
        entry = votes.enter()
        if entry is None:
            warnings.warn(f"rank {votes.rank} was lost, and the run ended before it could enter again", stacklevel=3)
            return False
        state = votes.stored_value(_ENTRY)
        self._epoch, self._samples_done, self._step, self._running = entry.epoch, 0, entry.step, None
        put_statistics(self.model, entry.statistics)
        self._schedules.restore({"schedules": torch.tensor(state["schedules"], dtype=torch.uint8)})
        self._loss.adopt(state["loss"])
        conduct.enter()
        return True

    def _admit(self, epoch: int) -> None:
        """On rank 0, let ranks enter that have come back."""
        coordinator = self._votes.coordinator if isinstance(self._votes, StarVotes) else None
        if coordinator is None or not coordinator.waiting or self._samples_done:
            return
        assert isinstance(self._votes, StarVotes)
        state = self._schedules.state()["schedules"].tolist()
        self._votes.store_value({"schedules": state, "loss": self._loss.state}, _ENTRY)
        coordinator.admit(epoch, self._step, statistics_of(self.model))

    def train_step(self, batch: Any = None) -> float:
        """Make one update on ``batch`` (global, the same on every rank) or on the loader's next; returns the mean
        loss."""
        if not self.entered:
            raise UsageError(
                f"the others go on without rank {self._votes.rank}, which can enter in job.run() and job.epochs() "
                "only: train with these, or start all ranks again with resume=True"
            )
        self.model.train()
        if batch is None:
            share = self._next()
        else:
            rows = self.rows(samples_in(batch))
            share = Share(total=samples_in(batch), rows=rows, first=0, batch=rows_of(batch, rows))
        if not self.trainable(share.total):
            raise UsageError(
                f"{share.total} samples are too few to give every rank something to compute on; use a larger batch, or "
                "leave out the last one (drop_last=True)"
            )
        counter = LossCounter(self.model.device)
        self._train(share, counter)
        self._worker.clock.collect()
        with self._discipline_paused():
            totals = self._votes.gather(counter.take())
        return math.fsum(rank[0] for rank in totals) / max(1.0, math.fsum(rank[2] for rank in totals))

    def _next(self) -> Share:
        """The loader's next sufficiently large batch, from the next epoch if this one has ended."""
        while True:
            if self._running is None:
                self._running = self._batches()
            share = next(self._running, None)
            if share is None:
                if not self._samples_done:
                    raise UsageError("the loader yields no batch that is large enough for all ranks")
                self._running, self._epoch, self._samples_done = None, self._epoch + 1, 0
                self._schedules.epoch_ended(math.nan)
                continue
            self._samples_done += share.total
            if self.trainable(share.total):
                return share
            message = f"{share.total} samples of epoch {self._epoch} are left out: too few for a batch on all ranks"
            self._announce({"event": "note", "message": message})

    @property
    def _batches_done(self) -> int:
        """Number of batches of the epoch that are done; all but the last are full."""
        return -(-self._samples_done // self._data.batches.batch_size)

    def _batches(self, skip: int | None = None) -> Iterator[Share]:
        """The rest of the epoch after its first ``skip`` batches (None: after those that are done)."""
        seed = self._settings.seed * 1_000_003 + self._epoch
        return self._data.batches.epoch(order_seed=seed, skip=self._batches_done if skip is None else skip)

    def _train(self, share: Share, loss_counter: LossCounter) -> None:
        # Random numbers of other modules come from torch's generators: seed them by the step.
        torch.manual_seed(self._settings.seed * 1_000_003 + self._step)
        worker, model, scale = self._worker, self.model, self._worker.scale
        worker.clock.mark()
        faults.at_step(self._step)
        faults.reached("data")
        inputs, labels = self._data.split(moved(share.batch, model.device)) if share.rows else (torch.empty(0), None)
        worker.clock.mark()

        def positions(rows: slice) -> range:
            first = bisect_left(share.rows, rows.start)
            return range(first, first + rows.stop - rows.start)

        def labels_of(rows: slice) -> Any:
            counted.rows = rows.stop - rows.start
            everything = rows.stop - rows.start == share.total  # any structure is allowed, as on one device
            return labels if everything else self._data.rows(1, labels, positions(rows), len(share.rows))

        def read(rows: slice) -> Any:
            everything = rows.stop - rows.start == len(share.rows)
            local_inputs = inputs if everything else self._data.rows(0, inputs, positions(rows), len(share.rows))
            if self._data.changed and not everything:
                local_inputs = cloned(local_inputs)
            return arguments(local_inputs) if model.called else local_inputs

        counted, counts = self._loss, bool(model.counts_rows())
        counted.begin()
        model.zero_grad()
        with nullcontext() if worker.conduct is None else model.no_sync():
            loss = played(
                model,
                torch.arange(share.total),
                self._step,
                read,
                labels_of,
                loss_fn=lambda output, target: scale.scaled(counted(output, target, counts)),
                precision=lambda: autocast(worker.precision, model.device),
            ).loss
        factor = counted.factor(share.total)
        if factor != 1:
            loss = loss * factor
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(factor)
        if not counted.tried:
            loss_share = float(loss / scale.value) if counts else 0.0
            total = math.fsum(v[0] for v in self._votes.gather([loss_share]))
            kind = next(
                (p.dtype for p in model.parameters()), torch.float32
            )  # a process without components may use any dtype
            kind = torch.bfloat16 if worker.precision in LOWER else kind
            counted.checked(total, counts, kind)
        rows = share.total if self.leads else 0
        if isinstance(self._votes, StarVotes) and worker.conduct is not None:  # a lost rank counts nothing
            rows = worker.conduct.rows(share.total)
        loss_counter.note(loss / scale.value * share.total * float(model.counts_rows()), rows)
        faults.reached("all_reduce")
        if scale.unscale(model.parameters(), self._votes):
            if self._max_norm is not None and worker.conduct is None:
                clip(model, self._max_norm)
            elif self._max_norm is not None and worker.conduct is not None:
                clip_own(model, self._max_norm, worker.conduct.gradient_scale(share.total))
            faults.reached("optimizer")
            if worker.conduct is None:
                worker.optimizer.step()
            else:
                worker.conduct.step(share.total)
            self._schedules.stepped()
        worker.clock.mark()
        self._step += 1

    def run_epoch(self, epoch: int, look: Look | None = None) -> EpochOutcome:
        """Train ``epoch`` (the rest of it) and validate.

        Raises:
            PreemptedError: a rank was asked to stop; all stopped after the same step and saved.
            WorkersFailedError: the loss is no longer finite, or ranks are no longer in step.
        """
        if epoch != self.next_epoch:
            raise UsageError(f"epoch {epoch} cannot run: training stands in epoch {self.next_epoch}")
        began, first = time.perf_counter(), self._step
        self._admit(epoch)
        if self._votes.anyone(self.stop.requested):
            self._preempt()
        self.model.train()
        self._loss.check_again()
        counter = LossCounter(self.model.device)
        timer = EpochTimer(
            self.plan, self.processes, self._votes, self._worker.clock, self._settings.log_every, self._warm
        )
        skipped = 0
        shares, behind = self._running or self._batches(), self._batches_done
        while (share := next(shares, None)) is not None:
            self._samples_done += share.total
            behind += 1
            if not self.trainable(share.total):
                skipped += share.total
                continue
            self._train(share, counter)
            if timer.stepped(full=share.total == self.plan.global_batch):
                interval, worker = self._exchange(timer, counter), self._worker
                if interval.stopping:
                    self._preempt()
                if look is not None and interval.measured is not None:
                    look(interval.measured, self._step)
                if self._worker is worker:
                    timer.resume()
                else:
                    self.model.train()
                    timer.under(self.plan, self.processes, self._worker.clock)
                    if self._data.batches.indexed:  # prefetched rows belong to the previous plan
                        shares = self._batches(behind)
        self._running = None
        stopping = timer.pending and self._exchange(timer, counter).stopping
        if self._step == first:
            raise UsageError("the loader yields no batch that is large enough for all ranks")
        if skipped:
            message = f"{skipped} samples of epoch {epoch} were left out: too few for a batch on all ranks"
            self._announce({"event": "note", "message": message})
        self._epoch, self._samples_done, self._warm = epoch + 1, 0, timer.warm
        self._worker.synchronize()
        if stopping:  # the sender of the signal may not wait for a validation
            self._schedules.epoch_ended(timer.train_loss)
            self.save(epoch)
        loss, score = self._validate()
        if not stopping:
            self._schedules.epoch_ended(timer.train_loss if math.isnan(loss) else loss)
        return EpochOutcome(
            step=self._step,
            seconds=time.perf_counter() - began,
            train_loss=timer.train_loss,
            validation_loss=loss,
            validation_accuracy=score,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            measurements=timer.measurements(None),
        )

    @contextmanager
    def _discipline_paused(self) -> Iterator[None]:
        """Context in which workers of a discipline do not wait for this one, because it waits for all of them."""
        conduct = self._worker.conduct
        if conduct is None:
            yield
            return
        conduct.pause()
        yield
        conduct.resume()

    def _exchange(self, timer: EpochTimer, counter: LossCounter) -> Interval:
        """Combine the figures of all ranks since the last exchange, and announce them."""
        with self._discipline_paused():
            interval = timer.exchange(counter, step=self._step, stop=self.stop.requested)
        for message in self._tell_of_lost("the others go on without it, and without its share of every batch"):
            warnings.warn(message, stacklevel=2)
        self._announce({"event": "steps", "epoch": self._epoch, "step": self._step, "loss": interval.loss,
                       "step_time_s": (interval.seconds - interval.data_wait_s) / interval.steps,
                       **who_is_late(interval.measured)})  # fmt: skip
        save_due = self._saving.trained(interval.seconds)  # equal on all ranks, so that all ranks save or none does
        timer.every_s = min(VOTE_EVERY_S, self._saving.interval_s)
        if save_due and not interval.stopping and self._folder is not None:
            self.commit()
        return interval

    def _validate(self) -> tuple[float, float]:
        """Mean loss and metric over the validation loader; NaN without one."""
        if self._data.validation is None:
            return math.nan, math.nan
        return validated(
            self.model, self._data.validation, self._data.split, self._loss, self._data.metric, self._votes,
            self._worker.precision,
        )  # fmt: skip

    def synchronize(self) -> None:
        """Bring all ranks to one state (collective)."""
        self._worker.synchronize()

    def _preempt(self) -> None:
        where = f", saved to {self.commit()}" if self._folder is not None else "; without a folder nothing is saved"
        raise PreemptedError(f"stopped on request after step {self._step}{where}")

    def save(self, epoch: int) -> None:
        """Commit a checkpoint from which ``epoch + 1`` can start, if the job has a folder."""
        if self._folder is not None:
            self.commit()

    def commit(self) -> Path:
        """Commit a checkpoint of the current state; returns its path.

        Raises:
            UsageError: the job has no folder. UnavailableError: it cannot be written; earlier checkpoints are intact.
        """
        if self._folder is None:
            raise UsageError("nothing can be saved without out, the folder of the run")
        if self._saved is None or self._saved[0] != self._step:
            position = self._epoch * self._samples + min(self._samples_done, self._samples)
            self._saved = (self._step, self._checkpointer.save(self._worker, step=self._step, position=position))
            self._saving.saved()
        return self._saved[1]

    def restore(self, path: Path, manifest: Manifest) -> None:
        """Continue from a checked checkpoint.

        Raises:
            UsageError: it was made with another loader or optimizer. InvalidInputError: with another model.
        """
        for name, expected in (("num_samples", self._samples), ("optimizer", self._settings.optimizer)):
            if getattr(manifest, name) != expected:
                raise UsageError(
                    f"the checkpoint was made with {name} {getattr(manifest, name)}, this job has {expected}"
                )
        self._checkpointer.restore(self._worker, path, manifest)
        if any(file.name == FILE for file in manifest.files):
            self._schedules.restore(checkpoint.read(path, FILE))
        self._epoch, self._samples_done = divmod(manifest.position, self._samples)
        self._step, self._saved, self._running = manifest.step, (manifest.step, path), None
        self.advance()

    def advance(self) -> None:
        """Move to the next epoch if all batches of the current one are done (collective)."""
        if not self._samples_done:
            return
        running = self._running or self._batches()
        for share in running:
            if self.trainable(share.total):
                self._running = chain((share,), running)
                return
            self._samples_done += share.total
        self._running, self._epoch, self._samples_done = None, self._epoch + 1, 0
        self._schedules.epoch_ended(math.nan)

    def migrate(self, plan: Plan, processes: tuple[int, ...] | None = None) -> None:
        """Continue under ``plan`` with the same weights, optimizer state and sample order. All processes move, or none
        does.

        Raises:
            UsageError: the plan is for another model or batch, or for more ranks than there are processes.
            WorkersFailedError: a rank could not move; the current plan stays.
        """
        runs = self._continues(plan, processes)
        state = dict(self.optimizer.state)
        try:
            self._move_to(plan, runs)
        except AsaError:
            self._rebinding.apply(self.model)
            self.optimizer.state.update(state)
            raise
