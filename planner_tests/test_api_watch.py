"""Loops of the user's own say which rank is slow, whatever their plan was made from; and are silent otherwise."""

from __future__ import annotations

import sys
import time
from io import StringIO

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import asa
from asa.ir.plan import Plan
from asa.launch import run_ranks
from planner_tests.hand_plans import hand_plan, uniform

STEPS, BATCH = 80, 8


class Slowed(nn.Module):
    """One rank sleeps in some of the steps."""

    until: tuple[int, int] = (0, 0)
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Slowed.calls += 1
        time.sleep(0.008 if self.until[0] <= Slowed.calls < self.until[1] else 0.002)
        return x


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Slowed(), nn.Flatten(), nn.Linear(12, 5))


def _plan() -> Plan:
    choose = uniform(2, 1)
    return hand_plan(_model(), 2, choose, input_shape=(3, 2, 2), num_classes=5, data_strategy=lambda _: "replicate",
                     global_batch=BATCH)  # fmt: skip


def _train(rank: int, plan: Plan, slow: tuple[int, int], observe: bool) -> str:
    heard, sys.stderr = sys.stderr, StringIO()
    try:
        Slowed.until = slow if rank == 1 else (0, 0)
        net = _model()
        data = TensorDataset(torch.randn(STEPS * BATCH, 3, 2, 2), torch.zeros(STEPS * BATCH, dtype=torch.long))
        placed, opt, batches = asa.parallelize(
            net,
            torch.optim.SGD(net.parameters(), lr=0.0),
            DataLoader(data, batch_size=BATCH),
            plan=plan,
            observe=observe,
        )
        for x, y in batches:
            opt.zero_grad()
            nn.functional.cross_entropy(placed(x), y).backward()
            opt.step()
        placed.close()
        return sys.stderr.getvalue()
    finally:
        sys.stderr = heard


@pytest.mark.parametrize(("slow", "observe"), [((30, 10**9), True), ((0, 0), True), ((30, 10**9), False)])
def test_the_slow_rank_is_named(slow: tuple[int, int], observe: bool) -> None:
    told, silent = run_ranks(2, _train, _plan(), slow, observe, threads=1, timeout_s=60)
    lines = [line for line in told.splitlines() if "slow" in line]
    assert silent == ""
    if slow[1] and observe:
        assert len(lines) == 1
        assert "rank 1 takes" in lines[0]
    else:
        assert lines == []
