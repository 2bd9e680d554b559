"""Text as model input: bytes for models of tokens, a row of hashed features per word for models of images.

Neither needs a vocabulary that would have to be stored with the model. In bytes, 0 is padding, and 1 to 255 are UTF-8.
Feature hashing is that of Weinberger et al. 2009.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from asa.errors import UsageError
from asa.zoo.data.draws import integers, key, words
from asa.zoo.data.official import Split
from asa.zoo.inputs import Shape, described, of_tokens

_WORD = re.compile(r"\w+|[!?]")
_NONZERO = 4
"""Number of nonzero features of a word."""

_NOUNS = ("plot", "acting", "music", "story", "camera", "ending", "dialogue", "pace", "cast", "script")
_GOOD = ("good", "great", "moving", "clever", "lovely", "bright", "strong", "funny", "fresh", "superb")
_BAD = ("bad", "poor", "dull", "clumsy", "awful", "flat", "weak", "boring", "stale", "tedious")
_BEFORE = ("", "", "very", "rather", "quite", "really")
_SEED, _VERSION = 2503_23186, 1
_SAMPLES = {"train": 2000, "test": 400}


def encoded(texts: Sequence[str], shape: Shape, named: str) -> Tensor:
    """Texts cut or padded to ``shape``. (T,) gives int64 bytes [N, T]. (C, H, W) gives float features [N, C, H, W] of
    the last H words, with the last word in the last row. ``named`` says in errors what the texts are.

    Raises:
        UsageError: the model reads one row of numbers, so it would see only the last word.
    """
    if not of_tokens(shape) and shape[1] == 1:
        raise UsageError(
            f"{named} is text, the model takes {described(shape)}; profile a model of text with --input 1x32x64 (32 "
            f"words of 64 features), or give it a table of {described(shape)}"
        )
    if of_tokens(shape):
        tokens = torch.zeros(len(texts), shape[0], dtype=torch.int64)
        for i, text in enumerate(texts):
            data = text.encode("utf-8", "replace")[: shape[0]]
            tokens[i, : len(data)] = torch.tensor(list(data), dtype=torch.int64)
        return tokens
    channels, height, width = shape
    rows: dict[str, Tensor] = {"": torch.zeros(channels * width)}
    features = torch.zeros(len(texts), height, channels * width)
    for i, text in enumerate(texts):
        for offset, word in enumerate(reversed(_WORD.findall(text.lower())[-height:]), 1):
            if word not in rows:
                rows[word] = _features(word, channels * width)
            features[i, height - offset] = rows[word]
    return features.view(len(texts), height, channels, width).movedim(2, 1).contiguous()


def cut(texts: Sequence[str], shape: Shape) -> str:
    """Text on how many of ``texts`` :func:`encoded` cuts to ``shape`` or finds empty: it begins with a semicolon, or is
    empty if there are none."""
    lengths = [len(t.encode("utf-8", "replace")) if of_tokens(shape) else len(_WORD.findall(t)) for t in texts]
    most, unit = (shape[0], "bytes, of which the first") if of_tokens(shape) else (shape[1], "words, of which the last")
    longer, empty = sum(n > most for n in lengths), lengths.count(0)
    changes = f"; {longer} of {len(texts)} texts are longer than {most} {unit} are read" if longer else ""
    return changes + (f"; {empty} of {len(texts)} texts are empty" if empty else "")


def _features(word: str, count: int) -> Tensor:
    """Features of a word: a few, selected by its hash, are 1 or -1."""
    features = torch.zeros(count)
    for i in range(_NONZERO):
        number = int.from_bytes(blake2b(f"{i}{word}".encode(), digest_size=8).digest(), "big")
        features[number % count] += 1.0 if number >> 63 else -1.0
    return features


def reviews(split: Split) -> tuple[list[str], Tensor]:
    """Synthetic reviews, and whether each is favourable: int64 [N] of 0 and 1.

    Two things are praised or not, perhaps with a "not" before one of them. The last statement determines the class.
    """
    first = 0 if split == "train" else _SAMPLES["train"]
    rows = torch.arange(first, first + _SAMPLES[split])
    draws = [words(key(_SEED, _VERSION, 7 + i), rows) for i in range(4)]

    def draw(which: int, below: int, field: int) -> list[int]:
        return integers(draws[which], 0, below, field=field).tolist()

    def opinion(which: int) -> list[tuple[str, bool]]:
        good, negated = draw(which, 2, 0), draw(which, 4, 1)
        noun, adjective, before = draw(which, 10, 2), draw(which, 10, 3), draw(which + 1, 6, which)
        return [
            (
                " ".join(
                    w for w in ("the", _NOUNS[n], "is", "" if no else "not", _BEFORE[b], (_GOOD if g else _BAD)[a]) if w
                ),
                bool(g) == bool(no),
            )
            for g, no, n, a, b in zip(good, negated, noun, adjective, before, strict=True)
        ]

    pairs = [(f"{one}, but {other}.", last) for (one, _), (other, last) in zip(opinion(0), opinion(2), strict=True)]
    return [text for text, _ in pairs], torch.tensor([int(favourable) for _, favourable in pairs])
