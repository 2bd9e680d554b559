"""Losses, metrics and schedules by name or from a function of one's own: taken as they are, or refused in one line."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import nouns
import numpy as np
import pytest
import torch
import training
from torch import nn

from asa.errors import AsaError, InvalidInputError, UsageError
from asa.executor.running.run import train
from asa.executor.training.aims import LOSSES, METRICS, SCHEDULES, Aims
from asa.executor.training.optimizer import learning_rate
from asa.ir import codec
from asa.report.pages import run as run_page
from asa.report.text.training import epoch_line
from asa.scheduler import adapt
from asa.strategies import offered

LABELS = torch.tensor([3, 1, 0, 2, 1])


@pytest.fixture(autouse=True)
def mine(monkeypatch):
    module = ModuleType("mine_of_aims")
    module.summed = lambda: nn.CrossEntropyLoss(reduction="sum")
    module.weighted = lambda num_classes: nn.CrossEntropyLoss(torch.arange(1.0, num_classes + 1))
    module.fails = lambda: (_ for _ in ()).throw(ValueError("boom"))
    module.three = lambda: 3
    module.scalar = lambda: lambda output, labels: torch.tensor(0.5)
    module.half = lambda: lambda output, labels: torch.full((len(labels),), 0.5)
    module.below = lambda: lambda done: -done
    module.learns = lambda: nn.PReLU()
    module.nan = lambda: lambda output, labels: nn.functional.cross_entropy(output, labels) * float("nan")
    module.text = lambda: lambda done: "fast"
    module.arrays = lambda: lambda done: np.float32(1 - done)
    module.late = lambda: lambda done: float("nan") if 0.5 < done < 1 else 1.0
    monkeypatch.setitem(sys.modules, module.__name__, module)


def _aims(tmp_path, **names: str) -> Aims:
    settings, classes = training.settings(tmp_path, **names), 6
    aims = Aims.of(settings, classes)
    aims.try_out(settings, LABELS, classes)
    return aims


def test_all_that_have_a_name_are_what_training_needs(tmp_path):
    for loss in (*LOSSES, "torch.nn:MultiMarginLoss"):
        for metric in METRICS:
            _aims(tmp_path, loss=loss, metric=metric)
    maps = torch.randint(4, (3, 2, 2), generator=torch.Generator().manual_seed(0))
    for loss in LOSSES:
        Aims.of(training.settings(tmp_path, loss=loss), 4).try_out(training.settings(tmp_path, loss=loss), maps, 4)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_rates_rise_to_the_peak_and_stay_below_it(name, tmp_path):
    falling = _aims(tmp_path, schedule=name).schedule
    rates = [learning_rate(i / 40, 0.5, warmup=0.1, step=1 / 40, schedule=falling) for i in range(40)]
    assert rates[:4] == sorted(rates[:4])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert max(rates) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [
        ({"loss": "crossentropy"}, UsageError, "no loss is called 'crossentropy'; there are cross_entropy, mse"),
        ({"metric": "mine_of_aims:gone"}, UsageError, "mine_of_aims has no 'gone'"),
        ({"loss": "mine_of_aims:summed"}, InvalidInputError, "is not a mean over samples"),
        ({"loss": "mine_of_aims:weighted"}, InvalidInputError, "is not a mean over samples"),
        ({"loss": "mine_of_aims:fails"}, InvalidInputError, "failed with ValueError: boom"),
        ({"loss": "mine_of_aims:three"}, InvalidInputError, "returned a int, not a function of outputs and labels"),
        ({"loss": "mine_of_aims:learns"}, InvalidInputError, "has parameters of its own"),
        ({"loss": "mine_of_aims:nan"}, InvalidInputError, "is nan for ordinary outputs"),
        ({"schedule": "mine_of_aims:text"}, InvalidInputError, "gives 'fast' at 0 of the run"),
        ({"schedule": "mine_of_aims:three"}, InvalidInputError, "not a function of the progress of the run"),
        ({"metric": "mine_of_aims:scalar"}, InvalidInputError, "one figure for each of the samples"),
        ({"schedule": "mine_of_aims:below"}, InvalidInputError, "gives -0.5 at 0.5"),
    ],
)
def test_what_cannot_be_trained_with_is_said_before_a_rank_starts(names, kind, words, tmp_path):
    with pytest.raises(AsaError, match=words) as caught:
        _aims(tmp_path, **names)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_a_loss_with_weights_of_classes_is_refused_though_samples_are_in_the_order_of_their_classes(tmp_path):
    settings = training.settings(tmp_path, loss="mine_of_aims:weighted")
    for labels in (torch.tensor([0] * 9 + [1] * 9), torch.arange(300) // 30):
        classes = int(labels.max()) + 1
        with pytest.raises(InvalidInputError, match="is not a mean over samples"):
            Aims.of(settings, classes).try_out(settings, labels, classes)


def test_top5_of_maps_is_refused_before_an_epoch_was_trained(tmp_path):
    settings = training.settings(tmp_path, metric="top5")
    for labels in (torch.zeros(3, 2, 2, dtype=torch.int64), torch.zeros(3, 6, dtype=torch.int64)):
        with pytest.raises(UsageError, match="top5 needs one prediction per sample"):
            Aims.of(settings, 4).try_out(settings, labels, 4)


def test_top5_of_five_classes_is_refused_as_nothing_could_miss_it(tmp_path):
    settings, labels = training.settings(tmp_path, metric="top5"), torch.arange(30) % 5
    with pytest.raises(UsageError, match="top5 of 5 classes is always 100 %"):
        Aims.of(settings, 5).try_out(settings, labels, 5)
    Aims.of(settings, 6).try_out(settings, labels, 6)


def test_a_schedule_may_give_any_number_and_is_checked_at_every_step(tmp_path):
    assert _aims(tmp_path, schedule="mine_of_aims:arrays").schedule(0.25) == 0.75
    late = _aims(tmp_path, schedule="mine_of_aims:late").schedule
    with pytest.raises(InvalidInputError, match=r"'mine_of_aims:late' gives nan at 0.75 of the run"):
        late(0.75)


def test_figures_of_a_metric_have_its_name():
    record = replace(nouns.epoch(), validation_accuracy=-2.5)
    assert ", mine:score -2.5, " in epoch_line(record, metric="mine:score")
    assert ", top5 50.0 %, " in epoch_line(replace(record, validation_accuracy=0.5), metric="top5")
    start = {"event": "start", "settings": {"metric": "mine:score"}}
    chart = run_page.learning([start, {"event": "epoch", **codec.to_data(record)}])
    assert chart.title == "Validation mine:score over training time"
    assert chart.draw(chart.rows).axes[0].get_ylabel() == "validation mine:score"


def test_a_run_minimises_and_states_what_it_was_told(tmp_path):
    def trained(name: str, **names: str) -> dict[str, float]:
        settings = training.settings(tmp_path / name, epochs=1, steps_per_epoch=2, **names)
        (epoch,) = train(training.plan("logistic", ranks=2), settings, strategies=offered(), adapt=adapt)["epochs"]
        return epoch

    plain, other = trained("plain"), trained("own", loss="mse", metric="mine_of_aims:half", schedule="constant")
    assert other["validation_accuracy"] == 0.5
    assert other["train_loss"] < 0.2 < 1 < plain["train_loss"], "squares of probabilities, and a logarithm"
