"""Models as people write them: skips, recurrence, tied weights, values made early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tracing_checks import Net, X, assert_bitwise, names

from asa.tracing import trace


class Double(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down1, self.down2 = Double(3, 4), Double(4, 8), Double(8, 16)
        self.up1, self.up2, self.out = Double(24, 8), Double(12, 4), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.inc(x)
        b = self.down1(F.max_pool2d(a, 2))
        c = F.interpolate(self.down2(F.max_pool2d(b, 2)), scale_factor=2)
        c = F.pad(c, [0, b.size(3) - c.size(3), 0, b.size(2) - c.size(2)])
        b = F.interpolate(self.up1(torch.cat([b, c], 1)), size=a.shape[2:])
        return self.out(self.up2(torch.cat([a, b], 1)))


def test_unet_is_cut_only_outside_its_skips() -> None:
    model = UNet()
    x = torch.randn(2, 3, 18, 18)
    assert names(model, x, "down1 to up1 form one component") == ["inc", "down1", "up2", "classifier"]
    middle = trace(model, x, name="unet").components[1]
    assert {n.split(".")[0] for n, _ in middle.named_children()} == {"down1", "down2", "up1"}


def test_lstm_with_its_state_made_in_forward() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.fc = nn.Embedding(20, 8), nn.Linear(16, 3)
            self.lstm = nn.LSTM(8, 16, 2, batch_first=True, dropout=0.2)

        def forward(self, tokens: Tensor) -> Tensor:
            embedded = self.embedding(tokens)
            start = torch.zeros(2, tokens.size(0), 16)
            return self.fc(self.lstm(embedded, (start, start))[0][:, -1])

    model = Reader()
    tokens = torch.randint(0, 20, (5, 7))
    assert names(model, tokens)[-1] == "fc"
    traced = trace(model, tokens, name="reader")
    for training in (True, False):
        model.train(training)
        for component in traced.components:
            component.train(training)
        torch.manual_seed(1)
        expected = model(tokens)
        torch.manual_seed(1)
        assert torch.equal(traced.run(tokens), expected)


def test_tied_parameters_stay_together() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.d = nn.Linear(8, 8, bias=False)
            self.d.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.c(F.relu(self.d(F.relu(self.b(F.relu(self.a(x)))))))

    model = Tied()
    found = trace(model, X, name="tied")
    assert [c.name for c in found.components] == ["a", "b", "d", "c"]
    assert "a, d share parameters" in found.note
    assert_bitwise(model, found, X)
    assert [f.parameter_bytes for f in found.facts[:3]] == [4 * (64 + 8), 4 * (64 + 8), 0]
    assert found.uncut == {1, 2}


def test_a_module_that_the_model_keeps_frozen_stays_frozen() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.conv2 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)

        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.bn.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.conv2(self.bn(self.conv(x)))

    assert names(Frozen(), torch.randn(2, 3, 8, 8)) == ["conv", "conv2"]


class Overwriting(nn.Module):
    """A block with a skip, whose first operation overwrites its input."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(x) + self.q(torch.tanh(self.p(x)))


def test_nothing_behind_a_cut_writes_in_front_of_it() -> None:
    class InPlace(Net):
        def __init__(self, block: type[nn.Module]) -> None:
            super().__init__()
            self.b = nn.Sequential(block(), nn.Linear(8, 8), block())

        def forward(self, x: Tensor) -> Tensor:
            x = self.b(self.a(x))
            return self.c(x.view(-1, 8).mul_(2.0))

    model = InPlace(Overwriting)
    assert names(model, X) == ["b.0", "b.2", "classifier"]
    first, *rest = trace(model, X, name="m").components
    value = first(X)[0]
    assert {n.partition(".")[0] for n, _ in first.named_parameters()} == {"a", "b"}  # no cut behind ``a``
    for component in rest:
        value = value.detach().requires_grad_()  # a leaf that needs gradients refuses to be written to
        value = component(value)[0]


def test_what_parameters_make_early_is_alive_until_it_is_used() -> None:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            scale = self.scale.exp()
            return self.c(self.b(self.a(x)) * scale)

    model = Scaled()
    assert len(names(model, X)) == 2
    assert "scale" in dict(trace(model, X, name="m").components[0].named_parameters())


def test_a_size_read_from_the_input_crosses_cuts_as_a_constant() -> None:
    class Segmenter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 4, 3, 2), nn.Conv2d(4, 8, 3, 2), nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            size = x.shape[-2:]
            return F.interpolate(self.c(self.b(self.a(x))), size=size)

    assert names(Segmenter(), torch.randn(2, 3, 16, 12)) == ["a", "b", "c"]


def test_plain_modules() -> None:
    mlp = nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.3)))
    )
    assert names(mlp, X) == ["0", "3", "6"]
    assert names(nn.Linear(8, 3), X) == ["model"]

    class Logistic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8))
            self.register_buffer("scale", torch.ones(3), persistent=False)

        def forward(self, x: Tensor, temperature: float = 2.0) -> Tensor:
            return F.linear(x, self.weight) * self.scale / temperature

    assert names(Logistic(), X) == ["model"]
    head = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Sequential(nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 2)))
    assert names(head, torch.randn(2, 3, 8, 8)) == ["0", "2"]


class Encoder(nn.Module):
    """Torch's encoder with a mask: a buffer, with or without a hint, one made in forward, one of data."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=kind != "length first")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1), persistent=False)
        self.kind, self.last = kind, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.kind == "length first" else x
        masks: dict[str, Any] = {
            "boolean": lambda: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(2),
            "data": lambda: x.detach()[0] @ x.detach()[0].T,
        }
        x = self.encoder(
            x, mask=masks.get(self.kind, lambda: self.mask)(), is_causal=True if self.kind == "hint" else None
        )
        return self.last(x.transpose(0, 1) if self.kind == "length first" else x)


@pytest.mark.parametrize("kind", ["buffer", "hint", "boolean", "length first", "data"])
def test_an_encoder_with_a_mask_is_traced_layer_by_layer(kind: str) -> None:
    notes = {
        "data": "a mask that depends on data",
        "length first": "encoder.layers.1 form one component",
    }
    found = names(Encoder(kind), torch.randn(3, 6, 8), notes.get(kind, ""))
    layers = [f"encoder.layers.{i}" for i in (0, 1)]
    assert [n for n in found if n in layers] == (layers if kind in ("buffer", "hint", "boolean") else [])
