"""Alpha dropout and randomised ReLUs belong to samples; what draws by itself all the same is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import training
from torch import Tensor, nn

import asa
from asa.cli import entry
from asa.executor.measuring.equivalence import verify
from asa.ir import codec
from asa.ir.graph import DEPENDS
from asa.profiler.measure import profile_module
from asa.sharding.layers.dropout import make_reproducible
from asa.sharding.randomness.generators import drawing, draws_note, mixing_note
from asa.sharding.randomness.samples import SampleAlphaDropout, SampleContext, SampleRReLU
from asa.strategies import offered
from asa.tracing import trace
from planner_tests.hand_plans import hand_plan, uniform
from planner_tests.nouns import cluster

SHAPE = (3, 4, 4)


class Net(nn.Module):
    """Everything that draws and is made to draw by sample, as modules and as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.FeatureAlphaDropout(0.3)
        self.act, self.drop = nn.RReLU(inplace=True), nn.AlphaDropout(0.2)
        self.head = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.drop(self.act(self.norm(self.conv(x))))
        x = F.feature_alpha_dropout(F.rrelu(x, training=self.training), 0.2, self.training)
        x = F.dropout1d(F.alpha_dropout(x, 0.1, self.training).flatten(2), 0.2, self.training)
        return self.head(x.flatten(1))


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net()


def test_alpha_dropout_does_to_an_element_what_the_stock_one_does() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 500)
    ours = SampleAlphaDropout(0.3, site="here", context=SampleContext(samples=torch.arange(64)))(x)
    right = F.alpha_dropout(x, 0.3, True)
    dropped = right.mode().values.mode().values
    mine, theirs = torch.isclose(ours, dropped), torch.isclose(right, dropped)
    assert float(mine.double().mean()) == pytest.approx(0.3, abs=0.02)
    both = ~mine & ~theirs
    assert torch.allclose(ours[both], right[both], atol=1e-6)
    assert float(ours.mean()) == pytest.approx(0, abs=0.02)
    assert float(ours.var()) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("inplace", [False, True])
def test_slopes_of_a_randomised_relu_lie_between_its_bounds(inplace: bool) -> None:
    x = torch.randn(64, 500)
    act = SampleRReLU(0.1, 0.4, site="here", context=SampleContext(samples=torch.arange(64)), inplace=inplace)
    given = x.clone()
    y = act(given)
    assert (y is given) == inplace
    slopes = (y / x)[x < 0]
    assert torch.equal(y[x >= 0], x[x >= 0])
    assert float(slopes.min()) >= 0.1 - 1e-6
    assert float(slopes.max()) <= 0.4 + 1e-6
    assert float(slopes.mean()) == pytest.approx(0.25, abs=0.01)
    assert torch.equal(act.eval()(x.clone()), F.rrelu(x, 0.1, 0.4))


def test_they_train_under_plans_as_on_one_device() -> None:
    plan = hand_plan(
        net(), 2, uniform(2, 1), input_shape=SHAPE, num_classes=10, global_batch=16, num_microbatches=2
    )  # fmt: skip
    found = verify(plan, net, offered(), timeout_s=120)
    assert found.equivalent, f"{found.worst_tensor}: {found.max_rel_error:.2e} > {found.allowed:.2e}"
    assert found.max_rel_error < 1e-9
    assert not found_in(net(), torch.zeros(2, *SHAPE))


class Opaque(nn.Module):
    """Cannot be traced into: asks for data."""

    def forward(self, x: Tensor) -> Tensor:
        """With noise in training."""
        return x + torch.randn_like(x) if self.training and float(x.sum()) < 1e9 else x


class Noisy(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.first, self.draw, self.last = nn.Linear(4, 4), draw, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """With what ``draw`` adds."""
        return self.last(self.draw(self.first(x)))


class Drawn(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        """In training only."""
        return self.draw(x) if self.training else x


def found_in(model: nn.Module, x: Tensor) -> dict[str, tuple[str, ...]]:
    traced = trace(model, x, name="model")
    make_reproducible(traced.components, SampleContext(samples=torch.arange(2), total=2))
    before = torch.get_rng_state()
    found = drawing(traced.components, x)
    assert torch.equal(before, torch.get_rng_state())
    return found


@pytest.mark.parametrize(
    ("draw", "operator"),
    [
        (Drawn(torch.randn_like), "randn_like"),
        (Drawn(lambda x: x * torch.bernoulli(x.sigmoid())), "bernoulli"),
        (Drawn(lambda x: x + torch.rand(4)), "rand"),
        (Drawn(F.gumbel_softmax), "exponential_"),
        (Opaque(), "randn_like"),
        (nn.Dropout(0.5), ""),
        (Drawn(lambda x: F.dropout(x, 0.3)), "bernoulli_"),
    ],
    ids=["noise", "gate", "rand", "gumbel", "opaque", "dropout", "dropout-in-a-leaf"],
)
def test_what_draws_by_itself_is_found(draw: nn.Module, operator: str) -> None:
    found = found_in(Noisy(draw), torch.zeros(2, 4))
    assert [o for operators in found.values() for o in operators] == [operator] * bool(operator)
    assert ("depends on the plan" in " ".join(draws_note(found))) == bool(operator)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Noisy(Drawn(torch.randn_like)), "random numbers of its own (randn_like)"),
        (lambda: nn.Sequential(nn.Linear(4, 4), Centred(), nn.Linear(4, 4)), "mixes the samples"),
    ],
)
def test_a_note_goes_from_the_profile_into_the_plan_and_before_training(
    make, words, tmp_path, monkeypatch, capsys
) -> None:
    made = profile_module(
        make(), torch.randn(2, 4), spec="m", num_classes=4, global_batch=4, device=torch.device("cpu"),
        time_limit_s=60, max_tensor_degree=1,
    )  # fmt: skip
    (note,) = made.graph.notes
    assert words in note
    assert note.endswith(DEPENDS)
    assert note in asa.plan(made, gpus=2, cluster=cluster()).notes
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("asa.executor.running.run.train", lambda *_, **__: {})
    codec.save(replace(training.plan(ranks=2), notes=(note,)), tmp_path / "plan.json")
    assert entry.run(["train", "plan.json", "--data", "digits"]) == 0
    assert f"asa: {note}" in capsys.readouterr().err


class Centred(nn.Module):
    """Takes the batch's mean away."""

    def forward(self, x: Tensor) -> Tensor:
        """As it is, less the mean over samples."""
        return x - x.mean(0)


def image_net(middle: nn.Module) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(1), nn.Linear(48, 6), middle, nn.Linear(6, 10))


def noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def test_a_model_that_mixes_samples_is_said_to_depend_on_the_plan() -> None:
    pair = torch.randn(2, *SHAPE)
    (note,) = mixing_note(image_net(Centred()), pair, 1e-3)
    assert note.endswith(DEPENDS)
    assert mixing_note(image_net(nn.BatchNorm1d(6)), pair, 1e-3) == ()


@pytest.mark.parametrize(
    ("middle", "why"),
    [(Centred(), "the model mixes the samples of a batch"), (Drawn(noise), "random numbers of its own")],
    ids=["mixed", "drawn"],
)
def test_a_verdict_says_what_of_the_model_explains_it(middle: nn.Module, why: str) -> None:
    """What a model draws by itself raises the floor, too: whether errors stay below ten times it is chance."""
    plan = hand_plan(
        image_net(middle), 2, uniform(2, 1), input_shape=SHAPE, num_classes=10, global_batch=16
    )  # fmt: skip
    found = verify(plan, lambda: image_net(middle), offered(), timeout_s=120)
    assert not found.equivalent or found.noise_floor > 1e-3
    (reason,) = found.reasons
    assert why in reason
