"""``asa verify`` looks at the code that trains: what is wrong with it, or with both of asa's own sides, is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from asa.errors import WorkersFailedError
from asa.executor.measuring import plain_training
from asa.executor.measuring.equivalence import OneDevice, default_samples, one_device, verify
from asa.executor.measuring.model_copies import ModelCopies
from asa.executor.model import step
from asa.executor.training import worker
from asa.executor.training.worker import Worker
from asa.ir.equivalence import Equivalence
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.sharding.gradients import replicated
from asa.sharding.gradients.bucket import Send
from asa.sharding.randomness import samples
from asa.sharding.randomness.samples import SampleAlphaDropout, SampleContext, SampleDropout
from asa.strategies import offered
from planner_tests.hand_plans import alternating, hand_plan, uniform

INPUT = (3, 8, 8)
Patch = pytest.MonkeyPatch


class Small(nn.Module):
    """BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.drop = nn.Conv2d(6, 8, 3, stride=2), nn.Dropout(0.3)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = self.drop(torch.relu(self.second(x)).mean((2, 3)))
        return self.head(x)


def small() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def _plan(**options: Any) -> Plan:
    return hand_plan(small(), 2, options.pop("choose", uniform(2, 1)), input_shape=INPUT, num_classes=5, **options)


DDP = {"num_microbatches": 2}
MIXED = {"choose": alternating(2), "num_microbatches": 2}
SHARDED = {"data_strategy": lambda _i: "zero3"}


def _verified(options: dict[str, Any], **more: Any) -> Equivalence:
    return verify(_plan(**options), small, offered(), timeout_s=120, **more)


@pytest.mark.parametrize(
    "options", [DDP, MIXED, SHARDED, {"optimizer": "adamw"}],
    ids=["ddp", "mixed", "zero3", "adamw"],
)  # fmt: skip
def test_the_code_that_trains_is_a_plain_loop(options: dict[str, Any]) -> None:
    found = _verified(options)
    assert found.equivalent, (found.training_tensor, found.training_error)
    assert found.training_error is not None
    assert found.training_error <= (found.training_allowed or 0)


def _fetched(patch: Patch, change: Callable[[Worker, Any, Any], tuple[Any, Any]]) -> None:
    honest = Worker._fetch

    def sabotaged(self: Worker, *args: Any) -> tuple[Any, Any]:
        return change(self, *honest(self, *args))

    patch.setattr(Worker, "_fetch", sabotaged)


def _swapped(patch: Patch) -> None:
    """Inputs and labels of the two ranks."""
    honest = worker._rows_read

    def sabotaged(indices: Any, parts: Any) -> Any:
        return honest(indices.roll(len(indices) // 4), parts)

    patch.setattr(worker, "_rows_read", sabotaged)


def _weight(patch: Patch) -> None:
    honest = step.Step.backward

    def sabotaged(self: Any, *args: Any, **options: Any) -> Any:
        self.rows = [replace(r, weight=r.weight * 1.001) for r in self.rows]
        return honest(self, *args, **options)

    patch.setattr(step.Step, "backward", sabotaged)


def _on_rank(rank: int) -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == rank


def _not_updated(patch: Patch) -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        honest = kind.step

        def sabotaged(self: Any, *args: Any, _honest: Any = honest, **options: Any) -> Any:
            return None if _on_rank(1) else _honest(self, *args, **options)

        patch.setattr(kind, "step", sabotaged)


def _left_out(patch: Patch) -> None:
    """One microbatch, wherever asa computes: under the plan and on one device."""
    honest = step.Step.play

    def sabotaged(self: Any, turns: Any) -> None:
        honest(self, tuple(t for t in turns if t.action.microbatch != 1))

    patch.setattr(step.Step, "play", sabotaged)


def _unscaled(patch: Patch) -> None:
    patch.setattr(SampleDropout, "masked", lambda self, x, kept: x * kept)


def _skipping(patch: Patch) -> None:
    """Only in the training loop."""
    honest = Worker.train

    def sabotaged(self: Worker, *args: Any, **options: Any) -> bool:
        if _on_rank(1):
            self.optimizer.step = lambda *_a, **_k: None  # type: ignore[method-assign]
        return honest(self, *args, **options)

    patch.setattr(Worker, "train", sabotaged)


def _turned(patch: Patch) -> None:
    """Rows of every microbatch against their labels, only in the training loop."""
    _fetched(patch, lambda _w, x, y: ({start: rows.flip(0) for start, rows in x.items()}, y))


def _labels(patch: Patch) -> None:
    _fetched(patch, lambda _w, x, y: (x, {start: (rows + 1) % 5 for start, rows in y.items()}))


def _momentum(patch: Patch) -> None:
    """Forgotten after every step, only in the training loop."""
    honest = Worker.train

    def sabotaged(self: Worker, *args: Any, **options: Any) -> bool:
        self.optimizer.state.clear()
        return honest(self, *args, **options)

    patch.setattr(Worker, "train", sabotaged)


def _kept_gradients(patch: Patch) -> None:
    """Gradients of the step before are still there on one rank."""
    honest = worker.played

    def sabotaged(model: Any, *args: Any, **options: Any) -> Any:
        found = honest(model, *args, **options)
        if _on_rank(0):
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(1 + 1e-4)
        return found

    patch.setattr(worker, "played", sabotaged)


def _another_loss(patch: Patch) -> None:
    honest = worker.loss_of
    patch.setattr(worker, "loss_of", lambda output, wanted, smoothing=0.0, *more: honest(output, wanted, 0.05, *more))


def _statistics(patch: Patch) -> None:
    """Running means do not move, only in the training loop."""
    gathered = Worker.train

    def sabotaged(self: Worker, *args: Any, **options: Any) -> bool:
        means = [b for c in self.model.components for n, b in c.named_buffers() if n.endswith("running_mean")]
        before = [b.clone() for b in means]
        done = gathered(self, *args, **options)
        for buffer, value in zip(means, before, strict=True):
            buffer.copy_(value)
        return done

    patch.setattr(Worker, "train", sabotaged)


def _first_bucket(patch: Patch) -> None:
    """Of several, its gradients stay those of each rank."""
    honest = replicated.sender

    def sabotaged(axis: Any) -> Send:
        send = honest(axis)
        return lambda bucket: send(bucket) if bucket.number or bucket.last else lambda: None

    patch.setattr(replicated, "_FIRST_BYTES", 64)
    patch.setattr(replicated, "sender", sabotaged)


SABOTAGES: dict[str, tuple[Callable[[Patch], None], dict[str, Any]]] = {
    "samples of two ranks swapped": (_swapped, DDP),
    "loss weight x 1.001": (_weight, DDP),
    "weights of one rank not updated": (_not_updated, DDP),
    "a microbatch left out on both sides": (_left_out, DDP),
    "dropout not scaled": (_unscaled, DDP),
    "a rank that skips its update": (_skipping, DDP),
    "inputs turned against labels": (_turned, DDP),
    "other labels": (_labels, DDP),
    "momentum forgotten": (_momentum, DDP),
    "gradients of one rank x 1.0001": (_kept_gradients, DDP),
    "another loss": (_another_loss, DDP),
    "running means that stand still": (_statistics, DDP),
    "first bucket not reduced, mixed": (_first_bucket, MIXED),
}


ON_ONE_DEVICE_TOO = ("loss weight x 1.001", "a microbatch left out on both sides", "dropout not scaled")
"""The others leave one device as it is, so one run there serves all of them."""


@cache
def _one_device() -> OneDevice:
    plan = _plan(**DDP)
    samples = default_samples(plan)
    copies = ModelCopies(plan, small)
    return run_ranks(1, one_device, plan, copies, offered(), "cpu", samples, threads=1, timeout_s=120)[0]


@pytest.mark.parametrize("name", SABOTAGES)
def test_sabotage_is_found(monkeypatch: Patch, name: str) -> None:
    change, options = SABOTAGES[name]
    reference = None if name in ON_ONE_DEVICE_TOO else _one_device()
    change(monkeypatch)
    found = _verified(options, reference=reference)
    assert not found.equivalent, (found.training_tensor, found.training_error, found.training_allowed)


def test_a_side_that_hangs_ends_soon(monkeypatch: Patch) -> None:
    """All wait for a message that nobody sends."""
    honest = worker.played

    def waiting(model: Any, *args: Any, **options: Any) -> Any:
        if model.plan.num_ranks > 1:
            dist.recv(torch.zeros(1), src=1 - dist.get_rank())
        return honest(model, *args, **options)

    monkeypatch.setattr(worker, "played", waiting)
    with pytest.raises(WorkersFailedError, match="hung: it gave no sign of life"):
        _verified(DDP, silence_s=1.0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("whole_from", [None, 1, 2])
def test_dropout_keeps_the_mean_of_every_element(p: float, whole_from: int | None) -> None:
    """E[y] = x, over steps: each element by itself, and only 0 and x / (1 - p) are ever seen."""
    context = SampleContext(seed=3, samples=torch.arange(64), total=64)
    dropout = SampleDropout(p, site="here", context=context, whole_from=whole_from).train()
    x = torch.linspace(0.5, 2.0, 64 * 6).double().view(64, 6, 1)
    steps, total = 400, torch.zeros_like(x)
    for number in range(steps):
        context.step = number
        y = dropout(x)
        left = y != 0
        torch.testing.assert_close(y[left], (x / (1 - p))[left])
        total += y
    error = (total / steps / x - 1).abs()
    spread = math.sqrt(p / (1 - p) / steps)
    assert float(error.max()) < 6 * spread
    assert float((total / steps / x).mean()) == pytest.approx(1.0, abs=6 * spread / math.sqrt(64))


def test_alpha_dropout_keeps_mean_and_variance_of_a_normal_input() -> None:
    context = SampleContext(seed=3, samples=torch.arange(256), total=256)
    dropout = SampleAlphaDropout(0.2, site="here", context=context).train()
    y = dropout(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).double())
    assert float(y.mean()) == pytest.approx(0.0, abs=0.03)
    assert float(y.var()) == pytest.approx(1.0, abs=0.03)


def test_what_is_silent_drops_nothing_and_other_functions_stay() -> None:
    context = SampleContext(seed=1, samples=torch.arange(4), total=4, silent=True)
    x = torch.randn(4, 5)
    assert torch.equal(SampleDropout(0.5, site="a", context=context).train()(x), x)
    rrelu = samples.SampleRReLU(0.1, 0.3, site="b", context=context).train()
    with plain_training.NothingDropped():
        assert torch.equal(nn.functional.dropout(x, 0.5, True), x)
        assert torch.equal(nn.Dropout(0.9).train()(x), x)
        torch.testing.assert_close(nn.functional.rrelu(x, 0.1, 0.3, True), rrelu(x))
        assert torch.equal(torch.relu(x), x.clamp(min=0))
