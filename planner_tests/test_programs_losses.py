"""Losses that are no plain mean over samples: the numbers of one device, or a warning that says by how much not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import asa
from asa.launch import run_ranks
from planner_tests.test_programs_inputs import far

N, WIDTH, CLASSES, TOKENS = 22, 6, 5, 3
WEIGHTS = torch.tensor([0.1, 5, 1, 0.5, 2], dtype=torch.float64)

Loss = Callable[[Any, Tensor, Tensor], Tensor]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, CLASSES)).double()


def loader() -> DataLoader[Any]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, TOKENS, WIDTH, generator=g, dtype=torch.float64)
    y = torch.randint(CLASSES, (N, TOKENS), generator=g)
    y[torch.rand(N, TOKENS, generator=g) < 0.4] = -100
    return DataLoader(TensorDataset(x, y), 8)


def smooth(y: Tensor) -> Tensor:
    return F.one_hot(y[:, 0].clamp(0), CLASSES).double()


def dice(p: Tensor, t: Tensor) -> Tensor:
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


class ByHand(torch.autograd.Function):
    """Half a sum of squares, made outside of autograd, with a gradient written by hand."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return torch.tensor(float(z.square().sum()) / 2, dtype=z.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0]


def masked(m: Any, x: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="none")
    kept = (y.flatten() >= 0).double()
    return (each * kept).sum() / kept.sum()


def averaged(m: Any, x: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="sum")
    return asa.mean_over(each, (y >= 0).sum())


def contrastive(z: Tensor) -> Tensor:
    z = F.normalize(z, dim=-1)
    return F.cross_entropy(z @ z.roll(1, 1).T / 0.5, torch.arange(len(z)))


RIGHT: dict[str, Loss] = {
    "class weights": lambda m, x, y: F.cross_entropy(m(x[:, 0]), y[:, 0].clamp(0), weight=WEIGHTS),
    "ignored targets": lambda m, x, y: F.cross_entropy(m(x).transpose(1, 2), y),
    "ignored and flattened": lambda m, x, y: F.cross_entropy(m(x).view(-1, CLASSES), y.view(-1)),
    "weights, smoothed": lambda m, x, y: F.cross_entropy(m(x[:, 0]), y[:, 0], weight=WEIGHTS, label_smoothing=0.2),
    "ignored and smoothed": lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten(), label_smoothing=0.2),
    "two terms": lambda m, x, y: (
        F.cross_entropy(m(x[:, 0]), y[:, 0].clamp(0), weight=WEIGHTS) + 0.3 * F.cross_entropy(m(x[:, 1]), y[:, 1])
    ),
    "nll": lambda m, x, y: F.nll_loss(m(x[:, 0]).log_softmax(1), y[:, 0].clamp(0), weight=WEIGHTS),
    "plain": lambda m, x, y: F.mse_loss(m(x[:, 0]), smooth(y)),
    "a mean by hand": lambda m, x, y: (m(x[:, 0]) - smooth(y)).square().sum(1).sum() / len(x),
    "times one by its samples": lambda m, x, y: (m(x[:, 0]) - smooth(y)).square().sum() * (1 / len(x)),
    "summed pixels": lambda m, x, y: (m(x) ** 2).sum(dim=(1, 2)).mean() / 3,
    "binary": lambda m, x, y: F.binary_cross_entropy_with_logits(m(x[:, 0]), smooth(y), pos_weight=WEIGHTS),
    "summed over a count": averaged,
    "dice of shares that sum to one": lambda m, x, y: dice(m(x[:, 0]).softmax(-1), smooth(y)),
    "gathered": lambda m, x, y: contrastive(asa.gather(m(x[:, 0]))),
}
WARNED: dict[str, Loss] = {
    "a sum": lambda m, x, y: F.mse_loss(m(x[:, 0]), smooth(y), reduction="sum"),
    "a mask": masked,
    "dice over the batch": lambda m, x, y: dice(m(x[:, 0]).sigmoid(), smooth(y)),
    "contrastive": lambda m, x, y: contrastive(m(x[:, 0])),
    "the worst of them": lambda m, x, y: F.mse_loss(m(x[:, 0]), smooth(y), reduction="none").sum(1).topk(2)[0].mean(),
    "spread": lambda m, x, y: m(x[:, 0]).std(),
    "a norm": lambda m, x, y: m(x[:, 0]).norm(),
    "a function by hand": lambda m, x, y: ByHand.apply(m(x[:, 0])),
    "per rank count": lambda m, x, y: (m(x)[y >= 0] ** 2).sum() / max(1, int((y >= 0).sum())),
}


def train(model: Any, opt: Any, batches: Any, loss: Loss) -> dict[str, Tensor]:
    for x, y in batches:
        opt.zero_grad()
        loss(model, x, y).backward()
        opt.step()
    return model.state_dict()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def spread(_rank: int, names: list[str], strategy: str, cache: Path | None = None) -> Any:
    """States and warnings by name; with ``cache``, one plan serves all losses."""
    found = []
    for name in names:
        model = net()
        placed = asa.parallelize(model, optimizer(model), loader(), strategies=(strategy,), cache=cache,
                                 time_limit_s=0.1,
                                 cluster="profiles/cluster.local-gloo-2.json",
                                 example_input=torch.zeros(2, WIDTH, dtype=torch.float64))  # fmt: skip
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            state = train(*placed, (RIGHT | WARNED)[name])
        found.append((state, [str(w.message) for w in heard]))
        placed[0].close()
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_two_ranks_give_the_numbers_of_one(strategy: str, tmp_path: Path) -> None:
    # What a tensor-parallel plan splits was found for the dimensions of the example.
    some = {"fsdp": ["ignored targets", "two terms", "summed over a count"], "tensor": ["class weights", "two terms"]}
    names = some.get(strategy, list(RIGHT))
    for rank in run_ranks(2, spread, names, strategy, tmp_path, threads=1, timeout_s=120):
        for name, (state, heard) in zip(names, rank, strict=True):
            model = net()
            reference = train(model, optimizer(model), loader(), RIGHT[name])
            assert not heard, (name, heard)
            assert far(state, reference) < 1e-11, name


def test_other_losses_are_warned_of_with_what_they_differ_by(tmp_path: Path) -> None:
    for rank in run_ranks(2, spread, list(WARNED), "ddp", tmp_path, threads=1, timeout_s=120):
        for name, (_, heard) in zip(WARNED, rank, strict=True):
            assert len(heard) == 1, (name, heard)
            assert "not a mean over samples" in heard[0], name
            assert "%" in heard[0]


def of_other_dimensions(_rank: int) -> Any:
    try:
        return spread(_rank, ["ignored targets"], "tensor")
    except asa.AsaError as error:
        return str(error)


def test_other_dimensions_than_the_example_s_are_refused_in_a_line() -> None:
    for said in run_ranks(2, of_other_dimensions, threads=1, timeout_s=120):
        assert "strategies tensor cannot be had" in said
        assert "was planned for" in said
