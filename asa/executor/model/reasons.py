"""Properties of a model that make training under any parallel plan differ from training on one device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from asa.sharding.layers.dropout import make_reproducible
from asa.sharding.randomness.generators import drawing, draws_note, mixing_note
from asa.sharding.randomness.samples import SampleContext
from asa.tracing import trace
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
    return (*mixing_note(build().double(), batch, _ROUNDING), *_drawing(build().train(), single))


def _drawing(model: nn.Module, batch: Tensor) -> tuple[str, ...]:
    traced = trace(model, batch, name="model")
    make_reproducible(traced.components, SampleContext(samples=torch.arange(len(batch)), total=len(batch)))
    return draws_note(drawing(traced.components, batch))
