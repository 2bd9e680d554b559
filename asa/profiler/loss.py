"""A component or model followed by the loss of tokens. For models with logits for each token, the loss takes a
considerable part of the step's time and memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def of_each_token(output: Tensor, x: Tensor) -> bool:
    """Whether ``output`` contains logits [N, T, words] for the tokens ``x`` int64 [N, T]."""
    return not x.is_floating_point() and output.dim() == 3 and output.shape[:2] == x.shape


class WithLoss(nn.Module):
    """Returns the cross-entropy instead of the logits."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The loss against arbitrary tokens, and the side outputs."""
        outputs = self.module(x)
        logits, *sides = outputs if isinstance(outputs, tuple) else (outputs,)
        rows = logits.flatten(0, 1)
        targets = torch.arange(len(rows), device=rows.device) % rows.shape[-1]
        return (F.cross_entropy(rows, targets), *sides)
