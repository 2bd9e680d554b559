"""What strangers write: shared dropout, scalar weights, torch's own clipping, optimizer states saved in the middle."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asa
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.tracing import trace
from planner_tests import user_programs as user
from planner_tests.hand_plans import Choose, alternating, hand_plan, uniform


class Strange(nn.Module):
    """A linear layer called ``p``, one dropout called three times, a scalar weight, a frozen one."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.p = nn.Linear(192, 14)
        self.first = nn.Sequential(nn.Linear(14, 22), nn.GELU(), nn.Linear(22, 14))
        self.second = nn.Sequential(nn.Linear(14, 22), nn.GELU(), nn.Linear(22, 14))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.LayerNorm(14)
        self.drop = nn.Dropout(rate)
        self.head = nn.Linear(14, user.CLASSES)
        self.p.bias.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        x = self.drop(self.p(x.flatten(1)))
        x = x + self.drop(self.first(x))
        x = x + nn.functional.dropout(self.drop(self.second(x)), self.drop.p, self.training) * self.gain
        return self.head(self.norm(x))


def strange(rate: float = 0.0) -> nn.Module:
    """In float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Strange(rate).double()


def plan_of(choose: Choose, strategy: str, rate: float = 0.0) -> Plan:
    found = hand_plan(
        strange(rate).float(), 2, choose, input_shape=user.SHAPE, num_classes=user.CLASSES,
        data_strategy=lambda _i: strategy, global_batch=user.BATCH,
    )  # fmt: skip
    example = torch.zeros((2, *user.SHAPE), dtype=torch.float64)
    return replace(found, model_fingerprint=trace(strange(rate), example, name="model").model_fingerprint)


CASES: dict[str, tuple[Choose, str]] = {
    "ddp": (uniform(2, 1), "replicate"),
    "tensor": (uniform(1, 2), "replicate"),
    "zero1": (uniform(2, 1), "zero1"),
    "zero2": (uniform(2, 1), "zero2"),
    "zero3": (alternating(2, shift=1), "zero3"),
}


def epoch(net: nn.Module, opt: torch.optim.Optimizer, batches: Any, most: float) -> list[float]:
    """As in a script: the norms it saw."""
    norms = []
    for x, y, _ in batches:
        opt.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), most)))
        opt.step()
    return norms


def on_rank(rank: int, plans: list[Plan], saved: dict[str, Any]) -> list[Any]:
    found = []
    for plan in plans:
        net = strange()
        net, opt, batches = asa.parallelize(net, user.optimizer(net, "adamw"), user.loader(), plan=plan)
        norms = epoch(net, opt, batches, 0.3)
        state = net.state_dict(), opt.state_dict()
        opt.load_state_dict(copy.deepcopy(saved))  # of one device, after its first epoch
        norms += epoch(net, opt, batches, 0.3)
        found.append((state, net.state_dict(), norms))
        net.close()
    return found


def test_torch_clips_by_the_whole_norm_and_states_are_those_of_one_device() -> None:
    net = strange()
    opt, batches = user.optimizer(net, "adamw"), user.loader()
    norms = epoch(net, opt, batches, 0.3)
    saved, half = copy.deepcopy(opt.state_dict()), copy.deepcopy(net.state_dict())
    norms += epoch(net, opt, batches, 0.3)
    assert max(norms) > 0.3, "nothing was clipped"
    plans = [plan_of(*case) for case in CASES.values()]
    for rank in run_ranks(2, on_rank, plans, saved, threads=1, timeout_s=120):
        for name, ((weights, state), end, seen) in zip(CASES, rank, strict=True):
            assert seen == pytest.approx(norms, rel=1e-9), name
            assert user.distance(weights, half) < 1e-9, name
            assert user.distance(end, net.state_dict()) < 1e-9, name
            assert [g["params"] for g in state["param_groups"]] == [g["params"] for g in saved["param_groups"]]
            assert state["state"].keys() == saved["state"].keys(), name
            for i, values in saved["state"].items():
                for key, value in values.items():
                    assert torch.allclose(state["state"][i][key].to(value), value, rtol=1e-8), (name, i, key)


def masked(rank: int, plans: list[Plan]) -> list[dict[str, Tensor]]:
    found = []
    for plan in plans:
        net = strange(0.4)
        net, opt, batches = asa.parallelize(net, user.optimizer(net), user.loader(), plan=plan)
        user.loop(net, opt, batches)
        found.append(net.state_dict())
        net.close()
    return found


def test_a_dropout_called_several_times_masks_alike_under_any_plan() -> None:
    plans = [plan_of(*case, rate=0.4) for case in CASES.values()]
    first, *others = run_ranks(2, masked, plans, threads=1, timeout_s=120)[0]
    assert max(user.distance(other, first) for other in others) < 1e-9


def test_every_call_of_a_dropout_draws_anew() -> None:
    from asa.sharding.layers.dropout import make_reproducible
    from asa.sharding.randomness.samples import SampleContext

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.weight
            return torch.stack((self.drop(x), self.drop(x)), 1)

    traced = trace(Twice().train(), torch.ones(2, 64), name="twice")
    context = SampleContext(seed=1, samples=torch.arange(2), total=2)
    make_reproducible(traced.components, context)
    (found,) = traced.components[0].train()(torch.ones(2, 64))
    assert not torch.equal(found[:, 0], found[:, 1])
