"""Programs in which several habits meet, as whole scripts have them: losses, optimizers, data and figures together."""

from __future__ import annotations

import copy
import io
import itertools
import math
import random
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

from benchmarks.program_table import Made, epochs, made, normal, program, sgd
from benchmarks.program_table.common import BCE, CE, MSE, Named, classified, one_step, small_net

KIND = "fresh"


def add(name: str, loop: Any, make: Any = classified, **options: Any) -> None:
    """Add a program to the table."""
    program(KIND, f"fresh: {name}", make, loop, **options)


def usual(name: str, loss: Any, make: Any = classified, **options: Any) -> None:
    """A program of the usual loop, with ``loss(net, batch)``."""
    add(name, epochs(loss), make, **options)


class Gan(nn.Module):
    """Generator and critic, told apart by a word."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8))
        self.d = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x: Tensor, part: str = "d") -> Tensor:
        return self.g(x) if part == "g" else self.d(x)  # type: ignore[no-any-return]


def _hinge_gan(net: Any, _opt: Any, batches: Any) -> Any:
    """Two optimizers, hinge losses, the generator's running average."""
    of_g = torch.optim.Adam(net.g.parameters(), lr=2e-3, betas=(0.0, 0.9))
    of_d = torch.optim.Adam(net.d.parameters(), lr=2e-3, betas=(0.0, 0.9))
    shadow = {k: v.detach().clone() for k, v in net.g.named_parameters()}
    log = defaultdict(list)
    for x, z in itertools.chain(batches, batches):
        of_d.zero_grad(set_to_none=True)
        fake = net(z, "g").detach()
        loss = F.relu(1 - net(x, "d")).mean() + F.relu(1 + net(fake, "d")).mean()
        loss.backward()
        of_d.step()
        log["d"].append(loss.item())
        of_g.zero_grad(set_to_none=True)
        loss = -net(net(z, "g"), "d").mean()
        loss.backward()
        of_g.step()
        with torch.no_grad():
            for k, v in net.g.named_parameters():
                shadow[k].lerp_(v, 0.1)
    return {f"ema.{k}": v for k, v in shadow.items()}


add(
    "two optimizers, hinge losses, an averaged generator", _hinge_gan, lambda: made(Gan(), normal(24, 8), normal(24, 4))
)


class Pair(nn.Module):
    """Two generators and two critics for a cycle."""

    def __init__(self) -> None:
        super().__init__()
        self.ab, self.ba, self.da, self.db = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, a: Tensor, b: Tensor) -> Any:
        fake_b, fake_a = self.ab(a), self.ba(b)
        return fake_a, fake_b, self.ba(fake_b), self.ab(fake_a), self.da(fake_a), self.db(fake_b)


def _cycle(net: Any, _opt: Any, batches: Any) -> None:
    """One optimizer for both generators by itertools.chain, one for both critics, critics frozen in turn."""
    of_g = torch.optim.Adam(itertools.chain(net.ab.parameters(), net.ba.parameters()), lr=1e-3, betas=(0.5, 0.999))
    of_d = torch.optim.Adam(itertools.chain(net.da.parameters(), net.db.parameters()), lr=1e-3, betas=(0.5, 0.999))
    rates = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 - max(0, s - 1) / 4) for o in (of_g, of_d)]
    for _ in range(2):
        for a, b in batches:
            for p in itertools.chain(net.da.parameters(), net.db.parameters()):
                p.requires_grad_(False)
            of_g.zero_grad()
            _fa, _fb, ra, rb, sa, sb = net(a, b)
            (
                MSE(sa, torch.ones_like(sa)) + MSE(sb, torch.ones_like(sb)) + 10 * (F.l1_loss(ra, a) + F.l1_loss(rb, b))
            ).backward()
            of_g.step()
            for p in itertools.chain(net.da.parameters(), net.db.parameters()):
                p.requires_grad_(True)
            of_d.zero_grad()
            sa, sb = net(a.detach(), b.detach())[4:]
            (MSE(sa, torch.zeros_like(sa)) + MSE(sb, torch.zeros_like(sb))).backward()
            of_d.step()
        for r in rates:
            r.step()


add("a cycle of two generators, chained parameters", _cycle, lambda: made(Pair(), normal(24, 8), normal(24, 8)))


def _penalised(net: Any, opt: Any, batches: Any) -> None:
    """Slopes of the critic at points between real and made samples; the shares come with the batch."""
    for x, y, share in itertools.chain(batches, batches):
        between = (share * x + (1 - share) * y).requires_grad_(True)
        out = net(between)
        slope = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True, retain_graph=True)[0]
        penalty = ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        opt.zero_grad()
        (net(y).mean() - net(x).mean() + 10 * penalty).backward()
        opt.step()


add(
    "a penalty on slopes between two batches", _penalised,
    lambda: made(small_net(1), normal(24, 8), normal(24, 8), torch.rand(24, 1, dtype=torch.float64), lr=1e-3),
)  # fmt: skip


def _accumulated(net: Any, opt: Any, batches: Any) -> Any:
    """Accumulates three batches, steps at the end of an epoch, warms up by hand, clips, logs by a moving average."""
    step, smooth, history = 0, None, []
    for epoch in range(2):
        for i, (x, y) in enumerate(batches):
            loss = CE(net(x), y) / 3
            loss.backward()
            smooth = loss.item() if smooth is None else 0.9 * smooth + 0.1 * loss.item()
            if (i + 1) % 3 == 0 or i + 1 == len(batches):
                for group in opt.param_groups:
                    group["lr"] = 0.05 * min(1.0, (step + 1) / 4)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
                step += 1
        history.append((epoch, smooth))
    return {}


add("three batches a step, the rest by itself, a moving loss", _accumulated)


def _swa(net: Any, opt: Any, batches: Any) -> Any:
    """Averages of two kinds, a rate for them, statistics of BatchNorm anew."""
    swa, ema = AveragedModel(net), AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    rate = SWALR(opt, swa_lr=0.01, anneal_epochs=2)
    for epoch in range(3):
        for x, y in batches:
            one_step(net, opt, x, y)
            ema.update_parameters(net)
        if epoch:
            swa.update_parameters(net)
            rate.step()
    torch.optim.swa_utils.update_bn(batches, swa)
    return {f"{n}.{k}": v for n, m in (("swa", swa), ("ema", ema)) for k, v in m.module.state_dict().items()}


def _norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


add("averages of two kinds beside", _swa, lambda: classified(_norm_net, 24))


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation around another optimizer, as it is published."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, adaptive: bool = False, **kwargs: Any) -> None:
        super().__init__(params, dict(rho=rho, adaptive=adaptive, **kwargs))
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        """Climb."""
        norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                e_w = (torch.pow(p, 2) if group["adaptive"] else 1.0) * p.grad * scale.to(p)
                p.add_(e_w)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Come back and descend."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def _grad_norm(self) -> Tensor:
        return torch.norm(
            torch.stack([
                ((torch.abs(p) if g["adaptive"] else 1.0) * p.grad).norm(p=2)
                for g in self.param_groups for p in g["params"] if p.grad is not None
            ]),
            p=2,
        )  # fmt: skip


def _sam(adaptive: bool) -> Any:
    def loop(net: Any, opt: Any, batches: Any) -> None:
        opt = Sam(net.parameters(), torch.optim.SGD, rho=0.05, adaptive=adaptive, lr=0.05, momentum=0.9)
        for x, y in itertools.chain(batches, batches):
            F.cross_entropy(net(x), y, label_smoothing=0.1).backward()
            opt.first_step()
            F.cross_entropy(net(x), y, label_smoothing=0.1).backward()
            opt.second_step()

    return loop


add("sharpness, as it is published", _sam(False))
add("sharpness, adaptive, as it is published", _sam(True), lambda: classified(count=24))


class Lookahead:
    """Slow weights in the optimizer's state dictionary; not a torch optimizer."""

    def __init__(self, base: Any, k: int = 3, alpha: float = 0.5) -> None:
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        self.param_groups, self.state = base.param_groups, base.state
        self.slow = [[p.clone().detach() for p in g["params"]] for g in self.param_groups]

    def zero_grad(self) -> None:
        """Of the base."""
        self.base.zero_grad()

    def step(self) -> None:
        """A step of the base; every ``k`` steps both meet."""
        self.base.step()
        self.count += 1
        if self.count % self.k:
            return
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, q in zip(group["params"], slow, strict=True):
                q.data.add_(self.alpha * (p.data - q.data))
                p.data.copy_(q.data)


def _lookahead(net: Any, _opt: Any, batches: Any) -> None:
    ahead = Lookahead(torch.optim.RAdam(net.parameters(), lr=0.01))
    for _ in range(2):
        for x, y in batches:
            one_step(net, ahead, x, y)


add("slow weights in a wrapper that is no optimizer", _lookahead, lambda: classified(count=24))


def _lbfgs(net: Any, _opt: Any, batches: Any) -> None:
    """All data in one closure, with line search, then a pass by SGD."""
    whole = [torch.cat(c) for c in zip(*batches, strict=True)]
    opt = torch.optim.LBFGS(net.parameters(), max_iter=4, history_size=3, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        opt.zero_grad()
        loss = CE(net(whole[0]), whole[1]) + 1e-3 * sum(p.square().sum() for p in net.parameters())
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(closure)


add("all data in one closure", _lbfgs, within=1e-6)


def _reptile(net: Any, opt: Any, batches: Any) -> None:
    """Inner steps on a plain copy by functional_call; the outer gradient is the distance (Reptile)."""
    for x, y in itertools.chain(batches, batches):
        fast = {k: v.detach().clone().requires_grad_(True) for k, v in net.named_parameters()}
        plain = small_net().double()
        for _ in range(2):
            slopes = torch.autograd.grad(CE(functional_call(plain, fast, (x,)), y), list(fast.values()))
            fast = {
                k: (v - 0.1 * g).detach().requires_grad_(True) for (k, v), g in zip(fast.items(), slopes, strict=True)
            }
        opt.zero_grad()
        for k, p in net.named_parameters():
            p.grad = p.data - fast[k].data
        opt.step()


add("steps on a copy, the distance as gradient", _reptile, lambda: classified(count=24))


def _nt_xent(z: Tensor, t: float = 0.5) -> Tensor:
    """Both views of a batch in one matrix."""
    z = F.normalize(z, dim=1)
    n = z.size(0) // 2
    sim = (z @ z.t() / t).masked_fill(torch.eye(2 * n, dtype=torch.bool, device=z.device), float("-inf"))
    return F.cross_entropy(sim, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]).to(z.device))


usual(
    "two views in one matrix",
    lambda n, b: _nt_xent(torch.cat([n(b[0]), n(b[0] * 1.1 - 0.05)])),
    lambda: classified(lambda: small_net(6), 24),
)


class Clip(nn.Module):
    """Two towers and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 6), nn.Linear(5, 6)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image: Tensor, text: Tensor) -> Any:
        i, t = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        logits = self.logit_scale.exp() * i @ t.t()
        return logits, logits.t()


def _clip(net: Any, opt: Any, batches: Any) -> None:
    for image, text in itertools.chain(batches, batches):
        a, b = net(image, text)
        truth = torch.arange(len(image))
        opt.zero_grad()
        ((CE(a, truth) + CE(b, truth)) / 2).backward()
        opt.step()
        with torch.no_grad():
            net.logit_scale.clamp_(0, math.log(100))


add(
    "two towers, logits in the model, a clamped temperature",
    _clip,
    lambda: made(Clip(), normal(24, 8), normal(24, 5), lr=0.01),
)


class Moco(nn.Module):
    """A key encoder that follows, a queue and a pointer as buffers, all in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 6), nn.Linear(8, 6)
        for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
            b.data.copy_(a.data)
            b.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(6, 12), dim=0))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _enqueue(self, keys: Tensor) -> None:
        at = int(self.ptr)
        self.queue[:, at : at + len(keys)] = keys.t()
        self.ptr[0] = (at + len(keys)) % self.queue.shape[1]

    def forward(self, a: Tensor, b: Tensor) -> Any:
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            for p, k in zip(self.q.parameters(), self.k.parameters(), strict=True):
                k.data = k.data * 0.9 + p.data * 0.1
            k = F.normalize(self.k(b), dim=1)
        pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        self._enqueue(k)
        logits = torch.cat([pos, neg], 1) / 0.2
        return logits, torch.zeros(len(a), dtype=torch.long)


usual(
    "a queue, a pointer and a key encoder in forward",
    lambda n, b: CE(*n(b[0], b[1])),
    lambda: made(Moco(), normal(24, 8), normal(24, 8)),
)


class Ctc(nn.Module):
    """Frames, a recurrence, log-probabilities with time first."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 8, bidirectional=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.transpose(0, 1))[0]).log_softmax(-1)  # type: ignore[no-any-return]


def _ctc(net: Any, batch: Any) -> Tensor:
    x, y, lengths = batch
    out = net(x)
    return F.ctc_loss(out, y, torch.full((x.shape[0],), out.shape[0], dtype=torch.long), lengths, zero_infinity=True)


usual(
    "an alignment summed over, time first",
    _ctc,
    lambda: made(Ctc(), normal(24, 9, 6), torch.randint(1, 5, (24, 3)), torch.randint(1, 4, (24,))),
)


class Packed(nn.Module):
    """Documents in one row, attention within a document by a mask of block numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.pos = nn.Embedding(11, 8), nn.Embedding(12, 8)
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, doc: Tensor, pos: Tensor) -> Tensor:
        h = self.words(ids) + self.pos(pos)
        q, k, v = self.qkv(self.norm(h)).view(*ids.shape, 2, 12).transpose(1, 2).chunk(3, -1)
        mask = (doc[:, :, None] == doc[:, None, :]) & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.head(h + self.out(a.transpose(1, 2).reshape(*ids.shape, 8)))  # type: ignore[no-any-return]


def _packed_data() -> Made:
    ids, doc = torch.randint(11, (24, 12)), (torch.rand(24, 12) < 0.2).long().cumsum(1)
    start = torch.arange(12).expand(24, -1) * (F.pad(doc, (1, 0))[:, :-1] != doc)
    pos = torch.arange(12) - start.cummax(1).values
    return made(Packed(), ids, doc, pos)


def _packed(net: Any, batch: Any) -> Tensor:
    ids, doc, pos = batch
    out = net(ids, doc, pos)
    labels = ids[:, 1:].masked_fill(doc[:, 1:] != doc[:, :-1], -100)
    return F.cross_entropy(out[:, :-1].reshape(-1, 11), labels.reshape(-1), ignore_index=-100)


usual("documents packed into rows, borders ignored", _packed, _packed_data)


class Vae(nn.Module):
    """Returns what it needs for its loss, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.mu, self.lv, self.dec = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 3), nn.Linear(3, 8)

    def forward(self, x: Tensor, eps: Tensor) -> dict[str, Tensor]:
        h = F.elu(self.enc(x))
        mu, lv = self.mu(h), self.lv(h)
        return {"recon": self.dec(mu + eps * (0.5 * lv).exp()), "mu": mu, "logvar": lv}


def _beta(net: Any, opt: Any, batches: Any) -> None:
    """Beta rises; sums over features, means over the batch; free bits by dimension over the batch."""
    for step, (x, eps) in enumerate(itertools.chain(batches, batches)):
        o = net(x, eps)
        kl = -0.5 * (1 + o["logvar"] - o["mu"].pow(2) - o["logvar"].exp())
        beta = min(1.0, step / 5)
        loss = F.mse_loss(o["recon"], x, reduction="sum") / x.size(0) + beta * kl.mean(0).clamp(min=0.05).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()


add("sums over features, bits over the batch", _beta, lambda: made(Vae(), normal(24, 8), normal(24, 3), lr=0.01))
usual(
    "the loss is what the model returns, by name",
    lambda n, b: (o := n(*b))["recon"].sub(b[0]).square().sum(1).mean() + o["mu"].square().sum(-1).mean(),
    lambda: made(Vae(), normal(21, 8), normal(21, 3), lr=0.01),
)  # fmt: skip


class Denoiser(nn.Module):
    """An embedding of time, a classifier's class that is sometimes left out."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.label, self.body = nn.Embedding(10, 8), nn.Embedding(4, 8), small_net(8)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return self.body(x + self.time(t) + self.label(y))  # type: ignore[no-any-return]


def _guided(net: Any, opt: Any, batches: Any) -> Any:
    """Times, noise and left-out classes from a seeded generator of the loop's; min-SNR weights; a plain EMA copy."""
    g = torch.Generator().manual_seed(3)
    bar = torch.linspace(0.99, 0.05, 10, dtype=torch.float64)
    ema = copy.deepcopy({k: v.detach().clone() for k, v in net.state_dict().items()})
    for x, y in itertools.chain(batches, batches):
        t = torch.randint(0, 10, (x.shape[0],), generator=g)
        noise = torch.randn(x.shape, generator=g, dtype=x.dtype)
        y = torch.where(torch.rand(len(y), generator=g) < 0.2, 3, y)
        snr = bar[t] / (1 - bar[t])
        out = net(bar[t].sqrt()[:, None] * x + (1 - bar[t]).sqrt()[:, None] * noise, t, y)
        loss = (MSE(out, noise, reduction="none").mean(1) * snr.clamp(max=5) / snr).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        for k, v in net.state_dict().items():
            ema[k].mul_(0.9).add_(v, alpha=0.1)
    return {f"ema.{k}": v for k, v in ema.items()}


add("noise by a seeded generator, averages of the state", _guided, lambda: classified(Denoiser, 24))


def _mix(net: Any, opt: Any, batches: Any) -> None:
    """Mixed with the batch turned around, by a number of one seeded generator; soft targets."""
    rng = np.random.default_rng(0)
    for x, y in itertools.chain(batches, batches):
        lam = rng.beta(1.0, 1.0)
        lam = max(lam, 1 - lam)
        soft = F.one_hot(y, 3).to(x) * 0.9 + 0.1 / 3
        x, soft = x * lam + x.flip(0) * (1 - lam), soft * lam + soft.flip(0) * (1 - lam)
        opt.zero_grad()
        torch.sum(-soft * F.log_softmax(net(x), dim=-1), dim=-1).mean().backward()
        opt.step()


add("mixed with the batch turned around", _mix, lambda: classified(count=24))


def _weighted(net: Any, opt: Any, batches: Any) -> None:
    """Classes weighed in a criterion, smoothed and some ignored."""
    criterion = nn.CrossEntropyLoss(
        weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), ignore_index=2, label_smoothing=0.1
    )
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        criterion(net(x), y).backward()
        opt.step()


add("a criterion with weights, smoothing and ignored labels", _weighted)


class Tasks(nn.Module):
    """Two heads; log variances of tasks are parameters of the model, and the model makes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Any:
        h = F.relu(self.trunk(x))
        a, b = self.a(h), self.b(h).squeeze(-1)
        if y is None:
            return a, b
        losses = torch.stack([CE(a, y), MSE(b, z)])
        return (losses * torch.exp(-self.log_vars) + self.log_vars).sum(), {
            "ce": losses[0].item(),
            "mse": losses[1].item(),
        }


def _tasks(net: Any, opt: Any, batches: Any) -> None:
    best = math.inf
    for _ in range(2):
        net.train()
        for x, y, z in batches:
            loss, parts = net(x, y, z)
            assert set(parts) == {"ce", "mse"}
            opt.zero_grad()
            loss.backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            best = min(best, sum(float(CE(net(x)[0], y)) for x, y, _ in batches))


add(
    "tasks by their log variances, figures beside the loss",
    _tasks,
    lambda: made(Tasks(), normal(24, 8), torch.randint(3, (24,)), normal(24)),
)


def _hardest(z: Tensor, y: Tensor, margin: float = 0.3) -> Tensor:
    """Batch-hard triplets."""
    d = torch.cdist(z, z)
    same = y[:, None] == y[None, :]
    far = (d * same).max(1).values
    near = d.masked_fill(same, float("inf")).min(1).values
    return F.relu(far - near.clamp(max=10) + margin).mean()


usual("batch-hard triplets", lambda n, b: _hardest(n(b[0]), b[1]), lambda: classified(lambda: small_net(6), 24, 8))


def _ohem(net: Any, opt: Any, batches: Any) -> None:
    """The hardest 70 % of a batch count; losses above a quantile are clipped."""
    for x, y in itertools.chain(batches, batches):
        losses = CE(net(x), y, reduction="none")
        keep = int(0.7 * losses.numel())
        hard, _ = torch.topk(losses, keep)
        opt.zero_grad()
        hard.clamp(max=torch.quantile(losses.detach(), 0.9)).mean().backward()
        opt.step()


add("the hardest of a batch, clipped by a quantile", _ohem, lambda: classified(count=24))


def _persample(net: Any, opt: Any, batches: Any) -> None:
    """Private gradients by a loop over samples: clipped, summed, noise of one generator, put in by hand."""
    g = torch.Generator().manual_seed(1)
    for x, y in itertools.chain(batches, batches):
        total = [torch.zeros_like(p) for p in net.parameters()]
        for i in range(len(x)):
            net.zero_grad()
            CE(net(x[i : i + 1]), y[i : i + 1]).backward()
            norm = torch.sqrt(sum(p.grad.square().sum() for p in net.parameters()))
            factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
            for t, p in zip(total, net.parameters(), strict=True):
                t.add_(p.grad * factor)
        for t, p in zip(total, net.parameters(), strict=True):
            p.grad = (t + 0.1 * torch.randn(t.shape, generator=g, dtype=t.dtype)) / len(x)
        opt.step()


add("samples one by one, clipped, with noise", _persample, lambda: classified(count=24))


class Spectral(nn.Module):
    """Spectral norm, weight norm and an orthogonal layer, by parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.spectral_norm(nn.Linear(8, 16))
        self.b = parametrizations.weight_norm(nn.Linear(16, 16))
        self.c = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.silu(self.b(F.silu(self.a(x)))))  # type: ignore[no-any-return]


usual("spectral norm and weight norm", lambda n, b: CE(n(b[0]), b[1]), lambda: classified(Spectral, 24))


class LoraLinear(nn.Module):
    """A frozen layer and a product of small matrices, with dropout of none."""

    def __init__(self, base: nn.Linear, r: int = 2, alpha: int = 4) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / r
        self.A = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.A.T @ self.B.T) * self.scale  # type: ignore[no-any-return]


def _lora() -> Made:
    net = Named().double()
    net.requires_grad_(False)
    for name in ("first", "second"):
        setattr(net, name, LoraLinear(getattr(net, name)).double())
    net.head.requires_grad_(True)
    groups = [
        {"params": [p for n, p in net.named_parameters() if n.endswith("A")], "lr": 0.02},
        {"params": [p for n, p in net.named_parameters() if n.endswith("B")], "lr": 0.2},
        {"params": net.head.parameters(), "weight_decay": 0.1},
    ]
    data = TensorDataset(normal(24, 8), torch.randint(3, (24,)))
    return net, torch.optim.AdamW(groups, lr=0.01), DataLoader(data, 6)


def _lora_loop(net: Any, opt: Any, batches: Any) -> Any:
    """Trains adapters, then merges them into plain matrices."""
    rate = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[0.02, 0.2, 0.01], total_steps=8)
    for x, y in itertools.chain(batches, batches):
        one_step(net, opt, x, y)
        rate.step()
    with torch.no_grad():
        return {f"merged.{n}": (m := getattr(net, n)).base.weight + m.scale * m.B @ m.A for n in ("first", "second")}


add("adapters, three groups, merged in the end", _lora_loop, _lora)


def _phases(net: Any, _opt: Any, batches: Any) -> None:
    """The head alone, then all with a new optimizer and a smaller rate below."""
    for p in net.parameters():
        p.requires_grad = False
    for p in net.head.parameters():
        p.requires_grad = True
    first = torch.optim.Adam(filter(lambda p: p.requires_grad, net.parameters()), lr=0.01)
    for x, y in batches:
        one_step(net, first, x, y)
    for p in net.parameters():
        p.requires_grad = True
    body = [p for n, p in net.named_parameters() if not n.startswith("head")]
    second = torch.optim.Adam([{"params": body, "lr": 1e-3}, {"params": net.head.parameters()}], lr=0.01)
    for x, y in batches:
        one_step(net, second, x, y)


add("the head, then all with a new optimizer", _phases, lambda: classified(Named))


class Exits(nn.Module):
    """Three exits; in evaluation a sample leaves where it is sure."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)])
        self.heads = nn.ModuleList([nn.Linear(16, 3) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        outs = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = F.relu(block(x))
            outs.append(head(x))
            if not self.training and bool((outs[-1].softmax(-1).amax(-1) > 0.9).all()):
                break
        return outs if self.training else outs[-1]


def _exits(net: Any, opt: Any, batches: Any) -> Any:
    """Losses of exits weighed, the last teaches the others; the best state by accuracy is kept and put back."""
    best, kept = -1, None
    for _ in range(2):
        net.train()
        for x, y in batches:
            outs = net(x)
            loss = sum(w * CE(o, y) for w, o in zip((0.3, 0.3, 1.0), outs, strict=True))
            teacher = outs[-1].detach().softmax(-1)
            loss = loss + sum(F.kl_div(o.log_softmax(-1), teacher, reduction="batchmean") for o in outs[:-1])
            opt.zero_grad()
            loss.backward()
            opt.step()
        net.eval()
        right = 0
        with torch.no_grad():
            for x, y in batches:
                right += (net(x).argmax(1) == y).sum().item()
        if right >= best:
            best, kept = right, copy.deepcopy(net.state_dict())
    net.load_state_dict(kept)


add("exits taught by the last, the best state put back", _exits, lambda: classified(Exits, 24))


class Depth(nn.Module):
    """Blocks left out by a coin for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = (
            nn.Linear(8, 16),
            nn.ModuleList(nn.Linear(16, 16) for _ in range(3)),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            survive = 1 - (i + 1) / 6
            if self.training:
                if random.random() < survive:
                    x = x + F.relu(block(x))
            else:
                x = x + survive * F.relu(block(x))
        return self.head(x)  # type: ignore[no-any-return]


usual("blocks left out by a coin for the batch", lambda n, b: CE(n(b[0]), b[1]), lambda: classified(Depth, 24))


class Indexed(Dataset[Any]):
    """Samples with their number."""

    def __init__(self, n: int = 24) -> None:
        self.x, self.y = normal(n, 8), torch.randint(3, (n,))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i], i


class ByLoss(Sampler[int]):
    """The samples with the largest last losses first."""

    def __init__(self, n: int) -> None:
        self.scores = torch.full((n,), 10.0, dtype=torch.float64)

    def __iter__(self) -> Any:
        return iter(torch.argsort(self.scores, descending=True, stable=True).tolist())

    def __len__(self) -> int:
        return len(self.scores)


def _by_loss() -> Made:
    net, data = small_net().double(), Indexed()
    return net, sgd(net), DataLoader(data, 6, sampler=ByLoss(len(data)))


def _curriculum(net: Any, opt: Any, batches: Any) -> None:
    """Losses by number are told to the sampler."""
    for _ in range(3):
        for x, y, i in batches:
            losses = F.cross_entropy(net(x), y, reduction="none")
            opt.zero_grad()
            losses.mean().backward()
            opt.step()
            batches.sampler.scores[i] = losses.detach()


add("a sampler told every loss by number", _curriculum, _by_loss)


def _prioritised(net: Any, opt: Any, _batches: Any) -> None:
    """Double DQN: priorities by the error, drawn by numpy of one seed, weights over their largest, a soft target."""
    rng = np.random.default_rng(0)
    target = small_net().double()
    target.load_state_dict(net.state_dict())
    memory: list[Any] = []
    priority: list[float] = []
    for s, a in itertools.chain(_batches, _batches):
        for j in range(len(s)):
            memory.append((s[j], a[j], s[j].roll(1), s[j].sum()))
            priority.append(max(priority, default=1.0))
        p = np.array(priority) ** 0.6
        chosen = rng.choice(len(memory), 6, p=p / p.sum())
        state, act, after, reward = (torch.stack(c) for c in zip(*[memory[k] for k in chosen], strict=True))
        weight = torch.as_tensor((len(memory) * p[chosen] / p.sum()) ** -0.4)
        weight = weight / weight.max()
        with torch.no_grad():
            best = net(after).argmax(1, keepdim=True)
            wanted = reward + 0.9 * target(after).gather(1, best).squeeze(1)
        error = net(state).gather(1, act[:, None]).squeeze(1) - wanted
        opt.zero_grad()
        (weight * error.square()).mean().backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), 0.5)
        opt.step()
        for k, e in zip(chosen, error.detach().abs().tolist(), strict=True):
            priority[k] = e + 1e-5
        with torch.no_grad():
            for t, q in zip(target.parameters(), net.parameters(), strict=True):
                t.copy_(0.9 * t + 0.1 * q)


add("a memory with priorities by errors", _prioritised, lambda: classified(count=24))


def _reinforce(net: Any, opt: Any, batches: Any) -> None:
    """Actions come with the batch; the baseline is the mean reward of the batch; entropy besides."""
    for s, a in itertools.chain(batches, batches):
        reward = (s.sum(1) > 0).double() * (a == 1) + 0.5 * (a == 2)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
        dist = torch.distributions.Categorical(logits=net(s))
        opt.zero_grad()
        (-(dist.log_prob(a) * advantage).mean() - 0.01 * dist.entropy().mean()).backward()
        opt.step()


add("rewards less their mean, over their deviation", _reinforce, lambda: classified(count=24))


class Rows(IterableDataset[Any]):
    """Rows from a file-like text, a shuffle buffer, no length."""

    def __init__(self, lines: list[str], seed: int = 0) -> None:
        self.lines, self.seed = lines, seed

    def __iter__(self) -> Any:
        rng, buffer = random.Random(self.seed), []
        self.seed += 1
        for line in self.lines:
            *x, y = line.split(",")
            buffer.append((torch.tensor([float(v) for v in x], dtype=torch.float64), int(y)))
            if len(buffer) >= 5:
                yield buffer.pop(rng.randrange(len(buffer)))
        yield from buffer


def _rows() -> Made:
    x, y = normal(23, 8), torch.randint(3, (23,))
    net = small_net().double()
    lines = [",".join([*(repr(float(v)) for v in r), str(int(c))]) for r, c in zip(x, y, strict=True)]
    return net, torch.optim.AdamW(net.parameters(), lr=0.01), DataLoader(Rows(lines), 6, drop_last=False)


usual("rows of a text, shuffled in a buffer", lambda n, b: CE(n(b[0]), b[1]), _rows)


def _hooked(net: Any, opt: Any, batches: Any) -> Any:
    """Activations by a forward hook enter the loss; gradients are watched by hooks; hooks are removed."""
    seen: dict[str, Tensor] = {}
    norms: list[float] = []
    handles = [net.second.register_forward_hook(lambda _m, _i, o: seen.__setitem__("second", o))]
    handles.append(net.head.weight.register_hook(lambda g: norms.append(float(g.norm()))))
    for x, y in itertools.chain(batches, batches):
        out = net(x)
        opt.zero_grad()
        (CE(out, y) + 0.01 * seen["second"].abs().mean()).backward()
        opt.step()
    for h in handles:
        h.remove()
    return {"norms": torch.tensor(norms, dtype=torch.float64)}


add("hidden activations by a hook, norms by another", _hooked, lambda: classified(Named, 24))


class Steps(torch.autograd.Function):
    """Signs forward, a window backward; keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() < 1)


class Spiking(nn.Module):
    """Potentials leak over time; spikes by a window's gradient; a buffer counts calls, another the mean rate."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 16), nn.Linear(16, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("rate", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        v = torch.zeros(x.size(0), 16, dtype=x.dtype)
        total = 0.0
        for _ in range(3):
            v = 0.8 * v + self.inp(x)
            s = (Steps.apply(v - 0.5) + 1) / 2
            v = v * (1 - s.detach())
            total = total + s
        if self.training:
            self.calls += 1
            self.rate.mul_(0.9).add_(0.1 * total.detach().mean(0))
        return self.out(total)  # type: ignore[no-any-return]


usual("spikes, calls and rates counted in buffers", lambda n, b: CE(n(b[0]), b[1]), lambda: classified(Spiking, 24))


class Counting(nn.Module):
    """Warms a term up by its own count of steps, an attribute in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.steps = small_net(), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return self.body(x) * min(1.0, 0.5 + self.steps / 10)  # type: ignore[no-any-return]


usual("a scale by the model's own count of steps", lambda n, b: CE(n(b[0]), b[1]), lambda: classified(Counting, 24))


def _resumed(net: Any, opt: Any, batches: Any) -> Any:
    """Trains, writes model, optimizer, schedule and random states; makes all anew in between and goes on."""
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 8, eta_min=1e-3)
    best, patience, file = math.inf, 0, io.BytesIO()
    for epoch in range(4):
        net.train()
        total = 0.0
        for x, y in batches:
            total += one_step(net, opt, x, y).item() * x.size(0)
            rate.step()
        average = total / len(batches.dataset)
        if average < best - 1e-4:
            best, patience, file = average, 0, io.BytesIO()
            torch.save(
                {"epoch": epoch, "model": net.state_dict(), "optim": opt.state_dict(), "rng": torch.get_rng_state()},
                file,
            )
        else:
            patience += 1
            if patience > 1:
                break
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    net.load_state_dict(kept["model"])
    opt.load_state_dict(kept["optim"])
    torch.set_rng_state(kept["rng"])


add("patience by the mean loss, the best file read back", _resumed)


def _ensemble(net: Any, opt: Any, batches: Any) -> Any:
    """Three plain members by vmap are trained beside by their own SGD and teach the model."""
    members = [small_net().double() for _ in range(3)]
    params, buffers = stack_module_state(members)
    shell = copy.deepcopy(members[0]).to("meta")

    def call(p: Any, b: Any, x: Tensor) -> Tensor:
        return functional_call(shell, (p, b), (x,))

    for x, y in itertools.chain(batches, batches):
        with torch.no_grad():
            soft = vmap(call, in_dims=(0, 0, None))(params, buffers, x).softmax(-1).mean(0)
        opt.zero_grad()
        out = net(x)
        (0.5 * CE(out, y) + 2.0 * F.kl_div((out / 2).log_softmax(-1), soft, reduction="batchmean")).backward()
        opt.step()


add("taught by members called by vmap", _ensemble, lambda: classified(count=24))


class Tree(nn.Module):
    """A soft tree; leaves are a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.leaves = nn.Linear(8, 3), nn.Parameter(torch.randn(4, 3) * 0.5)

    def forward(self, x: Tensor) -> Any:
        g = self.gates(x).sigmoid()
        path = torch.stack(
            [g[:, 0] * g[:, 1], g[:, 0] * (1 - g[:, 1]), (1 - g[:, 0]) * g[:, 2], (1 - g[:, 0]) * (1 - g[:, 2])], 1
        )
        return path @ self.leaves.softmax(-1), path


def _tree(net: Any, opt: Any, batches: Any) -> None:
    """The use of paths over the batch is held even, through a running mean."""
    running = torch.full((4,), 0.25, dtype=torch.float64)
    for x, y in itertools.chain(batches, batches):
        out, path = net(x)
        use = 0.9 * running + 0.1 * path.mean(0)
        opt.zero_grad()
        (F.nll_loss((out + 1e-9).log(), y) + 0.1 * (use * use.log()).sum()).backward()
        opt.step()
        running = use.detach()


add("a soft tree, its paths held even by a running mean", _tree, lambda: classified(Tree, 24))


class Vq(nn.Module):
    """Codes by the nearest; the book follows by running sums; a number for how many are used."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("book", torch.randn(6, 4))
        self.register_buffer("size", torch.ones(6))
        self.register_buffer("sums", self.book.clone())

    def forward(self, x: Tensor) -> Any:
        z = self.enc(x)
        code = torch.cdist(z.detach(), self.book).argmin(1)
        hot = F.one_hot(code, 6).to(z)
        q = self.book[code]
        if self.training:
            with torch.no_grad():
                self.size.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.t() @ z, alpha=0.1)
                self.book.copy_(self.sums / self.size.clamp(min=1e-3)[:, None])
        p = hot.mean(0)
        used = torch.exp(-(p * (p + 1e-10).log()).sum())
        return self.dec(z + (q - z).detach()), MSE(z, q.detach()), used


def _vq(net: Any, opt: Any, batches: Any) -> None:
    log: deque[float] = deque(maxlen=10)
    for x, _ in itertools.chain(batches, batches):
        out, commit, used = net(x)
        opt.zero_grad()
        (MSE(out, x) + 0.25 * commit).backward()
        opt.step()
        log.append(used.item())


add("codes by the nearest, a book of running sums", _vq, lambda: classified(Vq, 24))


def _balanced() -> Made:
    net, y = small_net().double(), torch.randint(3, (24,))
    weights = 1.0 / torch.bincount(y, minlength=3).clamp(min=1)[y].double()
    sampler = WeightedRandomSampler(weights, 24, replacement=True, generator=torch.Generator().manual_seed(7))
    return net, sgd(net), DataLoader(TensorDataset(normal(24, 8), y), 6, sampler=sampler)


def _logits_adjusted(net: Any, opt: Any, batches: Any) -> None:
    """Logits are shifted by priors of the data set; figures by class."""
    prior = torch.bincount(batches.dataset.tensors[1], minlength=3).double() + 1
    shift = (prior / prior.sum()).log()
    seen = torch.zeros(3)
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x) + shift, y).backward()
        opt.step()
        seen += torch.bincount(y, minlength=3)


add("drawn by class, logits shifted by priors", _logits_adjusted, _balanced)


def _scaled(net: Any, opt: Any, batches: Any) -> None:
    """A scaler by hand: the loss times a scale, gradients divided, steps left out, the scale moved."""
    scale, good = 2.0**10, 0
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        (CE(net(x), y) * scale).backward()
        finite = all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)
        if not finite:
            scale /= 2
            continue
        for p in net.parameters():
            p.grad.div_(scale)
        opt.step()
        good += 1
        if good % 3 == 0:
            scale *= 2


add("a scaler by hand", _scaled)


def _multilabel(net: Any, opt: Any, batches: Any) -> None:
    """Labels of several classes, the positives' weight by the batch, macro figures in evaluation."""
    for x, y in itertools.chain(batches, batches):
        hot = F.one_hot(y, 3).double()
        positive = (len(hot) - hot.sum(0)) / hot.sum(0).clamp(min=1)
        opt.zero_grad()
        BCE(net(x), hot, pos_weight=positive).backward()
        opt.step()


add("positives weighed by the batch", _multilabel, lambda: classified(count=24))


class Net2d(nn.Module):
    """A small U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.d1, self.d2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 1, 1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.norm(self.d1(x)))
        return self.out(torch.cat([a, self.up(F.relu(self.d2(a)))], 1))  # type: ignore[no-any-return]


def _dice(net: Any, batch: Any) -> Tensor:
    """Over the batch for one term, by sample for another."""
    p, y = net(batch[0]).sigmoid(), batch[1]
    whole = 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)
    each = 1 - (2 * (p * y).flatten(1).sum(1) + 1) / ((p + y).flatten(1).sum(1) + 1)
    return whole + each.mean() + F.binary_cross_entropy(p, y)


usual(
    "maps, overlaps of the batch and of samples",
    _dice,
    lambda: made(Net2d(), normal(18, 2, 8, 8), (torch.rand(18, 1, 8, 8) > 0.6).double()),
)


def _pseudo_inverse(net: Any, opt: Any, batches: Any) -> Any:
    """Bodies are trained; the head is solved by least squares over all features of the epoch, then put in."""
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
        net.eval()
        with torch.no_grad():
            feats, hots = [], []
            for x, y in batches:
                feats.append(F.relu(net.second(F.relu(net.first(x)))))
                hots.append(F.one_hot(y, 3).double())
            h, t = torch.cat(feats), torch.cat(hots)
            w = torch.linalg.solve(h.t() @ h + 10 * torch.eye(16, dtype=h.dtype), h.t() @ t)
            net.head.weight.lerp_(w.t(), 0.5)
        net.train()


add("a head solved over features of the epoch", _pseudo_inverse, lambda: classified(Named, 24))


class Unit(nn.Module):
    """The columns of a weight are of length one."""

    def forward(self, w: Tensor) -> Tensor:
        return w / w.norm(dim=0, keepdim=True).clamp(min=1e-6)


def _arc_make() -> Made:
    net = small_net(6)
    head = nn.Linear(6, 3, bias=False)
    parametrize.register_parametrization(head, "weight", Unit())
    return classified(lambda: nn.Sequential(net, head), 24)


def _arc(net: Any, batch: Any) -> Tensor:
    """Angles with a margin for the right class."""
    cos = net(batch[0]).tanh().clamp(-0.999, 0.999)
    theta = torch.acos(cos) + 0.2 * F.one_hot(batch[1], 3)
    return CE(8 * torch.cos(theta), batch[1])


usual("a margin of angles, a parametrized head", _arc, _arc_make)
