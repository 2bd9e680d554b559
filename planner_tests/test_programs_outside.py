"""Parameters of a model that its forward does not read: a loop may use them in its loss."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asa
from asa.launch import run_ranks
from planner_tests.programs import Program, State, assert_as_alone, classes, distance, numbers


class Weighted(nn.Module):
    """A classifier that learns the weight of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.logvar = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def loop(net: Any, opt: torch.optim.Optimizer, batches: Any) -> State:
    net.train()
    for x, y in batches:
        opt.zero_grad()
        (F.cross_entropy(net(x), y) * torch.exp(-net.logvar) + net.logvar).backward()
        opt.step()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


PROGRAM = Program(model=Weighted, x=numbers(24, 8), y=classes(24, 4), loop=loop)


def _automatic(_rank: int, strategy: str) -> State:
    warnings.simplefilter("ignore")
    net, opt, batches = asa.parallelize(
        *PROGRAM.made(),
        strategies=(strategy,),
        cache=None,
        cluster="profiles/cluster.local-gloo-2.json",
        time_limit_s=0.1,
    )
    return loop(net, opt, batches)


def test_a_parameter_of_the_loss_is_trained_as_on_one_device() -> None:
    for state in run_ranks(2, _automatic, "ddp", threads=1, timeout_s=120):
        assert distance(state, PROGRAM.alone()) < 1e-11


def _planned(_rank: int, plan: Any) -> str:
    with pytest.warns(UserWarning, match=r"logvar is not updated: the model's forward does not read it"):
        asa.parallelize(*PROGRAM.made(), plan=plan)
    return "told"


def test_under_a_given_plan_of_data_parallelism_it_is_trained() -> None:
    assert_as_alone(PROGRAM, ["ddp", "zero1", "fsdp"])


def test_under_a_given_plan_that_splits_it_is_said() -> None:
    assert run_ranks(2, _planned, PROGRAM.plan("tensor"), threads=1, timeout_s=120) == ["told"] * 2
