"""A traced model leaves nothing behind: its memory is the user's again when the trace is gone."""

from __future__ import annotations

import gc
import weakref

import torch

from asa.sharding.layers.describe import layer_graph
from asa.tracing import trace
from asa.zoo.models import build


def test_nothing_outlives_the_trace() -> None:
    def run() -> list[weakref.ref[torch.nn.Parameter]]:
        model = build("cnn", num_classes=10, input_shape=(3, 32, 32))
        found = trace(model, torch.zeros(2, 3, 32, 32), name="cnn")
        layer_graph(found, model="cnn", input_shape=(3, 32, 32), num_classes=10)
        return [weakref.ref(p) for p in model.parameters()]

    references = run()
    gc.collect()
    assert [r() for r in references] == [None] * len(references)
