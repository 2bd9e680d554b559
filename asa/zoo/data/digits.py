"""Handwritten digits: 1,797 real images of 8x8 in 17 shades of grey, part of the package (asa/data/digits.md)."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from asa.zoo.data.draws import key, permutation
from asa.zoo.data.official import Split

NUM_TEST = 360
"""Number of test images: a fifth of all, rounded up."""


def read(split: Split) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 1, 8, 8] and labels int64 [N]; 1,437 for training and 360 others for testing."""
    with files("asa").joinpath("data", "digits.npz").open("rb") as file, np.load(file) as arrays:
        shades, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"]).long()
    grey = shades.double().mul_(255 / 16).round_().to(torch.uint8)[:, None]
    order = permutation(key(1797, 8), len(labels))
    chosen = order[:NUM_TEST] if split == "test" else order[NUM_TEST:]
    return grey[chosen].contiguous(), labels[chosen]
