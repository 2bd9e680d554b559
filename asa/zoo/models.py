"""Models by name: torchvision's classifiers and segmentation models, our own (``PLAIN``), and external ones."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from asa.errors import UsageError
from asa.zoo.foreign import (
    first_line,
    from_factory,
    from_timm,
    from_transformers,
    takes_classes,
    vocabulary_by_configuration,
)
from asa.zoo.input_checks import check_outputs, num_classes_of, refusal
from asa.zoo.inputs import Shape, of_tokens
from asa.zoo.language import language_model
from asa.zoo.names import check_kind, unknown
from asa.zoo.plain import PLAIN
from asa.zoo.sizes import shape_of

_USUAL_SIDES = (28, 32, 42, 48, 56, 64, 75, 96, 128, 160, 192, 224, 256, 299, 384, 448, 518)
"""Image sides that are tried, in this order, to suggest one that works."""

_LARGER_DEFAULTS = {"alexnet": 64, "inception_v3": 75, "maxvit_t": 224, "vit_h_14": 42}
"""Models that cannot take CIFAR's 32 pixels, with the smallest usual side that they can take (checked by a test)."""

_CLASSES = 100
"""Number of classes of CIFAR-100."""

_INCEPTION_AUX_SIDE = 299
"""Side below which the map before inception's auxiliary head is too small for the head's 5x5 kernels."""


@cache
def _torchvision_names() -> tuple[str, ...]:
    import torchvision

    return tuple(torchvision.models.list_models(module=torchvision.models))


@cache
def segmentation_names() -> tuple[str, ...]:
    """Names of torchvision's segmentation models; labels for them are maps [N, H, W], as for ``unet``."""
    import torchvision

    return tuple(torchvision.models.list_models(module=torchvision.models.segmentation))


def names() -> list[str]:
    """Names of all classifiers that can be built by plain name, sorted."""
    return sorted([*_torchvision_names(), *PLAIN])


def default_input(spec: str, shape: Shape | None = None, classes: int | None = None) -> tuple[Shape, int]:
    """(shape, classes): input shape, (C, H, W) or (T,), and number of classes of a model; ``shape`` and ``classes`` if
    given.

    The defaults are those of CIFAR-100, with larger images if the model cannot take 32 pixels. A language model has its
    published vocabulary and a common number of tokens. A ``package.module:factory`` without ``num_classes`` has the
    model's own number of classes.

    Raises:
        UsageError, InvalidInputError: such a factory fails, as in :func:`build`.
    """
    language = shape_of(spec)
    if language is not None:
        return shape or (language.tokens,), classes or language.vocabulary
    side = _LARGER_DEFAULTS.get(spec, 32)
    usual = shape or (3, side, side)
    if not classes and of_tokens(usual) and spec.startswith("hf:"):
        return usual, vocabulary_by_configuration(spec)
    if classes or takes_classes(spec):
        return usual, classes or _CLASSES
    with _seeded(0):
        return usual, num_classes_of(from_factory(spec, num_classes=_CLASSES, input_shape=usual), spec, usual)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Context in which all host generators are seeded by ``seed``. They are restored afterwards. Weights are made on
    the CPU."""
    state, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        # Not torch.manual_seed: it would also reset every GPU's generator.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        np.random.set_state(numpy)


def _options(name: str, shape: Shape) -> dict[str, Any]:
    """Arguments of a torchvision builder besides the number of classes."""
    _, height, width = shape
    if name in segmentation_names():
        return {"weights_backbone": None, "aux_loss": None}
    if name.startswith("vit_"):
        if height != width:
            raise UsageError(
                f"{name} takes square inputs, not {height}x{width}; try --input {shape[0]}x{height}x{height}"
            )
        return {"image_size": height}
    if name.startswith("maxvit"):
        return {"input_size": (height, width)}
    if name == "googlenet":
        return {"init_weights": False}
    if name == "inception_v3":
        return {"init_weights": False, "aux_logits": min(height, width) >= _INCEPTION_AUX_SIDE}
    return {}


def _inflate_stem(model: nn.Module, channels: int) -> None:
    """Convert a network for 3 channels to ``channels`` channels. The stem's kernels are repeated in turn and scaled by
    3 / channels, so that activations keep their magnitude."""
    for parent in model.modules():
        for child_name, child in parent.named_children():
            if isinstance(child, nn.Conv2d) and child.in_channels == 3 and child.groups == 1:
                index = torch.arange(channels, device=child.weight.device) % 3
                child.weight = nn.Parameter(child.weight.detach()[:, index] * (3 / channels))
                child.in_channels = channels
                setattr(parent, child_name, child)
                return
    raise UsageError(f"{type(model).__name__} has no convolution of 3 channels to adapt to {channels}")


def _torchvision(name: str, num_classes: int, shape: Shape) -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.get_model(
        name, weights=None, num_classes=num_classes, **_options(name, shape)
    )
    if shape[0] != 3:
        _inflate_stem(model, shape[0])
    return model


def _why_not(name: str, num_classes: int, shape: Shape) -> str:
    """Why torchvision's ``name`` does not work on ``shape``; tried on the meta device, without allocating the model."""
    try:
        with torch.device("meta"):
            return refusal(_torchvision(name, num_classes, shape), shape)
    except Exception as error:
        return first_line(error)


def _remedy(name: str, num_classes: int, shape: Shape) -> str:
    for side in _USUAL_SIDES:
        if side > min(shape[1:]) and not _why_not(name, num_classes, (shape[0], side, side)):
            return f"; try --input {shape[0]}x{side}x{side}"
    return ""


def _from_torchvision(name: str, num_classes: int, shape: Shape, *, tried: bool) -> nn.Module:
    try:
        model = _torchvision(name, num_classes, shape)
    except UsageError:
        raise
    except Exception as error:
        why = first_line(error)
    else:
        why = "" if tried else refusal(model, shape)
        if not why:
            return model
    size = "x".join(map(str, shape))
    raise UsageError(f"{name} cannot take inputs of {size} ({why}){_remedy(name, num_classes, shape)}")


def build(spec: str, *, num_classes: int, input_shape: Shape, seed: int = 0, tried: bool = False) -> nn.Module:
    """The model that ``spec`` names, on the CPU, in training mode. Its weights depend only on ``seed``.

    ``spec`` is a torchvision classification or segmentation name; ``cnn``, ``logistic``, ``lstm``, ``gru``, ``bert`` or
    ``unet``; a language model (``gpt2``, ``llama:8b``); ``package.module:factory`` (also importable from the working
    directory; called with ``num_classes`` and ``input_shape`` if it takes them); ``timm:NAME`` or ``hf:NAME``.
    Auxiliary heads stay on, as torchvision trains them, except that of ``inception_v3`` on inputs that are too small
    for it (below 299 pixels).

    Args:
        num_classes: at least 1.
        input_shape: channels, height, width; or (tokens,) for a model that reads tokens.
        seed: seed of the initial weights. The state of all generators is restored afterwards.
        tried: whether torchvision's model of that name is known to accept such inputs, and need not be tried on them
            again.

    Raises:
        UsageError: an unknown name (similar ones are given), or an input that the model cannot take (a possible one is
            given).
        InvalidInputError: an external model fails, or does not return logits for that many classes.
        UnavailableError: the package that a spec needs is not installed.
    """
    if num_classes < 1:
        raise UsageError(f"a model for {num_classes} classes was asked for; at least 1 is needed")
    if len(input_shape) not in (1, 3) or min(input_shape) < 1:
        raise UsageError(
            f"input shape {tuple(input_shape)} is neither channels, height, width nor a number of tokens, from 1"
        )
    with _seeded(seed):
        model = _build(spec, num_classes, input_shape, tried=tried)
    return model.train()


def _build(spec: str, num_classes: int, shape: Shape, *, tried: bool) -> nn.Module:
    check_kind(spec, of_tokens(shape))
    language_shape = shape_of(spec)
    if language_shape is not None:
        return language_model(language_shape, vocabulary=num_classes, tokens=shape[0])
    if ":" in spec:
        origin = spec.partition(":")[0]
        outside = {"timm": from_timm, "hf": from_transformers}.get(origin, from_factory)
        model = outside(spec, num_classes=num_classes, input_shape=shape)
        check_outputs(model, spec, num_classes=num_classes, shape=shape)
        return model
    if spec in PLAIN:
        return PLAIN[spec](num_classes=num_classes, input_shape=shape)
    all_names = frozenset([*_torchvision_names(), *segmentation_names()])
    if spec not in all_names:
        unknown(spec, all_names)
    return _from_torchvision(spec, num_classes, shape, tried=tried)
