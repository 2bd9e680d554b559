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
    return random_images(plan, plan.global_batch, draw, flips=False).to(device)


def random_images(plan: Plan, count: int, draw: torch.Generator, *, flips: bool) -> ImageSet:
    """``count`` images of random pixels, with random classes."""
    shape = plan.sample_shape
    return ImageSet(
        images=torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=draw),
        labels=torch.randint(0, plan.num_classes, (count,), generator=draw), num_classes=plan.num_classes,
        mean=(0.5,) * shape[0], std=(0.25,) * shape[0], name="noise", source="random pixels", shape=shape, flips=flips,
    )  # fmt: skip
