"""Losses: means and what is none, over the rows of a batch, in every form that people write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asa
from benchmarks.program_table import Made, epochs, made, normal, pairs, program

_WEIGHTS = torch.tensor([0.1, 5.0, 1.0], dtype=torch.float64)


class _Straight(torch.autograd.Function):
    """A squared error whose gradient is written by hand; its value never was a tensor of a graph."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, wanted: Tensor, mean: bool) -> Tensor:
        ctx.save_for_backward(out, wanted)
        ctx.count = out.numel() if mean else 1
        return torch.tensor(float((out - wanted).square().sum()) / ctx.count, dtype=out.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        out, wanted = ctx.saved_tensors
        return gradient * 2 * (out - wanted) / ctx.count, None, None


def _net(out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, out))


def _classes() -> Made:
    return made(_net(), normal(20, 8), torch.randint(3, (20,)))


def _values(out: int = 3) -> Made:
    return made(_net(out), normal(20, 8), normal(20, out), lr=0.01)


def _contrastive(a: Tensor, labels: Tensor) -> Tensor:
    a = F.normalize(a, dim=1)
    near = a @ a.T / 0.5 - 1e9 * torch.eye(len(a), dtype=a.dtype)
    same = (labels[:, None] == labels[None]).to(a.dtype) - torch.eye(len(a), dtype=a.dtype)
    return -(near.log_softmax(1) * same).sum(1).div(same.sum(1).clamp(min=1)).mean()


def _dice(out: Tensor, wanted: Tensor) -> Tensor:
    p = out.sigmoid()
    return 1 - (2 * (p * wanted).sum() + 1) / (p.sum() + wanted.sum() + 1)


def _masked(out: Tensor, wanted: Tensor) -> Tensor:
    mask = (wanted > 0).to(out.dtype)
    return ((out - wanted).square() * mask).sum() / mask.sum()


def _worst(out: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(out, wanted, reduction="none").topk(2).values.mean()


def _ctc(net: Any, batch: Any) -> Tensor:
    logits = net(batch[0]).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logits, batch[1], torch.full((len(batch[0]),), logits.shape[0]), batch[2])


def _ctc_made() -> Made:
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))
    return made(net, normal(20, 9, 8), torch.randint(1, 5, (20, 3)), torch.randint(1, 4, (20,)))


def _penalty(net: Any, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    out = net(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return F.cross_entropy(out, batch[1]) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def _sum_over(net: Any, batch: Any) -> Tensor:
    return asa.mean_over(F.cross_entropy(net(batch[0]), batch[1], reduction="sum"), len(batch[0]))


def _later(net: Any, opt: Any, batches: Any) -> None:
    """A mean in the first epoch, a loss over the batch afterwards."""
    for epoch in range(2):
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            (F.cross_entropy(out, y) if epoch == 0 else _contrastive(out, y)).backward()
            opt.step()


def _in_turn(net: Any, opt: Any, batches: Any) -> None:
    """Two losses in turn, the second of which compares samples."""
    for _ in range(2):
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            out = net(x)
            (F.cross_entropy(out, y) if i % 2 == 0 else _contrastive(out, y)).backward()
            opt.step()


class _Standardised(nn.Module):
    """Divides by statistics of the batch without being a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(F.gelu((h - h.mean(0)) / (h.std(0, unbiased=False) + 1e-3)))


class _Statistic(nn.Module):
    """Gives a loss over the batch beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(self.a(x))
        return self.b(h), h.std(0).sum()


class _Whole(nn.Module):
    """Computes a loss that compares samples itself, and returns that alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return _contrastive(self.net(x), y)


def _plain(net: Any, batch: Any) -> Tensor:
    return _Straight.apply(net(batch[0]), batch[1], True)  # type: ignore[no-any-return]


def _plain_sum(net: Any, batch: Any) -> Tensor:
    return _Straight.apply(net(batch[0]), batch[1], False)  # type: ignore[no-any-return]


def _smooth(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, weight=_WEIGHTS, label_smoothing=0.1)


def _soft(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, F.one_hot(y, 3).to(out.dtype) * 0.9 + 0.033)


def _focal(out: Tensor, y: Tensor) -> Tensor:
    p = out.log_softmax(1).gather(1, y[:, None])[:, 0]
    return (-((1 - p.exp()) ** 2) * p).mean()


def _list(net: Any, batch: Any) -> Tensor:
    out = net(batch[0])
    return torch.stack([F.cross_entropy(o[None], t[None]) for o, t in zip(out, batch[1], strict=True)]).mean()


def _mean(name: str, loss: Any, job: bool = True, make: Any = _classes) -> None:
    program("loss", name, make, epochs(pairs(loss)), loss if job else None)


_mean("cross-entropy, class weights", lambda o, y: F.cross_entropy(o, y, weight=_WEIGHTS))
_mean("cross-entropy, class weights and smoothing", _smooth)
_mean("cross-entropy, ignored class", lambda o, y: F.cross_entropy(o, y, ignore_index=1))
_mean("cross-entropy, soft targets", _soft)
_mean("cross-entropy, a sum", lambda o, y: F.cross_entropy(o, y, reduction="sum") * 0.1)
_mean("nll", lambda o, y: F.nll_loss(o.log_softmax(1), y, weight=_WEIGHTS))
_mean("focal", _focal)
_mean("worst of the batch", _worst)
_mean("contrastive", _contrastive)
_mean("multi-margin, weighted", lambda o, y: F.multi_margin_loss(o, y, weight=_WEIGHTS))
_mean("masked", _masked, make=_values)
_mean("dice over the batch", lambda o, y: _dice(o, (y > 0).to(o.dtype)), make=_values)
_mean("root of the mean", lambda o, y: F.mse_loss(o, y).sqrt(), make=_values)
_mean("smooth l1", F.smooth_l1_loss, make=_values)
_mean("log of the mean", lambda o, y: F.mse_loss(o, y).add(1).log(), make=_values)
_mean("correlation", lambda o, y: 1 - torch.corrcoef(torch.stack([o.flatten(), y.flatten()]))[0, 1], make=_values)
_mean("batchmean", lambda o, y: F.kl_div(o.log_softmax(1), y.softmax(1), reduction="batchmean"), make=_values)
program("loss", "ctc", _ctc_made, epochs(_ctc))
program("loss", "gradient penalty", _classes, epochs(_penalty))
program("loss", "mean_over", _classes, epochs(_sum_over))
program("loss", "gathered", _classes, epochs(lambda net, b: _contrastive(asa.gather(net(b[0])), asa.gather(b[1]))))
program("loss", "another from the second epoch on", _classes, _later)
program("loss", "two in turn", _classes, _in_turn)
program("loss", "statistics of the batch in forward", lambda: made(_Standardised(), normal(20, 8),
        torch.randint(3, (20,))), epochs(pairs(F.cross_entropy)), F.cross_entropy)  # fmt: skip
program("loss", "a statistic beside the output", lambda: made(_Statistic(), normal(20, 8), torch.randint(3, (20,))),
        epochs(lambda net, b: (lambda o: F.cross_entropy(o[0], b[1]) - 0.1 * o[1])(net(b[0]))))  # fmt: skip
program("loss", "comparing samples inside the model", lambda: made(_Whole(), normal(20, 8), torch.randint(3, (20,))),
        epochs(lambda net, b: net(*b)))  # fmt: skip
program("loss", "autograd function, mean", _values, epochs(_plain))
program("loss", "autograd function, sum", _values, epochs(_plain_sum))
program("loss", "sample by sample", _classes, epochs(_list))
