"""Tensors held in parts: what is computed of them is what is computed of the whole, gradients too, or is refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from asa.errors import UsageError
from asa.launch import run_ranks
from asa.sharding.collectives.axis import Axis
from asa.sharding.layers.modules import ParameterShard
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
    ranks = run_ranks(2, worth_on, threads=1, timeout_s=120)
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


IN_PLACE: dict[str, Callable[[Any, Any], object]] = {
    "average": lambda p, q: q.lerp_(p, 0.25).mul_(2),
    "copied": lambda p, q: q.copy_(p).clamp_(-0.5, 0.5),
    "data": lambda p, q: setattr(q, "data", q.data * 0.5 + p.data),
    "seen flat": lambda p, q: q.view(-1).sub_(p.detach().view(-1), alpha=3),
    "whole": lambda p, q: q.add_(torch.arange(q.numel(), dtype=q.dtype).view(q.shape)),
    "each": lambda p, q: torch._foreach_lerp_([q], [p], 0.5),
    "products": lambda p, q: q.addcmul_(p, p.sign(), value=0.3).div_(q.norm()),
    "drawn": lambda p, q: nn.init.xavier_normal_(q) if q.dim() > 1 else q.normal_(),
    "not a number": lambda p, q: q.fill_(float("nan")).max(),
    "gradient": lambda p, q: (setattr(q, "grad", torch.ones_like(q)), q.grad.mul_(2), q.add_(q.grad)),
}


def changed_on(rank: int) -> dict[tuple[str, str], Tensor]:
    found = {}
    for what in SHARDS:
        for name, change in IN_PLACE.items():
            p, q = part(rank, what), copy.deepcopy(part(rank, what))
            torch.manual_seed(7)
            with torch.no_grad():
                q.mul_(-1)
                change(p, q)
            assert torch.equal(q.isnan(), q != q)
            found[what, name] = q.held
            held = [t.held for t in (p, p.data, p.view(-1))]
            assert len({t.data_ptr() for t in held}) == 1
            assert p.grad is None
            assert isinstance(p, nn.Parameter)
            assert f"{p}".startswith("TensorPart((6")
    return found


def test_changes_in_place_are_those_of_the_whole() -> None:
    ranks = run_ranks(2, changed_on, threads=1, timeout_s=120)
    for what, shard in SHARDS.items():
        for name, change in IN_PLACE.items():
            p, q = nn.Parameter(whole(what)), nn.Parameter(-whole(what))
            torch.manual_seed(7)
            with torch.no_grad():
                change(p, q)
            for rank, found in enumerate(ranks):
                wanted = shard.cut(q.detach(), rank)
                torch.testing.assert_close(found[what, name], wanted, equal_nan=True, msg=f"{what}, {name}")


BY_WHOLE: dict[str, Callable[[Any], Tensor]] = {
    "cat": lambda p: torch.cat([p.flatten(), p.flatten()]).norm(),
    "stack": lambda p: torch.stack([p, torch.ones(p.shape, dtype=p.dtype)]).prod(0).sum() ** 2,
    "vector": lambda p: nn.utils.parameters_to_vector([p.detach()]).norm() * p.sum(),
    "matmul": lambda p: (torch.ones(6).double() @ p.flatten(1)).norm(),
    "linear": lambda p: F.linear(torch.ones(2, p.shape[-1]).double(), p.reshape(-1, p.shape[-1])).square().sum(),
    "gram": lambda p: (p.flatten(1) @ p.flatten(1).t() - torch.eye(len(p)).double()).norm(),
    "svd": lambda p: torch.linalg.svdvals(p.flatten(1)).sum(),
    "order 2": lambda p: torch.linalg.matrix_norm(p.flatten(1), 2),
    "sort": lambda p: (p.flatten().sort().values * torch.arange(p.numel())).sum(),
    "topk": lambda p: torch.topk(p.flatten(), 2).values.norm(),
    "quantile": lambda p: torch.quantile(p, 0.3) * 2,
    "median": lambda p: p.median() ** 2,
    "max(dim)": lambda p: p.max(dim=0).values.norm(),
    "cumsum": lambda p: p.cumsum(0).norm(),
    "softmax": lambda p: p.softmax(0).square().sum(),
    "a row": lambda p: p[1].norm() + p[-1].sum(),
    "rows": lambda p: torch.stack([row.norm() for row in p]).max(),
    "other shapes": lambda p: p.reshape(3, -1).prod(0).sum(),
    "by numbers": lambda p: p.sum() * (p.argmax().item() + p.flatten()[3].item() + len(f"{p.flatten()[0]:.3f}")),
    "turned": lambda p: (p.flatten(1)[:5, :5] * p.flatten(1)[:5, :5].t()).sum(),
    "tensor": lambda p: torch.tensor(p.detach()).norm() * p.mean(),
    "array": lambda p: p.mean() * float(p.detach().numpy().std()),
}
"""What needs the whole tensor, of matrices."""
WRITTEN: dict[str, Callable[[Any], object]] = {
    "a row": lambda p: p[0].mul_(2),
    "set": lambda p: p.__setitem__(slice(0, 2), 1.0),
    "by mask": lambda p: p.__setitem__(p > 0.5, 0.25),
    "flat": lambda p: p.flatten()[2:7].zero_(),
    "by number": lambda p: p.view(-1).__setitem__(torch.tensor([1, 4]), 7.0),
    "row by row": lambda p: [row.div_(row.norm()) for row in p],
    "pieces": lambda p: p.chunk(2)[0].copy_(p.chunk(2)[1]),
    "filled": lambda p: p.index_fill_(0, torch.tensor([1]), 0.5),
    "ordered": lambda p: p.copy_(p[p.flatten(1).norm(dim=1).argsort()]),
    "a view kept": lambda p: (row := p[2], p.mul_(3), row.add_(p[1]), p[0].copy_(row)),
    "turned": lambda p: p.transpose(0, 1)[0].neg_(),
    "of two": lambda p: p.add_(p.detach().flip(0)),
}


def by_whole_on(rank: int) -> list[str]:
    """What is not as on one device."""
    warnings.simplefilter("ignore")  # torch.tensor of a tensor
    wrong = []
    for what in ("rows", "columns"):
        for name, worth in BY_WHOLE.items():
            p, full = part(rank, what), nn.Parameter(whole(what))
            value, wanted = worth(p), worth(full)
            value.backward()
            wanted.backward()
            gradient = SHARDS[what].cut(full.grad, rank)  # type: ignore[arg-type]
            if not torch.allclose(value, wanted) or not torch.allclose(p.grad.held, gradient):  # type: ignore[union-attr]
                wrong.append(f"{what}: {name}")
        for name, write in WRITTEN.items():
            p, full = part(rank, what), nn.Parameter(whole(what))
            with torch.no_grad():
                write(p)
                write(full)
            if not torch.allclose(p.held, SHARDS[what].cut(full, rank)):
                wrong.append(f"{what}: {name} is not written")
    return wrong


def test_what_needs_the_whole_is_gathered_and_written_back() -> None:
    assert run_ranks(2, by_whole_on, threads=1, timeout_s=120) == [[], []]


REFUSED: dict[str, Callable[[Any], object]] = {
    "pickle": lambda p: pickle.dumps(p),
    "into one that is not split": lambda p: torch.zeros(p.shape).add_(p),
    "use p.detach()": lambda p: torch._foreach_add([torch.zeros(6, 5)], [p]),
    "does not fit": lambda p: p * torch.zeros(3, 1),
    "hook": lambda p: p.register_hook(lambda g: g),
    "use loss.backward()": lambda p: torch.autograd.grad(p.norm(), p),
    "different gradients on different ranks": lambda p: (p.norm() * (1 + dist.get_rank())).backward(),
    "has different gradients": lambda p: (p[0].sum() * (1 + dist.get_rank())).backward(),
}


def written_on(rank: int) -> float:
    """The largest difference of whole tensors into which parts are written from those of one device."""
    apart = 0.0
    for name in SHARDS:
        p, full = part(rank, name), whole(name)
        one, other = torch.zeros_like(full), torch.zeros_like(full)
        with torch.no_grad():
            one.mul_(0.9).add_(p, alpha=0.1).lerp_(p.abs(), 0.5).copy_(one + p.detach())
            other.mul_(0.9).add_(full, alpha=0.1).lerp_(full.abs(), 0.5).copy_(other + full)
            torch._foreach_lerp_([one, other], [p, full], 0.25)
            for t, of in ((one, p), (other, full)):
                torch.lerp(t, of, 0.1, out=t)
                torch.add(of, 1, out=of)
                t[...] = t + 0.5 * of.abs().max()
                of[:] = 0.3 * t
                t[:] = of * 2
        apart = max(apart, float((one - other).abs().max()))
    return apart


def test_parts_are_written_into_whole_tensors() -> None:
    assert max(run_ranks(2, written_on, threads=1, timeout_s=120)) < 1e-14


def refused_on(rank: int) -> dict[str, str]:
    found = {}
    for words, ask in REFUSED.items():
        try:
            ask(part(rank, "rows"))
            found[words] = "nothing"
        except UsageError as error:
            found[words] = str(error)
    return found


def test_what_needs_the_whole_is_refused_by_name() -> None:
    for found in run_ranks(2, refused_on, threads=1, timeout_s=120):
        for words, said in found.items():
            assert words.removeprefix("linalg_") in said, (words, said)
            assert "\n" not in said
