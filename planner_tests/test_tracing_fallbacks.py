"""What symbolic tracing cannot follow, or would get wrong in silence: it falls back, and says so."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tracing_checks import Net, X, names

from asa.errors import InvalidInputError
from asa.tracing import build as tracing
from asa.tracing import trace


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

    class Larger(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(x)) if x.shape[0] > 100 else self.c(self.a(x))

    class Single(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.a(x)) if x.shape[0] == 1 else self.c(self.b(x))

    class Chunks(Net):
        def forward(self, x: Tensor) -> Tensor:
            parts = x.chunk(-(-x.shape[0] // 32))
            return self.c(torch.cat([self.a(p - p.mean(0)) for p in parts]))

    class Split(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.cat([self.a(p - p.mean(0)) for p in x.split(32)]))

    for model in (Batch(), Larger(), Single(), Chunks(), Split()):
        assert names(model, X, "which depends on the batch size") == ["model"]

    class Expanded(Net):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(x.shape[1], device=x.device)[None]
            if positions.shape[0] != x.shape[0]:  # for one sample, it is what it was
                positions = positions.expand(x.shape[0], -1)
            return self.c(self.b(self.a(x + positions)))

    assert names(Expanded(), X) == ["a", "b", "c"]

    class Limited(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.c(self.b(x.masked_fill(x > 0, torch.finfo(x.dtype).min).relu()))

    assert names(Limited(), X) == ["a", "b", "c"]

    class Halves(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            assert y.shape[0] * 8 == x.shape[0] * x.shape[1]
            one, two = y.chunk(2, 1)
            return self.c(self.b(torch.cat((two, one), 1)))

    assert names(Halves(), X) == ["a", "b", "c"]


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


def test_a_model_that_does_not_run_is_invalid_input() -> None:
    with pytest.raises(InvalidInputError, match=r"Linear on an input of shape \(9,\) fails: RuntimeError"):
        trace(nn.Linear(8, 3), torch.randn(1, 9), name="m")
    with pytest.raises(InvalidInputError, match="batch of at least 1"):
        trace(nn.Linear(8, 3), torch.randn(0, 8), name="m")


def test_what_was_compared_before_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x)))

    asked: list[int] = []

    def compare(*_: Any) -> str:
        asked.append(1)
        return ""

    monkeypatch.setattr(tracing, "disagreement", compare)
    model = Plain()
    first = trace(model, X, name="net")
    again = trace(model, X, name="net", known_fingerprint=first.model_fingerprint)
    other = trace(model, X, name="net", known_fingerprint="0" * 16)
    assert len(asked) == 2
    assert again.facts == []
    assert again.model_fingerprint == other.model_fingerprint == first.model_fingerprint
    for found in (again, other):
        pairs = zip(found.components, first.components, strict=True)
        assert all((a.name, a.input_shape, a.input_dtype) == (b.name, b.input_shape, b.input_dtype) for a, b in pairs)
    assert torch.equal(again.run(X), model(X))


def test_a_checkpoint_of_the_models_own_is_left_out_and_said() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(checkpoint(lambda y: torch.relu(self.b(y)), self.a(x), use_reentrant=False))

    said = "torch.utils.checkpoint around b and 1 more is left out: the plan chooses what is computed twice"
    assert names(Checkpointed(), X, said) == ["a", "b", "c"]


def test_a_trace_that_fails_behind_an_assignment_leaves_the_model_as_it_was() -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return self.c(self.b(x)) if x.sum() > 0 else self.c(self.a(x))

    assert names(Counting(), X, "depends on data") == ["model"]


def test_what_is_written_into_parts_is_traced() -> None:
    class Writing(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x) * 1
            x[:, 0] = x[:, 1] * 2
            return self.c(self.b(x))

    assert names(Writing(), X) == ["a", "b", "c"]


def test_a_tensor_in_place_of_an_array_is_named() -> None:
    class Converting(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(x) * torch.as_tensor(x[0])[0]

    assert "__" not in trace(Converting(), X, name="converting").note


class Keywords(nn.Module):
    """Its layers and a parameter have names that are keywords of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict(
            {"in": nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"class": nn.Linear(8, 8)})), "input": nn.Linear(8, 3)}
        )
        self.register_parameter("is", nn.Parameter(torch.ones(8)))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.net["in"]  # type: ignore[misc]
        return self.net["input"](second["class"](torch.relu(first(x))) * getattr(self, "is"))  # type: ignore[no-any-return]


def test_names_that_are_keywords_are_found() -> None:
    assert names(Keywords(), X) == ["net.in.0", "net.in.1.class", "is", "net.input"]
