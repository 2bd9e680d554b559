"""Loops of the user's own say which rank is slow, whatever their plan was made from; and are silent otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import asa
from asa.api.steps.watch import StepWatch
from asa.executor.training.clock import StepClock, StepTimes
from asa.executor.training.epoch_timer import EpochTimer
from asa.executor.training.rank_times import Stolen
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.report.text.story import said
from asa.sharding.collectives.waits import waits
from planner_tests.hand_plans import hand_plan, uniform

STEPS, BATCH = 60, 8


STEP_S, OWN_S, SLOW_S = 0.10, 0.02, 0.08


class Clocked:
    """Steps as long as it says, whatever else this machine does: of its own, a rank has more to do from one on."""

    def __init__(self, slow_from: int | None) -> None:
        self.slow_from, self.steps = slow_from, 0

    def begin(self) -> None:
        """Take the place of what measures this process."""
        StepClock.collect = lambda clock: self.collect(clock)  # type: ignore[method-assign]
        StepWatch.loaded = lambda *_: None  # type: ignore[method-assign]  # nor waits a step for this machine's loader
        waits.transfers = list  # type: ignore[method-assign]  # nor for its links
        Stolen.share = lambda _: -1.0  # type: ignore[method-assign]
        EpochTimer.resume = lambda _: None  # type: ignore[method-assign]  # what an exchange costs: it is the less often

    def collect(self, clock: StepClock) -> list[StepTimes]:
        """Stands in for :meth:`StepClock.collect`."""
        found = []
        for _ in clock._steps:
            self.steps += 1
            slow = self.slow_from is not None and self.steps >= self.slow_from
            waited = STEP_S - (SLOW_S if slow else OWN_S)
            found.append(StepTimes(0.0, STEP_S, blocked=waited, late=waited))
        clock._steps = []
        return found


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5))


def _plan() -> Plan:
    choose = uniform(2, 1)
    return hand_plan(_model(), 2, choose, input_shape=(3, 2, 2), num_classes=5, data_strategy=lambda _: "replicate",
                     global_batch=BATCH)  # fmt: skip


def _train(rank: int, plan: Plan, slow_from: int | None, observe: bool) -> str:
    heard, sys.stderr = sys.stderr, StringIO()
    clocked = Clocked(slow_from if rank == 1 else None)
    try:
        clocked.begin()
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


def _told(rank: int) -> tuple[str, list[dict[str, Any]]]:
    """What a job writes to standard error while its steps take longer than predicted, and the events of that."""
    heard, sys.stderr = sys.stderr, StringIO()
    clocked, events = Clocked(None), list[dict[str, Any]]()
    try:
        clocked.begin()
        net = _model()
        data = TensorDataset(torch.randn(STEPS * BATCH, 3, 2, 2), torch.zeros(STEPS * BATCH, dtype=torch.long))
        job = asa.Job(
            net,
            torch.optim.SGD(net.parameters(), lr=0.0),
            DataLoader(data, batch_size=BATCH),
            nn.functional.cross_entropy,
            cache=None,
            cluster="profiles/cluster.local-gloo-2.json",
            time_limit_s=0.3,
            on_event=events.append,
        )
        job.run(2)
        job.close()
        return sys.stderr.getvalue(), events
    finally:
        sys.stderr = heard


def test_a_job_says_what_it_finds_and_decides() -> None:
    (told, events), (silent, others) = run_ranks(2, _told, threads=1, timeout_s=120)
    assert (silent, others) == ("", [])
    lines = [f"asa: {said(e)}" for e in events if e["event"] in ("finding", "replan")]
    assert any(line.startswith("asa: slow: ") for line in lines), told
    assert [line for line in told.splitlines() if line in lines] == lines


def _told_in_parts(rank: int) -> list[dict[str, Any]]:
    """Events of a job that is asked for its epochs one at a time."""
    heard, sys.stderr = sys.stderr, StringIO()
    events: list[dict[str, Any]] = []
    try:
        Clocked(None).begin()
        net = _model()
        data = TensorDataset(torch.randn(STEPS * BATCH, 3, 2, 2), torch.zeros(STEPS * BATCH, dtype=torch.long))
        job = asa.Job(
            net, torch.optim.SGD(net.parameters(), lr=0.0), DataLoader(data, batch_size=BATCH),
            nn.functional.cross_entropy, cache=None, cluster="profiles/cluster.local-gloo-2.json", time_limit_s=0.3,
            on_event=events.append,
        )  # fmt: skip
        for epochs in range(1, 4):
            job.run(epochs)
        job.close()
        return events
    finally:
        sys.stderr = heard


def test_a_job_remembers_from_call_to_call_what_it_has_said() -> None:
    events, _ = run_ranks(2, _told_in_parts, threads=1, timeout_s=120)
    lines = [e["line"] for e in events if e["event"] == "finding"]
    assert lines
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize(("slow_from", "observe"), [(22, True), (None, True), (22, False)])
def test_the_slow_rank_is_named(slow_from: int | None, observe: bool) -> None:
    told, silent = run_ranks(2, _train, _plan(), slow_from, observe, threads=1, timeout_s=120)
    lines = [line for line in told.splitlines() if "slow" in line]
    assert silent == ""
    if slow_from is not None and observe:
        assert len(lines) == 1
        assert "rank 1 takes" in lines[0]
    else:
        assert lines == []


_READ = """
import torch
from asa.api.losses.tape import Watched
loss = (torch.ones((), requires_grad=True) * 2).as_subclass(Watched)
print(float(loss))
"""


def test_a_warning_of_torch_names_the_line_of_the_program(tmp_path):
    (tmp_path / "own.py").write_text(_READ)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONWARNINGS": "always"}
    command = [sys.executable, str(tmp_path / "own.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "2.0\n"
    assert not done.stderr or "own.py:5: UserWarning: Converting a tensor" in done.stderr
