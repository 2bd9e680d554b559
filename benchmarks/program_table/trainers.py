"""Programs of public repositories: optimizers, losses, calls of the model, and data."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, random_split

import asa
from benchmarks.program_table import Made, epochs, loader, made, normal, pairs, sgd
from benchmarks.program_table.common import (
    BCE,
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
    net, _, batches = classified()
    return net, Shampoo(net.parameters()), batches


add_program("Shampoo", epochs(pairs(CE)), _shampoo, CE)


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


add_program(
    "one vector of gradients",
    epochs(pairs(CE)),
    lambda: (lambda m: (m[0], Whole(m[0].parameters()), m[2]))(classified()),
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


add_program("an optimizer in an object", _wrapping)


def _schedules(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Schedules in sequence and in a chain."""
    one = lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.PolynomialLR(opt, 6)], milestones=[3]
    )
    two = lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(opt, 0.95)], optimizer=opt)
    rates = []
    for x, y in itertools.chain(batches, batches):
        one_step(net, opt, x, y)
        one.step()
        two.step()
        rates.append(one.get_last_lr()[0])
    return numbers(rates=rates)


add_program("schedules in sequence", _schedules)


def _decayed_by_hand(net: Any, opt: Any, batches: Any) -> None:
    """Rates, momenta and decay of every group change by hand, and warm-up counts updates."""
    total = 2 * len(batches)
    for i, (x, y) in enumerate(itertools.chain(batches, batches)):
        for j, g in enumerate(opt.param_groups):
            g["lr"] = 0.1 * (0.9 ** (len(opt.param_groups) - j)) * min(1, (i + 1) / 3)
            g["momentum"] = 0.8 + 0.1 * i / total
            g["weight_decay"] = 0.02 * (1 - i / total)
        one_step(net, opt, x, y)


def _layered() -> Made:
    net, _, batches = classified()
    groups = [
        {"params": list(m.parameters()), "lr": 0.1 * 0.7**i}
        for i, m in enumerate(net.children())
        if list(m.parameters())
    ]
    return net, torch.optim.SGD(groups, lr=0.1, momentum=0.9), batches


add_program("rates by layer, by hand", _decayed_by_hand, _layered)


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
            one_step(net, opt, x, y)


add_program("layers thaw", _gradual, lambda: classified(Named))


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
        self.pi, self.q1, self.q2 = small_net(), small_net(), small_net()
        self.t1, self.t2 = copy.deepcopy(self.q1).requires_grad_(False), copy.deepcopy(self.q2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.pi(x)  # type: ignore[no-any-return]


add_program("soft actor-critic", _three, lambda: made(Actors(), normal(21, 8), normal(21)))

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


add_program("reversed gradients", _reversed, lambda: classified(Adversarial))


class Arc(nn.Module):
    """A head with a margin, told the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = small_net(6), nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cos = F.linear(F.normalize(self.body(x)), F.normalize(self.weight)).clamp(-0.99, 0.99)
        hot = F.one_hot(y, 3).bool()
        return 8 * torch.where(hot, torch.cos(torch.acos(cos) + 0.3), cos)


by_loss("a margin by the label", lambda n, b: CE(n(*b), b[1]), lambda: classified(Arc))
by_loss(
    "three calls for a triplet",
    lambda n, b: F.triplet_margin_loss(n(b[0]), n(b[1]), n(b[2]), margin=0.5),
    lambda: made(small_net(4), normal(21, 8), normal(21, 8), normal(21, 8)),
)


def _unlabelled(out: Tensor, y: Tensor) -> Tensor:
    """Positive and unlabelled samples: a risk that may not be negative, by a branch."""
    s, pos = out[:, 0], (y == 0).double()
    n = pos.sum().clamp(min=1)
    first = 0.4 * (F.softplus(-s) * pos).sum() / n
    second = (F.softplus(s) * (1 - pos)).sum() / (1 - pos).sum().clamp(min=1) - 0.4 * (F.softplus(s) * pos).sum() / n
    return first + second if second >= 0 else -second


by_outputs("positive and unlabelled", _unlabelled)


class Two(nn.Module):
    """Two networks that teach each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = small_net(), small_net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def _coteaching(net: Any, batch: Any) -> Tensor:
    """Each learns the samples that the other finds easy."""
    (a, b), y = net(batch[0]), batch[1]
    keep = max(1, int(0.7 * len(y)))
    easy_a = np.argsort(CE(a, y, reduction="none").data)[:keep]
    easy_b = np.argsort(CE(b, y, reduction="none").data)[:keep]
    return CE(a[easy_b], y[easy_b]) + CE(b[easy_a], y[easy_a])


by_loss("taught by the easy ones", _coteaching, lambda: classified(Two))
by_loss(
    "mutual learning",
    lambda n, b: (
        lambda o: sum(
            CE(o[i], b[1]) + F.kl_div(o[i].log_softmax(1), o[1 - i].detach().softmax(1), reduction="batchmean")
            for i in (0, 1)
        )
    )(n(b[0])),
    lambda: classified(Two),
)
by_outputs(
    "mixture density",
    lambda o, y: (
        -torch.logsumexp(
            o[:, :2].log_softmax(1) - 0.5 * (y[:, None] - o[:, 2:4]).square() * o[:, 4:].exp() + 0.5 * o[:, 4:], 1
        ).mean()
    ),
    lambda: classified(lambda: small_net(6)),
)
by_outputs(
    "ordinal", lambda o, y: BCE(o, (y[:, None] > torch.arange(2)).double()), lambda: classified(lambda: small_net(2))
)
by_outputs(
    "asymmetric, a sum",
    lambda o, y: (
        -(F.one_hot(y, 3) * F.logsigmoid(o) + (1 - F.one_hot(y, 3)) * o.sigmoid() ** 2 * F.logsigmoid(-o)).sum()
    ),
)
by_outputs(
    "evidential", lambda o, y: ((F.one_hot(y, 3) - (o.exp() + 1) / (o.exp() + 1).sum(1, True)).square().sum(1)).mean()
)
by_outputs("generalised cross-entropy", lambda o, y: ((1 - o.softmax(1).gather(1, y[:, None]) ** 0.7) / 0.7).mean())
by_outputs(
    "poly, by outputs of its own",
    lambda o, y: (CE(o, y, reduction="none") + 1 - o.softmax(1)[torch.arange(len(y)), y]).mean(),
)
by_outputs(
    "Tversky over the batch",
    lambda o, y: (
        1
        - (o.softmax(1) * F.one_hot(y, 3)).sum()
        / ((o.softmax(1) * F.one_hot(y, 3)).sum() + 0.7 * (o.softmax(1) * (1 - F.one_hot(y, 3))).sum() + 0.3 * len(y))
    ),
)
by_outputs(
    "supervised contrastive",
    lambda o, y: (lambda s, m: -((s - s.exp().sum(1, True).log()) * m).sum(1).div(m.sum(1).clamp(min=1)).mean())(
        F.normalize(o) @ F.normalize(o).T / 0.5, (y[:, None] == y).double()
    ),
    lambda: classified(lambda: small_net(6)),
)
by_outputs(
    "proxy anchor",
    lambda o, y: torch.stack(
        [F.softplus(torch.logsumexp(-3 * (o[y == k, k] - 0.1), 0)) for k in range(3) if (y == k).any()]
    ).mean(),
)
by_outputs("the mean of class means", lambda o, y: torch.stack([CE(o[y == k], y[y == k]) for k in y.unique()]).mean())
by_outputs("a loss over a fixed number", lambda o, y: CE(o, y, reduction="sum") / 6)
by_outputs(
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


add_program("a loss with weights, made in the loop", _outside)


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


add_program(
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


add_program(
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


add_program("writes behind an epoch", _writes, lambda: made(Written(), torch.randint(9, (21, 6))))


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


add_program("phases", _phases)
add_program(
    "a part of every epoch",
    lambda net, opt, batches: [one_step(net, opt, *b) for _ in range(3) for b in itertools.islice(batches, 2)] and None,
)
add_program(
    "a new iterator for every batch",
    lambda net, opt, batches: [one_step(net, opt, *next(iter(batches))) for _ in range(4)] and None,
    lambda: classified(shuffle=True),
)


def _hooked(net: Any, opt: Any, batches: Any) -> None:
    """Gradients of outputs are clamped by a hook on the tensor."""
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        out.register_hook(lambda g: g.clamp(-0.05, 0.05))
        CE(out, y).backward()
        opt.step()


add_program("gradients of outputs clamped", _hooked)


def _retained(net: Any, opt: Any, batches: Any) -> None:
    """The next rate is made of the gradient of the outputs."""
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        out.retain_grad()
        CE(out, y).backward()
        opt.param_groups[0]["lr"] = 0.05 / (1 + float(out.grad.abs().sum()))
        opt.step()


add_program("a rate by the outputs' gradient", _retained)


def _parametrized(net: Any, opt: Any, batches: Any) -> None:
    """A layer gets a parametrization in mid-run."""
    for x, y in batches:
        one_step(net, opt, x, y)
    parametrize.register_parametrization(net.first, "weight", Half())
    opt = sgd(net)
    for x, y in batches:
        one_step(net, opt, x, y)


class Half(nn.Module):
    """Half of a weight."""

    def forward(self, w: Tensor) -> Tensor:
        return w / 2


add_program("parametrized in mid-run", _parametrized, lambda: classified(Named))


def _widened(net: Any, opt: Any, batches: Any) -> None:
    """A new class comes: the head grows."""
    for x, y in batches:
        one_step(net, opt, x, y)
    old = net.head
    net.head = nn.Linear(16, 4).double()
    with torch.no_grad():
        net.head.weight[:3] = old.weight
        net.head.bias[:3] = old.bias
    opt = sgd(net)
    for x, y in batches:
        one_step(net, opt, x, y)


add_program("the head grows", _widened, lambda: classified(Named))


def _update_bn(net: Any, opt: Any, batches: Any) -> None:
    """Statistics are made anew behind training, by torch's own function."""
    for x, y in batches:
        one_step(net, opt, x, y)
    torch.optim.swa_utils.update_bn(batches, net)


add_program(
    "statistics made anew",
    _update_bn,
    lambda: classified(lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)), 24),
    batch_norm="exact",
)


def _recalibrated(net: Any, opt: Any, batches: Any) -> None:
    """Statistics are reset and made by a pass in training mode without gradients."""
    for x, y in batches:
        one_step(net, opt, x, y)
    net[1].reset_running_stats()
    net.train()
    with torch.no_grad():
        for x, _ in batches:
            net(x)


add_program(
    "statistics reset",
    _recalibrated,
    lambda: classified(lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)), 24),
    batch_norm="exact",
)
add_program("wrapped in DataParallel", epochs(pairs(CE)), lambda: classified(lambda: nn.DataParallel(small_net())))
add_program(
    "an ensemble with weights of samples",
    epochs(lambda n, b: sum((CE(o, b[1], reduction="none") * b[2][:, i]).mean() for i, o in enumerate(n(b[0])))),
    lambda: made(Two(), normal(21, 8), torch.randint(3, (21,)), torch.randint(3, (21, 2)).double()),
)


def _anomalies(net: Any, opt: Any, batches: Any) -> None:
    with torch.autograd.set_detect_anomaly(True):
        for x, y in batches:
            one_step(net, opt, x, y)


add_program("anomalies detected", _anomalies)


def _forked(net: Any, opt: Any, batches: Any) -> None:
    """Noise of one seed per batch, apart from the other numbers."""
    for i, (x, y) in enumerate(batches):
        with torch.random.fork_rng():
            torch.manual_seed(i)
            noise = torch.randn_like(x)
        one_step(net, opt, x + 0.1 * noise, y)


add_program("noise of one seed per batch", _forked)


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


add_program("a pool of answers", _pool)


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


add_program(
    "a bank of losses",
    _bank,
    lambda: made(small_net(), normal(21, 8), torch.randint(3, (21,)), torch.arange(21), shuffle=True),
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


add_program("clipped by a percentile", _by_norms)


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


add_program("two halves of a batch", _variance)

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
            one_step(net, opt, x, y)


add_program(
    "a data set changed by epoch",
    _strengths,
    lambda: (lambda n: (n, sgd(n), DataLoader(Augmented(), 6)))(small_net().double()),
)
add_program(
    "a data set changed by epoch, a worker",
    _strengths,
    lambda: (lambda n: (n, sgd(n), DataLoader(Augmented(), 6, num_workers=1)))(small_net().double()),
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
            one_step(net, opt, x, y)


add_program("a sampler that is told the epoch", _told, lambda: classified(sampler=Epochs()))


class Shards(IterableDataset[Any]):
    """A stream that its workers share."""

    def __init__(self) -> None:
        self.x, self.y = normal(21, 8), torch.randint(3, (21,))

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        at, of = (info.id, info.num_workers) if info else (0, 1)
        for i in range(at, 21, of):
            yield self.x[i], self.y[i]


add_program(
    "a stream that workers share",
    epochs(pairs(CE)),
    lambda: (lambda n: (n, sgd(n), DataLoader(Shards(), 6, num_workers=2)))(small_net().double()),
)
add_program(
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
    )(small_net().double()),
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


add_program(
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
        small_net().double(), TensorDataset(normal(21, 8), torch.arange(21) % 3)
    ),
)
add_program(
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
        small_net().double(), TensorDataset(normal(21, 8), torch.arange(21) % 3)
    ),
)


def _prefetched(net: Any, opt: Any, batches: Any) -> None:
    """A prefetcher of its own: the next batch is read before this one is computed."""
    for _ in range(2):
        it = iter(batches)
        batch = next(it, None)
        while batch is not None:
            after = next(it, None)
            one_step(net, opt, *batch)
            batch = after


add_program("read one batch ahead", _prefetched, lambda: classified(shuffle=True))
add_program(
    "two epochs in a list",
    lambda net, opt, batches: [one_step(net, opt, *b) for b in [*batches, *batches]] and None,
    lambda: classified(shuffle=True),
)


def _sorted(net: Any, opt: Any, batches: Any) -> None:
    """Within an epoch the batches are learned in the order of their losses."""
    for _ in range(2):
        held = list(batches)
        with torch.no_grad():
            values = [CE(net(x), y).item() for x, y in held]
        for i in np.argsort(values):
            one_step(net, opt, *held[i])


add_program("batches by their losses", _sorted)
