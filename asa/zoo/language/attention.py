"""The core of causal self-attention between the projections, without weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BASE = 500_000.0
"""Base of rotary frequencies, as in Llama 3."""


class CausalAttention(nn.Module):
    """Causal attention from queries, keys and values [N, T, heads x width of a head] to an output in the shape of the
    queries.

    The number of heads follows from the inputs, so that one module can also compute a share of the heads; ``kv_heads``
    groups of them are independent. With ``rotary``, queries and keys are rotated by position (Su et al. 2021), for up
    to ``tokens`` positions.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, *, kv_heads: int, head_width: int, tokens: int, rotary: bool) -> None:
        super().__init__()
        self.kv_heads, self.head_width, self.rotary = kv_heads, head_width, rotary
        if rotary:
            frequencies = _BASE ** -(torch.arange(0, head_width, 2).float() / head_width)
            angles = torch.outer(torch.arange(tokens).float(), frequencies).repeat(1, 2)
            self.register_buffer("cosines", angles.cos(), persistent=False)
            self.register_buffer("sines", angles.sin(), persistent=False)

    @property
    def independent_groups(self) -> int:
        """Number of groups of heads that share keys and values; each rank can have some of them."""
        return self.kv_heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Output [N, T, width of ``query``]."""
        query, key, value = (x.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for x in (query, key, value))
        if self.rotary:
            query, key = self._turned(query), self._turned(key)
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return mixed.transpose(1, 2).flatten(-2)

    def _turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        length = x.shape[-2]
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cosines[:length].to(x.dtype) + turned * self.sines[:length].to(x.dtype)

    def extra_repr(self) -> str:
        """Text of the sizes."""
        return f"kv_heads={self.kv_heads}, head_width={self.head_width}, rotary={self.rotary}"
