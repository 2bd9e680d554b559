"""Programs that train in evaluation mode, and what they do to parameters behind the call."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asa
from asa.launch import run_ranks
from planner_tests.programs import Program, State, classes, distance, numbers


def _net() -> nn.Module:
    between = nn.BatchNorm1d(5), nn.GELU(), nn.Linear(5, 5), nn.Dropout(0.5)
    return nn.Sequential(nn.Linear(5, 5), *between, nn.Linear(5, 3))


def _weighted(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y, weight=torch.tensor([0.1, 2.0, 1.0], dtype=torch.float64))


def _in_evaluation(net: Any, opt: Any, batches: Any) -> State:
    """All of it, in batches of five, the last of two; its loss counts by its targets."""
    net.eval()
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            _weighted(net, x, y).backward()
            opt.step()
    return dict(net.state_dict())


def _turned_between(net: Any, opt: Any, batches: Any) -> State:
    """The mode changes between forward and backward."""
    for x, y in batches:
        opt.zero_grad()
        net.eval()
        loss = _weighted(net, x, y)
        net.train()
        with torch.no_grad():
            net.eval()(x)
        loss.backward()
        opt.step()
    return dict(net.state_dict())


@pytest.mark.parametrize("loop", [_in_evaluation, _turned_between])
def test_training_in_evaluation_mode_is_that_of_one_process(loop: Any) -> None:
    program = Program(model=_net, x=numbers(17, 5), y=classes(17, 3), batch=5, loop=loop)
    wanted = program.alone()
    for plan, states in program.spread(["ddp", "fsdp", "tensor", "mixed", "zero1"]).items():
        for state in states:
            assert not isinstance(state, str), (plan, state)
            assert distance(state, wanted) < 1e-10, plan


def _others(net: Any, opt: Any, batches: Any) -> State:
    """Steps in evaluation on samples that no loader gave."""
    net.eval()
    for _ in batches:
        opt.zero_grad()
        net(numbers(4, 5)).square().mean().backward()
        opt.step()
    return {}


def _tied(net: Any, _opt: Any, batches: Any) -> State:
    net[3].weight = net[0].weight
    for _ in batches:
        raise AssertionError("a batch was yielded")
    return {}


def _stepping(net: Any, _opt: Any, batches: Any) -> State:
    """Each parameter is updated as soon as its gradient is there."""
    steps = {p: torch.optim.SGD([p], 0.1) for p in net.parameters()}
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: steps[p].step())
    for x, y in batches:
        F.cross_entropy(net(x), y).backward()
    return {}


def _said(_rank: int, programs: list[Program], plan: Any) -> list[list[str]]:
    found = []
    for program in programs:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            net, opt, batches = asa.parallelize(*program.made(), plan=plan)
            try:
                program.loop(net, opt, batches)
                found.append([str(w.message) for w in heard])
            except asa.errors.UsageError as error:
                found.append([str(error)])
        net.close()
    return found


def test_what_cannot_be_followed_on_the_ranks_is_refused_or_named() -> None:
    loops = (_others, _tied, _stepping)
    programs = [Program(model=_net, x=numbers(12, 5), y=classes(12, 3), loop=loop) for loop in loops]
    for others, tied, stepping in run_ranks(2, _said, programs, programs[0].plan("ddp"), threads=1, timeout_s=120):
        assert any("not checked" in line and "of other samples" in line for line in others), others
        assert "replaced or tied behind asa.parallelize" in tied[0]
        assert "sees only this rank" in stepping[0]
