"""Training by workers that do not wait for one another: each takes samples when it is ready for them.

The loop, the worker, its checkpoints and votes are those of :mod:`asa.executor.running.loop`, with three differences.
Samples are handed out on request. Figures are combined only at the end of an epoch and at checkpoints in it. The run
continues without a lost worker (:mod:`asa.executor.consistency.star`), and a process that takes its place enters the
running epoch.

Every sample is handed out once. Samples of a lost worker are not trained on, and neither are those whose gradient was
rejected as too old. So a sample counts at most once, and the log says how many did not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from asa.errors import WorkersFailedError
from asa.executor.consistency.parameter_servers import put_statistics, statistics_of
from asa.executor.consistency.star import AT_NEED, StarVotes
from asa.executor.running.loop import TrainingExecutor
from asa.executor.training.stopping import PATIENCE_S, VOTE_EVERY_S
from asa.executor.training.worker import LossCounter
from asa.instruments.devices import ProcessorUse
from asa.interfaces.executor import EpochOutcome, Look
from asa.ir.codec import fingerprint
from asa.ir.layout import bounds
from asa.ir.measurements import Measurements
from asa.ir.profile import Stat

_AT_NEED = (0, AT_NEED, torch.empty(0, dtype=torch.int64))
"""In place of a ticket: it must be asked for when it is needed."""


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """A part of an epoch, up to its end or to a checkpoint in it: the number of ``samples`` that were handed out, the
    sum of losses over ``rows`` of them, ``seconds`` of the slowest worker, and the mean utilization of the CPU of every
    worker that is left (``busy``). All are equal on all ranks."""

    samples: int
    loss: float
    rows: float
    seconds: float
    busy: list[float]


class AsynchronousExecutor(TrainingExecutor):
    """Trains under a discipline whose workers run independently. Its votes are :class:`StarVotes`."""

    _votes: StarVotes
    _asked_to_stop = False
    """Whether a rank was asked to stop in the last stretch."""
    _turn = 0
    """Number of the stretch."""

    def enter(self) -> bool:
        """Enter the running epoch in the place of a lost rank; returns False if the run is over."""
        entry, conduct = self._votes.enter(), self._worker.conduct
        if entry is None or conduct is None:
            return False
        self._position, self._step, self._turn = entry.position, entry.step, entry.epoch - 1
        put_statistics(self.model, entry.statistics)
        conduct.enter()
        return True

    def run_epoch(self, epoch: int, look: Look | None = None) -> EpochOutcome:
        """Train ``epoch`` (the rest of it, after a resume inside one) and validate.

        Raises:
            PreemptedError: a rank was asked to stop; all remaining ranks stopped and saved.
            WorkersFailedError: the loss is not finite, or this rank was excluded.
        """
        del look  # the plan stays
        self._check_turn(epoch)
        if self._asked_to_stop:
            self._preempt()
        began, start = time.perf_counter(), self._position
        first = epoch * self._order.samples_per_epoch
        end = first + min(self._order.samples_per_epoch, self.steps_per_epoch * self.plan.global_batch)
        stretches = [self._train_a_stretch(epoch, end)]
        while self._position < end:
            if self._asked_to_stop:
                self._preempt()
            if not stretches[-1].samples:  # nobody is left who takes any
                break
            self._save()
            stretches.append(self._train_a_stretch(epoch, end))
        self._position = (epoch + 1) * self._order.samples_per_epoch
        validated = self._validate()
        return EpochOutcome(
            step=self._step,
            seconds=time.perf_counter() - began,
            train_loss=math.fsum(s.loss for s in stretches) / max(1.0, math.fsum(s.rows for s in stretches)),
            validation_loss=validated[0],
            validation_accuracy=validated[1],
            learning_rate=self._rate_at(max(start, end - self.plan.global_batch), self.plan.global_batch),
            measurements=self._measured(
                math.fsum(s.seconds for s in stretches),
                sum(s.samples for s in stretches) / self.plan.global_batch,
                stretches[-1].busy,
            ),
        )

    def _train_a_stretch(self, epoch: int, end: int) -> _Stretch:
        """Train until all samples before ``end`` are handed out, a checkpoint is due, or a rank is asked to stop
        (collective)."""
        began, votes, start = time.perf_counter(), self._votes, self._position
        self._turn += 1
        if votes.coordinator is not None:
            votes.coordinator.begin(
                self._turn, start, end, step=self._step, statistics=statistics_of(self.model),
                most_s=self._saving.interval_s,
            )  # fmt: skip
        self.model.train()
        counter, cores = LossCounter(self.model.device), ProcessorUse()
        steps = self._take(epoch, start, end, counter)
        self._worker.synchronize()
        seconds, busy = time.perf_counter() - began, cores.busy
        own = [*counter.take(), float(self._stop.requested), float(steps), seconds, busy]
        figures = votes.gather(own)
        position = int(votes.tell(votes.coordinator.position if votes.coordinator is not None else None))
        loss, _, rows = (math.fsum(rank[i] for rank in figures) for i in range(3))
        if not math.isfinite(loss):
            raise self._diverged(epoch)
        self._say_what_was_counted(epoch, [int(rank[4]) for rank in figures], position - start)
        self._position = position
        self._step += -(-(position - start) // self.plan.global_batch)
        self._asked_to_stop = any(rank[3] > 0 for rank in figures)
        return _Stretch(
            samples=position - start,
            loss=loss,
            rows=rows,
            seconds=max(rank[5] for rank in figures),
            busy=[figures[rank][6] for rank in votes.live if rank in self.processes],
        )

    def _take(self, epoch: int, start: int, end: int, counter: LossCounter) -> int:
        """Train on samples until none are left. Returns the number of steps."""
        if self.model.idle:
            return 0
        steps, announced_at = 0, time.monotonic()
        for at, count, indices in self._tickets(end):
            self._rate_at(at, count)
            self._worker.train(self._train, indices, epoch=epoch, step=self._step + steps, counter=counter)
            steps += 1
            self._tell_of_lost("the others continue without it")
            if time.monotonic() - announced_at > VOTE_EVERY_S:
                announced_at = time.monotonic()
                if counter.diverged:
                    raise self._diverged(epoch)
                self._announce(
                    {
                        "event": "note",
                        "message": f"epoch {epoch}: {at - start + count} of {end - start} samples handed out",
                    }
                )
        return steps

    def _diverged(self, epoch: int) -> WorkersFailedError:
        others = ", or let workers wait more" if len(self._votes.live) > 1 else ""
        return WorkersFailedError(
            f"the loss is no longer finite in epoch {epoch}; lower the learning rate with --lr{others}"
        )

    def _tickets(self, end: int) -> Iterator[tuple[int, int, Tensor]]:
        """Position, number of samples and global batch of each step of this worker, until none are left.

        The ticket of the next step is asked for before a step, so that its message travels while this worker computes.
        Not so if fewer samples than a global batch are left, because a slow worker would then keep them from the
        others.
        """
        following = self._ticket()
        while following is not None:
            at, count, indices = following
            early = at + count + self.plan.global_batch <= end
            if early:
                self._request_ticket(ahead=True)
            if early and self._worker.prefetches:
                following = self._requested_ticket()
                if following is not None and following is not _AT_NEED:
                    self._worker.expect(partial(itemgetter(2), following))
            yield at, count, indices
            if early and not self._worker.prefetches:
                following = self._requested_ticket()
            if not early or following is _AT_NEED:
                following = self._ticket()

    def _ticket(self) -> tuple[int, int, Tensor] | None:
        """The next ticket with which this worker can take a step; None if there is none."""
        self._request_ticket()
        return self._requested_ticket()

    def _request_ticket(self, *, ahead: bool = False) -> None:
        most = self._rows(self.plan.global_batch)
        self._votes.request_ticket(self._turn, most, stop=self._stop.requested, ahead=ahead)

    def _requested_ticket(self) -> tuple[int, int, Tensor] | None:
        """The ticket that was asked for; None if there is none, and :data:`_AT_NEED` if it must be asked for later."""
        while True:
            at, count = self._votes.requested_ticket()
            if count == AT_NEED:
                return _AT_NEED
            indices = self._batch_of(self._order.at(at)[:count]) if count else None
            if indices is not None or not count:  # else too few are left for a step of this worker
                return None if indices is None else (at, count, indices)
            self._request_ticket()

    def _rate_at(self, position: int, rows: int) -> float:
        """Set and return the learning rate for the samples at ``position`` of the run."""
        before, self._position = self._position, position
        try:
            return self._set_rate(self._order.locate(self._position)[0], rows)
        finally:
            self._position = before

    def _rows(self, batch: int) -> int:
        assert self._worker.conduct is not None
        return self._worker.conduct.rows(batch)

    def _batch_of(self, samples: Tensor) -> Tensor | None:
        """A global batch in which this worker's rows are ``samples``. None if they are too few for a step.

        A worker reads only its own rows of a batch, so the other rows are zeros.
        """
        batch = self.plan.global_batch
        if self._rows(batch) > len(samples):
            batch = min(batch, len(samples) * batch // self._rows(batch) + 1)
            while batch and (self._rows(batch) > len(samples) or not self._worker.trainable(batch)):
                batch -= 1
        if not batch or not self._rows(batch):
            return None
        indices = torch.zeros(batch, dtype=torch.int64)
        at = 0
        for part in self._worker.parts(batch):
            size = part.stop - part.start
            indices[part] = samples[at : at + size]
            at += size
        return indices

    def _say_what_was_counted(self, epoch: int, steps: list[int], handed_out: int) -> None:
        """Announce an event with the steps of every worker and the counters of the servers."""
        votes, conduct = self._votes, self._worker.conduct
        assert conduct is not None
        figures = conduct.figures() if not self.model.idle else {}
        if votes.coordinator is None:
            return
        c = votes.coordinator
        self._tell_of_lost("the others continue without it")
        self._announce(
            {
                "event": "consistency",
                "epoch": epoch,
                "discipline": str(conduct.discipline),
                "steps_per_worker": [steps[p] for p in self.processes],
                "live": list(votes.live),
                "samples_handed_out": handed_out,
                "samples_lost": c.lost_samples,
                **figures,
            }
        )

    def _validate(self) -> tuple[float, float]:
        """(loss, accuracy): means over the test images, which are divided among the remaining workers.

        Raises:
            PreemptedError: a worker was asked to stop, and would take too long for its images; all saved.
        """
        votes = self._votes
        workers = [r for r in votes.live if r in self.processes]
        figures, given_up = (0.0, 0.0, 0.0), False
        if votes.rank in workers:
            a, b = bounds(len(self._test), len(workers), workers.index(votes.rank))
            if a < b:
                counter = self._worker.validate_locally(
                    self._test.part(a, b), self.plan.global_batch, lambda: self._stop.waited_s > PATIENCE_S
                )
                given_up = counter is None
                figures = figures if counter is None else counter.take()
        if votes.anyone(given_up):
            self._preempt()
        loss, accuracy, rows = self._means(figures)
        if rows < len(self._test):
            message = f"validated on {rows:.0f} of {len(self._test)} test images: a worker was lost meanwhile"
            self._announce({"event": "note", "message": message})
        return loss, accuracy

    def _peak_memory(self) -> tuple[int, ...] | None:
        """None: memory is not observed here."""
        return None

    def _measured(self, seconds: float, batches: float, busy: list[float]) -> Measurements:
        """Measurements of an epoch, per step of one global batch, whichever workers trained on it. ``busy`` has the
        utilization of the CPU of every worker that is left."""
        step = seconds / max(batches, 1e-9)
        return Measurements(
            plan_fingerprint=fingerprint(self.plan),
            strategy=self.plan.strategy,
            num_ranks=self.plan.num_processes,
            global_batch=self.plan.global_batch,
            step_time=Stat.of([step]),
            predicted_step_time_s=self.plan.prediction.step_time_s,
            communication_s=None,
            data_wait_s=0.0,
            peak_memory_bytes=None,
            predicted_memory_bytes=self.plan.prediction.memory_bytes_per_rank,
            utilisation=math.fsum(busy) / len(busy) if busy and self.model.device.type == "cpu" else None,
        )
