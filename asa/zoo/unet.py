"""A small U-Net, with skip connections from every level of the encoder to the same level of the decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WIDTHS = (16, 32, 64)


def _level(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """U-Net of Ronneberger et al. 2015, with padding and BatchNorm."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        before = (channels, *_WIDTHS[:-1])
        self.down = nn.ModuleList(_level(a, b) for a, b in zip(before, _WIDTHS, strict=True))
        self.bottom = _level(_WIDTHS[-1], 2 * _WIDTHS[-1])
        above = (2 * _WIDTHS[-1], *_WIDTHS[:0:-1])
        self.up = nn.ModuleList(_level(a + b, b) for a, b in zip(above, _WIDTHS[::-1], strict=True))
        self.classifier = nn.Conv2d(_WIDTHS[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, classes, H, W] for every pixel of ``x`` [N, C, H, W]."""
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.max_pool2d(x, 2, ceil_mode=True)
        x = self.bottom(x)
        for level, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(x, size=skip.shape[2:], mode="nearest")
            x = level(torch.cat([x, skip], 1))
        return self.classifier(x)  # type: ignore[no-any-return]


def unet(*, num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """A U-Net with three levels of 16, 32 and 64 channels; labels are maps [N, H, W]."""
    return UNet(input_shape[0], num_classes)
