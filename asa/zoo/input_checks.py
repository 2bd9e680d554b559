"""Checks that a model accepts its input. They run on the meta device first, where they take almost no time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from asa.errors import InvalidInputError
from asa.zoo.foreign import first_line
from asa.zoo.inputs import Shape, example, of_tokens


def _logits(output: Any) -> Any:
    """The main output: the first of a tuple, ``out`` or the first of a mapping, ``logits`` of an object, or the output
    itself."""
    if isinstance(output, Mapping):
        return output.get("out", next(iter(output.values()), None))
    if isinstance(output, tuple | list):
        return output[0] if output else None
    return getattr(output, "logits", output)


@contextmanager
def _stood_in_for(model: nn.Module, *, on_meta: bool) -> Iterator[None]:
    """Context in which buffers are replaced by copies. With ``on_meta``, buffers and parameters are replaced by tensors
    without data.

    (``torch.func.functional_call`` leaves its replacements in a module that is registered twice.)
    """
    registries = [r for m in model.modules() for r in ((m._buffers, m._parameters) if on_meta else (m._buffers,))]
    before: list[dict[str, Any]] = [dict(r) for r in registries]
    stand_ins: dict[int, Any] = {}
    for registry in registries:
        for name, t in registry.items():
            if t is not None and id(t) not in stand_ins:
                copy = torch.empty_like(t, device="meta") if on_meta else t.clone()
                stand_ins[id(t)] = nn.Parameter(copy, t.requires_grad) if isinstance(t, nn.Parameter) else copy
            registry[name] = None if t is None else stand_ins[id(t)]
    try:
        yield
    finally:
        for registry, state in zip(registries, before, strict=True):
            registry.clear()
            registry.update(state)


def _forward(model: nn.Module, shape: Shape, device: str, *, train: bool) -> Any:
    """The main output for a batch of two. The model is not changed: its buffers are replaced meanwhile."""
    modes = {m: m.training for m in model.modules()}
    with _stood_in_for(model, on_meta=device == "meta"):
        model.train(train)
        try:
            with torch.no_grad():
                return _logits(model(example(shape, device=device)))
        finally:
            for module, mode in modes.items():
                module.training = mode


def _reaches(model: nn.Module, shape: Shape, *, train: bool) -> Any:
    try:
        return _forward(model, shape, "meta", train=train)
    except Exception:
        # Data-dependent code, and tensors that are not buffers, fail only on meta, so a run on the CPU decides.
        return _forward(model, shape, "cpu", train=train)


def refusal(model: nn.Module, shape: Shape) -> str:
    """Why ``model`` cannot run on inputs of ``shape`` [C, H, W], in one line; empty if it can.

    Both modes are tried, because auxiliary heads run only in training.
    """
    for train in (False, True):
        try:
            _reaches(model, shape, train=train)
        except Exception as error:
            return first_line(error)
    return ""


def check_kinds(model: nn.Module) -> None:
    """Refuse what can be neither restored nor sharded: TorchScript modules, whose parameters Python cannot replace, and
    sparse parameters and buffers, which have no memory of their own.

    Raises:
        InvalidInputError: the model contains one.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"{path} is" if path else "the model is"
            raise InvalidInputError(f"{what} TorchScript; hand in the module that torch.jit made it from")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            raise InvalidInputError(f"{name} of the model is sparse; hand in a dense tensor, or indices and values")


def num_classes_of(model: nn.Module, spec: str, shape: Shape) -> int:
    """Number of classes of an external model. It must return logits [N, classes, ...] for a batch of N images, and [N,
    T, classes] or [N, classes] for sequences of T tokens.

    Raises:
        InvalidInputError: it contains TorchScript or sparse tensors, fails on such an input, or its output has another
            form.
    """
    check_kinds(model)
    why = refusal(model, shape)
    input_text = f"{shape[0]} tokens" if of_tokens(shape) else "x".join(map(str, shape))
    if why:
        raise InvalidInputError(f"model {spec!r} fails on an input of {input_text}: {why}")
    output = _reaches(model, shape, train=False)
    if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[0] != 2:
        form = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InvalidInputError(f"model {spec!r} gives {form} for 2 samples of {input_text}, not logits [2, classes]")
    if not output.is_floating_point():
        kind = str(output.dtype).removeprefix("torch.")
        raise InvalidInputError(f"model {spec!r} gives {kind} values, which are no logits; return real numbers")
    return output.shape[-1] if of_tokens(shape) else output.shape[1]


def check_outputs(model: nn.Module, spec: str, *, num_classes: int, shape: Shape) -> None:
    """Check that an external model returns logits [N, at least ``num_classes``, ...] for a batch of N.

    Raises:
        InvalidInputError: it fails on such an input, its output has another form, there is nothing to train, or it has
            no values.
    """
    count = num_classes_of(model, spec, shape)
    if count < num_classes:
        raise InvalidInputError(
            f"model {spec!r} tells {count} classes apart, {num_classes} were asked for; "
            f"try --classes {count}, or let the factory take num_classes"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise InvalidInputError(f"model {spec!r} has no parameters to train")
    tensors = (*model.named_parameters(), *model.named_buffers())
    bare = "" if torch.empty(0).is_meta else next((name for name, t in tensors if t.is_meta), "")
    if bare:
        raise InvalidInputError(
            f"{bare} of model {spec!r} has no values (it is on the meta device); make it on the CPU"
        )
