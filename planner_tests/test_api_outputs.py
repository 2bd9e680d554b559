"""Outputs that are no batch, or have it elsewhere; loaders that end; what is refused, and where it went wrong."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asa
from asa.api.model.optimizers import check_shared
from asa.api.plans.planning import outputs_of, shaped
from asa.api.steps.batches import GlobalBatches, rows_of
from asa.errors import InvalidInputError, UsageError, place_of
from asa.executor.model.votes import Votes
from asa.executor.training.optimizer import build_optimizer
from asa.ir.plan import Plan
from asa.launch import run_ranks
from asa.profiler.updates import build_optimizer as build_measured
from asa.tracing import histories, trace
from planner_tests import user_programs as user
from planner_tests.hand_plans import Choose, alternating, hand_plan, uniform

X = torch.zeros(2, *user.SHAPE)


class Several(nn.Module):
    """Logits with classes in front of the samples, a penalty that is one number, and a state [2, N, 9]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(1), nn.Linear(192, 14), nn.GELU(), nn.Linear(14, 9))
        self.head = nn.Linear(9, user.CLASSES)

    def forward(self, x: Tensor) -> Any:
        """A nested structure."""
        z = self.body(x)
        penalty, state = z.square().mean(), torch.stack((z, z.cos()))
        return [self.head(z).t(), {"more": (penalty, state)}]


def several() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Several().double()


def loop(net: nn.Module, opt: torch.optim.Optimizer, batches: Any) -> None:
    for _ in range(2):
        for x, y, _number in batches:
            opt.zero_grad()
            logits, more = net(x)
            penalty, state = more["more"]
            loss = nn.functional.cross_entropy(logits.t(), y) + 3 * penalty + state[1].square().mean()
            loss.backward()
            opt.step()


def on_rank(_rank: int, plans: list[Plan]) -> list[dict[str, Tensor]]:
    found = []
    for plan in plans:
        net = several()
        placed, opt, batches = asa.parallelize(net, user.optimizer(net), user.loader(samples=24), plan=plan)
        loop(placed, opt, batches)
        found.append(placed.state_dict())
        placed.close()
    return found


CASES: dict[str, Choose] = {
    "ddp": uniform(2, 1),
    "whole": uniform(1, 1),
    "tensor": uniform(1, 2),
    "mixed": alternating(2),
    "mixed-the-other-way": alternating(2, shift=1),
}


def test_any_output_leaves_as_it_does_on_one_device() -> None:
    net = several()
    loop(net, user.optimizer(net), user.loader(samples=24))
    traced = trace(several(), X.double(), name="model")
    assert sorted(map(str, traced.batch_dims.values())) == ["1", "1", "None"]
    plans = [
        replace(
            hand_plan(
                several().float(), 2, choose, input_shape=user.SHAPE, num_classes=user.CLASSES, global_batch=user.BATCH
            ),
            model_fingerprint=traced.model_fingerprint,
        )
        for choose in CASES.values()
    ]
    for name, state in zip(CASES, run_ranks(2, on_rank, plans, threads=1, timeout_s=120)[0], strict=True):
        assert user.distance(state, net.state_dict()) < 1e-11, name


def test_a_loader_that_can_be_gone_through_once_loses_no_batch() -> None:
    stream = ((torch.full((4, 3), float(i)), torch.zeros(4)) for i in range(3))
    batches = GlobalBatches(stream, Votes(), lambda total: list(range(total)))
    assert batches.example()[0].shape == (2, 3)
    assert batches.batch_size == 4
    assert [float(share.batch[0][0, 0]) for share in batches.epoch()] == [0.0, 1.0, 2.0]


def test_alone_a_model_is_called_as_ever() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, inputs: dict[str, Tensor], other: Tensor, *, scale: float = 1.0) -> Tensor:
            return self.layer(inputs["x"]) * scale + other

    net, x = Pair(), torch.ones(3, 2)
    placed, _, batches = asa.parallelize(net, user.optimizer(net), [{"x": x}])
    assert torch.equal(placed(next(iter(batches)), x, scale=2.0), net({"x": x}, x, scale=2.0))


def test_labels_have_a_row_for_every_sample() -> None:
    weights, labels = torch.ones(7), torch.arange(4)
    assert torch.equal(rows_of({"weights": weights, "y": labels}, range(2, 4), 4)["y"], labels[2:])
    with pytest.raises(UsageError, match="labels of type Tensor have no tensor with a row for each of 4 samples"):
        rows_of(torch.arange(9), range(2), 4)


def test_what_no_rank_can_do_is_refused() -> None:
    with pytest.raises(UsageError, match="LBFGS"):  # of a Job
        check_shared(torch.optim.LBFGS(nn.Linear(2, 2).parameters()))
    with pytest.raises(UsageError, match="run it on one batch first"):
        shaped(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(UsageError, match="example_input is dict, not one tensor"):
        asa.plan(user.model(), {"x": X}, gpus=2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"a tensor of shape \(\), not one"):
        asa.plan(user.model(), torch.tensor(1.0), gpus=2)


class Fails(nn.Module):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        """As its name says."""
        if other is None:
            raise ValueError("no other")
        return x


def test_an_error_in_a_model_names_its_line() -> None:
    assert outputs_of(several(), X.double()) == 1, "classes come first there"
    with pytest.raises(InvalidInputError, match=r"Fails .* fails: ValueError: no other \(test_api_outputs.py:\d+\)"):
        outputs_of(Fails(), X)
    counting = type("Counts", (nn.Module,), {"n": 0, "forward": lambda self, x: setattr(self, "n", self.n + 1) or x})()
    assert (outputs_of(counting, X), counting.n, counting.training) == (3, 0, True), "left as it was"
    with pytest.raises(InvalidInputError, match="returns a set in which there is no tensor"):
        outputs_of(type("Odd", (nn.Module,), {"forward": lambda _, x: {1}})(), X)
    with pytest.raises(RuntimeError) as caught:
        nn.Linear(2, 2)(X)
    assert place_of(caught.value).startswith(" (test_api_outputs.py:")
    assert place_of(ValueError("never raised")) == ""


def test_weights_with_a_history_and_complex_ones() -> None:
    net = nn.Linear(3, 2)
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(net)
    copied = copy.deepcopy(net, histories(net))
    assert torch.equal(copied(torch.ones(1, 3)), net(torch.ones(1, 3)))
    assert copied.weight_v is not net.weight_v
    for build in (build_optimizer, build_measured):
        weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        weight.grad = torch.ones_like(weight)
        build("sgd", [weight]).step()
