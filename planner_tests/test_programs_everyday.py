"""Programs that keep what their model reads in many places, list parameters in forward, or bend the mean of a loss."""

from __future__ import annotations

import contextvars
import os
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from asa.api.job.loss import JobLoss
from asa.api.losses.bends import sides_of
from asa.api.steps.batches import GlobalBatches
from asa.api.steps.orders import _key
from asa.executor.model.votes import Votes
from asa.launch import run_ranks
from asa.tracing.reads import numbers_read
from planner_tests.programs import Named, Program, epochs, heard_of, numbers

SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
SCALES = [1.0]
TABLE = {"scale": 1.0}


class Keeper:
    value = 1.0

    def __init__(self) -> None:
        self.step = 1.0

    def now(self) -> float:
        return self.step * 2


def _closed() -> tuple[Callable[[], float], Callable[[float], None]]:
    scale = 1.0

    def get() -> float:
        return scale

    def put(value: float) -> None:
        nonlocal scale
        scale = value

    return get, put


class Reader(Named):
    """Reads numbers of many places, in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cfg, self.options, self.rates = SimpleNamespace(scale=1.0, other=1.0), {"scale": 1.0}, [1.0]
        self.schedule, self.plain = Keeper(), torch.ones(1)
        self.get, self.put = _closed()
        self.losses: list[float] = []

    def factor(self) -> Any:
        outside = SCALES[0] * TABLE["scale"] * SCALE.get() * Keeper.value * float(os.environ.get("ASA_TEST_SCALE", "1"))
        own = self.cfg.scale * self.options["scale"] * self.rates[0] * self.schedule.now() * self.get()
        return outside * own * self.plain

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "put"), [
    ("cfg.scale", lambda net, v: setattr(net.cfg, "scale", v)),
    ("options.scale", lambda net, v: net.options.update(scale=v)),
    ("rates.0", lambda net, v: net.rates.__setitem__(0, v)),
    ("schedule.step", lambda net, v: setattr(net.schedule, "step", v)),
    ("plain", lambda net, v: setattr(net, "plain", torch.ones(1) * v)),
    (" scale", lambda net, v: net.put(v)),
    (" SCALES.0", lambda _, v: SCALES.__setitem__(0, v)),
    (" TABLE.scale", lambda _, v: TABLE.update(scale=v)),
    (" SCALE", lambda _, v: SCALE.set(v) and None),
    (" Keeper.value", lambda _, v: setattr(Keeper, "value", v)),
    (" os.environ['ASA_TEST_SCALE']", lambda _, v: os.environ.__setitem__("ASA_TEST_SCALE", str(v))),
])  # fmt: skip
def test_what_a_model_reads_is_known_wherever_it_is(name: str, put: Any) -> None:
    net = Reader()
    put(net, 1.0)
    before = numbers_read(net)
    assert numbers_read(net) == before
    put(net, 2.0)
    try:
        now = numbers_read(net)
        assert {k for k in now if now[k] != before[k]} == {name}
    finally:
        put(net, 1.0)
        os.environ.pop("ASA_TEST_SCALE", None)


def test_what_no_forward_reads_is_left_alone() -> None:
    net = Reader()
    before = numbers_read(net)
    net.cfg.other = 2.0
    net.losses.append(0.5)
    assert numbers_read(net) == before
    assert numbers_read(nn.Linear(2, 2)) == {}


class Penalised(Named):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), sum(p.sum() for p in self.parameters()).square()  # type: ignore[union-attr,return-value]


class ByNorm(Named):
    def forward(self, x: Tensor) -> Tensor:
        size = sum(float(p.detach().norm()) for p in self.parameters())
        return super().forward(x) * size


class Typed(Named):
    """Asks for the type of its first parameter, and makes zeros of it."""

    def forward(self, x: Tensor) -> Tensor:
        p = next(self.parameters())
        return super().forward(x.to(p.dtype)) + p.new_zeros(3)


def _penalised(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out, penalty = net(x)
    return F.cross_entropy(out, y) + 0.01 * penalty


def _answers(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


def _program(model: Any, loss: Any, count: int = 12, lr: float = 0.1) -> Program:
    x = numbers(count, 8)
    return Program(
        model=model, x=x, y=(x.sum(1) > 0).long(), loop=partial(epochs, loss=loss),
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=lr),
    )  # fmt: skip


@pytest.mark.parametrize(("model", "loss", "traced"), [
    (Penalised, _penalised, False), (ByNorm, _answers, False), (Typed, _answers, True),
])  # fmt: skip
def test_parameters_that_forward_lists_are_no_constants(model: Any, loss: Any, traced: bool) -> None:
    program = _program(model, loss)
    assert (len(program.traced.facts) > 1) is traced
    wanted = program.alone()
    for state in program.spread(["ddp"])["ddp"]:
        assert isinstance(state, dict), state
        assert all(torch.allclose(state[n], t, rtol=1e-9, atol=1e-12) for n, t in wanted.items())


def test_sides_of_bends() -> None:
    out = torch.tensor([[0.5, 2.0], [1.0, -3.0]], dtype=torch.float64, requires_grad=True) * 1.0
    mean = out.mean()
    losses = {
        (mean - 1).abs(): (0,), F.relu(mean + 1): (1,), mean.clamp(max=0.1): (1,), mean.clamp(min=-9, max=9): (0,),
        torch.maximum(mean, out.pow(2).mean()): (0,), torch.stack([mean, 3 * mean + 1]).max(): (1,),
        out.abs().mean(): (), F.relu(out[0].mean()) + F.relu(out[1].mean()): (), mean.square(): (),
        sum(F.relu(row.mean()) for row in out): (), mean * (mean > 1): (0,), (mean < 1).double() * mean: (1,),
        mean.masked_fill(mean < 1, 0.0): (1,), out.mul(out > 1).mean() * 1.0 * 1 * torch.tensor(0.5): (),
    }  # fmt: skip
    for loss, sides in losses.items():
        assert sides_of(loss, [out]) == sides  # type: ignore[arg-type]


def _flooded(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (F.cross_entropy(net(x), y) - 0.55).abs() + 0.55


def test_ranks_on_different_sides_of_a_bend_are_told_of() -> None:
    program = _program(Named, _flooded, 72, lr=0.3)
    for flooded, usual in run_ranks(
        2, heard_of, [(p, p.plan("ddp")) for p in (program, _program(Named, _answers))], threads=1, timeout_s=120
    ):
        assert any("on different sides of the bend" in line for line in flooded)
        assert not any("bend" in line for line in usual)


def _orthogonal(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weights = [m.weight for m in net.modules() if isinstance(m, nn.Linear)]
    return F.cross_entropy(net(x), y) + 0.01 * sum((w @ w.T).square().sum() for w in weights)


def _small(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    sizes = [p.square().sum() for n, p in net.named_parameters() if n.endswith("weight") and list(net.modules())]
    return F.cross_entropy(net(x), y) + 0.01 * sum(sizes)


def test_a_penalty_on_parts_of_weights_is_told_of() -> None:
    programs = _program(Named, _orthogonal), _program(Named, _small)
    cases = [(p, p.plan(name)) for p in programs for name in ("tensor", "ddp")]
    for split, *others in run_ranks(2, heard_of, cases, threads=1, timeout_s=120):
        assert sum("a parameter of model.modules()" in line for line in split) == 1
        assert not any("a parameter of model.modules()" in line for told in others for line in told)


class _OneRank:
    """Votes of one rank."""

    num_ranks, rank, live = 1, 0, range(1)


def test_a_job_tells_of_a_bend_behind_the_steps_that_it_compared() -> None:
    place: Any = type("Place", (), {"votes": _OneRank, "rank": 0})
    loss = JobLoss(lambda out, _: (out.mean() - 1).abs(), None, place)
    said = []
    for value in (3.0, 2.0, 0.5):
        loss.begin()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            loss(torch.full((2, 1), value, requires_grad=True) * 1.0, None, True)
        loss.tried = True
        said.append([str(w.message) for w in heard])
    assert said[:2] == [[], []]
    assert "another side of the bend" in said[2][0]


WEIGHT = torch.tensor(0.5)


@pytest.mark.parametrize(("loss_fn", "told"), [
    (lambda out, _: out.mean() * WEIGHT, False),
    (lambda out, _: torch.where(WEIGHT == 1, out.mean(), out.square().mean()), False),
    (lambda out, _: out.mean() * (out.mean() > 1) * WEIGHT, True),
])  # fmt: skip
def test_a_job_tells_a_weight_that_has_become_one_from_a_bend(loss_fn: Any, told: bool) -> None:
    place: Any = type("Place", (), {"votes": _OneRank, "rank": 0})
    loss = JobLoss(loss_fn, None, place)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for weight, value in ((0.5, 3.0), (0.7, 2.0), (1.0, 0.5), (0.0, 0.5)):
            WEIGHT.fill_(weight)
            loss(torch.full((2, 1), value, requires_grad=True) * 1.0, None, True)
            loss.tried = weight != 0.5
    assert bool(heard) is told


class BySizes:
    """Samples asked for by number and length."""

    x, y = numbers(24, 12), (numbers(24) > 0).long()

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        assert isinstance(key, tuple)
        return self.x[key[0], : key[1]].view(-1, 2).mean(0).repeat(4), self.y[key[0]]

    def __len__(self) -> int:
        return 24


def test_samples_that_a_sampler_asks_for_by_number_and_length() -> None:
    keys = [[(j, 6 + 2 * (i % 3)) for j in range(6 * i, 6 * i + 6)] for i in range(4)]
    loader: Any = DataLoader(BySizes(), batch_sampler=keys)  # type: ignore[arg-type]
    x, _ = GlobalBatches(loader, Votes(), lambda total: list(range(total))).example()
    assert torch.equal(x, torch.stack([BySizes()[key][0] for key in keys[0][:2]]))
    assert _key([[0, 6], 3, "name"]) == ((0, 6), 3, "name")
