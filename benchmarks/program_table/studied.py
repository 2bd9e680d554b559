"""Programs after training scripts of public repositories, third part: what is made of gradients as one vector, norms
gone over again, optimizers with methods and lists of their own, teachers, views and folds, generators and hooks."""

from __future__ import annotations

import copy
import random
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce, get_world_size, is_initialized
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

import asa
from benchmarks.program_table import Made, loader, made, normal, program, sgd
from benchmarks.program_table.common import CE, MSE, Named, classified, one_step, small_net

HELD = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(5, 8)
"""Samples that are not trained on."""


def add(name: str, loop: Any, make: Any = classified, **options: Any) -> None:
    """Add a program."""
    program("repository", f"studied: {name}", make, loop, **options)


def _usual(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)


def _by(optimizer: Any) -> Any:
    """A maker of the small model with an optimizer of the program's own."""

    def make() -> Made:
        net = small_net().double()
        return net, optimizer(net.parameters()), loader(normal(21, 8), torch.randint(3, (21,)))

    return make


# --- gradients


def _projected(net: Any, opt: Any, batches: Any) -> None:
    order = random.Random(1)
    for x, y in batches:
        out, grads = net(x), []
        for loss in (CE(out, y), out.square().mean(), (out[:, 0] - 1).abs().mean()):
            opt.zero_grad(set_to_none=True)
            loss.backward(retain_graph=True)
            grads.append(torch.cat([p.grad.clone().flatten() for p in net.parameters()]))
        projected = copy.deepcopy(grads)
        for one in projected:
            order.shuffle(grads)
            for other in grads:
                if (along := torch.dot(one, other)) < 0:
                    one -= along * other / other.norm() ** 2
        merged, start = torch.stack(projected).mean(0), 0
        for p in net.parameters():
            p.grad = merged[start : start + p.numel()].view_as(p).clone()
            start += p.numel()
        opt.step()


def _heads_by_inputs(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        parts = [[p for n, p in net.named_parameters() if ("head" in n) is head] for head in (True, False)]
        CE(out, y).backward(inputs=parts[0], retain_graph=True)
        out.square().mean().backward(inputs=parts[1])
        opt.step()


def _interleaved(net: Any, opt: Any, batches: Any) -> None:
    for x, y, weak, strong in batches:
        rows = torch.stack([x, weak, strong], 1).flatten(0, 1)
        first, second, third = net(rows).unflatten(0, (-1, 3)).unbind(1)
        sure, label = (second.detach() / 0.7).softmax(-1).max(-1)
        loss = CE(first, y) + (F.cross_entropy(third, label, reduction="none") * sure.ge(0.4)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


def _averaged_by_name(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    seen = []
    for x, y in batches:
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        value = loss.detach().clone()
        if is_initialized():
            all_reduce(value)
            value /= get_world_size()
            for p in net.parameters():
                all_reduce(p.grad)
                p.grad /= get_world_size()
        opt.step()
        seen.append(value)
    return {"seen": torch.stack(seen)}


add("conflicting gradients projected (PCGrad), one vector", _projected)
add("two losses, each by backward(inputs=)", _heads_by_inputs, lambda: classified(Named))
add(
    "three views interleaved in a call (FixMatch)", _interleaved,
    lambda: made(small_net(), normal(21, 8), torch.randint(3, (21,)), normal(21, 8), normal(21, 8)),
)  # fmt: skip
add("all_reduce imported by name", _averaged_by_name, lambda: classified(count=24))


# --- optimizers


class ScheduleFree(torch.optim.Optimizer):
    """Weights between two sequences; ``train()`` and ``eval()`` move them (schedule-free SGD)."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    @torch.no_grad()
    def _moved(self, training: bool) -> None:
        for g in self.param_groups:
            weight = 1 - g["beta"] if training else 1 - 1 / g["beta"]
            for p in g["params"] if g["training"] is not training else ():
                if "z" in self.state[p]:
                    p.lerp_(end=self.state[p]["z"], weight=weight)
            g["training"] = training

    def train(self) -> None:
        self._moved(True)

    def eval(self) -> None:
        self._moved(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for g in self.param_groups:
            c = 1 / (g["k"] + 1)
            for p in g["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(end=z, weight=c)
                p.add_(p.grad, alpha=g["lr"] * (g["beta"] * (1 - c) - 1))
                z.sub_(p.grad, alpha=g["lr"])
            g["k"] += 1


def _schedule_free(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    printed = []
    for _ in range(2):
        opt.train()
        for x, y in batches:
            one_step(net, opt, x, y)
        opt.eval()
        with torch.no_grad():
            printed.append(net(HELD).sum())
    return {"printed": torch.stack(printed)}


class Curved(torch.optim.Optimizer):
    """Divides by a curvature that a method takes from gradients of another loss (Sophia)."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    def _of(self, p: Tensor) -> dict[str, Tensor]:
        if not self.state[p]:
            self.state[p] = {"mean": torch.zeros_like(p), "curvature": torch.zeros_like(p)}
        return self.state[p]  # type: ignore[no-any-return]

    @torch.no_grad()
    def update_curvature(self) -> None:
        for p in self.param_groups[0]["params"]:
            self._of(p)["curvature"].mul_(0.95).addcmul_(p.grad, p.grad, value=0.05)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            mean, curvature = self._of(p).values()
            mean.mul_(0.9).add_(p.grad, alpha=0.1)
            ratio = (mean.abs() / (0.24 * curvature + 1e-15)).clamp(max=1)
            p.addcmul_(mean.sign(), ratio, value=-self.param_groups[0]["lr"])


def _curved(net: Any, opt: Any, batches: Any) -> None:
    for i, (x, y) in enumerate(batches):
        one_step(net, opt, x, y)
        if i % 2:
            opt.zero_grad()
            out = net(x)
            CE(out, out.detach().argmax(1)).backward()
            opt.update_curvature()


class Ahead(nn.Module):
    """Answers for some steps more."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(1, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor, future: int = 0) -> Tensor:
        state, answers = (x.new_zeros(len(x), 6), x.new_zeros(len(x), 6)), []
        for step in x.split(1, dim=1):
            state = self.cell(step, state)
            answers.append(self.head(state[0]))
        for _ in range(future):
            state = self.cell(answers[-1], state)
            answers.append(self.head(state[0]))
        return torch.cat(answers, 1)


def _ahead() -> Made:
    net = Ahead().double()
    opt = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
    return net, opt, loader(normal(8, 7), normal(8, 7), batch=8)


def _in_closures(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    answers = []
    for _ in range(2):
        for x, y in batches:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                opt.zero_grad()
                loss = MSE(net(x), y)
                loss.backward()
                return loss

            opt.step(closure)
        with torch.no_grad():
            answers.append(net(HELD[:, :7], future=3).sum())
    return {"answers": torch.stack(answers)}


def _reset(net: Any, opt: Any, batches: Any) -> None:
    for epoch in range(3):
        for x, y in batches:
            one_step(net, opt, x, y)
        torch.manual_seed(epoch)
        net.head.reset_parameters()
        for p in net.head.parameters():
            opt.state.pop(p, None)
        for state in opt.state.values():
            state["exp_avg"].zero_()


def _adam() -> Made:
    net, _, batches = classified(Named)
    return net, torch.optim.Adam(net.parameters(), 0.01), batches


add("train() and eval() of the optimizer (schedule-free)", _schedule_free, _by(ScheduleFree))
add("a second backward for a method of the optimizer (Sophia)", _curved, _by(Curved))
add("L-BFGS, answers for steps ahead by a keyword", _in_closures, _ahead, within=1e-6)
add("a head and its state reset by epoch", _reset, _adam)


# --- statistics and copies


class Normed(nn.Module):
    """With a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


def _norms_again(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    averaged, schedule = AveragedModel(net), SWALR(opt, swa_lr=0.01, anneal_epochs=2)
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
        averaged.update_parameters(net)
        schedule.step()
    update_bn(batches, averaged)
    return {f"averaged {n}": t for n, t in averaged.state_dict().items() if t.is_floating_point()}


def _centred(net: Any, opt: Any, batches: Any) -> None:
    total = sum(x.sum(0) for x, _ in batches)
    count = sum(len(x) for x, _ in batches)
    mean = asa.reduce(total, "sum") / asa.reduce(count, "sum")
    for x, y in batches:
        one_step(net, opt, x - mean, y)


def _moved_to(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        fast = copy.deepcopy(net)
        inner = torch.optim.SGD(fast.parameters(), 0.05)
        for _ in range(2):
            one_step(fast, inner, asa.gather(x), asa.gather(y))
        opt.zero_grad()
        for p, q in zip(net.parameters(), fast.parameters(), strict=True):
            p.grad = p.data - q.data
        opt.step()


add("norms gone over again by update_bn, norms exact", _norms_again, lambda: classified(Normed), batch_norm="exact")
add("inputs less their mean over a first pass", _centred)
add("moved to what some steps on a copy give (Reptile)", _moved_to)


# --- names and batches


class Worded(nn.Module):
    """Layers whose names are keywords of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"in": nn.Linear(8, 16), "lambda": nn.Linear(16, 16), "class": nn.Linear(16, 3)})

    def forward(self, x: Tensor) -> Tensor:
        for name in ("in", "lambda"):
            x = F.relu(self.layers[name](x))
        return self.layers["class"](x)  # type: ignore[no-any-return]


def _records(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for batch in batches:
            one_step(net, opt, batch.x, batch.y)


def _in_records() -> Made:
    net = small_net().double()
    return net, sgd(net), [
        types.SimpleNamespace(x=normal(6, 8), y=torch.randint(3, (6,)), batch_size=6) for _ in range(3)
    ]  # fmt: skip


class Words(nn.Module):
    """A recurrent net over words, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells, self.head = nn.Embedding(11, 8), nn.LSTM(8, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.words(x))[0]).flatten(0, 1)  # type: ignore[no-any-return]


def _text() -> Made:
    net, text = Words().double(), torch.randint(11, (26, 4))
    return net, sgd(net), [(text[i : i + 5], text[i + 1 : i + 6].flatten()) for i in range(0, 25, 5)]


add("layers named by keywords", _usual, lambda: classified(Worded), job_loss=CE)
add("records in a list of batches", _records, _in_records)
add("text in columns, labels in one row", _usual, _text)


# --- generators, hooks and powers


class DropsByItself(nn.Module):
    """Drops with a generator that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.draw: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        self.draw = torch.Generator().manual_seed(5) if self.draw is None else self.draw
        if self.training:
            h = h * (torch.rand(h.shape, generator=self.draw, dtype=h.dtype) > 0.3) / 0.7
        return self.head(h)  # type: ignore[no-any-return]


class Growing(nn.Module):
    """Layers in a list that the trace goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.stages, self.head = nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = F.relu(stage(x))
        return self.head(x)  # type: ignore[no-any-return]


def _grown(net: Any, opt: Any, batches: Any) -> None:
    layer = nn.Linear(8, 8).double()
    net.stages.append(layer)
    opt.add_param_group({"params": layer.parameters()})
    _usual(net, opt, batches)


def _kept_by_hooks(net: Any, opt: Any, batches: Any) -> None:
    kept: dict[str, Tensor] = {}
    net.second.register_forward_hook(lambda _module, _inputs, output: kept.update(second=output))
    halved = net.first.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 0.5,))
    for epoch in range(2):
        for x, y in batches:
            opt.zero_grad()
            (CE(net(x), y) + 0.1 * kept["second"].square().mean()).backward()
            opt.step()
        if epoch == 0:
            halved.remove()


def _powers(net: Any, opt: Any, batches: Any) -> None:
    """With shares of two and three samples."""
    for _ in range(2):
        for x, y in batches:
            out = net(x)
            opt.zero_grad()
            (CE(out, y) + (out.pow(2).sum() + out.abs().pow(3).sum() + out.norm(2).pow(2)) / len(x)).backward()
            opt.step()


def _not_finite(net: Any, opt: Any, batches: Any) -> None:
    for i, (x, y) in enumerate(batches):
        opt.zero_grad()
        (CE(net(x), y) * (float("nan") if i == 1 else 1.0)).backward()
        try:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
            opt.step()
        except RuntimeError as error:
            if "non-finite" not in str(error):
                raise


add("dropout by a generator that the model keeps", _usual, lambda: classified(DropsByItself))
add("a layer added to a list behind the call", _grown, lambda: classified(Growing))
add("a loss of what a hook keeps, a hook that changes inputs", _kept_by_hooks, lambda: classified(Named))
add("squares and cubes divided by samples", _powers, lambda: classified(count=10, batch=4))
add("steps left out by error_if_nonfinite", _not_finite)
