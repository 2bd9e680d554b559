"""Makes model inputs from sample indices: gathers, augments and normalizes on the requested device."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from asa.zoo.data.draws import integers, key, words
from asa.zoo.data.images import ImageSet, convert
from asa.zoo.inputs import of_tokens

_AUGMENT = 2

MARGIN = 8
"""Divisor of an image's side for the largest shift: 4 of CIFAR's 32 pixels, the usual crop with padding 4."""


def augment(pixels: Tensor, indices: Tensor, *, seed: int, epoch: int, flips: bool) -> Tensor:
    """Shift each image by its own random offset, with black borders, and mirror it at random (with ``flips``).

    ``pixels`` [B, C, H, W] and ``indices`` int64 [B] (global) are on one device. Offset and mirroring depend only on
    (seed, epoch, global index), so any rank that reads a sample, with any others, gets the same image.
    """
    count, channels, height, width = pixels.shape
    random = words(key(seed, epoch, _AUGMENT), indices)
    down = integers(random, -(height // MARGIN), height // MARGIN + 1, field=0)[:, None]
    right = integers(random, -(width // MARGIN), width // MARGIN + 1, field=1)[:, None]
    rows = torch.arange(height, device=pixels.device) + down
    columns = torch.arange(width, device=pixels.device) + right
    if flips:
        mirrored = integers(random, 0, 2, field=2)[:, None].bool()
        columns = torch.where(mirrored, columns.flip(1), columns)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    flat = source.view(count, 1, height * width).expand(-1, channels, -1)
    moved = pixels.flatten(2).gather(2, flat).view_as(pixels)
    return moved.mul_(inside[:, None])


def fetch(
    images: ImageSet,
    indices: Tensor,
    *,
    train: bool,
    seed: int,
    epoch: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    gathered: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(x, y): samples of ``images`` by global index. x is ``dtype`` [B, *images.shape], normalized; y is int64 [B];
    both are on ``device``.

    B may be 0, for a rank without rows. Images are augmented with ``train`` (see :func:`augment`). Tokens, int64 [B,
    T], are unchanged, with labels of that shape. A set that is on ``device`` never leaves it; otherwise its bytes are
    gathered on their own device, and everything else happens on ``device``. ``gathered`` are those bytes and labels, if
    they were gathered before.
    """
    if gathered is None:
        index = indices.to(images.images.device)
        gathered = images.images[index], images.labels[index]
    pixels, labels = (t.to(device, non_blocking=True) for t in gathered)
    del gathered  # a quarter of the size of the result
    if of_tokens(images.shape):
        return pixels, labels
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    if pixels.is_floating_point():  # a table, or already prepared by the user's dataset
        return pixels.to(exact).to(dtype), labels
    if train:
        moved = partial(augment, indices=indices.to(pixels.device), seed=seed, epoch=epoch, flips=images.flips)
        if labels.dim() == 3 and labels.shape[1:] == pixels.shape[2:]:  # one class per pixel: move it along
            labels = moved(labels[:, None])[:, 0]
        pixels = moved(pixels)
    # Half precision rounds 1/255 and the mean too much: normalize first, and round once.
    x = convert(pixels.to(exact).div_(255), images.shape)
    mean, std = (torch.tensor(v, dtype=exact, device=x.device)[:, None, None] for v in (images.mean, images.std))
    shifted = (
        x.sub_(mean) if x.is_contiguous() else x - mean
    )  # a grey image may be an expanded view with three channels
    del x
    return shifted.div_(std).to(dtype), labels
