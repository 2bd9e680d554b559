"""Random images or tokens, for runs whose values do not matter."""

from __future__ import annotations

import torch

from asa.ir.plan import Plan
from asa.zoo.data import ImageSet
from asa.zoo.data.language import scattered
from asa.zoo.inputs import of_tokens


def random_inputs(plan: Plan, device: torch.device) -> ImageSet:
    """Random samples, as many as the plan's global batch, in its input shape."""
    draw = torch.Generator().manual_seed(0)
    if of_tokens(plan.sample_shape):
        return scattered(plan.sample_shape, plan.global_batch, plan.num_classes, draw).to(device)
    channels, height, width = plan.sample_shape
    pixels = torch.randint(0, 256, (plan.global_batch, channels, height, width), dtype=torch.uint8, generator=draw)
    labels = torch.randint(0, plan.num_classes, (plan.global_batch,), generator=draw)
    return ImageSet(
        images=pixels, labels=labels, num_classes=plan.num_classes, mean=(0.5,) * channels, std=(0.25,) * channels,
        name="noise", source="random pixels", shape=(channels, height, width), flips=False,
    ).to(device)  # fmt: skip
