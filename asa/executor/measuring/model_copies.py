"""Copies of a model that is built and traced once, for trainings that must begin with the same weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from asa.executor.model.template import copied
from asa.ir.plan import Plan
from asa.tracing import TracedModel, trace
from asa.tracing.preserve import with_parameters
from asa.zoo.inputs import example


class ModelCopies:
    """Copies of the model that ``build`` makes, with weights and buffers equal bit for bit.

    Models of other packages are built again for every copy, because they may refer to themselves in ways that
    ``copy.deepcopy`` does not follow.
    """

    def __init__(self, plan: Plan, build: Callable[[], nn.Module | TracedModel]) -> None:
        self._plan, self._build = plan, build
        self._once = ":" not in plan.model_spec
        self._model: nn.Module | TracedModel | None = None
        self._traced: TracedModel | None = None

    def module(self) -> nn.Module:
        """A copy of the model, not traced."""
        model = self._original()
        assert isinstance(model, nn.Module)
        return with_parameters(model, [model], _clone)[0] if self._once else model

    def traced(self) -> nn.Module | TracedModel:
        """A copy of the traced model. Not traced yet if it is of another package."""
        if not self._once:
            return self._original()
        if self._traced is None:
            self._traced = self._trace(self._original())
        return copied(self._traced, _clone)

    def _trace(self, model: nn.Module | TracedModel) -> TracedModel:
        if isinstance(model, TracedModel):
            return model
        # A profile that was measured compared the trace with the model.
        known = self._plan.model_fingerprint if self._plan.origin == "measured" else ""
        return trace(model, example(self._plan.input_shape), name=self._plan.model_spec, known_fingerprint=known)

    def _original(self) -> nn.Module | TracedModel:
        if not self._once:
            return self._build()
        if self._model is None:
            self._model = self._build()
        return self._model


def _clone(p: nn.Parameter) -> Tensor:
    return p.detach().clone()
