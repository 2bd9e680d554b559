"""Ranks exchange figures often enough to find a slow rank soon, and seldom enough to cost nothing."""

from __future__ import annotations

import time
from typing import cast

import pytest
import torch
import training

from asa.executor.model.votes import Votes
from asa.executor.training.clock import StepClock, StepTimes
from asa.executor.training.epoch_timer import EpochTimer
from asa.executor.training.worker import LossCounter


class _Alone:
    """Votes of one rank."""

    rank, live = 0, (0,)

    def gather(self, figures: list[float]) -> list[list[float]]:
        return [figures]


class _Steps:
    """A clock on which every step takes ``work_s`` seconds."""

    def __init__(self, work_s: float) -> None:
        self.work_s, self.taken = work_s, 0

    def collect(self) -> list[StepTimes]:
        times, self.taken = [StepTimes(0.0, self.work_s, *[0.0] * (len(StepTimes._fields) - 2))] * self.taken, 0
        return times


def _intervals(monkeypatch: pytest.MonkeyPatch, work_s: float, cost_s: float, *, log_every: int = 50) -> list[int]:
    """Numbers of steps between exchanges, each of which costs ``cost_s`` seconds with what is decided from it."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = _Steps(work_s)
    timer = EpochTimer(training.plan(ranks=1), (0,), cast("Votes", _Alone()), cast("StepClock", clock), log_every, 10)
    found, steps = [], 0
    for _ in range(4):
        while True:
            steps, clock.taken = steps + 1, clock.taken + 1
            if timer.stepped(full=True):
                break
        found.append(clock.taken)
        timer.exchange(LossCounter(torch.device("cpu")), step=steps, stop=False)
        now[0] += cost_s
        timer.resume()
    return found


@pytest.mark.parametrize(
    ("work_s", "cost_s", "wanted"),
    [
        pytest.param(0.010, 0.0, [1, 20, 20, 20], id="short steps: twenty of them"),
        pytest.param(0.010, 0.0006, [1, 20, 30, 30], id="an exchange that costs more: at most 0.2 % of training"),
        pytest.param(0.001, 0.005, [1, 20, 50, 50], id="never over a line of the log"),
        pytest.param(0.400, 0.010, [1, 2, 2, 2], id="long steps: about a second"),
    ],
)
def test_exchanges_are_frequent_and_cheap(
    monkeypatch: pytest.MonkeyPatch, work_s: float, cost_s: float, wanted: list[int]
) -> None:
    assert _intervals(monkeypatch, work_s, cost_s) == wanted


def test_no_more_steps_than_a_line_of_the_log_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _intervals(monkeypatch, 0.010, 0.0, log_every=7) == [1, 7, 7, 7]
