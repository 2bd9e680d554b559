"""Programs as public repositories have them: penalties by layer, inner loops, several optimizers, odd calls."""

from __future__ import annotations

import copy
import io
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, random_split

import asa
from benchmarks.program_table import Made, epochs, loader, made, normal, pairs, program, sgd
from benchmarks.program_table.scripts import numbers

CE, MSE, BCE = F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits
KIND = "repository"


def _net(out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, out))


class Named(nn.Module):
    """Layers with names."""

    def __init__(self, out: int = 3) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))))  # type: ignore[no-any-return]


def _classes(net: Any = _net, count: int = 21, batch: int = 6, **options: Any) -> Made:
    return made(net(), normal(count, 8), torch.randint(3, (count,)), batch=batch, **options)


def _add(name: str, loop: Any, make: Any = _classes, job_loss: Any = None, **options: Any) -> None:
    program(KIND, name, make, loop, job_loss, **options)


def _loss(name: str, loss: Any, make: Any = _classes, **options: Any) -> None:
    """A program of the usual loop, with ``loss(net, batch)``."""
    _add(name, epochs(loss), make, **options)


def _out(name: str, loss: Any, make: Any = _classes, **options: Any) -> None:
    """A program of the usual loop whose loss is one of outputs and labels; it can be a Job."""
    _add(name, epochs(pairs(loss)), make, loss, **options)


def _step(net: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    opt.zero_grad()
    loss = CE(net(x), y)
    loss.backward()
    opt.step()
    return loss


# ---- penalties on weights that are reached through layers

_loss(
    "decay of a layer by its name",
    lambda n, b: CE(n(b[0]), b[1]) + 0.05 * n.first.weight.pow(2).sum(),
    lambda: _classes(Named),
)
_loss(
    "group lasso of the first layer",
    lambda n, b: CE(n(b[0]), b[1]) + 0.05 * n.first.weight.norm(dim=0).sum(),
    lambda: _classes(Named),
)
_loss(
    "orthogonal layers",
    lambda n, b: (
        CE(n(b[0]), b[1])
        + 0.01
        * sum((p @ p.T - torch.eye(len(p), dtype=p.dtype)).square().sum() for p in n.parameters() if p.dim() == 2)
    ),
)
_loss(
    "decay of weights by their names",
    lambda n, b: (
        CE(n(b[0]), b[1]) + 0.01 * sum(p.square().sum() for k, p in n.named_parameters() if k.endswith("weight"))
    ),
)
_loss(
    "decay over modules",
    lambda n, b: (
        CE(n(b[0]), b[1]) + 0.01 * sum(m.weight.square().sum() for m in n.modules() if isinstance(m, nn.Linear))
    ),
)
_loss(
    "distance from the first weights",
    lambda n, b: CE(n(b[0]), b[1]) + 0.1 * sum((p - 0.01).square().sum() for p in n.parameters()),
)
_loss(
    "decay of one row", lambda n, b: CE(n(b[0]), b[1]) + 0.1 * n.first.weight[0].square().sum(), lambda: _classes(Named)
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


_add("path norm", _path_norm, lambda: _classes(Named))


def _starting_point(net: Any, opt: Any, batches: Any) -> None:
    """L2-SP: weights are held at where they began."""
    first = {k: p.detach().clone() for k, p in net.named_parameters()}
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        (CE(net(x), y) + 0.1 * sum((p - first[k]).pow(2).sum() for k, p in net.named_parameters())).backward()
        opt.step()


_add("held at the first weights", _starting_point)


def _intelligence(net: Any, opt: Any, batches: Any) -> None:
    """Synaptic intelligence: paths of the weights are added up, and hold them in the second phase."""
    w = {k: torch.zeros_like(p) for k, p in net.named_parameters()}
    old = {k: p.detach().clone() for k, p in net.named_parameters()}
    begin = {k: p.detach().clone() for k, p in net.named_parameters()}
    for x, y in batches:
        _step(net, opt, x, y)
        for k, p in net.named_parameters():
            w[k].add_(-p.grad.detach() * (p.detach() - old[k]))
            old[k] = p.detach().clone()
    omega = {k: w[k] / ((old[k] - begin[k]) ** 2 + 0.1) for k in w}
    for x, y in batches:
        opt.zero_grad()
        (CE(net(x), y) + sum((omega[k] * (p - old[k]) ** 2).sum() for k, p in net.named_parameters())).backward()
        opt.step()


_add("synaptic intelligence", _intelligence)


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


_add("gradients projected by a memory", _projected)

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


_out("ActNorm, begun by the first batch", CE, lambda: _classes(ActNorm))


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


_out("ActNorm, a flag", CE, lambda: _classes(ActNormFlag))


class Counted(nn.Module):
    """Warms up by a Python number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = _net(), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.net(x) * min(1.0, self.calls / 6)  # type: ignore[no-any-return]


_out("warmed up by a number of calls", CE, lambda: _classes(Counted))


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
    _out(f"weights drawn in forward: {how}", CE, lambda how=how: _classes(lambda: Drawn(how)))
_loss(
    "weights drawn in forward, with their divergence",
    lambda n, b: (
        CE(n(b[0]), b[1]) + 1e-3 * (n.mu.square() + F.softplus(n.rho).square() - 2 * F.softplus(n.rho).log()).sum()
    ),
    lambda: _classes(lambda: Drawn("variational")),
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
        _step(net, opt, x, y)


_add("a noisy net", _noisy, lambda: _classes(Noisy))


class Locked(nn.Module):
    """A mask per sample for all times."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * x.new_empty(x.size(0), 1, x.size(2)).bernoulli_(0.7) / 0.7
        return self.head(self.rnn(x)[0].mean(1))  # type: ignore[no-any-return]


_out("locked dropout", CE, lambda: made(Locked(), normal(21, 5, 8), torch.randint(3, (21,))))


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


_loss("manifold mixup", _manifold, lambda: _classes(Mixed))


class Ghost(nn.Module):
    """Normalises over parts of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.bn(c) for c in self.a(x).chunk(math.ceil(len(x) / 3))])
        return self.b(F.relu(h))  # type: ignore[no-any-return]


_out("ghost norm", CE, lambda: _classes(Ghost, 24))


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


_out("deviation of groups", CE, lambda: _classes(Groups, 32, 8))


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


_out("whitened", CE, lambda: _classes(Whitened, 24))


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


_out("a memory that batches write", CE, lambda: _classes(Memory))


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


_loss("dead codes replaced", lambda n, b: (lambda o: CE(o[0], b[1]) + o[1])(n(b[0])), lambda: _classes(Books))

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


_add("physics informed", _physics, lambda: made(_tanh(1, 1), torch.rand(21, 1).double()))


def _forces(net: Any, batch: Any) -> Tensor:
    """Energies and forces: the loss has the gradient of the energy by the positions."""
    x, f = batch
    x = x.clone().requires_grad_(True)
    e = net(x)
    (g,) = torch.autograd.grad(e.sum(), x, create_graph=True)
    return MSE(e[:, 0], f.sum(1)) + MSE(-g, f)


_loss("energies and forces", _forces, lambda: made(_tanh(8, 1), normal(21, 8), normal(21, 8)))


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


_add("lazy penalty on slopes", _lazy_penalty, lambda: made(_tanh(8, 1), normal(21, 8), normal(21, 8)))


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


_add("path length", _path_length, lambda: _classes(lambda: _tanh(8, 3)))


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


_add("energy model with kept negatives", _energy, lambda: made(_tanh(8, 1), normal(21, 8)))


def _score(net: Any, batch: Any) -> Tensor:
    """Sliced score matching, along a fixed direction."""
    x = batch[0].clone().requires_grad_(True)
    v = torch.linspace(-1, 1, 8, dtype=x.dtype).expand_as(x)
    s = net(x)
    (g,) = torch.autograd.grad((s * v).sum(), x, create_graph=True)
    return ((g * v).sum(1) + 0.5 * (s * v).sum(1).square()).mean()


_loss("sliced score matching", _score, lambda: made(_tanh(8, 8), normal(21, 8)))


def _contracted(net: Any, batch: Any) -> Tensor:
    """The Jacobian's norm, output by output."""
    x = batch[0].clone().requires_grad_(True)
    out = net(x)
    total = x.new_zeros(())
    for j in range(3):
        (g,) = torch.autograd.grad(out[:, j].sum(), x, create_graph=True)
        total = total + g.square().sum(1).mean()
    return CE(out, batch[1]) + 0.1 * total


_loss("contractive", _contracted, lambda: _classes(lambda: _tanh(8, 3)))
_loss(
    "jvp in the loss",
    lambda n, b: CE(n(b[0]), b[1]) + 0.1 * torch.func.jvp(n, (b[0],), (torch.ones_like(b[0]),))[1].square().mean(),
    lambda: _classes(lambda: _tanh(8, 3)),
)
_loss(
    "jacobian by vmap",
    lambda n, b: CE(n(b[0]), b[1]) + 0.1 * torch.func.vmap(torch.func.jacrev(n))(b[0]).square().sum((1, 2)).mean(),
    lambda: _classes(lambda: _tanh(8, 3)),
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


_add("an inner step differentiated", _maml)


def _grad_and_value(net: Any, _opt: Any, batches: Any) -> None:
    """``torch.func.grad_and_value`` and an update by hand."""
    for x, y in batches:
        p = {k: v.detach() for k, v in net.named_parameters()}
        g, _ = torch.func.grad_and_value(lambda q: CE(functional_call(net, q, (x,)), y))(p)  # noqa: B023
        with torch.no_grad():
            for k, v in net.named_parameters():
                v.sub_(0.05 * g[k])


_add("gradients by torch.func", _grad_and_value)


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


_add("gradients from two losses", _zeroth)


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


_add("kept if it is better", _evolved)


def _clients(net: Any, opt: Any, batches: Any) -> None:
    """Federated averaging, one client after another."""
    for _ in range(2):
        begin, ends = copy.deepcopy(net.state_dict()), []
        for client in range(2):
            net.load_state_dict(begin)
            for i, (x, y) in enumerate(batches):
                if i % 2 == client:
                    _step(net, opt, x, y)
            ends.append(copy.deepcopy(net.state_dict()))
        net.load_state_dict({k: sum(e[k] for e in ends) / 2 for k in begin})


_add("clients averaged", _clients)


def _snapshot(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Answers of several states are averaged."""
    kept = []
    for _ in range(3):
        for x, y in batches:
            _step(net, opt, x, y)
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


_add("answers of several states", _snapshot)


def _pickled(net: Any, opt: Any, batches: Any) -> None:
    """States of model and optimizer through a buffer, with the generators'."""
    for epoch in range(2):
        for x, y in batches:
            _step(net, opt, x, y)
        f = io.BytesIO()
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "rng": torch.get_rng_state(), "epoch": epoch}, f)
        f.seek(0)
        got = torch.load(f)
        net.load_state_dict(got["net"])
        opt.load_state_dict(got["opt"])
        torch.set_rng_state(got["rng"])


_add("through a buffer with generators", _pickled, lambda: _classes(shuffle=True))

# ---- optimizers


class Shampoo(torch.optim.Optimizer):
    """Preconditions matrices on both sides."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, state = p.grad, self.state[p]
                if g.dim() == 2:
                    for i, side in enumerate((g @ g.T, g.T @ g)):
                        key = f"side{i}"
                        state[key] = state.get(key, torch.eye(len(side), dtype=g.dtype) * 0.1) + side
                        w, v = torch.linalg.eigh(state[key])
                        half = v @ torch.diag(w.clamp(min=1e-8) ** -0.25) @ v.T
                        g = half @ g if i == 0 else g @ half
                p.add_(g, alpha=-group["lr"])


def _shampoo() -> Made:
    net, _, batches = _classes()
    return net, Shampoo(net.parameters()), batches


_add("Shampoo", epochs(pairs(CE)), _shampoo, CE)


class Whole(torch.optim.Optimizer):
    """All gradients are one vector that is normalised."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        ps = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in ps])
        flat = flat / (flat.norm() + 1e-8)
        at = 0
        for p in ps:
            p.sub_(0.1 * flat[at : at + p.numel()].view_as(p))
            at += p.numel()


_add(
    "one vector of gradients", epochs(pairs(CE)), lambda: (lambda m: (m[0], Whole(m[0].parameters()), m[2]))(_classes())
)


class Wrapped:
    """Lookahead-like wrapper with its own step and no base class."""

    def __init__(self, base: Any) -> None:
        self.base, self.count = base, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in base.param_groups]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)

    def step(self) -> None:
        self.base.step()
        self.count += 1
        if self.count % 3 == 0:
            for group, slow in zip(self.base.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s += 0.5 * (p.data - s)
                    p.data.copy_(s)


def _wrapping(net: Any, opt: Any, batches: Any) -> None:
    epochs(pairs(CE))(net, Wrapped(opt), batches)


_add("an optimizer in an object", _wrapping)


def _schedules(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Schedules in sequence and in a chain."""
    one = lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.PolynomialLR(opt, 6)], milestones=[3]
    )
    two = lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(opt, 0.95)], optimizer=opt)
    rates = []
    for x, y in itertools.chain(batches, batches):
        _step(net, opt, x, y)
        one.step()
        two.step()
        rates.append(one.get_last_lr()[0])
    return numbers(rates=rates)


_add("schedules in sequence", _schedules)


def _decayed_by_hand(net: Any, opt: Any, batches: Any) -> None:
    """Rates, momenta and decay of every group change by hand, and warm-up counts updates."""
    total = 2 * len(batches)
    for i, (x, y) in enumerate(itertools.chain(batches, batches)):
        for j, g in enumerate(opt.param_groups):
            g["lr"] = 0.1 * (0.9 ** (len(opt.param_groups) - j)) * min(1, (i + 1) / 3)
            g["momentum"] = 0.8 + 0.1 * i / total
            g["weight_decay"] = 0.02 * (1 - i / total)
        _step(net, opt, x, y)


def _layered() -> Made:
    net, _, batches = _classes()
    groups = [
        {"params": list(m.parameters()), "lr": 0.1 * 0.7**i}
        for i, m in enumerate(net.children())
        if list(m.parameters())
    ]
    return net, torch.optim.SGD(groups, lr=0.1, momentum=0.9), batches


_add("rates by layer, by hand", _decayed_by_hand, _layered)


def _gradual(net: Any, opt: Any, batches: Any) -> None:
    """Layers thaw one after another, with a group each."""
    for p in net.parameters():
        p.requires_grad_(False)
    for p in net.head.parameters():
        p.requires_grad_(True)
    opt = torch.optim.AdamW(net.head.parameters(), lr=0.01, eps=1e-3)
    for layer in (None, net.second, net.first):
        if layer is not None:
            for p in layer.parameters():
                p.requires_grad_(True)
            opt.add_param_group({"params": layer.parameters(), "lr": 0.005})
        for x, y in batches:
            _step(net, opt, x, y)


_add("layers thaw", _gradual, lambda: _classes(Named))


def _three(net: Any, _opt: Any, batches: Any) -> None:
    """Soft actor-critic: three optimizers, target critics, a learned temperature."""
    critics = [*net.q1.parameters(), *net.q2.parameters()]
    of_q = torch.optim.Adam(critics, lr=0.01, eps=1e-3)
    of_pi = torch.optim.Adam(net.pi.parameters(), lr=0.01, eps=1e-3)
    log_alpha = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    of_alpha = torch.optim.Adam([log_alpha], lr=0.05)
    for x, r in itertools.chain(batches, batches):
        p = net.pi(x).softmax(1)
        with torch.no_grad():
            wanted = r[:, None] + 0.9 * (p * (torch.min(net.t1(x), net.t2(x)) - log_alpha.exp() * p.log())).sum(1, True)
        of_q.zero_grad()
        (MSE(net.q1(x), wanted.expand(-1, 3)) + MSE(net.q2(x), wanted.expand(-1, 3))).backward()
        of_q.step()
        for q in critics:
            q.requires_grad_(False)
        p = net.pi(x).softmax(1)
        entropy = -(p * p.log()).sum(1)
        of_pi.zero_grad()
        (-(p * torch.min(net.q1(x), net.q2(x))).sum(1) - log_alpha.exp().detach() * entropy).mean().backward()
        of_pi.step()
        for q in critics:
            q.requires_grad_(True)
        of_alpha.zero_grad()
        (log_alpha * (entropy.detach() - 0.5)).mean().backward()
        of_alpha.step()
        with torch.no_grad():
            for t, q in ((net.t1, net.q1), (net.t2, net.q2)):
                for a, b in zip(t.parameters(), q.parameters(), strict=True):
                    a.mul_(0.9).add_(0.1 * b)


class Actors(nn.Module):
    """A policy, two critics and their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.pi, self.q1, self.q2 = _net(), _net(), _net()
        self.t1, self.t2 = copy.deepcopy(self.q1).requires_grad_(False), copy.deepcopy(self.q2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.pi(x)  # type: ignore[no-any-return]


_add("soft actor-critic", _three, lambda: made(Actors(), normal(21, 8), normal(21)))

# ---- losses


class Reverse(torch.autograd.Function):
    """Gradients are turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -ctx.scale * g, None


class Adversarial(nn.Module):
    """A label head, and one for the domain behind a reversed gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.domain = (
            nn.Sequential(nn.Linear(8, 16), nn.ReLU()),
            nn.Linear(16, 3),
            nn.Linear(16, 2),
        )

    def forward(self, x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.label(h), self.domain(Reverse.apply(h, alpha))


def _reversed(net: Any, opt: Any, batches: Any) -> None:
    """The scale grows with the epoch's place."""
    total = 2 * len(batches)
    for i, (x, y) in enumerate(itertools.chain(batches, batches)):
        alpha = 2 / (1 + math.exp(-10 * i / total)) - 1
        opt.zero_grad()
        label, domain = net(x, alpha)
        (CE(label, y) + CE(domain, (y > 0).long())).backward()
        opt.step()


_add("reversed gradients", _reversed, lambda: _classes(Adversarial))


class Arc(nn.Module):
    """A head with a margin, told the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = _net(6), nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cos = F.linear(F.normalize(self.body(x)), F.normalize(self.weight)).clamp(-0.99, 0.99)
        hot = F.one_hot(y, 3).bool()
        return 8 * torch.where(hot, torch.cos(torch.acos(cos) + 0.3), cos)


_loss("a margin by the label", lambda n, b: CE(n(*b), b[1]), lambda: _classes(Arc))
_loss(
    "three calls for a triplet",
    lambda n, b: F.triplet_margin_loss(n(b[0]), n(b[1]), n(b[2]), margin=0.5),
    lambda: made(_net(4), normal(21, 8), normal(21, 8), normal(21, 8)),
)


def _unlabelled(out: Tensor, y: Tensor) -> Tensor:
    """Positive and unlabelled samples: a risk that may not be negative, by a branch."""
    s, pos = out[:, 0], (y == 0).double()
    n = pos.sum().clamp(min=1)
    first = 0.4 * (F.softplus(-s) * pos).sum() / n
    second = (F.softplus(s) * (1 - pos)).sum() / (1 - pos).sum().clamp(min=1) - 0.4 * (F.softplus(s) * pos).sum() / n
    return first + second if second >= 0 else -second


_out("positive and unlabelled", _unlabelled)


class Two(nn.Module):
    """Two networks that teach each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _net(), _net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def _coteaching(net: Any, batch: Any) -> Tensor:
    """Each learns the samples that the other finds easy."""
    (a, b), y = net(batch[0]), batch[1]
    keep = max(1, int(0.7 * len(y)))
    easy_a = np.argsort(CE(a, y, reduction="none").data)[:keep]
    easy_b = np.argsort(CE(b, y, reduction="none").data)[:keep]
    return CE(a[easy_b], y[easy_b]) + CE(b[easy_a], y[easy_a])


_loss("taught by the easy ones", _coteaching, lambda: _classes(Two))
_loss(
    "mutual learning",
    lambda n, b: (
        lambda o: sum(
            CE(o[i], b[1]) + F.kl_div(o[i].log_softmax(1), o[1 - i].detach().softmax(1), reduction="batchmean")
            for i in (0, 1)
        )
    )(n(b[0])),
    lambda: _classes(Two),
)
_out(
    "mixture density",
    lambda o, y: (
        -torch.logsumexp(
            o[:, :2].log_softmax(1) - 0.5 * (y[:, None] - o[:, 2:4]).square() * o[:, 4:].exp() + 0.5 * o[:, 4:], 1
        ).mean()
    ),
    lambda: _classes(lambda: _net(6)),
)
_out("ordinal", lambda o, y: BCE(o, (y[:, None] > torch.arange(2)).double()), lambda: _classes(lambda: _net(2)))
_out(
    "asymmetric, a sum",
    lambda o, y: (
        -(F.one_hot(y, 3) * F.logsigmoid(o) + (1 - F.one_hot(y, 3)) * o.sigmoid() ** 2 * F.logsigmoid(-o)).sum()
    ),
)
_out("evidential", lambda o, y: ((F.one_hot(y, 3) - (o.exp() + 1) / (o.exp() + 1).sum(1, True)).square().sum(1)).mean())
_out("generalised cross-entropy", lambda o, y: ((1 - o.softmax(1).gather(1, y[:, None]) ** 0.7) / 0.7).mean())
_out(
    "poly, by outputs of its own",
    lambda o, y: (CE(o, y, reduction="none") + 1 - o.softmax(1)[torch.arange(len(y)), y]).mean(),
)
_out(
    "Tversky over the batch",
    lambda o, y: (
        1
        - (o.softmax(1) * F.one_hot(y, 3)).sum()
        / ((o.softmax(1) * F.one_hot(y, 3)).sum() + 0.7 * (o.softmax(1) * (1 - F.one_hot(y, 3))).sum() + 0.3 * len(y))
    ),
)
_out(
    "supervised contrastive",
    lambda o, y: (lambda s, m: -((s - s.exp().sum(1, True).log()) * m).sum(1).div(m.sum(1).clamp(min=1)).mean())(
        F.normalize(o) @ F.normalize(o).T / 0.5, (y[:, None] == y).double()
    ),
    lambda: _classes(lambda: _net(6)),
)
_out(
    "proxy anchor",
    lambda o, y: torch.stack(
        [F.softplus(torch.logsumexp(-3 * (o[y == k, k] - 0.1), 0)) for k in range(3) if (y == k).any()]
    ).mean(),
)
_out("the mean of class means", lambda o, y: torch.stack([CE(o[y == k], y[y == k]) for k in y.unique()]).mean())
_out("a loss over a fixed number", lambda o, y: CE(o, y, reduction="sum") / 6)
_out(
    "a loss by numpy's mean weight",
    lambda o, y: (CE(o, y, reduction="none") * torch.from_numpy((y.numpy() + 1) / (y.numpy() + 1).mean())).mean(),
)


class Smoothed(nn.Module):
    """A loss that is a module, with a learned weight for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        a, b = CE(o, y, label_smoothing=0.1), o.square().mean()
        return (torch.stack([a, b]) * torch.exp(-self.s) + self.s).sum()


def _outside(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Its weights have an optimizer of their own that is made in the loop."""
    loss_fn = Smoothed()
    other = torch.optim.Adam(loss_fn.parameters(), lr=0.05, eps=1e-3)
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        other.zero_grad()
        loss_fn(net(x), y).backward()
        opt.step()
        other.step()
    return {"s": loss_fn.s.detach()}


_add("a loss with weights, made in the loop", _outside)


def _sampled(net: Any, opt: Any, batches: Any) -> None:
    """Negative samples by a generator that every batch seeds."""
    for i, (a, b) in enumerate(batches):
        g = torch.Generator().manual_seed(i)
        neg = torch.randint(11, (len(a), 3), generator=g)
        opt.zero_grad()
        u = net(a)
        (
            -F.logsigmoid((u * net(b)).sum(1)) - F.logsigmoid(-torch.einsum("nd,nkd->nk", u, net(neg))).sum(1)
        ).mean().backward()
        opt.step()


_add(
    "negative samples",
    _sampled,
    lambda: (lambda n: (n, sgd(n), loader(torch.randint(11, (21,)), torch.randint(11, (21,)))))(
        nn.Embedding(11, 6).double()
    ),
)

# ---- calls


class TimeFirst(nn.Module):
    """Source and target, time first, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)

    def forward(self, src: Tensor, tgt: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.net(self.words(src), self.words(tgt), tgt_mask=mask))  # type: ignore[no-any-return]


def _translated(net: Any, opt: Any, batches: Any) -> None:
    for src, tgt in batches:
        src, tgt = src.T, tgt.T
        opt.zero_grad()
        mask = nn.Transformer.generate_square_subsequent_mask(len(tgt) - 1, dtype=torch.float64)
        out = net(src, tgt[:-1], mask)
        CE(out.reshape(-1, 9), tgt[1:].reshape(-1), ignore_index=0).backward()
        opt.step()


_add(
    "translation, time first",
    _translated,
    lambda: made(TimeFirst(), torch.randint(9, (21, 6)), torch.randint(9, (21, 6))),
)


class Written(nn.Module):
    """A model of letters with a method that writes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(9, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 9)

    def forward(self, t: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(t))[0])  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(self, t: Tensor, n: int) -> Tensor:
        for _ in range(n):
            t = torch.cat([t, self(t)[:, -1].argmax(-1, keepdim=True)], 1)
        return t


def _writes(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Trains on letters, and writes behind every epoch."""
    texts = []
    for _ in range(2):
        for (t,) in batches:
            opt.zero_grad()
            CE(net(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()).backward()
            opt.step()
        net.eval()
        texts.append(net.generate(torch.tensor([[1, 2]]), 4))
        net.train()
    return numbers(texts=torch.stack(texts))


_add("writes behind an epoch", _writes, lambda: made(Written(), torch.randint(9, (21, 6))))


def _phases(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Phases of training and validation in one loop, with the best weights (the transfer-learning tutorial)."""
    g = torch.Generator().manual_seed(3)
    held = loader(torch.randn(9, 8, generator=g, dtype=torch.float64), torch.randint(3, (9,), generator=g), batch=4)
    schedule, best, kept = lr_scheduler.StepLR(opt, 1, 0.5), 0.0, copy.deepcopy(net.state_dict())
    seen = []
    for _ in range(3):
        for phase, data in (("train", batches), ("val", held)):
            net.train() if phase == "train" else net.eval()
            total, right = 0.0, 0
            for x, y in data:
                opt.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    out = net(x)
                    loss = CE(out, y)
                    if phase == "train":
                        loss.backward()
                        opt.step()
                total += loss.item() * x.size(0)
                right += torch.sum(out.argmax(1) == y.data)
            if phase == "train":
                schedule.step()
            accuracy = right.double() / len(data.dataset)
            seen.append(accuracy)
            if phase == "val" and accuracy > best:
                best, kept = accuracy, copy.deepcopy(net.state_dict())
    net.load_state_dict(kept)
    return numbers(val=torch.stack(seen[1::2]))


_add("phases", _phases)
_add(
    "a part of every epoch",
    lambda net, opt, batches: [_step(net, opt, *b) for _ in range(3) for b in itertools.islice(batches, 2)] and None,
)
_add(
    "a new iterator for every batch",
    lambda net, opt, batches: [_step(net, opt, *next(iter(batches))) for _ in range(4)] and None,
    lambda: _classes(shuffle=True),
)


def _hooked(net: Any, opt: Any, batches: Any) -> None:
    """Gradients of outputs are clamped by a hook on the tensor."""
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        out.register_hook(lambda g: g.clamp(-0.05, 0.05))
        CE(out, y).backward()
        opt.step()


_add("gradients of outputs clamped", _hooked)


def _retained(net: Any, opt: Any, batches: Any) -> None:
    """The next rate is made of the gradient of the outputs."""
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        out.retain_grad()
        CE(out, y).backward()
        opt.param_groups[0]["lr"] = 0.05 / (1 + float(out.grad.abs().sum()))
        opt.step()


_add("a rate by the outputs' gradient", _retained)


def _parametrized(net: Any, opt: Any, batches: Any) -> None:
    """A layer gets a parametrization in mid-run."""
    for x, y in batches:
        _step(net, opt, x, y)
    parametrize.register_parametrization(net.first, "weight", Half())
    opt = sgd(net)
    for x, y in batches:
        _step(net, opt, x, y)


class Half(nn.Module):
    """Half of a weight."""

    def forward(self, w: Tensor) -> Tensor:
        return w / 2


_add("parametrized in mid-run", _parametrized, lambda: _classes(Named))


def _widened(net: Any, opt: Any, batches: Any) -> None:
    """A new class comes: the head grows."""
    for x, y in batches:
        _step(net, opt, x, y)
    old = net.head
    net.head = nn.Linear(16, 4).double()
    with torch.no_grad():
        net.head.weight[:3] = old.weight
        net.head.bias[:3] = old.bias
    opt = sgd(net)
    for x, y in batches:
        _step(net, opt, x, y)


_add("the head grows", _widened, lambda: _classes(Named))


def _update_bn(net: Any, opt: Any, batches: Any) -> None:
    """Statistics are made anew behind training, by torch's own function."""
    for x, y in batches:
        _step(net, opt, x, y)
    torch.optim.swa_utils.update_bn(batches, net)


_add(
    "statistics made anew",
    _update_bn,
    lambda: _classes(lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)), 24),
    batch_norm="exact",
)


def _recalibrated(net: Any, opt: Any, batches: Any) -> None:
    """Statistics are reset and made by a pass in training mode without gradients."""
    for x, y in batches:
        _step(net, opt, x, y)
    net[1].reset_running_stats()
    net.train()
    with torch.no_grad():
        for x, _ in batches:
            net(x)


_add(
    "statistics reset",
    _recalibrated,
    lambda: _classes(lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)), 24),
    batch_norm="exact",
)
_add("wrapped in DataParallel", epochs(pairs(CE)), lambda: _classes(lambda: nn.DataParallel(_net())))
_add(
    "an ensemble with weights of samples",
    epochs(lambda n, b: sum((CE(o, b[1], reduction="none") * b[2][:, i]).mean() for i, o in enumerate(n(b[0])))),
    lambda: made(Two(), normal(21, 8), torch.randint(3, (21,)), torch.randint(3, (21, 2)).double()),
)


def _anomalies(net: Any, opt: Any, batches: Any) -> None:
    with torch.autograd.set_detect_anomaly(True):
        for x, y in batches:
            _step(net, opt, x, y)


_add("anomalies detected", _anomalies)


def _forked(net: Any, opt: Any, batches: Any) -> None:
    """Noise of one seed per batch, apart from the other numbers."""
    for i, (x, y) in enumerate(batches):
        with torch.random.fork_rng():
            torch.manual_seed(i)
            noise = torch.randn_like(x)
        _step(net, opt, x + 0.1 * noise, y)


_add("noise of one seed per batch", _forked)


def _pool(net: Any, opt: Any, batches: Any) -> None:
    """Old answers are kept in a pool and drawn by Python (CycleGAN)."""
    pool: list[Tensor] = []
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        out = net(x)
        for o in out.detach():
            pool.append(o) if len(pool) < 5 else pool.__setitem__(random.randrange(5), o)
        wanted = torch.stack([random.choice(pool) for _ in x])
        (CE(out, y) + 0.1 * MSE(out, wanted)).backward()
        opt.step()


_add("a pool of answers", _pool)


def _bank(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Losses by sample are kept, and weigh the samples of the next epoch."""
    bank = torch.ones(21, dtype=torch.float64)
    for _ in range(3):
        for x, y, i in batches:
            opt.zero_grad()
            each = CE(net(x), y, reduction="none")
            (each * (bank[i] / bank.mean())).mean().backward()
            bank[i] = each.detach()
            opt.step()
    return {"bank": bank}


_add(
    "a bank of losses",
    _bank,
    lambda: made(_net(), normal(21, 8), torch.randint(3, (21,)), torch.arange(21), shuffle=True),
)


def _by_norms(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Clips at ten times the median of the norms so far (AutoClip); the history is logged."""
    history: list[float] = []
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        norm = sum(p.grad.detach().norm(2).item() ** 2 for p in net.parameters()) ** 0.5
        history.append(norm)
        nn.utils.clip_grad_norm_(net.parameters(), float(np.percentile(history, 40)))
        opt.step()
    return numbers(history=history)


_add("clipped by a percentile", _by_norms)


def _variance(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Gradient variance by two half batches decides the accumulation."""
    ratios = []
    for x, y in batches:
        opt.zero_grad()
        n = len(x) // 2
        CE(net(x[:n]), y[:n]).backward() if n else None
        half = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in net.parameters()]
        CE(net(x[n:]), y[n:]).backward()
        apart = sum((p.grad - 2 * h).square().sum() for p, h in zip(net.parameters(), half, strict=True))
        ratios.append(float(apart))
        for p in net.parameters():
            p.grad /= 2
        opt.step()
    return numbers(ratios=ratios)


_add("two halves of a batch", _variance)

# ---- data


class Augmented(Dataset[Any]):
    """A data set whose strength the loop changes every epoch."""

    def __init__(self) -> None:
        self.x, self.y, self.scale = normal(21, 8), torch.randint(3, (21,)), 1.0

    def __len__(self) -> int:
        return 21

    def __getitem__(self, i: int) -> Any:
        return self.x[i] * self.scale, self.y[i]


def _strengths(net: Any, opt: Any, batches: Any) -> None:
    for epoch in range(3):
        batches.dataset.scale = 1.0 / (epoch + 1)
        for x, y in batches:
            _step(net, opt, x, y)


_add(
    "a data set changed by epoch",
    _strengths,
    lambda: (lambda n: (n, sgd(n), DataLoader(Augmented(), 6)))(_net().double()),
)
_add(
    "a data set changed by epoch, a worker",
    _strengths,
    lambda: (lambda n: (n, sgd(n), DataLoader(Augmented(), 6, num_workers=1)))(_net().double()),
)


class Epochs(Sampler[int]):
    """Another order for every epoch that it is told of."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(21, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return 21


def _told(net: Any, opt: Any, batches: Any) -> None:
    for epoch in range(3):
        batches.sampler.set_epoch(epoch)
        for x, y in batches:
            _step(net, opt, x, y)


_add("a sampler that is told the epoch", _told, lambda: _classes(sampler=Epochs()))


class Shards(IterableDataset[Any]):
    """A stream that its workers share."""

    def __init__(self) -> None:
        self.x, self.y = normal(21, 8), torch.randint(3, (21,))

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        at, of = (info.id, info.num_workers) if info else (0, 1)
        for i in range(at, 21, of):
            yield self.x[i], self.y[i]


_add(
    "a stream that workers share",
    epochs(pairs(CE)),
    lambda: (lambda n: (n, sgd(n), DataLoader(Shards(), 6, num_workers=2)))(_net().double()),
)
_add(
    "a random split",
    epochs(pairs(CE)),
    lambda: (
        lambda n: (
            n,
            sgd(n),
            DataLoader(
                random_split(TensorDataset(normal(30, 8), torch.randint(3, (30,))), [21, 9])[0], 6, shuffle=True
            ),
        )
    )(_net().double()),
)


class Classwise(Sampler[list[int]]):
    """Batches of two samples of each class."""

    def __init__(self, y: Tensor) -> None:
        self.by = [(y == k).nonzero()[:, 0].tolist() for k in range(3)]

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(3):
            yield [i for rows in self.by for i in random.sample(rows, 2)]

    def __len__(self) -> int:
        return 3


_add(
    "two of each class, gathered",
    epochs(
        lambda n, b: F.relu(
            0.5
            + (
                lambda o, y: (
                    torch.cdist(o, o)[y[:, None] == y].mean() - torch.cdist(o + 1e-3, o)[y[:, None] != y].mean()
                )
            )(asa.gather(n(b[0])), asa.gather(b[1]))
        )
    ),
    lambda: (lambda n, d: (n, sgd(n), DataLoader(d, batch_sampler=Classwise(d.tensors[1]))))(
        _net().double(), TensorDataset(normal(21, 8), torch.arange(21) % 3)
    ),
)
_add(
    "two of each class, not gathered",
    epochs(
        lambda n, b: F.relu(
            0.5
            + (
                lambda o, y: (
                    torch.cdist(o, o)[y[:, None] == y].mean() - torch.cdist(o + 1e-3, o)[y[:, None] != y].mean()
                )
            )(n(b[0]), b[1])
        )
    ),
    lambda: (lambda n, d: (n, sgd(n), DataLoader(d, batch_sampler=Classwise(d.tensors[1]))))(
        _net().double(), TensorDataset(normal(21, 8), torch.arange(21) % 3)
    ),
)


def _prefetched(net: Any, opt: Any, batches: Any) -> None:
    """A prefetcher of its own: the next batch is read before this one is computed."""
    for _ in range(2):
        it = iter(batches)
        batch = next(it, None)
        while batch is not None:
            after = next(it, None)
            _step(net, opt, *batch)
            batch = after


_add("read one batch ahead", _prefetched, lambda: _classes(shuffle=True))
_add(
    "two epochs in a list",
    lambda net, opt, batches: [_step(net, opt, *b) for b in [*batches, *batches]] and None,
    lambda: _classes(shuffle=True),
)


def _sorted(net: Any, opt: Any, batches: Any) -> None:
    """Within an epoch the batches are learned in the order of their losses."""
    for _ in range(2):
        held = list(batches)
        with torch.no_grad():
            values = [CE(net(x), y).item() for x, y in held]
        for i in np.argsort(values):
            _step(net, opt, *held[i])


_add("batches by their losses", _sorted)


# ---- what a program holds from before the call, and what it reaches through layers


def _holding(held: Any, net: Any = Named, **options: Any) -> Made:
    """``held(net)``, made before the call, is an attribute of the optimizer."""
    model, opt, batches = _classes(net, **options)
    opt.held = held(model)
    return model, opt, batches


def _clips_held(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        nn.utils.clip_grad_norm_(opt.held, 0.05)
        opt.step()


_add("parameters listed before: clipped", _clips_held, lambda: _holding(lambda n: list(n.parameters())))


def _penalises_held(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        (CE(net(x), y) + 0.05 * sum(p.square().sum() for k, p in opt.held if "bias" not in k)).backward()
        opt.step()


_add("parameters listed before: a penalty", _penalises_held, lambda: _holding(lambda n: list(n.named_parameters())))


def _averages_held(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    average = [p.detach().clone() for p in opt.held]
    for x, y in itertools.chain(batches, batches):
        _step(net, opt, x, y)
        for a, p in zip(average, opt.held, strict=True):
            a.lerp_(p.detach(), 0.2)
    return {f"average{i}": a for i, a in enumerate(average)}


_add("parameters listed before: averaged", _averages_held, lambda: _holding(lambda n: list(n.parameters())))


def _moves_held(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        with torch.no_grad():
            for p in opt.held:
                if p.grad is not None:
                    p.sub_(0.05 * p.grad)


_add("parameters listed before: moved by hand", _moves_held, lambda: _holding(lambda n: list(n.parameters())))


def _calls_held(_: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        opt.zero_grad()
        CE(opt.held(x), y).backward()
        opt.step()


_add("the model from before is trained", _calls_held, lambda: _holding(lambda n: n))


def _judges_held(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    x, y = batches.dataset.tensors
    seen = []
    for _ in range(2):
        for a, b in batches:
            _step(net, opt, a, b)
        with torch.no_grad():
            seen.append(CE(opt.held(x), y))
    return numbers(seen=torch.stack(seen))


_add("the model from before is evaluated", _judges_held, lambda: _holding(lambda n: n))


class Scaled(nn.Module):
    """Scaled by an attribute, and by a buffer."""

    temperature: Tensor

    def __init__(self, net: Any = None) -> None:
        super().__init__()
        self.net, self.scale = net or nn.Linear(16, 16), 1.0
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale / self.temperature  # type: ignore[no-any-return]


class Inner(nn.Module):
    """A scaled layer in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.drop, self.head = nn.Linear(8, 16), Scaled(), nn.Dropout(0.0), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(F.relu(self.middle(F.relu(self.first(x))))))  # type: ignore[no-any-return]


def _by_epoch(change: Any) -> Any:
    def loop(net: Any, opt: Any, batches: Any) -> None:
        for epoch in range(3):
            change(net, opt, epoch)
            for x, y in batches:
                _step(net, opt, x, y)

    return loop


def _scale(layer: Any, epoch: int) -> None:
    layer.scale = 1 / (1 + epoch)


def _cool(net: Any, _opt: Any, epoch: int) -> None:
    net.middle.temperature.fill_(1.0 + epoch)


def _replace(net: Any, _opt: Any, epoch: int) -> None:
    net.middle.temperature = torch.tensor(1.0 + epoch).double()


def _register(net: Any, _opt: Any, epoch: int) -> None:
    net.middle.register_buffer("temperature", torch.tensor(1.0 + epoch).double())


_add("a layer's attribute by epoch", _by_epoch(lambda n, _o, e: _scale(n.middle, e)), lambda: _classes(Inner))
_add(
    "a layer's attribute, by modules()",
    _by_epoch(lambda n, _o, e: [_scale(m, e) for m in n.modules() if isinstance(m, Scaled)]),
    lambda: _classes(Inner),
)
_add(
    "a layer's attribute, held from before",
    _by_epoch(lambda _n, o, e: _scale(o.held, e)),
    lambda: _holding(lambda n: n.middle, Inner),
)
_add(
    "a layer's attribute, by get_submodule",
    _by_epoch(lambda n, _o, e: _scale(n.get_submodule("middle"), e)),
    lambda: _classes(Inner),
)
_add("a layer's buffer by epoch", _by_epoch(_cool), lambda: _classes(Inner))
_add("a layer's buffer replaced", _by_epoch(_replace), lambda: _classes(Inner))
_add("a layer's buffer registered again", _by_epoch(_register), lambda: _classes(Inner))
_add(
    "a layer's buffer, held from before",
    _by_epoch(lambda _n, o, e: o.held.fill_(1.0 + e)),
    lambda: _holding(lambda n: n.middle.temperature, Inner),
)
_add(
    "a layer's buffer, by state_dict",
    _by_epoch(lambda n, _o, e: n.load_state_dict({"middle.temperature": torch.tensor(1.0 + e)}, strict=False)),
    lambda: _classes(Inner),
)
_add(
    "dropout switched off and on",
    _by_epoch(lambda n, _o, e: setattr(n.drop, "p", 0.0) or n.drop.train(e % 2 == 0)),
    lambda: _classes(Inner),
)
_add(
    "dropout from the second epoch",
    _by_epoch(lambda n, _o, e: setattr(n.drop, "p", 0.4 * e)),
    lambda: _classes(Inner),
)


def _layerwise_clip(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for m in (net.first, net.second, net.head):
            nn.utils.clip_grad_norm_(m.parameters(), 0.02)
        opt.step()


_add("clipped layer by layer", _layerwise_clip, lambda: _classes(Named))


def _layerwise_rate(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for m in (net.first, net.second, net.head):
            m.weight.grad.mul_(0.1 * m.weight.norm() / (m.weight.grad.norm() + 1e-6))
        opt.step()


_add("scaled by norms of layers", _layerwise_rate, lambda: _classes(Named))


def _modules_rate(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for m in net.modules():
            if isinstance(m, nn.Linear):
                m.weight.grad.div_(m.weight.grad.norm() + 1e-3)
        opt.step()


_add("scaled by norms of modules()", _modules_rate, lambda: _classes(Named))


def _max_norm(net: Any, opt: Any, batches: Any) -> None:
    """Rows of every layer are shortened (max-norm constraint)."""
    for x, y in itertools.chain(batches, batches):
        _step(net, opt, x, y)
        with torch.no_grad():
            for m in (net.first, net.second):
                m.weight.copy_(torch.renorm(m.weight, 2, 0, 0.5))


_add("rows of layers shortened", _max_norm, lambda: _classes(Named))


def _logged(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Means and norms of weights and gradients of layers are logged."""
    seen = []
    for x, y in batches:
        _step(net, opt, x, y)
        seen += [
            net.first.weight.norm().item(),
            net.first.weight.grad.abs().max().item(),
            net.second.weight.std().item(),
        ]
        seen += [float(m.weight.detach().mean()) for m in net.children()]
    return numbers(seen=seen)


_add("figures of layers logged", _logged, lambda: _classes(Named))


def _histogram(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Weights as arrays, as TensorBoard takes them."""
    for x, y in batches:
        _step(net, opt, x, y)
    return numbers(
        size=net.second.weight.detach().cpu().numpy().size,
        total=float(np.abs(net.second.weight.detach().numpy()).sum()),
    )


_add("weights of a layer as an array", _histogram, lambda: _classes(Named))


def _layer_states(net: Any, opt: Any, batches: Any) -> None:
    """A layer's state is taken, and loaded after an epoch."""
    kept = copy.deepcopy(net.second.state_dict())
    for x, y in batches:
        _step(net, opt, x, y)
    net.second.load_state_dict(kept)
    for x, y in batches:
        _step(net, opt, x, y)


_add("a layer's state loaded again", _layer_states, lambda: _classes(Named))


def _layer_foreign(net: Any, opt: Any, batches: Any) -> None:
    """A layer's state comes from another model."""
    torch.manual_seed(4)
    net.second.load_state_dict(nn.Linear(16, 16).double().state_dict())
    for x, y in batches:
        _step(net, opt, x, y)


_add("a layer's state from another model", _layer_foreign, lambda: _classes(Named))


def _copied_weight(net: Any, opt: Any, batches: Any) -> None:
    """Weights of a layer are copied from elsewhere by ``copy_`` and by ``data``."""
    torch.manual_seed(4)
    other = Named().double()
    with torch.no_grad():
        net.first.weight.copy_(other.first.weight)
        net.second.weight.data = other.second.weight.data.clone()
    for x, y in batches:
        _step(net, opt, x, y)


_add("weights of layers copied in", _copied_weight, lambda: _classes(Named))

# ---- optimizers with a state from before


def _begun(kind: Any, steps: int = 2, **options: Any) -> Made:
    net, _, batches = _classes()
    opt = kind(net.parameters(), lr=0.02, **options)
    g = torch.Generator().manual_seed(9)
    x, y = torch.randn(6, 8, generator=g).double(), torch.randint(3, (6,), generator=g)
    for _ in range(steps):
        _step(net, opt, x, y)
    opt.zero_grad()
    return net, opt, batches


for name, kind, more in (
    ("Adam", torch.optim.Adam, {"eps": 1e-3}),
    ("SGD", torch.optim.SGD, {"momentum": 0.9}),
    ("RMSprop", torch.optim.RMSprop, {"eps": 1e-2, "momentum": 0.5, "centered": True}),
):
    _add(f"a state from before: {name}", epochs(pairs(CE)), lambda kind=kind, more=more: _begun(kind, **more), CE)
for name, kind, more in (
    ("Adagrad, begun", torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
    ("Adamax", torch.optim.Adamax, {"eps": 1e-3}),
    ("RAdam", torch.optim.RAdam, {"eps": 1e-3}),
    ("SGD, nesterov, dampened", torch.optim.SGD, {"momentum": 0.9, "dampening": 0.0, "nesterov": True}),
):
    _add(f"another optimizer: {name}", epochs(pairs(CE)), lambda kind=kind, more=more: _begun(kind, 0, **more), CE)


def _gradients_before() -> Made:
    net, opt, batches = _classes()
    CE(net(torch.ones(4, 8).double()), torch.zeros(4).long()).backward()
    return net, opt, batches


def _adds_first(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        CE(net(x), y).backward()
        opt.step()
        opt.zero_grad()


_add("gradients from before", _adds_first, _gradients_before)

# ---- a second model, or answers, beside the placed one


def _probe(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """A linear probe learns on features that are detached, beside a loss without labels."""
    probe = nn.Linear(3, 3).double()
    nn.init.eye_(probe.weight)
    nn.init.zeros_(probe.bias)
    other = torch.optim.SGD(probe.parameters(), lr=0.1)
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        out = net(x)
        MSE(out, x[:, :3]).backward()
        opt.step()
        other.zero_grad()
        CE(probe(out.detach()), y).backward()
        other.step()
    return {"probe": probe.weight.detach()}


_add("a probe on detached features", _probe)


def _apart(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """A second model that is not placed learns from the same batches."""
    torch.manual_seed(3)
    second = _net().double()
    other = torch.optim.SGD(second.parameters(), lr=0.1)
    for x, y in itertools.chain(batches, batches):
        _step(net, opt, x, y)
        other.zero_grad()
        CE(second(x), y).backward()
        other.step()
    return {f"second.{k}": v for k, v in second.state_dict().items()}


_add("a second model from the same batches", _apart)


def _critic_apart(net: Any, opt: Any, batches: Any) -> None:
    """A generator that is placed, and a critic that is not."""
    torch.manual_seed(3)
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).double()
    other = torch.optim.Adam(critic.parameters(), lr=0.01, eps=1e-3)
    for x, z in itertools.chain(batches, batches):
        fake = net(z)
        other.zero_grad()
        (F.softplus(-critic(x)) + F.softplus(critic(fake.detach()))).mean().backward()
        other.step()
        critic.requires_grad_(False)
        opt.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        opt.step()
        critic.requires_grad_(True)


_add("a critic that is not placed", _critic_apart, lambda: made(_net(8), normal(21, 8), normal(21, 8)))


def _teaches(net: Any, opt: Any, batches: Any) -> None:
    """A teacher that is trained beside the student, on the student's answers."""
    torch.manual_seed(3)
    teacher = _net().double()
    other = torch.optim.SGD(teacher.parameters(), lr=0.1)
    for x, y in itertools.chain(batches, batches):
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        opt.zero_grad()
        CE(net(x), wanted).backward()
        opt.step()
        other.zero_grad()
        CE(teacher(x), y).backward()
        other.step()


_add("a teacher trained beside", _teaches)


def _pseudo(net: Any, opt: Any, batches: Any) -> None:
    """Answers to all samples are collected, and are the labels of a second phase."""
    for x, y in batches:
        _step(net, opt, x, y)
    xs, labels = [], []
    net.eval()
    with torch.no_grad():
        for x, _ in batches:
            xs.append(x)
            labels.append(net(x).argmax(1))
    net.train()
    for x, y in DataLoader(TensorDataset(torch.cat(xs), torch.cat(labels)), 6):
        _step(net, opt, x, y)


_add("answers as labels of a second phase", _pseudo)


def _clustered(net: Any, opt: Any, batches: Any) -> None:
    """Features are clustered behind every epoch; the clusters are the labels by place (DeepCluster)."""
    labels = torch.arange(21) % 3
    for _ in range(2):
        at = 0
        for x, _y in batches:
            _step(net, opt, x, labels[at : at + len(x)])
            at += len(x)
        with torch.no_grad():
            feats = torch.cat([net(x) for x, _ in batches])
        centres = feats[:3].clone()
        for _ in range(3):
            near = torch.cdist(feats, centres).argmin(1)
            centres = torch.stack([feats[near == k].mean(0) if (near == k).any() else centres[k] for k in range(3)])
        labels = torch.cdist(feats, centres).argmin(1)


_add("clusters as labels by place", _clustered)


class Weighted(Sampler[int]):
    """Drawn by weights that the loop sets."""

    def __init__(self) -> None:
        self.weights = torch.ones(21).double()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.multinomial(self.weights, 21, True, generator=torch.Generator().manual_seed(1)).tolist())

    def __len__(self) -> int:
        return 21


def _weighed(net: Any, opt: Any, batches: Any) -> None:
    """A sampler's weights are the losses of its samples."""
    for _ in range(3):
        for x, y, i in batches:
            opt.zero_grad()
            each = CE(net(x), y, reduction="none")
            each.mean().backward()
            opt.step()
            batches.sampler.weights[i] = each.detach()


_add(
    "a sampler by losses",
    _weighed,
    lambda: made(_net(), normal(21, 8), torch.randint(3, (21,)), torch.arange(21), sampler=Weighted()),
)


def _active(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Active learning: the most uncertain samples of a pool are added for the next round."""
    x, y = batches.dataset.tensors
    known = list(range(8))
    for _ in range(3):
        for a, b in DataLoader(TensorDataset(x[known], y[known]), 4):
            _step(net, opt, a, b)
        with torch.no_grad():
            p = net(x).softmax(1)
        entropy = -(p * p.log()).sum(1)
        entropy[known] = -1
        known += entropy.topk(4).indices.tolist()
    return numbers(known=known)


_add("active learning", _active)


def _one_loss(net: Any, opt: Any, batches: Any) -> None:
    """Outputs of all batches, and one loss of them."""
    for _ in range(3):
        opt.zero_grad()
        outs, ys = zip(*((net(x), y) for x, y in batches), strict=True)
        CE(torch.cat(outs), torch.cat(ys)).backward()
        opt.step()


_add("one loss of all batches", _one_loss)


def _mean_losses(net: Any, opt: Any, batches: Any) -> None:
    """The mean of the losses of all batches."""
    for _ in range(3):
        opt.zero_grad()
        torch.stack([CE(net(x), y) for x, y in batches]).mean().backward()
        opt.step()


_add("the mean of the losses of all batches", _mean_losses)


def _cached_features(net: Any, opt: Any, batches: Any) -> None:
    """Features are computed once; the head is trained on them."""
    with torch.no_grad():
        kept = [(F.relu(net.second(F.relu(net.first(x)))), y) for x, y in batches]
    opt = torch.optim.SGD(net.head.parameters(), lr=0.1)
    for _ in range(3):
        for h, y in kept:
            opt.zero_grad()
            CE(net.head(h), y).backward()
            opt.step()


_add("features kept, the head trained", _cached_features, lambda: _classes(Named))


def _by_numpy(scale: Any) -> Any:
    def loop(net: Any, opt: Any, batches: Any) -> None:
        """The gradient of the loss by the outputs is made by numpy."""
        for x, y in itertools.chain(batches, batches):
            opt.zero_grad()
            out = net(x)
            o = out.detach().numpy()
            p = np.exp(o - o.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            p[np.arange(len(y)), y.numpy()] -= 1
            out.backward(torch.from_numpy(p / scale(y)))
            opt.step()

    return loop


_add("gradients of outputs by numpy, a mean", _by_numpy(len))
_add("gradients of outputs by numpy, a sum", _by_numpy(lambda _y: 3.0))


def _by_torch(net: Any, opt: Any, batches: Any) -> None:
    """The same by torch, without a mean."""
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        out = net(x)
        out.backward((out.detach().softmax(1) - F.one_hot(y, 3)) / 3.0)
        opt.step()


_add("gradients of outputs by torch, a sum", _by_torch)


class Tasks(nn.Module):
    """A head for each task, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = (
            nn.Sequential(nn.Linear(8, 16), nn.ReLU()),
            nn.ModuleDict({"a": nn.Linear(16, 3), "b": nn.Linear(16, 3)}),
        )

    def forward(self, x: Tensor, task: str = "a", scale: float = 1.0) -> Tensor:
        return self.heads[task](self.body(x)) * scale  # type: ignore[no-any-return]


def _tasks(net: Any, opt: Any, batches: Any) -> None:
    for i, (x, y) in enumerate(itertools.chain(batches, batches)):
        opt.zero_grad()
        CE(net(x, task="ab"[i % 2], scale=1 + 0.1 * i), y).backward()
        opt.step()


_add("a task by name", _tasks, lambda: _classes(Tasks))


def _dropped_order(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """A model with dropout, and an order that the loop draws behind it."""
    x, y = batches.dataset.tensors
    orders = []
    for _ in range(2):
        order = torch.randperm(len(x))
        orders.append(order)
        for i in range(0, 21, 6):
            _step(net, opt, x[order[i : i + 6]], y[order[i : i + 6]])
    return {}


_add(
    "dropout, and an order of the loop's",
    _dropped_order,
    lambda: _classes(lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 3))),
)


def _found_rate(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Settings are searched: a short run for each, from the same state, judged on a held-out set."""
    x, y = batches.dataset.tensors
    first, state = copy.deepcopy(net.state_dict()), copy.deepcopy(opt.state_dict())
    values = []
    for lr in (0.5, 0.1, 0.02):
        net.load_state_dict(first)
        opt.load_state_dict(state)
        opt.param_groups[0]["lr"] = lr
        for a, b in batches:
            _step(net, opt, a, b)
        with torch.no_grad():
            values.append(CE(net(x), y).item())
    net.load_state_dict(first)
    opt.load_state_dict(state)
    opt.param_groups[0]["lr"] = (0.5, 0.1, 0.02)[int(np.argmin(values))]
    for a, b in batches:
        _step(net, opt, a, b)
    return numbers(values=values)


_add("a rate that is searched", _found_rate)


def _rolled_back(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """A step that made a held-out loss worse is taken back."""
    x, y = batches.dataset.tensors
    best, back = math.inf, 0
    for a, b in itertools.chain(batches, batches):
        kept = [p.detach().clone() for p in net.parameters()]
        _step(net, opt, a, b)
        with torch.no_grad():
            value = CE(net(x), y).item()
            if value > best:
                back += 1
                for p, k in zip(net.parameters(), kept, strict=True):
                    p.copy_(k)
            best = min(best, value)
    return numbers(back=back)


_add("steps taken back", _rolled_back)


class TwoWays(nn.Module):
    """Called with one tensor, later with two; scaled by attributes of its own and of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head, self.gain = nn.Linear(8, 16), Scaled(), nn.Linear(16, 3), 1.0

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        h = self.middle(F.relu(self.first(x)))
        return self.head(h if shift is None else h + shift) * self.gain  # type: ignore[no-any-return]


def _another_call(net: Any, opt: Any, batches: Any) -> None:
    """Attributes are set, and the model is called in another way behind that."""
    held = list(net.parameters())
    for epoch in range(3):
        if epoch == 1:
            net.gain, net.middle.scale = 0.5, 0.3
        for x, y in batches:
            opt.zero_grad()
            CE(net(x) if epoch < 2 else net(x, x[:, :1]), y).backward()
            nn.utils.clip_grad_norm_(held if epoch < 2 else net.parameters(), 0.05)
            opt.step()


_add("attributes, then another call", _another_call, lambda: _classes(TwoWays))
