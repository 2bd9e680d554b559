"""Tensors held in parts: what is computed of them is what is computed of the whole, gradients too, or is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from asa.errors import UsageError
from asa.launch import run_ranks
from asa.sharding.axis import Axis
from asa.sharding.modules import ParameterShard
from asa.sharding.split import Split, TensorPart

SHARDS = {
    "rows": ParameterShard(dim=0, units=3, unit=2, degree=2),  # 4 of them on one rank, 2 on the other
    "columns": ParameterShard(dim=1, units=5, unit=1, degree=2),
    "blocks": ParameterShard(dim=0, units=1 + 1, unit=1, degree=2, blocks=3),
}
SHAPES = {"rows": (6, 5), "columns": (6, 5, 2), "blocks": (6,)}

WORTH: dict[str, Callable[[Any], Tensor]] = {
    "sum": lambda p: p.sum() ** 2,
    "torch.sum": lambda p: torch.sum(input=p).square(),
    "mean": lambda p: (p - 0.1).mean() ** 2,
    "mean, float32": lambda p: p.mean(dtype=torch.float32).double() * 3,
    "norm": lambda p: p.norm(),
    "norm 1": lambda p: p.norm(p=1) ** 2,
    "norm 3": lambda p: torch.norm(p, 3),
    "norm inf": lambda p: torch.linalg.vector_norm(p, float("inf")) ** 2,
    "norm 0": lambda p: p.norm(p=0) + p.sum(),
    "norm of zeros": lambda p: (p * 0).norm() + p.sum(),
    "fro": lambda p: torch.norm(p, p="fro"),
    "linalg": lambda p: torch.linalg.norm(p),
    "root": lambda p: (2 * p.square()).sum().sqrt(),
    "max": lambda p: p.abs().max() ** 2,
    "amax, ties": lambda p: (p * 4).round().detach().add(p - p.detach()).amax() * 2,
    "min": lambda p: p.min() ** 2,
    "var": lambda p: p.var(),
    "std": lambda p: torch.std(p, correction=0),
    "by its own norm": lambda p: (p / p.norm(p=1)).abs().amax() + (p * p.mean()).norm(),
    "dot": lambda p: torch.dot(p.flatten(), (p * 2).flatten()),
    "dist": lambda p: torch.dist(p, p.detach() * 0.5),
    "beside the whole": lambda p: (p * torch.arange(p.numel(), dtype=p.dtype).view(p.shape)).norm(),
    "beside one row": lambda p: (p + torch.arange(p.shape[-1], dtype=p.dtype)).norm(),
    "along 0": lambda p: p.norm(dim=0).square().sum().sqrt(),
    "along the last": lambda p: p.sum(-1).norm(p=3),
    "along the last, kept": lambda p: (p / p.norm(dim=-1, keepdim=True)).amax(),
    "rows": lambda p: p.reshape(len(p), -1).norm(dim=1).max(),
    "columns": lambda p: p.view(p.shape[0], -1).t().norm(dim=1, keepdim=True).amax(),
    "flat": lambda p: p.view(-1).unsqueeze(0).norm(dim=1).sum(),
    "turned": lambda p: (p.permute(*reversed(range(p.dim()))).sum(0) ** 2).sum(),
    "where": lambda p: torch.where(p > 0, p, 0.1 * p.abs()).norm(),
    "logical": lambda p: p.sum() * (p > 0).any() * (p < 9).all() * torch.count_nonzero(p > 0),
    "soft": lambda p: F.softshrink(p, 0.2).norm(p=1),
    "counted": lambda p: p.norm() / p.numel() * p.shape[0] * p.size(-1),
}


def whole(what: str) -> Tensor:
    return torch.randn(SHAPES[what], generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def part(rank: int, what: str) -> TensorPart:
    shard = SHARDS[what]
    held = nn.Parameter(shard.cut(whole(what), rank))
    return TensorPart(held, Split(Axis(size=2, index=rank, group=dist.group.WORLD), shard, torch.device("cpu")))


def worth_on(rank: int) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    found = {}
    for what in SHARDS:
        for name, worth in WORTH.items():
            p = part(rank, what)
            value = worth(p)
            assert type(value) is Tensor, name
            value.backward()
            assert p.grad is not None
            found[what, name] = (value.detach(), p.grad.held)
    return found


def test_values_and_gradients_are_those_of_the_whole() -> None:
    ranks = run_ranks(2, worth_on, threads=1, timeout_s=60)
    for what, shard in SHARDS.items():
        for name, worth in WORTH.items():
            p = nn.Parameter(whole(what))
            value = worth(p)
            value.backward()
            near: Any = {"rtol": 1e-6 if "float32" in name else 1e-12, "atol": 1e-12}
            for rank, found in enumerate(ranks):
                mine, gradient = found[what, name]
                torch.testing.assert_close(mine, value.detach(), **near, msg=f"{what}, {name}")
                wanted = shard.cut(p.grad, rank)  # type: ignore[arg-type]
                torch.testing.assert_close(gradient, wanted, **near, msg=f"gradient: {what}, {name}")
