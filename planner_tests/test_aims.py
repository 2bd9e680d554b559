"""Losses, metrics and schedules by name or from a function of one's own: taken as they are, or refused in one line."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import training
from torch import nn

from asa.errors import AsaError, InvalidInputError, UsageError
from asa.executor.running.run import train
from asa.executor.training.aims import LOSSES, METRICS, SCHEDULES, Aims
from asa.executor.training.optimizer import learning_rate
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
    monkeypatch.setitem(sys.modules, module.__name__, module)


def _aims(tmp_path, **names: str) -> Aims:
    settings = training.settings(tmp_path, **names)
    aims = Aims.of(settings, 4)
    aims.try_out(settings, LABELS, 4)
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
        ({"loss": "mine_of_aims:three"}, InvalidInputError, "returned a int, not a function"),
        ({"metric": "mine_of_aims:scalar"}, InvalidInputError, "one figure for each of the samples"),
        ({"schedule": "mine_of_aims:below"}, InvalidInputError, "gives -0.5 at 0.5"),
    ],
)
def test_what_cannot_be_trained_with_is_said_before_a_rank_starts(names, kind, words, tmp_path):
    with pytest.raises(AsaError, match=words) as caught:
        _aims(tmp_path, **names)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def test_a_run_minimises_and_states_what_it_was_told(tmp_path):
    def trained(name: str, **names: str) -> dict[str, float]:
        settings = training.settings(tmp_path / name, epochs=1, steps_per_epoch=2, **names)
        (epoch,) = train(training.plan("logistic", ranks=2), settings, strategies=offered(), adapt=adapt)["epochs"]
        return epoch

    plain, other = trained("plain"), trained("own", loss="mse", metric="mine_of_aims:half", schedule="constant")
    assert other["validation_accuracy"] == 0.5
    assert other["train_loss"] < 0.2 < 1 < plain["train_loss"], "squares of probabilities, and a logarithm"
