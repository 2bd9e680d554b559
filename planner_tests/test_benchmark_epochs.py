"""Plans that take turns for some epochs: validated after as many steps of their own, at the rates of a run."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import pytest
import training

from asa.executor.measuring import benchmark
from asa.executor.measuring.benchmark import BenchOptions
from asa.executor.running.prepare import open_images
from asa.executor.training.optimizer import learning_rate
from asa.executor.training.settings import TrainSettings
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
            lambda: images, BenchOptions(budget_s=60, epochs=3, lr=0.05, evaluation_samples=64),
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
