"""Properties of a model that make training under any parallel plan differ from training on one device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from asa.errors import InvalidInputError
from asa.sharding.layers.dropout import make_reproducible
from asa.sharding.randomness.generators import drawing, draws_note
from asa.sharding.randomness.samples import SampleContext
from asa.tracing import outcome, trace
from asa.zoo.inputs import random

_ROUNDING = 1e-9
"""Relative tolerance in float64. A matrix product of several rows may add in another order than that of a single
row."""


def reasons(
    rank: int, build: Callable[[], nn.Module], input_shape: tuple[int, ...], num_classes: int
) -> tuple[str, ...]:
    """Sentences that say why results may differ, from a run on two random samples of the model that ``build`` makes.

    It is called on a rank of its own, because the parent process of ranks does not compute.
    """
    del rank
    batch = random(input_shape, 2, num_classes, torch.Generator().manual_seed(0), torch.float64)
    single = batch.float() if batch.is_floating_point() else batch
    return (*_mixing(build().double().eval(), batch), *_drawing(build().train(), single))


def _mixing(model: nn.Module, batch: Tensor) -> tuple[str, ...]:
    try:
        with torch.no_grad():
            together, first, second = (outcome(model, rows)[0] for rows in (batch, batch[:1], batch[1:]))
    except InvalidInputError:  # it does not run on one sample, or not in float64
        return ()
    separate = torch.cat((first, second)) if first.dim() else first
    if separate.shape != together.shape:
        return ()
    error = float((together - separate).abs().max() / separate.abs().max().clamp_min(1e-300))
    if error <= _ROUNDING:
        return ()
    return (
        f"the model mixes the samples of a batch: in evaluation its output for two samples differs by {error:.1e} from "
        "that for each alone, so training depends on how a batch is cut",
    )


def _drawing(model: nn.Module, batch: Tensor) -> tuple[str, ...]:
    traced = trace(model, batch, name="model")
    make_reproducible(traced.components, SampleContext(samples=torch.arange(len(batch)), total=len(batch)))
    return draws_note(drawing(traced.components, batch))
