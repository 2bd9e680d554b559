"""One training step up to the gradients: every microbatch forward and back, reduced with the last one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from asa.executor.loss import loss_of
from asa.executor.materialize import ParallelModel
from asa.ir.layout import bounds


@dataclass(frozen=True)
class MicrobatchRows:
    """Rows of the global batch: a whole microbatch, what this rank reads of it, and whose outputs it ends up with."""

    start: int
    stop: int
    read: slice
    kept: slice


def microbatch_rows(model: ParallelModel, batch: int) -> list[MicrobatchRows]:
    """This rank's rows of a global batch of ``batch`` samples, microbatch by microbatch."""
    found = []
    for j in range(model.plan.num_microbatches):
        start, stop = bounds(batch, model.plan.num_microbatches, j)
        if stop > start:
            read, kept = (
                slice(start + a, start + b)
                for a, b in (model.input_rows(stop - start), model.output_rows(stop - start))
            )
            found.append(MicrobatchRows(start, stop, read, kept))
    return found


def forward_backward(
    model: ParallelModel,
    samples: Tensor,
    step: int,
    inputs: Callable[[slice], Tensor],
    labels: Callable[[slice], Tensor],
    *,
    loss_fn: Callable[..., Tensor] = loss_of,
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Tensor:
    """Gradients of the mean loss over ``samples`` (global indices of the whole batch); this rank's addend of it.

    ``inputs`` and ``labels`` give tensors on the model's device for rows of the global batch. The addends of the
    ranks for which :meth:`ParallelModel.counts_rows` holds sum to the loss. ``precision`` makes the context of
    forward and loss (autocast).
    """
    rows = microbatch_rows(model, len(samples))
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for j, part in enumerate(rows):
        size = part.stop - part.start
        with nullcontext() if j + 1 == len(rows) else model.no_sync():
            with precision():
                output = model(inputs(part.read), samples[part.start : part.stop], step)
                loss = loss_fn(output, labels(part.kept))
            scale = model.loss_scale(size) * size / len(samples)
            (loss if scale == 1 else loss * scale).backward()
        total += loss.detach().to(total.dtype) * scale / model.layouts[-1].data
    return total
