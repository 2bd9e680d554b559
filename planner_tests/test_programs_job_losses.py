"""Losses of a Job: what is not a mean over samples is refused by its value or by its gradients, a loss that cannot be
compared is said to be so, and a validation loss is that of one process."""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import asa
from asa.errors import UsageError
from asa.ir.plan import Plan
from asa.launch import run_ranks
from planner_tests.programs import Program, classes, numbers

WEIGHTS = torch.tensor([0.1, 4.0, 1.0], dtype=torch.float64)


class ByItsNorm(torch.autograd.Function):
    """A mean square, whose gradient is divided by its norm."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.square().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (z,) = ctx.saved_tensors
        return gradient * z / z.norm()


class Annealed:
    """From the second epoch of three steps on another loss."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(z, y) + (z.std(0).sum() if self.calls > 3 else 0.0)


def of_few(z: Tensor, y: Tensor) -> Tensor:
    """A loss that takes no more than three samples."""
    assert len(z) <= 3
    return F.cross_entropy(z, y)


def weighted(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, weight=WEIGHTS)


class Centred(nn.Module):
    """Takes a mean over its batch away."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def smoothed(z: Tensor, y: Tensor) -> Tensor:
    """Two cross-entropies of the same targets, weighed and smoothed, some of them ignored."""
    y = torch.where(y == 2, -100, y)
    return F.cross_entropy(z, y, weight=WEIGHTS, label_smoothing=0.1) + 0.5 * F.cross_entropy(z * 2, y, weight=WEIGHTS)


def program(mixing: bool = False) -> Program:
    return Program(
        model=lambda: nn.Sequential(nn.Linear(5, 8), Centred() if mixing else nn.GELU(), nn.Linear(8, 3)),
        x=numbers(18, 5), y=classes(18, 3), loop=lambda *_: {},
    )  # fmt: skip


def trained(_rank: int, plans: dict[bool, Plan]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cases = {
        "by its norm": lambda z, _y: ByItsNorm.apply(z), "of few": of_few, "annealed": Annealed(),
        "mean": F.cross_entropy, "mixing": F.cross_entropy, "weighted": weighted,
        "smoothed": smoothed,
    }  # fmt: skip
    for name, loss in cases.items():
        text = io.StringIO()
        with warnings.catch_warnings(record=True) as heard, contextlib.redirect_stderr(text):
            warnings.simplefilter("always")
            net, opt, batches = program(name == "mixing").made()
            held_out = DataLoader(TensorDataset(numbers(10, 5, seed=3), classes(10, 3, seed=4)), 5)
            job = asa.Job(net, opt, batches, loss, plans[name == "mixing"], validation=held_out, replan=False)
            try:
                records = job.run(epochs=2)
                found[name] = [str(w.message) for w in heard] + text.getvalue().splitlines()
                found[f"{name}, held out"] = records[0].validation_loss
            except UsageError as error:
                found[name] = [f"refused: {error}"]
            job.close()
    return found


def test_what_is_no_mean_is_refused_or_named_and_a_validation_loss_is_that_of_one_process() -> None:
    plans = {mixing: replace(program(mixing).plan("ddp"), num_microbatches=1) for mixing in (False, True)}
    by_rank = run_ranks(2, trained, plans, threads=1, timeout_s=120)
    for found in by_rank:
        assert "gradients of the outputs differ" in found["by its norm"][0]
        assert found["by its norm"][0].startswith("refused")
        assert any("the loss is not a mean over samples" in line for line in found["annealed"])
        others = ("asa: the plan stays", "asa: slow: ", "asa: over: ")  # what steps take is another matter
        assert not [line for line in found["mean"] if not line.startswith(others)]
    assert any("was not checked: it does not take the whole batch" in line for line in by_rank[0]["of few"])
    assert any("from other samples of the batch" in line for line in by_rank[0]["mixing"])

    held_out = numbers(10, 5, seed=3), classes(10, 3, seed=4)
    for name, loss in (("weighted", weighted), ("smoothed", smoothed)):
        net, opt, batches = program().made()
        for x, y in batches:
            opt.zero_grad()
            loss(net(x), y).backward()
            opt.step()
        for found in by_rank:
            assert abs(found[f"{name}, held out"] - float(loss(net(held_out[0]), held_out[1]).detach())) < 1e-10
