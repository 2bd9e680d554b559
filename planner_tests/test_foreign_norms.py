"""BatchNorm in other code than torch's layers: with ``batch_norm="exact"`` it is that of one device, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import asa
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.tracing import trace
from planner_tests import user_programs as user
from planner_tests.hand_plans import hand_plan, uniform


class NormAct(nn.BatchNorm2d):
    """A subclass with a forward of its own, as image libraries have them."""

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        if self.training:
            self.num_batches_tracked.add_(1)
        y = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return F.relu(y)


class Functional(nn.Module):
    """A layer that calls the function, without running statistics."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, self.scale, None, True)


KINDS = {"subclass": NormAct, "function": Functional, "torch's own for several ranks": nn.SyncBatchNorm}
CASES = [(kind, plan) for kind in KINDS for plan in ("replicate", "zero3", "checkpointed")]


def network(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), KINDS[kind](6)),
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
            nn.Flatten(1), nn.Linear(384, user.CLASSES),
        ).double()  # fmt: skip


def trained(kind: str, plan: Plan | None, **options: Any) -> dict[str, Tensor]:
    net: Any = network(kind)
    opt: Any = torch.optim.SGD(net.parameters(), lr=0.05)
    batches: Any = user.loader(samples=3 * user.BATCH)
    if plan is not None:
        net, opt, batches = asa.parallelize(net, opt, batches, plan=plan, **options)
    for x, y, _number in batches:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    found = {key: value.clone() for key, value in net.state_dict().items() if value.is_floating_point()}
    if plan is not None:
        net.close()
    return found


def on_rank(_rank: int, plans: dict[tuple[str, str], Plan]) -> dict[tuple[str, str], dict[str, Tensor]]:
    return {(kind, name): trained(kind, plan, batch_norm="exact") for (kind, name), plan in plans.items()}


def plan_for(kind: str, name: str) -> Plan:
    found = hand_plan(
        network(kind).float(), 2, uniform(2, 1), input_shape=user.SHAPE, num_classes=user.CLASSES,
        data_strategy=lambda _i: "zero3" if name == "zero3" else "replicate", global_batch=user.BATCH,
    )  # fmt: skip
    traced = trace(network(kind), torch.zeros((2, *user.SHAPE), dtype=torch.float64), name="model")
    checkpoint = name == "checkpointed"
    components = tuple(replace(c, checkpoint=checkpoint) for c in found.components)
    return replace(found, components=components, model_fingerprint=traced.model_fingerprint)


def test_norms_of_other_code_are_those_of_one_device() -> None:
    plans = {(kind, name): plan_for(kind, name) for kind, name in CASES}
    expected = {kind: trained(kind, None) for kind in KINDS}
    for found in run_ranks(2, on_rank, plans, threads=1, timeout_s=120):
        for (kind, name), state in found.items():
            assert user.distance(state, expected[kind]) < 1e-9, (kind, name)
