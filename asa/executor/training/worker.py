"""One optimizer step of a rank, and one pass over the validation images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from asa.executor.consistency.conduct import Conduct
from asa.executor.model.loss import Criterion, hits_of, logits_of, loss_of
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.step import MicrobatchRows, microbatch_rows, played
from asa.executor.model.votes import Votes
from asa.executor.training.clock import StepClock
from asa.executor.training.precision import LossScale
from asa.executor.training.prefetch import Prefetcher
from asa.ir.profile import Precision
from asa.launch import faults
from asa.tracing.autocast import autocast
from asa.zoo.data import ImageSet, fetch


@dataclass
class LossCounter:
    """Sums of loss and correct predictions over the rows this rank counts; they stay on the device until requested."""

    device: torch.device
    rows: int = 0
    _noted: list[tuple[Tensor, Tensor | None, int]] = field(default_factory=list)
    """Losses, hits, and the factor of each loss."""

    @torch.no_grad()
    def add(
        self, loss: Tensor, output: object, labels: Tensor, score: Callable[[Any, Tensor], Tensor] = hits_of
    ) -> None:
        """Add a batch. ``loss`` is the mean over ``labels``; ``score`` gives each sample's score, whose sum counts as
        hits."""
        rows = labels.shape[0]
        self._noted.append((loss.detach(), score(output, labels).sum(), rows))
        self.rows += rows

    def note(self, losses: Tensor, rows: int) -> None:
        """Add ``losses``, a sum over ``rows`` rows."""
        self._noted.append((losses.detach(), None, 1))
        self.rows += rows

    @property
    def diverged(self) -> bool:
        """Whether the newest loss is not finite. Waits for the device."""
        return bool(self._noted) and not torch.isfinite(self._noted[-1][0]).all().item()

    def take(self) -> tuple[float, float, float]:
        """(loss, hits, rows): sums since the last call. Waits for the device."""
        noted, self._noted = self._noted, []
        loss = hits = 0.0
        if noted:
            counted = [h for _, h, _ in noted if h is not None]
            figures = torch.stack([t.double() for t in (*(x for x, _, _ in noted), *counted)]).tolist()
            for value, (_, _, times) in zip(figures, noted, strict=False):
                loss += value * times
            hits = sum(figures[len(noted) :])
        rows, self.rows = self.rows, 0
        return loss, hits, float(rows)


def _rows_read(indices: Tensor, parts: Sequence[MicrobatchRows]) -> Tensor:
    """The samples that a rank reads in a step, microbatch after microbatch."""
    if len(parts) == 1:
        return indices[parts[0].read]
    return torch.cat([indices[part.read] for part in parts])


@dataclass(kw_only=True)
class Worker:
    """A rank's model, optimizer and clock under the current plan. ``dtype`` is that of inputs. ``conduct`` implements
    the plan's consistency discipline, if workers do not take every step together."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    scale: LossScale
    votes: Votes
    precision: Precision
    seed: int
    label_smoothing: float = 0.0
    criterion: Criterion | None = None
    score: Callable[[Any, Tensor], Tensor] = hits_of
    prefetcher: Prefetcher | None = None
    dtype: torch.dtype = torch.float32
    conduct: Conduct | None = None
    clock: StepClock = field(init=False)
    _parameters: list[nn.Parameter] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = StepClock(self.model.device)

    def trainable(self, rows: int) -> bool:
        """Whether a last, short batch of ``rows`` samples is large enough to train on. Every rank needs at least two
        rows at once (BatchNorm cannot train on a single value), or as many as a full batch gives it."""
        plan, rows = self.model.plan, rows // self.model.whole_plan.groups
        return plan.fewest(rows) >= min(2, plan.fewest(plan.global_batch)) > 0

    def train(self, images: ImageSet, indices: Tensor, *, epoch: int, step: int, counter: LossCounter) -> bool:
        """Train one step on the samples ``indices`` (int64 [rows], global, equal on all ranks). Returns whether it
        updated.

        Gradients are those of the mean loss over all rows, independent of shards and microbatches.
        """
        # Masks that asa's modules do not draw come from torch's own generators: seed those by the step, too.
        # (torch.manual_seed itself would record the Python stack for every device that is not there.)
        torch.default_generator.manual_seed(self.seed * 1_000_003 + step)
        model = self.model
        if model.device.type == "cuda":
            torch.cuda.manual_seed(self.seed * 1_000_003 + step)
        self.clock.mark()
        faults.at_step(step)
        batch = len(indices)
        if self.conduct is not None:
            if not self.conduct.takes_part:
                self.clock.mark()
                self.conduct.step(batch)
                self.clock.mark()
                return True
            indices = self.conduct.own_samples(images, indices, step)
        faults.reached("data")
        if not self._parameters:  # a walk over all modules takes as long as a small kernel; the result stays the same
            self._parameters = model.parameters()
        for p in self._parameters:
            p.grad = None  # before samples are prepared, which takes memory
        inputs, labels = self._fetch(images, indices, epoch)
        self.clock.mark()

        counts = model.counts_rows()

        def scaled_loss(output: object, targets: Tensor) -> Tensor:
            loss = loss_of(output, targets, self.label_smoothing, self.criterion)
            if counts:
                counter.add(loss, output, targets, self.score)
            return self.scale.scaled(loss)

        (played if self.conduct is None else self.conduct.played)(
            model,
            indices,
            step,
            lambda rows: inputs[rows.start],
            lambda rows: labels[rows.start],
            loss_fn=scaled_loss,
            precision=lambda: autocast(self.precision, model.device),
        )
        faults.reached("all_reduce")
        updated = self.scale.unscale(self._parameters, self.votes)
        if updated and self.conduct is not None:
            faults.reached("optimizer")
            self.conduct.step(batch)
        elif updated:
            faults.reached("optimizer")
            self.optimizer.step()
            model.share_updates()
        self.clock.mark()
        return updated

    def synchronize(self) -> None:
        """Bring all workers to one common state, running statistics included (collective)."""
        if self.conduct is not None:
            self.conduct.synchronize()
        else:
            self.model.average_buffers()

    def parts(self, batch: int) -> list[slice]:
        """This rank's rows of a batch of ``batch`` samples, by microbatch."""
        return [part.read for part in microbatch_rows(self.model, batch)]

    def validate_locally(
        self, images: ImageSet, batch: int, should_stop: Callable[[], bool] = lambda: False
    ) -> LossCounter | None:
        """Loss and hits over every image, on this rank alone; call :meth:`synchronize` on all workers before.
        ``should_stop`` is called after every batch. If it returns True, the result is None."""
        counter = LossCounter(self.model.device)
        self.model.eval()
        with torch.no_grad():
            for start in range(0, len(images), batch):
                faults.reached("validation")
                rows = torch.arange(start, min(start + batch, len(images)))
                x, labels = fetch(images, rows, train=False, seed=self.seed, epoch=0, device=self.model.device)
                with autocast(self.precision, self.model.device):
                    logits = logits_of(self.model(x, rows, 0)).float()
                counter.add(loss_of(logits, labels, 0.0, self.criterion), logits, labels, self.score)
            if should_stop():
                return None
        self.model.train()
        return counter

    def discipline_state(self) -> dict[str, Tensor]:
        """State of the consistency discipline beside weights and optimizer, by name; empty without a discipline."""
        return {} if self.conduct is None else self.conduct.state()

    @property
    def prefetches(self) -> bool:
        """Whether :meth:`expect` prefetches anything on this rank."""
        has_own_samples = self.conduct is not None and self.conduct.has_own_samples
        return self.prefetcher is not None and self.model.reads and not has_own_samples

    def expect(self, following: Callable[[], Tensor]) -> None:
        """Start to prefetch the next step's samples for this rank. ``following`` returns their indices."""
        if self.prefetcher is not None and self.prefetches:
            indices = following() if self.conduct is None else self.conduct.share(following())
            self.prefetcher.expect(_rows_read(indices, microbatch_rows(self.model, len(indices))))

    def _fetch(self, images: ImageSet, indices: Tensor, epoch: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """(inputs, labels): this rank's inputs and labels of every microbatch, by the microbatch's first row in the
        batch."""
        model, parts = self.model, microbatch_rows(self.model, len(indices))
        inputs: dict[int, Tensor] = {}
        labels: Tensor | None = None
        if model.reads:
            rows_read = _rows_read(indices, parts)
            gathered = None if self.prefetcher is None else self.prefetcher.take(rows_read)
            x, y = fetch(
                images, rows_read, train=True, seed=self.seed, epoch=epoch, device=model.device, dtype=self.dtype,
                gathered=gathered,
            )  # fmt: skip
            if len(parts) == 1:
                inputs[parts[0].read.start] = x
                labels = y if parts[0].read == parts[0].kept else None
            else:
                rows = x.split([part.read.stop - part.read.start for part in parts])  # views, in one go
                inputs = {part.read.start: r for part, r in zip(parts, rows, strict=True)}
        if not model.concludes:
            return inputs, {}
        if labels is not None:
            return inputs, {parts[0].kept.start: labels}
        labels = images.labels[indices.to(images.labels.device)].to(model.device)
        return inputs, {part.kept.start: labels[part.kept] for part in parts}

    @torch.no_grad()
    def validate(
        self, images: ImageSet, batch: int, should_stop: Callable[[], bool] = lambda: False
    ) -> LossCounter | None:
        """Loss and hits over every image, each counted once over all ranks. Each group of ranks takes a share of the
        images.

        All batches have one size; the last one is padded with images that are not counted. ``should_stop`` is called
        after every batch on all ranks, and must return the same on all. If it returns True, the result is None.
        """
        model, total = self.model, len(images)
        group_rows = slice(0, total) if model.grouped is None else model.grouped.rows(total)
        counter = LossCounter(model.device)
        self.synchronize()
        model.eval()
        most = -(
            -total // model.whole_plan.groups
        )  # the largest share of a group: all ranks need the same number of batches
        for start in range(group_rows.start, group_rows.start + most, batch):
            faults.reached("validation")
            rows = torch.arange(start, start + batch).clamp_(max=group_rows.stop - 1)
            input_rows, output_rows = (slice(*r) for r in (model.input_rows(batch), model.output_rows(batch)))
            x = None
            if model.reads:
                x, _ = fetch(images, rows[input_rows], train=False, seed=self.seed, epoch=0, device=model.device)
            with autocast(self.precision, model.device):
                output = model(x, rows, 0)
            count = max(0, min(output_rows.stop, group_rows.stop - start) - output_rows.start)
            if model.counts_rows() and count:
                labels = images.labels[start + output_rows.start : start + output_rows.start + count].to(model.device)
                logits = logits_of(output)[:count].float()
                counter.add(loss_of(logits, labels, 0.0, self.criterion), logits, labels, self.score)
            if should_stop():
                model.links.finish_sends()
                return None
        model.links.finish_sends()
        model.train()
        return counter
