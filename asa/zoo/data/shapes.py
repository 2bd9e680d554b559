"""Synthetic scenes for segmentation: squares, discs and crosses with noise, and the class of every pixel."""

from __future__ import annotations

import torch
from torch import Tensor

from asa.zoo.data.draws import integers, key, noise_bytes, words
from asa.zoo.data.official import Split
from asa.zoo.inputs import Shape

CLASSES = 4
"""Number of classes: background, square, disc, cross."""
_SEED, _VERSION = 2503_23186, 1
_SAMPLES = {"train": 1000, "test": 200}
_MOST_PIXELS = 2**26
_LEAST_SAMPLES = 32
_OBJECTS = 3


def scenes(split: Split, shape: Shape) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, C, H, W] and the class of every pixel, int64 [N, H, W]. There are fewer of them if they are
    large."""
    channels, height, width = shape
    most = _MOST_PIXELS // (channels * height * width)
    counts = {s: max(_LEAST_SAMPLES, min(n, most)) for s, n in _SAMPLES.items()}
    first = 0 if split == "train" else counts["train"]
    rows = torch.arange(first, first + counts[split])
    down, right = torch.arange(height)[None, :, None], torch.arange(width)[None, None, :]
    labels = torch.zeros(len(rows), height, width, dtype=torch.int64)
    bright = torch.full((len(rows), channels, height, width), 64, dtype=torch.int64)
    for number in range(_OBJECTS):
        at, look = (words(key(_SEED, _VERSION, 2 * number + i), rows)[:, None, None] for i in (11, 12))
        kind = integers(look, 0, CLASSES, field=0)  # 0: nothing
        size = integers(look, max(1, min(height, width) // 8), max(2, min(height, width) // 4) + 1, field=1)
        y, x = (down - integers(at, 0, height, field=0)).abs(), (right - integers(at, 0, width, field=1)).abs()
        square = (y <= size) & (x <= size)
        disc = y * y + x * x <= size * size
        cross = square & ((y <= size // 3) | (x <= size // 3))
        inside = torch.where(kind == 1, square, torch.where(kind == 2, disc, cross)) & (kind > 0)
        labels = torch.where(inside, kind, labels)
        for channel in range(channels):
            colour = integers(words(key(_SEED, _VERSION, 20, number, channel), rows), 128, 256, field=0)[:, None, None]
            bright[:, channel] = torch.where(inside, colour, bright[:, channel])
    noise = noise_bytes(key(_SEED, _VERSION, 30), first * bright[0].numel(), bright.numel()).view_as(bright)
    return (bright + (noise.long() - 128) // 3).clamp_(0, 255).to(torch.uint8), labels
