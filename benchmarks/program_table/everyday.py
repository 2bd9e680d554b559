"""Programs of every day: numbers that a loop sets by many ways, losses that bend late, rounds that depend on
samples, tools of torch around model and step, and adapters, experts and steps without gradients."""

from __future__ import annotations

import contextvars
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

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
add("a mean times whether it is large, late", _in_one_pass(lambda o, y: (v := CE(o, y)) * (v > 0.62) + 0.1 * v), _long)
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

# public training scripts


class DistMuonLike(torch.optim.Optimizer):
    """Shares out parameters over processes itself where there are some: gradients are averaged, each process updates
    its own, and weights are broadcast."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        spread = dist.is_initialized() and dist.get_world_size() > 1
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                if spread:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
                if not spread or i % dist.get_world_size() == dist.get_rank():
                    held = self.state[p].setdefault("m", torch.zeros_like(p))
                    held.lerp_(p.grad, 1 - group["momentum"])
                    p.add_(held / (held.norm() + 1e-8), alpha=-group["lr"])
                if spread:
                    dist.broadcast(p.data, i % dist.get_world_size())


def _shared_out() -> Made:
    net, _, batches = classified()
    return net, DistMuonLike(net.parameters(), 0.02), batches


add("an optimizer that shares out parameters by process", epochs(pairs(CE)), _shared_out)


class Boxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.box = nn.Linear(8, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.box(F.relu(self.body(x))).view(len(x), 3, 4)  # type: ignore[no-any-return]


def _criterion(out: Tensor, boxes: Tensor, valid: Tensor) -> Tensor:
    """Divides by the mean number of boxes of a process, as DETR does."""
    count = valid.sum().to(out.dtype)
    ranks = 1
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(count)
        ranks = dist.get_world_size()
    count = torch.clamp(count / ranks, min=1)
    return (F.l1_loss(out, boxes, reduction="none").sum(2) * valid).sum() / count


def _detr(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, boxes, valid in batches:
            opt.zero_grad()
            _criterion(net(x), boxes, valid).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            opt.step()


for _name, _count in (("", 21), (", even", 24)):
    add(f"boxes divided by their number over processes{_name}", _detr,
        lambda n=_count: made(Boxes(), normal(n, 8), normal(n, 3, 4), (torch.rand(n, 3) > 0.4).double()))  # fmt: skip


def _zeroth(net: Any, _opt: Any, batches: Any) -> None:
    """Two losses at weights moved along one direction, and no backward."""
    for step, (x, y) in enumerate(batches):
        losses = []
        for sign in (1, -2, 1):
            g = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(torch.randn(p.shape, generator=g, dtype=p.dtype), alpha=sign * 1e-3)
                losses.append(CE(net(x), y))
        slope = (losses[0] - losses[1]) / 2e-3
        g = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(0.01 * slope * torch.randn(p.shape, generator=g, dtype=p.dtype))


add("moved along a direction by two losses (MeZO)", _zeroth)


class LowRank(nn.Module):
    """A frozen layer with an adapter, by its direction and size (DoRA)."""

    def __init__(self, sized: bool) -> None:
        super().__init__()
        self.base = nn.Linear(8, 16)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 8) / 3), nn.Parameter(torch.zeros(16, 2))
        self.size = nn.Parameter(self.base.weight.norm(dim=1).clone()) if sized else None

    def forward(self, x: Tensor) -> Tensor:
        w = self.base.weight + self.b @ self.a
        if self.size is not None:
            w = w * (self.size / w.norm(dim=1).detach())[:, None]
        return F.linear(x, w, self.base.bias)


def _adapted(sized: bool) -> Any:
    return lambda: classified(lambda: nn.Sequential(LowRank(sized), nn.GELU(), nn.Linear(16, 3)))


usual("adapters with a size (DoRA)", _adapted(True))


def _merged(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
        with torch.no_grad():
            layer = net[0]
            layer.base.weight += layer.b @ layer.a
            layer.b.zero_()
            opt.state[layer.b]["momentum_buffer"].mul_(0.1)


add("adapters merged behind each epoch (ReLoRA)", _merged, _adapted(False))


class Quantised(nn.Module):
    """Eight-bit weights in a buffer, and a trained bias and scale."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        w = torch.randn(outer, inner)
        self.register_buffer("codes", (w / w.abs().max() * 127).round().to(torch.int8))
        self.scale, self.bias = nn.Parameter(torch.full((outer, 1), 0.02)), nn.Parameter(torch.zeros(outer))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.scale, self.bias)


usual("eight-bit weights in a buffer",
      lambda: classified(lambda: nn.Sequential(Quantised(8, 16), nn.GELU(), nn.Linear(16, 3))))  # fmt: skip


class Scaled2(nn.Linear):
    """Does more than forward in ``__call__``."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2  # type: ignore[no-any-return]


usual("a layer that overrides __call__",
      lambda: classified(lambda: nn.Sequential(Scaled2(8, 16), nn.GELU(), nn.Linear(16, 3))))  # fmt: skip


def _gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class Scripted(Named):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.act: Any = torch.jit.script(_gelu)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.second(self.act(self.first(x)))))  # type: ignore[no-any-return]


usual("a scripted activation", lambda: classified(Scripted))


class Conditional(Named):
    """Chooses between two layers by an operator of torch."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        return self.head(torch.where(h.sum(1, keepdim=True) > 3, self.second(h), h))  # type: ignore[no-any-return]


usual("a layer chosen by sample", lambda: classified(Conditional))


def _whole_step(net: Any, opt: Any, batches: Any) -> None:
    @torch.compile(backend="eager")
    def loss_of(out: Tensor, y: Tensor) -> Tensor:
        return CE(out, y, label_smoothing=0.1) + 1e-3 * out.square().mean()

    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            loss_of(net(x), y).backward()
            opt.step()


add("a loss that is compiled", _whole_step)


class Sized(Dataset[Any]):
    """Samples asked for by number and length."""

    def __init__(self) -> None:
        self.x, self.y = normal(24, 12), torch.randint(3, (24,))

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        return self.x[key[0], : key[1]].view(-1, 2).mean(0).repeat(4), self.y[key[0]]

    def __len__(self) -> int:
        return 24


class BySize(Sampler[list[tuple[int, int]]]):
    def __iter__(self) -> Iterator[list[tuple[int, int]]]:  # type: ignore[override]
        for i in range(4):
            yield [(j, 6 + 2 * (i % 3)) for j in range(6 * i, 6 * i + 6)]

    def __len__(self) -> int:
        return 4


def _by_size() -> Made:
    net = small_net().double()
    return net, sgd(net), DataLoader(Sized(), batch_sampler=BySize())


add("samples asked for by number and length", epochs(pairs(CE)), _by_size)


def _strict(net: Any, opt: Any, batches: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epochs(pairs(CE))(net, opt, batches)


add("warnings are errors", _strict)


def _video(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Clips of a video are averaged in evaluation, over all processes."""
    kept: dict[str, Tensor] = {}
    for _ in range(2):
        net.train()
        for x, y, _n in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
        net.eval()
        sums = torch.zeros(8, 3, dtype=torch.float64)
        with torch.inference_mode():
            for x, _y, n in batches:
                sums.index_add_(0, n, net(x).softmax(1))
        if dist.is_initialized():
            dist.all_reduce(sums)
        kept["sums"] = sums
    return kept


add("answers added up by video over processes", _video,
    lambda: made(small_net(), normal(24, 8), torch.randint(3, (24,)), torch.arange(24) % 8))  # fmt: skip


def _noise_scale(net: Any, opt: Any, batches: Any) -> None:
    """Gradients of a half and of all samples; the rate follows their noise."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x[:2]), y[:2]).backward()
            small = sum(p.grad.square().sum() for p in net.parameters())
            opt.zero_grad()
            CE(net(x), y).backward()
            large = sum(p.grad.square().sum() for p in net.parameters())
            opt.param_groups[0]["lr"] = float(0.05 / (1 + 0.1 * (small / large)))
            opt.step()


add("a rate by gradients of a part and of all", _noise_scale, lambda: classified(count=24, batch=8))


def _watched(net: Any, opt: Any, batches: Any) -> None:
    """Norms of gradients as they are ready, by a hook over several tensors."""
    seen: list[float] = []
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        handle = torch.autograd.graph.register_multi_grad_hook((out,), lambda gs: seen.append(float(gs[0].norm())))
        CE(out, y).backward()
        handle.remove()
        opt.step()


add("norms of gradients by a hook over several tensors", _watched)


class MaskedLatents(nn.Module):
    """Predicts hidden patches from those that are seen (I-JEPA); rows by mask, then by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.predict = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, seen: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.embed(x))

        def taken(at: Tensor, of: Tensor) -> Tensor:
            return torch.cat([of.gather(1, at[:, m, :, None].expand(-1, -1, 8)) for m in range(at.shape[1])])

        context = self.mix(taken(seen, h).mean(1, keepdim=True))
        with torch.no_grad():
            target = F.layer_norm(taken(hidden, h), (8,))
        return self.predict(context).expand_as(target), target


def _hidden_patches() -> Made:
    seen = torch.stack([torch.stack([torch.randperm(6)[:3] for _ in range(2)]) for _ in range(21)])
    hidden = torch.stack([torch.stack([torch.randperm(6)[:2] for _ in range(2)]) for _ in range(21)])
    return made(MaskedLatents(), normal(21, 6, 4), seen, hidden)


add("hidden patches predicted, rows by mask (I-JEPA)",
    epochs(lambda net, batch: F.smooth_l1_loss(*net(*batch))), _hidden_patches)  # fmt: skip


def _jsd(net: Any, opt: Any, batches: Any) -> None:
    """Three views in one call; the divergence of their answers (AugMix)."""
    for _ in range(2):
        for x, y in batches:
            views = torch.cat([x, x * 0.9, x + 0.1])
            out = net(views)
            clean, one, two = (o.softmax(1) for o in out.split(len(x)))
            mean = ((clean + one + two) / 3).clamp(1e-7, 1).log()
            loss = CE(out[: len(x)], y) + 4 * sum(F.kl_div(mean, p, reduction="batchmean") for p in (clean, one, two))
            opt.zero_grad()
            loss.backward()
            opt.step()


add("the divergence of three views (AugMix)", _jsd)


def _grokfast(net: Any, opt: Any, batches: Any) -> None:
    slow: dict[str, Tensor] = {}
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            for n, p in net.named_parameters():
                slow[n] = p.grad.clone() if n not in slow else slow[n].mul(0.9).add(p.grad, alpha=0.1)
                p.grad = p.grad + 2 * slow[n]
            opt.step()


add("slow gradients made stronger (Grokfast)", _grokfast)


def _typed(net: Any, opt: Any, batches: Any) -> None:
    assert isinstance(net, nn.Module)
    assert isinstance(opt, torch.optim.Optimizer)
    assert batches.batch_size == 6
    assert isinstance(batches.dataset, TensorDataset)
    epochs(pairs(CE))(net, opt, batches)


add("types are asked for", _typed)


def _constrained(net: Any, opt: Any, batches: Any) -> None:
    """A penalty where the mean size of the answers goes beyond a limit, with a multiplier."""
    multiplier = 0.5
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            (CE(out, y) + multiplier * F.relu(out.square().mean() - 0.08)).backward()
            opt.step()
        multiplier *= 2


add("a limit on a mean with a multiplier", _constrained)
