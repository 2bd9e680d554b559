"""Model inputs by shape: images [N, C, H, W] of floats, or tokens [N, T] of int64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Shape = tuple[int, ...]
"""Shape of one sample: (C, H, W) of an image, or (T,) of a sequence of tokens."""


def of_tokens(shape: Sequence[int]) -> bool:
    """Whether ``shape`` is that of a sequence of tokens."""
    return len(shape) == 1


def described(shape: Sequence[int]) -> str:
    """What a model with this input reads, in words."""
    if of_tokens(shape):
        return f"text of {shape[0]} tokens"
    return f"{shape[0] * shape[2]} numbers" if shape[1] == 1 else f"samples of {'x'.join(map(str, shape))}"


def example(shape: Sequence[int], samples: int = 2, device: torch.device | str | None = None) -> Tensor:
    """A batch of ``samples`` samples of zeros; every model knows token 0."""
    kind = torch.int64 if of_tokens(shape) else torch.float32
    return torch.zeros((samples, *shape), dtype=kind, device=device)


def random(
    shape: Sequence[int], samples: int, num_classes: int, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """A random batch: normal pixels of ``dtype``, or tokens below ``num_classes``."""
    if of_tokens(shape):
        return torch.randint(0, num_classes, (samples, *shape), generator=generator)
    return torch.randn((samples, *shape), generator=generator, dtype=torch.float64).to(dtype)
