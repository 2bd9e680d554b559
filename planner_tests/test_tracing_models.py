"""Models as people write them: skips, recurrence, tied weights, odd control flow; and what falls back to what."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_tracing import assert_bitwise
from torch import Tensor, nn

from asa.errors import InvalidInputError
from asa.tracing import trace


class Net(nn.Module):
    """Three linear layers, ``a`` to ``c``; subclasses say how they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)


def names(model: nn.Module, x: Tensor, note: str = "") -> list[str]:
    """Component names, after checking that the trace is exact; ``note`` must be in its notes, or there are none."""
    torch.manual_seed(0)
    traced = trace(model, x[:1], name="model")
    assert (note in traced.note) if note else not traced.note, traced.note
    if x.is_floating_point():
        assert_bitwise(model, traced, x)
    assert sorted(k for c in traced.components for k in c.state_dict()) == sorted(model.state_dict())
    return [c.name for c in traced.components]


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


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
    assert names(model, x) == ["inc", "down1", "up2", "classifier"]
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


def test_control_flow_on_data_makes_the_module_one_call() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.q = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.p(x) if x.sum() > 0 else self.q(x)

    class Gated(Net):
        def __init__(self) -> None:
            super().__init__()
            self.b = Gate()

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x)))

    assert names(Gated(), X, "b is one call: forward asks for gt, which depends on data") == ["a", "b", "c"]
    assert names(Gate(), X, "the model is one component: forward asks for gt") == ["model"]


def test_control_flow_on_shapes_is_followed() -> None:
    class Asking(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor | None]:
            assert x.dim() == 2
            assert len(x.shape) == 2
            if x.shape[1] != 8:
                raise ValueError(x.shape)
            x = self.a(x) + torch.arange(x.shape[1])
            for i in range(x.size(-1) // 4):
                x = x * (i + 1)
            return {"out": self.c(self.b(x)), "nothing": None, "features": x}

    model = Asking()
    assert names(model, X) == ["a", "b", "c"]
    assert trace(model, X, name="asking").components[0].side_outputs() == ("mul",)

    class Batch(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(x)) if len(x) > 100 else self.c(self.a(x))

    assert names(Batch(), X, "which depends on the batch size") == ["model"]


class NoGrad(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.b(self.a(x))
        return self.c(x)


class Double7(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7


class CustomBackward(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(Double7.apply(self.b(self.a(x))))


class Noticing(Net):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.c(self.b(self.a(x)))


@pytest.mark.parametrize("model", [NoGrad(), CustomBackward(), Noticing()])
def test_what_a_trace_would_lose_is_not_traced(model: nn.Module) -> None:
    note = "forward assigns calls" if isinstance(model, Noticing) else "forward switches gradients"
    assert names(model, X, note) == ["model"]
    clone = copy.deepcopy(trace(model, X, name="m").components[0]).eval()
    expected = model.eval()(X)
    with torch.no_grad():
        model.c.weight.zero_()
    assert torch.equal(clone(X)[0], expected)
    assert not torch.equal(model(X), expected)


def test_random_tensors_are_drawn_anew() -> None:
    class Noisy(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.c(self.b(x + torch.randn(8)) + torch.rand(x.shape[0], 1))

    assert names(Noisy(), X) == ["a", "b", "c"]


def test_a_trace_that_computes_something_else_is_refused() -> None:
    class Hidden(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x)) + torch.Tensor(8).normal_())  # a draw that tracing cannot see

    assert names(Hidden(), X, "in training its traced components differ from it") == ["model"]


def test_state_kept_by_a_module_makes_it_one_call() -> None:
    class Remember(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(8, 8), None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            return self.inner(x)

    model = nn.Sequential(Remember(), nn.ReLU(), nn.Linear(8, 3))
    assert names(model, X, "0 is one call: forward assigns last") == ["0", "2"]
    fresh = nn.Sequential(Remember(), nn.Linear(8, 3))
    trace(fresh, X, name="m")
    assert fresh[0].last is None


def test_tied_parameters_stay_together() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.d = nn.Linear(8, 8, bias=False)
            self.d.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.c(F.relu(self.d(F.relu(self.b(F.relu(self.a(x)))))))

    model = Tied()
    assert names(model, X, "share their parameters") == ["a", "c"]
    facts = trace(model, X, name="tied").facts
    assert facts[0].parameter_bytes == 4 * (64 + 8 + 64 + 8)


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


def test_nothing_behind_a_cut_writes_in_front_of_it() -> None:
    class InPlace(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            y = self.b(x.view(-1, 8).mul_(2.0))
            y += 1
            return self.c(torch.relu_(y))

    model = InPlace()
    assert names(model, X) == ["a", "b", "c"]
    traced = trace(model, X, name="m")
    value = X
    for component in traced.components:
        value = value.detach().requires_grad_()  # a leaf that needs gradients refuses to be written to
        value = component(value)[0]


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


def test_a_model_that_does_not_run_is_invalid_input() -> None:
    with pytest.raises(InvalidInputError, match=r"Linear on an input of shape \(9,\) fails: RuntimeError"):
        trace(nn.Linear(8, 3), torch.randn(1, 9), name="m")
    with pytest.raises(InvalidInputError, match="batch of at least 1"):
        trace(nn.Linear(8, 3), torch.randn(0, 8), name="m")
