"""Structure of a model without running it: traced on the meta device, where tensors have shapes and no values.

Nothing is allocated or computed, so a model of 70 billion parameters takes seconds. Whether the components compute what
the model computes is checked later, when the model is profiled or trained.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from asa.errors import InvalidInputError
from asa.ir.graph import LayerGraph
from asa.ir.profile import Precision
from asa.ir.units import binary
from asa.sharding.layers.describe import layer_graph
from asa.sharding.layers.dropout import make_reproducible
from asa.sharding.layers.tensor import without_values
from asa.sharding.randomness.generators import drawing, draws_note
from asa.sharding.randomness.samples import SampleContext
from asa.tracing import TracedModel, trace
from asa.tracing.autocast import LOWER, AutocastOnMeta
from asa.tracing.preserve import with_history
from asa.tracing.remembered import Remembered


@dataclass(frozen=True)
class Structure:
    """Structure of a model: its ``graph`` and its ``fingerprint``.

    ``trains_on_one`` says whether the model can train on a batch of one sample. BatchNorm refuses a single value per
    channel, which occurs if the image has shrunk to one point.
    """

    graph: LayerGraph
    fingerprint: str
    trains_on_one: bool


def structure_of(
    bare_model: Callable[[], nn.Module],
    build: Callable[[], nn.Module],
    example: Tensor,
    *,
    name: str,
    num_classes: int,
    precision: Precision = "fp32",
) -> Structure:
    """The structure of a model that reads batches like ``example`` [N, ...], whose values are not read.

    ``bare_model`` returns the model on the meta device. ``build`` returns it with weights, and is called if the meta
    device does not suffice: ``forward`` asks for values, or torch runs a layer differently on meta (LSTM, GRU).
    ``precision`` is that of activations under autocast. For a model that cannot run on meta they count
    as fp32, which is more.

    Raises:
        InvalidInputError: the model does not run on ``example``.
    """
    lower = LOWER.get(precision)
    with Remembered(), nullcontext() if lower is None else AutocastOnMeta(lower):
        return _structure(bare_model, build, example, name, num_classes)


def _structure(
    bare_model: Callable[[], nn.Module], build: Callable[[], nn.Module], example: Tensor, name: str, num_classes: int
) -> Structure:
    on_meta = _on_meta(bare_model, example, name)
    if on_meta is None:
        _check_room(bare_model, name)
        model = build()
        batch = example.to(next((p.device for p in model.parameters()), torch.device("cpu")))
        on_meta = model, trace(model, batch, name=name), batch
    model, traced, batch = on_meta
    graph = layer_graph(traced, model=name, input_shape=tuple(example.shape[1:]), num_classes=num_classes)
    on_one = not any(c.batch_norm for c in graph.components) or _trains_on_one(model, batch[:1])
    pair = batch[torch.arange(2, device=batch.device) % len(batch)]
    make_reproducible(traced.components, SampleContext(samples=torch.arange(2, device=batch.device), total=2))
    graph = replace(graph, notes=(*graph.notes, *draws_note(drawing(traced.components, pair))))
    return Structure(graph, traced.model_fingerprint, on_one)


def _on_meta(
    bare_model: Callable[[], nn.Module], example: Tensor, name: str
) -> tuple[nn.Module, TracedModel, Tensor] | None:
    """The model, its trace on the meta device, and the batch; None if the trace would differ from one with values."""
    try:
        model = bare_model()
        if any(isinstance(m, nn.RNNBase) for m in model.modules()):
            return None
        batch = torch.empty_like(example, device="meta")
        traced = trace(model, batch, name=name)
    except Exception:  # may fail for lack of values; a real error shows up again with values
        return None
    return None if any(" is one " in note for note in traced.notes) else (model, traced, batch)


def _check_room(bare_model: Callable[[], nn.Module], name: str) -> None:
    """Check that this machine has memory for the model's weights and gradients.

    Raises:
        InvalidInputError: it has not; names the bytes.
    """
    try:
        needed = 2 * sum(p.numel() * p.element_size() for p in bare_model().parameters())
    except Exception:  # size unknown; build it without the check
        return
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > have / 2:
        raise InvalidInputError(
            f"{name} cannot be traced without its weights, because forward asks for values; with them it takes "
            f"{binary(needed)} of this machine's {binary(have)}: plan a smaller configuration of it"
        )


def stripped(model: nn.Module) -> nn.Module:
    """A copy of ``model`` on the meta device, made without copying any value."""
    return without_values(model, with_history(model))


def _trains_on_one(module: nn.Module, sample: Tensor) -> bool:
    try:
        with torch.no_grad():
            module.train()(sample)
    except Exception:  # a user's model may raise anything
        return False
    return True
