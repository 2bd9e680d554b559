"""Published sizes of GPT-2 and Llama, by the name after the colon. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

_GPT2_VOCABULARY = 50_257
_LLAMA_VOCABULARY = 128_256
_BYTES = 256
"""Vocabulary of the tiny sizes: one token per byte."""


@dataclass(frozen=True, kw_only=True)
class GPT2Shape:
    """Sizes of a GPT-2 (Radford et al. 2019). There are ``heads`` of width ``width / heads``, and a feed-forward
    network of four times ``width``.

    ``tokens`` is the default sequence length, and the published number of positions.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = _GPT2_VOCABULARY
    tokens: int = 1024


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama 3 (Grattafiori et al. 2024). There are ``kv_heads`` keys and values for ``heads`` queries, and a
    gated feed-forward network of ``hidden``.

    With ``tied``, the output weights are those of the embedding. ``tokens`` is the default sequence length.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = _LLAMA_VOCABULARY
    tied: bool = False
    tokens: int = 4096


SHAPES: dict[str, GPT2Shape | LlamaShape] = {
    "gpt2": GPT2Shape(layers=12, width=768, heads=12),
    "gpt2:tiny": GPT2Shape(layers=2, width=64, heads=4, vocabulary=_BYTES, tokens=64),
    "gpt2:medium": GPT2Shape(layers=24, width=1024, heads=16),
    "gpt2:large": GPT2Shape(layers=36, width=1280, heads=20),
    "gpt2:xl": GPT2Shape(layers=48, width=1600, heads=25),
    "llama:tiny": LlamaShape(layers=2, width=64, heads=4, kv_heads=2, hidden=192, vocabulary=_BYTES, tokens=64),
    "llama:1b": LlamaShape(layers=16, width=2048, heads=32, kv_heads=8, hidden=8192, tied=True),
    "llama:3b": LlamaShape(layers=28, width=3072, heads=24, kv_heads=8, hidden=8192, tied=True),
    "llama:8b": LlamaShape(layers=32, width=4096, heads=32, kv_heads=8, hidden=14336),
    "llama:70b": LlamaShape(layers=80, width=8192, heads=64, kv_heads=8, hidden=28672),
    "llama:405b": LlamaShape(layers=126, width=16384, heads=128, kv_heads=8, hidden=53248),
}
"""Sizes by name on the command line."""


def shape_of(spec: str) -> GPT2Shape | LlamaShape | None:
    """Sizes of the language model that ``spec`` names; None for other models."""
    return SHAPES.get(spec)
