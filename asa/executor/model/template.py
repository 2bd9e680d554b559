"""A traced model without its weights, from which parts of further plans are built without tracing again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from asa.executor.model.modes import Modes
from asa.tracing import TracedModel
from asa.tracing.preserve import with_parameters


@dataclass(frozen=True, kw_only=True)
class TracedTemplate:
    """A traced model whose parameters are on the meta device, and what is known of the model's own code.

    Attributes:
        drawing: components that draw random numbers in training, with the functions that they use.
        changed: types of the buffers that training changes, by name.
    """

    traced: TracedModel
    modes: Modes = field(default_factory=Modes)
    drawing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    changed: Mapping[str, torch.dtype] = field(default_factory=dict)

    def copy(self) -> TracedModel:
        """A new traced model on the CPU whose parameters are uninitialized, with the strides of the template's. Buffers
        have the values of the template."""
        return copied(self.traced, lambda p: torch.empty_like(p, device="cpu"))


def without_weights(traced: TracedModel) -> TracedModel:
    """A copy of ``traced`` with parameters on the meta device. Raises whatever the model's modules raise if they cannot
    be copied."""
    return copied(traced, lambda p: torch.empty_like(p, device="meta"))


def copied(traced: TracedModel, make: Callable[[nn.Parameter], Tensor]) -> TracedModel:
    """A copy of ``traced`` with ``make(p)`` in place of each parameter p. Raises whatever the model's modules raise if
    they cannot be copied."""
    made, new = with_parameters(traced, traced.components, make)
    for before, after in zip(traced.components, made.components, strict=True):
        after.ties = frozenset(id(new[tensor]) for tensor in before.ties)
    return made
