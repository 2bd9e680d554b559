"""Random numbers of a program's own code: drawn as on one device where a batch is made whole, told of elsewhere; and
models that mix the samples of a batch."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import asa
from asa.api.calls import Call
from asa.api.model.coupling import coupled
from asa.launch import run_ranks
from planner_tests.programs import Program, State, classes, distance, numbers


def _mixed(rows: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = (torch.stack(part) for part in zip(*rows, strict=True))
    share = torch.rand((), dtype=x.dtype) + float(numpy.random.rand())
    return share * x + x[torch.randperm(len(x))], y


class _Called(nn.Module):
    """Takes two inputs, so that it runs whole, and drops by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.a(F.dropout(x, 0.5, self.training)) * scale[:, None]


def _trained(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    return dict(net.state_dict())


PROGRAM = Program(
    model=lambda: nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3)), x=numbers(17, 5), y=classes(17, 3),
    loop=_trained,
)  # fmt: skip


def _mixing(workers: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    net, opt, loader = PROGRAM.made()
    return net, opt, DataLoader(loader.dataset, 6, shuffle=True, num_workers=workers, collate_fn=_mixed)


def _seeded(value: int) -> None:
    torch.manual_seed(value)
    numpy.random.seed(value)


def _spread(rank: int, plan: Any) -> Any:
    warnings.simplefilter("ignore")
    states = []
    for workers in (0, 1):
        made = _mixing(workers)
        _seeded(3 + rank)
        net, opt, batches = asa.parallelize(*made, plan=plan)
        states.append(_trained(net, opt, batches))
        net.close()
    torch.manual_seed(7)
    called = _Called().double()
    data = [(numbers(5, seed=1), torch.ones((), dtype=torch.float64), torch.tensor(0))] * 8
    placed, _, loader = asa.parallelize(
        called, torch.optim.SGD(called.parameters(), 0.1), DataLoader(data, 8), strategies=("ddp",), cache=None,  # type: ignore[arg-type]
        cluster="profiles/cluster.local-gloo-2.json", time_limit_s=0.1,
    )  # fmt: skip
    for x, scale, _y in loader:
        out = placed(x, scale)
    return states, out.detach().as_subclass(Tensor)


def test_a_batch_mixed_at_random_is_that_of_one_device_and_masks_are_other_on_every_rank() -> None:
    found = run_ranks(2, _spread, PROGRAM.plan("ddp"), threads=1, timeout_s=120)
    for i, workers in enumerate((0, 1)):
        made = _mixing(workers)
        _seeded(3)
        wanted = _trained(*made)
        for states, _ in found:
            assert distance(states[i], wanted) < 1e-11, workers
    assert not torch.equal(found[0][1], found[1][1])


class _Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class _Standardised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("model", "apart"),
    [
        (nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), False),
        (_Noisy(), False),
        (nn.GRU(5, 3, batch_first=True), False),
        (_Standardised(), True),
        (nn.Sequential(nn.Linear(5, 4), nn.Softmax(0)), True),
    ],
)
def test_models_that_mix_samples_are_told_from_those_that_do_not(model: nn.Module, apart: bool) -> None:
    x = numbers(4, 6, 5) if isinstance(model, nn.GRU) else numbers(4, 5)
    state = torch.get_rng_state()
    assert bool(coupled(model.double(), Call((x,)))) is apart
    assert torch.equal(state, torch.get_rng_state())
