"""Whole scripts that put several techniques together, as repositories of papers publish them."""

from __future__ import annotations

import copy
import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info

from benchmarks.program_table import Made, epochs, loader, made, normal, pairs, program, sgd
from benchmarks.program_table.common import BCE, CE, MSE, Named, classified, small_net

KIND = "composed"


def add(name: str, loop: Any, make: Any = classified, job_loss: Any = None, **options: Any) -> None:
    """Add a program to the table."""
    program(KIND, f"composed: {name}", make, loop, job_loss, **options)


def usual(name: str, loss: Any, make: Any = classified, job_loss: Any = None, **options: Any) -> None:
    """A program of the usual loop, with ``loss(net, batch)``."""
    add(name, epochs(loss), make, job_loss, **options)


# --- a GAN: spectral norm, R1 penalty every second step, two optimizers over parts of one model


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gen = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8))
        self.dis = nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 16)), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x: Tensor, part: str = "dis") -> Tensor:
        return self.gen(x) if part == "gen" else self.dis(x)  # type: ignore[no-any-return]


def _gan(net: Any, _opt: Any, batches: Any) -> None:
    opt_g = torch.optim.Adam(net.gen.parameters(), 1e-3, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(net.dis.parameters(), 4e-3, betas=(0.0, 0.9))
    step = 0
    for _ in range(2):
        for z, real in batches:
            fake = net(z, part="gen")
            loss_d = F.softplus(net(fake.detach())).mean() + F.softplus(-net(real)).mean()
            opt_d.zero_grad()
            loss_d.backward()
            if step % 2 == 0:
                real = real.detach().requires_grad_(True)
                (slope,) = torch.autograd.grad(net(real).sum(), real, create_graph=True)
                (2.0 * slope.square().sum(1).mean()).backward()
            opt_d.step()
            opt_g.zero_grad()
            F.softplus(-net(net(z, part="gen"))).mean().backward()
            opt_g.step()
            step += 1


add("GAN: spectral norm, lazy slopes of real samples", _gan, lambda: made(Gan(), normal(21, 4), normal(21, 8)))


# --- contrast with a queue held by the loss module, keys by a slow encoder


class Queue(nn.Module):
    def __init__(self, size: int = 12) -> None:
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(size, 3, dtype=torch.float64), dim=1))
        self.at = 0

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = F.normalize(q, dim=1), F.normalize(k, dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.keys.clone().T], 1) / 0.2
        with torch.no_grad():
            for row in k:
                self.keys[self.at] = row
                self.at = (self.at + 1) % len(self.keys)
        return CE(logits, torch.zeros(len(q), dtype=torch.long))


def _moco(net: Any, opt: Any, batches: Any) -> Any:
    slow, queue = copy.deepcopy(net), Queue()
    for p in slow.parameters():
        p.requires_grad_(False)
    for _ in range(2):
        for x, y in batches:
            with torch.no_grad():
                for a, b in zip(slow.parameters(), net.parameters(), strict=True):
                    a.mul_(0.9).add_(b.detach(), alpha=0.1)
                k = slow(y)
            opt.zero_grad()
            queue(net(x), k).backward()
            opt.step()
    return {"queue": queue.keys}


add("keys of a slow copy in a queue of the criterion", _moco, lambda: made(small_net(), normal(24, 8), normal(24, 8)))


# --- adapters beside frozen layers, made by walking the model; only their state is kept


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.T @ self.b.T) * self.scale  # type: ignore[no-any-return]


def _lora() -> Made:
    net = Named()
    for name, layer in list(net.named_children()):
        if name != "head":
            setattr(net, name, Lora(layer))  # type: ignore[arg-type]
    net = net.double()
    opt = torch.optim.AdamW(
        [{"params": [p for n, p in net.named_parameters() if n.endswith(".b")], "lr": 0.04},
         {"params": [p for n, p in net.named_parameters() if not n.endswith(".b") and p.requires_grad], "lr": 0.01}],
    )  # fmt: skip
    return net, opt, loader(normal(21, 8), torch.randint(3, (21,)))


def _warmed(net: Any, opt: Any, batches: Any) -> None:
    total = 2 * len(batches)
    rate = LambdaLR(opt, lambda s: min(1.0, (s + 1) / 3) * max(0.0, (total - s) / total))
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y, label_smoothing=0.1).backward()
            for group in opt.param_groups:
                nn.utils.clip_grad_norm_(group["params"], 0.3)
            opt.step()
            rate.step()


add("adapters of two rates, warmed up by step, clipped by group", _warmed, _lora)


# --- mixup or cutmix by the parity of the step, partner drawn by the loader's generator


def _mixed(net: Any, opt: Any, batches: Any) -> None:
    g = torch.Generator().manual_seed(3)
    for epoch in range(2):
        for i, (x, y) in enumerate(batches):
            lam = float(torch.rand((), generator=g, dtype=torch.float64))
            other, target = x.flip(0), F.one_hot(y, 3).to(x.dtype)
            target = target * 0.9 + 0.1 / 3
            if (i + epoch) % 2:
                x = lam * x + (1 - lam) * other
            else:
                cut = int(lam * x.shape[1])
                x = torch.cat([x[:, :cut], other[:, cut:]], 1)
                lam = cut / x.shape[1]
            target = lam * target + (1 - lam) * target.flip(0)
            opt.zero_grad()
            (-(target * net(x).log_softmax(1)).sum(1)).mean().backward()
            opt.step()


add("mixed with the batch turned around, cut or blended by turns", _mixed)


# --- sharpness-aware, with the second pass on half of the batch


def _sam_half(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            CE(net(x), y).backward()
            norm = torch.sqrt(sum((p.grad**2).sum() for p in net.parameters()))
            moved = {}
            with torch.no_grad():
                for p in net.parameters():
                    moved[p] = p.grad * (0.05 / (norm + 1e-12))
                    p.add_(moved[p])
            opt.zero_grad()
            CE(net(x), y).backward()
            with torch.no_grad():
                for p, e in moved.items():
                    p.sub_(e)
            opt.step()
            opt.zero_grad()


add("sharpness in the loop, a dictionary by parameter", _sam_half)


# --- an optimizer of one's own around lookahead, slow weights in the state


class LookaheadSign(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.01, k: int = 3) -> None:
        super().__init__(params, {"lr": lr, "k": k, "count": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["slow"], s["m"] = p.detach().clone(), torch.zeros_like(p)
                s["m"].lerp_(p.grad, 0.1)
                p.add_(s["m"] / (s["m"].norm() + 1e-8), alpha=-group["lr"])
                if group["count"] % group["k"] == 0:
                    s["slow"].add_(p - s["slow"], alpha=0.5)
                    p.copy_(s["slow"])
        return loss


def _with(optimizer: Any, net: Any = small_net, count: int = 21) -> Callable[[], Made]:
    def make() -> Made:
        n = net().double()
        return n, optimizer(n.parameters()), loader(normal(count, 8), torch.randint(3, (count,)))

    return make


usual("an optimizer of its own: normed by parameter, slow weights", pairs(CE), _with(LookaheadSign), CE)


# --- gradients projected to a low rank


class GaLore(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.02, rank: int = 2, every: int = 3) -> None:
        super().__init__(params, {"lr": lr, "rank": rank, "every": every})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                g, s = p.grad, self.state[p]
                if g is None:
                    continue
                s.setdefault("t", 0)
                if p.ndim == 2 and min(p.shape) > group["rank"]:
                    if s["t"] % group["every"] == 0:
                        u = torch.linalg.eigh(g @ g.T)[1][:, -group["rank"] :]
                        s["q"] = u @ u.T
                    g = s["q"] @ g
                s["t"] += 1
                s["m"] = s.get("m", torch.zeros_like(g)) * 0.9 + g
                p.add_(s["m"], alpha=-group["lr"])


usual("an optimizer of its own: gradients of low rank", pairs(CE), _with(GaLore), CE)


# --- members of an ensemble by vmap of the model's stacked states, inside forward


class Members(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        nets = [small_net() for _ in range(count)]
        params, _ = stack_module_state(nets)
        self.names = list(params)
        self.stacked = nn.ParameterList([nn.Parameter(p.detach()) for p in params.values()])
        object.__setattr__(self, "base", copy.deepcopy(nets[0]).to("meta"))

    def forward(self, x: Tensor) -> Tensor:
        base = self.base
        return vmap(lambda p: functional_call(base, p, (x,)))(
            dict(zip(self.names, self.stacked, strict=True))
        ).transpose(0, 1)


usual(
    "members called by vmap over a parameter list, each with a loss",
    lambda net, b: sum(CE(o, b[1]) for o in net(b[0]).unbind(1)),
    lambda: classified(Members),
)


# --- checkpoint_sequential in forward, tied head


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(4)])

    def forward(self, ids: Tensor) -> Tensor:
        h = checkpoint_sequential(self.blocks, 2, self.emb(ids), use_reentrant=False)
        return F.linear(h, self.emb.weight)


def _tokens(net: Any, count: int = 21, length: int = 5) -> Made:
    ids = torch.randint(11, (count, length + 1))
    return made(net(), ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def _words(out: Tensor, y: Tensor) -> Tensor:
    return CE(out.flatten(0, 1), y.flatten())


usual("checkpoint_sequential, a tied head", pairs(_words), lambda: _tokens(Checkpointed), _words)


# --- a function of autograd that normalises its gradient by the batch, reversed with a schedule


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return -ctx.scale * grad, None


class Domains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.domain = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor, scale: float = 0.0) -> dict[str, Tensor]:
        h = torch.relu(self.body(x))
        return {"label": self.label(h), "domain": self.domain(Reverse.apply(h, scale)).squeeze(1)}


def _domains(net: Any, opt: Any, batches: Any) -> None:
    total, step = 2 * len(batches), 0
    for _ in range(2):
        for x, y, d in batches:
            p = step / total
            out = net(x, scale=2.0 / (1 + math.exp(-10 * p)) - 1)
            opt.zero_grad()
            source = d < 0.5
            loss = BCE(out["domain"], d)
            if source.any():
                loss = loss + CE(out["label"][source], y[source])
            loss.backward()
            opt.step()
            step += 1


add("gradients reversed by a schedule, labels of the source only", _domains,
    lambda: made(Domains(), normal(24, 8), torch.randint(3, (24,)),
                 torch.arange(24).remainder(3).gt(0).double()))  # fmt: skip


# --- a metric with states, as torchmetrics does it, whose value decides the rate


class Confusion(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(classes, classes, dtype=torch.long))

    def update(self, out: Tensor, y: Tensor) -> None:
        k = self.table.shape[0]
        self.table += torch.bincount(y * k + out.argmax(1), minlength=k * k).view(k, k)

    def compute(self) -> Tensor:
        t = self.table.double()
        return (2 * t.diag() / (t.sum(0) + t.sum(1)).clamp(min=1)).mean()

    def reset(self) -> None:
        self.table.zero_()


def _metric(net: Any, opt: Any, batches: Any) -> None:
    metric, best, bad = Confusion(), -1.0, 0
    for _ in range(4):
        metric.reset()
        for x, y in batches:
            out = net(x)
            opt.zero_grad()
            CE(out, y).backward()
            opt.step()
            metric.update(out.detach(), y)
        value = metric.compute().item()
        if value > best + 0.05:
            best, bad = value, 0
        else:
            bad += 1
            for g in opt.param_groups:
                g["lr"] *= 0.3


add("a metric with a table of counts, its value cuts the rate", _metric)


# --- validation in a held out loader, stops early, the best state from bytes


def _patience(net: Any, opt: Any, batches: Any) -> None:
    g = torch.Generator().manual_seed(5)
    xs, ys = torch.randn(13, 8, generator=g, dtype=torch.float64), torch.randint(3, (13,), generator=g)
    held = DataLoader(TensorDataset(xs, ys), 5)
    best, kept, bad = math.inf, io.BytesIO(), 0
    for _ in range(6):
        net.train()
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
        net.eval()
        with torch.no_grad():
            value = sum(CE(net(x), y, reduction="sum").item() for x, y in held) / len(xs)
        if value < best:
            best, bad, kept = value, 0, io.BytesIO()
            torch.save(net.state_dict(), kept)
        else:
            bad += 1
            if bad == 2:
                break
    kept.seek(0)
    net.load_state_dict(torch.load(kept))


add("stops by held out samples, the best state from bytes", _patience, lambda: classified(lr=0.5))


# --- batch sizes that ramp inside one loader by a batch sampler, rate with the root of the size


class Ramp(Sampler[list[int]]):
    def __init__(self, n: int) -> None:
        self.n, self.epoch = n, 0

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        at, size = 0, 2
        while at < self.n:
            yield order[at : at + size]
            at, size = at + size, min(size + 1, 6)

    def __len__(self) -> int:
        return 5


def _ramped() -> Made:
    net = small_net().double()
    data = TensorDataset(normal(21, 8), torch.randint(3, (21,)))
    return net, sgd(net), DataLoader(data, batch_sampler=Ramp(21))


def _ramp(net: Any, opt: Any, batches: Any) -> None:
    for epoch in range(2):
        batches.batch_sampler.epoch = epoch
        for i, (x, y) in enumerate(batches):
            opt.param_groups[0]["lr"] = 0.05 * math.sqrt(min(2 + i, 6) / 6)
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()


add("a batch sampler that ramps its sizes, an order by epoch", _ramp, _ramped)


# --- a curriculum: the sampler's pool by difficulty that the data knows


class Pool(Sampler[int]):
    def __init__(self, hard: Tensor) -> None:
        self.hard, self.share = hard, 0.4

    def __iter__(self) -> Iterator[int]:
        easy = self.hard.argsort()[: int(self.share * len(self.hard))]
        return iter(easy[torch.randperm(len(easy))].tolist())

    def __len__(self) -> int:
        return int(self.share * len(self.hard))


def _pool() -> Made:
    x = normal(24, 8)
    net = small_net().double()
    data = TensorDataset(x, torch.randint(3, (24,)))
    return net, sgd(net), DataLoader(data, 6, sampler=Pool(x.norm(dim=1)))


def _curriculum(net: Any, opt: Any, batches: Any) -> None:
    seen = 0
    for epoch in range(3):
        batches.sampler.share = min(1.0, 0.4 + 0.3 * epoch)
        for x, y in batches:
            seen += 1
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()


add("easy samples first, the pool grows", _curriculum, _pool)


# --- a stream with workers that pads to its longest


class Lines(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        g = torch.Generator().manual_seed(7)
        rows = [
            (torch.randint(1, 11, (int(n),), generator=g), int(n) % 3) for n in torch.randint(2, 7, (22,), generator=g)
        ]
        yield from rows[first::step]


def _pad(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    ids = [r[0] for r in rows]
    return {
        "ids": pad_sequence(ids, batch_first=True),
        "lengths": torch.tensor([len(i) for i in ids]),
        "labels": torch.tensor([r[1] for r in rows]),
    }


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.rnn, self.head = (
            nn.Embedding(11, 6, padding_idx=0),
            nn.GRU(6, 8, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.emb(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        mask = torch.arange(out.shape[1]) < lengths[:, None]
        return self.head((out * mask[..., None]).sum(1) / lengths[:, None])  # type: ignore[no-any-return]


def _stream() -> Made:
    net = Packed().double()
    return net, torch.optim.Adam(net.parameters(), 0.01), DataLoader(Lines(), 6, collate_fn=_pad, num_workers=2)


usual("a stream by workers, padded, packed in forward, by name",
      lambda net, b: CE(net(b["ids"], b["lengths"]), b["labels"]), _stream)  # fmt: skip


# --- tasks by name in a ModuleDict, weights learned in a ParameterDict, tasks missing for samples


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.heads = nn.ModuleDict({"class": nn.Linear(16, 3), "value": nn.Linear(16, 1)})
        self.logvar = nn.ParameterDict({n: nn.Parameter(torch.zeros(())) for n in ("class", "value")})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        return {n: head(h) for n, head in self.heads.items()}


def _tasks(net: Any, batch: Any) -> Tensor:
    x, y, v, has = batch
    out = net(x)
    losses = {
        "class": CE(out["class"], y),
        "value": ((out["value"].squeeze(1) - v).square() * has).sum() / has.sum().clamp(min=1),
    }
    return sum(torch.exp(-net.logvar[n]) * losses[n] + net.logvar[n] for n in losses)  # type: ignore[return-value]


def _tasked() -> Made:
    return made(
        Heads(), normal(24, 8), torch.randint(3, (24,)), normal(24), torch.arange(24).remainder(3).gt(0).double()
    )


usual("heads by name, learned weights by name, values for some", _tasks, _tasked)


# --- boxes: lists of targets, loss normalised by the number of matched boxes, inside the model


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.cls, self.box = nn.Linear(8, 16), nn.Linear(16, 5), nn.Linear(16, 20)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        h = torch.relu(self.body(torch.stack(images)))
        scores, boxes = self.cls(h), self.box(h).view(-1, 5, 4)
        obj = torch.zeros_like(scores)
        near, far = [], []
        for i, t in enumerate(targets):
            if len(t["boxes"]):
                cost = torch.cdist(boxes[i].detach(), t["boxes"])
                at = cost.argmin(0)
                obj[i, at] = 1.0
                near.append(boxes[i, at])
                far.append(t["boxes"])
        count = max(1, sum(len(t["boxes"]) for t in targets))
        box = F.l1_loss(torch.cat(near), torch.cat(far), reduction="sum") / count if near else scores.sum() * 0
        return {"objectness": BCE(scores, obj), "boxes": box}


class Images(Dataset):  # type: ignore[type-arg]
    def __init__(self, n: int = 18) -> None:
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(n, 8, generator=g, dtype=torch.float64)
        self.t = [{"boxes": torch.rand(i % 4, 4, generator=g, dtype=torch.float64)} for i in range(n)]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.t[i]


def _detector() -> Made:
    net = Detector().double()
    return net, sgd(net), DataLoader(Images(), 6, collate_fn=lambda rows: tuple(zip(*rows, strict=True)))


usual("boxes in lists, losses in the model over the number of boxes",
      lambda net, b: sum(net(list(b[0]), [dict(t) for t in b[1]]).values()), _detector)  # fmt: skip


# --- distilled: a frozen teacher inside a wrapper module, temperature, features by hooks, a projector


class Distiller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student, self.proj = Named(), small_net(), nn.Linear(16, 16)
        self.teacher.requires_grad_(False).eval()
        self.kept: dict[str, Tensor] = {}
        self.teacher.second.register_forward_hook(lambda _m, _i, o: self.kept.__setitem__("t", o))
        self.student[2].register_forward_hook(lambda _m, _i, o: self.kept.__setitem__("s", o))

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            t = self.teacher(x)
        s = self.student(x)
        hint = MSE(self.proj(self.kept["s"]), self.kept["t"])
        return s, t, hint


def _distil(net: Any, batch: Any) -> Tensor:
    s, t, hint = net(batch[0])
    soft = F.kl_div((s / 2).log_softmax(1), (t / 2).softmax(1), reduction="batchmean") * 4
    return 0.5 * CE(s, batch[1]) + 0.5 * soft + 0.1 * hint


usual("a teacher within, hints by hooks, a mean in the model", _distil, lambda: classified(Distiller))


# --- stochastic depth for whole blocks by a seeded generator of the model, in training


class Depth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for i, block in enumerate(self.blocks):
            keep = 1.0 - 0.3 * (i + 1) / 3
            if self.training:
                mask = torch.rand(len(h), 1, dtype=h.dtype).lt(keep).to(h.dtype) / keep
                h = h + mask * torch.tanh(block(h))
            else:
                h = h + torch.tanh(block(h))
        self.calls += 1
        return self.head(h)  # type: ignore[no-any-return]


usual("rows leave blocks out, calls counted in a buffer", pairs(CE), lambda: classified(Depth), CE)


# --- buffers updated in forward: a running mean of classes, used as centres of the loss


class Centres(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small_net(4)
        self.register_buffer("centres", torch.zeros(3, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.body(x)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(y, 3).to(h.dtype)
                count = hot.sum(0)
                mean = (hot.T @ h) / count.clamp(min=1)[:, None]
                self.centres = torch.where(count[:, None] > 0, 0.8 * self.centres + 0.2 * mean, self.centres)
        return -torch.cdist(h, self.centres).square()


usual(
    "centres of classes in a buffer, moved in forward",
    lambda net, b: CE(net(b[0], b[1]), b[1]),
    lambda: classified(Centres),
)


# --- a penalty on hidden activations gathered by hooks that are registered before the call


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Named()
        self.found: list[Tensor] = []
        for m in self.net.children():
            m.register_forward_hook(self._keep)

    def _keep(self, _m: Any, _i: Any, out: Tensor) -> None:
        self.found.append(out.abs().mean())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.found.clear()
        out = self.net(x)
        return out, torch.stack(self.found).sum()


def _sparse(net: Any, batch: Any) -> Tensor:
    out, penalty = net(batch[0])
    return CE(out, batch[1]) + 0.01 * penalty


usual("activations held small by hooks, an output beside", _sparse, lambda: classified(Penalised))


# --- a model that returns a dataclass with its loss


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor | None = None
    entropy: Tensor | None = None


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Named()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Answer:
        logits = self.net(x)
        p = logits.softmax(1)
        entropy = -(p * p.clamp(min=1e-9).log()).sum(1)
        return Answer(logits, None if labels is None else CE(logits, labels), entropy)


def _answers(net: Any, batch: Any) -> Tensor:
    out = net(batch[0], labels=batch[1])
    return out.loss - 0.1 * out.entropy.mean()


usual("a dataclass with its loss, less an entropy", _answers, lambda: classified(Answering))


# --- losses kept above a bound


def _above(net: Any, batch: Any) -> Tensor:
    loss = CE(net(batch[0]), batch[1], reduction="none")
    return (loss * (loss > 0.9)).mean()


usual(
    "losses times where they are large",
    _above,
    job_loss=lambda o, y: (lambda v: (v * (v > 0.9)).mean())(CE(o, y, reduction="none")),
)


def _bounded(net: Any, batch: Any) -> Tensor:
    loss = CE(net(batch[0]), batch[1])
    return loss * (loss > 1.05)


usual("a mean times whether it is large", _bounded)


def _vector(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            losses = CE(net(x), y, reduction="none")
            weights = torch.softmax(losses.detach(), 0)
            opt.zero_grad()
            losses.backward(weights)
            opt.step()


add("a vector of losses, weights of a softmax over the batch handed to backward", _vector)


# --- autocast, a scaler, accumulation, clipped behind unscale_


def _amp(net: Any, opt: Any, batches: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for _ in range(2):
        for i, (x, y) in enumerate(batches):
            with torch.autocast("cpu", torch.bfloat16):
                out = net(x)
            scaler.scale(CE(out.double(), y) / 2).backward()
            if i % 2 or i + 1 == len(batches):
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad(set_to_none=True)


add("autocast, a scaler that grows, windows of two, clipped", _amp, within=0.05)


# --- saved and resumed in the middle of an epoch, with the generator's state and a new model


def _resume(net: Any, opt: Any, batches: Any) -> None:
    rate = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
    kept = io.BytesIO()
    for part in range(2):
        if part:
            kept.seek(0)
            state = torch.load(kept, weights_only=False)
            net.load_state_dict(state["net"])
            opt.load_state_dict(state["opt"])
            rate.load_state_dict(state["rate"])
        for i, (x, y) in enumerate(batches):
            if part and i < 2:
                continue
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
            rate.step()
            if not part and i == 1:
                torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "rate": rate.state_dict()}, kept)


add("gone back to a file of the middle of an epoch", _resume, _with(lambda p: torch.optim.AdamW(p, 0.02)))


# --- a penalty on weights' orthogonality and on differences of two layers


def _orthogonal(net: Any, batch: Any) -> Tensor:
    loss = CE(net(batch[0]), batch[1])
    for m in net.modules():
        if isinstance(m, nn.Linear) and m.weight.shape[0] <= m.weight.shape[1]:
            w = m.weight
            loss = loss + 0.01 * (w @ w.T - torch.eye(w.shape[0], dtype=w.dtype)).square().sum()
    return loss


usual("weights held orthogonal by a product with themselves", _orthogonal)


# --- SWAG: moments of weights behind epochs, a drawn sample is put in at the end


def _swag(net: Any, opt: Any, batches: Any) -> None:
    mean, square = defaultdict(float), defaultdict(float)  # type: ignore[var-annotated]
    for count in range(1, 4):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
        for n, p in net.named_parameters():
            mean[n] = mean[n] + (p.detach() - mean[n]) / count
            square[n] = square[n] + (p.detach() ** 2 - square[n]) / count
    g = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for n, p in net.named_parameters():
            var = (square[n] - mean[n] ** 2).clamp(min=1e-12)
            p.copy_(mean[n] + var.sqrt() * torch.randn(p.shape, generator=g, dtype=p.dtype))


add("moments of weights, a drawn sample at the end", _swag, job_loss=None)


# --- each batch twice (data echoing), and a labelled loader beside an endless other


def _echo(net: Any, opt: Any, batches: Any) -> None:
    g = torch.Generator().manual_seed(2)
    other = cycle([torch.randn(4, 8, generator=g, dtype=torch.float64) for _ in range(3)])
    for _ in range(2):
        for (x, y), u in zip(batches, other, strict=False):
            for _ in range(2):
                p = net(u).softmax(1)
                opt.zero_grad()
                (CE(net(x), y) + 0.2 * -(p * p.log()).sum(1).mean()).backward()
                opt.step()


add("each batch twice, beside samples of the program's own", _echo)


# --- physics: slopes of outputs by inputs in the loss, boundary points in the same call


def _pinn(net: Any, batch: Any) -> Tensor:
    x, edge = batch
    x = x.clone().requires_grad_(True)
    u = net(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (ddu,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
    residual = du[:, 1] - 0.1 * ddu[:, 0]
    return residual.square().mean() + net(edge).square().mean()


def _physics() -> Made:
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    return made(net, torch.rand(21, 2, dtype=torch.float64), torch.rand(21, 2, dtype=torch.float64))


usual("an equation by second slopes of inputs, edges beside", _pinn, _physics)


# --- a trainer of classes: configure_optimizers, training_step that returns a dict, callbacks, manual steps


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.aux = Named(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.aux(x)  # type: ignore[no-any-return]


class Callback:
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_backward(self, trainer: Any) -> None:
        for p in trainer.net.parameters():
            if p.grad is not None:
                p.grad.add_(p.detach(), alpha=1e-3)

    def on_step(self, trainer: Any, loss: Tensor) -> None:
        self.losses.append(loss.item())
        if len(self.losses) % 4 == 0:
            for g in trainer.opt.param_groups:
                g["weight_decay"] *= 1.5


class Loop:
    def __init__(self, net: Any, opt: Any, callbacks: list[Any]) -> None:
        self.net, self.opt, self.callbacks = net, opt, callbacks

    def fit(self, batches: Any, count: int) -> None:
        for _ in range(count):
            for batch in batches:
                loss = CE(self.net(batch[0]), batch[1])
                self.opt.zero_grad()
                loss.backward()
                for c in self.callbacks:
                    c.on_backward(self)
                self.opt.step()
                for c in self.callbacks:
                    c.on_step(self, loss)


add("a trainer with callbacks: decay in gradients, decay by steps",
    lambda net, opt, batches: Loop(net, opt, [Callback()]).fit(batches, 2), lambda: classified(Module))  # fmt: skip


# --- rows of unequal weight: importance by the data set, normalised in the batch


def _important(net: Any, batch: Any) -> Tensor:
    x, y, w = batch
    w = w / w.sum() * len(w)
    return (CE(net(x), y, reduction="none") * w).mean()


usual("weights of samples, normalised in the batch", _important,
      lambda: made(small_net(), normal(21, 8), torch.randint(3, (21,)), normal(21).abs()))  # fmt: skip


# --- sampled softmax: negatives are drawn from the batch's own labels, corrected by their frequency


def _in_batch(net: Any, batch: Any) -> Tensor:
    x, items = batch
    q = net(x)
    rows = torch.nn.functional.one_hot(items, 5).to(q.dtype) @ torch.eye(5, 3, dtype=q.dtype)
    freq = torch.bincount(items, minlength=5).to(q.dtype)[items] / len(items)
    logits = q @ rows.T - freq.log()
    same = (items[:, None] == items[None]) & ~torch.eye(len(items), dtype=torch.bool)
    return CE(logits.masked_fill(same, -1e9), torch.arange(len(items)))


usual("negatives of the batch, corrected by how frequent they are", _in_batch,
      lambda: made(small_net(), normal(21, 8), torch.randint(5, (21,))))  # fmt: skip
