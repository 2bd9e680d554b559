"""Arguments of ``asa.parallelize``, ``asa.Job`` and ``asa.plan``: texts like on the command line, and one line for what
cannot be used."""

from __future__ import annotations

from typing import Any

import nouns
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import asa
from asa.api.messages import in_python
from asa.errors import InfeasibleError, UsageError


def _program() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    loader = DataLoader(TensorDataset(torch.randn(12, 8), torch.randint(3, (12,))), 6)
    return net, torch.optim.SGD(net.parameters(), 0.1), loader


def _planned(**wishes: Any) -> asa.Plan:
    return asa.plan(nouns.profile(), gpus=2, cluster=nouns.cluster(), **wishes)


@pytest.mark.parametrize("wish", ["fsdp", " fsdp,", ["fsdp"], ("fsdp", "fsdp"), {"fsdp"}, iter(["fsdp"])])
def test_strategies_may_be_a_text_as_on_the_command_line(wish: Any) -> None:
    assert _planned(strategies=wish).strategy == "fsdp"


def test_pins_may_be_a_text_as_on_the_command_line() -> None:
    plan = _planned(pins="stem=zero3@2, head=replicate@2")
    assert [c.data.strategy for c in plan.components if c.name in ("stem", "head")] == ["zero3", "replicate"]


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"strategies": 3}, "strategies is names with commas"),
        ({"strategies": ()}, "strategies is empty"),
        ({"strategies": ("ddp", 1)}, "each of strategies is a text"),
        ({"pins": {"*": "replicate"}}, "pins is names with commas"),
        ({"memory_bytes": "8G"}, "memory_bytes is a whole number of bytes"),
        ({"memory_bytes": 0}, "memory_bytes is a whole number of bytes"),
        ({"cluster": 3}, "cluster is an asa.Cluster"),
        ({"precision": "float32"}, "precision is one of fp32"),
        ({"time_limit_s": "5"}, "time_limit_s is a number of seconds"),
    ],
)
def test_a_wrong_type_is_one_line_in_every_call(wish: dict[str, Any], words: str) -> None:
    calls = (
        lambda: asa.parallelize(*_program(), **wish),
        lambda: asa.Job(*_program(), nn.CrossEntropyLoss(), **wish),
        lambda: asa.plan(_program()[0], torch.randn(4, 8), **{"gpus": 2, **wish}),
    )
    for call in calls:
        with pytest.raises(UsageError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"plan": None}, "plan is 'auto'"),
        ({"plan": "fsdp"}, "strategies='fsdp' asks for"),
        ({"batch_norm": "global"}, "batch_norm is one of local, exact"),
        ({"timeout_s": 0}, "timeout_s is a number of seconds"),
        ({"cache": 3}, "cache is a folder"),
        ({"seed": "a"}, "seed is a whole number"),
        ({"strategies": "ddpp"}, "no strategy 'ddpp'"),
        ({"pins": "0=ddp"}, "'ddp' is no strategy of one component"),
    ],
)
def test_a_wish_is_checked_where_nothing_is_planned(wish: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        asa.parallelize(*_program(), **wish)


def test_what_is_no_model_or_optimizer_is_named() -> None:
    net, opt, loader = _program()
    with pytest.raises(UsageError, match="model is a torch"):
        asa.parallelize(loader, opt, net)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="optimizer is an optimizer"):
        asa.parallelize(net, loader, opt)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="optimizer is an optimizer"):
        asa.Job(net, [opt], loader, nn.CrossEntropyLoss())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="loss_fn is a function"):
        asa.Job(net, opt, loader, "cross_entropy")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="model is a torch"):
        asa.plan("resnet18", gpus=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("try --global-batch 16 or --gpus 3", "try batch_size=16 or --nproc-per-node 3"),
        ("plan with --strategies local_sgd:period=4", "plan with strategies='local_sgd:period=4'"),
        ("choose --device cpu, or another --out.", "choose device='cpu', or another out."),
        ("plan again with --memory 1.5, then --resume", "plan again with memory_bytes=1610612736, then resume=True"),
        ("lower the learning rate with --lr, or wait", "lower the learning rate of the optimizer, or wait"),
        ("run `asa cluster measure --gpus 4`", "run `asa cluster measure --gpus 4`"),
        ("docker run --shm-size=1g; torchrun --standalone", "docker run --shm-size=1g; torchrun --standalone"),
    ],
)
def test_a_message_names_what_a_program_can_give(said: str, words: str) -> None:
    assert in_python(said) == words


def test_a_request_that_has_no_plan_names_arguments_of_the_call() -> None:
    with pytest.raises(InfeasibleError) as caught:
        _planned(memory_bytes=2**20)
    assert "try " in str(caught.value)
    assert "--" not in str(caught.value)
    with pytest.raises(UsageError, match="lower gpus, name a larger cluster"):
        asa.plan(nouns.profile(), gpus=64, cluster=nouns.cluster())
