"""A model without its weights, as a template for complete ones."""

from __future__ import annotations

import copy

import torch
from torch import nn

from asa.tracing import histories


class ModelTemplate:
    """A model without its weights, as a template for complete ones."""

    def __init__(self, model: nn.Module) -> None:
        empty = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
        self._model = copy.deepcopy(model, {**histories(model), **empty})

    def copy(self) -> nn.Module:
        """A model with small random weights (a trace compares outputs, which must not all be equal)."""
        generator = torch.Generator().manual_seed(0)
        weights = {
            id(p): nn.Parameter(torch.randn(p.shape, generator=generator).mul_(0.02).to(p.dtype), p.requires_grad)
            for p in self._model.parameters()
        }
        return copy.deepcopy(self._model, {**histories(self._model), **weights})
