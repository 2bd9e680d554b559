"""A model that is called with its own signature: any number of inputs, by position or by name. It is not cut into
components."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import nn

from asa.tracing.chain import Slot, TracedModel
from asa.tracing.fingerprint import model_fingerprint
from asa.tracing.records import understood
from asa.tracing.whole import WholeModel

UNCUT = "asa_uncut"
"""Attribute of a module: the reason why a trace makes one component of it. Without the attribute, the model is cut if
possible."""


class CalledModel(WholeModel):
    """A model as one component with the model's own inputs and outputs. A call runs its ``method`` (also one of its
    modules, by path), or ``forward`` if that is None."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, ((), ()))

    def forward(self, *args: Any, method: str | None = None, **options: Any) -> Any:  # type: ignore[override]
        """The model's own output."""
        model = self.__dict__["_whole"]
        run: Callable[..., Any] = model if method is None else attrgetter(method)(model)
        return understood(run(*args, **options))


def called(model: nn.Module, *, name: str, reason: str) -> TracedModel:
    """``model`` as one component with the model's own signature. It is not run, and has no facts. ``reason`` says in
    the notes why it is not cut into components."""
    component = CalledModel(model)
    return TracedModel(
        name=name,
        components=[component],
        facts=[],
        input_bytes_per_sample=0.0,
        model_fingerprint=model_fingerprint(model, [component]),
        notes=(f"the model is one component: {reason}",),
        unused=(),
        structures=(Slot(""), Slot("")),
        batch_dims={},
    )
