"""The Python interface plans for a module of the user's own, and leaves it as it was."""

from __future__ import annotations

import pytest
import torch

import asa
from asa.errors import UsageError
from planner_tests.nouns import cluster, profile
from planner_tests.small_models import INPUT, build


def test_plan_of_a_module() -> None:
    model = build("plain")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    made = asa.plan(model, torch.zeros((2, *INPUT)), gpus=2, cluster=cluster(), global_batch=4, time_limit_s=0.3)
    assert made.num_classes == 100
    assert made.global_batch == 4
    assert {b.name for b in made.baselines} >= {"single", "ddp", "tensor", "fsdp"}
    fastest = min(b.step_time_s for b in made.baselines if b.fits and b.step_time_s is not None)
    stays = any(n.startswith("stay with ddp") for n in made.notes)  # where it was measured, unless surely slower
    assert stays or made.prediction.step_time_s <= fastest
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_plan_of_a_profile_with_pins() -> None:
    made = asa.plan(profile(), gpus=2, cluster=cluster(), pins=["head=tensor@2"])
    assert made.components[-1].tensor.degree == 2


def test_a_module_needs_an_example() -> None:
    with pytest.raises(UsageError, match="example_input"):
        asa.plan(build("plain"), gpus=2, cluster="a100-nvlink-8")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"gpus": 0}, "a whole number of devices, 1 or more"),
        ({"gpus": 2, "global_batch": 0}, "a whole number of samples, 1 or more"),
        ({"gpus": 2, "cluster": "nowhere"}, "no cluster 'nowhere'"),
        ({"gpus": 16, "cluster": "a100-nvlink-8"}, "asked for 16 devices, cluster a100-nvlink-8 has 8"),
        ({"gpus": 2, "cluster": "a100-nvlink-8", "strategies": ["dpp"]}, "no strategy 'dpp'"),
    ],
)
def test_a_request_is_refused_before_the_model_is_measured(asked, words, monkeypatch) -> None:
    monkeypatch.setattr("asa.api.plans.planning.measured", lambda *_, **__: pytest.fail("measured something"))
    with pytest.raises(UsageError, match=words):
        asa.plan(build("plain"), torch.zeros((2, *INPUT)), **asked)
