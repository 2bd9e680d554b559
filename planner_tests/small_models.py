"""Models small enough to train under every plan in a second, with everything a split can meet in them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

INPUT = (3, 16, 16)


class Block(nn.Module):
    """A bottleneck with a depthwise convolution, squeeze-and-excitation and a skip."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.expand = nn.Conv2d(width, inner, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.depthwise = nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.squeeze = nn.Conv2d(inner, 5, 1)
        self.excite = nn.Conv2d(5, inner, 1)
        self.project = nn.Conv2d(inner, width, 1)
        self.norm3 = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm1(self.expand(x)))
        y = self.act(self.norm2(self.depthwise(y)))
        gate = self.excite(self.act(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        return self.act(self.norm3(self.project(y * gate)) + x)


class Blocks(nn.Module):
    """Stem, three blocks, classifier with dropout."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Block(8, 12), Block(8, 12), Block(8, 12))
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.norm(self.conv(x))))
        return self.fc(self.drop(torch.flatten(self.pool(x), 1)))


def blocks(num_classes: int = 10) -> nn.Module:
    """Convolutions, BatchNorm, a skip, depthwise, squeeze-and-excitation."""
    return Blocks(num_classes)


def plain(num_classes: int = 100, widths: tuple[int, int, int, int] = (6, 7, 30, 20)) -> nn.Module:
    """VGG in small: convolutions with bias, then three linear layers with in-place ReLU and dropout."""
    first, second, third, fourth = widths
    features = nn.Sequential(
        nn.Conv2d(3, first, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
    )  # fmt: skip
    classifier = nn.Sequential(
        nn.Linear(second * 16, third), nn.ReLU(inplace=True), nn.Dropout(0.5),
        nn.Linear(third, fourth), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(fourth, num_classes),
    )  # fmt: skip
    return nn.Sequential(features, nn.Flatten(1), classifier)


def perceptron(num_classes: int = 12) -> nn.Module:
    """Two linear layers: the second's output leaves its component as a partial sum."""
    return nn.Sequential(
        nn.Flatten(1), nn.Sequential(nn.Linear(768, 24), nn.GELU(), nn.Linear(24, 16)), nn.LayerNorm(16),
        nn.Sequential(nn.Linear(16, 20), nn.GELU(), nn.Linear(20, num_classes)),
    )  # fmt: skip


def vision_transformer(num_classes: int = 10, heads: int = 6) -> nn.Module:
    """Two encoder blocks, dropout everywhere, also on attention."""
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        image_size=16, patch_size=8, num_layers=2, num_heads=heads, hidden_dim=24, mlp_dim=40, dropout=0.1,
        attention_dropout=0.2, num_classes=num_classes,
    )  # fmt: skip


class Auxiliary(nn.Module):
    """A side output of its own in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.aux, self.head = nn.Linear(4, 10), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.first(x))
        side = self.aux(x.mean((2, 3))) if self.training else None
        x = self.head(torch.relu(self.second(x)).mean((2, 3)))
        return (x, side) if self.training else x


MODELS = {"blocks": blocks, "plain": plain, "perceptron": perceptron, "vision_transformer": vision_transformer}
CLASSES = {"blocks": 10, "plain": 100, "perceptron": 12, "vision_transformer": 10}
"""Their classes."""
EVEN = {
    "blocks": partial(blocks, 12),
    "plain": partial(plain, 100, (8, 8, 32, 24)),
    "perceptron": perceptron,
    "vision_transformer": partial(vision_transformer, 12, 4),
}
"""The same with every cut divisible by 4."""
EVEN_CLASSES = {"blocks": 12, "plain": 100, "perceptron": 12, "vision_transformer": 12}


def build(name: str, *, even: bool = False) -> nn.Module:
    """The model, with weights that depend on nothing but its name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return (EVEN if even else MODELS)[name]()
