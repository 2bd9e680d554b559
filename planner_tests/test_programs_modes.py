"""Modes and state of modules: each keeps its own, as in one process."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asa
from asa.errors import UsageError
from asa.executor.model.modes import Modes
from asa.launch import run_ranks
from planner_tests.programs import Program, State, assert_as_alone, classes, cross_entropy, epochs, numbers

X, Y = numbers(20, 8), classes(20, 4)


def usual(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
    return epochs(net, opt, batches, cross_entropy, 2)


def frozen_norm() -> nn.Module:
    net = nn.Sequential(
        nn.Linear(8, 12), nn.BatchNorm1d(12, momentum=0.3), nn.GELU(), nn.Dropout(0.5), nn.Linear(12, 4)
    )
    net[1].running_mean += 0.3
    net[1].eval()
    net[3].eval()
    return net


def test_what_came_in_evaluation_mode_stays_there() -> None:
    assert_as_alone(Program(model=frozen_norm, x=X, y=Y, loop=usual), ["ddp", "fsdp", "mixed"])


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(nn.functional.dropout(x, 0.5, training=self.training))


def frozen_part() -> nn.Module:
    net = nn.Sequential(Noisy(), nn.GELU(), nn.Linear(8, 4))
    net[0].eval()
    return net


def test_a_part_that_asks_for_its_mode_stays_in_evaluation_or_is_named() -> None:
    program = Program(model=frozen_part, x=X, y=Y, loop=usual)
    for name, states in program.spread(["ddp", "fsdp"]).items():
        for state in states:
            assert not isinstance(state, str), f"{name}: {state}"
    net = program.made()[0]
    assert Modes.of(net).by_code == {"0"}


def train_again(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> State:
    """A program that calls ``train`` has every module train, frozen before or not."""
    epochs(net, opt, batches, cross_entropy)
    net.eval()
    net.train()
    return epochs(net, opt, batches, cross_entropy)


def frozen_dropless() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, 4))
    net[1].eval()
    return net


def test_train_means_all() -> None:
    program = Program(model=frozen_dropless, x=X, y=Y, loop=train_again, options={"batch_norm": "exact"})
    wanted = program.alone()
    assert float(wanted["1.running_mean"].abs().max()) > 1e-3
    assert_as_alone(program, ["ddp", "tensor"], within=1e-9)


def test_exact_norms_of_uneven_shares() -> None:
    program = Program(
        model=lambda: nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, 4)),
        x=X[:15], y=Y[:15],
        batch=5, loop=usual, options={"batch_norm": "exact"},
    )  # fmt: skip
    assert_as_alone(program, ["ddp", "zero1"], within=1e-9)


def test_a_model_of_one_mode_has_nothing_to_keep() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not Modes.of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))).training
        assert not Modes.of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()).training


class Counting(nn.Module):
    """Keeps a mean of what it sees, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("still", torch.ones(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0).to(self.mean))
        return x - self.mean.detach() * self.still


def counted() -> nn.Module:
    return nn.Sequential(Counting(), nn.Linear(8, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, 4))


def heard(_rank: int, program: Program, plan: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asa.parallelize(*program.made(), plan=plan)
    return [str(w.message) for w in said]


def test_what_differs_from_one_device_is_said_once() -> None:
    program = Program(model=counted, x=X, y=Y, loop=usual)
    first, second = run_ranks(2, heard, program, program.plan("ddp"), threads=1, timeout_s=120)
    assert not second
    *first, coupled = first
    assert coupled.startswith("the model computes a sample's output, or its gradient, from other samples")
    assert first == [
        "BatchNorm (2) normalises over the 3 samples that a rank computes at once, not over the 6 of a batch; "
        "batch_norm='exact' does that",
        "forward changes 0.mean: on each rank by the samples it computes, and averaged when the loader is through",
        "forward changes 0.calls: on each rank by the samples it computes, and not averaged, which floating-point "
        "numbers alone are",
    ]


def test_microbatches_cannot_have_exact_norms() -> None:
    program = Program(model=counted, x=X, y=Y, loop=usual)
    plan = replace(program.plan("single"), num_microbatches=2)
    net, opt, batches = program.made()
    with pytest.raises(
        UsageError, match=r"2 normalise over a batch of 6 samples, and the plan computes 2 microbatches"
    ):
        asa.Job(net, opt, batches, F.cross_entropy, plan, batch_norm="exact")
    net, opt, batches = program.made()
    with (
        pytest.warns(UserWarning, match=r"forward changes 0\.mean and 1 more: 2 times a step"),
        pytest.warns(UserWarning, match="from other samples of the batch"),
    ):
        asa.Job(net, opt, batches, F.cross_entropy, plan)
