"""A model without its weights, as a template for complete ones."""

from __future__ import annotations

import torch
from torch import nn

from asa.tracing.preserve import with_parameters


class ModelTemplate:
    """A model without its weights, as a template for complete ones."""

    def __init__(self, model: nn.Module) -> None:
        self._model, _ = with_parameters(model, [model], lambda p: p.detach().to("meta"))

    def copy(self) -> nn.Module:
        """A model with small random weights (a trace compares outputs, which must not all be equal)."""
        generator = torch.Generator().manual_seed(0)
        model, _ = with_parameters(
            self._model, [self._model], lambda p: torch.randn(p.shape, generator=generator).mul_(0.02).to(p.dtype)
        )
        return model
