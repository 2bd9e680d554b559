"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each part, output weights tied to the embedding.

There is no dropout, as in today's training. Query, key and value are three layers rather than one, which is the same
computation with the same number of parameters.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asa.zoo.language.attention import CausalAttention
from asa.zoo.sizes import GPT2Shape

_STD = 0.02


class Block(nn.Module):
    """Attention, then a feed-forward network, each with a residual connection."""

    def __init__(self, shape: GPT2Shape, tokens: int) -> None:
        super().__init__()
        width, scale = shape.width, _STD / math.sqrt(2 * shape.layers)
        self.norm1 = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.attention = CausalAttention(
            kv_heads=shape.heads, head_width=width // shape.heads, tokens=tokens, rotary=False
        )
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for linear in (self.query, self.key, self.value, self.up, self.projection, self.down):
            nn.init.normal_(linear.weight, std=scale if linear in (self.projection, self.down) else _STD)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Output in the shape of ``x`` [N, T, width]."""
        y = self.norm1(x)
        x = x + self.projection(self.attention(self.query(y), self.key(y), self.value(y)))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """Embedding of tokens and of their positions."""

    def __init__(self, vocabulary: int, width: int, tokens: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        nn.init.normal_(self.tokens.weight, std=_STD)
        nn.init.normal_(self.positions.weight, std=_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings [N, T, width] of ``tokens`` int64 [N, T]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(positions)  # type: ignore[no-any-return]


class GPT2(nn.Module):
    """Model from tokens [N, T] to logits [N, T, vocabulary]."""

    def __init__(self, shape: GPT2Shape, *, vocabulary: int, tokens: int) -> None:
        """``tokens`` is the length of the longest sequence. There are at least 1,024 positions, as in published
        models."""
        super().__init__()
        self.embedding = Embedding(vocabulary, shape.width, max(tokens, shape.tokens))
        self.blocks = nn.ModuleList(Block(shape, tokens) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)
        self.head.weight = self.embedding.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [N, T, vocabulary] for ``tokens`` int64 [N, T]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]
