"""Programs of every day: numbers that a loop sets by many ways, losses that bend late, rounds that depend on
samples, tools of torch around model and step, and adapters, experts and steps without gradients."""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.program_table import Made, epochs, loader, made, normal, pairs, program, sgd
from benchmarks.program_table.common import CE, Named, classified, small_net

KIND = "everyday"


def add(name: str, loop: Any, make: Any = classified, job_loss: Any = None, **options: Any) -> None:
    """Add a program to the table."""
    program(KIND, f"everyday: {name}", make, loop, job_loss, **options)


def usual(name: str, make: Any = classified, loss: Any = CE, job: bool = True, **options: Any) -> None:
    """A program of the usual loop, whose loss is one of outputs and labels; it can be a Job."""
    add(name, epochs(pairs(loss)), make, loss if job else None, **options)


def even(net: Any = small_net) -> Made:
    """Batches of six only."""
    return classified(net, 24)


# a factor that the loop sets, and where it is kept

SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
SCALES = [1.0]
TABLE = {"scale": 1.0}


@dataclass
class Settings:
    scale: float = 1.0


def _closed() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    scale = 1.0

    def times(x: Tensor) -> Tensor:
        return x * scale

    def put(value: float) -> None:
        nonlocal scale
        scale = value

    return times, put


class Scaled(Named):
    """Scales its hidden features by a number that is kept somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.cfg: Any = SimpleNamespace(scale=1.0)
        self.options: Any = {"scale": 1.0}
        self.settings = Settings()
        self.rates = [1.0, 2.0]
        self.array = np.ones(16)
        self.plain = torch.ones(16, dtype=torch.float64)
        self.times, self.put = _closed()
        self.act: Any = F.relu
        self.part: Any = functools.partial(torch.mul, other=1.0)

    def factor(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(self.factor(F.relu(self.first(x))))))  # type: ignore[no-any-return]


def _kept(name: str, factor: Any, put: Any) -> None:
    class Net(Scaled):
        pass

    Net.factor = factor  # type: ignore[method-assign]

    def make() -> Made:
        for outside in (_by_context, _by_list, _by_table, _by_environ, _by_class):
            outside(None, 1.0)
        return classified(Net)

    def loop(net: Any, opt: Any, batches: Any) -> None:
        for epoch in range(2):
            put(net, (0.6, 1.7)[epoch])
            for x, y in batches:
                opt.zero_grad()
                CE(net(x), y).backward()
                opt.step()

    add(f"a factor set by epoch, {name}", loop, make)


def _by_context(_: Any, value: float) -> None:
    SCALE.set(value)


def _by_list(_: Any, value: float) -> None:
    SCALES[0] = value


def _by_table(_: Any, value: float) -> None:
    TABLE["scale"] = value


def _by_environ(_: Any, value: float) -> None:
    os.environ["EVERYDAY_SCALE"] = str(value)


def _by_class(_: Any, value: float) -> None:
    _KEEPER.value = value


class _KEEPER:
    value = 1.0


def _by_array(net: Any, value: float) -> None:
    net.array[:] = value


_kept("in a namespace of the model", lambda self, x: x * self.cfg.scale, lambda net, v: setattr(net.cfg, "scale", v))
_kept("in a dictionary of the model", lambda self, x: x * self.options["scale"],
      lambda net, v: net.options.__setitem__("scale", v))  # fmt: skip
_kept("in a dataclass of the model", lambda self, x: x * self.settings.scale,
      lambda net, v: setattr(net.settings, "scale", v))  # fmt: skip
_kept("in a list of the model", lambda self, x: x * self.rates[0], lambda net, v: net.rates.__setitem__(0, v))
_kept("in an array of the model", lambda self, x: x * torch.from_numpy(self.array), _by_array)
_kept("in a plain tensor, in place", lambda self, x: x * self.plain, lambda net, v: net.plain.fill_(v))
_kept("in a plain tensor, replaced", lambda self, x: x * self.plain,
      lambda net, v: setattr(net, "plain", torch.full((16,), v, dtype=torch.float64)))  # fmt: skip
_kept("in a closure", lambda self, x: self.times(x), lambda net, v: net.put(v))
_kept("in a function of the model", lambda self, x: self.act(x) * 1.0,
      lambda net, v: setattr(net, "act", F.relu if v < 1 else torch.tanh))  # fmt: skip
_kept("in a partial of the model", lambda self, x: self.part(x),
      lambda net, v: setattr(net, "part", functools.partial(torch.mul, other=v)))  # fmt: skip
_kept("in a variable of the context", lambda _, x: x * SCALE.get(), _by_context)
_kept("in a global list", lambda _, x: x * SCALES[0], _by_list)
_kept("in a global dictionary", lambda _, x: x * TABLE["scale"], _by_table)
_kept("in the environment", lambda _, x: x * float(os.environ.get("EVERYDAY_SCALE", "1")), _by_environ)
_kept("in a class of its own", lambda _, x: x * _KEEPER.value, _by_class)

# losses that bend late


def _in_one_pass(loss: Any) -> Any:
    """One epoch of many batches, as texts are trained."""

    def loop(net: Any, opt: Any, batches: Any) -> None:
        for x, y in batches:
            opt.zero_grad()
            loss(net(x), y).backward()
            opt.step()

    return loop


def _long() -> Made:
    net = small_net().double()
    x = normal(90, 8)
    return net, sgd(net, 0.2), loader(x, (x.sum(1) > 0).long(), batch=6)


def _flood(out: Tensor, y: Tensor) -> Tensor:
    return (CE(out, y) - 0.6).abs() + 0.6


def _at_most(out: Tensor, y: Tensor) -> Tensor:
    return CE(out, y) + 2 * F.relu(out.pow(2).sum(1).mean() - 1.5)


def _larger(out: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(CE(out, y), 0.3 * out.abs().mean() + 0.3)


def _branch(out: Tensor, y: Tensor) -> Tensor:
    loss = CE(out, y)
    return loss if loss > 0.7 else loss * 0.2


def _squared_late(out: Tensor, y: Tensor) -> Tensor:
    return F.huber_loss(CE(out, y), torch.zeros((), dtype=out.dtype), delta=0.7)


add("flooded", _in_one_pass(_flood), _long)
usual("flooded, two epochs", _long, _flood)
add("a limit on a mean, reached late", _in_one_pass(_at_most), _long)
usual("a limit on a mean, reached late, two epochs", _long, _at_most)
add("the larger of two means, late", _in_one_pass(_larger), _long)
usual("the larger of two means, late, two epochs", _long, _larger)
add("a smaller weight where the loss is small", _in_one_pass(_branch), _long)
add("a bend of the mean loss", _in_one_pass(_squared_late), _long)
usual("a bend of the mean loss, two epochs", _long, _squared_late)

# rounds and parts that depend on the samples


class Pondering(nn.Module):
    """Goes on until every sample has halted."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.cell = nn.Linear(8, 16), nn.Linear(16, 16)
        self.halt, self.head = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.enter(x))
        left = torch.ones(len(x), 1, dtype=x.dtype)
        out = torch.zeros_like(h)
        for _ in range(9):
            h = torch.tanh(self.cell(h))
            p = torch.minimum(self.halt(h).sigmoid(), left)
            out, left = out + p * h, left - p
            if not bool((left > 0.12).any()):
                break
        return self.head(out + left * h)  # type: ignore[no-any-return]


usual("halts when all samples have halted", lambda: classified(Pondering))


class EarlyExit(Named):
    """Leaves in evaluation where it is sure; in training blocks are skipped where all are sure."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        rest = h.norm(dim=1) < 1.6
        if rest.any():
            h = h.index_add(0, rest.nonzero()[:, 0], F.relu(self.second(h[rest])))
        return self.head(h)  # type: ignore[no-any-return]


usual("a block for samples that need it", lambda: classified(EarlyExit))


def _selected(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            with torch.no_grad():
                hard = F.cross_entropy(net(x), y, reduction="none") > 1.05
            if not hard.any():
                continue
            opt.zero_grad()
            CE(net(x[hard]), y[hard]).backward()
            opt.step()


add("trained on what is above a threshold", _selected)


def _selected_weighted(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            with torch.no_grad():
                hard = F.cross_entropy(net(x), y, reduction="none") > 0.9
            opt.zero_grad()
            (F.cross_entropy(net(x[hard]), y[hard], reduction="sum") / len(x)).backward()
            opt.step()


add("a sum of what is above a threshold, over all", _selected_weighted)


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(16, 3) for _ in range(2))

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](self.body(x))  # type: ignore[no-any-return]


def _tasks() -> Made:
    return made(Tasks(), normal(21, 8), torch.randint(3, (21,)), torch.arange(21) % 3 // 2)


def _by_task(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y, task in batches:
            opt.zero_grad()
            for t in (0, 1):
                mine = task == t
                if mine.any():
                    CE(net(x[mine], t), y[mine]).backward()
            opt.step()


add("a call for each task's samples", _by_task, _tasks, example_input=(torch.zeros(2, 8).double(), 0))


def _in_splits(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            parts = list(zip(x.split(2), y.split(2), strict=True))
            for a, b in parts:
                (CE(net(a), b) / len(parts)).backward()
            opt.step()


add("micro batches of two by split", _in_splits)
add("micro batches of two by split, even", _in_splits, lambda: classified(count=24, batch=8))


class LateMean(Named):
    """From its fifth call on, features are centred over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        if self.training:
            self.calls += 1
            if int(self.calls) > 4:
                h = h - h.mean(0)
        return self.head(F.relu(self.second(h)))  # type: ignore[no-any-return]


usual("features centred over the batch from the fifth call on", lambda: even(LateMean), job=False)


class Capacity(nn.Module):
    """Experts that take so many samples and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(8, 3), nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(1)
        best = F.one_hot(p.argmax(1), 3)
        place = (best.cumsum(0) * best).sum(1)
        kept = (place <= max(1, int(1.25 * len(x) / 3))).to(x.dtype)
        out = sum(p[:, i : i + 1] * best[:, i : i + 1] * F.relu(e(x)) for i, e in enumerate(self.experts))
        return self.head(out * kept[:, None])  # type: ignore[no-any-return]


usual("experts that are full", lambda: even(Capacity))


class Balanced(nn.Module):
    """Experts whose gates have a bias that the loop moves by their load."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(8, 3), nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 16) for _ in range(3))
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("load", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        s = self.gate(x).sigmoid()
        best = F.one_hot((s + self.bias).argmax(1), 3).to(x.dtype)
        if self.training:
            with torch.no_grad():
                self.load += best.sum(0)
        return self.head(sum(s[:, i : i + 1] * best[:, i : i + 1] * F.relu(e(x)) for i, e in enumerate(self.experts)))  # type: ignore[no-any-return]


def _balanced(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
            with torch.no_grad():
                net.bias += 0.05 * (net.load.mean() - net.load).sign()
                net.load.zero_()


add("experts balanced by a bias without a loss", _balanced, lambda: even(Balanced))


class Penalised(Named):
    """Returns a penalty on its weights beside its answers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), sum(p.pow(2).sum() for p in self.parameters())  # type: ignore[return-value]


def _penalised(out: Any, y: Tensor) -> Tensor:
    return CE(out[0], y) + 0.01 * out[1]  # type: ignore[no-any-return]


usual("a penalty on its weights is an output", lambda: classified(Penalised), _penalised)


class OrthogonalOutput(Named):
    """Returns a penalty on one of its matrices."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w = self.second.weight
        return super().forward(x), (w @ w.T - torch.eye(16, dtype=w.dtype)).pow(2).mean()


usual("a penalty on a matrix is an output", lambda: classified(OrthogonalOutput), _penalised)


def _flooded_of_all(net: Any, opt: Any, batches: Any) -> None:
    import asa

    for x, y in batches:
        opt.zero_grad()
        _flood(asa.gather(net(x)), asa.gather(y)).backward()
        opt.step()


add("flooded, over gathered outputs", _flooded_of_all, _long)


class ByNorm(Named):
    """Scales its answers by the size of all its weights."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = sum(p.pow(2).sum() for p in self.parameters())
        return super().forward(x) * (1 + 0.01 * size)  # type: ignore[operator]


usual("answers scaled by the size of all weights", lambda: classified(ByNorm))


class Summed(Named):
    """Returns a sum of its weights beside its answers."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), sum(p.sum() for p in self.parameters()).square()  # type: ignore[union-attr,return-value]


usual("a square of the sum of its weights is an output", lambda: classified(Summed), _penalised)
