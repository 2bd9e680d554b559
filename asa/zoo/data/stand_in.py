"""The embedded default: synthetic images that can be learned, bitwise equal on every machine.

A class is a smooth colour pattern, half its own and half that of its group (groups of five classes, as in CIFAR-100).
An image shows the pattern of its class shifted, mixed with the pattern of another class, with varying contrast and
brightness, with one block covered, and with noise. All arithmetic is on integers, so rounding is equal on all machines.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asa.zoo.data.draws import integers, key, noise_bytes, permutation, words

VERSION = 1
"""Version, increased whenever the images change, because results of different versions are not comparable."""

_SEED = 2503_23186
_GRID = 6
_SHIFT = 4
_OWN = 96
_NOISE = 72
_CHUNK = 500
_GROUP = 5


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Number and shape of images. Pixels are ``channels`` x ``side`` x ``side``. With ``mirrored``, half of the images
    are mirrored."""

    num_classes: int
    channels: int
    side: int
    num_train: int
    num_test: int
    mirrored: bool


RECIPES = {
    "cifar100": Recipe(num_classes=100, channels=3, side=32, num_train=5000, num_test=1000, mirrored=True),
    "cifar10": Recipe(num_classes=10, channels=3, side=32, num_train=5000, num_test=1000, mirrored=True),
    "mnist": Recipe(num_classes=10, channels=1, side=28, num_train=5000, num_test=1000, mirrored=False),
}


def _smooth(grid: Tensor, side: int) -> Tensor:
    """Bilinear enlargement of integer ``grid`` [..., G, G] to [..., side, side], in 1/256 steps."""
    last = grid.shape[-1] - 1
    position = torch.arange(side) * (last * 256) // (side - 1)
    low = (position // 256).clamp(max=last - 1)
    part = position - low * 256
    across = grid[..., low] * (256 - part) + grid[..., low + 1] * part
    across = across.transpose(-1, -2)
    both = across[..., low] * (256 - part) + across[..., low + 1] * part
    return both.transpose(-1, -2) >> 16


def _patterns(recipe: Recipe) -> Tensor:
    """Patterns of all classes, int64 [classes, channels, S, S] around 0. S is large enough to shift them inside the
    frame."""

    def grids(purpose: int, count: int) -> Tensor:
        cells = recipe.channels * _GRID * _GRID
        random = words(key(_SEED, recipe.num_classes, purpose), torch.arange(count * cells))
        return integers(random, -128, 128, field=1).view(count, recipe.channels, _GRID, _GRID)

    of_class = grids(1, recipe.num_classes)
    of_group = grids(2, -(-recipe.num_classes // _GROUP))[torch.arange(recipe.num_classes) // _GROUP]
    return _smooth((of_class * _OWN + of_group * (256 - _OWN)) >> 7, recipe.side + 2 * _SHIFT)


def _framed(patterns: Tensor, which: Tensor, draw: Tensor, side: int, *, mirror: bool) -> Tensor:
    """Pattern ``which[i]`` in a frame of ``side`` at a position drawn from the word ``place[i]``, with ``mirror`` half
    of them mirrored: [N, channels, side, side]."""
    top, left = (integers(draw, 0, 2 * _SHIFT + 1, field=i) for i in (0, 1))
    mirrored = (integers(draw, 0, 2, field=2) == 1) & mirror
    rows = top[:, None] + torch.arange(side)
    columns = left[:, None] + torch.arange(side)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    channel = torch.arange(patterns.shape[1])[None, :, None, None]
    return patterns[which[:, None, None, None], channel, rows[:, None, :, None], columns[:, None, None, :]]


def _images(recipe: Recipe, patterns: Tensor, labels: Tensor, first: int) -> Tensor:
    """Images from number ``first`` of the whole set on (train, then test), uint8 [N, channels, side, side]."""
    index = torch.arange(first, first + len(labels))
    a, b, c, d = (words(key(_SEED, recipe.num_classes, 10 + i), index) for i in range(4))
    side = recipe.side
    images = _framed(patterns, labels, a, side, mirror=recipe.mirrored)
    other = (labels + integers(c, 1, recipe.num_classes, field=3)) % recipe.num_classes
    second = _framed(patterns, other, b, side, mirror=recipe.mirrored)
    share = integers(d, 24, 116, field=0)[:, None, None, None]
    images = (images * (256 - share) + second * share) >> 8
    contrast = integers(d, 64, 192, field=1)[:, None, None, None]
    brightness = integers(d, -40, 41, field=2)[:, None, None, None]
    images = ((images * contrast) >> 8) + 128 + brightness
    ruler = torch.arange(side)
    size = integers(c, side // 8, side // 3, field=2)[:, None]
    within = [
        (ruler >= corner[:, None]) & (ruler < corner[:, None] + size)
        for corner in (integers(c, 0, side, field=0), integers(c, 0, side, field=1))
    ]
    covered = (within[0][:, :, None] & within[1][:, None, :])[:, None]
    images = torch.where(covered, 128, images)
    count = images.numel()
    # The sum of four bytes is close to normal, of mean 510 and standard deviation 148.
    noise = noise_bytes(key(_SEED, recipe.num_classes, 20), 4 * first * images[0].numel(), 4 * count)
    noise = noise.view(*images.shape, 4).sum(dim=-1, dtype=torch.int64) - 510
    return (images + ((noise * _NOISE) >> 8)).clamp_(0, 255).to(torch.uint8)


def generate(recipe: Recipe) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(train, test), each images (uint8 [N, C, side, side]) and labels (int64 [N]). All classes are equally
    frequent."""
    patterns = _patterns(recipe)
    splits = []
    first = 0
    for purpose, count in ((3, recipe.num_train), (4, recipe.num_test)):
        labels = permutation(key(_SEED, recipe.num_classes, purpose), count) % recipe.num_classes
        parts = [_images(recipe, patterns, part, first + i * _CHUNK) for i, part in enumerate(labels.split(_CHUNK))]
        splits.append((torch.cat(parts), labels))
        first += count
    return splits[0], splits[1]
