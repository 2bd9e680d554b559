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


class Speeds(nn.Module):
    """Angles of positions, from a buffer that is not saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("inverse", 10.0 ** -torch.linspace(0, 2, width // 2), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None].to(x.dtype) * self.inverse.to(x.dtype)
        return torch.cat((angles, angles), -1)


class Rotated(nn.Module):
    """Attention that reads tables of the model: rotations, a mask, slopes, and the index of its own biases."""

    def __init__(self, width: int, heads: int, biases: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.biases = nn.Parameter(torch.linspace(-1, 1, biases))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, slopes: Tensor, index: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = (t * cos + t.roll(1, -1) * sin for t in (q, k))
        scores = q @ k.transpose(2, 3) + self.biases[index] + slopes[:, None, None] * mask
        scores = scores.masked_fill(mask == 0, -1e9)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Tables(nn.Module):
    """Three blocks that share tables of the root: one that is saved, two that are not, one of a module that each block
    calls, and what is computed of them once."""

    def __init__(self, num_classes: int = 10, heads: int = 3) -> None:
        super().__init__()
        self.patches, self.fc = nn.Conv2d(3, 24, 4, 4), nn.Linear(24, num_classes)
        self.blocks = nn.ModuleList(Rotated(24, heads, 31) for _ in range(3))
        self.rope, self.depth = Speeds(24 // heads), Speeds(24)
        places = torch.arange(16)
        self.register_buffer("mask", torch.ones(16, 16).tril())
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1), persistent=False)
        self.register_buffer("index", places[:, None] - places + 15, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        positions = torch.arange(x.shape[1], device=x.device)
        angles = self.rope(x, positions)
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x + self.depth(x, positions), cos, sin, self.mask, self.slopes, self.index)
        return self.fc(x.mean(1))


MODELS = {
    "blocks": blocks, "plain": plain, "perceptron": perceptron, "vision_transformer": vision_transformer,
    "tables": Tables,
}  # fmt: skip
CLASSES = {"blocks": 10, "plain": 100, "perceptron": 12, "vision_transformer": 10, "tables": 10}
"""Their classes."""
EVEN = {
    "blocks": partial(blocks, 12),
    "plain": partial(plain, 100, (8, 8, 32, 24)),
    "perceptron": perceptron,
    "vision_transformer": partial(vision_transformer, 12, 4),
    "tables": partial(Tables, 12, 4),
}
"""The same with every cut divisible by 4."""
EVEN_CLASSES = {"blocks": 12, "plain": 100, "perceptron": 12, "vision_transformer": 12, "tables": 12}


def build(name: str, *, even: bool = False) -> nn.Module:
    """The model, with weights that depend on nothing but its name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return (EVEN if even else MODELS)[name]()
