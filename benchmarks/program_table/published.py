"""Programs in the way of published code that knows of several processes, and of methods whose updates, samples or sums
are the loop's own: gathered contrasts, counts over processes, agents without a forward, updates without gradients."""

from __future__ import annotations

import copy
import itertools
import math
import random
import sys
from collections import deque
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from benchmarks.program_table import Made, made, normal, pairs, program, sgd
from benchmarks.program_table.common import BCE, CE, MSE, Named, classified, one_step, small_net

KIND = "published"


def add(name: str, loop: Any, make: Any = classified, job_loss: Any = None, **options: Any) -> None:
    program(KIND, name, make, loop, job_loss, **options)


def usual(name: str, loss: Any, make: Any = classified, **options: Any) -> None:
    """A program of the usual loop, with ``loss(net, batch)``."""

    def loop(net: Any, opt: Any, batches: Any) -> None:
        for _ in range(2):
            net.train()
            for batch in batches:
                opt.zero_grad()
                loss(net, batch).backward()
                opt.step()

    add(name, loop, make, **options)


def of_outputs(name: str, loss: Any, make: Any = classified, **options: Any) -> None:
    """The same with a loss of outputs and labels, which can be a Job, too."""
    usual(name, pairs(loss), make, job_loss=loss, **options)


# ---- code that knows of several processes


def is_dist() -> bool:
    return dist.is_available() and dist.is_initialized()


def world() -> int:
    return dist.get_world_size() if is_dist() else 1


class GatherLayer(torch.autograd.Function):
    """Rows of all processes; the gradient is the own part of the sum (SimCLR)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        output = [torch.zeros_like(x) for _ in range(world())]
        if is_dist():
            dist.all_gather(output, x.contiguous())
        else:
            output = [x.clone()]
        return tuple(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        all_gradients = torch.stack(grads)
        if is_dist():
            dist.all_reduce(all_gradients)
        return all_gradients[dist.get_rank() if is_dist() else 0]


def _nt_xent(a: Tensor, b: Tensor) -> Tensor:
    """Each of two views is found among those of all samples."""
    z = F.normalize(torch.cat([a, b]), dim=1)
    sim = z @ z.t() / 0.5
    sim = sim.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    n = len(a)
    return CE(sim, torch.cat([torch.arange(n) + n, torch.arange(n)]))


def _gather_layer(net: Any, batch: Any) -> Tensor:
    a, b = net(batch[0]), net(batch[0] * 0.9 + 0.1)
    return _nt_xent(torch.cat(GatherLayer.apply(a)), torch.cat(GatherLayer.apply(b)))


usual("views gathered by a layer of the program's own", _gather_layer, lambda: classified(count=24))


@torch.no_grad()
def concat_all_gather(tensor: Tensor) -> Tensor:
    """Rows of all processes, without gradients (MoCo)."""
    if not is_dist():
        return tensor
    gathered = [torch.ones_like(tensor) for _ in range(world())]
    dist.all_gather(gathered, tensor.contiguous())
    return torch.cat(gathered)


def _moco(net: Any, opt: Any, batches: Any) -> None:
    """A queue of keys that all processes fill, and a slow copy by parameters."""
    slow = Named(4).double()
    for p, q in zip(slow.parameters(), net.parameters(), strict=True):
        p.data.copy_(q.data)
        p.requires_grad = False
    queue = F.normalize(torch.linspace(-1, 1, 48, dtype=torch.float64).view(12, 4), dim=1)
    pointer = 0
    for x, _ in itertools.chain(batches, batches):
        q = F.normalize(net(x), dim=1)
        with torch.no_grad():
            for p, w in zip(slow.parameters(), net.parameters(), strict=True):
                p.data = p.data * 0.9 + w.data * 0.1
            k = F.normalize(slow(x + 0.1), dim=1)
        l_pos, l_neg = (q * k).sum(1, keepdim=True), q @ queue.t()
        loss = CE(torch.cat([l_pos, l_neg], 1) / 0.2, torch.zeros(len(q), dtype=torch.long))
        keys = concat_all_gather(k)
        queue = torch.cat([queue[len(keys) :], keys])
        pointer = (pointer + len(keys)) % 12
        opt.zero_grad()
        loss.backward()
        opt.step()


add("a queue that all processes fill", _moco, lambda: classified(lambda: Named(4), count=24))


def _dino_center(net: Any, opt: Any, batches: Any) -> None:
    """A centre of the teacher's answers, averaged over processes."""
    teacher = Named().double()
    teacher.load_state_dict(copy.deepcopy(net.state_dict()))
    center = torch.zeros(1, 3, dtype=torch.float64)
    for x, _ in itertools.chain(batches, batches):
        with torch.no_grad():
            answer = teacher(x)
        student = F.log_softmax(net(x * 0.9) / 0.1, -1)
        loss = torch.sum(-F.softmax((answer - center) / 0.04, -1) * student, -1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            batch_center = answer.sum(0, keepdim=True)
            if is_dist():
                dist.all_reduce(batch_center)
            center = center * 0.9 + batch_center / (len(answer) * world()) * 0.1
            for p, q in zip(net.parameters(), teacher.parameters(), strict=True):
                q.data.mul_(0.9).add_(p.detach().data, alpha=0.1)


add("a teacher's centre, averaged over processes", _dino_center, lambda: classified(Named, count=24))


@torch.no_grad()
def _sinkhorn(out: Tensor) -> Tensor:
    """Equal shares of prototypes over the samples of all processes (SwAV)."""
    q = torch.exp(out / 0.5).t()
    size, protos = q.shape[1] * world(), q.shape[0]

    def summed(x: Tensor) -> Tensor:
        if is_dist():
            dist.all_reduce(x)
        return x

    q = q / summed(torch.sum(q))
    for _ in range(3):
        q = q / summed(torch.sum(q, dim=1, keepdim=True)) / protos
        q = q / torch.sum(q, dim=0, keepdim=True) / size
    return (q * size).t()


def _swav(net: Any, batch: Any) -> Tensor:
    a, b = net(batch[0]), net(batch[0] * 0.9)
    loss = -(_sinkhorn(a.detach()) * F.log_softmax(b, 1)).sum(1).mean()
    return loss - (_sinkhorn(b.detach()) * F.log_softmax(a, 1)).sum(1).mean()


usual("equal shares over the samples of all processes", _swav, lambda: classified(count=24))


def _barlow(net: Any, batch: Any) -> Tensor:
    """Correlations of features, summed over processes in place (Barlow twins)."""
    x = batch[0]
    a, b = net(x), net(x * 0.8 + 0.2)
    c = a.t() @ b
    c = c / (x.size(0) * world())
    if is_dist():
        dist.all_reduce(c)
    on = (torch.diagonal(c) - 1).pow(2).sum()
    off = c.pow(2).sum() - torch.diagonal(c).pow(2).sum()
    return on + 0.005 * off


usual("correlations summed over processes", _barlow, lambda: classified(count=24))


def reduce_dict(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Means over processes (torchvision's references)."""
    if world() < 2:
        return values
    with torch.no_grad():
        names = sorted(values)
        stacked = torch.stack([values[k] for k in names])
        dist.all_reduce(stacked)
        stacked /= world()
        return dict(zip(names, stacked, strict=True))


def _references(net: Any, opt: Any, batches: Any) -> None:
    """Losses by name, averaged over processes, decide whether to stop; a rate that warms up in the first epoch."""
    warm = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=3)
    for epoch in range(2):
        for x, y in batches:
            out = net(x)
            loss_dict = {"classes": CE(out, y), "size": 0.1 * (out**2).mean()}
            losses = sum(loss_dict.values())
            value = sum(reduce_dict(loss_dict).values()).item()  # type: ignore[union-attr]
            if not math.isfinite(value):
                print(f"Loss is {value}, stopping training")
                sys.exit(1)
            opt.zero_grad()
            losses.backward()  # type: ignore[union-attr]
            opt.step()
            if epoch == 0:
                warm.step()


add("losses averaged over processes for the log", _references)
add("losses averaged over processes for the log, even", _references, lambda: classified(count=24))


class RepeatedSampler(Sampler[int]):
    """Each sample comes several times, the share of this process (DeiT's repeated augmentation)."""

    def __init__(self, data: Any) -> None:
        self.data, self.replicas, self.rank, self.epoch = data, world(), dist.get_rank() if is_dist() else 0, 0

    def __iter__(self) -> Any:
        draw = torch.Generator().manual_seed(self.epoch)
        order = [i for i in torch.randperm(len(self.data), generator=draw).tolist() for _ in range(2)]
        return iter(order[self.rank :: self.replicas][: len(self)])

    def __len__(self) -> int:
        return len(self.data) // self.replicas

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def _repeated() -> Made:
    net = small_net().double()
    data = TensorDataset(normal(24, 8), torch.randint(3, (24,)))
    return net, sgd(net), DataLoader(data, 6, sampler=RepeatedSampler(data))


def _sampled(net: Any, opt: Any, batches: Any) -> None:
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for x, y in batches:
            one_step(net, opt, x, y)


add("a sampler that takes its share by process", _sampled, _repeated)


class LossSampler:
    """Weights of time steps by squares of their latest losses, of all processes (improved diffusion)."""

    def __init__(self) -> None:
        self.history, self.counts = np.zeros([4, 2]), np.zeros([4], dtype=int)

    def weights(self) -> Any:
        if not (self.counts == 2).all():
            return np.ones(4) / 4
        w = np.sqrt(np.mean(self.history**2, axis=-1))
        return w / w.sum() * 0.9 + 0.1 / 4

    def update(self, steps: Tensor, losses: Tensor) -> None:
        if is_dist():
            sizes = [torch.tensor([0]) for _ in range(world())]
            dist.all_gather(sizes, torch.tensor([len(steps)]))
            most = max(int(s) for s in sizes)
            ts = [torch.zeros(most, dtype=steps.dtype) for _ in sizes]
            ls = [torch.zeros(most, dtype=losses.dtype) for _ in sizes]
            dist.all_gather(ts, F.pad(steps, (0, most - len(steps))))
            dist.all_gather(ls, F.pad(losses, (0, most - len(losses))))
            steps = torch.cat([t[: int(s)] for t, s in zip(ts, sizes, strict=True)])
            losses = torch.cat([v[: int(s)] for v, s in zip(ls, sizes, strict=True)])
        for t, loss in zip(steps.tolist(), losses.tolist(), strict=True):
            if self.counts[t] == 2:
                self.history[t, :-1], self.history[t, -1] = self.history[t, 1:], loss
            else:
                self.history[t, self.counts[t]] = loss
                self.counts[t] += 1


def _loss_sampled(net: Any, opt: Any, batches: Any) -> None:
    """The step of time comes with the sample; its weight follows the losses of that step so far."""
    sampler = LossSampler()
    for x, t in itertools.chain(batches, batches, batches):
        w = torch.from_numpy(1 / (4 * sampler.weights()))[t]
        losses = ((net(x + 0.1 * t[:, None]) - x[:, :3]) ** 2).mean(1)
        sampler.update(t, losses.detach())
        opt.zero_grad()
        (losses * w).mean().backward()
        opt.step()


add("steps of time weighed by losses of all processes", _loss_sampled,
    lambda: made(small_net(), normal(24, 8), torch.arange(24) % 4))  # fmt: skip


def _unwrapped(net: Any, opt: Any, batches: Any) -> None:
    """The model behind a wrapper, micro batches without exchange, saved by the first process."""
    inner = net.module if hasattr(net, "module") else net
    kept: dict[str, Any] = {}
    for epoch in range(2):
        for i, (x, y) in enumerate(batches):
            last = i % 2 == 1
            quiet = nullcontext() if last or not hasattr(net, "no_sync") else net.no_sync()
            with quiet:
                (CE(net(x), y) / 2).backward()
            if last:
                opt.step()
                opt.zero_grad()
        state = inner.state_dict()
        if not is_dist() or dist.get_rank() == 0:
            kept = {"epoch": epoch, "model": {k: v.clone() for k, v in state.items()}}
        if is_dist():
            dist.barrier()
    len(kept)


add("unwrapped, micro batches without exchange", _unwrapped, lambda: classified(count=24))


def _meter_over_processes(net: Any, opt: Any, batches: Any) -> None:
    """Totals and counts are added over processes at the end of an epoch; a plateau goes by their mean."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.3, threshold=0.05)
    for _ in range(4):
        total = count = 0.0
        for x, y in batches:
            loss = one_step(net, opt, x, y)
            total, count = total + loss.item() * x.size(0), count + x.size(0)
        if is_dist():
            t = torch.tensor([count, total], dtype=torch.float64)
            dist.barrier()
            dist.all_reduce(t)
            count, total = t.tolist()
        plateau.step(total / count)


add("a plateau by a meter over processes", _meter_over_processes, lambda: classified(lr=0.3))


# ---- agents and models whose forward is not what the loop calls


class Agent(nn.Module):
    """A world model, an actor and a critic; there is no forward (Dreamer)."""

    def __init__(self) -> None:
        super().__init__()
        self.world, self.actor, self.critic = nn.Linear(10, 8), nn.Linear(8, 2), nn.Linear(8, 1)


def _imagined(net: Any, opt: Any, batches: Any) -> None:
    """Parts of an agent are called by name, with an optimizer for each."""
    acting = torch.optim.Adam(net.actor.parameters(), lr=0.01)
    valuing = torch.optim.Adam(net.critic.parameters(), lr=0.01)
    for x, a, r in itertools.chain(batches, batches):
        following = net.world(torch.cat([x, a], 1))
        opt.zero_grad()
        MSE(following, x * 0.9).backward()
        opt.step()
        state = x
        rewards = []
        for _ in range(3):
            state = torch.tanh(net.world(torch.cat([state, torch.tanh(net.actor(state))], 1)))
            rewards.append(net.critic(state))
        acting.zero_grad()
        (-torch.stack(rewards).mean()).backward()
        acting.step()
        valuing.zero_grad()
        MSE(net.critic(x)[:, 0], r).backward()
        valuing.step()


def _agent() -> Made:
    net = Agent().double()
    data = TensorDataset(normal(21, 8), normal(21, 2), normal(21))
    return net, torch.optim.Adam(net.world.parameters(), lr=0.01), DataLoader(data, 6)


add("an agent without a forward", _imagined, _agent)


class Module(nn.Module):
    """A model in the way of trainers: steps are methods, forward is for inference."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.backbone(x)))  # type: ignore[no-any-return]

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        self.steps += 1
        return CE(self(x), y) + 0.01 * self(x).pow(2).mean()


def _training_steps(net: Any, opt: Any, batches: Any) -> None:
    for batch in itertools.chain(batches, batches):
        opt.zero_grad()
        net.training_step(batch).backward()
        opt.step()


add("a training_step of the model", _training_steps, lambda: classified(Module))


class Locally(nn.Module):
    """Layers that are trained one by one, each by a goodness of its own (forward-forward)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x / (x.norm(2, 1, keepdim=True) + 1e-4)))
        return x


def _forward_forward(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        good, bad = x.clone(), x.clone()
        good[:, 0], bad[:, 0] = y.double(), ((y + 1) % 3).double()
        for layer in net.layers:
            opt.zero_grad()
            a = F.relu(layer(good / (good.norm(2, 1, keepdim=True) + 1e-4)))
            b = F.relu(layer(bad / (bad.norm(2, 1, keepdim=True) + 1e-4)))
            margin = torch.cat([2.0 - a.pow(2).mean(1), b.pow(2).mean(1) - 2.0])
            F.softplus(margin).mean().backward()
            opt.step()
            good, bad = a.detach(), b.detach()


add("layers trained one by one, by goodness", _forward_forward, lambda: classified(Locally))


class Trees(nn.Module):
    """Nested pairs of numbers, one tree a sample, in a list (recursive networks)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.join, self.head = nn.Embedding(7, 8), nn.Linear(16, 8), nn.Linear(8, 3)

    def node(self, tree: Any) -> Tensor:
        if isinstance(tree, int):
            return self.table.weight[tree]
        return torch.tanh(self.join(torch.cat([self.node(tree[0]), self.node(tree[1])])))

    def forward(self, trees: list[Any]) -> Tensor:
        return self.head(torch.stack([self.node(t) for t in trees]))  # type: ignore[no-any-return]


class Forest(Dataset[Any]):
    def __len__(self) -> int:
        return 21

    def __getitem__(self, i: int) -> Any:
        tree: Any = i % 7
        for k in range(i % 3 + 1):
            tree = (tree, (i + k) % 7) if k % 2 else ((i * k) % 7, tree)
        return tree, i % 3


def _forest() -> Made:
    net = Trees().double()
    loader = DataLoader(Forest(), 6, collate_fn=lambda s: ([t for t, _ in s], torch.tensor([y for _, y in s])))
    return net, sgd(net), loader


of_outputs("trees in a list", CE, _forest)


class Crops(nn.Module):
    """Several crops of each sample in a list; those of one size go through together (multi-crop)."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small, self.head = nn.Linear(8, 16), nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, crops: list[Tensor]) -> Tensor:
        h = [self.large(torch.cat(crops[:2])), self.small(torch.cat(crops[2:]))]
        return self.head(torch.relu(torch.cat(h)))  # type: ignore[no-any-return]


def _crops_loss(net: Any, batch: Any) -> Tensor:
    x = batch[0]
    out = net([x, x * 0.9, x[:, :4], x[:, 4:]]).chunk(4)
    target = F.softmax(out[0].detach() / 0.1, -1)
    return sum(torch.sum(-target * F.log_softmax(o, -1), -1).mean() for o in out[1:]) / 3  # type: ignore[return-value]


usual("crops of two sizes in a list", _crops_loss, lambda: classified(Crops))


# ---- updates, samples and sums of the loop's own


def _zeroth_order(net: Any, _opt: Any, batches: Any) -> None:
    """Two losses at weights moved by noise of one seed; the update is their difference along it (MeZO)."""
    names = [p for p in net.parameters() if p.requires_grad]

    def move(seed: int, scale: float) -> None:
        draw = torch.Generator().manual_seed(seed)
        for p in names:
            p.data = p.data + scale * 1e-3 * torch.randn(p.shape, generator=draw, dtype=p.dtype)

    with torch.no_grad():
        for seed, (x, y) in enumerate(itertools.chain(batches, batches)):
            move(seed, 1)
            plus = CE(net(x), y).item()
            move(seed, -2)
            minus = CE(net(x), y).item()
            move(seed, 1)
            slope = (plus - minus) / 2e-3
            draw = torch.Generator().manual_seed(seed)
            for p in names:
                z = torch.randn(p.shape, generator=draw, dtype=p.dtype)
                p.data = p.data - 0.01 * (slope * z + 0.01 * p.data)


add("two losses at moved weights, no gradients", _zeroth_order)


def _private(net: Any, opt: Any, batches: Any) -> None:
    """The gradient of each sample is clipped, summed and divided by the size of the batch (private training)."""
    params = [p for p in net.parameters() if p.requires_grad]
    for x, y in itertools.chain(batches, batches):
        sums = [torch.zeros_like(p) for p in params]
        for i in range(len(x)):
            opt.zero_grad()
            CE(net(x[i : i + 1]), y[i : i + 1]).backward()
            norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
            norm.item()
            for s, p in zip(sums, params, strict=True):
                s.add_(p.grad)
        for s, p in zip(sums, params, strict=True):
            p.grad = s / len(x)
        opt.step()


add("each sample's gradient clipped, then summed", _private, lambda: classified(count=24))


def _free(net: Any, opt: Any, batches: Any) -> None:
    """A perturbation that is kept from batch to batch by place, several updates a batch (free adversarial training)."""
    delta = torch.zeros(6, 8, dtype=torch.float64)
    for x, y in itertools.chain(batches, batches):
        for _ in range(2):
            noise = delta[0 : x.size(0)].clone().requires_grad_(True)
            loss = CE(net(x + noise), y)
            opt.zero_grad()
            loss.backward()
            delta[0 : x.size(0)] += 0.1 * noise.grad.sign()  # type: ignore[union-attr]
            delta.clamp_(-0.2, 0.2)
            opt.step()


add("a perturbation kept by place, updates on one batch", _free, lambda: classified(count=24))


def _online_smoothing(net: Any, opt: Any, batches: Any) -> None:
    """Soft labels of each class are sums of right answers of the epoch before (online label smoothing)."""
    soft = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    for _ in range(3):
        sums, counts = torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
        for x, y in batches:
            out = net(x)
            loss = 0.5 * CE(out, y) - 0.5 * (soft[y] * F.log_softmax(out, 1)).sum(1).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                p = out.softmax(1)
                right = p.argmax(1) == y
                for c in range(3):
                    sums[c] += p[right & (y == c)].sum(0)
                    counts[c] += (right & (y == c)).sum()
        soft = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), soft)


add("soft labels by right answers of the last epoch", _online_smoothing)


def _integrated(net: Any, opt: Any, batches: Any) -> None:
    """The model is a slope that is integrated with steps that the largest error of the batch sets (adaptive)."""
    for x, y in itertools.chain(batches, batches):
        state, t, h = x, 0.0, 0.5
        while t < 1.0 - 1e-9:
            k1 = net(state)
            k2 = net(state + h * k1)
            error = (0.5 * h * (k2 - k1)).abs().max().item()
            if error < 0.05 or h < 0.1:
                state, t = state + 0.5 * h * (k1 + k2), t + h
            h = min(1.0 - t if t < 1 else h, h * 0.5 if error >= 0.05 else h * 1.5)
            h = max(h, 1e-3)
        opt.zero_grad()
        CE(state[:, :3], y).backward()
        opt.step()


add("a slope integrated with adaptive steps", _integrated, lambda: classified(lambda: small_net(8)))


def _integrated_fixed(net: Any, opt: Any, batches: Any) -> None:
    """The same with four steps of Runge and Kutta."""
    for x, y in itertools.chain(batches, batches):
        state, h = x, 0.5
        for _ in range(2):
            k1 = net(state)
            k2 = net(state + 0.5 * h * k1)
            k3 = net(state + 0.5 * h * k2)
            k4 = net(state + h * k3)
            state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        opt.zero_grad()
        CE(state[:, :3], y).backward()
        opt.step()


add("a slope integrated with fixed steps", _integrated_fixed, lambda: classified(lambda: small_net(8)))


class Bag(nn.Module):
    """Attention over the instances of one bag."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend, self.head = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, bag: Tensor) -> Tensor:
        h = torch.tanh(self.embed(bag.squeeze(0)))
        return self.head((self.attend(h).softmax(0) * h).sum(0, keepdim=True)).squeeze(-1)  # type: ignore[no-any-return]


class Bags(Dataset[Any]):
    def __init__(self) -> None:
        self.bags = [normal(2 + i % 4, 8) for i in range(12)]

    def __len__(self) -> int:
        return len(self.bags)

    def __getitem__(self, i: int) -> Any:
        return self.bags[i], float(i % 2)


def _bag_by_bag(net: Any, opt: Any, batches: Any) -> None:
    """One bag a batch, of instances without a fixed number; four bags an update."""
    for epoch in range(2):
        opt.zero_grad()
        for i, (bag, label) in enumerate(batches):
            (BCE(net(bag), label) / 4).backward()
            if (i + 1) % 4 == 0:
                opt.step()
                opt.zero_grad()
        epoch += 1


def _bags() -> Made:
    net = Bag().double()
    return net, sgd(net), DataLoader(Bags(), 1)


add("one bag a batch", _bag_by_bag, _bags)


def _entropy_only(net: Any, opt: Any, batches: Any) -> None:
    """Only the affine parameters of norms are adapted, by the entropy of answers (test-time adaptation)."""
    for x, _ in batches:
        out = net(x)
        opt.zero_grad()
        (-(out.softmax(1) * out.log_softmax(1)).sum(1).mean(0)).backward()
        opt.step()


def _norms_only() -> Made:
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).double()
    net.requires_grad_(False)
    norm: Any = net[1]
    norm.requires_grad_(True)
    norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    return net, torch.optim.Adam(norm.parameters(), lr=0.05), DataLoader(
        TensorDataset(normal(24, 8), torch.randint(3, (24,))), 6
    )  # fmt: skip


add("norms adapted by the entropy of answers", _entropy_only, _norms_only)


def _kto(net: Any, opt: Any, batches: Any) -> None:
    """Desirable and undesirable answers against the batch's mean divergence, detached (KTO)."""
    reference = small_net().double()
    for x, y in itertools.chain(batches, batches):
        logp = net(x).log_softmax(1).gather(1, y[:, None])[:, 0]
        with torch.no_grad():
            old = reference(x).log_softmax(1).gather(1, y[:, None])[:, 0]
        ratio = logp - old
        kl = ratio.mean().detach().clamp(min=0)
        good = (y > 0).double()
        loss = good * (1 - torch.sigmoid(ratio - kl)) + (1 - good) * (1 - torch.sigmoid(kl - ratio))
        opt.zero_grad()
        loss.mean().backward()
        opt.step()


add("answers against the batch's mean divergence", _kto)


class SegNet(nn.Module):
    """A main and an auxiliary map of classes, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.main, self.aux = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = F.relu(self.stem(x))
        return {"out": self.main(h), "aux": self.aux(h)}


def _seg_loss(out: Any, target: Tensor) -> Tensor:
    """Pixels of class 255 do not count; the auxiliary head by 0.5 (torchvision's references)."""
    losses = {name: CE(x, target, ignore_index=255) for name, x in out.items()}
    return losses["out"] + 0.5 * losses["aux"]


def _segmented() -> Made:
    y = torch.randint(3, (21, 5, 5))
    y[torch.rand(21, 5, 5) < 0.3] = 255
    return made(SegNet(), normal(21, 2, 5, 5), y)


of_outputs("maps of classes by name, pixels left out", _seg_loss, _segmented)


def _ctc() -> Made:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    lengths = torch.randint(5, 8, (21,))
    return made(net, normal(21, 7, 8), torch.randint(1, 5, (21, 3)), lengths, torch.randint(1, 4, (21,)))


def _ctc_loss(net: Any, batch: Any) -> Tensor:
    """The mean divides by the lengths of targets, infinities are zero."""
    x, y, frames, lengths = batch
    logs = net(x).log_softmax(2).transpose(0, 1)
    return F.ctc_loss(logs, y, frames, lengths, blank=0, reduction="mean", zero_infinity=True)


usual("speech: an alignment summed over, padded labels", _ctc_loss, _ctc)


def _ctc_joined(net: Any, batch: Any) -> Tensor:
    """Labels of all samples in one row (warp-ctc); the sum over the batch's size."""
    x, y, frames, lengths = batch
    flat = torch.cat([row[: int(n)] for row, n in zip(y, lengths, strict=True)])
    logs = net(x).log_softmax(2).transpose(0, 1)
    return F.ctc_loss(logs, flat, frames, lengths, reduction="sum", zero_infinity=True) / x.size(0)


usual("speech: labels in one row, over the batch", _ctc_joined, _ctc)


def _masked_spectrum(net: Any, opt: Any, batches: Any) -> None:
    """Frames and bands are hidden, by Python's random numbers of one seed, the same for the batch (SpecAugment)."""
    random.seed(3)
    for batch in itertools.chain(batches, batches):
        x = batch[0].clone()
        start, width = random.randint(0, 4), random.randint(1, 2)
        x[:, start : start + width] = 0
        band = random.randint(0, 5)
        x[:, :, band : band + 2] = x.mean(dim=(1, 2), keepdim=True)
        opt.zero_grad()
        _ctc_loss(net, (x, *batch[1:])).backward()
        opt.step()


add("speech: frames hidden by Python's random numbers", _masked_spectrum, _ctc)


class SoftCE(torch.autograd.Function):
    """A cross-entropy with a backward of its own, which divides by the number of rows."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor) -> Tensor:
        p = logits.softmax(1)
        ctx.save_for_backward(p, y)
        return -p.gather(1, y[:, None]).log().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, y = ctx.saved_tensors
        g = p.clone()
        g[torch.arange(len(y)), y] -= 1
        return grad * g / len(y), None


of_outputs("a cross-entropy with a backward of its own", lambda out, y: SoftCE.apply(out, y))


class MatchLoss(nn.Module):
    """A loss with a buffer of running numbers of its classes (equalised losses)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(3, dtype=torch.float64))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        if self.training:
            self.seen += torch.bincount(y, minlength=3)
        weight = (self.seen.sum() / self.seen) ** 0.5
        return (CE(out, y, reduction="none") * weight[y]).mean()


def _running_classes(net: Any, opt: Any, batches: Any) -> None:
    criterion = MatchLoss()
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        criterion(net(x), y).backward()
        opt.step()


add("a loss module that counts its classes", _running_classes)


def _bpr(net: Any, opt: Any, batches: Any) -> None:
    """Users prefer items they took to drawn ones; sparse tables by SparseAdam, the rest by Adam."""
    dense = torch.optim.Adam(net.out.parameters(), lr=0.01)
    for user, good, bad in itertools.chain(batches, batches):
        opt.zero_grad()
        dense.zero_grad()
        (-F.logsigmoid(net(user, good) - net(user, bad)).mean()).backward()
        opt.step()
        dense.step()


class Rec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(9, 4, sparse=True), nn.Embedding(13, 4, sparse=True)
        self.out = nn.Linear(4, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.out(self.users(user) * self.items(item))[:, 0]  # type: ignore[no-any-return]


def _rec() -> Made:
    net = Rec().double()
    data = TensorDataset(torch.randint(9, (21,)), torch.randint(13, (21,)), torch.randint(13, (21,)))
    tables = [*net.users.parameters(), *net.items.parameters()]
    return net, torch.optim.SparseAdam(tables, lr=0.01), DataLoader(data, 6)


add("sparse tables and a dense head, two optimizers", _bpr, _rec)


def _meta_batches(net: Any, opt: Any, batches: Any) -> None:
    """A batch of tasks, each adapted by functional_call and judged on its queries, first order."""
    for support, ys, query, yq in itertools.chain(batches, batches):
        opt.zero_grad()
        losses = []
        for i in range(support.size(0)):
            fast = {k: v.detach().clone().requires_grad_(True) for k, v in net.named_parameters()}
            inner = CE(torch.func.functional_call(net, fast, support[i]), ys[i])
            grads = torch.autograd.grad(inner, list(fast.values()))
            fast = {k: p - 0.1 * g for (k, p), g in zip(fast.items(), grads, strict=True)}
            outer = CE(torch.func.functional_call(net, fast, query[i]), yq[i])
            losses.append(outer.detach())
            back = torch.autograd.grad(outer, list(fast.values()))
            for p, g in zip(net.parameters(), back, strict=True):
                p.grad = g / support.size(0) if p.grad is None else p.grad + g / support.size(0)
        opt.step()


def _tasks() -> Made:
    net = small_net().double()
    data = TensorDataset(normal(8, 5, 8), torch.randint(3, (8, 5)), normal(8, 4, 8), torch.randint(3, (8, 4)))
    return net, sgd(net), DataLoader(data, 4)


add("tasks adapted by functional_call, first order", _meta_batches, _tasks)


def _bf16(net: Any, opt: Any, batches: Any) -> None:
    """Half precision by autocast, a scaler that is on, gradients unscaled and clipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = CE(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()


def _single() -> Made:
    net = small_net().float()
    data = TensorDataset(normal(24, 8).float(), torch.randint(3, (24,)))
    return net, sgd(net), DataLoader(data, 6)


add("half precision, scaled and clipped", _bf16, _single, within=2e-2)


def _newton(net: Any, opt: Any, batches: Any) -> None:
    """L-BFGS with a closure over each batch."""
    for x, y in batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = CE(net(x), y)
            loss.backward()
            return loss

        opt.step(closure)


def _lbfgs() -> Made:
    net, _, batches = classified()
    return net, torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3), batches


add("L-BFGS with a closure", _newton, _lbfgs)


def _median_spikes(net: Any, opt: Any, batches: Any) -> None:
    """A step is left out where the loss is far above the median of the last ones."""
    recent: deque[float] = deque(maxlen=5)
    for x, y in itertools.chain(batches, batches, batches):
        loss = CE(net(x), y)
        if len(recent) >= 3 and loss.item() > 1.2 * float(np.median(recent)):
            continue
        recent.append(loss.item())
        opt.zero_grad()
        loss.backward()
        opt.step()


add("steps left out above the median of losses", _median_spikes, lambda: classified(lr=0.3))


class Metrics:
    """Answers and labels of an epoch, kept as lists (torchmetrics)."""

    def __init__(self) -> None:
        self.preds: list[Tensor] = []
        self.target: list[Tensor] = []

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.preds.append(preds.detach())
        self.target.append(target)

    def compute(self) -> float:
        preds, target = torch.cat(self.preds), torch.cat(self.target)
        return float((preds.argmax(1) == target).double().mean())


def _best_of_epochs(net: Any, opt: Any, batches: Any) -> None:
    """The weights of the epoch with the best answers while training are loaded in the end."""
    best, kept = -1.0, {}
    for _ in range(4):
        metrics = Metrics()
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            CE(out, y).backward()
            opt.step()
            metrics.update(out, y)
        if (value := metrics.compute()) > best:
            best, kept = value, {k: v.detach().clone() for k, v in net.state_dict().items()}
    net.load_state_dict(kept)


add("the best epoch by answers kept in lists", _best_of_epochs, lambda: classified(lr=0.3))


def _two_phases(net: Any, opt: Any, batches: Any) -> None:
    """Losses of all samples by number are fitted by two Gaussians; the likelier clean ones train on (DivideMix)."""
    for epoch in range(3):
        clean = torch.ones(21, dtype=torch.float64)
        if epoch:
            losses = torch.zeros(21, dtype=torch.float64)
            net.eval()
            with torch.no_grad():
                for x, y, i in batches:
                    losses[i] = CE(net(x), y, reduction="none")
            net.train()
            losses = (losses - losses.min()) / (losses.max() - losses.min())
            means, var = torch.tensor([0.0, 1.0]).double(), losses.var(unbiased=False)
            for _ in range(5):
                share = torch.softmax(-((losses[:, None] - means) ** 2) / (2 * var + 1e-3), 1)
                means = (share * losses[:, None]).sum(0) / share.sum(0)
            clean = share[:, 0]
        for x, y, i in batches:
            opt.zero_grad()
            (CE(net(x), y, reduction="none") * clean[i]).mean().backward()
            opt.step()


add("two Gaussians over the losses of all samples", _two_phases,
    lambda: made(small_net(), normal(21, 8), torch.randint(3, (21,)), torch.arange(21)))  # fmt: skip


def _copied_average(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """A deep copy of the model is averaged by state_dict and evaluated (timm's ModelEma)."""
    ema = copy.deepcopy(net).eval()
    for x, y in itertools.chain(batches, batches):
        one_step(net, opt, x, y)
        with torch.no_grad():
            for a, b in zip(ema.state_dict().values(), net.state_dict().values(), strict=True):
                a.copy_(0.9 * a + 0.1 * b)
    return {f"ema.{k}": v for k, v in ema.state_dict().items()}


add("a deep copy averaged by its state", _copied_average)


def _traces(net: Any, opt: Any, batches: Any) -> None:
    """Eligibility traces by hand: the gradient of the mean value, times the batch's mean error (TD lambda)."""
    traces = [torch.zeros_like(p) for p in net.parameters()]
    for x, y in itertools.chain(batches, batches):
        value = net(x)[:, 0].mean()
        error = (y.double().mean() - value).detach()
        opt.zero_grad()
        value.backward()
        with torch.no_grad():
            for e, p in zip(traces, net.parameters(), strict=True):
                if p.grad is not None:
                    e.mul_(0.8).add_(p.grad)
                    p.add_(e * error, alpha=0.05)


add("traces of gradients times the mean error", _traces)


def _rollouts_loaded(net: Any, opt: Any, batches: Any) -> None:
    """Features of the batches are kept, and a loader over them trains the model for an epoch (rollout buffers)."""
    for _ in range(2):
        kept = [(x, net(x).detach().argmax(1)) for x, _ in batches]
        buffer = TensorDataset(torch.cat([x for x, _ in kept]), torch.cat([a for _, a in kept]))
        for x, a in DataLoader(buffer, 6):
            one_step(net, opt, x, a)


add("a loader over what was kept of the loop", _rollouts_loaded, lambda: classified(count=24))


def _fisher(net: Any, opt: Any, batches: Any) -> None:
    """Squares of each batch's gradients hold the weights in a second phase (EWC, after a first task)."""
    for x, y in batches:
        one_step(net, opt, x, y)
    fisher = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    for x, y in batches:
        net.zero_grad()
        CE(net(x), y).backward()
        for n, p in net.named_parameters():
            fisher[n] += p.grad.detach() ** 2 / len(batches)
    old = {n: p.detach().clone() for n, p in net.named_parameters()}
    for x, y in batches:
        opt.zero_grad()
        held = sum((fisher[n] * (p - old[n]) ** 2).sum() for n, p in net.named_parameters())
        (CE(net(x), (y + 1) % 3) + 5.0 * held).backward()
        opt.step()


add("held by squares of gradients of a first task", _fisher)
