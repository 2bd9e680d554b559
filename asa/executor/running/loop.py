"""The executor of ``asa train``: epochs of training under a plan, on one rank, in step with all the others."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from asa.errors import PreemptedError, UsageError, WorkersFailedError
from asa.executor.consistency import conduct_of
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.votes import Votes
from asa.executor.observing.observe import Observer
from asa.executor.running.exhausted import NEARLY, EnoughAgain, MemoryWatch, NearlyExhausted
from asa.executor.running.planned import Build, PlannedExecutor
from asa.executor.training.aims import Aims
from asa.executor.training.checkpoint import Manifest
from asa.executor.training.checkpointer import Checkpointer
from asa.executor.training.epoch_timer import EpochTimer, Interval, who_is_late
from asa.executor.training.logs import Announce
from asa.executor.training.migration import move, parts_of, target_parts
from asa.executor.training.optimizer import (
    build_optimizer,
    doubt_about,
    learning_rate,
)  # fmt: skip
from asa.executor.training.precision import LossScale
from asa.executor.training.prefetch import Prefetcher
from asa.executor.training.saving import SaveClock
from asa.executor.training.settings import TrainSettings
from asa.executor.training.snapshots import Snapshot, SnapshotFile, lacks_memory
from asa.executor.training.stopping import VOTE_EVERY_S, Patience, StopRequest
from asa.executor.training.worker import LossCounter, Worker
from asa.instruments.devices import ProcessorUse
from asa.instruments.nvml import Meter, card_of
from asa.interfaces.executor import EpochOutcome, Look
from asa.ir.codec import fingerprint
from asa.ir.plan import Plan
from asa.zoo.data import GlobalOrder, ImageSet


class TrainingExecutor(PlannedExecutor):
    """Trains under one plan at a time. Every rank has one, and every method is collective.

    Attributes:
        folder: folder of the checkpoints.
        run: name of this run in them.
        announce: receives events; all ranks but the first pass a function that does nothing.
        watch: observes this rank's memory.
        between_losses_s: see :class:`asa.executor.training.saving.SaveClock`.
        snapshot_file: where this rank writes snapshots.
    """

    def __init__(
        self,
        plan: Plan,
        build: Build,
        settings: TrainSettings,
        *,
        train: ImageSet,
        test: ImageSet,
        votes: Votes,
        stop: StopRequest,
        announce: Announce,
        folder: Path,
        run: str,
        watch: MemoryWatch | None = None,
        between_losses_s: float | None = None,
        snapshot_file: SnapshotFile | None = None,
    ) -> None:
        self._build, self._settings, self._votes, self._stop = build, settings, votes, stop
        self._watch = watch
        self._announce = announce
        self._train, self._test = train, test
        self._order = GlobalOrder(len(train), plan.global_batch, settings.seed)
        self._optimizer = settings.optimizer or plan.optimizer
        self._position = 0
        self._steps: int | None = None
        self._saved: tuple[int, Path] | None = None
        self._saving = SaveClock(settings.save_every_s, between_losses_s if snapshot_file is None else None)
        self._snapshot_file = snapshot_file
        self._checkpointer = Checkpointer(
            folder=folder, run=run, settings=settings, num_samples=len(train), votes=votes, announce=self._announce,
            samples=cache(train.sampled_digest),
        )  # fmt: skip
        self._meter: Meter | None = None
        self._observer = Observer(votes, Path(settings.out), settings.trace_steps)
        self._start(plan)

    def _worker_of(self, model: ParallelModel, scale: LossScale) -> Worker:
        settings = self._settings
        optimizer = build_optimizer(
            self._optimizer,
            model.updated,
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            offloaded=model.offloaded,
        )
        doubt = doubt_about(optimizer, self._optimizer, model, lr=settings.lr, weight_decay=settings.weight_decay)
        if doubt:
            self._announce({"event": "note", "message": doubt})
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        aims = Aims.of(settings, model.plan.num_classes, model.device)
        self._schedule = aims.schedule
        conduct = conduct_of(model, optimizer, self._votes)
        for note in () if conduct is None else conduct.notes():
            self._announce({"event": "note", "message": note})
        return Worker(
            model=model,
            optimizer=optimizer,
            scale=scale,
            conduct=conduct,
            votes=self._votes,
            precision=model.plan.precision,
            seed=settings.seed,
            label_smoothing=settings.label_smoothing,
            criterion=aims.criterion,
            score=aims.score,
            prefetcher=Prefetcher.of(self._train, model.device),
        )

    @property
    def next_epoch(self) -> int:
        """The epoch to run next, or to continue."""
        return self._order.locate(self._position)[0]

    @property
    def place(self) -> tuple[Plan, int, tuple[int, ...]]:
        """The current plan, :attr:`step`, and the processes that run the plan's ranks."""
        return self.plan, self._step, self.processes

    @property
    def unused_samples(self) -> int:
        """Number of samples in the last batch of each epoch that are not used, because they are too few for all
        ranks."""
        short = self._order.samples_per_epoch % self.plan.global_batch
        return short if short and not self._worker.trainable(short) else 0

    def tell_unused_samples(self, before: int = 0) -> None:
        """Announce how many samples are not used, if they are not ``before``, as under the plan before."""
        unused = self.unused_samples
        if unused != before:
            left_out = f"{unused} samples of every epoch are left out: too few for a batch on all ranks"
            message = left_out if unused else f"the last {before} samples of every epoch are used again"
            self._announce({"event": "note", "message": message})

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch."""
        if self._steps is not None:  # needed in every step
            return self._steps
        steps = self._order.steps_per_epoch - (1 if self.unused_samples else 0)
        if steps == 0:
            raise UsageError(
                f"a global batch of {self.plan.global_batch} is larger than the {len(self._train)} training images, "
                f"and those are too few for {self.plan.num_ranks} ranks"
            )
        self._steps = min(steps, self._settings.steps_per_epoch or steps)
        return self._steps

    def run_epoch(self, epoch: int, look: Look | None = None) -> EpochOutcome:
        """Train ``epoch`` (the rest of it, after a resume inside one) and validate.

        Raises:
            PreemptedError: a rank was asked to stop; all stopped after the same step and saved.
            NearlyExhausted: a rank is about to run out of memory; all stopped after the same step and saved.
            EnoughAgain: memory suffices for an earlier plan; all stopped after the same step and saved.
            WorkersFailedError: the loss is no longer finite, or ranks are no longer in step.
        """
        self._check_turn(epoch)
        began, device = time.perf_counter(), self.model.device
        self._meter = Meter(card_of(device))
        energy, cores = Meter(card_of(device)), ProcessorUse()
        if self._votes.anyone(self._stop.requested):
            self._preempt()
        self._forget_peak()
        self.model.train()
        counter = LossCounter(device)
        timer = EpochTimer(
            self.plan, self.processes, self._votes, self._worker.clock, self._settings.log_every, self._warm
        )
        rate = 0.0
        for indices in self._batches(epoch):
            worker = self._worker  # a new one after a change of plan
            rate = self._set_rate(epoch, len(indices))
            if self._has_steps_left(epoch, len(indices)):
                worker.expect(partial(self._order.at, self._position + len(indices)))
            step = partial(worker.train, self._train, indices, epoch=epoch, step=self._step, counter=counter)
            full = len(indices) == self.plan.global_batch
            disturbed = self._observer.run(worker, timer.warm, step, full=full)
            self._step += 1
            self._position += len(indices)
            if self._snapshot_file is not None and self._snapshot_file.due(self._step) and self._has_steps_left(epoch):
                self._write_snapshot(self._snapshot_file)
            if timer.stepped(full=full, disturbed=disturbed):
                measured = self._exchange(epoch, timer, counter, rate).measured
                if look is not None and measured is not None and self._has_steps_left(epoch):
                    look(measured, self._step)
                    if self._worker is not worker:
                        self.model.train()
                        timer.under(self.plan, self.processes, self._worker.clock)
                        continue
                timer.resume()
        self._observer.finish()
        if timer.pending:
            self._exchange(epoch, timer, counter, rate)
        self._position, self._warm = (epoch + 1) * self._order.samples_per_epoch, timer.warm
        busy_cores = cores.busy
        loss, accuracy = self._validate()
        joules, busy = self._use_of_devices(energy, busy_cores)
        return EpochOutcome(
            step=self._step,
            seconds=time.perf_counter() - began,
            train_loss=timer.train_loss,
            validation_loss=loss,
            validation_accuracy=accuracy,
            learning_rate=rate,
            measurements=replace(timer.measurements(self._peak_memory()), energy_j=joules, utilisation=busy),
        )

    def _check_turn(self, epoch: int) -> None:
        if epoch != self.next_epoch:
            raise UsageError(f"epoch {epoch} cannot run: training stands in epoch {self.next_epoch}")

    def _forget_peak(self) -> None:
        """Measure the peak of a GPU's memory anew."""
        if self.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.model.device)

    def steps_left(self, epoch: int) -> int:
        """Steps of ``epoch`` that are still to be taken."""
        used = self._position - epoch * self._order.samples_per_epoch
        return max(0, self.steps_per_epoch - -(-used // self.plan.global_batch))

    def _has_steps_left(self, epoch: int, after: int = 0) -> bool:
        """Whether steps are left in ``epoch`` after ``after`` more samples. An epoch need not use all of its
        samples."""
        used = self._position + after - epoch * self._order.samples_per_epoch
        return -(-used // self.plan.global_batch) < self.steps_per_epoch

    def _batches(self, epoch: int) -> Iterator[Tensor]:
        """Global sample indices of each remaining step in ``epoch``; the caller advances the position."""
        while self._has_steps_left(epoch):
            yield self._order.at(self._position)

    def _set_rate(self, epoch: int, rows: int) -> float:
        """Set and return the learning rate. It follows samples, not steps, so that a change of the global batch does
        not affect it."""
        in_epoch = min(self._order.samples_per_epoch, self.steps_per_epoch * self.plan.global_batch)
        used = epoch * in_epoch + self._position - epoch * self._order.samples_per_epoch
        total = in_epoch * self._settings.epochs
        warmup = self._settings.warm_up(self.steps_per_epoch * self._settings.epochs)
        share = learning_rate(used / total, 1.0, warmup=warmup, step=rows / total, schedule=self._schedule)
        for group, peak in zip(self._worker.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * share
        return self._peaks[0] * share

    def _write_snapshot(self, file: SnapshotFile) -> None:
        """Write a snapshot for a restart after a lost rank. The first one, on all ranks, shows how long it takes."""
        worker, first, began = self._worker, file.step == 0, time.monotonic()
        parts = parts_of(worker.model, worker.optimizer)
        if first and any(r[0] for r in self._votes.gather([float(lacks_memory(parts, self.model.device))])):
            self._snapshot_file = None
            return
        file.write(
            Snapshot(
                step=self._step, position=self._position, plan=fingerprint(self.plan), loss_scale=worker.scale.value,
                parts=parts,
            )
        )  # fmt: skip
        if first:
            write_s = time.monotonic() - began
            file.set_interval(max(r[0] for r in self._votes.gather([write_s])), self.plan.prediction.step_time_s)

    def _exchange(self, epoch: int, timer: EpochTimer, counter: LossCounter, rate: float) -> Interval:
        watch = self._watch
        full, enough = (0.0, False) if watch is None else (watch.full(), watch.enough_again())
        interval = timer.exchange(counter, step=self._step, stop=self._stop.requested, full=full, enough=enough)
        self._report(interval, rate)
        if interval.stopping and self._has_steps_left(epoch):
            self._preempt()
        if interval.full > NEARLY and self._has_steps_left(epoch):
            self._save()
            raise NearlyExhausted
        if interval.enough and self._has_steps_left(epoch):
            self._save()
            raise EnoughAgain
        if self._saving.trained(interval.seconds) and self._has_steps_left(
            epoch
        ):  # the number is equal on all ranks, so all save or none does
            self._save()
        timer.every_s = min(VOTE_EVERY_S, self._saving.interval_s)
        return interval

    def _report(self, interval: Interval, rate: float) -> None:
        epoch, epochs = self._order.locate(self._position - 1)[0], self._settings.epochs
        total, left = (self.steps_per_epoch * n for n in (epochs, epochs - epoch - 1))
        left += self.steps_left(epoch)
        step_s = interval.seconds / interval.steps
        self._announce(
            {
                "event": "steps",
                "epoch": epoch,
                "step": self._step,
                "loss": interval.loss,
                "accuracy": interval.accuracy,
                "learning_rate": rate,
                "step_time_s": (interval.seconds - interval.data_wait_s) / interval.steps,
                "samples_per_s": self.plan.global_batch / step_s,
                "data_wait_share": interval.data_wait_s / interval.seconds,
                **who_is_late(interval.measured),
                **({} if self._meter is None else self._meter.line(interval.seconds)),
                **self._memory_so_far(),
                "fraction": 1 - left / total,
                "eta_s": left * step_s,
            }
        )

    def _validate(self) -> tuple[float, float]:
        """(loss, accuracy): means over the test images. Running statistics are averaged over ranks first."""
        patience = Patience(self._votes, lambda: self._stop.requested, self._save)
        counter = self._worker.validate(self._test, self.plan.global_batch, patience.exhausted)
        if counter is None:
            self._preempt()
        loss, accuracy, rows = self._means(counter.take())
        if rows != len(self._test):
            raise WorkersFailedError(f"{rows:.0f} of {len(self._test)} test images were counted")
        return loss, accuracy

    def _means(self, figures: Sequence[float]) -> tuple[float, float, float]:
        """(loss, accuracy, rows): means over all ranks' test images, and their number, from the sums of this rank.

        Raises:
            WorkersFailedError: the loss is not finite.
        """
        rows_of_ranks = self._votes.gather(figures)
        loss, hits, rows = (math.fsum(rank[i] for rank in rows_of_ranks) for i in range(3))
        if not rows or not math.isfinite(loss):
            raise WorkersFailedError(
                f"the validation loss is not finite after step {self._step}; lower the learning rate "
                "with --lr, or train in fp32"
            )
        if not math.isfinite(hits):
            message = f"{self._settings.metric} is {hits / rows} over the {rows:.0f} images of the validation"
            self._announce({"event": "note", "message": f"{message}, and not recorded"})
        return loss / rows, hits / rows, rows

    def _memory_so_far(self) -> dict[str, int | None]:
        """Peak of active memory of this rank, and memory reserved by CUDA's allocator, in bytes; None while unknown."""
        if self.model.device.type != "cuda":
            return {"active_memory_bytes": self._observer.peak_bytes, "reserved_memory_bytes": None}
        return {
            "active_memory_bytes": torch.cuda.max_memory_allocated(self.model.device),
            "reserved_memory_bytes": torch.cuda.max_memory_reserved(self.model.device),
        }

    def _peak_memory(self) -> tuple[int, ...] | None:
        """Peak of active memory per rank in bytes: from the allocator on CUDA, from one observed step on a CPU; None if
        unknown."""
        if self.model.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.model.device)
        elif self._observer.peak_bytes is not None:
            peak = self._observer.peak_bytes
        else:
            return None
        peaks = self._votes.gather([float(peak)])
        return tuple(int(peaks[process][0]) for process in self.processes)

    def _use_of_devices(self, energy: Meter, busy_cores: float) -> tuple[float | None, float | None]:
        """Joules of the plan's devices since ``energy`` was made, and their mean utilization in this epoch, 0 to 1;
        None if one of them does not report it. On CPUs the utilization is the mean of ``busy_cores``."""
        if self.model.device.type != "cuda" or self._meter is None:
            known: tuple[float | None, float | None] = None, busy_cores
        else:
            known = energy.joules(), self._meter.utilisation
        figures = self._votes.gather([math.nan if v is None else v for v in known])
        joules, busy = (math.fsum(figures[process][i] for process in self.processes) for i in range(2))
        return None if math.isnan(joules) else joules, None if math.isnan(busy) else busy / len(self.processes)

    def _preempt(self) -> NoReturn:
        path = self._save()
        raise PreemptedError(f"stopped on request after step {self._step}, saved to {path}; --resume continues")

    def save(self, epoch: int) -> None:
        """Commit a checkpoint from which ``epoch + 1`` can start.

        Raises:
            UnavailableError: it cannot be written; raised on every rank. Earlier checkpoints are intact.
        """
        if epoch + 1 != self.next_epoch:
            raise UsageError(f"no checkpoint after epoch {epoch}: training stands in epoch {self.next_epoch}")
        self._save()

    def _save(self) -> Path:
        if self._saved is None or self._saved[0] != self._step:
            began = time.monotonic()
            self._saved = (self._step, self._checkpointer.save(self._worker, step=self._step, position=self._position))
            write_s = time.monotonic() - began
            if self._saving.between_losses_s is not None:
                write_s = max(rank[0] for rank in self._votes.gather([write_s]))
            self._saving.saved(write_s)
        return self._saved[1]

    def restore(self, path: Path, manifest: Manifest) -> None:
        """Continue from a checked checkpoint, under the current plan.

        Raises:
            InvalidInputError: its tensors are not those of this model.
        """
        self._checkpointer.restore(self._worker, path, manifest)
        self._position, self._step = manifest.position, manifest.step
        if not self._has_steps_left(self.next_epoch):  # the batch, or the limit of steps, has changed
            self._position = (self.next_epoch + 1) * self._order.samples_per_epoch
        self._saved = (manifest.step, path)

    def recall(self, snapshot: Snapshot) -> None:
        """Continue from the snapshots of the previous ranks (collective)."""
        worker = self._worker
        move(snapshot.parts, target_parts(worker.model), worker.model, worker.optimizer, self._votes)
        worker.scale = LossScale(worker.precision, snapshot.loss_scale)
        self._position, self._step = snapshot.position, snapshot.step

    def migrate(self, plan: Plan, processes: tuple[int, ...] | None = None) -> None:
        """Continue under ``plan`` with the same weights, optimizer state and sample order. Either all processes change
        to it, or none does.

        Raises:
            UsageError: the plan is for another model or batch, or for more ranks than there are processes.
            WorkersFailedError: a rank could not change; the current plan stays, and training can continue.
        """
        runs, unused, rates = self._continues(plan, processes), self.unused_samples, self._peaks
        try:
            self._move_to(plan, runs)
        except BaseException:
            self._peaks = rates  # of the optimizer that stays
            raise
        self._steps = None
        self._observer.forget()
        self._forget_peak()
        self.tell_unused_samples(unused)
