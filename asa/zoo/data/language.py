"""A synthetic language that can be learned, bitwise equal on every machine: tokens, and the next token for each.

Every token has four possible successors. In seven of eight cases the token three places before determines which one it
is; otherwise it is any of the four. A model that uses only the last token is right in less than half of the cases. One
that also attends to the other is right in about nine of ten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asa.zoo.data.draws import integers, key, words
from asa.zoo.data.images import ImageSet
from asa.zoo.data.official import Split

VERSION = 1
"""Version, increased whenever the language changes, because results of different versions are not comparable."""
VOCABULARY = 64
_SEED = 2503_23186
_CHOICES = 4
_MOST_TOKENS = 2**21
_SAMPLES = {"train": 2000, "test": 400}
_LEAST_SAMPLES = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSet(ImageSet):
    """Sequences of tokens of one split, with the next token for each token.

    ``images`` int64 [N, T], the tokens; ``labels`` int64 [N, T], below ``num_classes``; ``shape`` is (T,). Nothing is
    normalized or augmented.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    flips: bool = False


def _sequences(first: int, count: int, length: int) -> Tensor:
    """Sequences ``first`` to ``first + count - 1`` of the language: int64 [count, length]."""
    pairs = torch.arange(VOCABULARY * _CHOICES)
    follows = integers(words(key(_SEED, VERSION, 1), pairs), 0, VOCABULARY, field=0).view(VOCABULARY, _CHOICES)
    rows = torch.arange(first, first + count)
    begin = words(key(_SEED, VERSION, 2), rows)
    tokens = torch.empty(count, length, dtype=torch.int64)
    recent = [integers(begin, 0, VOCABULARY, field=i) for i in range(4)]
    for position in range(length):
        draw = words(key(_SEED, VERSION, 3, position), rows)
        free = integers(draw, 0, 8, field=0) == 0
        choice = torch.where(free, integers(draw, 0, _CHOICES, field=1), recent[0] % _CHOICES)
        recent = [*recent[1:], follows[recent[-1], choice]]
        tokens[:, position] = recent[-1]
    return tokens


def language(split: Split, length: int) -> TokenSet:
    """One split of the language, in sequences of ``length`` tokens. There are fewer of them if they are long."""
    counts = {s: max(_LEAST_SAMPLES, min(n, _MOST_TOKENS // length)) for s, n in _SAMPLES.items()}
    first = 0 if split == "train" else counts["train"]
    sequences = _sequences(first, counts[split], length + 1)
    return TokenSet(
        images=sequences[:, :-1].contiguous(),
        labels=sequences[:, 1:].contiguous(),
        num_classes=VOCABULARY,
        name="synthetic",
        source=(
            f"A made-up language of {VOCABULARY} tokens, {split}: {counts[split]} sequences of {length}; it can be "
            "learned, but says nothing about any text."
        ),
        shape=(length,),
    )


def scattered(shape: tuple[int, ...], samples: int, num_classes: int, draw: torch.Generator) -> TokenSet:
    """Random tokens without structure."""
    tokens = torch.randint(0, num_classes, (samples, *shape), generator=draw)
    return TokenSet(
        images=tokens, labels=tokens.roll(-1, 1), num_classes=num_classes, name="noise", source="random tokens",
        shape=shape,
    )  # fmt: skip
