"""Does a model take the input it is asked to take? Asked on the meta device first, where it costs next to nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from asa.errors import InvalidInputError
from asa.zoo.foreign import Shape, first_line


def _logits(output: Any) -> Any:
    """The main output among auxiliary ones: the first of a tuple, ``out`` or the first of a mapping."""
    if isinstance(output, Mapping):
        return output.get("out", next(iter(output.values()), None))
    if isinstance(output, tuple | list):
        return output[0] if output else None
    return output


def _forward(model: nn.Module, shape: Shape, device: str, *, train: bool) -> Any:
    """The main output for a batch of two, without a trace in the model: its buffers are stood in for."""
    on_meta = device == "meta"
    state = {n: torch.empty_like(b, device="meta") if on_meta else b.clone() for n, b in model.named_buffers()}
    if on_meta:
        state |= {n: torch.empty_like(p, device="meta") for n, p in model.named_parameters()}
    modes = {m: m.training for m in model.modules()}
    model.train(train)
    try:
        with torch.no_grad():
            return _logits(functional_call(model, state, (torch.zeros(2, *shape, device=device),)))
    finally:
        for module, mode in modes.items():
            module.training = mode


def _reaches(model: nn.Module, shape: Shape, *, train: bool) -> Any:
    try:
        return _forward(model, shape, "meta", train=train)
    except Exception:
        # Data-dependent code and tensors that are no buffers fail on meta only; a real pass decides.
        return _forward(model, shape, "cpu", train=train)


def refusal(model: nn.Module, shape: Shape) -> str:
    """Why ``model`` cannot run on inputs of ``shape`` [C, H, W], in one line; empty when it can.

    Both modes are tried: auxiliary heads only run in training.
    """
    for train in (False, True):
        try:
            _reaches(model, shape, train=train)
        except Exception as error:
            return first_line(error)
    return ""


def told_classes(model: nn.Module, spec: str, shape: Shape) -> int:
    """How many classes a foreign model tells apart: it gives logits [N, classes, ...] for a batch of N.

    Raises:
        InvalidInputError: it fails on such an input, or its output has another form.
    """
    why = refusal(model, shape)
    asked = "x".join(map(str, shape))
    if why:
        raise InvalidInputError(f"model {spec!r} fails on an input of {asked}: {why}")
    output = _reaches(model, shape, train=False)
    if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[0] != 2:
        found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InvalidInputError(f"model {spec!r} gives {found} for 2 samples of {asked}, not logits [2, classes]")
    return output.shape[1]


def check_outputs(model: nn.Module, spec: str, *, num_classes: int, shape: Shape) -> None:
    """Hold a foreign model to its word: logits [N, at least ``num_classes``, ...] for a batch of N.

    Raises:
        InvalidInputError: it fails on such an input, its output has another form, or there is nothing to train.
    """
    told = told_classes(model, spec, shape)
    if told < num_classes:
        raise InvalidInputError(
            f"model {spec!r} tells {told} classes apart, {num_classes} were asked for; "
            f"try --classes {told}, or let the factory take num_classes"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise InvalidInputError(f"model {spec!r} has no parameters to train")
