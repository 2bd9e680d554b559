"""A template of a traced model: copies of it are the model, once weights are loaded, and share nothing with it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from asa.executor.model.template import TracedTemplate, without_weights
from asa.tracing import TracedModel, trace
from asa.zoo.models import build


class Normalised(nn.Module):
    """Weights that other tensors are computed from, a buffer that is not saved, and layers in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has another way now; programs still use this one
            self.first = torch.nn.utils.weight_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.norm = nn.BatchNorm2d(8)
        self.register_buffer("scale", torch.linspace(1, 2, 8).view(1, 8, 1, 1), persistent=False)
        self.last = nn.Linear(8, 10)
        self.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((self.norm(self.first(x)) * self.scale).relu().mean((2, 3)))


class Tied(nn.Module):
    """The first and the last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.middle = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(x)))


MODELS = {
    "cnn": (lambda: build("cnn", num_classes=10, input_shape=(3, 16, 16)), torch.randn(4, 3, 16, 16)),
    "resnet18": (lambda: build("resnet18", num_classes=10, input_shape=(3, 32, 32)), torch.randn(4, 3, 32, 32)),
    "lstm": (lambda: build("lstm", num_classes=10, input_shape=(1, 8, 8)), torch.randn(4, 1, 8, 8)),
    "normalised": (Normalised, torch.randn(4, 3, 8, 8)),
    "tied": (Tied, torch.randint(0, 32, (4, 6))),
}


def copied(name: str) -> tuple[TracedModel, TracedModel, torch.Tensor]:
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = make()
    before = trace(model, x, name=name)
    after = TracedTemplate(traced=without_weights(before)).copy()
    with torch.no_grad():
        for old, new in zip(before.components, after.components, strict=True):
            values = dict(old.named_parameters())
            for key, p in new.named_parameters():
                p.copy_(values[key])
    return before, after, x


@pytest.mark.parametrize("name", list(MODELS))
def test_a_copy_with_loaded_weights_is_the_model(name):
    before, after, x = copied(name)
    results = []
    for traced in (before, after):
        for component in traced.components:
            component.train()
        torch.manual_seed(1)
        out = traced.run(x)
        out.float().square().mean().backward()
        gradients = {n: p.grad for c in traced.components for n, p in c.named_parameters() if p.requires_grad}
        results.append((out, gradients, {n: b for c in traced.components for n, b in c.named_buffers()}))
    (out, gradients, buffers), (other, others, copies) = results
    assert torch.equal(out, other)
    assert gradients
    assert gradients.keys() == others.keys()
    assert all(torch.equal(g, others[n]) for n, g in gradients.items())
    assert buffers.keys() == copies.keys()
    assert all(torch.equal(b, copies[n]) for n, b in buffers.items())
    assert before.uncut == after.uncut


@pytest.mark.parametrize("name", list(MODELS))
def test_a_copy_shares_no_tensor_with_the_model_and_the_template_has_no_weights(name):
    before, after, _ = copied(name)
    kept = without_weights(before)

    def tensors(traced: TracedModel) -> list[torch.Tensor]:
        return [t for c in traced.components for t in (*c.parameters(), *c.buffers())]

    assert not {t.data_ptr() for t in tensors(before) if t.numel()} & {t.data_ptr() for t in tensors(after)}
    assert all(p.is_meta for c in kept.components for p in c.parameters())
    assert [p.requires_grad for c in kept.components for p in c.parameters()] == [
        p.requires_grad for c in before.components for p in c.parameters()
    ]


def test_a_tied_weight_stays_one_weight():
    before, after, _ = copied("tied")
    assert any(c.ties for c in before.components), "the model is cut between its tied layers"
    assert sum(1 for c in after.components for _ in c.parameters()) == sum(
        1 for c in before.components for _ in c.parameters()
    )
    ids = {id(p) for c in after.components for p in c.parameters()}
    assert all(c.ties <= ids for c in after.components)
