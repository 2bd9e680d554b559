"""Programs of public repositories: penalties on weights, layers that draw, gradients of inputs, calls by weights."""

from __future__ import annotations

import copy
import io
import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks.program_table import made, normal
from benchmarks.program_table.common import (
    CE,
    MSE,
    Named,
    add_program,
    by_loss,
    by_outputs,
    classified,
    one_step,
    small_net,
)
from benchmarks.program_table.scripts import numbers

# ---- penalties on weights that are reached through layers

by_loss(
    "decay of a layer by its name",
    lambda n, b: CE(n(b[0]), b[1]) + 0.05 * n.first.weight.pow(2).sum(),
    lambda: classified(Named),
)
by_loss(
    "group lasso of the first layer",
    lambda n, b: CE(n(b[0]), b[1]) + 0.05 * n.first.weight.norm(dim=0).sum(),
    lambda: classified(Named),
)
by_loss(
    "orthogonal layers",
    lambda n, b: (
        CE(n(b[0]), b[1])
        + 0.01
        * sum((p @ p.T - torch.eye(len(p), dtype=p.dtype)).square().sum() for p in n.parameters() if p.dim() == 2)
    ),
)
by_loss(
    "decay of weights by their names",
    lambda n, b: (
        CE(n(b[0]), b[1]) + 0.01 * sum(p.square().sum() for k, p in n.named_parameters() if k.endswith("weight"))
    ),
)
by_loss(
    "decay over modules",
    lambda n, b: (
        CE(n(b[0]), b[1]) + 0.01 * sum(m.weight.square().sum() for m in n.modules() if isinstance(m, nn.Linear))
    ),
)
by_loss(
    "distance from the first weights",
    lambda n, b: CE(n(b[0]), b[1]) + 0.1 * sum((p - 0.01).square().sum() for p in n.parameters()),
)
by_loss(
    "decay of one row",
    lambda n, b: CE(n(b[0]), b[1]) + 0.1 * n.first.weight[0].square().sum(),
    lambda: classified(Named),
)


def _path_norm(net: Any, opt: Any, batches: Any) -> None:
    """The weights' absolute values are propagated by hand."""
    for x, y in batches:
        opt.zero_grad()
        h = torch.ones(8, dtype=x.dtype)
        for m in (net.first, net.second, net.head):
            h = m.weight.abs() @ h
        (CE(net(x), y) + 1e-3 * h.sum()).backward()
        opt.step()


add_program("path norm", _path_norm, lambda: classified(Named))


def _starting_point(net: Any, opt: Any, batches: Any) -> None:
    """L2-SP: weights are held at where they began."""
    first = {k: p.detach().clone() for k, p in net.named_parameters()}
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        (CE(net(x), y) + 0.1 * sum((p - first[k]).pow(2).sum() for k, p in net.named_parameters())).backward()
        opt.step()


add_program("held at the first weights", _starting_point)


def _intelligence(net: Any, opt: Any, batches: Any) -> None:
    """Synaptic intelligence: paths of the weights are added up, and hold them in the second phase."""
    w = {k: torch.zeros_like(p) for k, p in net.named_parameters()}
    old = {k: p.detach().clone() for k, p in net.named_parameters()}
    begin = {k: p.detach().clone() for k, p in net.named_parameters()}
    for x, y in batches:
        one_step(net, opt, x, y)
        for k, p in net.named_parameters():
            w[k].add_(-p.grad.detach() * (p.detach() - old[k]))
            old[k] = p.detach().clone()
    omega = {k: w[k] / ((old[k] - begin[k]) ** 2 + 0.1) for k in w}
    for x, y in batches:
        opt.zero_grad()
        (CE(net(x), y) + sum((omega[k] * (p - old[k]) ** 2).sum() for k, p in net.named_parameters())).backward()
        opt.step()


add_program("synaptic intelligence", _intelligence)


def _projected(net: Any, opt: Any, batches: Any) -> None:
    """A-GEM: the gradient is projected so that the loss of remembered samples does not rise."""
    x0, y0 = normal(6, 8), torch.randint(3, (6,))
    for x, y in batches:
        opt.zero_grad()
        CE(net(x0), y0).backward()
        ref = [p.grad.clone() for p in net.parameters()]
        opt.zero_grad()
        CE(net(x), y).backward()
        dot = sum((p.grad * r).sum() for p, r in zip(net.parameters(), ref, strict=True))
        if dot < 0:
            size = sum((r * r).sum() for r in ref)
            for p, r in zip(net.parameters(), ref, strict=True):
                p.grad -= dot / size * r
        opt.step()


add_program("gradients projected by a memory", _projected)

# ---- layers that draw or begin by data


class ActNorm(nn.Module):
    """Begins so that the first batch is normalised."""

    begun: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.shift, self.scale = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.ones(16))
        self.register_buffer("begun", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training and self.begun.item() == 0:
            with torch.no_grad():
                self.shift.data.copy_(-h.mean(0))
                self.scale.data.copy_(1 / (h.std(0) + 1e-6))
                self.begun.fill_(1)
        return self.head(F.gelu(self.b((h + self.shift) * self.scale)))  # type: ignore[no-any-return]


by_outputs("ActNorm, begun by the first batch", CE, lambda: classified(ActNorm))


class ActNormFlag(ActNorm):
    """The same with a Python attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if not self.ready:
            self.shift.data = -h.mean(0).detach()
            self.scale.data = 1 / (h.std(0).detach() + 1e-6)
            self.ready = True
        return self.head(F.gelu(self.b((h + self.shift) * self.scale)))  # type: ignore[no-any-return]


by_outputs("ActNorm, a flag", CE, lambda: classified(ActNormFlag))


class Counted(nn.Module):
    """Warms up by a Python number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = small_net(), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.net(x) * min(1.0, self.calls / 6)  # type: ignore[no-any-return]


by_outputs("warmed up by a number of calls", CE, lambda: classified(Counted))


class Drawn(nn.Module):
    """A middle layer whose weight is drawn in every call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.head, self.how = nn.Linear(8, 16), nn.Linear(16, 3), how
        self.mu = nn.Parameter(torch.randn(16, 16) * 0.2)
        self.rho = nn.Parameter(torch.full((16, 16), -2.0))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.a(x))
        if not self.training:
            w = self.mu
        elif self.how == "variational":
            w = self.mu + F.softplus(self.rho) * torch.randn_like(self.mu)
        elif self.how == "drop connect":
            w = F.dropout(self.mu, 0.3)
        else:
            f = torch.randn(16, dtype=x.dtype)
            w = self.mu + self.rho * 0.1 * torch.outer(f, f)
        return self.head(F.linear(h, w))  # type: ignore[no-any-return]


for how in ("variational", "drop connect", "factorised noise"):
    by_outputs(f"weights drawn in forward: {how}", CE, lambda how=how: classified(lambda: Drawn(how)))
by_loss(
    "weights drawn in forward, with their divergence",
    lambda n, b: (
        CE(n(b[0]), b[1]) + 1e-3 * (n.mu.square() + F.softplus(n.rho).square() - 2 * F.softplus(n.rho).log()).sum()
    ),
    lambda: classified(lambda: Drawn("variational")),
)


class Noisy(nn.Module):
    """Noise of weights is kept in a buffer that a method draws anew."""

    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
        self.sigma = nn.Parameter(torch.full((3, 16), 0.3))
        self.register_buffer("noise", torch.zeros(3, 16))

    def reset_noise(self) -> None:
        self.noise.copy_(torch.randn(3, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.b(h) + F.linear(h, self.sigma * self.noise)  # type: ignore[no-any-return]


def _noisy(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        net.reset_noise()
        one_step(net, opt, x, y)


add_program("a noisy net", _noisy, lambda: classified(Noisy))


class Locked(nn.Module):
    """A mask per sample for all times."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * x.new_empty(x.size(0), 1, x.size(2)).bernoulli_(0.7) / 0.7
        return self.head(self.rnn(x)[0].mean(1))  # type: ignore[no-any-return]


by_outputs("locked dropout", CE, lambda: made(Locked(), normal(21, 5, 8), torch.randint(3, (21,))))


class Mixed(nn.Module):
    """Manifold mixup inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        h = F.gelu(self.a(x))
        if y is None:
            return self.b(h)
        lam = np.random.beta(1.0, 1.0)
        order = torch.randperm(x.size(0))
        return self.b(lam * h + (1 - lam) * h[order]), y, y[order], lam


def _manifold(net: Any, batch: Any) -> Tensor:
    out, a, b, lam = net(*batch)
    return lam * CE(out, a) + (1 - lam) * CE(out, b)


by_loss("manifold mixup", _manifold, lambda: classified(Mixed))


class Ghost(nn.Module):
    """Normalises over parts of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.bn(c) for c in self.a(x).chunk(math.ceil(len(x) / 3))])
        return self.b(F.relu(h))  # type: ignore[no-any-return]


by_outputs("ghost norm", CE, lambda: classified(Ghost, 24))


class Groups(nn.Module):
    """A deviation over groups of four samples is a feature (StyleGAN)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(17, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.a(x))
        g = min(4, len(h)) if len(h) % 4 == 0 else len(h)
        s = h.view(g, -1, 16).var(0, unbiased=False).add(1e-8).sqrt().mean(1, keepdim=True).repeat(g, 1)
        return self.b(torch.cat([h, s], 1))  # type: ignore[no-any-return]


by_outputs("deviation of groups", CE, lambda: classified(Groups, 32, 8))


class Whitened(nn.Module):
    """Whitens the features of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h - h.mean(0)
        cov = h.T @ h / len(h) + 0.1 * torch.eye(4, dtype=h.dtype)
        return self.b(torch.linalg.solve_triangular(torch.linalg.cholesky(cov), h.T, upper=False).T)  # type: ignore[no-any-return]


by_outputs("whitened", CE, lambda: classified(Whitened, 24))


class Memory(nn.Module):
    """A memory that every batch writes into, by attention."""

    slots: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
        self.register_buffer("slots", torch.randn(5, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.a(x))
        slots = self.slots.clone()
        at = (h @ slots.T).softmax(1)
        out = self.b(h + at @ slots)
        if self.training:
            with torch.no_grad():
                self.slots.mul_(0.9).add_(at.T @ h, alpha=0.1 / len(x))
        return out  # type: ignore[no-any-return]


by_outputs("a memory that batches write", CE, lambda: classified(Memory))


class Books(nn.Module):
    """Quantised by the nearest code; codes that are not used are replaced by samples of the batch."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(4, 3)
        self.register_buffer("codes", torch.randn(6, 4) * 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        near = torch.cdist(h, self.codes).argmin(1)
        if self.training:
            unused = (torch.bincount(near, minlength=6) == 0).nonzero()[:, 0]
            with torch.no_grad():
                self.codes[unused] = h[torch.arange(len(unused)) % len(h)]
        q = self.codes[near]
        return self.b(h + (q - h).detach()), MSE(h, q.detach())


by_loss("dead codes replaced", lambda n, b: (lambda o: CE(o[0], b[1]) + o[1])(n(b[0])), lambda: classified(Books))

# ---- gradients of inputs


def _physics(net: Any, opt: Any, batches: Any) -> None:
    """u'' = -u on collocation points, with the values at the ends (PINN)."""
    ends, wanted = torch.tensor([[0.0], [1.0]]).double(), torch.tensor([[0.0], [0.84]]).double()
    for (t,) in itertools.chain(batches, batches):
        opt.zero_grad()
        t = t.clone().requires_grad_(True)
        u = net(t)
        (du,) = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)
        (ddu,) = torch.autograd.grad(du, t, torch.ones_like(du), create_graph=True)
        ((ddu + u).square().mean() + MSE(net(ends), wanted)).backward()
        opt.step()


def _tanh(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Linear(i, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, o))


add_program("physics informed", _physics, lambda: made(_tanh(1, 1), torch.rand(21, 1).double()))


def _forces(net: Any, batch: Any) -> Tensor:
    """Energies and forces: the loss has the gradient of the energy by the positions."""
    x, f = batch
    x = x.clone().requires_grad_(True)
    e = net(x)
    (g,) = torch.autograd.grad(e.sum(), x, create_graph=True)
    return MSE(e[:, 0], f.sum(1)) + MSE(-g, f)


by_loss("energies and forces", _forces, lambda: made(_tanh(8, 1), normal(21, 8), normal(21, 8)))


def _lazy_penalty(net: Any, opt: Any, batches: Any) -> None:
    """R1: a penalty on the critic's slopes at real samples, every second step."""
    for i, (x, z) in enumerate(itertools.chain(batches, batches)):
        opt.zero_grad()
        (F.softplus(-net(x)).mean() + F.softplus(net(z)).mean()).backward()
        opt.step()
        if i % 2 == 0:
            x = x.detach().requires_grad_(True)
            opt.zero_grad()
            (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            (5 * g.square().sum(1).mean()).backward()
            opt.step()


add_program("lazy penalty on slopes", _lazy_penalty, lambda: made(_tanh(8, 1), normal(21, 8), normal(21, 8)))


def _path_length(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """The length of slopes is held at its running mean."""
    mean = torch.zeros((), dtype=torch.float64)
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        x = x.clone().requires_grad_(True)
        out = net(x)
        (g,) = torch.autograd.grad((out * 0.5).sum(), x, create_graph=True)
        length = g.square().sum(1).sqrt()
        mean = mean + 0.1 * (length.mean().detach() - mean)
        (CE(out, y) + (length - mean).square().mean()).backward()
        opt.step()
    return numbers(mean=mean)


add_program("path length", _path_length, lambda: classified(lambda: _tanh(8, 3)))


def _energy(net: Any, opt: Any, batches: Any) -> None:
    """An energy model: negatives by steps down its slope, begun at kept ones."""
    kept = normal(6, 8)
    for (x,) in batches:
        neg = kept[: len(x)].clone().requires_grad_(True)
        for p in net.parameters():
            p.requires_grad_(False)
        for _ in range(3):
            (g,) = torch.autograd.grad(net(neg).sum(), neg)
            neg = (neg - 0.1 * g).detach().requires_grad_(True)
        for p in net.parameters():
            p.requires_grad_(True)
        kept[: len(x)] = neg.detach()
        opt.zero_grad()
        a, b = net(x), net(neg.detach())
        (a.mean() - b.mean() + 0.1 * (a.square() + b.square()).mean()).backward()
        opt.step()


add_program("energy model with kept negatives", _energy, lambda: made(_tanh(8, 1), normal(21, 8)))


def _score(net: Any, batch: Any) -> Tensor:
    """Sliced score matching, along a fixed direction."""
    x = batch[0].clone().requires_grad_(True)
    v = torch.linspace(-1, 1, 8, dtype=x.dtype).expand_as(x)
    s = net(x)
    (g,) = torch.autograd.grad((s * v).sum(), x, create_graph=True)
    return ((g * v).sum(1) + 0.5 * (s * v).sum(1).square()).mean()


by_loss("sliced score matching", _score, lambda: made(_tanh(8, 8), normal(21, 8)))


def _contracted(net: Any, batch: Any) -> Tensor:
    """The Jacobian's norm, output by output."""
    x = batch[0].clone().requires_grad_(True)
    out = net(x)
    total = x.new_zeros(())
    for j in range(3):
        (g,) = torch.autograd.grad(out[:, j].sum(), x, create_graph=True)
        total = total + g.square().sum(1).mean()
    return CE(out, batch[1]) + 0.1 * total


by_loss("contractive", _contracted, lambda: classified(lambda: _tanh(8, 3)))
by_loss(
    "jvp in the loss",
    lambda n, b: CE(n(b[0]), b[1]) + 0.1 * torch.func.jvp(n, (b[0],), (torch.ones_like(b[0]),))[1].square().mean(),
    lambda: classified(lambda: _tanh(8, 3)),
)
by_loss(
    "jacobian by vmap",
    lambda n, b: CE(n(b[0]), b[1]) + 0.1 * torch.func.vmap(torch.func.jacrev(n))(b[0]).square().sum((1, 2)).mean(),
    lambda: classified(lambda: _tanh(8, 3)),
)

# ---- functions of parameters


def _maml(net: Any, opt: Any, batches: Any) -> None:
    """An inner step by functional calls, differentiated through."""
    for x, y in batches:
        opt.zero_grad()
        p = dict(net.named_parameters())
        g = torch.autograd.grad(CE(functional_call(net, p, (x[::2],)), y[::2]), list(p.values()), create_graph=True)
        fast = {k: v - 0.1 * d for (k, v), d in zip(p.items(), g, strict=True)}
        CE(functional_call(net, fast, (x[1::2],)), y[1::2]).backward() if len(x) > 1 else None
        opt.step()


add_program("an inner step differentiated", _maml)


def _grad_and_value(net: Any, _opt: Any, batches: Any) -> None:
    """``torch.func.grad_and_value`` and an update by hand."""
    for x, y in batches:
        p = {k: v.detach() for k, v in net.named_parameters()}
        g, _ = torch.func.grad_and_value(lambda q: CE(functional_call(net, q, (x,)), y))(p)  # noqa: B023
        with torch.no_grad():
            for k, v in net.named_parameters():
                v.sub_(0.05 * g[k])


add_program("gradients by torch.func", _grad_and_value)


def _zeroth(net: Any, _opt: Any, batches: Any) -> None:
    """SPSA: losses at weights moved to both sides along signs."""
    for i, (x, y) in enumerate(batches):
        with torch.no_grad():
            torch.manual_seed(i)
            z = [torch.randint(0, 2, p.shape).to(p) * 2 - 1 for p in net.parameters()]
            values = []
            for s in (0.01, -0.02):
                for p, d in zip(net.parameters(), z, strict=True):
                    p.add_(s * d)
                values.append(CE(net(x), y).item())
            for p, d in zip(net.parameters(), z, strict=True):
                p.add_(0.01 * d - 0.01 * (values[0] - values[1]) / 0.02 * d)


add_program("gradients from two losses", _zeroth)


def _evolved(net: Any, _opt: Any, batches: Any) -> None:
    """A better one of two neighbours is kept, by the loss of a whole set."""
    x, y = batches.dataset.tensors
    for i in range(4):
        torch.manual_seed(i)
        before = copy.deepcopy(net.state_dict())
        with torch.no_grad():
            old = CE(net(x), y).item()
            for p in net.parameters():
                p.add_(0.1 * torch.randn_like(p))
            if CE(net(x), y).item() > old:
                net.load_state_dict(before)


add_program("kept if it is better", _evolved)


def _clients(net: Any, opt: Any, batches: Any) -> None:
    """Federated averaging, one client after another."""
    for _ in range(2):
        begin, ends = copy.deepcopy(net.state_dict()), []
        for client in range(2):
            net.load_state_dict(begin)
            for i, (x, y) in enumerate(batches):
                if i % 2 == client:
                    one_step(net, opt, x, y)
            ends.append(copy.deepcopy(net.state_dict()))
        net.load_state_dict({k: sum(e[k] for e in ends) / 2 for k in begin})


add_program("clients averaged", _clients)


def _snapshot(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Answers of several states are averaged."""
    kept = []
    for _ in range(3):
        for x, y in batches:
            one_step(net, opt, x, y)
        kept.append({k: v.clone() for k, v in net.state_dict().items()})
    x = batches.dataset.tensors[0]
    net.eval()
    answers = []
    with torch.inference_mode():
        for state in kept:
            net.load_state_dict(state)
            answers.append(net(x).softmax(1))
    net.train()
    return numbers(answers=torch.stack(answers).mean(0))


add_program("answers of several states", _snapshot)


def _pickled(net: Any, opt: Any, batches: Any) -> None:
    """States of model and optimizer through a buffer, with the generators'."""
    for epoch in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
        f = io.BytesIO()
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "rng": torch.get_rng_state(), "epoch": epoch}, f)
        f.seek(0)
        got = torch.load(f)
        net.load_state_dict(got["net"])
        opt.load_state_dict(got["opt"])
        torch.set_rng_state(got["rng"])


add_program("through a buffer with generators", _pickled, lambda: classified(shuffle=True))
