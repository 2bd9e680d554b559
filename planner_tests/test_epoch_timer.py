"""Ranks exchange figures often enough to find a slow rank soon, and seldom enough to cost nothing."""

from __future__ import annotations

import math
import time
from typing import cast

import pytest
import torch
import training

from asa.executor.model.votes import Votes
from asa.executor.training.clock import StepClock, StepTimes
from asa.executor.training.epoch_timer import EpochTimer
from asa.executor.training.worker import LossCounter
from asa.scheduler.findings import impossible_figures
from asa.sharding.collectives.waits import waits


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


class _Two(_Alone):
    """Votes of two ranks of which one reports in every step what cannot be."""

    live = (0, 1)

    def __init__(self, who: int, work_s: float, log_every: int) -> None:
        self.who, self.work_s, self.log_every = who, work_s, log_every

    def gather(self, figures: list[float]) -> list[list[float]]:
        """The same figures of both, but for that."""
        rows, size = [list(figures), list(figures)], len(StepTimes._fields)
        for at in range(len(figures) - size * self.log_every, len(figures), size):
            rows[self.who][at + 1] = self.work_s
        return rows


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("work_s", [math.nan, -1.0, math.inf])
def test_a_rank_whose_times_cannot_be_changes_no_step_and_is_known(
    monkeypatch: pytest.MonkeyPatch, who: int, work_s: float
) -> None:
    monkeypatch.setattr(waits, "on", True)
    clock = _Steps(0.5)
    votes = cast("Votes", _Two(who, work_s, 20))
    timer = EpochTimer(training.plan(ranks=2), (0, 1), votes, cast("StepClock", clock), 20, 10)
    clock.taken = 20
    for _ in range(20):
        timer.stepped(full=True)
    interval = timer.exchange(LossCounter(torch.device("cpu")), step=20, stop=False)
    measured = interval.measured
    assert measured is not None
    assert (interval.seconds, measured.step_time.median, measured.mean_step_s) == pytest.approx((10.0, 0.5, 0.5))
    assert list(impossible_figures(measured)) == [who]
    assert measured.per_rank[1 - who].own_s == 0.5


def test_a_step_of_which_nobody_knows_how_long_it_took_ends_nothing() -> None:
    clock = _Steps(math.nan)
    timer = EpochTimer(training.plan(ranks=1), (0,), cast("Votes", _Alone()), cast("StepClock", clock), 20, 10)
    clock.taken = 1
    timer.stepped(full=True)
    interval = timer.exchange(LossCounter(torch.device("cpu")), step=1, stop=False)
    assert interval.seconds > 0
    assert list(impossible_figures(timer.measurements(None))) == [-1]


class _Late(_Two):
    """Rank 0 waits a second for its data in every step, and rank 1 as long for rank 0."""

    def gather(self, figures: list[float]) -> list[list[float]]:
        """The figures of rank 0, and those of rank 1."""
        rows, size = [list(figures), list(figures)], len(StepTimes._fields)
        for at in range(len(figures) - size * self.log_every, len(figures), size):
            rows[0][at] = 1.0
            rows[1][at : at + 4] = [0.0, 1.0 + figures[at + 1], 1.0, 1.0]
        return rows


def test_the_time_that_one_rank_waits_for_data_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "on", True)
    clock, votes = _Steps(0.25), cast("Votes", _Late(0, 0.0, 20))
    timer = EpochTimer(training.plan(ranks=2), (0, 1), votes, cast("StepClock", clock), 20, 10)
    clock.taken = 20
    for _ in range(20):
        timer.stepped(full=True)
    interval = timer.exchange(LossCounter(torch.device("cpu")), step=20, stop=False)
    measured = interval.measured
    assert measured is not None
    assert (interval.seconds, interval.data_wait_s) == pytest.approx((25.0, 20.0))
    assert (measured.step_time.median, measured.data_wait_s) == pytest.approx((0.25, 1.0))
    assert impossible_figures(measured) == {}
    assert measured.slowest == (0, pytest.approx(0.8))
