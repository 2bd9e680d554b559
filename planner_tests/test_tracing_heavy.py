"""Models of many weights: watched without values, compared on a single sample, and found out all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from asa.tracing import cuts, trace, verify
from asa.tracing.tracer import trace_mode
from asa.zoo.inputs import example
from asa.zoo.models import build


@pytest.mark.parametrize(
    ("spec", "shape", "classes"), [("gpt2:tiny", (16,), 64), ("llama:tiny", (16,), 64), ("resnet18", (3, 32, 32), 10)]
)
def test_cuts_are_the_same_with_and_without_values(
    spec: str, shape: tuple[int, ...], classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(spec, num_classes=classes, input_shape=shape)
    large = example(shape, 3)
    program = trace_mode(model, True, (large[:2], large))
    found = []
    for heavy in (0, 1 << 60):
        monkeypatch.setattr(cuts, "_HEAVY", heavy)
        seen = cuts.observe(program, large[:2]), cuts.observe(program, large)
        written = [(n.name, s in seen[0].storage.values()) for n, s in seen[0].writes]
        found.append((cuts.find_cuts(program, seen), seen[0].shapes, seen[0].types, written))
    assert found[0] == found[1]
    assert len(found[0][0]) > 5


def test_what_asks_for_values_is_watched_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.second(x * torch.nonzero(x.detach() == x.detach()).shape[1])  # type: ignore[no-any-return]

    monkeypatch.setattr(cuts, "_HEAVY", 0)
    found = trace(Choosing(), torch.randn(2, 4), name="choosing")
    assert [c.name for c in found.components] != []


class Pair(nn.Module):
    """Refuses fewer than ``least`` samples; ``seen`` is called with the sizes of batches it was given with values."""

    def __init__(self, least: int, seen: Callable[[tuple[int, bool]], None] = lambda _: None) -> None:
        super().__init__()
        self.linear, self.least, self.seen = nn.Linear(4, 3), least, seen

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < self.least:
            raise ValueError("no single sample")
        self.seen((len(x), torch.is_grad_enabled()))
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("least", "gradients"), [(1, 1), (2, 2)])
def test_gradients_are_of_one_sample_where_it_takes_one(
    least: int, gradients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_HEAVY", 0)
    seen: list[tuple[int, bool]] = []
    model = Pair(least, seen.append)
    assert verify.disagreement(model, model, model.train, torch.randn(2, 4)) == ""
    assert set(seen) == {(gradients, True), (2, False)}


def test_a_wrong_gradient_is_found_in_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_HEAVY", 0)
    model = Pair(1)

    def run(x: Tensor) -> Tensor:
        found: Tensor = model(x)
        return found.detach() + 0.5 * (found - found.detach())

    assert "training" in verify.disagreement(model, run, model.train, torch.randn(2, 4))


def test_a_model_that_normalises_over_samples_gets_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_HEAVY", 0)
    batch = torch.randn(2, 4)
    assert verify._fewer(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), batch) is batch
    assert len(verify._fewer(nn.Sequential(nn.Linear(4, 4)), batch)) == 1
