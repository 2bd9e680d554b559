"""Programs of many fields in the way they are published: games, graphs, text, series, sets, signals and tables."""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import prune

from benchmarks.program_table import epochs, loader, made, normal, program, sgd
from benchmarks.program_table.common import BCE, CE, MSE, Named, classified, one_step, small_net

KIND = "varied"


def add(name: str, loop: Any, make: Any = classified, job_loss: Any = None, **options: Any) -> None:
    """Add a program to the table."""
    program(KIND, f"varied: {name}", make, loop, job_loss, **options)


def usual(name: str, loss: Any, make: Any = classified, **options: Any) -> None:
    """A program of the usual loop, with ``loss(net, batch)``."""
    add(name, epochs(loss), make, **options)


class Vicreg(nn.Module):
    """A trunk and an expander."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.expander = nn.Linear(8, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.expander(F.relu(self.trunk(x)))  # type: ignore[no-any-return]


def _vicreg(net: Any, batch: Any) -> Tensor:
    a, b = net(batch[0]), net(batch[0] * 0.8 + 0.1)
    spread = sum(F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (a, b))
    covariance = sum(
        (c := (z - z.mean(0)).t() @ (z - z.mean(0)) / (len(z) - 1)).pow(2).sum() - c.diagonal().pow(2).sum()
        for z in (a, b)
    )
    return 25 * MSE(a, b) + 25 * spread + covariance / 6


usual("variance, invariance, covariance", _vicreg, lambda: made(Vicreg(), normal(24, 8), lr=1e-3))


class Byol(nn.Module):
    """Two views; the target network is a member without gradients and is moved by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = nn.Linear(8, 6), nn.Linear(6, 6)
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False

    @torch.no_grad()
    def update_moving_average(self, decay: float = 0.9) -> None:
        """Move the target."""
        for now, old in zip(self.online.parameters(), self.target.parameters(), strict=True):
            old.data = old.data * decay + (1 - decay) * now.data

    def forward(self, x: Tensor) -> Tensor:
        views = (x, x * 0.9 + 0.1)
        with torch.no_grad():
            wanted = [self.target(v) for v in views]
        loss: Any = 0
        for v, z in zip(views, reversed(wanted), strict=True):
            loss = loss + 2 - 2 * F.cosine_similarity(self.predictor(self.online(v)), z, dim=-1)
        return loss.mean()  # type: ignore[no-any-return]


def _byol(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, _ in batches:
            opt.zero_grad()
            net(x).backward()
            opt.step()
            net.update_moving_average()


add("two views, a target moved by a method", _byol, lambda: classified(Byol, 24))


class Lm(nn.Module):
    """A language model with one matrix for words in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.out = nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 11)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor, state: Any = None) -> Any:
        out, state = self.lstm(self.words(x), state)
        return self.out(out), state


def _bptt(net: Any, opt: Any, batches: Any) -> None:
    """The state of a column of text goes on to the next piece."""
    state = None
    for x in batches:
        opt.zero_grad()
        out, state = net(x[:, :-1], state)
        state = tuple(s.detach() for s in state)
        CE(out.reshape(-1, 11), x[:, 1:].reshape(-1)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.25)
        opt.step()


def _lm() -> Any:
    net = Lm().double()
    text = torch.randint(11, (6, 31))
    return net, sgd(net), [text[:, i : i + 6].contiguous() for i in range(0, 25, 5)]


add("text in columns, its state kept", _bptt, _lm)


class Seq2Seq(nn.Module):
    """An encoder and a decoder that is fed its own words, or those of the teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.encoder = nn.Embedding(9, 8), nn.GRU(8, 8, batch_first=True)
        self.cell, self.out = nn.GRUCell(8, 8), nn.Linear(8, 9)

    def forward(self, source: Tensor, target: Tensor, ratio: float = 0.5) -> Tensor:
        state = self.encoder(self.words(source))[1][0]
        word, outs = target[:, 0], []
        for t in range(1, target.shape[1]):
            state = self.cell(self.words(word), state)
            outs.append(self.out(state))
            word = target[:, t] if random.random() < ratio else outs[-1].argmax(1)
        return torch.stack(outs, 1)


usual(
    "a teacher by a coin",
    lambda net, b: CE(net(b[0], b[1]).reshape(-1, 9), b[1][:, 1:].reshape(-1)),
    lambda: made(Seq2Seq(), torch.randint(9, (24, 5)), torch.randint(9, (24, 5))),
)


class Gcn(nn.Module):
    """Two layers of graph convolution over the whole graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ self.second(F.relu(adjacency @ self.first(x)))  # type: ignore[no-any-return]


def _graph() -> Any:
    net = Gcn().double()
    a = (torch.rand(12, 12) > 0.7).double()
    a = ((a + a.t()) > 0).double() + torch.eye(12)
    d = a.sum(1).rsqrt()
    mask = torch.arange(12) % 3 != 0
    return net, sgd(net), [(normal(12, 8), d[:, None] * a * d, torch.randint(3, (12,)), mask)] * 3


usual("one graph, nodes of training by a mask", lambda n, b: CE(n(b[0], b[1])[b[3]], b[2][b[3]]), _graph)


def _maml(net: Any, opt: Any, batches: Any) -> None:
    """Second order: steps inside are differentiated."""
    for x, y in batches:
        opt.zero_grad()
        params = dict(net.named_parameters())
        inner = CE(functional_call(net, params, (x[:3],)), y[:3])
        slopes = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        moved = {k: p - 0.1 * g for (k, p), g in zip(params.items(), slopes, strict=True)}
        CE(functional_call(net, moved, (x[3:],)), y[3:]).backward()
        opt.step()


add("adapted inside, second order", _maml, lambda: classified(count=24))


def _dqn(net: Any, opt: Any, batches: Any) -> None:
    """A memory of moves is sampled by Python's random numbers; the target network is loaded now and then."""
    target = Named().double()
    target.load_state_dict(net.state_dict())
    memory: deque[Any] = deque(maxlen=64)
    for step, (x, a) in enumerate([b for _ in range(2) for b in batches]):
        memory.extend(zip(x, a, x.roll(1, 1), x.sum(1), strict=True))
        some = random.sample(list(memory), min(len(memory), 6))
        s, a, s2, r = (torch.stack(column) for column in zip(*some, strict=True))
        with torch.no_grad():
            wanted = r + 0.9 * target(s2).max(1).values
        opt.zero_grad()
        F.smooth_l1_loss(net(s).gather(1, a[:, None]).squeeze(1), wanted).backward()
        opt.step()
        if step % 3 == 2:
            target.load_state_dict(net.state_dict())


add("moves replayed, a target loaded now and then", _dqn, lambda: classified(Named, 24))


class Critic(nn.Module):
    """Actor and critic on a common trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.trunk(x))
        return torch.distributions.Categorical(logits=self.policy(h)), self.value(h).squeeze(-1)


def _a2c(net: Any, batch: Any) -> Tensor:
    x, a = batch
    moves, value = net(x)
    returns = x.sum(1)
    advantage = (returns - value).detach()
    return -(moves.log_prob(a) * advantage).mean() + 0.5 * MSE(value, returns) - 0.01 * moves.entropy().mean()


usual("actor, critic and entropy", _a2c, lambda: classified(Critic, 24))


def _ramp(net: Any, opt: Any, batches: Any) -> Any:
    """Mean teacher: consistency rises with the step."""
    teacher = Named().double()
    teacher.load_state_dict(net.state_dict())
    for step, (x, y) in enumerate([b for _ in range(2) for b in batches]):
        ramp = math.exp(-5 * (1 - min(1, step / 6)) ** 2)
        with torch.no_grad():
            wanted = teacher(x * 1.1).softmax(1)
        out = net(x)
        opt.zero_grad()
        (CE(out[:4], y[:4]) + ramp * MSE(out.softmax(1), wanted)).backward()
        opt.step()
        alpha = min(1 - 1 / (step + 1), 0.99)
        for t, p in zip(teacher.parameters(), net.parameters(), strict=True):
            t.data.mul_(alpha).add_(p.data, alpha=1 - alpha)
    return {f"teacher.{k}": v for k, v in teacher.state_dict().items()}


add("a teacher, the first samples with labels", _ramp, lambda: classified(Named, 24))


def _snapshots(net: Any, opt: Any, batches: Any) -> Any:
    kept = []
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 4)
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
            schedule.step()
        kept.append(copy.deepcopy(net.state_dict()))
    with torch.no_grad():
        mean = {k: torch.stack([s[k] for s in kept]).mean(0) for k in kept[0]}
    net.load_state_dict(mean)


add("snapshots, loaded as their mean", _snapshots, lambda: classified(count=24))


class Fake(torch.autograd.Function):
    """Rounded to 8 bits; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return (x / scale).round().clamp(-128, 127) * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class Quantised(nn.Module):
    """Weights and activations are rounded; ranges are followed by buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)
        self.register_buffer("range", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(F.linear(x, Fake.apply(self.first.weight, self.first.weight.abs().max() / 127), self.first.bias))
        if self.training:
            with torch.no_grad():
                self.range.mul_(0.9).add_(0.1 * h.abs().max())
        h = Fake.apply(h, self.range / 127)
        return F.linear(h, Fake.apply(self.second.weight, self.second.weight.abs().max() / 127), self.second.bias)


usual("rounded to eight bits in training", lambda n, b: CE(n(b[0]), b[1]), lambda: classified(Quantised, 24))


def _mixup(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        lam = np.random.beta(0.4, 0.4)
        order = torch.randperm(len(x))
        out = net(lam * x + (1 - lam) * x[order])
        opt.zero_grad()
        (lam * CE(out, y) + (1 - lam) * CE(out, y[order])).backward()
        opt.step()


add("mixed by a number of numpy's and an order", _mixup, lambda: classified(count=24))


def _ddpm(net: Any, opt: Any, batches: Any) -> None:
    """Noise and steps of time are drawn in the loop."""
    alphas = torch.linspace(0.99, 0.1, 10, dtype=torch.float64)
    for x, _ in batches:
        t = torch.randint(0, 10, (len(x),))
        noise = torch.randn_like(x)
        a = alphas[t][:, None]
        opt.zero_grad()
        MSE(net(a.sqrt() * x + (1 - a).sqrt() * noise), noise).backward()
        opt.step()


add("noise and times drawn in the loop", _ddpm, lambda: classified(lambda: small_net(8), 24))


class Experts(nn.Module):
    """The two best of four experts for each sample; a term that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        share = self.gate(x).softmax(-1)
        weight, chosen = share.topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = x.new_zeros(len(x), 3)
        for i, expert in enumerate(self.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, rows, weight[rows, place, None] * expert(x[rows]))
        balance = 4 * (F.one_hot(chosen[:, 0], 4).to(x).mean(0) * share.mean(0)).sum()
        return out, balance


def _experts(net: Any, batch: Any) -> Tensor:
    out, balance = net(batch[0])
    return CE(out, batch[1]) + 0.01 * balance  # type: ignore[no-any-return]


usual("two of four experts, balanced", _experts, lambda: classified(Experts, 24))


def _thaw(net: Any, opt: Any, batches: Any) -> None:
    """The head first; a layer more in each epoch, at a smaller rate (ULMFiT)."""
    layers = [net.second, net.first]
    for layer in layers:
        layer.requires_grad_(False)
    opt = torch.optim.SGD(net.head.parameters(), 0.05, momentum=0.9)
    for epoch in range(3):
        for x, y in batches:
            one_step(net, opt, x, y)
        if epoch < 2:
            layers[epoch].requires_grad_(True)
            opt.add_param_group({"params": layers[epoch].parameters(), "lr": 0.05 / 2.6 ** (epoch + 1)})


add("thawed from the head, smaller rates below", _thaw, lambda: classified(Named, 24))


def _plateau(net: Any, opt: Any, batches: Any) -> None:
    rate = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    x_val, y_val = normal(9, 8), torch.randint(3, (9,))
    for _ in range(3):
        net.train()
        for x, y in batches:
            one_step(net, opt, x, y)
        net.eval()
        with torch.inference_mode():
            rate.step(CE(net(x_val), y_val).item() + 1.0)


add("a plateau in inference mode", _plateau, lambda: classified(count=24))


def _profiler(net: Any, opt: Any, batches: Any) -> None:
    plan = torch.profiler.schedule(wait=1, warmup=1, active=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=plan) as prof:
        for x, y in batches:
            with torch.profiler.record_function("step"):
                one_step(net, opt, x, y)
            prof.step()
    assert prof.key_averages() is not None


add("watched by a profiler's schedule", _profiler, lambda: classified(count=24))


def _compiled(net: Any, opt: Any, batches: Any) -> None:
    fast = torch.compile(net, backend="eager")
    for x, y in batches:
        one_step(fast, opt, x, y)


add("compiled without a compiler", _compiled, lambda: classified(count=24))


class Pictures(nn.Module):
    """Two convolutions and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))).mean((2, 3)))  # type: ignore[no-any-return]


def _last(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        one_step(net, opt, x.to(memory_format=torch.channels_last), y)


def _pictures(last: bool = False) -> Any:
    net, opt, batches = made(Pictures(), normal(24, 3, 6, 6), torch.randint(3, (24,)))
    return (net.to(memory_format=torch.channels_last) if last else net), opt, batches


add("channels last", _last, lambda: _pictures(True))


def _autocast(net: Any, opt: Any, batches: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for x, y in batches:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = CE(net(x.float()), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()


def _single() -> Any:
    net = small_net().float()
    return net, sgd(net), loader(torch.randn(24, 8), torch.randint(3, (24,)))


add("bfloat16, a scaler that is off", _autocast, _single, within=3e-2)


def _private(net: Any, opt: Any, batches: Any) -> None:
    """Slopes of each sample by vmap, shortened and summed (differential privacy without noise)."""
    for x, y in batches:
        params = {k: v.detach() for k, v in net.named_parameters()}

        def loss(p: Any, one: Tensor, label: Tensor) -> Tensor:
            return CE(functional_call(net, p, (one[None],)), label[None])

        slopes = vmap(grad(loss), (None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in slopes.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, p in net.named_parameters():
            p.grad = torch.einsum("i,i...->...", factor, slopes[name]) / len(x)
        opt.step()


add("slopes of samples by vmap, shortened", _private, lambda: classified(count=24))


def _lottery(net: Any, opt: Any, batches: Any) -> None:
    first = {k: v.clone() for k, v in net.state_dict().items()}
    for x, y in batches:
        one_step(net, opt, x, y)
    masks = {}
    for name, p in net.named_parameters():
        if p.dim() > 1:
            size = p.detach().abs().flatten()
            masks[name] = (p.detach().abs() > size.kthvalue(size.numel() // 2).values).to(p)
    net.load_state_dict({k: v * masks[k] if k in masks else v for k, v in first.items()})
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        for name, p in net.named_parameters():
            if name in masks:
                p.grad.mul_(masks[name])
        opt.step()


add("a lottery by the k-th size", _lottery, lambda: classified(count=24))


def _pruned(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        one_step(net, opt, x, y)
    for module in (net.first, net.second):
        prune.l1_unstructured(module, "weight", amount=0.3)
    opt = torch.optim.SGD(net.parameters(), 0.05)
    for x, y in batches:
        one_step(net, opt, x, y)


add("pruned by torch in mid-run", _pruned, lambda: classified(Named, 24))


class Adan(torch.optim.Optimizer):
    """Adaptive Nesterov momentum."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, s = p.grad, self.state[p]
                if not s:
                    s["m"], s["v"], s["n"] = (torch.zeros_like(p) for _ in range(3))
                    s["last"] = g.clone()
                change = g - s["last"]
                s["m"].lerp_(g, 0.1)
                s["v"].lerp_(change, 0.1)
                s["n"].mul_(0.99).addcmul_(g + 0.9 * change, g + 0.9 * change, value=0.01)
                s["last"].copy_(g)
                p.addcdiv_(s["m"] + 0.9 * s["v"], s["n"].sqrt().add_(1e-3), value=-group["lr"])


def _adan() -> Any:
    net, _, batches = classified(count=24)
    return net, Adan(net.parameters()), batches


usual("an optimizer with differences of gradients", lambda n, b: CE(n(b[0]), b[1]), _adan)


class PointNet(nn.Module):
    """A set of points, turned by a matrix of its own; the largest of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.first, self.head = nn.Linear(3, 9), nn.Linear(3, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        turn = self.turn(x.amax(1)).view(-1, 3, 3) + torch.eye(3, dtype=x.dtype)
        return self.head(F.relu(self.first(x @ turn)).amax(1)), turn


def _points(net: Any, batch: Any) -> Tensor:
    out, turn = net(batch[0])
    apart = torch.bmm(turn, turn.transpose(1, 2)) - torch.eye(3, dtype=turn.dtype)
    return CE(out, batch[1]) + 0.1 * apart.norm(dim=(1, 2)).mean()


usual("points, a matrix for each set", _points, lambda: made(PointNet(), normal(24, 5, 3), torch.randint(3, (24,))))


class Beats(nn.Module):
    """Blocks that each take away what they explain (N-BEATS)."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        ahead: Any = 0
        for block in self.back:
            seen, more = block(x).split([8, 4], 1)
            x, ahead = x - seen, ahead + more
        return ahead  # type: ignore[no-any-return]


def _smape(net: Any, batch: Any) -> Tensor:
    out = net(batch[0])
    return 200 * ((out - batch[1]).abs() / (out.abs() + batch[1].abs()).detach().clamp(min=1e-3)).mean()


usual("a series, what blocks leave", _smape, lambda: made(Beats(), normal(24, 8), normal(24, 4), lr=1e-4))


class Interactions(nn.Module):
    """Dense numbers and tables of categories, multiplied in pairs (DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.top = nn.Linear(4, 6), nn.Linear(6 + 3, 1)
        self.tables = nn.ModuleList(nn.Embedding(7, 6) for _ in range(2))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        z = torch.stack([self.bottom(dense), *(t(sparse[:, i]) for i, t in enumerate(self.tables))], 1)
        i, j = torch.tril_indices(3, 3, -1)
        return self.top(torch.cat([z[:, 0], (z @ z.transpose(1, 2))[:, i, j]], 1)).squeeze(1)  # type: ignore[no-any-return]


usual(
    "tables multiplied in pairs",
    lambda n, b: BCE(n(b[0], b[1]), b[2]),
    lambda: made(Interactions(), normal(24, 4), torch.randint(7, (24, 2)), torch.rand(24, dtype=torch.float64).round()),
)


class Factors(nn.Module):
    """Users, things and their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.thing = nn.Embedding(9, 4), nn.Embedding(9, 4)
        self.user_bias, self.thing_bias = nn.Embedding(9, 1), nn.Embedding(9, 1)
        self.mean = nn.Parameter(torch.zeros(1))

    def forward(self, pair: Tensor) -> Tensor:
        u, t = pair.unbind(1)
        bias = self.user_bias(u) + self.thing_bias(t)
        return (self.user(u) * self.thing(t)).sum(1) + bias.squeeze(1) + self.mean  # type: ignore[no-any-return]


def _factors(net: Any, batch: Any) -> Tensor:
    u, t = batch[0].unbind(1)
    decay = net.user.weight[u].pow(2).sum(1) + net.thing.weight[t].pow(2).sum(1)
    return ((net(batch[0]) - batch[1]) ** 2 + 0.02 * decay).mean()  # type: ignore[no-any-return]


usual("factors, decayed where they are met", _factors, lambda: made(Factors(), torch.randint(9, (24, 2)), normal(24)))


class SkipGram(nn.Module):
    """Words near each other, against words that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Embedding(11, 6), nn.Embedding(11, 6)

    def forward(self, word: Tensor, other: Tensor, wrong: Tensor) -> Tensor:
        v = self.near(word)
        right = F.logsigmoid((v * self.far(other)).sum(1))
        return -(right + F.logsigmoid(-(self.far(wrong) @ v[:, :, None]).squeeze(2)).sum(1))


usual(
    "near words against drawn ones",
    lambda n, b: n(b[0], b[1], torch.randint(11, (len(b[0]), 3))).mean(),
    lambda: made(SkipGram(), torch.randint(11, (24,)), torch.randint(11, (24,))),
)


class Criterion(nn.Module):
    """Losses of two tasks, weighed by parameters of the criterion."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        losses = torch.stack([CE(out, y), out.square().mean()])
        return (losses * (-self.log_var).exp() + self.log_var).sum()


def _weighed(net: Any, opt: Any, batches: Any) -> Any:
    """The criterion has parameters, and they are a group of the optimizer from the first step on."""
    criterion = Criterion()
    other = torch.optim.Adam(criterion.parameters(), 0.05)
    for x, y in batches:
        opt.zero_grad()
        other.zero_grad()
        criterion(net(x), y).backward()
        opt.step()
        other.step()
    return {"log_var": criterion.log_var.detach()}


add("a criterion with weights and an optimizer of its own", _weighed, lambda: classified(count=24))


def _fixmatch(net: Any, batch: Any) -> Tensor:
    x, y = batch
    with torch.no_grad():
        share, label = net(x * 0.95).softmax(1).max(1)
    out = net(x + 0.1)
    return CE(net(x), y) + (CE(out, label, reduction="none") * (share > 0.36)).mean()


usual("labels of its own where it is sure", _fixmatch, lambda: classified(count=24))


def _noisy(net: Any, opt: Any, batches: Any) -> None:
    """Noise on gradients, from a generator that is the same everywhere."""
    generator = torch.Generator().manual_seed(5)
    for step, (x, y) in enumerate(batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for p in net.parameters():
            p.grad.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64), alpha=0.01 / (1 + step) ** 0.55)
        opt.step()


add("noise on gradients, less with each step", _noisy, lambda: classified(count=24))


class Hyper(nn.Module):
    """A network makes the weights of a layer for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.head = nn.Linear(8, 8 * 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(torch.einsum("bi,bio->bo", x, self.make(x).view(-1, 8, 4))))  # type: ignore[no-any-return]


usual("weights made for each sample", lambda n, b: CE(n(b[0]), b[1]), lambda: classified(Hyper, 24))


class Cpc(nn.Module):
    """What comes later in a sequence, found among its other times."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.context, self.ahead = nn.Linear(4, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        z = self.code(x)
        c = self.ahead(self.context(z)[0])
        logits = c[:, :-1] @ z[:, 1:].transpose(1, 2)
        t = torch.arange(logits.shape[1]).expand(len(x), -1)
        return CE(logits.flatten(0, 1), t.flatten(), reduction="none").view(len(x), -1).mean(1)


usual("times of a sequence told apart", lambda n, b: n(b[0]).mean(), lambda: made(Cpc(), normal(24, 6, 4)))


class Perceiver(nn.Module):
    """Latents of the model ask the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, 8) * 0.2)
        self.ask, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        asked = self.latents.expand(len(x), -1, -1)
        return self.head((asked + self.ask(asked, x, x, need_weights=False)[0]).mean(1))  # type: ignore[no-any-return]


usual(
    "latents that ask", lambda n, b: CE(n(b[0]), b[1]),
    lambda: made(Perceiver(), normal(24, 5, 8), torch.randint(3, (24,))),
)  # fmt: skip


class Sparse(nn.Module):
    """A dictionary of unit columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        code = F.relu(self.up(x))
        return self.down(code), code


def _dictionary(net: Any, opt: Any, batches: Any) -> None:
    """Gradients along the columns are taken out, and columns are made units behind each step."""
    for x, _ in batches:
        opt.zero_grad()
        out, code = net(x)
        (MSE(out, x) + 0.01 * code.abs().sum(1).mean()).backward()
        with torch.no_grad():
            w = net.down.weight
            w.grad -= (w.grad * w).sum(0, keepdim=True) * w
        opt.step()
        with torch.no_grad():
            w.data = w.data / w.data.norm(dim=0, keepdim=True)


add("a dictionary of unit columns", _dictionary, lambda: classified(Sparse, 24))


class Words(nn.Module):
    """Words, a layer and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(11, 8), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(self.embedding(x).mean(1))))  # type: ignore[no-any-return]


def _fgm(net: Any, opt: Any, batches: Any) -> None:
    """Embeddings are attacked along their gradient and restored (FGM)."""
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        backup = {}
        for name, p in net.named_parameters():
            if p.requires_grad and "embedding" in name:
                backup[name] = p.data.clone()
                norm = torch.norm(p.grad)
                if norm != 0 and not torch.isnan(norm):
                    p.data.add_(0.5 * p.grad / norm)
        CE(net(x), y).backward()
        for name, p in net.named_parameters():
            if name in backup:
                p.data = backup[name]
        opt.step()


add("words attacked and restored", _fgm, lambda: made(Words(), torch.randint(11, (24, 5)), torch.randint(3, (24,))))


def _awp(net: Any, opt: Any, batches: Any) -> None:
    """Weights are moved against the loss by a plain copy's step (AWP)."""
    proxy = Named().double()
    for x, y in batches:
        proxy.load_state_dict(net.state_dict())
        away = torch.optim.SGD(proxy.parameters(), 0.01)
        away.zero_grad()
        (-CE(proxy(x), y)).backward()
        away.step()
        moves = {}
        for (name, old), new in zip(net.named_parameters(), proxy.parameters(), strict=True):
            change = new.data - old.data
            moves[name] = old.data.norm() / (change.norm() + 1e-12) * change
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.add_(0.01 * moves[name])
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.sub_(0.01 * moves[name])


add("weights moved by a proxy", _awp, lambda: classified(Named, 24))


def _worse(net: Any, opt: Any, batches: Any) -> None:
    """Inputs are moved by signs of their gradient, some times, within a box (PGD)."""
    for x, y in batches:
        seen = x.clone()
        for _ in range(2):
            seen.requires_grad_(True)
            slope = torch.autograd.grad(CE(net(seen), y), seen)[0]
            seen = (seen.detach() + 0.05 * slope.sign()).clamp(x - 0.1, x + 0.1)
        one_step(net, opt, seen, y)


add("inputs moved by signs within a box", _worse, lambda: classified(count=24))


def _rdrop(net: Any, batch: Any) -> Tensor:
    a, b = net(batch[0]), net(batch[0])
    p, q = a.log_softmax(1), b.log_softmax(1)
    apart = F.kl_div(p, q, reduction="batchmean", log_target=True) + F.kl_div(
        q, p, reduction="batchmean", log_target=True
    )
    return CE(a, batch[1]) + CE(b, batch[1]) + apart


usual("two answers with dropout", _rdrop, lambda: classified(
    lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)), 24))  # fmt: skip


def _kernel(net: Any, batch: Any) -> Tensor:
    """A Gaussian process on features: the likelihood of the whole batch."""
    z, y = net(batch[0]), batch[1].double()
    k = torch.exp(-torch.cdist(z, z).square() / 2) + 0.5 * torch.eye(len(z), dtype=z.dtype)
    return 0.5 * (y @ torch.linalg.solve(k, y) + torch.logdet(k))


usual("a process on features", _kernel, lambda: classified(count=24))


def _clamped(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        one_step(net, opt, x, y)
        for name, p in net.named_parameters():
            if name.endswith("weight"):
                p.data.clamp_(min=0)


add("weights never below zero", _clamped, lambda: classified(Named, 24))


def _master(net: Any, _opt: Any, batches: Any) -> None:
    """Half precision is trained by plain copies in full precision."""
    masters = [p.detach().clone().float() for p in net.parameters()]
    for m in masters:
        m.requires_grad_(True)
    other = torch.optim.SGD(masters, 0.05, momentum=0.9)
    for x, y in batches:
        net.zero_grad()
        CE(net(x), y).backward()
        for m, p in zip(masters, net.parameters(), strict=True):
            m.grad = p.grad.detach().float()
        other.step()
        with torch.no_grad():
            for m, p in zip(masters, net.parameters(), strict=True):
                p.copy_(m)


add("masters in another precision", _master, lambda: classified(count=24), within=1e-5)


def _resume(net: Any, opt: Any, batches: Any) -> None:
    """Written and read in the middle of the run, with the optimizer and the schedule."""
    import io

    rate = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    for epoch in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
            rate.step()
        if epoch == 0:
            file = io.BytesIO()
            torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "rate": rate.state_dict()}, file)
            for x, y in batches:
                one_step(net, opt, x, y)
            file.seek(0)
            kept = torch.load(file, weights_only=False)
            net.load_state_dict(kept["net"])
            opt.load_state_dict(kept["opt"])
            rate.load_state_dict(kept["rate"])


add("read back with optimizer and schedule", _resume, lambda: classified(count=24))
