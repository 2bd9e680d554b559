"""Methods as public programs train them: generative, self-supervised, reinforced, sequences, graphs, detection."""

from __future__ import annotations

import copy
import random
from collections import deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.program_table import Made, epochs, loader, made, normal, pairs, program, sgd
from benchmarks.program_table.scripts import numbers

CE, MSE, BCE = F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits


def _net(out: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, out))


def _classes(net: Any = _net, count: int = 21, batch: int = 6, **options: Any) -> Made:
    return made(net(), normal(count, 8), torch.randint(3, (count,)), batch=batch, **options)


class Summed(nn.Module):
    """A variational autoencoder whose loss is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mu, self.log, self.b = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.a(x))
        mu, log = self.mu(h), self.log(h)
        return torch.sigmoid(self.b(mu + torch.randn_like(log) * torch.exp(0.5 * log))), mu, log


def _summed(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    total = 0.0
    for x, _ in batches:
        opt.zero_grad()
        out, mu, log = net(x)
        loss = F.binary_cross_entropy(out, x.sigmoid(), reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + log - mu.pow(2) - log.exp())
        loss.backward()
        total += loss.item()
        opt.step()
    return numbers(loss=total / len(batches.dataset))


class Pair(nn.Module):
    """Generator and critic."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(x)  # type: ignore[no-any-return]


def _pair() -> Made:
    net = Pair().double()
    opt: Any = torch.optim.RMSprop(net.critic.parameters(), lr=0.005, eps=1e-2)
    opt.other = torch.optim.RMSprop(net.maker.parameters(), lr=0.005, eps=1e-2)
    return net, opt, loader(normal(21, 8), normal(21, 4), batch=6)


def _wasserstein(net: Any, opt: Any, batches: Any) -> None:
    """A critic with clipped weights, and a generator that is updated every second time."""
    for _ in range(2):
        for i, (x, z) in enumerate(batches):
            opt.zero_grad()
            fake = net.maker(z).detach()
            (net.critic(fake).mean() - net.critic(x).mean()).backward()
            opt.step()
            for p in net.critic.parameters():
                p.data.clamp_(-0.2, 0.2)
            if i % 2 == 0:
                opt.other.zero_grad()
                (-net.critic(net.maker(z)).mean()).backward()
                opt.other.step()


def _drawn_gan(net: Any, opt: Any, batches: Any) -> None:
    """Noise drawn in the loop."""
    for x, _ in batches:
        z = torch.randn(x.size(0), 4, dtype=x.dtype)
        real, fake = torch.ones(x.size(0), 1).to(x), torch.zeros(x.size(0), 1).to(x)
        opt.zero_grad()
        (BCE(net.critic(x), real) + BCE(net.critic(net.maker(z).detach()), fake)).backward()
        opt.step()
        opt.other.zero_grad()
        BCE(net.critic(net.maker(z)), real).backward()
        opt.other.step()


def _slopes(net: Any, batch: Any) -> Tensor:
    """A penalty on gradients between two sets of samples, at a fixed place."""
    x, other = batch
    between = (0.3 * x + 0.7 * other).requires_grad_(True)
    out = net(between)
    (slope,) = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True, retain_graph=True)
    penalty = ((slope.view(slope.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()
    return net(other).mean() - net(x).mean() + 10 * penalty  # type: ignore[no-any-return]


class Diffusion(nn.Module):
    """Draws times and noise in forward, and gives the loss."""

    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 8))
        self.register_buffer("noise", torch.linspace(0.9, 0.1, 10))

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 10, (x.shape[0],), device=x.device).long()
        noise = torch.randn_like(x)
        keep = self.noise.gather(0, t)[:, None].to(x)
        noisy = keep.sqrt() * x + (1 - keep).sqrt() * noise
        return MSE(self.net(torch.cat([noisy, t[:, None].to(x) / 10], 1)), noise)


class Told(nn.Module):
    """Told the time by an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.net = nn.Embedding(10, 8), _net(8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(x + self.times(t))  # type: ignore[no-any-return]


def _noised(net: Any, opt: Any, batches: Any) -> None:
    """Times and noise drawn in the loop; an average of the weights made by hand."""
    average = copy.deepcopy(net.state_dict())
    for _ in range(2):
        for x, _y in batches:
            t = torch.randint(0, 10, (x.shape[0],))
            noise = torch.randn_like(x)
            keep = torch.linspace(0.9, 0.1, 10, dtype=x.dtype)[t][:, None]
            loss = MSE(net(keep.sqrt() * x + (1 - keep).sqrt() * noise, t), noise)
            opt.zero_grad()
            loss.backward()
            opt.step()
            for n, v in net.state_dict().items():
                average[n] = 0.9 * average[n] + 0.1 * v
    net.load_state_dict(average)


class Clip(nn.Module):
    """Two towers and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = _net(4), nn.Embedding(11, 4)
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text).mean(1), dim=-1)
        return a, b, self.logit_scale.exp()


def _clip(net: Any, opt: Any, batches: Any) -> None:
    for x, t in batches:
        a, b, scale = net(x, t)
        logits = scale * a @ b.T
        labels = torch.arange(len(x))
        loss = (CE(logits, labels) + CE(logits.T, labels)) / 2
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            net.logit_scale.clamp_(0, np.log(100))


class Bootstrap(nn.Module):
    """Online and target encoder; the target follows by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = _net(6), nn.Linear(6, 6)
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        one, two = x + 0.1, x * 0.9
        with torch.no_grad():
            first, second = self.target(one), self.target(two)
        a, b = self.predictor(self.online(two)), self.predictor(self.online(one))
        return (2 - 2 * F.cosine_similarity(a, first) + 2 - 2 * F.cosine_similarity(b, second)).mean()

    def update_moving_average(self) -> None:
        for new, old in zip(self.online.parameters(), self.target.parameters(), strict=True):
            old.data = 0.9 * old.data + 0.1 * new.data


def _bootstrapped(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, _y in batches:
            loss = net(x)
            opt.zero_grad()
            loss.backward()
            opt.step()
            net.update_moving_average()


class Queued(nn.Module):
    """Momentum contrast: key encoder and queue are in the model, and move in forward."""

    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = _net(4), _net(4)
        for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
            b.data.copy_(a.data)
            b.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(4, 12), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _follow(self, keys: Tensor) -> None:
        for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
            b.data = b.data * 0.9 + a.data * 0.1
        at = int(self.place)
        for key in keys:
            self.queue[:, at] = key
            at = (at + 1) % 12
        self.place[0] = at

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.q(x), dim=1)
        with torch.no_grad():
            k = F.normalize(self.k(x * 0.9), dim=1)
        near = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        logits = torch.cat([near, torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])], 1) / 0.2
        self._follow(k)
        return logits, torch.zeros(len(x), dtype=torch.long)


def _twins(out: Tensor, _y: Tensor) -> Tensor:
    """Barlow twins: correlations of two views over the batch."""
    a, b = out[:, :4], out[:, 4:]
    a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    c = a.T @ b / len(a)
    return (c.diagonal() - 1).pow(2).sum() + 0.01 * (c - c.diagonal().diag()).pow(2).sum()


class Centre(nn.Module):
    """A loss that keeps the centre of the teacher's answers."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, 3).double())

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        wanted = ((teacher - self.centre) / 0.1).softmax(-1).detach()
        self.centre = self.centre * 0.9 + teacher.mean(0, keepdim=True) * 0.1
        return torch.sum(-wanted * F.log_softmax(student / 0.2, -1), -1).mean()


def _dino(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """A teacher outside that follows by ``state_dict``, and a loss with a buffer."""
    teacher, loss_fn = _net().double(), Centre()
    teacher.load_state_dict(net.state_dict())
    for _ in range(2):
        for x, _y in batches:
            with torch.no_grad():
                wanted = teacher(x * 0.9)
            opt.zero_grad()
            loss_fn(net(x), wanted).backward()
            opt.step()
            with torch.no_grad():
                for a, b in zip(teacher.parameters(), net.state_dict().values(), strict=True):
                    a.mul_(0.9).add_(b, alpha=0.1)
    return numbers(centre=loss_fn.centre)


def _distilled(net: Any, opt: Any, batches: Any) -> None:
    """A student learns from a teacher that was trained before, at a temperature."""
    torch.manual_seed(2)
    teacher = _net().double()
    other = sgd(teacher)
    for x, y in DataLoader(batches.dataset, 7):
        other.zero_grad()
        CE(teacher(x), y).backward()
        other.step()
    teacher.eval()
    for x, y in batches:
        with torch.no_grad():
            wanted = teacher(x)
        out = net(x)
        soft = F.kl_div(F.log_softmax(out / 4, 1), F.softmax(wanted / 4, 1), reduction="batchmean") * 16
        opt.zero_grad()
        (0.7 * soft + 0.3 * CE(out, y)).backward()
        opt.step()


def _q_learning(net: Any, opt: Any, _: Any) -> dict[str, Tensor]:
    """Replay: transitions are collected by acting, drawn by Python, and a target network follows."""
    target, memory, world = _net().double(), deque(maxlen=50), np.random.RandomState(1)
    target.load_state_dict(net.state_dict())
    state, rewards = world.randn(8), 0.0
    for step in range(24):
        if random.random() < 0.3:
            action = random.randrange(3)
        else:
            with torch.no_grad():
                action = net(torch.tensor(state)[None]).max(1).indices.item()
        after, reward = 0.5 * state + 0.1 * action + 0.1 * world.randn(8), float(action == step % 3)
        memory.append((state, action, reward, after))
        state, rewards = after, rewards + reward
        if len(memory) < 6:
            continue
        s, a, r, n = (np.stack(part) for part in zip(*random.sample(memory, 6), strict=True))
        value = net(torch.from_numpy(s)).gather(1, torch.from_numpy(a)[:, None])[:, 0]
        with torch.no_grad():
            wanted = torch.from_numpy(r) + 0.9 * target(torch.from_numpy(n)).max(1).values
        opt.zero_grad()
        F.smooth_l1_loss(value, wanted).backward()
        nn.utils.clip_grad_value_(net.parameters(), 100)
        opt.step()
        if step % 5 == 0:
            target.load_state_dict(net.state_dict())
    return numbers(rewards=rewards)


def _reinforced(net: Any, opt: Any, _: Any) -> None:
    """REINFORCE: an episode's actions are drawn from the policy, one by one."""
    for _episode in range(2):
        state, logs, rewards = torch.zeros(8, dtype=torch.float64), [], []
        for t in range(5):
            dist = torch.distributions.Categorical(logits=net(state[None]))
            action = dist.sample()
            logs.append(dist.log_prob(action))
            rewards.append(float(action.item() == t % 3))
            state = state * 0.5 + 0.1 * action.item()
        returns: list[float] = []
        for r in rewards[::-1]:
            returns.insert(0, r + 0.9 * (returns[0] if returns else 0.0))
        wanted = torch.tensor(returns, dtype=torch.float64)
        wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-6)
        opt.zero_grad()
        torch.cat([-log * r for log, r in zip(logs, wanted, strict=True)]).sum().backward()
        opt.step()


def _clipped_policy(net: Any, opt: Any, batches: Any) -> None:
    """PPO on minibatches of a rollout, drawn by a permutation, with an early stop by the KL divergence."""
    x = batches.dataset.tensors[0]
    with torch.no_grad():
        dist = torch.distributions.Categorical(logits=net(x))
        actions = dist.sample()
        old = dist.log_prob(actions)
    gain = (actions == x.argmax(1) % 3).to(x)
    for _ in range(3):
        rows, kl = np.arange(len(x)), torch.tensor(0.0)
        np.random.shuffle(rows)
        for i in range(0, len(x), 6):
            part = torch.from_numpy(rows[i : i + 6])
            new = torch.distributions.Categorical(logits=net(x[part])).log_prob(actions[part])
            ratio = (new - old[part]).exp()
            kl = ((ratio - 1) - (new - old[part])).mean()
            adv = (gain[part] - gain[part].mean()) / (gain[part].std() + 1e-8)
            loss = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
        if kl > 0.02:
            break


class Seq2seq(nn.Module):
    """Encoder and decoder, taught by force by a coin of Python's."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.words, self.ratio = nn.Embedding(9, 8), ratio
        self.encoder, self.decoder, self.head = nn.GRU(8, 8, batch_first=True), nn.GRUCell(8, 8), nn.Linear(8, 9)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        h = self.encoder(self.words(source))[1][0]
        token, outs = target[:, 0], []
        for t in range(1, target.shape[1]):
            h = self.decoder(self.words(token), h)
            outs.append(self.head(h))
            token = target[:, t] if random.random() < self.ratio else outs[-1].argmax(1)
        return torch.stack(outs, 1)


def _translated(net: Any, batch: Any) -> Tensor:
    return CE(net(*batch).flatten(0, 1), batch[1][:, 1:].reshape(-1), ignore_index=0)


class Words(nn.Module):
    """A recurrent language model whose state is handed on; time comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(9, 8), nn.LSTM(8, 8), nn.Linear(8, 9)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, state = self.rnn(self.words(x), state)
        return self.head(out), state

    def init_hidden(self, size: int) -> tuple[Tensor, Tensor]:
        w = next(self.parameters())
        return w.new_zeros(1, size, 8), w.new_zeros(1, size, 8)


def _time_first() -> Made:
    net = Words().double()
    tokens = torch.randint(9, (21, 6))
    return net, sgd(net), [(tokens[i : i + 5], tokens[i + 1 : i + 6]) for i in range(0, 20, 5)]


def _batch_first() -> Made:
    net = Words().double()
    net.rnn.batch_first = True
    tokens = torch.randint(9, (6, 21))
    return net, sgd(net), [(tokens[:, i : i + 5], tokens[:, i + 1 : i + 6]) for i in range(0, 20, 5)]


def _carried(dim: int) -> Any:
    def loop(net: Any, opt: Any, batches: Any) -> None:
        for _ in range(2):
            state = None
            for x, y in batches:
                state = net.init_hidden(x.size(dim)) if state is None else tuple(s.detach() for s in state)
                opt.zero_grad()
                out, state = net(x, state)
                CE(out.reshape(-1, 9), y.reshape(-1)).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.25)
                opt.step()

    return loop


class Graph(nn.Module):
    """Two graph convolutions over one graph: every row looks at others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    @staticmethod
    def _spread(h: Tensor, edges: Tensor) -> Tensor:
        return h + torch.zeros_like(h).index_add_(0, edges[1], h[edges[0]])

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.b(self._spread(F.relu(self._spread(self.a(x), edges)), edges))  # type: ignore[no-any-return]


def _one_graph() -> Made:
    net = Graph().double()
    batch = (normal(20, 8), torch.randint(20, (2, 40)), torch.randint(3, (20,)), torch.rand(20) < 0.5)
    return net, sgd(net), [batch]


def _nodes(net: Any, batch: Any) -> Tensor:
    x, edges, y, mask = batch
    return CE(net(x, edges)[mask], y[mask])


@dataclass
class Graphs:
    """Graphs of one batch, one after another."""

    x: Tensor
    edges: Tensor
    owner: Tensor
    y: Tensor

    def to(self, *_: Any, **__: Any) -> Graphs:
        return self


class Pooled(nn.Module):
    """A graph's answer is the mean of its nodes'."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Graph()

    def forward(self, data: Graphs) -> Tensor:
        h, count = self.net(data.x, data.edges), len(data.y)
        total = torch.zeros(count, 3, dtype=h.dtype).index_add_(0, data.owner, h)
        return total / torch.bincount(data.owner, minlength=count)[:, None]


def _graph(rows: list[Any]) -> Graphs:
    starts = np.cumsum([0] + [len(r[0]) for r in rows])
    return Graphs(
        torch.cat([r[0] for r in rows]), torch.cat([r[1] + s for r, s in zip(rows, starts, strict=False)], 1),
        torch.cat([torch.full((len(r[0]),), i) for i, r in enumerate(rows)]), torch.stack([r[2] for r in rows]),
    )  # fmt: skip


def _graph_dictionary(rows: list[Any]) -> dict[str, Tensor]:
    return vars(_graph(rows))


class PooledOf(Pooled):
    """The same, of single tensors."""

    def forward(self, x: Tensor, edges: Tensor, owner: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(Graphs(x, edges, owner, y))


def _graphs(collate: Any, net: nn.Module) -> Made:
    rows = [(normal(3 + i % 3, 8), torch.randint(3, (2, 4)), torch.randint(3, ())) for i in range(21)]
    return net.double(), sgd(net), DataLoader(rows, 6, collate_fn=collate)  # type: ignore[arg-type]


class Boxes(nn.Module):
    """A grid of answers for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


def _yolo(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Images stacked; boxes of all one after another, each with the number of its image."""
    boxes = [torch.cat([torch.full((len(b), 1), float(i)).to(b), b], 1) for i, (_, b) in enumerate(rows)]
    return torch.stack([r[0] for r in rows]), torch.cat(boxes)


def _detected(net: Any, batch: Any) -> Tensor:
    images, boxes = batch
    out = net(images)
    image, cell = boxes[:, 0].long(), boxes[:, 1].long()
    wanted = torch.zeros_like(out[..., 0])
    wanted[image, cell] = 1
    return MSE(out[image, cell, 1:], boxes[:, 2:]) + BCE(out[..., 0], wanted)


def _boxes() -> Made:
    net = Boxes().double()
    rows = [
        (normal(3, 4, 4), torch.cat([torch.randint(16, (1 + i % 3, 1)).double(), normal(1 + i % 3, 4)], 1))
        for i in range(21)
    ]
    return net, sgd(net), DataLoader(rows, 6, collate_fn=_yolo)  # type: ignore[arg-type]


Named = namedtuple("Named", "inputs labels names")


@dataclass
class Batch:
    """What a collate function gives."""

    inputs: Tensor
    labels: Tensor

    def pin_memory(self) -> Batch:
        return self


def _as_tuple(rows: list[Any]) -> Named:
    return Named(torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]), [str(int(r[1])) for r in rows])


def _as_batch(rows: list[Any]) -> Batch:
    return Batch(torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]))


def _as_list(rows: list[Any]) -> dict[str, Any]:
    return {"inputs": [r[0] for r in rows], "labels": [int(r[1]) for r in rows], "weights": None}


def _collated(collate: Any) -> Any:
    def make() -> Made:
        net, opt, batches = _classes()
        return net, opt, DataLoader(batches.dataset, 6, collate_fn=collate)

    return make


def _listed(net: Any, batch: Any) -> Tensor:
    return CE(net(torch.stack(batch["inputs"])), torch.tensor(batch["labels"]))


def _fields(net: Any, batch: Any) -> Tensor:
    return CE(net(batch.inputs), batch.labels)


class Margin(nn.Module):
    """ArcFace: a head outside the model, with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).roll(2, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        return 8 * (cosine - 0.2 * F.one_hot(y, 3))


def _margin_made() -> Made:
    net, _, batches = _classes(lambda: _net(4))
    head = Margin()
    opt: Any = torch.optim.SGD([{"params": net.parameters()}, {"params": head.parameters()}], lr=0.05, momentum=0.9)
    opt.head = head
    return net, opt, batches


def _margin(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    for x, y in batches:
        opt.zero_grad()
        CE(opt.head(net(x), y), y).backward()
        opt.step()
    return {"head": opt.head.weight.detach()}


def _centre_loss(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Centres of classes outside the model, with an optimizer of their own."""
    centres = nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3))
    other = torch.optim.SGD([centres], lr=0.5)
    for x, y in batches:
        out = net(x)
        loss = CE(out, y) + 0.1 * (out - centres[y]).pow(2).sum(1).mean()
        opt.zero_grad()
        other.zero_grad()
        loss.backward()
        opt.step()
        other.step()
    return {"centres": centres.detach()}


def _scale_outside(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """A learned number beside the model, updated by hand."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    for x, y in batches:
        opt.zero_grad()
        CE(net(x) * scale, y).backward()
        opt.step()
        with torch.no_grad():
            scale -= 0.1 * scale.grad
            scale.grad.zero_()
    return {"scale": scale.detach()}


def _unlabelled(net: Any, opt: Any, batches: Any) -> None:
    """Samples without labels from a second loader, in one call with the others (FixMatch)."""
    more = DataLoader(torch.randn(30, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64), 6)
    for (x, y), u in zip(batches, more, strict=False):
        out = net(torch.cat([x, u]))
        own, other = out[: len(x)], out[len(x) :]
        with torch.no_grad():
            sure, guess = net(u * 0.9).softmax(1).max(1)
        loss = CE(own, y) + (CE(other, guess, reduction="none") * (sure > 0.3)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


class Reversed(torch.autograd.Function):
    """The gradient changes its sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -ctx.alpha * gradient, None


class Adversarial(nn.Module):
    """Classes, and which of two domains it is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.domain = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
        h = F.relu(self.body(x))
        return self.kind(h), self.domain(Reversed.apply(h, alpha))


def _domains(net: Any, opt: Any, batches: Any) -> None:
    """Two loaders side by side, and a factor that grows step by step."""
    other = DataLoader(torch.randn(24, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64), 6)
    for epoch in range(2):
        for i, ((x, y), t) in enumerate(zip(batches, other, strict=False)):
            p = (i + epoch * 4) / 8
            alpha = 2.0 / (1.0 + np.exp(-10 * p)) - 1
            opt.zero_grad()
            kind, domain = net(x, alpha)
            _, far = net(t, alpha)
            loss = CE(kind, y) + CE(domain, torch.zeros(len(x)).long()) + CE(far, torch.ones(len(t)).long())
            loss.backward()
            opt.step()


class Quantised(nn.Module):
    """A codebook that follows its inputs by running means, in forward."""

    book: Tensor
    size: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(4, 8)
        book = torch.linspace(-1, 1, 20).view(5, 4).roll(1, 1)
        self.register_buffer("book", book)
        self.register_buffer("size", torch.ones(5))
        self.register_buffer("total", book.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        chosen = F.one_hot(torch.cdist(h, self.book).argmin(1), 5).to(h)
        q = chosen @ self.book
        if self.training:
            with torch.no_grad():
                self.size.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.total.mul_(0.9).add_(chosen.T @ h, alpha=0.1)
                self.book.copy_(self.total / self.size[:, None])
        return self.b(h + (q - h).detach()), MSE(h, q.detach())


class Rounded(nn.Module):
    """Weights are rounded in forward, gradients go straight through; scales of activations are followed."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        w = self.a.weight
        h = F.relu(F.linear(x, w + (torch.round(w * 16) / 16 - w).detach(), self.a.bias))
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * h.detach().abs().max()
        h = h + (torch.round(h / self.scale * 127) / 127 * self.scale - h).detach()
        return self.b(h)  # type: ignore[no-any-return]


def _features(net: Any, opt: Any, batches: Any) -> None:
    """A hook keeps what a layer gave; the loss reads it."""
    kept: dict[str, Tensor] = {}
    handle = net[2].register_forward_hook(lambda _m, _i, out: kept.__setitem__("h", out))
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        (CE(out, y) + 0.1 * kept["h"].abs().mean()).backward()
        opt.step()
    handle.remove()


def _resized(net: Any, opt: Any, batches: Any) -> None:
    """Images grow from epoch to epoch."""
    for size in (4, 6, 8):
        for x, y in batches:
            x = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()


def _convolved() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def _twice(net: Any, batch: Any) -> Tensor:
    """R-Drop: two passes with other masks agree."""
    x, y = batch
    a, b = net(x), net(x)
    apart = F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean")
    return (CE(a, y) + CE(b, y)) / 2 + 0.3 * apart


class Buckets:
    """Batches of samples of like length, in an order of its own in every epoch."""

    def __init__(self, lengths: list[int], size: int) -> None:
        self.lengths, self.size = lengths, size

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], random.random()))
        batches = [order[i : i + self.size] for i in range(0, len(order), self.size)]
        random.shuffle(batches)
        return iter(batches)

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.size)


def _padded(rows: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    x = nn.utils.rnn.pad_sequence([r[0] for r in rows], batch_first=True)
    return x, torch.tensor([len(r[0]) for r in rows]), torch.stack([r[1] for r in rows])


class Lengths(nn.Module):
    """Reads packed sequences, made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0][-1])  # type: ignore[no-any-return]


def _bucketed() -> Made:
    lengths = [2 + i * 7 % 6 for i in range(21)]
    rows = [(normal(n, 8), torch.randint(3, ())) for n in lengths]
    net = Lengths().double()
    return net, sgd(net), DataLoader(rows, batch_sampler=Buckets(lengths, 6), collate_fn=_padded)  # type: ignore[arg-type]


class Growing(Dataset[Any]):
    """More samples from epoch to epoch."""

    def __init__(self) -> None:
        self.x, self.y, self.share = normal(24, 8), torch.randint(3, (24,)), 0.5

    def __len__(self) -> int:
        return int(24 * self.share)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def _curriculum(net: Any, opt: Any, batches: Any) -> None:
    for share in (0.5, 0.75, 1.0):
        batches.dataset.share = share
        epochs(pairs(CE), 1)(net, opt, batches)


class Flow(IterableDataset[Any]):
    """An endless stream, shuffled in a buffer by Python's generator."""

    def __iter__(self) -> Iterator[Any]:
        x, y = torch.arange(24 * 8).view(24, 8).double().sin(), torch.arange(24) % 3
        kept: list[int] = []
        for i in range(10_000):
            kept.append(i % 24)
            if len(kept) > 8:
                j = kept.pop(random.randrange(len(kept)))
                yield x[j], y[j]


def _steps(net: Any, opt: Any, batches: Any) -> None:
    for i, (x, y) in enumerate(batches):
        if i >= 7:
            break
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()


class SmoothedSum(nn.Module):
    """Label smoothing by a distribution that is filled in, summed and divided by tokens."""

    def forward(self, out: Tensor, y: Tensor, count: Any) -> Tensor:
        true = torch.full_like(out, 0.1 / 2)
        true.scatter_(1, y.data.unsqueeze(1), 0.9)
        true[:, 0] = 0
        mask = torch.nonzero(y.data == 0)
        if mask.dim() > 0:
            true.index_fill_(0, mask.squeeze(-1), 0.0)
        return F.kl_div(out.log_softmax(-1), true, reduction="sum") / count


def _smoothed(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """As the annotated transformer computes its loss, with a rate by its own schedule."""
    loss_fn, tokens = SmoothedSum(), 0
    for step, (x, y) in enumerate(batches, 1):
        for g in opt.param_groups:
            g["lr"] = 0.5 * min(step**-0.5, step * 4**-1.5)
        count = (y != 0).data.sum()
        loss = loss_fn(net(x), y, count)
        opt.zero_grad()
        loss.backward()
        opt.step()
        tokens += int(count)
    return numbers(tokens=tokens)


class Losses(nn.Module):
    """Gives a dictionary of losses with its answers, as toolboxes do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net(4)

    def forward(self, inputs: Tensor, labels: Tensor | None = None, mode: str = "predict") -> Any:
        out = self.net(inputs)
        if mode == "predict" or labels is None:
            return out.argmax(1)
        return {
            "loss_cls": CE(out[:, :3], labels), "loss_reg": (out[:, 3] - labels).abs().mean(),
            "acc": (out[:, :3].argmax(1) == labels).double().mean(),
        }  # fmt: skip


def _toolbox(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    log: list[float] = []
    for x, y in batches:
        found = net(x, y, mode="loss")
        loss = sum(v for k, v in found.items() if "loss" in k)
        opt.zero_grad()
        loss.backward()
        opt.step()
        log.append(sum(v.item() for v in found.values()))
    net.eval()
    with torch.no_grad():
        answers = net(torch.linspace(-1, 1, 40, dtype=torch.float64).view(5, 8))
    return numbers(answers=answers)


def _accumulating_scaler(net: Any, opt: Any, batches: Any) -> None:
    """Autocast, a scaler, clipping and two batches a step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for _ in range(2):
        for i, (x, y) in enumerate(batches):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                loss = CE(net(x), y) / 2
            scaler.scale(loss).backward()
            if i % 2 or i + 1 == len(batches):
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad(set_to_none=True)


def _virtual(net: Any, opt: Any, batches: Any) -> None:
    """Virtual adversarial training: a direction found by a gradient of a divergence."""
    for x, y in batches:
        with torch.no_grad():
            before = net(x).softmax(1)
        d = F.normalize(x.flip(1), dim=1).requires_grad_()
        apart = F.kl_div(net(x + 0.1 * d).log_softmax(1), before, reduction="batchmean")
        (slope,) = torch.autograd.grad(apart, d)
        r = 0.5 * F.normalize(slope, dim=1)
        opt.zero_grad()
        loss = CE(net(x), y) + F.kl_div(net(x + r).log_softmax(1), before, reduction="batchmean")
        loss.backward()
        opt.step()


def _mean_teacher(net: Any, opt: Any, batches: Any) -> None:
    """A teacher made before the loop from the model itself, by ``deepcopy`` of its module."""
    teacher = copy.deepcopy(net.module if hasattr(net, "module") else net)
    for p in teacher.parameters():
        p.detach_()
    for step, (x, y) in enumerate(batches):
        out = net(x)
        with torch.no_grad():
            wanted = teacher(x * 0.9)
        opt.zero_grad()
        (CE(out, y) + MSE(out.softmax(1), wanted.softmax(1))).backward()
        opt.step()
        keep = min(1 - 1 / (step + 1), 0.9)
        for a, b in zip(teacher.parameters(), net.parameters(), strict=True):
            a.data.mul_(keep).add_(b.data, alpha=1 - keep)


usual = epochs(pairs(CE))
program("method", "autoencoder, a summed loss", lambda: _classes(Summed), _summed)
program("method", "critic with clipped weights", _pair, _wasserstein)
program("method", "GAN, noise drawn", _pair, _drawn_gan)
program("method", "a penalty between samples", lambda: made(_net(1), normal(21, 8), normal(21, 8), lr=0.01),
        epochs(_slopes))  # fmt: skip
program("method", "diffusion in forward", lambda: _classes(Diffusion), epochs(lambda n, b: n(b[0])))
program("method", "diffusion in the loop", lambda: _classes(Told), _noised)
program("method", "two towers", lambda: made(Clip(), normal(21, 8), torch.randint(11, (21, 5)), lr=0.01), _clip)
program("method", "bootstrapped", lambda: _classes(Bootstrap), _bootstrapped)
program("method", "queue in the model", lambda: _classes(Queued, 24), epochs(lambda n, b: CE(*n(b[0]))))
program("method", "twins", lambda: _classes(lambda: _net(8), 24), epochs(pairs(_twins)), _twins)
program("method", "teacher with a centre", _classes, _dino)
program("method", "distilled", _classes, _distilled)
program("method", "replay and a target network", _classes, _q_learning)
program("method", "policy gradient, one by one", _classes, _reinforced)
program("method", "clipped policy", _classes, _clipped_policy)
for _ratio in (1.0, 0.5):
    program("method", f"translation, taught by force {_ratio:g}", lambda r=_ratio: made(Seq2seq(r),  # type: ignore[misc]
            torch.randint(1, 9, (21, 5)), torch.randint(9, (21, 6))), epochs(_translated))  # fmt: skip
program("method", "state handed on, time first", _time_first, _carried(1))
program("method", "state handed on", _batch_first, _carried(0))
program("method", "nodes of one graph", _one_graph, epochs(_nodes, 3))
program("method", "graphs in an object", lambda: _graphs(_graph, Pooled()), epochs(lambda n, b: CE(n(b), b.y)))
program("method", "graphs in a dictionary", lambda: _graphs(_graph_dictionary, PooledOf()),
        epochs(lambda n, b: CE(n(**b), b["y"])))  # fmt: skip
program("method", "boxes with the number of their image", _boxes, epochs(_detected))
program("method", "batches as named tuples", _collated(_as_tuple), epochs(_fields))
program("method", "batches as objects", _collated(_as_batch), epochs(_fields))
program("method", "batches as lists", _collated(_as_list), epochs(_listed))
program("method", "a head outside the model", _margin_made, _margin)
program("method", "centres outside the model", _classes, _centre_loss)
program("method", "a scale outside the model", _classes, _scale_outside)
program("method", "samples without labels", _classes, _unlabelled)
program("method", "two domains", lambda: _classes(Adversarial, 24), _domains)
program("method", "codebook that follows", lambda: _classes(Quantised, 24),
        epochs(lambda n, b: (lambda o: MSE(o[0], b[0]) + o[1])(n(b[0]))))  # fmt: skip
program("method", "rounded weights", lambda: _classes(Rounded), usual, CE)
program("method", "features kept by a hook", _classes, _features)
program("method", "images that grow", lambda: made(_convolved(), normal(21, 3, 8, 8), torch.randint(3, (21,))),
        _resized)  # fmt: skip
program("method", "two passes that agree", lambda: _classes(lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3),
        nn.Linear(16, 3))), epochs(_twice))  # fmt: skip
program("method", "buckets by length", _bucketed, epochs(lambda n, b: CE(n(b[0], b[1]), b[2])))
program("method", "more samples every epoch", lambda: (lambda n: (n, sgd(n), DataLoader(Growing(), 6, shuffle=True)))(
        _net().double()), _curriculum)  # fmt: skip
program("method", "an endless stream", lambda: (lambda n: (n, sgd(n), DataLoader(Flow(), 6)))(_net().double()), _steps)
program("method", "smoothing, summed over tokens", _classes, _smoothed)
program("method", "losses in a dictionary", lambda: _classes(Losses), _toolbox)
program("method", "scaler and accumulation", _classes, _accumulating_scaler)
program("method", "virtual adversarial", _classes, _virtual)
program("method", "mean teacher", _classes, _mean_teacher)
