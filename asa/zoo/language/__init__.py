"""Language models by configuration: they read tokens [N, T] (int64) and return logits [N, T, vocabulary]."""

from __future__ import annotations

from asa.zoo.language.gpt2 import GPT2
from asa.zoo.language.llama import Llama
from asa.zoo.sizes import GPT2Shape, LlamaShape


def language_model(shape: GPT2Shape | LlamaShape, *, vocabulary: int, tokens: int) -> GPT2 | Llama:
    """A model of that shape with fresh weights, for sequences of up to ``tokens`` tokens."""
    if isinstance(shape, GPT2Shape):
        return GPT2(shape, vocabulary=vocabulary, tokens=tokens)
    return Llama(shape, vocabulary=vocabulary, tokens=tokens)
