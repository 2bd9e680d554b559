"""Llama 3 (Grattafiori et al. 2024): RMSNorm before each part, rotary positions, grouped queries, gated
feed-forward."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from asa.zoo.language.attention import CausalAttention
from asa.zoo.sizes import LlamaShape

_STD = 0.02
_EPSILON = 1e-5


class Block(nn.Module):
    """Attention, then a gated feed-forward network, each with a residual connection."""

    def __init__(self, shape: LlamaShape, tokens: int) -> None:
        super().__init__()
        width, head = shape.width, shape.width // shape.heads

        def linear(inputs: int, outputs: int, std: float = _STD) -> nn.Linear:
            layer = nn.Linear(inputs, outputs, bias=False)
            nn.init.normal_(layer.weight, std=std)
            return layer

        scale = _STD / math.sqrt(2 * shape.layers)
        self.norm1 = nn.RMSNorm(width, eps=_EPSILON)
        self.query = linear(width, width)
        self.key, self.value = linear(width, shape.kv_heads * head), linear(width, shape.kv_heads * head)
        self.attention = CausalAttention(kv_heads=shape.kv_heads, head_width=head, tokens=tokens, rotary=True)
        self.projection = linear(width, width, scale)
        self.norm2 = nn.RMSNorm(width, eps=_EPSILON)
        self.gate, self.up = linear(width, shape.hidden), linear(width, shape.hidden)
        self.down = linear(shape.hidden, width, scale)

    def forward(self, x: Tensor) -> Tensor:
        """Output in the shape of ``x`` [N, T, width]."""
        y = self.norm1(x)
        x = x + self.projection(self.attention(self.query(y), self.key(y), self.value(y)))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Model from tokens [N, T] to logits [N, T, vocabulary]."""

    def __init__(self, shape: LlamaShape, *, vocabulary: int, tokens: int) -> None:
        """``tokens`` is the length of the longest sequence."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=_STD)
        self.blocks = nn.ModuleList(Block(shape, tokens) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=_EPSILON)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        else:
            nn.init.normal_(self.head.weight, std=_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [N, T, vocabulary] for ``tokens`` int64 [N, T]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]
