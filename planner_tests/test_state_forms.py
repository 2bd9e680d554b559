"""Constants, types and strides of what ranks exchange and save are those of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asa
from asa.errors import UnavailableError
from asa.executor.model.materialize import materialize
from asa.executor.model.state import full_state, load_full_optimizer_state
from asa.executor.model.votes import Votes
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.strategies import offered
from asa.tracing import TracedModel, trace
from planner_tests.hand_plans import hand_plan, uniform
from planner_tests.programs import Program, State, assert_as_alone, classes, cross_entropy, epochs, numbers
from planner_tests.stage_plans import staged


class Constants(nn.Module):
    """Layers with constants that a sum over ranks rounds or cannot hold, of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.temperature = nn.Linear(4, 6), nn.Linear(6, 3), nn.Parameter(torch.tensor(2.0))
        self.register_buffer("mask", torch.full((6,), torch.finfo(torch.float32).min).diag())
        self.register_buffer("large", torch.tensor([40_000.0, 0.1], dtype=torch.float16))
        self.register_buffer("tenth", torch.tensor(0.1, dtype=torch.float64))
        self.register_buffer("index", torch.arange(6, dtype=torch.int16))
        self.register_buffer("turn", torch.polar(torch.ones(6), torch.arange(6.0)))
        self.register_buffer("repeated", torch.ones(1).expand(6))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.large.sum().to(x.dtype) * 1e-5 * self.tenth.to(x.dtype)
        x = self.first(x) * scale * self.repeated + self.index - self.mask.clamp(min=-1).sum(0) * self.turn.abs()
        return self.second(torch.relu(x)) * self.temperature


def _traced() -> TracedModel:
    torch.manual_seed(0)
    return trace(Constants(), torch.zeros(2, 4), name="model")


def _plan(width: int) -> Plan:
    return hand_plan(_traced(), width, uniform(width, 1), input_shape=(4,), num_classes=3)


def _held(rank: int, plan: Plan) -> dict[str, Tensor]:
    model = materialize(
        plan, _traced(), torch.empty(0), rank=rank, strategies=offered(), device=torch.device("cpu"), timeout_s=120
    )
    model.average_buffers()
    return full_state(model)


@pytest.mark.parametrize("stages", [1, 2])
def test_constants_of_every_type_stay_what_they_are(stages: int) -> None:
    model, plan = Constants(), _plan(3) if stages == 1 else staged(_plan(2), [1, 1])
    for state in run_ranks(plan.num_ranks, _held, plan, threads=1, timeout_s=120):
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[name], buffer) for name, buffer in model.named_buffers())


def _sent(rank: int) -> list[Tensor]:
    votes, sent = Votes(120), []
    for kind in (torch.int16, torch.uint16, torch.bool, torch.bfloat16, torch.complex64, torch.float8_e5m2):
        tensor = torch.full((2, 3), rank).to(kind)
        votes.broadcast(tensor, source=1)
        sent.append(tensor.to(torch.complex64))
    return sent


def test_a_rank_sends_numbers_of_every_type() -> None:
    for sent in run_ranks(2, _sent, threads=1, timeout_s=120):
        assert all(torch.equal(tensor, torch.ones(2, 3, dtype=torch.complex64)) for tensor in sent)


def test_the_state_of_a_parameter_of_one_number_is_where_the_parameter_is() -> None:
    model = materialize(
        _plan(1), _traced(), torch.empty(0), rank=0, strategies=offered(), device=torch.device("meta"), timeout_s=120
    )
    optimizer = torch.optim.AdamW(model.updated, foreach=True)
    stored = {f"temperature/{key}": torch.tensor(1.0) for key in ("step", "exp_avg", "exp_avg_sq")}
    load_full_optimizer_state(model, optimizer, stored)
    (state,) = optimizer.state.values()
    assert {key: value.device.type for key, value in state.items()} == {
        "step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta",
    }  # fmt: skip


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))


def _pictures() -> nn.Module:
    return Pictures().to(memory_format=torch.channels_last)


def _continued(net: Any, opt: torch.optim.Optimizer, batches: Any) -> State:
    """Two steps here, and two of a plain model with the state of both."""
    for x, y in batches:
        opt.zero_grad()
        cross_entropy(net, x, y).backward()
        opt.step()
    weights, state = net.state_dict(), opt.state_dict()
    plain = _pictures().double()
    plain.load_state_dict(weights)
    further = _fused(plain)
    further.load_state_dict(state)
    for x, y in ((numbers(6, 3, 5, 5, seed=s), classes(6, 3, s)) for s in (5, 6)):
        further.zero_grad()
        cross_entropy(plain, x, y).backward()
        further.step()
    return dict(plain.state_dict())


def _fused(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)


def test_the_state_of_an_optimizer_continues_in_fused_kernels_elsewhere() -> None:
    """These match state and parameter by their positions in memory."""
    program = Program(
        model=_pictures, x=numbers(12, 3, 5, 5), y=classes(12, 3), loop=_continued, optimizer=_fused
    )  # fmt: skip
    assert_as_alone(program, ["ddp", "zero1", "zero2", "fsdp", "tensor"], within=1e-9)


class Noting(nn.Module):
    """A layer with state of its own making beside its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.note = nn.Linear(4, 6), nn.Linear(6, 3), 1.0
        self.register_buffer("repeated", torch.ones(1).expand(6), persistent=False)

    def get_extra_state(self) -> dict[str, float]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.note = state["note"]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu() * self.repeated)


def _noted(net: Any, opt: torch.optim.Optimizer, batches: Any) -> State:
    state = net.state_dict()
    state["_extra_state"] = {"note": 2 * state["_extra_state"]["note"]}
    net.load_state_dict(state)
    epochs(net, opt, batches, cross_entropy)
    return {name: torch.tensor(t["note"]) if name == "_extra_state" else t for name, t in net.state_dict().items()}


def test_state_that_a_module_makes_itself_is_saved_and_loaded() -> None:
    assert_as_alone(Program(model=Noting, x=numbers(12, 4), y=classes(12, 3), loop=_noted), ["ddp", "fsdp", "tensor"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_state_that_a_full_disk_does_not_take_is_said_so() -> None:
    with pytest.raises(UnavailableError, match="/dev/full cannot be written: No space left on device"):
        asa.save({"weight": torch.zeros(1000)}, "/dev/full")
