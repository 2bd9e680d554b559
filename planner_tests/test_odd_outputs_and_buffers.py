"""Buffers that forward changes, infinite masks, complex weights, outputs that are no heads, modules under two names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from asa.errors import UsageError
from asa.executor.measuring.equivalence import verify
from asa.executor.model.loss import hits_of, loss_of
from asa.strategies import offered
from asa.zoo.input_checks import refusal
from asa.zoo.models import build
from planner_tests.hand_plans import hand_plan, uniform
from planner_tests.stage_plans import staged

SHAPE = (3, 4, 4)


class Counted(nn.Module):
    """Scales by a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("still", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """As many rows as ``x``."""
        if self.training:
            self.count += 1
        return x * (1 + 0.1 * self.count) * self.still


def moving() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, track_running_stats=True, affine=True), nn.Flatten()),
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(24, 8)), nn.GELU(), Counted()),
        nn.Linear(8, 5),
    )


class Masked(nn.Module):
    """A causal mask of infinities."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 5)
        self.register_buffer("mask", torch.full((16, 16), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.first(x.flatten(2).transpose(1, 2))
        h = (h @ h.transpose(1, 2) + self.mask.to(h.dtype)).softmax(-1) @ h
        return self.last(h.mean(1))


class Spectral(nn.Module):
    """A complex weight on frequencies, behind a real one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(3, 4, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.rand(3, 1, 1))
        self.last = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        assert bool(self.weight.is_complex())
        return self.last(torch.fft.irfft2(torch.fft.rfft2(x * self.scale) * self.weight, s=(4, 4)).flatten(1))


@pytest.mark.parametrize(
    ("make", "ranks", "again", "strategy"),
    [
        (moving, 1, True, "replicate"), (Masked, 2, False, "replicate"), (Spectral, 2, False, "replicate"),
        (Spectral, 2, False, "zero3"),
    ],
    ids=["recomputed", "infinite", "complex", "sharded"],
)  # fmt: skip
def test_verify_finds_equal_what_is(make: Callable[[], nn.Module], ranks: int, again: bool, strategy: str) -> None:
    plan = hand_plan(
        make(), ranks, uniform(ranks, 1), input_shape=SHAPE, num_classes=5, global_batch=16,
        data_strategy=lambda _i: strategy,
    )  # fmt: skip
    if again:
        plan = staged(plan, [1], checkpoint=lambda _i: True, microbatches=2)
    found = verify(plan, make, offered(), timeout_s=120)
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    names = {t.name for t in found.tensors}
    assert names & {"mask", "weight", "0.1.running_var"}
    assert all(t.error < 1e-6 for t in found.tensors)


def test_only_logits_of_as_many_classes_are_heads() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 5), torch.arange(4)
    plain = loss_of(logits, labels)
    penalty, features = torch.tensor(3.0), torch.randn(4, 9)
    for output in ((logits, features, penalty), [logits, [features]], {"out": logits, "aux": features}):
        assert torch.equal(loss_of(output, labels), plain)
        assert torch.equal(hits_of(output, labels), hits_of(logits, labels))
    assert loss_of((logits, logits), labels) == pytest.approx(1.3 * plain)
    assert loss_of({"out": logits, "aux": logits * 1}, labels) == pytest.approx(1.5 * plain)


class Twice(nn.Module):
    """One module under two names, one weight in two modules, statistics that a pass would move."""

    def __init__(self) -> None:
        super().__init__()
        self.middle, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.middle.weight
        self.norm = nn.BatchNorm1d(8)
        self.first, self.last = nn.Linear(48, 8), nn.Linear(8, 5)
        self.steps = nn.ModuleList([self.middle, self.norm, self.other, self.middle, self.norm])

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.first(x.flatten(1))
        for step in self.steps:
            x = step(x)
        return self.last(x)


def test_asking_leaves_a_module_under_two_names_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Twice()
    state = {n: (t, t.clone()) for n, t in model.state_dict(keep_vars=True).items()}
    assert refusal(model, SHAPE) == ""
    assert "Linear" not in refusal(model, (3, 5, 5)) != ""
    for name, found in model.state_dict(keep_vars=True).items():
        assert found is state[name][0]
        assert torch.equal(found, state[name][1])
    (tmp_path / "named_twice.py").write_text(
        "from planner_tests.test_odd_outputs_and_buffers import Twice\n\n\ndef make():\n    return Twice()\n"
    )
    monkeypatch.chdir(tmp_path)
    built = build("named_twice:make", num_classes=5, input_shape=SHAPE)
    assert {t.device.type for t in built.state_dict().values()} == {"cpu"}


@pytest.mark.parametrize(("shape", "have"), [((2, 3), "one prediction"), ((2, 3, 2, 2), "2x2 predictions")])
def test_labels_for_other_positions_than_are_predicted_are_refused(shape: tuple[int, ...], have: str) -> None:
    with pytest.raises(UsageError, match=f"4x4 labels, the model gives {have} for it; .* need a segmentation model"):
        loss_of(torch.randn(shape), torch.zeros(2, 4, 4, dtype=torch.int64))
