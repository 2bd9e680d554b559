"""Models small enough for a grid of measurements on CPU ranks, as ``small_models:NAME``."""

from __future__ import annotations

from collections import OrderedDict
from math import prod

from torch import nn
from torchvision.models import VisionTransformer


def vit(*, num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """A vision transformer of six blocks of width 192, patches of 4 pixels."""
    return VisionTransformer(
        image_size=input_shape[1], patch_size=4, num_layers=6, num_heads=3, hidden_dim=192, mlp_dim=768,
        num_classes=num_classes,
    )  # fmt: skip


def wide(*, num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Two convolutions and three linear layers with nearly all of the 12 million parameters."""
    channels, height, width = input_shape
    flat = 64 * prod((height // 4, width // 4))
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(flat, 2048),
            relu3=nn.ReLU(),
            fc2=nn.Linear(2048, 1536),
            relu4=nn.ReLU(),
            fc3=nn.Linear(1536, num_classes),
        )
    )
