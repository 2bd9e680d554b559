"""Shapes that a split is derived from are found without computing anything, and are those of a real run."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.passes.shape_prop import ShapeProp, TensorMetadata

from asa.sharding.layers import tensor
from asa.sharding.layers.describe import layer_graph
from asa.sharding.layers.tensor import plan_split
from asa.tracing import trace
from asa.tracing.component import TracedComponent


class Shifted(nn.Module):
    """Adds a constant that lives on the CPU, whatever else does."""

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [batch, features]."""
        return x + torch.arange(x.shape[1], device="cpu")


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 7, bias=False),
    )  # fmt: skip


def attention() -> nn.Module:
    model = nn.Sequential(
        nn.Flatten(2),
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.1),
        nn.Flatten(),
        nn.Linear(48, 5),
    )
    model[3].weight.requires_grad_(False)
    return model


def shifted() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 12), Shifted(), nn.Linear(12, 5))


def noted(component: TracedComponent) -> list[object]:
    """Shape, type and whether it has a gradient, of all that the split looks at; strides may differ."""

    def read(meta: object) -> object:
        if isinstance(meta, TensorMetadata):
            return meta.shape, meta.dtype, meta.requires_grad
        return tuple(map(read, meta)) if isinstance(meta, (tuple, list)) else None

    return [read(node.meta.get("tensor_meta")) for graph in component.graphs() for node in graph.graph.nodes]


def seen(component: TracedComponent) -> list[object]:
    """What a run of two samples notes."""
    run = copy.deepcopy(component)
    for graph in run.graphs():
        ShapeProp(graph).propagate(torch.zeros((2, *run.input_shape), dtype=run.input_dtype))
    return noted(run)


@pytest.mark.parametrize("model", [convolutions, attention, shifted])
def test_shapes_are_those_of_a_real_run_and_no_buffer_changes(model):
    built = model()
    before = copy.deepcopy(built.state_dict())
    for component in trace(built, torch.zeros(2, 3, 4, 4), name="some").components:
        plan_split(component)
        assert noted(component) == seen(component)
        assert any(found is not None for found in noted(component))
    assert all(torch.equal(before[k], v) for k, v in built.state_dict().items())


@pytest.mark.parametrize(("model", "patient"), [(convolutions, False), (attention, False), (shifted, True)])
def test_only_what_needs_a_device_is_asked_with_one(model, patient, monkeypatch):
    asked = []

    class Counted(tensor.FakeTensorMode):
        def __init__(self) -> None:
            asked.append(1)
            super().__init__()

    monkeypatch.setattr(tensor, "FakeTensorMode", Counted)
    for component in trace(model(), torch.zeros(2, 3, 4, 4), name="some").components:
        plan_split(component)
    assert bool(asked) is patient


class Masked(nn.Module):
    """Two linear layers, and what forward makes of a size between them."""

    def __init__(self, made: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.made = nn.Linear(8, 8), nn.Linear(8, 8), made

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [batch, 8]."""
        return x + self.second(torch.relu(self.first(x)) * self.made(x.shape[1]))


@pytest.mark.parametrize(
    ("made", "reason"), [(lambda n: torch.ones(n), ""), (lambda n: torch.ones(n, device="cpu"), "does not run without")]
)
def test_what_forward_creates_does_not_end_the_description(made: Callable[[int], Tensor], reason: str) -> None:
    found = trace(Masked(made), torch.zeros(2, 8), name="m")
    (component,) = layer_graph(found, model="m", input_shape=(8,), num_classes=8).components
    assert (component.split is None) == bool(reason)
    assert reason in component.why_whole


def test_embeddings_that_see_the_whole_batch_are_noted() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=1.0, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(12, 9))
    found = trace(model, torch.zeros(2, 3, dtype=torch.int64), name="m")
    notes = layer_graph(found, model="m", input_shape=(3,), num_classes=9).notes
    assert ["max_norm" in n for n in notes] == [True, False]
    assert ["scale_grad_by_freq" in n for n in notes] == [False, True]
