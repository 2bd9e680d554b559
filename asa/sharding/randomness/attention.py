"""Attention with dropout that is a function of the sample. It is used where attention does not split by heads, or is
inside one of torch's own layers (``nn.TransformerEncoderLayer``)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asa.sharding.randomness.samples import SampleDropout


def with_masks_by_sample(module: nn.MultiheadAttention, dropout: SampleDropout) -> bool:
    """Make ``module`` apply ``dropout`` to its attention weights in training from now on.

    Returns False if that is impossible: keys have another width than queries, or there are learned or zero keys.
    """
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        return False
    module.__dict__["forward"] = BySample(module, dropout)
    return True


class BySample:
    """Replaces the module's ``forward``."""

    def __init__(self, module: nn.MultiheadAttention, dropout: SampleDropout) -> None:
        self._module, self._dropout = module, dropout

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Output and attention weights, like the stock module."""
        m = self._module
        if not m.training or query.dim() != 3:
            options: dict[str, Any] = {"average_attn_weights": average_attn_weights, "is_causal": is_causal}
            options |= {"key_padding_mask": key_padding_mask, "need_weights": need_weights, "attn_mask": attn_mask}
            return nn.MultiheadAttention.forward(m, query, key, value, **options)
        if not m.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        weights = self._weights(query, key, attn_mask, key_padding_mask)
        n, length, width = query.shape
        mixed = weights @ self._heads(value, 2)
        y = m.out_proj(mixed.transpose(1, 2).reshape(n, length, width))
        shown = (weights.mean(1) if average_attn_weights else weights) if need_weights else None
        return (y if m.batch_first else y.transpose(0, 1)), shown

    def _heads(self, x: Tensor, which: int) -> Tensor:
        """Queries, keys or values (0, 1, 2) of ``x``: [samples, heads, length, width of a head]."""
        m = self._module
        weight = m.in_proj_weight.chunk(3)[which]
        bias = None if m.in_proj_bias is None else m.in_proj_bias.chunk(3)[which]
        return F.linear(x, weight, bias).view(len(x), -1, m.num_heads, m.head_dim).transpose(1, 2)

    def _weights(self, query: Tensor, key: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor:
        scores = self._heads(query, 0) @ self._heads(key, 1).transpose(-2, -1) / math.sqrt(self._module.head_dim)
        if mask is not None:
            scores = _masked(scores, mask if mask.dim() == 2 else mask.view(scores.shape))
        if padding is not None:
            scores = _masked(scores, padding[:, None, None, :])
        return self._dropout(torch.softmax(scores, dim=-1))


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
