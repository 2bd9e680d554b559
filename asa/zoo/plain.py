"""The zoo's own models, by name. This file has the smallest two: a plain convolutional network and logistic
regression."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from math import prod

from torch import nn

from asa.zoo.bert import bert
from asa.zoo.recurrent import gru, lstm
from asa.zoo.unet import unet


def _block(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            norm=nn.BatchNorm2d(channels_out),
            relu=nn.ReLU(inplace=True),
            # ceil_mode: a map of one pixel survives, so that the network takes inputs of any size.
            pool=nn.MaxPool2d(2, ceil_mode=True),
        )
    )


def cnn(*, num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """A network of three convolutions with 32, 64 and 128 channels, each with BatchNorm, ReLU and pooling, and a linear
    layer."""
    widths = (input_shape[0], 32, 64, 128)
    features = [_block(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(*features),
            pool=nn.AdaptiveAvgPool2d(2),
            flatten=nn.Flatten(),
            classifier=nn.Linear(4 * widths[-1], num_classes),
        )
    )


def logistic(*, num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Multinomial logistic regression on the pixels."""
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), classifier=nn.Linear(prod(input_shape), num_classes)))


PLAIN: dict[str, Callable[..., nn.Module]] = {
    "bert": bert,
    "cnn": cnn,
    "gru": gru,
    "logistic": logistic,
    "lstm": lstm,
    "unet": unet,
}
