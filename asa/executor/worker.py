"""One optimizer step, and one pass over the test images, as a rank does them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asa.executor.clock import StepClock
from asa.executor.loss import logits_of, loss_of
from asa.executor.parallel import ParallelModel
from asa.executor.precision import LossScale, autocast
from asa.executor.step import forward_backward, microbatch_rows
from asa.executor.votes import Votes
from asa.ir.profile import Precision
from asa.zoo.data import ImageSet, fetch


@dataclass
class Tally:
    """Loss and hits over the rows a rank counts; the sums stay on the device until they are asked for."""

    device: torch.device
    rows: int = 0
    _sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def add(self, loss: Tensor, output: object, labels: Tensor) -> None:
        """``loss``: the mean over ``labels``."""
        hits = (logits_of(output).argmax(1) == labels).sum()
        self._sums += torch.stack((loss.detach().double() * labels.numel(), hits.double()))
        self.rows += labels.numel()

    def take(self) -> tuple[float, float, float]:
        """(sum of losses, hits, rows) since the last call. Waits for the device."""
        loss, hits = self._sums.tolist()
        rows, self.rows = self.rows, 0
        self._sums.zero_()
        return loss, hits, float(rows)


@dataclass(kw_only=True)
class Worker:
    """What a rank needs to compute a step: its model and optimizer under the plan in force."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    scale: LossScale
    votes: Votes
    clock: StepClock
    precision: Precision
    seed: int
    label_smoothing: float

    def trainable(self, rows: int) -> bool:
        """Whether the last, short batch of an epoch gives every rank enough to compute on: two rows at once, or as
        many as a full batch does. BatchNorm cannot train on a single value."""
        plan = self.model.plan
        parts = plan.num_microbatches * max(layout.data for layout in plan.layouts())
        return rows // parts >= min(2, plan.global_batch // parts) > 0

    def train(self, images: ImageSet, indices: Tensor, *, epoch: int, step: int, tally: Tally) -> bool:
        """One step on the samples ``indices`` (int64 [rows], global, the same on all ranks); whether it updated.

        Gradients are those of the mean loss over all rows, whatever the shards and microbatches.
        """
        # Masks that no module of ours draws come from torch's own generators: a function of the step, too.
        torch.manual_seed(self.seed * 1_000_003 + step)
        model = self.model
        self.clock.mark()
        inputs, labels = self._fetch(images, indices, epoch)
        self.clock.mark()

        def scaled_loss(output: object, wanted: Tensor) -> Tensor:
            loss = loss_of(output, wanted, self.label_smoothing)
            if model.counts_rows():
                tally.add(loss, output, wanted)
            return self.scale.scaled(loss)

        model.zero_grad()
        forward_backward(
            model,
            indices,
            step,
            lambda rows: inputs[rows.start],
            lambda rows: labels[rows.start],
            loss_fn=scaled_loss,
            precision=lambda: autocast(self.precision, model.device),
        )
        updated = self.scale.unscale(model.parameters(), self.votes)
        if updated:
            self.optimizer.step()
            model.share_updates()
        self.clock.mark()
        return updated

    def _fetch(self, images: ImageSet, indices: Tensor, epoch: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """This rank's inputs and labels of every microbatch, each by its first row in the batch."""
        model = self.model
        inputs, labels = {}, {}
        for part in microbatch_rows(model, len(indices)):
            if model.reads:
                x, _ = fetch(images, indices[part.read], train=True, seed=self.seed, epoch=epoch, device=model.device)
                inputs[part.read.start] = x
            if model.concludes:
                wanted = indices[part.kept].to(images.labels.device)
                labels[part.kept.start] = images.labels[wanted].to(model.device)
        return inputs, labels

    @torch.no_grad()
    def validate(self, images: ImageSet, batch: int) -> Tally:
        """Loss and hits over every image, each counted once over all ranks. Batches are all of one size: the last is
        filled up with images that are not counted."""
        model, total = self.model, len(images)
        tally = Tally(model.device)
        model.average_buffers()
        model.eval()
        for start in range(0, total, batch):
            rows = torch.arange(start, start + batch).clamp_(max=total - 1)
            read, kept = (slice(*r) for r in (model.input_rows(batch), model.output_rows(batch)))
            x = None
            if model.reads:
                x, _ = fetch(images, rows[read], train=False, seed=self.seed, epoch=0, device=model.device)
            with autocast(self.precision, model.device):
                output = model(x, rows, 0)
            count = max(0, min(kept.stop, total - start) - kept.start)
            if model.counts_rows() and count:
                labels = images.labels[start + kept.start : start + kept.start + count].to(model.device)
                logits = logits_of(output)[:count].float()
                tally.add(loss_of(logits, labels), logits, labels)
        model.links.settle()
        model.train()
        return tally
