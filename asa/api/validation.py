"""The loss over a validation loader, with every sample counted once over all ranks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch

from asa.api.batches import GlobalBatches, moved, rows_of
from asa.api.calls import arguments
from asa.api.job_loss import JobLoss
from asa.executor.model.parallel import ParallelModel
from asa.executor.model.votes import Votes
from asa.executor.training.precision import autocast
from asa.ir.profile import Precision
from asa.launch import faults


def _needed_rows(model: ParallelModel, total: int) -> list[int]:
    """Rows of a batch that this rank reads, or whose outputs it gets."""
    return sorted({*range(*model.input_rows(total)), *range(*model.output_rows(total))})


@torch.no_grad()
def mean_loss(
    model: ParallelModel,
    loader: Any,
    split: Callable[[Any], tuple[Any, Any]],
    loss_fn: JobLoss,
    votes: Votes,
    precision: Precision,
) -> float:
    """Mean of ``loss_fn`` over the samples of ``loader``, or over its denominators (collective). A batch that is too
    small for all ranks is padded with its last sample, which is not counted again."""
    widest = max(layout.least for layout in model.plan.layouts())

    def rows(total: int) -> list[int]:
        return [min(row, total - 1) for row in _needed_rows(model, max(total, widest))]

    model.eval()
    sums = [0.0, 0.0]
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
            loss, weight = loss_fn.weighed(rows_of(output, range(count)), local_labels, count)
            sums[0] += loss
            sums[1] += weight
    model.links.settle()
    model.train()
    totals = votes.gather(sums)
    return math.fsum(rank[0] for rank in totals) / max(1.0, math.fsum(rank[1] for rank in totals))
