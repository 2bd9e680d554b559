"""Programs that go by numbers of a rank's own, or look at other samples where nobody would look for it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.program_table import Loss, Made, epochs, loader, made, normal, pairs, program

CE = F.cross_entropy


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))


def _classes(net: Any = _net, count: int = 20, batch: int = 6) -> Made:
    return made(net(), normal(count, 8), torch.randint(3, (count,)), batch=batch)


class ByNorm(torch.autograd.Function):
    """As it is; its gradient is divided by its norm."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / gradient.norm()


class Between(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.between, self.a, self.b = between, nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.a(x))
        return self.b(self.between(self, h))


class Balanced(nn.Module):
    """Top-1 experts that leave what their balance costs in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        weight, chosen = p.max(-1)
        out = torch.zeros(len(x), 3, dtype=x.dtype)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        self.cost = (F.one_hot(chosen, 3).to(x.dtype).mean(0) * p.mean(0)).sum()
        return out


class Carried(nn.Module):
    """Keeps its hidden state from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head, self.state = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3), None

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.rnn(x, self.state)
        self.state = tuple(t.detach() for t in state)
        return self.head(out[:, -1])


class Curriculum(Dataset[Any]):
    """Samples grow with every one that is read."""

    def __init__(self) -> None:
        self.x, self.y, self.read = normal(20, 8), torch.randint(3, (20,)), 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        return self.x[i] * (1 + 0.01 * self.read), self.y[i]


def _hooked() -> nn.Module:
    net = _net()
    net[2].register_full_backward_hook(lambda _m, gs, _o: tuple(None if g is None else g / g.norm() for g in gs))
    return net


def _trimmed(out: Tensor, y: Tensor) -> Tensor:
    each = CE(out, y, reduction="none")
    return (each * (each <= each.detach().quantile(0.8))).mean()


LOSSES: dict[str, Any] = {
    "trimmed by a quantile": _trimmed,
    "divided by how many numbers there are": lambda o, y: (o - F.one_hot(y, 3)).square().sum() / o.numel(),
    "indexed by place": lambda o, y: -o.log_softmax(1)[torch.arange(len(y)), y].mean(),
    "weighed by place": lambda o, y: (CE(o, y, reduction="none") * torch.arange(1.0, 1 + len(y)).to(o)).mean(),
    "sample by sample": lambda o, y: torch.stack([CE(o[i : i + 1], y[i : i + 1]) for i in range(len(y))]).mean(),
    "by its own running mean, a tensor": lambda o, y: CE(o, y) / (0.5 + 0.5 * CE(o, y).detach()),
}  # fmt: skip
MODELS: dict[str, Any] = {
    "less the mean of its batch": lambda: Between(lambda _, h: h - h.mean(0)),
    "less the mean of its batch, in training": lambda: Between(lambda m, h: h - h.mean(0) if m.training else h),
    "attention over the batch": lambda: Between(lambda _, h: (h @ h.T).softmax(-1) @ h),
    "batch_norm without statistics": lambda: Between(lambda _, h: F.batch_norm(h, None, None, training=True)),
    "gradients normalised inside": lambda: Between(lambda _, h: ByNorm.apply(h)),
    "gradients normalised by a hook": _hooked,
}  # fmt: skip


def _attacked(net: Any, x: Tensor, y: Tensor, *, backward: bool) -> Tensor:
    x = x.clone().requires_grad_()
    loss = CE(net(x), y)
    if backward:
        loss.backward()
        net.zero_grad()
        return (x + 0.5 * x.grad).detach()  # type: ignore[operator]
    return (x + 0.5 * torch.autograd.grad(loss, x)[0]).detach()


def _late(from_step: int, every: int) -> Loss:
    done = 0

    def loss(net: Any, batch: Any) -> Tensor:
        nonlocal done
        out = net(batch[0])
        other = done >= from_step and done % every == 0
        done += 1
        return CE(out, batch[1]) + (out.std(0).sum() if other else 0)

    return loss


def stopping(net: Any, opt: Any, batches: Any) -> None:
    """Stops early by the losses of a rank."""
    best = 1e9
    for _ in range(6):
        total = 0.0
        for x, y in batches:
            opt.zero_grad()
            loss = CE(net(x), y)
            loss.backward()
            opt.step()
            total += loss.item()
        if total > best - 0.05:
            break
        best = total


def by_loss(net: Any, opt: Any, batches: Any) -> None:
    """A learning rate by a rank's loss."""
    for x, y in batches:
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        opt.param_groups[0]["lr"] = 0.05 * loss.item()
        opt.step()


def evaluating(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Evaluates on the loader that was handed in."""
    epochs(pairs(CE), 1)(net, opt, batches)
    net.eval()
    with torch.no_grad():
        return {"held out": torch.tensor(sum(float(CE(net(x), y, reduction="sum")) for x, y in batches))}


def drawing(net: Any, opt: Any, batches: Any) -> None:
    """Draws the last layer anew behind an epoch."""
    for _ in range(2):
        epochs(pairs(CE), 1)(net, opt, batches)
        with torch.no_grad():
            for p in list(net.parameters())[-2:]:
                p.normal_(0, 0.1)


def freezing(net: Any, opt: Any, batches: Any) -> None:
    """Freezes BatchNorm from the second epoch on, as fine-tuning does."""
    for epoch in range(2):
        net.train()
        for m in net.modules():
            if isinstance(m, nn.BatchNorm1d) and epoch:
                m.eval()
        epochs(pairs(CE), 1)(net, opt, batches)


def vector(net: Any, opt: Any, batches: Any) -> None:
    """Differentiates a loss of each sample with weights of its own."""
    for x, y in batches:
        opt.zero_grad()
        loss = CE(net(x), y, reduction="none")
        loss.backward(torch.full_like(loss, 1 / len(loss)))
        opt.step()


for _name, _loss in LOSSES.items():
    program("strange", f"loss {_name}", _classes, epochs(pairs(_loss)), _loss)
for _name, _model in MODELS.items():
    program("strange", f"model {_name}", lambda model=_model: _classes(model), epochs(pairs(CE)), CE)  # type: ignore[misc]
for _loop in (stopping, by_loss, evaluating, drawing, vector):
    program("strange", f"loop {_loop.__name__}", _classes, _loop)
program("strange", "loop freezing norms", lambda: _classes(_normed), freezing, batch_norm="exact")
program(
    "strange", "norms of uneven shares", lambda: _classes(_normed, 15, 5), epochs(pairs(CE)), CE, batch_norm="exact"
)
program("strange", "experts, balance in an attribute", lambda: _classes(Balanced),
        epochs(lambda net, b: CE(net(b[0]), b[1]) + 0.1 * net.cost))  # fmt: skip
program("strange", "state kept in the module", lambda: made(Carried(), normal(18, 5, 4), torch.randint(3, (18,))),
        epochs(pairs(CE)), CE)  # fmt: skip
program("strange", "a layer by its number", _classes,
        epochs(lambda net, b: CE(net(b[0]), b[1]) + 0.01 * net[0].weight.abs().sum()))  # fmt: skip
program("strange", "attacked by a gradient", _classes,
        epochs(lambda net, b: CE(net(_attacked(net, *b, backward=False)), b[1])))  # fmt: skip
program("strange", "attacked behind backward", _classes,
        epochs(lambda net, b: CE(net(_attacked(net, *b, backward=True)), b[1])))  # fmt: skip
program("strange", "another loss from step 15 on", _classes, lambda *a: epochs(_late(15, 1), 6)(*a))
program("strange", "another loss now and then", _classes, lambda *a: epochs(_late(3, 7), 8)(*a))
program("strange", "data set that counts", lambda: (*_classes()[:2], DataLoader(Curriculum(), 6)), epochs(pairs(CE)))
program("strange", "scaled by Python's coin", _classes,
        epochs(lambda net, b: CE(net(b[0] * random.choice([0.5, 2.0])), b[1])))  # fmt: skip
program("strange", "uneven sevens", lambda: (*_classes()[:2], loader(normal(24, 8), torch.randint(3, (24,)), batch=7)),
        epochs(pairs(CE)), CE)  # fmt: skip
