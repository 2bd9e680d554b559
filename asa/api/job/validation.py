"""Loss and metric over a validation loader, with every sample counted once over all ranks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asa.api.calls import arguments
from asa.api.job.loss import JobLoss
from asa.api.steps.batches import GlobalBatches, moved, rows_of
from asa.errors import UsageError
from asa.executor.model.loss import by_tokens, hits_of, logits_of
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.votes import Votes
from asa.ir.profile import Precision
from asa.launch import faults
from asa.tracing.autocast import autocast

Metric = Callable[[Any, Any], Tensor]
"""Function from a model's output and labels to one figure for each sample."""


def class_hits(output: Any, labels: Any) -> Tensor | None:
    """Accuracy of each sample, if ``labels`` are numbers of the classes in ``output``; None if they are not."""
    try:
        logits = logits_of(output)
    except (AttributeError, IndexError, StopIteration):
        return None
    if not (isinstance(logits, Tensor) and isinstance(labels, Tensor)) or labels.dtype not in (
        torch.int64,
        torch.int32,
    ):
        return None
    if not logits.is_floating_point() or logits.dim() != labels.dim() + 1:
        return None
    tokens = by_tokens(logits, labels)
    label_shape = logits.shape[:-1] if tokens else (logits.shape[0], *logits.shape[2:])
    classes = logits.shape[-1] if tokens else logits.shape[1]
    if label_shape != labels.shape or not labels.numel() or int(labels.min()) < 0 or int(labels.max()) >= classes:
        return None
    return hits_of(logits, labels)


def _scored(metric: Metric | None, output: Any, labels: Any, count: int) -> float | None:
    """Sum of the metric over ``count`` samples; None if there is none for them."""
    scores = class_hits(output, labels) if metric is None else metric(output, labels)
    if scores is not None and (not isinstance(scores, Tensor) or scores.shape != (count,)):
        what = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise UsageError(
            f"metric gave {what} for {count} samples; one figure for each is needed, a tensor of ({count},)"
        )
    return None if scores is None else float(scores.double().sum())


def _needed_rows(model: ParallelModel, total: int) -> list[int]:
    """Rows of a batch that this rank reads, or whose outputs it gets."""
    return sorted({*range(*model.input_rows(total)), *range(*model.output_rows(total))})


@torch.no_grad()
def validated(
    model: ParallelModel,
    loader: Any,
    split: Callable[[Any], tuple[Any, Any]],
    loss_fn: JobLoss,
    metric: Metric | None,
    votes: Votes,
    precision: Precision,
) -> tuple[float, float]:
    """Mean of ``loss_fn`` over the samples of ``loader``, or over its denominators, and mean of ``metric`` (by default
    the accuracy of class labels, NaN for other labels). Collective. A batch that is too small for all ranks is padded
    with its last sample, which is not counted again."""
    widest = max(layout.least for layout in model.plan.layouts())

    def rows(total: int) -> list[int]:
        return [min(row, total - 1) for row in _needed_rows(model, max(total, widest))]

    model.eval()
    sums = [0.0] * 5
    for share in GlobalBatches(loader, votes, rows).epoch(order_seed=0):
        faults.reached("validation")
        total = max(share.total, widest)
        inputs, labels = split(moved(share.batch, model.device)) if share.rows else (torch.empty(0), None)
        indices = _needed_rows(model, total)
        input_rows, output_rows = (slice(*r) for r in (model.input_rows(total), model.output_rows(total)))
        at = bisect_left(indices, input_rows.start)
        x = rows_of(inputs, range(at, at + input_rows.stop - input_rows.start), len(indices)) if model.reads else None
        x = arguments(x) if model.called else x
        with autocast(precision, model.device):
            output = model(x, torch.arange(total), 0)
        count = max(0, min(output_rows.stop, share.total) - output_rows.start)
        if model.counts_rows() and count:
            at = bisect_left(indices, output_rows.start)
            local_labels = rows_of(labels, range(at, at + count), len(indices))
            local_output = rows_of(output, range(count))
            score = _scored(metric, local_output, local_labels, count)
            loss, weight = loss_fn.weighed(local_output, local_labels, count)
            batch = (loss, weight, score or 0.0, 0 if score is None else count, count)
            sums = [a + b for a, b in zip(sums, batch, strict=True)]
    model.links.finish_sends()
    model.train()
    loss, weight, score, scored, rows_seen = (math.fsum(column) for column in zip(*votes.gather(sums), strict=True))
    return loss / max(1.0, weight), score / scored if scored and scored == rows_seen else math.nan
