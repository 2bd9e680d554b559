"""Loss and accuracy of a model's output: logits for samples, pixels or tokens, and auxiliary heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from asa.errors import UsageError

AUXILIARY_WEIGHT = {"GoogLeNetOutputs": 0.3, "InceptionOutputs": 0.4}
"""Weights of auxiliary heads: from Szegedy et al. 2014 for GoogLeNet, and from torchvision's reference for Inception
v3."""

SEGMENTATION_AUXILIARY_WEIGHT = 0.5
"""Weight of the auxiliary head of torchvision's segmentation models, from their reference training."""


def logits_of(output: Any) -> Tensor:
    """The main logits in a model's output, which may be a tensor, a dict, a sequence or an object with ``logits``."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        return output["out"] if "out" in output else next(iter(output.values()))
    logits: Tensor = output[0] if isinstance(output, tuple | list) else output.logits
    return logits


def by_tokens(logits: Tensor, labels: Tensor) -> bool:
    """Whether ``logits`` are [N, T, classes] with one row per token of ``labels`` [N, T], as language models return
    them."""
    return logits.dim() == 3 and labels.dim() == 2 and logits.shape[:2] == labels.shape


def labels_for(logits: Tensor, labels: Tensor) -> Tensor:
    """``labels`` in the shape that fits ``logits`` [N, classes, ...]: one label per predicted position, or one per
    sample.

    For labels [N, T] and logits [N, classes] these are the last labels, for what follows the whole sequence.

    Raises:
        UsageError: labels are for other positions than those predicted.
    """
    if logits.dim() == 2 and labels.dim() == 2:
        return labels[:, -1]
    if labels.dim() > 1 and (logits.dim() == 2 or labels.shape[1:] != logits.shape[2:]):
        expected, have = ("x".join(map(str, t)) or "one" for t in (labels.shape[1:], logits.shape[2:]))
        raise UsageError(
            f"a sample has {expected} labels, the model gives {have} prediction{'s' * (have != 'one')} for it; labels "
            "for every pixel need a segmentation model, as unet or fcn_resnet50"
        )
    if labels.dim() == logits.dim() - 1:
        return labels
    return labels.view(-1, *(1,) * (logits.dim() - 2)).expand(-1, *logits.shape[2:])


def hits_of(output: Any, labels: Tensor) -> Tensor:
    """Fraction of each sample's positions that are predicted correctly, float32 [N]. It is 0 or 1 if there is one
    position."""
    logits = logits_of(output)
    if by_tokens(logits, labels):
        return (logits.argmax(-1) == labels).float().mean(1)
    right = (logits.argmax(1) == labels_for(logits, labels)).float()
    return right.flatten(1).mean(1) if right.dim() > 1 else right


Criterion = Callable[[Tensor, Tensor], Tensor]
"""Function from logits [N, K, ...] and labels int64 [N, ...] to their mean loss."""


def loss_of(output: Any, labels: Tensor, label_smoothing: float = 0.0, criterion: Criterion | None = None) -> Tensor:
    """Mean cross-entropy (or ``criterion``) over the rows of ``labels``, plus auxiliary heads at their published
    weights.

    An output counts as a head if it has logits for as many classes. Other outputs (features, a penalty) add nothing.
    For zero rows the loss is a zero that is still connected to the graph.
    """

    mean = criterion or partial(F.cross_entropy, label_smoothing=label_smoothing)

    def over(logits: Tensor) -> Tensor:
        if labels.numel() == 0:
            return logits.sum() * 0
        if by_tokens(logits, labels):
            return mean(logits.flatten(0, 1), labels.flatten())
        return mean(logits, labels_for(logits, labels))

    main = logits_of(output)
    loss = over(main)

    def is_head(x: Any) -> bool:
        return isinstance(x, Tensor) and x.dim() >= 2 and x.shape[:2] == main.shape[:2] and x.is_floating_point()

    if isinstance(output, dict):
        others = [v for k, v in output.items() if k == "aux" and is_head(v) and v is not main]
        return loss + SEGMENTATION_AUXILIARY_WEIGHT * sum((over(v) for v in others), loss.new_zeros(()))
    if isinstance(output, tuple | list):
        weight = AUXILIARY_WEIGHT.get(type(output).__name__, 0.3)
        for head in output[1:]:
            if is_head(head):
                loss = loss + weight * over(head)
    return loss
