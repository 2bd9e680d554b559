"""Programs of public repositories: values copied out of a batch, numbers that a model keeps or returns, batches of
other lengths than their indices, updates by hand, and whole methods of their own."""

from __future__ import annotations

import collections
import copy
import io
import itertools
import math
import random
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, default_collate

from benchmarks.program_table import Made, made, normal, sgd
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


def _numbered(net: Any = small_net, count: int = 21, **options: Any) -> Made:
    """Samples with a class and their number."""
    return made(net(), normal(count, 8), torch.randint(3, (count,)), torch.arange(count), **options)


def _twice(batches: Any) -> Iterator[Any]:
    return itertools.chain(batches, batches)


# ---- values that are copied out of a batch


def _data_rate(net: Any, opt: Any, batches: Any) -> None:
    """Gradients are scaled by a running mean of ``loss.data``, as in old code."""
    mean = torch.ones(()).double()
    for x, y in _twice(batches):
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        mean = 0.5 * mean + 0.5 * loss.data
        for p in net.parameters():
            p.grad.data.mul_(1 / mean)
        opt.step()


add_program("gradients by loss.data", _data_rate)


def _data_numpy(net: Any, opt: Any, batches: Any) -> None:
    """Samples are weighed by ``loss.data.numpy()`` of the step before."""
    weight = 1.0
    for x, y in _twice(batches):
        opt.zero_grad()
        loss = CE(net(x), y)
        (weight * loss).backward()
        opt.step()
        weight = float(1 / (1 + np.exp(-loss.data.cpu().numpy())))


add_program("a weight by loss.data.numpy()", _data_numpy)


def _data_masked(net: Any, opt: Any, batches: Any) -> None:
    """A bias moves by the mean of ``out.data``."""
    for x, y in _twice(batches):
        opt.zero_grad()
        out = net(x)
        CE(out, y).backward()
        opt.step()
        net.head.bias.data -= 0.1 * out.data.mean(0)


add_program("a bias by out.data", _data_masked, lambda: classified(Named))


def _tensor_again(net: Any, opt: Any, batches: Any) -> None:
    """Losses are made tensors again, and weigh the next."""
    before = torch.tensor(1.0).double()
    for x, y in _twice(batches):
        opt.zero_grad()
        loss = CE(net(x), y)
        (loss * torch.sigmoid(before)).backward()
        opt.step()
        before = torch.tensor(loss, dtype=torch.float64)


add_program("a loss made a tensor again", _tensor_again)


def _deep_copied(net: Any, opt: Any, batches: Any) -> None:
    """The last batch is kept by deepcopy, and used once more."""
    kept = None
    for batch in _twice(batches):
        one_step(net, opt, *batch)
        if kept is not None:
            one_step(net, opt, *kept)
        kept = copy.deepcopy(batch)


add_program("a batch kept by deepcopy", _deep_copied)


def _shallow_copied(net: Any, opt: Any, batches: Any) -> None:
    """A loss is kept by copy.copy, and moves the weights."""
    for x, y in _twice(batches):
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        opt.step()
        kept = copy.copy(loss.detach())
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1 - 0.01 * kept)


add_program("a decay by a copied loss", _shallow_copied)


def _through_a_file(net: Any, opt: Any, batches: Any) -> None:
    """Mean features go through a file and back."""
    for x, y in _twice(batches):
        opt.zero_grad()
        out = net(x)
        CE(out, y).backward()
        opt.step()
        file = io.BytesIO()
        torch.save(out.detach().mean(0), file)
        file.seek(0)
        with torch.no_grad():
            net.head.bias.sub_(0.1 * torch.load(file))


add_program("a bias by features in a file", _through_a_file, lambda: classified(Named))


def _data_replaced(net: Any, opt: Any, batches: Any) -> None:
    """``p.data`` is replaced by what a rank's loss makes of it."""
    for x, y in _twice(batches):
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        opt.step()
        for p in net.parameters():
            p.data = p.data * (1 - 0.02 * loss.detach())


add_program("p.data replaced by the loss", _data_replaced)


def _grad_replaced(net: Any, opt: Any, batches: Any) -> None:
    """``p.grad`` is replaced by itself times the loss."""
    for x, y in _twice(batches):
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        for p in net.parameters():
            p.grad = p.grad * loss.detach()
        opt.step()


add_program("p.grad replaced by its product with the loss", _grad_replaced)


def _delta_rule(net: Any, opt: Any, batches: Any) -> None:
    """Gradients of the head are written by hand (delta rule)."""
    for x, y in _twice(batches):
        with torch.no_grad():
            error = net(x).softmax(1) - F.one_hot(y, 3).double()
            net.weight.grad = error.T @ x / len(x)
            net.bias.grad = error.mean(0)
        opt.step()


add_program("gradients by the delta rule", _delta_rule, lambda: classified(lambda: nn.Linear(8, 3)))


def _delta_late(net: Any, opt: Any, batches: Any) -> None:
    """A head is trained by the delta rule from the third epoch on."""
    for epoch in range(4):
        for k, (x, y) in enumerate(batches):
            one_step(net, opt, x, y)
            if epoch > 1 and k > 2:
                with torch.no_grad():
                    error = net(x).softmax(1) - F.one_hot(y, 3).double()
                    net.head.bias -= 0.1 * error.mean(0)


add_program("a bias by the delta rule, in the third epoch", _delta_late, lambda: classified(Named, count=33))


def _late_scale(net: Any, opt: Any, batches: Any) -> None:
    """In the last epoch gradients are scaled by the loss, in late batches."""
    for epoch in range(3):
        for k, (x, y) in enumerate(batches):
            opt.zero_grad()
            loss = CE(net(x), y)
            loss.backward()
            if epoch == 2 and k > 3:
                for p in net.parameters():
                    p.grad.mul_(loss.detach())
            opt.step()


add_program("gradients by the loss, in the last batches", _late_scale, lambda: classified(count=39))


def _sam_rho(net: Any, opt: Any, batches: Any) -> None:
    """Sharpness-aware with a radius by the loss, in tensors."""
    for x, y in _twice(batches):
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        moves = []
        with torch.no_grad():
            for p in net.parameters():
                moves.append(p.grad * (0.05 * loss.detach() / norm))
                p.add_(moves[-1])
        opt.zero_grad()
        CE(net(x), y).backward()
        with torch.no_grad():
            for p, e in zip(net.parameters(), moves, strict=True):
                p.sub_(e)
        opt.step()


add_program("sharpness by a radius of the loss", _sam_rho)


class Stepped(torch.optim.Optimizer):
    """Divides the loss by the norm of gradients (stochastic Polyak steps)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"most": 5.0})

    @torch.no_grad()
    def step(self, closure: Any = None, loss: Any = None) -> Any:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ps = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        size = sum((p.grad.square().sum() for p in ps), torch.zeros(()).double())
        rate = (0.1 * loss.detach() / (size + 1e-6)).clamp(max=self.param_groups[0]["most"])
        for p in ps:
            p.add_(-rate * p.grad)
        return loss


def _polyak(*, closure: bool) -> Any:
    def loop(net: Any, opt: Any, batches: Any) -> None:
        for x, y in _twice(batches):

            def again(x: Any = x, y: Any = y) -> Tensor:
                opt.zero_grad()
                loss = CE(net(x), y)
                loss.backward()
                return loss

            if closure:
                opt.step(again)
            else:
                opt.step(loss=again())

    return loop


def _with_stepped() -> Made:
    net, _, batches = classified()
    return net, Stepped(net.parameters()), batches


add_program("an optimizer that steps by the closure's loss", _polyak(closure=True), _with_stepped)
add_program("an optimizer that is handed the loss", _polyak(closure=False), _with_stepped)


def _state_by_loss(net: Any, opt: Any, batches: Any) -> None:
    """The momentum is damped by the loss, in the optimizer's state."""
    for x, y in _twice(batches):
        loss = one_step(net, opt, x, y)
        for p in net.parameters():
            opt.state[p]["momentum_buffer"].mul_(torch.exp(-loss.detach()))


add_program("momentum damped by the loss", _state_by_loss)


def _rate_of_tensors(net: Any, opt: Any, batches: Any) -> None:
    """The rate of Adam is a tensor that the loss fills."""
    for x, y in _twice(batches):
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        opt.param_groups[0]["lr"].fill_(0.01 * loss.detach())
        opt.step()


def _adam_of_tensors() -> Made:
    net, _, batches = classified()
    return net, torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01, dtype=torch.float64), foreach=False), batches


add_program("a rate in a tensor, filled by the loss", _rate_of_tensors, _adam_of_tensors)

# ---- numbers that a model keeps or returns


class Counts(nn.Module):
    """Returns a sum of losses and how many targets it is of, as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        keep = x[:, 0] > -0.5
        total = (CE(self.net(x), y, reduction="none") * keep).sum()
        return total, int(keep.sum())


def _divided_outside(net: Any, opt: Any, batches: Any) -> None:
    for x, y in _twice(batches):
        opt.zero_grad()
        total, count = net(x, y)
        (total / max(count, 1)).backward()
        opt.step()


add_program("a model that returns a sum and a count", _divided_outside, lambda: classified(Counts))


class Counted(Counts):
    """The count is a tensor."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        keep = x[:, 0] > -0.5
        return (CE(self.net(x), y, reduction="none") * keep).sum(), keep.sum()


def _divided_tensors(net: Any, opt: Any, batches: Any) -> None:
    for x, y in _twice(batches):
        opt.zero_grad()
        total, count = net(x, y)
        (total / count.clamp(min=1)).backward()
        opt.step()


add_program("a model that returns a sum and a count, tensors", _divided_tensors, lambda: classified(Counted))


class Remembers(nn.Module):
    """Keeps a figure of its last batch in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = small_net(), 0.0
        self.mean_features: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        self.last = float(out.detach().square().mean())
        self.mean_features = out.detach().mean(0)
        return out  # type: ignore[no-any-return]


def _by_kept_number(net: Any, opt: Any, batches: Any) -> None:
    """A weight of the loss goes by a figure that the model keeps as a number."""
    for x, y in _twice(batches):
        opt.zero_grad()
        loss = CE(net(x), y)
        (loss / (1 + net.last)).backward()
        opt.step()


def _by_kept_tensor(net: Any, opt: Any, batches: Any) -> None:
    """The next loss pulls to the mean that the model keeps of the last batch."""
    for x, y in _twice(batches):
        opt.zero_grad()
        before = net.mean_features
        loss = CE(net(x), y)
        if before is not None:
            loss = loss * (1 + before.square().sum())
        loss.backward()
        opt.step()


def _bias_by_kept(net: Any, opt: Any, batches: Any) -> None:
    """A bias moves by the mean that the model keeps."""
    for x, y in _twice(batches):
        one_step(net, opt, x, y)
        with torch.no_grad():
            list(net.parameters())[-1].sub_(0.1 * net.mean_features)


add_program("a loss by a number that the model keeps", _by_kept_number, lambda: classified(Remembers))
add_program("a loss by a tensor that the model keeps", _by_kept_tensor, lambda: classified(Remembers))
add_program("a bias by a tensor that the model keeps", _bias_by_kept, lambda: classified(Remembers))


class Logged(nn.Module):
    """Notes losses of its parts in a dictionary of numbers (as detection models do), and weighs by them."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log = small_net(4), collections.defaultdict(list)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.net(x)
        parts = {"class": CE(out[:, :3], y), "size": MSE(out[:, 3], x[:, 0])}
        for name, value in parts.items():
            self.log[name].append(value.item())
        return parts


def _weighed_by_log(net: Any, opt: Any, batches: Any) -> None:
    """Tasks are weighed by how their losses fell (dynamic weight average), from the model's log."""
    for epoch in range(3):
        weights = {"class": 1.0, "size": 1.0}
        if epoch:
            n = len(batches)
            means = {k: np.mean(v[-n:]) for k, v in net.log.items()}
            weights = {k: float(m / sum(means.values())) for k, m in means.items()}
        for x, y in batches:
            opt.zero_grad()
            sum(weights[k] * v for k, v in net(x, y).items()).backward()
            opt.step()


add_program("tasks weighed by the model's log", _weighed_by_log, lambda: classified(Logged))


class Centred(nn.Module):
    """A loss with a buffer of its own, outside the model (DINO)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3).double())
        self.centre: Tensor

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        target = ((teacher - self.centre) / 0.1).softmax(1).detach()
        with torch.no_grad():
            self.centre.mul_(0.9).add_(teacher.detach().mean(0), alpha=0.1)
        return -(target * student.log_softmax(1)).sum(1).mean()


def _self_distilled(net: Any, opt: Any, batches: Any) -> None:
    """Two views; the second is the target."""
    loss = Centred()
    for x, _y in _twice(batches):
        opt.zero_grad()
        with torch.no_grad():
            target = net(x * 1.1)
        loss(net(x * 0.9), target).backward()
        opt.step()


add_program("a centre in a loss of one's own", _self_distilled)


def _buffer_assigned(net: Any, opt: Any, batches: Any) -> None:
    """A buffer of the model is assigned by the loop, from a batch."""
    for x, y in _twice(batches):
        net.shift = 0.9 * net.shift + 0.1 * x.mean(0)
        one_step(net, opt, x, y)


class Shifted(nn.Module):
    """Subtracts a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()
        self.register_buffer("shift", torch.zeros(8).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x - self.shift)  # type: ignore[no-any-return]


add_program("a buffer assigned from a batch", _buffer_assigned, lambda: classified(Shifted))


def _buffer_data(net: Any, opt: Any, batches: Any) -> None:
    """The same through ``buffer.data =``."""
    for x, y in _twice(batches):
        net.shift.data = 0.9 * net.shift.data + 0.1 * x.mean(0)
        one_step(net, opt, x, y)


add_program("a buffer's data assigned from a batch", _buffer_data, lambda: classified(Shifted))


class Noted(nn.Module):
    """A flag is set for one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = small_net(), 1.0

    def forward(self, x: Tensor, scale: float = 1.0, *, features: bool = False) -> Any:
        out = self.net(x) * scale
        return (out, out.detach().mean(0)) if features else out


def _two_ways(net: Any, opt: Any, batches: Any) -> None:
    """The model is asked for means of features besides, and the loss uses them."""
    for x, y in _twice(batches):
        opt.zero_grad()
        out, mean = net(x, 0.5, features=True)
        (CE(out, y) + MSE(net(x), mean.expand(len(x), 3))).backward()
        opt.step()


add_program("a model asked for means besides", _two_ways, lambda: classified(Noted))


class Answer(NamedTuple):
    """Logits and a figure of the batch."""

    logits: Tensor
    share: float


class Answers(nn.Module):
    """Returns a named tuple with a number in it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def forward(self, x: Tensor) -> Answer:
        out = self.net(x)
        return Answer(out, float((out.detach() > 0).double().mean()))


def _by_share(net: Any, opt: Any, batches: Any) -> None:
    for x, y in _twice(batches):
        opt.zero_grad()
        answer = net(x)
        (answer.share * CE(answer.logits, y)).backward()
        opt.step()


add_program("a number in a named tuple weighs the loss", _by_share, lambda: classified(Answers))


@dataclass
class Output:
    """Loss and logits, as transformers' models return them."""

    loss: Tensor
    logits: Tensor
    kept: int


class WithLoss(nn.Module):
    """Computes its loss over valid tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        out = self.out(self.words(tokens))
        if labels is None:
            return out
        loss = CE(out.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return Output(loss, out, int((labels != -100).sum()))


def _tokens(count: int = 21) -> Made:
    net = WithLoss().double()
    tokens = torch.randint(11, (count, 5))
    labels = torch.where(torch.rand(count, 5) < 0.3, -100, tokens.roll(-1, 1))
    return net, sgd(net), DataLoader(TensorDataset(tokens, labels), 6)


def _per_token(net: Any, opt: Any, batches: Any) -> None:
    for tokens, labels in _twice(batches):
        opt.zero_grad()
        out = net(tokens, labels=labels)
        (out.loss / out.kept).backward()
        opt.step()


add_program("a loss by tokens in a record", _per_token, _tokens)


def _window_of_tokens(net: Any, opt: Any, batches: Any) -> None:
    """Two batches are one step: their sum is divided by the tokens of both, known before (as Trainer does)."""
    stream = iter(_twice(batches))
    while window := list(itertools.islice(stream, 2)):
        items = sum((labels != -100).sum() for _, labels in window)
        opt.zero_grad()
        for tokens, labels in window:
            loss = CE(net(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            (loss / items).backward()
        opt.step()


add_program("a window of batches divided by its tokens", _window_of_tokens, _tokens)

# ---- batches


class Gaps(Dataset[Any]):
    """Some samples cannot be read and are None."""

    def __init__(self) -> None:
        self.x, self.y = normal(21, 8), torch.randint(3, (21,))

    def __len__(self) -> int:
        return 21

    def __getitem__(self, i: int) -> Any:
        return None if i % 5 == 2 else (self.x[i], self.y[i])


def _readable(rows: list[Any]) -> Any:
    return default_collate([r for r in rows if r is not None])


def _plain(net: Any, opt: Any, batches: Any) -> None:
    for x, y in _twice(batches):
        one_step(net, opt, x, y)


def _gaps() -> Made:
    net = small_net().double()
    return net, sgd(net), DataLoader(Gaps(), 6, collate_fn=_readable)


add_program("samples that cannot be read are left out", _plain, _gaps)


def _views(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return torch.cat([x, 0.9 * x]), torch.cat([y, y])


def _two_views() -> Made:
    net = small_net().double()
    return net, sgd(net), DataLoader(TensorDataset(normal(21, 8), torch.randint(3, (21,))), 6, collate_fn=_views)


add_program("a collate_fn that yields two views", _plain, _two_views)


def _contrast_views(net: Any, opt: Any, batches: Any) -> None:
    """The two halves of a batch are views of the same samples (SimCLR's loader)."""
    for x, _y in _twice(batches):
        opt.zero_grad()
        a, b = F.normalize(net(x), dim=1).chunk(2)
        CE(a @ b.T / 0.5, torch.arange(len(a))).backward()
        opt.step()


add_program("views in halves of a batch, contrasted", _contrast_views, _two_views)


class Triplets(Dataset[Any]):
    """Three samples each, in a list."""

    def __init__(self) -> None:
        self.x = normal(63, 8)

    def __len__(self) -> int:
        return 21

    def __getitem__(self, i: int) -> Any:
        return [self.x[i], self.x[21 + i], self.x[42 + i]]


def _triplets() -> Made:
    net = small_net().double()
    return net, sgd(net), DataLoader(Triplets(), 6)


def _triple(net: Any, opt: Any, batches: Any) -> None:
    """Triplets in one call, taken apart behind it."""
    for three in _twice(batches):
        opt.zero_grad()
        a, p, n = net(torch.cat(three)).chunk(3)
        F.triplet_margin_loss(a, p, n).backward()
        opt.step()


add_program("triplets joined for one call", _triple, _triplets)


class Episodes(Sampler[list[int]]):
    """Two samples of each class for support, and two for questions."""

    def __iter__(self) -> Iterator[list[int]]:
        g = torch.Generator().manual_seed(1)
        for _ in range(6):
            yield [int(c + 3 * k) for c in range(3) for k in torch.randperm(7, generator=g)[:4]]

    def __len__(self) -> int:
        return 6


def _episodes() -> Made:
    net = small_net().double()
    data = TensorDataset(normal(21, 8), torch.arange(21) % 3)
    return net, sgd(net), DataLoader(data, batch_sampler=Episodes())


def _few_shot(net: Any, opt: Any, batches: Any) -> None:
    """Questions are compared with the means of their class's support."""
    for x, _y in _twice(batches):
        opt.zero_grad()
        z = net(x).view(3, 4, -1)
        means, asked = z[:, :2].mean(1), z[:, 2:].reshape(6, -1)
        CE(-torch.cdist(asked, means).square(), torch.arange(3).repeat_interleave(2)).backward()
        opt.step()


add_program("episodes of few shots", _few_shot, _episodes)


def _few_shot_by_labels(net: Any, opt: Any, batches: Any) -> None:
    """The same, told apart by labels instead of places."""
    for x, y in _twice(batches):
        opt.zero_grad()
        z = net(x)
        first = torch.stack([((y == c).cumsum(0) <= 2) & (y == c) for c in range(3)])
        means = torch.stack([z[m].mean(0) for m in first])
        rest = ~first.any(0)
        CE(-torch.cdist(z[rest], means).square(), y[rest]).backward()
        opt.step()


add_program("episodes of few shots, by labels", _few_shot_by_labels, _episodes)


class Graph(NamedTuple):
    """Nodes and edges."""

    nodes: Tensor
    edges: Tensor
    label: int


def _graphs(rows: list[Graph]) -> Any:
    """Graphs are joined to one with the numbers of their graphs (as torch_geometric does)."""
    shift = np.cumsum([0, *(len(g.nodes) for g in rows[:-1])])
    nodes = torch.cat([g.nodes for g in rows])
    edges = torch.cat([g.edges + int(s) for g, s in zip(rows, shift, strict=True)], 1)
    of = torch.cat([torch.full((len(g.nodes),), i) for i, g in enumerate(rows)])
    return {"nodes": nodes, "edges": edges, "of": of, "y": torch.tensor([g.label for g in rows])}


class Passing(nn.Module):
    """One round of messages, and a mean over each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.out = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, nodes: Tensor, edges: Tensor, of: Tensor) -> Tensor:
        h = F.relu(self.enter(nodes))
        h = h.index_add(0, edges[1], h[edges[0]])
        count = int(of.max()) + 1
        total = h.new_zeros(count, 16).index_add(0, of, h)
        return self.out(total / torch.bincount(of, minlength=count)[:, None])  # type: ignore[no-any-return]


def _many_graphs() -> Made:
    net = Passing().double()
    data: Any = []
    for i in range(21):
        n = 3 + i % 4
        data.append(Graph(normal(n, 8), torch.stack([torch.arange(n), torch.arange(n).roll(1)]), i % 3))
    return net, sgd(net), DataLoader(data, 6, collate_fn=_graphs)


def _over_graphs(net: Any, opt: Any, batches: Any) -> None:
    for b in _twice(batches):
        opt.zero_grad()
        CE(net(b["nodes"], b["edges"], b["of"]), b["y"]).backward()
        opt.step()


add_program("graphs joined by a collate_fn", _over_graphs, _many_graphs)


def _graph_by_graph(net: Any, opt: Any, batches: Any) -> None:
    """A list of graphs, one call for each, and one backward."""
    for graphs in _twice(batches):
        opt.zero_grad()
        losses = [CE(net(g.nodes, g.edges, torch.zeros(len(g.nodes)).long()), torch.tensor([g.label])) for g in graphs]
        torch.stack(losses).mean().backward()
        opt.step()


def _listed_graphs() -> Made:
    net, opt, loader = _many_graphs()
    return net, opt, DataLoader(loader.dataset, 6, collate_fn=list)


add_program("graph by graph in a list", _graph_by_graph, _listed_graphs)


def _sample_calls(net: Any, opt: Any, batches: Any) -> None:
    """Each sample is a call and a backward of its own; then there is a step."""
    for x, y in _twice(batches):
        opt.zero_grad()
        for xi, yi in zip(x, y, strict=True):
            (CE(net(xi[None]), yi[None]) / len(x)).backward()
        opt.step()


add_program("a call for each sample", _sample_calls)


class Sequences(IterableDataset[Any]):
    """Text without end, cut into windows by the data set itself."""

    def __init__(self) -> None:
        self.text = torch.randint(11, (200,), generator=torch.Generator().manual_seed(4))

    def __iter__(self) -> Iterator[Any]:
        for at in itertools.cycle(range(0, 190, 7)):
            yield self.text[at : at + 5], self.text[at + 1 : at + 6]


def _by_tokens(net: Any, opt: Any, batches: Any) -> None:
    """Trains until so many tokens were seen."""
    seen = 0
    for tokens, labels in batches:
        opt.zero_grad()
        CE(net(tokens).flatten(0, 1), labels.flatten()).backward()
        opt.step()
        seen += tokens.numel()
        if seen >= 300:
            break


add_program("until so many tokens were seen", _by_tokens, lambda: (
    (net := WithLoss().double()), sgd(net), DataLoader(Sequences(), 6)))  # fmt: skip


def _warmed_by_tokens(net: Any, opt: Any, batches: Any) -> None:
    """The rate goes by tokens seen, from ``x.shape``."""
    seen = 0
    for tokens, labels in itertools.islice(batches, 8):
        batch, length = tokens.shape
        seen += batch * length
        opt.param_groups[0]["lr"] = 0.05 * min(1.0, seen / 200)
        opt.zero_grad()
        CE(net(tokens).flatten(0, 1), labels.flatten()).backward()
        opt.step()


add_program("a rate by tokens seen", _warmed_by_tokens, lambda: (
    (net := WithLoss().double()), sgd(net), DataLoader(Sequences(), 6)))  # fmt: skip


class Curriculum(Dataset[Any]):
    """Samples in order of their difficulty, of which the loop opens more."""

    def __init__(self) -> None:
        self.x, self.y, self.open = normal(21, 8), torch.randint(3, (21,)), 9

    def __len__(self) -> int:
        return self.open

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


def _opened(net: Any, opt: Any, batches: Any) -> None:
    """More samples are opened when the loss of the epoch is low, by tensors."""
    for _ in range(3):
        total = torch.zeros(()).double()
        for x, y in batches:
            total += one_step(net, opt, x, y).detach()
        if total / len(batches) < 2:
            batches.dataset.open = min(21, batches.dataset.open + 6)


def _curriculum() -> Made:
    net = small_net().double()
    return net, sgd(net), DataLoader(Curriculum(), 6)


add_program("samples opened by the loss", _opened, _curriculum)

# ---- methods


class Twins(nn.Module):
    """Encoder, projector and predictor, with a slow copy (BYOL), updated by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.head = small_net(4), nn.Linear(4, 4)
        self.slow = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        p = F.normalize(self.head(self.online(a)), dim=1)
        with torch.no_grad():
            z = F.normalize(self.slow(b), dim=1)
        return (2 - 2 * (p * z).sum(1)).mean()

    @torch.no_grad()
    def follow(self) -> None:
        for s, o in zip(self.slow.parameters(), self.online.parameters(), strict=True):
            s.mul_(0.9).add_(o, alpha=0.1)


def _byol(net: Any, opt: Any, batches: Any) -> None:
    for x, _y in _twice(batches):
        opt.zero_grad()
        (net(x * 0.9, x * 1.1) + net(x * 1.1, x * 0.9)).backward()
        opt.step()
        net.follow()


def _made_by_trained(kind: Any) -> Made:
    net = kind().double()
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    return net, opt, DataLoader(TensorDataset(normal(21, 8), torch.randint(3, (21,))), 6)


add_program("a slow copy updated by a method", _byol, lambda: _made_by_trained(Twins))


class Queue(nn.Module):
    """MoCo: keys of a slow encoder, and a queue of them in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = small_net(4)
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.arange(48).view(4, 12).double().cos(), dim=0))
        self.register_buffer("at", torch.zeros(1).long())
        self.queue: Tensor
        self.at: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.fast(x * 0.9), dim=1)
        with torch.no_grad():
            for s, f in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                s.mul_(0.9).add_(f, alpha=0.1)
            k = F.normalize(self.slow(x * 1.1), dim=1)
        near, far = (q * k).sum(1, keepdim=True), q @ self.queue.clone()
        at, n = int(self.at), len(k)
        self.queue[:, [(at + i) % 12 for i in range(n)]] = k.T
        self.at[0] = (at + n) % 12
        return torch.cat([near, far], 1) / 0.2, torch.zeros(len(q)).long()


def _moco(net: Any, opt: Any, batches: Any) -> None:
    for x, _y in _twice(batches):
        opt.zero_grad()
        CE(*net(x)).backward()
        opt.step()


add_program("a queue of keys in a buffer", _moco, lambda: _made_by_trained(Queue))


class Pairs(nn.Module):
    """CLIP: two encoders, a scale, all pairs of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = small_net(4), nn.Sequential(nn.EmbeddingBag(11, 8), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a, b = F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)
        logits = self.scale.exp() * a @ b.T
        at = torch.arange(len(a))
        return (CE(logits, at) + CE(logits.T, at)) / 2


def _clip(net: Any, opt: Any, batches: Any) -> None:
    for image, text in _twice(batches):
        opt.zero_grad()
        net(image, text).backward()
        opt.step()
        with torch.no_grad():
            net.scale.clamp_(0, math.log(100))


def _captioned() -> Made:
    net = Pairs().double()
    return net, sgd(net), DataLoader(TensorDataset(normal(21, 8), torch.randint(11, (21, 4))), 6)


add_program("pairs of images and texts in the model", _clip, _captioned)


class Chain(nn.Module):
    """A linear-chain CRF over emissions."""

    def __init__(self) -> None:
        super().__init__()
        self.emit, self.moves = nn.Linear(4, 3), nn.Parameter(torch.zeros(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.emit(x)  # type: ignore[no-any-return]

    def loss(self, scores: Tensor, tags: Tensor) -> Tensor:
        at = torch.arange(len(tags))
        gold, total = scores[:, 0][at, tags[:, 0]], scores[:, 0]
        for t in range(1, tags.shape[1]):
            gold = gold + self.moves[tags[:, t - 1], tags[:, t]] + scores[:, t][at, tags[:, t]]
            total = torch.logsumexp(total[:, :, None] + self.moves + scores[:, t][:, None], 1)
        return (torch.logsumexp(total, 1) - gold).mean()


def _tagged() -> Made:
    net = Chain().double()
    return net, sgd(net), DataLoader(TensorDataset(normal(21, 5, 4), torch.randint(3, (21, 5))), 6)


def _crf(net: Any, opt: Any, batches: Any) -> None:
    for x, tags in _twice(batches):
        opt.zero_grad()
        net.loss(net(x), tags).backward()
        opt.step()


add_program("a chain of tags, its loss a method", _crf, _tagged)


def _crf_outside(net: Any, opt: Any, batches: Any) -> None:
    """The loss reads the transitions of the model."""
    for x, tags in _twice(batches):
        opt.zero_grad()
        scores, moves = net(x), net.moves
        gold, total = scores[:, 0].gather(1, tags[:, :1])[:, 0], scores[:, 0]
        for t in range(1, tags.shape[1]):
            gold = gold + moves[tags[:, t - 1], tags[:, t]] + scores[:, t].gather(1, tags[:, t : t + 1])[:, 0]
            total = torch.logsumexp(total[:, :, None] + moves + scores[:, t][:, None], 1)
        (torch.logsumexp(total, 1) - gold).mean().backward()
        opt.step()


add_program("a chain of tags, its moves in the loop", _crf_outside, _tagged)


class Boxes(nn.Module):
    """Scores and boxes for each of six places."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.score, self.box = nn.Linear(8, 16), nn.Linear(16, 6), nn.Linear(16, 24)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = F.relu(self.net(x))
        return {"score": self.score(h), "box": self.box(h).view(-1, 6, 4)}


def _detect(net: Any, opt: Any, batches: Any) -> None:
    """Focal loss and boxes, divided by the number of positives of the batch (at least one)."""
    for x, found, boxes in _twice(batches):
        opt.zero_grad()
        out = net(x)
        positives = found.sum().clamp(min=1)
        p = out["score"].sigmoid()
        each = F.binary_cross_entropy_with_logits(out["score"], found, reduction="none")
        focal = (each * (1 - (p * found + (1 - p) * (1 - found))) ** 2).sum() / positives
        near = (F.smooth_l1_loss(out["box"], boxes, reduction="none").sum(-1) * found).sum() / positives
        (focal + near).backward()
        opt.step()


def _boxed() -> Made:
    net = Boxes().double()
    data = TensorDataset(normal(21, 8), (torch.rand(21, 6) < 0.3).double(), normal(21, 6, 4))
    return net, sgd(net), DataLoader(data, 6)


add_program("boxes divided by positives", _detect, _boxed)


def _matched(net: Any, opt: Any, batches: Any) -> None:
    """Boxes are matched image by image, by sorting costs, in a list (DETR)."""
    for x, found, boxes in _twice(batches):
        opt.zero_grad()
        out = net(x)
        losses, count = [], 0
        for i in range(len(x)):
            wanted = boxes[i][found[i] > 0]
            if len(wanted):
                cost = torch.cdist(out["box"][i].detach(), wanted)
                losses.append(F.l1_loss(out["box"][i][cost.argmin(0)], wanted, reduction="sum"))
                count += len(wanted)
        (sum(losses) / max(count, 1) + 0 * out["score"].sum()).backward()
        opt.step()


add_program("boxes matched image by image", _matched, _boxed)


class Decoder(nn.Module):
    """A recurrent decoder that is called word by word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.out = nn.Embedding(7, 8), nn.GRUCell(8, 8), nn.Linear(8, 7)

    def forward(self, word: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(self.words(word), state)
        return self.out(state), state


def _until_all_end(net: Any, opt: Any, batches: Any) -> None:
    """Sentences are decoded until all of the batch have ended."""
    for x, y in _twice(batches):
        opt.zero_grad()
        state, word = torch.tanh(x), torch.zeros(len(x)).long()
        ended, loss = torch.zeros(len(x)).bool(), torch.zeros(()).double()
        for _ in range(6):
            out, state = net(word, state)
            loss = loss + CE(out, y)
            word = out.argmax(1)
            ended = ended | (word == 3)
            if ended.all():
                break
        loss.backward()
        opt.step()


add_program("decoded until all have ended", _until_all_end, lambda: classified(Decoder))


def _until_longest(net: Any, opt: Any, batches: Any) -> None:
    """Words are called for up to the longest sentence of the batch."""
    for x, y in _twice(batches):
        opt.zero_grad()
        state, word, loss = torch.tanh(x), torch.zeros(len(x)).long(), torch.zeros(()).double()
        for t in range(int(y.max()) + 2):
            out, state = net(word, state)
            live = (t <= y + 1).double()
            loss = loss + (CE(out, (y + t) % 7, reduction="none") * live).mean()
            word = (word + 1) % 7
        loss.backward()
        opt.step()


add_program("word by word up to the longest", _until_longest, lambda: classified(Decoder))


class Walk:
    """A toy environment: go to the goal."""

    def __init__(self, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)

    def reset(self) -> Tensor:
        self.state, self.t = torch.randn(8, generator=self.g).double(), 0
        return self.state

    def step(self, move: int) -> tuple[Tensor, float, bool]:
        self.state = 0.9 * self.state + 0.1 * (move - 1) + 0.05 * torch.randn(8, generator=self.g).double()
        self.t += 1
        return self.state, -float(self.state.abs().mean()), self.t >= 5


class Policy(nn.Module):
    """Actor and critic."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.actor(h), self.critic(h)[:, 0]


def _ppo(net: Any, opt: Any, _batches: Any) -> None:
    """Rollouts of an environment, then epochs over shuffled pieces of them (PPO); no batch of the loader."""
    env, g = Walk(0), torch.Generator().manual_seed(1)
    for _ in range(3):
        states, moves, logs, rewards, values, ends = [], [], [], [], [], []
        state = env.reset()
        for _t in range(20):
            with torch.no_grad():
                logits, value = net(state[None])
            p = logits.softmax(1)[0]
            move = int(torch.multinomial(p.float(), 1, generator=g))
            states.append(state)
            moves.append(move)
            logs.append(p[move].log())
            values.append(value[0])
            state, reward, end = env.step(move)
            rewards.append(reward)
            ends.append(end)
            if end:
                state = env.reset()
        gain, advantages = torch.zeros(()).double(), []
        for t in reversed(range(20)):
            gain = rewards[t] + 0.9 * gain * (1 - ends[t])
            advantages.insert(0, gain - values[t])
        s, a = torch.stack(states), torch.tensor(moves)
        old, adv = torch.stack(logs), torch.stack(advantages)
        ret = adv + torch.stack(values)
        for _epoch in range(2):
            for i in torch.randperm(20, generator=g).split(6):
                logits, value = net(s[i])
                ratio = (logits.log_softmax(1).gather(1, a[i, None])[:, 0] - old[i]).exp()
                w = (adv[i] - adv[i].mean()) / (adv[i].std() + 1e-8)
                loss = -torch.min(ratio * w, ratio.clamp(0.8, 1.2) * w).mean() + 0.5 * MSE(value, ret[i])
                opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                opt.step()


add_program("rollouts, then epochs over them", _ppo, lambda: classified(Policy))


def _actor_critic(net: Any, opt: Any, _batches: Any) -> None:
    """One step of an environment, one update, with the value of the next state (A2C)."""
    env, g = Walk(2), torch.Generator().manual_seed(1)
    state = env.reset()
    for _ in range(12):
        logits, value = net(state[None])
        move = int(torch.multinomial(logits.detach().softmax(1)[0].float(), 1, generator=g))
        state, reward, end = env.step(move)
        with torch.no_grad():
            after = 0.0 if end else net(state[None])[1]
        gain = reward + 0.9 * after - value
        opt.zero_grad()
        (-logits.log_softmax(1)[0, move] * gain.detach() + gain.square()).mean().backward()
        opt.step()
        if end:
            state = env.reset()


add_program("an update for each step of an environment", _actor_critic, lambda: classified(Policy))


class Bellman(nn.Module):
    """A network and its target, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.q = small_net()
        self.target = copy.deepcopy(self.q).requires_grad_(False)

    def forward(self, s: Tensor, a: Tensor, r: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = r + 0.9 * self.target(s2).max(1).values
        return self.q(s).gather(1, a[:, None])[:, 0], wanted


def _fitted_q(net: Any, opt: Any, batches: Any) -> None:
    """Offline Q-learning; the target is loaded from the network now and then, errors go into priorities."""
    errors = torch.ones(21).double()
    for step, (s, a, r, s2, i) in enumerate(_twice(batches)):
        opt.zero_grad()
        q, wanted = net(s, a, r, s2)
        w = errors[i] / errors.max()
        (w * F.smooth_l1_loss(q, wanted, reduction="none")).mean().backward()
        opt.step()
        errors[i] = (q - wanted).abs().detach() + 0.01
        if step % 3 == 0:
            net.target.load_state_dict(net.q.state_dict())


def _transitions() -> Made:
    net = Bellman().double()
    opt = torch.optim.SGD(net.q.parameters(), lr=0.05)
    data = TensorDataset(normal(21, 8), torch.randint(3, (21,)), normal(21), normal(21, 8), torch.arange(21))
    return net, opt, DataLoader(data, 6)


add_program("a target network loaded from the other", _fitted_q, _transitions)


def _maml(net: Any, opt: Any, batches: Any) -> None:
    """First-order meta-learning: weights are put back, and gradients of the adapted ones kept."""
    for x, y in _twice(batches):
        half = len(x) // 2
        slow = [p.detach().clone() for p in net.parameters()]
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        inner.zero_grad()
        CE(net(x)[:half], y[:half]).backward()
        inner.step()
        opt.zero_grad()
        CE(net(x)[half:], y[half:]).backward()
        with torch.no_grad():
            for p, s in zip(net.parameters(), slow, strict=True):
                p.copy_(s)
        opt.step()


add_program("adapted on one half, judged on the other", _maml, lambda: classified(count=24))


def _lars(net: Any, opt: Any, batches: Any) -> None:
    """Trust ratios by layer, in the loop."""
    for x, y in _twice(batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for p in net.parameters():
            if p.dim() > 1:
                p.grad.mul_(0.1 * p.norm() / (p.grad.norm() + 0.01 * p.norm() + 1e-9))
        opt.step()


add_program("trust ratios in the loop", _lars)


def _rate_group(net: Any, opt: Any, batches: Any) -> None:
    """Each parameter has a group; rates go by norms of gradients."""
    for x, y in _twice(batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for group in opt.param_groups:
            group["lr"] = 0.05 / (1 + float(group["params"][0].grad.norm()))
        opt.step()


def _grouped() -> Made:
    net, _, batches = classified()
    return net, torch.optim.SGD([{"params": [p]} for p in net.parameters()], lr=0.05), batches


add_program("a rate for each parameter by its gradient", _rate_group, _grouped)


class Solver(torch.autograd.Function):
    """Integrates by Euler's steps; backward integrates again (adjoint method)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Any, *ps: Tensor) -> Tensor:
        ctx.net = net
        with torch.no_grad():
            path = [x]
            for _ in range(3):
                path.append(path[-1] + 0.3 * net(path[-1]))
        ctx.path = path
        return path[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ps = list(ctx.net.parameters())
        total = [torch.zeros_like(p) for p in ps]
        for x in reversed(ctx.path[:-1]):
            with torch.enable_grad():
                at = x.detach().requires_grad_()
                out = at + 0.3 * ctx.net(at)
                found = torch.autograd.grad(out, [at, *ps], grad)
            grad = found[0]
            total = [t + f for t, f in zip(total, found[1:], strict=True)]
        return grad, None, *total


class Flow(nn.Module):
    """An equation's solution, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Solver.apply(x, self.field, *self.field.parameters()))  # type: ignore[no-any-return]


add_program("an equation solved, its adjoint by hand", _plain, lambda: classified(Flow))


class Equilibrium(nn.Module):
    """Iterates to a fixed point; a hook on the output solves backward (DEQ)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.enter, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def cell(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.inner(z) + self.enter(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(30):
                z = self.cell(z, x)
        z = self.cell(z, x)
        if self.training and torch.is_grad_enabled():
            z0 = z.detach().requires_grad_()
            f0 = self.cell(z0, x)

            def backward(grad: Tensor) -> Tensor:
                g = grad
                for _ in range(30):
                    g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
                return g

            z.register_hook(backward)
        return self.head(z)  # type: ignore[no-any-return]


add_program("a fixed point with a hook", _plain, lambda: classified(Equilibrium))


class Standardised(nn.Linear):
    """Weights are standardised in forward."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(x, w / (w.std(1, keepdim=True) + 1e-5), self.bias)


add_program("weights standardised", _plain, lambda: classified(
    lambda: nn.Sequential(Standardised(8, 16), nn.ReLU(), nn.Linear(16, 3))))  # fmt: skip


class Routed(nn.Module):
    """Experts by name in a ModuleDict; samples choose theirs, with a share of the batch in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleDict({name: nn.Linear(8, 3) for name in ("red", "green", "blue")})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.gate(x).softmax(1)
        best, at = p.max(1)
        out = x.new_zeros(len(x), 3)
        for i, expert in enumerate(self.experts.values()):
            if (mask := at == i).any():
                out[mask] = best[mask, None] * expert(x[mask])
        share = F.one_hot(at, 3).double().mean(0)
        return out, 3 * (share * p.mean(0)).sum()


def _balanced(net: Any, opt: Any, batches: Any) -> None:
    for x, y in _twice(batches):
        opt.zero_grad()
        out, balance = net(x)
        (CE(out, y) + 0.1 * balance).backward()
        opt.step()


add_program("experts by name, balanced over the batch", _balanced, lambda: classified(Routed))


class Adapted(nn.Module):
    """A frozen layer with two small ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Parameter(torch.randn(2, base.in_features) / 8),
            nn.Parameter(torch.zeros(base.out_features, 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]

    def merge(self) -> None:
        with torch.no_grad():
            self.base.weight += self.up @ self.down
            self.up.zero_()


def _low_rank() -> Made:
    net = small_net()
    for i in (0, 2, 4):
        net[i] = Adapted(net[i])
    net = net.double()
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    return net, opt, DataLoader(TensorDataset(normal(21, 8), torch.randint(3, (21,))), 6)


def _merged_each_epoch(net: Any, opt: Any, batches: Any) -> None:
    """Small layers are merged into the large one behind each epoch (ReLoRA)."""
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
        for m in net.modules():
            if isinstance(m, Adapted):
                m.merge()


add_program("small layers merged behind each epoch", _merged_each_epoch, _low_rank)


class Exponential(nn.Module):
    """Weights that are positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.abs().log()


def _positive() -> Made:
    def net() -> nn.Module:
        model = Named()
        parametrize.register_parametrization(model.second, "weight", Exponential())
        return model

    return classified(net)


def _set_through(net: Any, opt: Any, batches: Any) -> None:
    """A computed weight is set by assignment between epochs."""
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
        with torch.no_grad():
            net.second.weight = net.second.weight * 0.9


add_program("a parametrized weight assigned", _set_through, _positive)


def _swa_by_hand(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Averages by ``state_dict()``, and a pass that renews the running statistics."""
    total: dict[str, Tensor] = {}
    for epoch in range(3):
        for x, y in batches:
            one_step(net, opt, x, y)
        if epoch:
            for k, v in net.state_dict().items():
                total[k] = v.clone() if k not in total else total[k] + (v - total[k]) / epoch
    net.load_state_dict(total)
    return {}


add_program("averages by state_dict()", _swa_by_hand)


def _resumed(net: Any, opt: Any, batches: Any) -> None:
    """Everything is written in the middle of an epoch, spoiled, and read back."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=12)
    file = io.BytesIO()
    for step, (x, y) in enumerate(itertools.islice(itertools.cycle(batches), 10)):
        one_step(net, opt, x, y)
        schedule.step()
        if step == 5:
            torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "schedule": schedule.state_dict()}, file)
        if step == 7:
            file.seek(0)
            state = torch.load(file, weights_only=False)
            net.load_state_dict(state["net"])
            opt.load_state_dict(state["opt"])
            schedule.load_state_dict(state["schedule"])


add_program("read back in the middle of an epoch", _resumed)


def _cutmix(net: Any, opt: Any, batches: Any) -> None:
    """Pieces of images are exchanged between neighbours in the batch, of fixed places."""
    for k, (x, y) in enumerate(_twice(batches)):
        other, at = x.flip(0), k % 4
        x = x.clone()
        x[:, at : at + 4] = other[:, at : at + 4]
        opt.zero_grad()
        out = net(x)
        (0.5 * CE(out, y) + 0.5 * CE(out, y.flip(0))).backward()
        opt.step()


add_program("pieces exchanged in the batch", _cutmix)


def _python_draws(net: Any, opt: Any, batches: Any) -> None:
    """Python's generator draws a number for each sample."""
    rng = random.Random(3)
    for x, y in _twice(batches):
        flips = torch.tensor([rng.random() < 0.5 for _ in x])
        one_step(net, opt, torch.where(flips[:, None], -x, x), y)


add_program("a coin for each sample", _python_draws)


def _numpy_draws(net: Any, opt: Any, batches: Any) -> None:
    """numpy's new generator draws noise of the batch's shape."""
    rng = np.random.default_rng(3)
    for x, y in _twice(batches):
        one_step(net, opt, x + torch.from_numpy(rng.normal(size=tuple(x.shape))), y)


add_program("noise by numpy's new generator", _numpy_draws)


def _seeded_layers(net: Any, opt: Any, batches: Any) -> None:
    """Random features of the outputs: a projection drawn in each step with a generator of its own."""
    g = torch.Generator().manual_seed(9)
    for x, y in _twice(batches):
        ways = torch.randn(3, 4, generator=g).double()
        opt.zero_grad()
        out = net(x)
        (CE(out, y) + 0.1 * (out @ F.normalize(ways, dim=0)).square().mean()).backward()
        opt.step()


add_program("projections drawn in each step", _seeded_layers)


def _sorted_sliced(net: Any, opt: Any, batches: Any) -> None:
    """Outputs are compared with normal numbers by sorting along directions (sliced Wasserstein)."""
    g = torch.Generator().manual_seed(9)
    for x, y in _twice(batches):
        opt.zero_grad()
        out = net(x)
        ways = torch.randn(3, 4, generator=g).double()
        prior = torch.linspace(-1, 1, len(x)).double()[:, None].expand(len(x), 4)
        (CE(out, y) + 0.1 * ((out @ ways).sort(0).values - prior).square().mean()).backward()
        opt.step()


add_program("outputs sorted against a prior", _sorted_sliced)


def _expectile(net: Any, opt: Any, batches: Any) -> None:
    """The quantile of residuals of all batches so far is the width of a robust loss."""
    seen: list[Tensor] = []
    for x, y in _twice(batches):
        opt.zero_grad()
        r = net(x)[:, 0] - y.double()
        seen.append(r.detach().abs())
        width = torch.cat(seen[-4:]).quantile(0.7)
        (torch.where(r.abs() < width, 0.5 * r.square(), width * (r.abs() - 0.5 * width))).mean().backward()
        opt.step()


add_program("a width by residuals so far", _expectile)


def _annealed_kl(net: Any, opt: Any, batches: Any) -> None:
    """A controller raises the weight of the divergence by its value (ControlVAE), in tensors."""
    weight, total = torch.zeros(()).double(), torch.zeros(()).double()
    for x, _y in _twice(batches):
        opt.zero_grad()
        out = net(x)
        mean, log = out[:, :2], out[:, 2:4]
        kl = 0.5 * (mean.square() + log.exp() - 1 - log).sum(1).mean()
        error = 1.0 - kl.detach()
        total += error
        weight = (0.1 / (1 + error.exp()) - 0.01 * total).clamp(0, 1)
        (MSE(out[:, 4:], x) + weight * kl).backward()
        opt.step()


add_program("a weight by a controller", _annealed_kl, lambda: classified(lambda: small_net(12)))


def _gmm_em(net: Any, opt: Any, batches: Any) -> None:
    """Centres follow the batch by expectation and maximisation; features are drawn to them (deep clustering)."""
    centres = torch.eye(3).double()
    for x, y in _twice(batches):
        opt.zero_grad()
        z = net(x)
        q = (1 + torch.cdist(z, centres).square()).reciprocal()
        q = q / q.sum(1, keepdim=True)
        p = q.square() / q.sum(0)
        p = (p / p.sum(1, keepdim=True)).detach()
        (CE(z, y) + F.kl_div(q.log(), p, reduction="batchmean")).backward()
        opt.step()
        with torch.no_grad():
            near = q.detach()
            centres = 0.9 * centres + 0.1 * (near.T @ z.detach()) / near.sum(0)[:, None]


add_program("centres by expectation", _gmm_em)


def _evolved(net: Any, _opt: Any, batches: Any) -> None:
    """Noise is weighed by ranks of its losses on a batch (evolution strategies)."""
    g = torch.Generator().manual_seed(2)
    for x, y in _twice(batches):
        with torch.no_grad():
            tries, losses = [], []
            for _ in range(3):
                noise = [0.05 * torch.randn(p.shape, generator=g).double() for p in net.parameters()]
                for p, n in zip(net.parameters(), noise, strict=True):
                    p.add_(n)
                losses.append(CE(net(x), y))
                for p, n in zip(net.parameters(), noise, strict=True):
                    p.sub_(n)
                tries.append(noise)
            weights = -torch.stack(losses).softmax(0) + 1 / 3
            for k, p in enumerate(net.parameters()):
                p.add_(sum(w * t[k] for w, t in zip(weights, tries, strict=True)))


add_program("noise weighed by its losses", _evolved)


def _kept_best_try(net: Any, _opt: Any, batches: Any) -> None:
    """Of three random changes the best on the batch is kept, as a whole state."""
    g = torch.Generator().manual_seed(2)
    for x, y in batches:
        best, kept = None, None
        start = copy.deepcopy(net.state_dict())
        for _ in range(3):
            state = {k: v + 0.05 * torch.randn(v.shape, generator=g).double() for k, v in start.items()}
            net.load_state_dict(state)
            with torch.no_grad():
                loss = CE(net(x), y)
            if best is None or loss < best:
                best, kept = loss, state
        net.load_state_dict(kept)


add_program("the best of random states", _kept_best_try)


def _class_balanced_rates(net: Any, opt: Any, batches: Any) -> None:
    """Rows of the head's gradient are scaled by class counts of the batch."""
    for x, y in _twice(batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        counts = torch.bincount(y, minlength=3).double()
        net.head.weight.grad = net.head.weight.grad * (1 / (1 + counts))[:, None]
        opt.step()


add_program("rows of a gradient by counts of classes", _class_balanced_rates, lambda: classified(Named))


by_loss(
    "a penalty on the largest singular value by svd",
    lambda net, b: CE(net(b[0]), b[1]) + 0.1 * torch.linalg.svdvals(net.second.weight)[0],
    lambda: classified(Named),
)
by_outputs(
    "a nuclear norm of the batch",
    lambda o, y: CE(o, y) - 0.1 * torch.linalg.matrix_norm(o.softmax(1), "nuc") / len(y),
)
by_loss(
    "hardest negatives by class",
    lambda net, b: F.softplus(
        (lambda z: (torch.cdist(z, z) + 9 * (b[1][:, None] == b[1]).double()).min(1).values)(net(b[0])).neg()
    ).mean(),
)
by_loss(
    "label smoothing with class weights and ignored classes",
    lambda net, b: CE(
        net(b[0]), torch.where(b[0][:, 0] > 1, -100, b[1]), weight=torch.tensor([0.2, 1.0, 3.0]).double(),
        label_smoothing=0.1,
    ),
)  # fmt: skip
by_outputs(
    "focal loss with weights by the batch's counts",
    lambda o, y: (
        (1 - torch.exp(-CE(o, y, reduction="none"))) ** 2
        * CE(o, y, reduction="none")
        * (len(y) / (3 * torch.bincount(y, minlength=3).clamp(min=1).double()))[y]
    ).mean(),
)
by_loss(
    "invariant risk by a scale of one",
    lambda net, b: (
        lambda s: (
            lambda loss: loss + torch.autograd.grad(loss, s, create_graph=True)[0].square().sum()
        )(CE(net(b[0]) * s, b[1]))
    )(torch.ones(1, dtype=torch.float64, requires_grad=True)),
)  # fmt: skip
by_outputs("the mean divided by the global size", lambda o, y: CE(o, y, reduction="sum").div(y.numel()))
by_outputs("median of the losses", lambda o, y: CE(o, y, reduction="none").median())
by_outputs(
    "log-sum of losses (tilted)",
    lambda o, y: torch.logsumexp(2 * CE(o, y, reduction="none"), 0) / 2 - math.log(len(y)) / 2,
)
by_outputs("kurtosis of outputs", lambda o, y: CE(o, y) + 0.01 * (o - o.mean()).pow(4).mean() / o.var().pow(2))
by_outputs(
    "labels smoothed, classes weighed, some ignored",
    lambda o, y: CE(
        o, torch.where(y == 2, -100, y), weight=torch.tensor([0.2, 1.0, 3.0]).double(), label_smoothing=0.1
    ),
)
by_outputs("a mean over half of the batch", lambda o, y: CE(o[: (len(y) + 1) // 2], y[: (len(y) + 1) // 2]))
by_outputs("the error of the batch's mean", lambda o, y: MSE(o.mean(0), F.one_hot(y, 3).double().mean(0)))
by_outputs("a mean over what is right", lambda o, y: CE(o, torch.where(o.argmax(1) == y, y, -100), reduction="mean"))


# ---- answers, wrappers, pieces


class Acts(nn.Module):
    """Returns a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def forward(self, x: Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.net(x))


def _by_likelihood(net: Any, opt: Any, batches: Any) -> None:
    for x, y in _twice(batches):
        opt.zero_grad()
        answer = net(x)
        (-answer.log_prob(y).mean() - 0.1 * answer.entropy().mean()).backward()
        opt.step()


add_program("a model that returns a distribution", _by_likelihood, lambda: classified(Acts))


class Spaces(nn.Module):
    """Returns a namespace with a list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def forward(self, x: Tensor) -> Any:
        out = self.net(x)
        return types.SimpleNamespace(logits=out, aux=[out * 2, None], name="answer")


def _by_namespace(net: Any, opt: Any, batches: Any) -> None:
    for x, y in _twice(batches):
        opt.zero_grad()
        out = net(x)
        (CE(out.logits, y) + 0.1 * CE(out.aux[0], y)).backward()
        opt.step()


add_program("a model that returns a namespace", _by_namespace, lambda: classified(Spaces))


def _handed_scale(net: Any, opt: Any, batches: Any) -> None:
    """Backward is handed a number, and two losses at once."""
    for x, y in _twice(batches):
        opt.zero_grad()
        CE(net(x), y).backward(torch.tensor(0.5).double())
        out = net(x)
        torch.autograd.backward([CE(out, y), out.square().mean()])
        opt.step()


add_program("a scale handed to backward", _handed_scale)


class Variational(nn.Module):
    """Mean and deviation; noise comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.down(x).chunk(2, 1)
        return self.up(mean + noise * (log / 2).exp()), mean, log


def _elbo(net: Any, opt: Any, batches: Any) -> None:
    """Sums over the batch, divided by the size of the data set (as in tutorials)."""
    for x, noise in _twice(batches):
        opt.zero_grad()
        again, mean, log = net(x, noise)
        kl = -0.5 * (1 + log - mean.square() - log.exp()).sum()
        ((F.mse_loss(again, x, reduction="sum") + kl) / len(batches.dataset)).backward()
        opt.step()


def _with_noise() -> Made:
    net = Variational().double()
    return net, sgd(net), DataLoader(TensorDataset(normal(21, 8), normal(21, 3)), 6)


add_program("sums over the batch, divided by the data set's size", _elbo, _with_noise)


class Duel(nn.Module):
    """Generator and critic."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = nn.Linear(3, 8), nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return self.critic(x), self.critic(self.maker(noise))


def _hinge(net: Any, opt: Any, batches: Any) -> None:
    """Two steps of the critic for one of the generator; parts are frozen in turn."""
    for k, (x, noise) in enumerate(_twice(batches)):
        net.maker.requires_grad_(k % 3 == 2)
        net.critic.requires_grad_(k % 3 != 2)
        opt.zero_grad()
        real, fake = net(x, noise)
        (-fake.mean() if k % 3 == 2 else F.relu(1 - real).mean() + F.relu(1 + fake).mean()).backward()
        opt.step()


def _dueling() -> Made:
    net = Duel().double()
    return net, sgd(net), DataLoader(TensorDataset(normal(21, 8), normal(21, 3)), 6)


add_program("critic and generator in turn, frozen", _hinge, _dueling)


class Steps(nn.Module):
    """A recurrent net with its state handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h, state = self.cell(x, state)
        return self.out(h), state


def _truncated(net: Any, opt: Any, batches: Any) -> None:
    """Pieces of two steps each have a backward and an update."""
    for x, y in _twice(batches):
        state = None
        for t in range(0, 6, 2):
            opt.zero_grad()
            out, state = net(x[:, t : t + 2], state)
            CE(out.flatten(0, 1), y[:, t : t + 2].flatten()).backward()
            opt.step()
            state = state.detach()


def _series() -> Made:
    net = Steps().double()
    return net, sgd(net), DataLoader(TensorDataset(normal(21, 6, 4), torch.randint(3, (21, 6))), 6)


add_program("truncated in time, an update for each piece", _truncated, _series)


class Tied(nn.Module):
    """Returns features; the loop multiplies by the table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.words(tokens)))


def _tied_outside(net: Any, opt: Any, batches: Any) -> None:
    for tokens, labels in _twice(batches):
        opt.zero_grad()
        logits = net(tokens) @ net.words.weight.T
        CE(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
        opt.step()


def _tied_tokens() -> Made:
    net, (_, _, batches) = Tied().double(), _tokens()
    return net, sgd(net), batches


add_program("a table of words tied in the loop", _tied_outside, _tied_tokens)


def _until_settled(net: Any, opt: Any, batches: Any) -> None:
    """Epochs end when their losses settle, by tensors."""
    before = None
    for _ in range(6):
        total = torch.zeros(()).double()
        for x, y in batches:
            total = total + one_step(net, opt, x, y).detach() * y.numel()
        if before is not None and torch.abs(before - total) < 1.5:
            break
        before = total


add_program("until the loss settles, by tensors", _until_settled)


class Task(nn.Module):
    """A trainer's module around the model, with the loss inside."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return CE(self.net(x), y)


def _wrapped_task(net: Any, opt: Any, batches: Any) -> None:
    task = Task(net)
    task.train()
    for x, y in _twice(batches):
        opt.zero_grad()
        task(x, y).backward()
        nn.utils.clip_grad_norm_(task.parameters(), 0.3)
        opt.step()


add_program("a module around the model", _wrapped_task)


def _in_sequence(net: Any, opt: Any, batches: Any) -> None:
    whole = nn.Sequential(net, nn.LogSoftmax(1))
    for x, y in _twice(batches):
        opt.zero_grad()
        F.nll_loss(whole(x), y).backward()
        opt.step()


add_program("the model in a sequence", _in_sequence)


def _by_names(net: Any, opt: Any, batches: Any) -> None:
    """Layers are trained from the epoch on that their name says."""
    for epoch in range(3):
        for name, p in net.named_parameters():
            p.requires_grad_(name.startswith("head") or epoch > 0)
        for x, y in batches:
            one_step(net, opt, x, y)


add_program("layers trained by name and epoch", _by_names, lambda: classified(Named))


def _arrays_flipped(net: Any, opt: Any, batches: Any) -> None:
    """Images are flipped by numpy, weights of classes looked up in a list."""
    weights = [0.5, 1.0, 2.0]
    for x, y in _twice(batches):
        flipped = torch.from_numpy(x.numpy()[:, ::-1].copy())
        w = torch.tensor([weights[int(c)] for c in y]).double()
        opt.zero_grad()
        (w * CE(net(flipped), y, reduction="none")).mean().backward()
        opt.step()


add_program("flipped by numpy, weighed by a list", _arrays_flipped)


def _in_pairs(net: Any, opt: Any, batches: Any) -> None:
    """Pieces of two samples; their losses are added up and divided by the batch."""
    for x, y in _twice(batches):
        opt.zero_grad()
        for a, b in zip(x.split(2), y.split(2), strict=True):
            (CE(net(a), b, reduction="sum") / len(x)).backward()
        opt.step()


add_program("pieces of two samples", _in_pairs)


def _in_pairs_even(net: Any, opt: Any, batches: Any) -> None:
    """Four pieces whatever the batch."""
    for x, y in _twice(batches):
        opt.zero_grad()
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            (CE(net(a), b) / 2).backward()
        opt.step()


add_program("two pieces of each batch", _in_pairs_even, lambda: classified(count=24, batch=8))


class Streamed(IterableDataset[Any]):
    """Yields whole batches as dictionaries."""

    def __iter__(self) -> Iterator[Any]:
        g = torch.Generator().manual_seed(3)
        for n in (6, 6, 5, 4):
            yield {"x": torch.randn(n, 8, generator=g).double(), "y": torch.randint(3, (n,), generator=g)}


def _of_dictionaries(net: Any, opt: Any, batches: Any) -> None:
    for b in _twice(batches):
        one_step(net, opt, b["x"], b["y"])


def _streamed() -> Made:
    net = small_net().double()
    return net, sgd(net), DataLoader(Streamed(), batch_size=None)


add_program("batches as dictionaries of a stream", _of_dictionaries, _streamed)


def _all_similarities(net: Any, opt: Any, batches: Any) -> None:
    """Similarities of all pairs, by broadcasting, with labels as positives."""
    for x, y in _twice(batches):
        opt.zero_grad()
        z = net(x)
        near = F.cosine_similarity(z[:, None], z[None], dim=-1)
        same = (y[:, None] == y[None]).double()
        F.mse_loss(near, same).backward()
        opt.step()


add_program("similarities of all pairs", _all_similarities)


def _largest_so_far(net: Any, opt: Any, batches: Any) -> None:
    """Inputs are scaled by the largest size so far."""
    largest = torch.zeros(()).double()
    for x, y in _twice(batches):
        largest = torch.maximum(largest, x.abs().max())
        one_step(net, opt, x / largest, y)


add_program("scaled by the largest so far", _largest_so_far)


class Masked(nn.Module):
    """Rebuilds features that a mask of the batch hides."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.token = small_net(8), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.net(torch.where(mask, self.token, x))  # type: ignore[no-any-return]


def _rebuilt(net: Any, opt: Any, batches: Any) -> None:
    """Only what was hidden counts, divided by how much that is."""
    for x, mask in _twice(batches):
        opt.zero_grad()
        out = net(x, mask)
        ((out - x).square() * mask).sum().div(mask.sum()).backward()
        opt.step()


def _hidden() -> Made:
    net = Masked().double()
    return net, sgd(net), DataLoader(TensorDataset(normal(21, 8), torch.rand(21, 8) < 0.4), 6)


add_program("hidden features rebuilt", _rebuilt, _hidden)


def _rebuilt_by_index(net: Any, opt: Any, batches: Any) -> None:
    """The same by a mask as an index, and a mean."""
    for x, mask in _twice(batches):
        opt.zero_grad()
        MSE(net(x, mask)[mask], x[mask]).backward()
        opt.step()


add_program("hidden features rebuilt, by index", _rebuilt_by_index, _hidden)


def _momentum_by_hand(net: Any, _opt: Any, batches: Any) -> None:
    """An optimizer of the loop's own, in lists of tensors (Adam by hand)."""
    first = [torch.zeros_like(p) for p in net.parameters()]
    second = [torch.zeros_like(p) for p in net.parameters()]
    for t, (x, y) in enumerate(_twice(batches), 1):
        loss = CE(net(x), y)
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p, m, v in zip(net.parameters(), first, second, strict=True):
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                p.addcdiv_(m / (1 - 0.9**t), (v / (1 - 0.99**t)).sqrt().add_(1e-8), value=-0.01)


add_program("Adam by hand", _momentum_by_hand)


def _shared_by_loss(net: Any, opt: Any, batches: Any) -> None:
    """From the third epoch on momentum goes by the share of right answers."""
    for epoch in range(4):
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            CE(out, y).backward()
            if epoch > 1:
                for group in opt.param_groups:
                    group["momentum"] = 0.5 + 0.4 * (out.argmax(1) == y).double().mean()
            opt.step()


add_program("a momentum by right answers, late", _shared_by_loss)
