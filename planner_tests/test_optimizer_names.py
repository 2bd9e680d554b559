"""Optimizers of ``asa train`` by name or factory: torch's own updates, or one line before anything is trained."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import training
from stage_plans import staged
from torch import nn

from asa.api.model.optimizers import planned_like
from asa.errors import AsaError, InvalidInputError, UsageError
from asa.executor.running.run import train
from asa.executor.training.optimizer import build_optimizer, couples, state_words, try_out
from asa.ir.optimizers import OPTIMIZERS, planned_as
from asa.ir.plan import TensorDegree
from asa.scheduler import adapt
from asa.strategies import offered


@pytest.fixture(autouse=True)
def mine(monkeypatch):
    module = ModuleType("mine_of_optimizers")
    module.plain = lambda parameters, lr=0.05: torch.optim.SGD(parameters, lr=lr)
    module.foreign = lambda parameters, lr=0.05: _Own(parameters, lr=lr)
    module.fails = lambda parameters: (_ for _ in ()).throw(ValueError("boom"))
    module.three = lambda parameters: 3
    module.fixed = lambda parameters: torch.optim.SGD(parameters, lr=0.05)
    module.norm = lambda parameters, lr=0.05: _Norm(parameters, {"lr": lr})
    module.clipped = lambda parameters, lr=0.05: _Clipped(parameters, lr=lr)
    module.rateless = lambda parameters: _Rateless(parameters, {})
    monkeypatch.setitem(sys.modules, module.__name__, module)


class _Own(torch.optim.SGD):
    pass


class _Norm(torch.optim.Optimizer):
    """Steps of one length for every parameter, as LARS takes them."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad / p.grad.norm(), alpha=-group["lr"])


class _Clipped(torch.optim.SGD):
    """Clips the gradients of all parameters by their common norm."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.01)
        super().step(closure)


class _Rateless(torch.optim.Optimizer):
    def step(self, closure=None):
        pass


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_the_planner_counts_the_state_that_an_optimizer_keeps(name):
    p = nn.Parameter(torch.ones(8))
    made = build_optimizer(name, [p])
    p.grad = torch.ones_like(p)
    made.step()
    words = sum(v.numel() == p.numel() for v in made.state[p].values() if isinstance(v, torch.Tensor))
    assert words <= {"sgd": 1, "adamw": 2}[planned_as(name)]
    assert type(made).__name__ == OPTIMIZERS[name]


def test_its_own_rate_is_taken_where_none_is_given():
    p = nn.Parameter(torch.ones(8))
    assert build_optimizer("rmsprop", [p]).param_groups[0]["lr"] == 0.01
    assert build_optimizer("mine_of_optimizers:plain", [p]).param_groups[0]["lr"] == 0.05
    assert build_optimizer("mine_of_optimizers:plain", [p], lr=0.2).param_groups[0]["lr"] == 0.2
    try_out("mine_of_optimizers:fixed")


def test_a_rate_that_a_factory_does_not_take_is_refused(tmp_path):
    settings = training.settings(tmp_path, epochs=1, steps_per_epoch=1, optimizer="mine_of_optimizers:fixed", lr=0.5)
    with pytest.raises(UsageError, match=r"^lr 0.5 would have no effect: the factory .* has no parameter lr; add one"):
        train(training.plan("logistic", ranks=1), settings, strategies=offered(), adapt=adapt)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        (
            "adamm",
            UsageError,
            "no optimizer is called 'adamm'; there are sgd, adamw, adam, .* and package.module:factory",
        ),
        ("torch.optim:Gone", UsageError, "torch.optim has no 'Gone'"),
        ("mine_of_optimizers:fails", InvalidInputError, "failed with ValueError: boom"),
        ("mine_of_optimizers:three", InvalidInputError, "returned a int, no optimizer"),
        ("torch.optim:LBFGS", InvalidInputError, "a step failed with TypeError"),
        ("mine_of_optimizers:rateless", InvalidInputError, "parameters has no 'lr', which .*; give each one"),
    ],
)
def test_what_cannot_update_is_said_before_a_rank_starts(name, kind, words, tmp_path):
    with pytest.raises(AsaError, match=words) as caught:
        try_out(training.settings(tmp_path, optimizer=name).optimizer)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def _trained(out, optimizer, plan, **more):
    settings = training.settings(out, epochs=2, steps_per_epoch=3, optimizer=optimizer, **more)
    said: list[str] = []
    events = {"note": lambda e: said.append(e["message"])}
    found = train(
        plan, settings, strategies=offered(), adapt=adapt, on_event=lambda e: events.get(e["event"], lambda _: None)(e)
    )
    return [e["train_loss"] for e in found["epochs"]], said


def test_two_ranks_train_to_the_losses_of_one(tmp_path):
    for name in ("rmsprop", "mine_of_optimizers:plain"):
        one, _ = _trained(tmp_path / f"{name[:4]}-1", name, training.plan("logistic"))
        two, _ = _trained(tmp_path / f"{name[:4]}-2", name, training.plan("logistic", ranks=2))
        assert two == pytest.approx(one, rel=1e-5)


def test_parts_of_parameters_are_refused_or_doubted(tmp_path):
    split = training.plan(ranks=2, split=("classifier",))
    assert split.components[-1].tensor == TensorDegree(strategy="tensor", degree=2)
    with pytest.raises(UsageError, match=r"Adafactor' uses all elements of a parameter together, .*--strategies ddp"):
        _trained(tmp_path / "a", "torch.optim:Adafactor", split)
    _, said = _trained(tmp_path / "b", "mine_of_optimizers:foreign", split)
    assert any("correct only if _Own updates element by element" in line for line in said)
    whole = dataclasses.replace(training.plan(ranks=2), optimizer="adamw")
    losses, said = _trained(tmp_path / "c", "torch.optim:Adafactor", whole, lr=0.05)
    assert losses[1] < losses[0]
    assert not any("element" in line for line in said)


def test_an_optimizer_that_needs_whole_parameters_or_all_of_them_is_refused_where_ranks_have_some(tmp_path):
    spec = "mine_of_optimizers:{}".format
    found = [couples(spec(name)) for name in ("plain", "foreign", "norm", "clipped")]
    assert found == ["", "", "all elements of a parameter", "several parameters"]
    split = training.plan(ranks=2, split=("classifier",))
    for name, words in (("norm", "all elements of a parameter"), ("clipped", "several parameters")):
        with pytest.raises(UsageError, match=f"'{spec(name)}' uses {words} together, of which a rank has only some; a"):
            _trained(tmp_path / name, spec(name), split)
    stages = staged(training.plan(), (1, 1))
    with pytest.raises(UsageError, match="several parameters together"):
        _trained(tmp_path / "stages", spec("clipped"), stages)
    assert _trained(tmp_path / "norm2", spec("norm"), stages)[1] == []
    assert _trained(tmp_path / "whole", spec("clipped"), training.plan("logistic", ranks=2))[1] == []


@pytest.mark.parametrize(("make", "words", "planned"), [
    (lambda p: torch.optim.AdamW(p), 2, "adamw"), (lambda p: torch.optim.AdamW(p, amsgrad=True), 3, "adamw"),
    (lambda p: torch.optim.SGD(p, lr=0.1), 0, "sgd"), (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1, "sgd"),
    (lambda p: torch.optim.RMSprop(p), 1, "sgd"), (lambda p: torch.optim.RMSprop(p, momentum=0.9), 2, "adamw"),
    (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), 3, "adamw"),
])  # fmt: skip
def test_state_is_counted_by_a_step(make, words, planned, capsys):
    optimizer = make([nn.Parameter(torch.zeros(3, 3))])
    assert state_words(optimizer) == words
    assert not optimizer.state
    assert planned_like(optimizer, SimpleNamespace(rank=0)) == planned
    assert ("memory is predicted with 2" in capsys.readouterr().err) == (words > 2)
