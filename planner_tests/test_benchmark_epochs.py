"""Plans that take turns for some epochs: validated after as many steps of their own, at the rates of a run."""

from __future__ import annotations

import dataclasses
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import training

from asa.executor.consistency.server import Server
from asa.executor.measuring import benchmark
from asa.executor.measuring.benchmark import BenchOptions
from asa.executor.running.prepare import open_images
from asa.executor.training.optimizer import learning_rate
from asa.executor.training.settings import TrainSettings
from asa.ir.consistency import parse
from asa.strategies import offered
from asa.zoo.models import build


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Two plans on one rank, which is this process: one has two turns a round."""
    first = training.plan("logistic", batch=479)
    second = dataclasses.replace(training.plan("logistic", batch=479, microbatches=2), strategy="halves")
    images = open_images(first, training.settings(Path(tmp_path_factory.mktemp("data"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "tell", lambda message: None)
        patch.setattr(benchmark, "warm_up", lambda every, votes: every())
        return benchmark._rank(
            0, [first, second], lambda: build("logistic", num_classes=10, input_shape=(1, 8, 8), seed=0), offered(),
            lambda: images, BenchOptions(budget_s=600, epochs=3, lr=0.05, evaluation_samples=64),
        )  # fmt: skip


def test_all_are_validated_after_the_same_epochs(cells):
    once, twice = ([a.epoch for a in c.accuracy] for c in reversed(cells))
    assert once == twice == [1.0, 2.0, 3.0]


def test_the_same_training_learns_the_same_however_often_it_has_a_turn(cells):
    for a, b in zip(*(c.accuracy for c in cells), strict=True):
        assert a.validation_loss == pytest.approx(b.validation_loss, rel=1e-4)
        assert a.validation_accuracy == b.validation_accuracy


def test_the_time_to_an_epoch_is_that_of_all_its_steps(cells):
    once = cells[1]  # a turn a round
    whole = statistics.mean(a + b for a, b in zip(once.steps, once.data_wait, strict=True))
    assert len(once.steps) == 8, "the ninth of three epochs was the warm-up"
    assert once.accuracy[-1].seconds == pytest.approx(9 * whole)


def test_what_is_held_and_done_is_measured(cells):
    for c in cells:
        assert c.samples_per_epoch == 1437
        assert 0 < c.state_memory_bytes[0] <= c.peak_memory_bytes[0]
        assert c.reserved_memory_bytes is None, "no device's allocator reserves on a CPU"
        assert 0 < c.usage[0].busy <= 1


def test_rates_are_those_of_a_training_run():
    plan = training.plan("logistic")
    rate = benchmark._rates(plan, BenchOptions(lr=0.05), 200)
    settings = TrainSettings(out="", lr=0.05)
    for step in range(200):
        assert rate(step) == learning_rate(step / 200, 0.05, warmup=settings.warm_up(200), step=1 / 200)
    assert rate(200) == pytest.approx(0.0, abs=1e-12)


def test_who_has_ended_a_turn_makes_no_other_wait_and_no_gradient_gets_older_than_the_window(monkeypatch):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=0.1)
    server = Server(parse("ps_bounded:window=1:max_age=none"), torch.zeros(4), 0, [(0, 4)], optimizer, range(2), 12)
    meeting, rows, quiet = threading.Barrier(2), [[], []], []

    def waiting_for_nothing(_):
        quiet.append(1)
        assert len(quiet) < 40, "a worker waits for one that waits for it"

    monkeypatch.setattr(Server, "_give_up_silent", waiting_for_nothing)

    def turns(rank):
        def gather(values):
            rows[rank] = values
            meeting.wait()
            found = list(rows)
            meeting.wait()
            return found

        def turn(_images, _order, steps):
            for _ in range(2 + 4 * rank):
                server.push(rank, torch.ones(4), 6, [0.1])
            return [(0.0, 1.0)] * steps

        conduct = SimpleNamespace(pause=lambda: server.pause(rank), resume=lambda: server.pull(rank))
        entrant = SimpleNamespace(turn=turn, worker=SimpleNamespace(conduct=conduct), cell=benchmark.Cell("ps_bounded"))
        try:
            for _ in range(3):
                benchmark.timed_turn(entrant, None, None, 1, SimpleNamespace(gather=gather))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(turns, range(2)))
    assert set(server.counts.ages) <= {0, 1}
