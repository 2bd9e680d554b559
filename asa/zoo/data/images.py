"""A data set in memory, and the conversion of its images to the model's input shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from asa.errors import UsageError
from asa.zoo.inputs import Shape, of_tokens

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey: ITU-R BT.601."""

EAGER_BYTES = 256 * 1024**2
"""Size up to which a whole set is converted at once. A larger one keeps its shape and is converted batch by batch."""

_CHUNK = 1024
_SAMPLED_BYTES = 16 * 1024**2
"""Most bytes of images in a hash of some of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSet:
    """Images and labels of one split.

    Attributes:
        images: uint8 [N, C, H, W]; floating if samples are not images, which are used unchanged, neither augmented nor
            scaled to 0..1.
        labels: int64 [N], below ``num_classes``.
        shape: the (C, H, W) that :func:`asa.zoo.data.fetch` returns. ``images`` has it too, unless the converted set
            would be too large.
        mean, std: per channel of ``shape``, for pixels scaled to 0..1.
        flips: whether a mirrored image still has its class.
        source: one sentence on what was read.
    """

    images: Tensor
    labels: Tensor
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    source: str
    shape: Shape
    flips: bool = True

    def __len__(self) -> int:
        return self.images.shape[0]

    def digest(self) -> str:
        """A hash of all samples, equal for equal samples in any process."""
        return _hash(self.images, self.labels)

    def sampled_digest(self) -> str:
        """A hash of all labels and of some images, quick for any number of them. Floating samples, which another
        machine may round in another way, do not count."""
        if self.images.is_floating_point() or not len(self):
            return _hash(self.labels)
        most = max(1, _SAMPLED_BYTES // max(1, self.images[0].nbytes))
        return _hash(self.images[:: -(-len(self) // most)], self.labels)

    def to(self, device: torch.device | str) -> ImageSet:
        """A copy on ``device``, where ``fetch`` then gathers and augments."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def part(self, start: int, stop: int) -> ImageSet:
        """Its samples from ``start`` to before ``stop``, not copied."""
        return replace(self, images=self.images[start:stop], labels=self.labels[start:stop])


def _hash(*tensors: Tensor) -> str:
    total = blake2b(digest_size=16)
    for tensor in tensors:
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        for part in tensor.split(_CHUNK):
            total.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()


def _channels(pixels: Tensor, channels: int) -> Tensor:
    have = pixels.shape[1]
    if have == channels:
        return pixels
    if have == 1:
        return pixels.expand(-1, channels, -1, -1)
    red, green, blue = (pixels[:, i : i + 1] * LUMA[i] for i in range(3))
    return red + green + blue


def convert(pixels: Tensor, shape: Shape) -> Tensor:
    """Floating pixels [N, C, H, W] as [N, *shape]. Grey is repeated, colours are weighted to grey; resizing is bilinear
    and antialiased."""
    pixels = _channels(pixels, shape[0])
    if tuple(pixels.shape[2:]) == shape[1:]:
        return pixels
    if pixels.shape[0] == 0:
        return pixels.new_empty(0, *shape)
    return interpolate(pixels, size=shape[1:], mode="bilinear", antialias=True, align_corners=False)


def converted(images: Tensor, shape: Shape) -> Tensor:
    """Pixels uint8 [N, C, H, W] as uint8 [N, *shape], as :func:`convert` converts them."""
    result = torch.empty(images.shape[0], *shape, dtype=torch.uint8)
    for start in range(0, images.shape[0], _CHUNK):
        part = convert(images[start : start + _CHUNK].float(), shape)
        result[start : start + _CHUNK] = part.round().clamp_(0, 255).to(torch.uint8)  # may be an expanded view
    return result


def reshaped(images: ImageSet, shape: Shape | None) -> ImageSet:
    """The set for models with input ``shape`` (C, H, W). A sentence in ``source`` says what was done.

    Raises:
        UsageError: no rule converts the images' channels to those of ``shape``.
    """
    if shape is None or tuple(shape) == images.shape:
        return images
    if of_tokens(shape):
        raise UsageError(f"{images.name} has images, the model reads tokens; train it on --data synthetic")
    channels, model_channels = images.shape[0], shape[0]
    if min(shape) < 1:
        raise UsageError(f"images of shape {shape} were asked for; channels, height and width are at least 1")
    if channels not in (1, model_channels) and model_channels != 1:
        raise UsageError(
            f"{images.name} has {channels} channels, the model takes {model_channels}; "
            f"try --input {channels}x{shape[1]}x{shape[2]}"
        )
    steps: list[str] = []
    mean, std = images.mean, images.std
    if channels == 1 < model_channels:
        steps.append(f"grey repeated over {model_channels} channels")
        mean, std = mean * model_channels, std * model_channels
    elif channels > model_channels:
        steps.append("colours weighted to grey")
        # Channels of photographs are correlated, so standard deviations add up like the values.
        mean, std = ((sum(w * v for w, v in zip(LUMA, values, strict=True)),) for values in (mean, std))
    if images.shape[1:] != shape[1:]:
        steps.append(f"resized from {images.shape[1]}x{images.shape[2]} to {shape[1]}x{shape[2]}")
    pixels = images.images
    if len(images) * prod(shape) <= EAGER_BYTES:
        pixels = converted(pixels, shape)
    source = f"{images.source} Images: {', '.join(steps)}."
    return replace(images, images=pixels, shape=shape, mean=mean, std=std, source=source)
