"""A BERT-like encoder that reads an image's colours as tokens. Its output weights are those of its embedding.

After Devlin et al. 2018: tokens, learned positions, post-norm encoder layers, and a decoder that shares the embedding's
weight. The vocabulary is the classes, then 8 levels of each colour channel. The output at the first token is the class.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WIDTH, _HEADS, _LAYERS = 128, 4, 4
_SIDE = 4
"""Images are averaged down to this many pixels per side: 16 tokens per channel."""
_LEVELS = 8


class Layer(nn.Module):
    """Attention and a feed-forward network, each with a residual connection and a norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(_WIDTH, _HEADS, dropout=0.1, batch_first=True)
        self.norm1 = nn.LayerNorm(_WIDTH)
        self.feedforward = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))
        self.dropout = nn.Dropout(0.1)
        self.norm2 = nn.LayerNorm(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Output in the shape of ``x`` [N, tokens, width]."""
        attended, _ = self.attention(x, x, x, need_weights=False)
        x = self.norm1(x + self.dropout(attended))
        return self.norm2(x + self.dropout(self.feedforward(x)))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """An encoder, and a decoder that shares the weight of the embedding."""

    def __init__(self, num_classes: int, channels: int) -> None:
        super().__init__()
        self.num_classes, self.channels = num_classes, channels
        vocabulary = num_classes + 1 + channels * _LEVELS
        self.tokens = nn.Embedding(vocabulary, _WIDTH)
        self.positions = nn.Parameter(torch.randn(1 + channels * _SIDE * _SIDE, _WIDTH) * 0.02)
        self.norm = nn.LayerNorm(_WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(_LAYERS))
        self.transform = nn.Linear(_WIDTH, _WIDTH)
        self.decoder = nn.Linear(_WIDTH, vocabulary)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.decoder.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits for images [N, C, H, W]."""
        levels = (F.adaptive_avg_pool2d(x, _SIDE).sigmoid() * _LEVELS).long().clamp(max=_LEVELS - 1)
        offsets = torch.arange(self.channels, device=x.device).view(1, -1, 1, 1) * _LEVELS
        tokens = (levels + offsets).flatten(1) + self.num_classes + 1
        tokens = F.pad(tokens, (1, 0), value=self.num_classes)
        hidden = self.norm(self.tokens(tokens) + self.positions)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.decoder(F.gelu(self.transform(hidden[:, 0])))[:, : self.num_classes]  # type: ignore[no-any-return]


def bert(*, num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """A model of four encoder layers with width 128 over 16 tokens per channel, its decoder tied to the embedding."""
    return Bert(num_classes, input_shape[0])
