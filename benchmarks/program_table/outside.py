"""Programs of public repositories, of kinds that the other files lack: preferences and groups of answers, habits of
programs for several processes, optimizers of one's own that read their state, masks, searches, and flows."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import asa
from benchmarks.program_table import Made, made, normal, sgd
from benchmarks.program_table.common import CE, MSE, Named, add_program, by_loss, classified, one_step, small_net


def _twice(batches: Any) -> Iterator[Any]:
    return itertools.chain(batches, batches)


# ---- preferences and groups


def _words(count: int = 21, length: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randint(11, (count, length)), torch.randint(11, (count, length))


class Words(nn.Module):
    """Logits of the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.table(tokens))))  # type: ignore[no-any-return]


def _log_likelihood(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].sum(1)


def _preferred() -> Made:
    net = Words().double()
    return net, sgd(net), DataLoader(TensorDataset(*_words()), 6)


def _preferences(joined: bool) -> Any:
    def loop(net: Any, opt: Any, batches: Any) -> None:
        """Direct preference optimisation against frozen scores of the first weights."""
        before = Words().double()
        before.load_state_dict(net.state_dict())
        for chosen, rejected in _twice(batches):
            opt.zero_grad()
            with torch.no_grad():
                base = _log_likelihood(before(chosen), chosen) - _log_likelihood(before(rejected), rejected)
            if joined:
                both = torch.cat([chosen, rejected])
                good, bad = _log_likelihood(net(both), both).split(len(chosen))
            else:
                good, bad = _log_likelihood(net(chosen), chosen), _log_likelihood(net(rejected), rejected)
            (-F.logsigmoid(0.5 * (good - bad - base))).mean().backward()
            opt.step()

    return loop


add_program("preferences, two calls", _preferences(False), _preferred)
add_program("preferences, joined", _preferences(True), _preferred)


def _grouped_advantages(net: Any, opt: Any, batches: Any) -> None:
    """Answers in groups of three to a prompt; rewards are normalised within a group (GRPO)."""
    for x, reward in _twice(batches):
        opt.zero_grad()
        groups = reward.view(-1, 3)
        gain = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        logp = net(x).log_softmax(1)[:, 0]
        ratio = (logp - logp.detach()).exp()
        (-(torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain))).mean().backward()
        opt.step()


add_program(
    "advantages of groups by place", _grouped_advantages, lambda: made(small_net(), normal(24, 8), normal(24), batch=6)
)
add_program(
    "advantages of groups by place, uneven",
    _grouped_advantages,
    lambda: made(small_net(), normal(24, 8), normal(24), batch=9),
)


class Factors(nn.Module):
    """Scores of users and items."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(9, 4), nn.Embedding(13, 4)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.users(user) * self.items(item)).sum(-1)


def _ranked(net: Any, opt: Any, batches: Any) -> None:
    """Bayesian personalised ranking, with weights of the rows of the batch in the loss."""
    for user, seen, other in _twice(batches):
        opt.zero_grad()
        loss = -F.logsigmoid(net(user, seen) - net(user, other)).mean()
        rows = net.users(user).square().sum(1) + net.items(seen).square().sum(1)
        (loss + 0.01 * rows.mean()).backward()
        opt.step()


def _rated() -> Made:
    net = Factors().double()
    columns = torch.randint(9, (21,)), torch.randint(13, (21,)), torch.randint(13, (21,))
    return net, sgd(net), DataLoader(TensorDataset(*columns), 6)


add_program("items ranked, rows decayed by layers", _ranked, _rated)


# ---- programs that were made for several processes


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _counted_over_ranks(net: Any, opt: Any, batches: Any) -> None:
    """Boxes are counted over all processes, and divided by how many those are (DETR)."""
    for x, y in _twice(batches):
        opt.zero_grad()
        real = (y > 0).double()
        boxes = real.sum()
        if _world() > 1:
            dist.all_reduce(boxes)
        boxes = torch.clamp(boxes / _world(), min=1)
        (CE(net(x), y, reduction="none") * real).sum().div(boxes).backward()
        opt.step()


add_program("a count summed over processes", _counted_over_ranks)


def _rate_by_world(net: Any, opt: Any, batches: Any) -> None:
    """The rate grows with the number of processes (linear scaling rule)."""
    for group in opt.param_groups:
        group["lr"] *= _world()
    for x, y in _twice(batches):
        one_step(net, opt, x, y)


add_program("a rate by the number of processes", _rate_by_world)


def _accumulated_by_world(net: Any, opt: Any, batches: Any) -> None:
    """The steps of accumulation are shared by the processes (nanoGPT)."""
    steps = 2 // _world()
    for i, (x, y) in enumerate(_twice(batches)):
        (CE(net(x), y) / steps).backward()
        if (i + 1) % steps == 0:
            opt.step()
            opt.zero_grad()


add_program("accumulation shared by the processes", _accumulated_by_world)


def _seeded_by_rank(net: Any, opt: Any, batches: Any) -> None:
    """Each process has a seed of its own, and noise is drawn."""
    torch.manual_seed(7 + (dist.get_rank() if _world() > 1 else 0))
    for x, y in _twice(batches):
        opt.zero_grad()
        CE(net(x + 0.1 * torch.randn(8, dtype=x.dtype)), y).backward()
        opt.step()


add_program("a seed by the process", _seeded_by_rank)


def _validated_by_first(net: Any, opt: Any, batches: Any) -> None:
    """Only the first process validates, on samples of its own."""
    x_val, y_val = torch.ones(6, 8).double(), torch.arange(6) % 3
    for x, y in _twice(batches):
        one_step(net, opt, x, y)
        if _world() == 1 or dist.get_rank() == 0:
            net.eval()
            with torch.no_grad():
                float(CE(net(x_val), y_val))
            net.train()


add_program("validated by the first process alone", _validated_by_first)


def _saved_by_first(net: Any, opt: Any, batches: Any) -> None:
    """Only the first process takes the state."""
    for x, y in _twice(batches):
        one_step(net, opt, x, y)
    if _world() == 1 or dist.get_rank() == 0:
        copy.deepcopy(net.state_dict())


add_program("saved by the first process alone", _saved_by_first)


def _reduced_by_hand(net: Any, opt: Any, batches: Any) -> None:
    """The rate follows losses that are averaged over processes by hand."""
    for x, y in _twice(batches):
        loss = one_step(net, opt, x, y).detach()
        if _world() > 1:
            dist.all_reduce(loss)
            loss = loss / _world()
        for group in opt.param_groups:
            group["lr"] = 0.05 / (1 + float(loss))


add_program("a rate by losses averaged by hand", _reduced_by_hand)


def _averaged_by_hand(net: Any, opt: Any, batches: Any) -> None:
    """Gradients are averaged over processes by hand, as in torch's tutorial."""
    for x, y in _twice(batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for p in net.parameters():
            if _world() > 1:
                dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)
                p.grad.data /= _world()
        opt.step()


add_program("gradients averaged as in the tutorial", _averaged_by_hand)


def _in_data_parallel() -> Made:
    net = nn.DataParallel(small_net().double())
    return net, sgd(net), DataLoader(TensorDataset(normal(21, 8), torch.randint(3, (21,))), 6)


add_program(
    "in DataParallel before the call",
    lambda net, opt, b: [one_step(net, opt, *i) for i in _twice(b)][:0],
    _in_data_parallel,
)


# ---- state of optimizers


class Belief(torch.optim.Optimizer):
    """AdaBelief, as it is published: state is made in the first step."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["mean"], state["var"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                b1, b2 = group["betas"]
                state["mean"].mul_(b1).add_(p.grad, alpha=1 - b1)
                off = p.grad - state["mean"]
                state["var"].mul_(b2).addcmul_(off, off, value=1 - b2).add_(1e-12)
                scale = math.sqrt(1 - b2 ** state["step"]) / (1 - b1 ** state["step"])
                p.addcdiv_(state["mean"], state["var"].sqrt().add_(1e-8), value=-group["lr"] * scale)


def _steps(net: Any, opt: Any, batches: Any) -> None:
    for x, y in _twice(batches):
        one_step(net, opt, x, y)


def _believed() -> Made:
    net, _, batches = classified()
    return net, Belief(net.parameters()), batches


add_program("AdaBelief", _steps, _believed)
add_program("AdaBelief, said to be elementwise", _steps, _believed, elementwise=True)


def _state_read(net: Any, opt: Any, batches: Any) -> None:
    """The sizes of momenta decide how long a rate stays."""
    for x, y in _twice(batches):
        one_step(net, opt, x, y)
        sizes = [opt.state[p]["momentum_buffer"].norm() for p in net.parameters()]
        for group in opt.param_groups:
            group["lr"] = 0.05 / (1 + 0.1 * float(sum(float(s) ** 2 for s in sizes)) ** 0.5)


add_program("a rate by sizes of momenta", _state_read)


def _state_if_there(net: Any, opt: Any, batches: Any) -> None:
    """Momenta are halved where there are any, with get()."""
    for i, (x, y) in enumerate(_twice(batches)):
        one_step(net, opt, x, y)
        if i % 3 == 2:
            for p in net.parameters():
                buffer = opt.state.get(p, {}).get("momentum_buffer")
                if buffer is not None:
                    buffer.mul_(0.5)


add_program("momenta halved where there are any", _state_if_there)


def _state_left_out(net: Any, opt: Any, batches: Any) -> None:
    """The head begins anew in the second epoch, with its state left out."""
    for epoch in range(2):
        if epoch:
            with torch.no_grad():
                for p in net.head.parameters():
                    p.zero_()
                    opt.state.pop(p, None)
        for x, y in batches:
            one_step(net, opt, x, y)


add_program("a head begins anew, its state left out", _state_left_out, lambda: classified(Named))


def _state_written(net: Any, opt: Any, batches: Any) -> None:
    """Momenta of a later phase are written before its first step."""
    for _ in range(2):
        for p in net.parameters():
            opt.state[p]["momentum_buffer"] = torch.zeros_like(p)
        for x, y in batches:
            one_step(net, opt, x, y)


add_program("momenta written before a phase", _state_written)


def _by_names() -> Made:
    net, _, batches = classified()
    return net, torch.optim.AdamW(net.named_parameters(), lr=0.01), batches


def _decay_by_group_names(net: Any, opt: Any, batches: Any) -> None:
    """An optimizer over named parameters; gradients of biases are scaled by the names in its groups."""
    for x, y in _twice(batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for group in opt.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if name.endswith("bias"):
                    p.grad.mul_(0.5)
        opt.step()


add_program("an optimizer over named parameters", _decay_by_group_names, _by_names)


def _shrunk(net: Any, opt: Any, batches: Any) -> None:
    """Weights are shrunk and perturbed between epochs, by a generator of one seed."""
    draw = torch.Generator().manual_seed(3)
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.6).add_(torch.randn(p.shape, generator=draw, dtype=p.dtype), alpha=0.01)


add_program("shrunk and perturbed", _shrunk)


# ---- gradients that a loop writes


def _written_late(assign: bool) -> Any:
    def loop(net: Any, opt: Any, batches: Any) -> None:
        """Behind the third epoch gradients of the head come from a rule of the loop's own, by numbers of a batch."""
        for epoch in range(5):
            for k, (x, y) in enumerate(batches):
                opt.zero_grad()
                out = net(x)
                CE(out, y).backward()
                if epoch > 2 and k > 2:
                    error = (out.detach().softmax(1) - F.one_hot(y, 3).double()).mean(0)
                    if assign:
                        net.head.bias.grad = 2.0 * error
                    else:
                        net.head.bias.grad += error
                opt.step()

    return loop


for _late in (True, False):
    add_program(
        f"gradients {'assigned' if _late else 'added'} by a rule, late",
        _written_late(_late),
        lambda: classified(Named, count=33),
    )


def _items_late(net: Any, opt: Any, batches: Any) -> None:
    """Behind the third epoch gradients are scaled by ``loss.item()``, in late batches."""
    for epoch in range(5):
        for k, (x, y) in enumerate(batches):
            opt.zero_grad()
            loss = CE(net(x), y)
            loss.backward()
            if epoch > 2 and k > 2:
                for p in net.parameters():
                    p.grad *= 1 / (1 + loss.item())
            opt.step()


add_program("gradients scaled by loss.item(), late", _items_late, lambda: classified(count=33))


# ---- a parameter that the loss multiplies with outputs


class Scaled(nn.Module):
    """Features, with a scale and class vectors that only the loop reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.classes = nn.Parameter(torch.linspace(-1, 1, 24).view(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x))) + 0.0 * self.scale + 0.0 * self.classes[0]


def _scaled_outside(net: Any, opt: Any, batches: Any) -> None:
    for x, y in _twice(batches):
        opt.zero_grad()
        CE(net.scale * net(x) @ net.classes.T, y).backward()
        opt.step()
        with torch.no_grad():
            net.scale.clamp_(0.1, 4.6)


add_program("a scale and class vectors in the loop", _scaled_outside, lambda: classified(Scaled))


def _temperature_gathered(net: Any, opt: Any, batches: Any) -> None:
    """Pairs of a batch, gathered, with a learned temperature that is clamped (CLIP)."""
    for a, b in _twice(batches):
        opt.zero_grad()
        left, right = asa.gather(F.normalize(net(a))), asa.gather(F.normalize(net(b)))
        logits = net.scale.exp() * left @ right.T
        at = torch.arange(len(logits))
        (0.5 * (CE(logits, at) + CE(logits.T, at))).backward()
        opt.step()
        net.scale.data.clamp_(0, 1.6)


add_program(
    "pairs gathered, a temperature clamped", _temperature_gathered, lambda: made(Scaled(), normal(21, 8), normal(21, 8))
)


# ---- lengths


class Padded(Dataset[Any]):
    """Series of several lengths, padded to nine."""

    def __init__(self) -> None:
        self.lengths = torch.randint(3, 10, (21,))
        self.x, self.y = normal(21, 9, 4), torch.randint(3, (21,))
        for row, length in zip(self.x, self.lengths, strict=True):
            row[length:] = 0

    def __len__(self) -> int:
        return 21

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.lengths[i], self.y[i]


class Frames(nn.Module):
    """Rebuilds frames."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))  # type: ignore[no-any-return]


def _padded(net: Any) -> Any:
    def make() -> Made:
        model = net().double()
        return model, sgd(model), DataLoader(Padded(), 6)

    return make


def _trimmed(net: Any, opt: Any, batches: Any) -> None:
    """Batches are trimmed to their longest series; the error is a mean over frames."""
    for x, length, _ in _twice(batches):
        opt.zero_grad()
        x = x[:, : int(length.max())]
        MSE(net(x), x).backward()
        opt.step()


add_program("batches trimmed to the longest", _trimmed, _padded(Frames))


class Packed(nn.Module):
    """A recurrent network over packed series."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.out(self.cells(packed)[1][0])  # type: ignore[no-any-return]


def _sorted_by_length(net: Any, opt: Any, batches: Any) -> None:
    """Series are sorted by their length in the loop, as packing wants."""
    for x, length, y in _twice(batches):
        opt.zero_grad()
        lengths, order = length.sort(descending=True)
        CE(net(x[order], lengths), y[order]).backward()
        opt.step()


add_program("sorted by length in the loop", _sorted_by_length, _padded(Packed))


class Attending(nn.Module):
    """Attention with a mask that the loop hands over; it is as long as a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.heads, self.out = (
            nn.Linear(4, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.into(x)
        return self.out(self.heads(h, h, h, attn_mask=mask, need_weights=False)[0].mean(1))  # type: ignore[no-any-return]


def _masked(length: int) -> Any:
    def loop(net: Any, opt: Any, batches: Any) -> None:
        mask = torch.triu(torch.ones(length, length), 1).bool()
        for x, y in _twice(batches):
            opt.zero_grad()
            CE(net(x, mask), y).backward()
            opt.step()

    def make() -> Made:
        net = Attending().double()
        example = (normal(2, length, 4), torch.triu(torch.ones(length, length), 1).bool())
        del example
        return net, sgd(net), DataLoader(TensorDataset(normal(21, length, 4), torch.randint(3, (21,))), 6)

    return loop, make


for _length in (6, 3, 5):
    _loop, _make = _masked(_length)
    add_program(f"a mask over {_length} places, in batches of six", _loop, _make,
                example_input=(torch.zeros(2, _length, 4).double(), torch.zeros(_length, _length).bool()))  # fmt: skip


# ---- masks, quantisation, searches


class Causal(nn.Conv1d):
    """Its weight is masked in forward, as published for PixelCNN."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data[:, :, self.kernel_size[0] // 2 + 1 :] = 0
        return super().forward(x)


def _masked_weights() -> Made:
    net = nn.Sequential(Causal(2, 6, 5, padding=2), nn.ReLU(), Causal(6, 2, 5, padding=2))
    return made(net, normal(21, 2, 8), normal(21, 2, 8))


by_loss("weights masked in forward, by data", lambda net, batch: MSE(net(batch[0]), batch[1]), _masked_weights)


class MaskedLinear(nn.Linear):
    """Its mask is a buffer (MADE)."""

    mask: Tensor

    def __init__(self, i: int, o: int, shift: int) -> None:
        super().__init__(i, o)
        self.register_buffer("mask", ((torch.arange(o)[:, None] % 8) >= (torch.arange(i)[None] % 8) + shift).double())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mask * self.weight, self.bias)


by_loss(
    "weights masked by a buffer",
    lambda net, batch: MSE(net(batch[0]), batch[0]),
    lambda: classified(lambda: nn.Sequential(MaskedLinear(8, 16, 0), nn.ReLU(), MaskedLinear(16, 8, 1))),
)


class Quantised(nn.Module):
    """Quantisation-aware training: weights and activations are rounded, with ranges that follow the data."""

    low: Tensor
    high: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(F.linear(x, self._rounded(self.first.weight), self.first.bias))
        if self.training:
            with torch.no_grad():
                self.high.lerp_(h.max().to(self.high), 0.1)
        step = (self.high - self.low).clamp(min=1e-3) / 255
        h = h + ((h / step).round().clamp(0, 255) * step - h).detach()
        return F.linear(h, self._rounded(self.head.weight), self.head.bias)

    @staticmethod
    def _rounded(weight: Tensor) -> Tensor:
        step = weight.detach().abs().max() / 127
        return weight + ((weight / step).round() * step - weight).detach()


by_loss(
    "quantised with a range that follows", lambda net, batch: CE(net(batch[0]), batch[1]), lambda: classified(Quantised)
)


class Observed(nn.Module):
    """torch's own fake quantisation."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        return self.head(h + (self.fake(h.float()).to(h) - h).detach())  # type: ignore[no-any-return]


by_loss("torch's fake quantisation", lambda net, batch: CE(net(batch[0]), batch[1]), lambda: classified(Observed))


class Mixture(nn.Module):
    """Operations weighed by architecture parameters (DARTS)."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Identity()])
        self.alpha = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum(a * way(x) for a, way in zip(self.alpha.softmax(0), self.ways, strict=True)))  # type: ignore[no-any-return]


def _search() -> Made:
    net = Mixture().double()
    weights = [p for n, p in net.named_parameters() if n != "alpha"]
    rows = normal(21, 8), torch.randint(3, (21,)), normal(21, 8), torch.randint(3, (21,))
    opt = torch.optim.SGD(weights, lr=0.05, momentum=0.9)
    net.__dict__["second"] = torch.optim.Adam([net.alpha], lr=0.02, betas=(0.5, 0.99))
    return net, opt, DataLoader(TensorDataset(*rows), 6)


def _searched(net: Any, opt: Any, batches: Any) -> None:
    """Architecture parameters are trained on samples for validation, in turn with weights (first order)."""
    second = net.second
    for x, y, x_val, y_val in _twice(batches):
        second.zero_grad()
        CE(net(x_val), y_val).backward()
        second.step()
        opt.zero_grad()
        CE(net(x), y).backward()
        nn.utils.clip_grad_norm_([p for n, p in net.named_parameters() if n != "alpha"], 1.0)
        opt.step()


add_program("an architecture searched in turn", _searched, _search)


# ---- attacks, several sources, and mining


def _adversarial(net: Any, opt: Any, batches: Any) -> None:
    """Three steps on the inputs by the divergence of answers, then both terms (TRADES)."""
    for x, y in _twice(batches):
        net.eval()
        attacked = x + 0.001
        for _ in range(3):
            attacked = attacked.detach().requires_grad_()
            with torch.enable_grad():
                apart = F.kl_div(net(attacked).log_softmax(1), net(x).softmax(1), reduction="sum")
            attacked = attacked.detach() + 0.01 * torch.autograd.grad(apart, [attacked])[0].sign()
        net.train()
        opt.zero_grad()
        clean = net(x)
        robust = F.kl_div(net(attacked.detach()).log_softmax(1), clean.softmax(1), reduction="sum") / len(x)
        (CE(clean, y) + 2 * robust).backward()
        opt.step()


add_program("attacked by the divergence of answers", _adversarial)


def _pseudo_labels(net: Any, opt: Any, batches: Any) -> None:
    """Confident answers on other samples are labels (FixMatch); both go through one call."""
    other = torch.linspace(-2, 2, 6 * 4 * 8).double().view(4, 6, 8)
    for i, (x, y) in enumerate(_twice(batches)):
        opt.zero_grad()
        weak = other[i % 4]
        out = net(torch.cat([x, weak, 1.1 * weak]))
        labelled, plain, strong = out.split([len(x), 6, 6])
        trust, label = plain.detach().softmax(1).max(1)
        (CE(labelled, y) + ((trust > 0.35) * CE(strong, label, reduction="none")).mean()).backward()
        opt.step()


add_program("confident answers as labels, one call", _pseudo_labels)


def _mined_by_numpy(net: Any, opt: Any, batches: Any) -> None:
    """Triplets are chosen by numpy from the distances of a batch (FaceNet)."""
    for x, y in _twice(batches):
        opt.zero_grad()
        out = F.normalize(net(x))
        apart = torch.cdist(out.detach(), out.detach()).numpy()
        labels, chosen = y.numpy(), []
        for i in range(len(labels)):
            same, unlike = np.where(labels == labels[i])[0], np.where(labels != labels[i])[0]
            if len(unlike):
                chosen += [(i, int(j), int(unlike[np.argmin(apart[i, unlike])])) for j in same if j != i]
        loss = out.sum() * 0
        if chosen:
            a, p, n = torch.tensor(chosen).T
            loss = F.relu((out[a] - out[p]).square().sum(1) - (out[a] - out[n]).square().sum(1) + 0.2).mean()
        loss.backward()
        opt.step()


add_program("triplets chosen by numpy", _mined_by_numpy)


def _radius_by_numpy(net: Any, opt: Any, batches: Any) -> None:
    """A sphere around the mean of first features; its radius is a quantile of distances, by numpy (Deep SVDD)."""
    with torch.no_grad():
        rows = [net(x) for x, _ in batches]
        centre = torch.cat(rows).mean(0)
    radius = torch.tensor(0.0).double()
    for i, (x, _) in enumerate(_twice(batches)):
        opt.zero_grad()
        apart = (net(x) - centre).square().sum(1)
        (radius**2 + F.relu(apart - radius**2).mean() / 0.1).backward()
        opt.step()
        if i > 2:
            radius.data = torch.tensor(np.quantile(np.sqrt(apart.clone().data.numpy()), 0.9))


add_program("a sphere, its radius by numpy", _radius_by_numpy)


class Pool:
    """Fifty fakes of the past, given out by chance (CycleGAN)."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def query(self, rows: Tensor) -> Tensor:
        given = []
        for row in rows:
            if len(self.kept) < 8:
                self.kept.append(row)
                given.append(row)
            elif random.uniform(0, 1) > 0.5:
                at = random.randint(0, 7)
                given.append(self.kept[at].clone())
                self.kept[at] = row
            else:
                given.append(row)
        return torch.stack(given)


class Translated(nn.Module):
    """Two translators and two critics."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(8, 8), nn.Linear(8, 8)
        self.real, self.fake = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor, part: str = "there") -> Tensor:
        return getattr(self, part)(x)  # type: ignore[no-any-return]


def _cycled(net: Any, opt: Any, batches: Any) -> None:
    pool = Pool()
    for x, z in _twice(batches):
        opt.zero_grad()
        for p in net.fake.parameters():
            p.requires_grad_(False)
        made_up = net(x, "there")
        (MSE(net(made_up, "back"), x) + (net(made_up, "fake") - 1).square().mean()).backward()
        for p in net.fake.parameters():
            p.requires_grad_(True)
        kept = pool.query(made_up.detach())
        (0.5 * ((net(z, "fake") - 1).square().mean() + net(kept, "fake").square().mean())).backward()
        opt.step()


def _two_domains() -> Made:
    return made(Translated(), normal(21, 8), normal(21, 8))


add_program("cycles with a pool of fakes", _cycled, _two_domains)


# ---- flows, attention, and other networks


class Couplings(nn.Module):
    """Affine couplings; ``log_prob`` is a method (RealNVP)."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logdet = x.new_zeros(len(x))
        for net in self.nets:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            b, logdet = b * torch.tanh(scale).exp() + shift, logdet + torch.tanh(scale).sum(1)
            x = torch.cat([b, a], 1)
        return x, logdet

    def log_prob(self, x: Tensor) -> Tensor:
        z, logdet = self.forward(x)
        return -0.5 * z.square().sum(1) + logdet


def _likely(net: Any, opt: Any, batches: Any) -> None:
    for x, _ in _twice(batches):
        opt.zero_grad()
        (-net.log_prob(x)).mean().backward()
        opt.step()


add_program("a flow by its method log_prob", _likely, lambda: classified(Couplings))


def _likely_in_bits(net: Any, opt: Any, batches: Any) -> None:
    for x, _ in _twice(batches):
        opt.zero_grad()
        z, logdet = net(x)
        nll = -(torch.distributions.Normal(0.0, 1.0).log_prob(z).sum() + logdet.sum())
        (nll / (math.log(2) * x.numel())).backward()
        opt.step()


add_program("a flow in bits for each number", _likely_in_bits, lambda: classified(Couplings))


class Weighing(nn.Module):
    """Returns its attention besides."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.heads, self.out = (
            nn.Linear(4, 8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.into(x)
        h, weights = self.heads(h, h, h)
        return self.out(h.mean(1)), weights


by_loss(
    "the entropy of attention",
    lambda net, batch: (
        (found := net(batch[0])) and CE(found[0], batch[1]) - 0.1 * (found[1] * found[1].log()).sum(-1).neg().mean()
    ),
    lambda: made(Weighing(), normal(21, 5, 4), torch.randint(3, (21,))),
)


class Patches(nn.Module):
    """Rebuilds patches that it hides by noise of its own (masked autoencoder)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.hidden = nn.Linear(4, 16), nn.Linear(16, 4), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        order = torch.rand(n, t, device=x.device).argsort(1)
        mask = (order.argsort(1) >= t // 2).to(x)[..., None]
        rebuilt = self.decode(self.encode(x) * (1 - mask) + self.hidden * mask)
        return ((rebuilt - x).square() * mask).sum() / (mask.sum() * 4)


by_loss("patches hidden by noise", lambda net, batch: net(batch[0]), lambda: made(Patches(), normal(21, 6, 4)))


class Generated(nn.Module):
    """A layer whose weights another makes (hypernetwork)."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.make = nn.Embedding(2, 4), nn.Linear(4, 8 * 3)
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.make(self.codes.weight).view(2, 3, 8)
        h = torch.relu(self.body(x))
        return F.linear(h, first) + F.linear(h, second).tanh()


by_loss("weights made by a network", lambda net, batch: CE(net(batch[0]), batch[1]), lambda: classified(Generated))


class Supervised(nn.Module):
    """Answers at three depths."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.heads = nn.ModuleList([nn.Linear(8, 3) for _ in range(3)])

    def forward(self, x: Tensor) -> list[Tensor] | Tensor:
        found = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = torch.relu(block(x))
            found.append(head(x))
        return found if self.training else found[-1]


def _deep(net: Any, opt: Any, batches: Any) -> None:
    """Answers at three depths; in evaluation there is one, and the best epoch's weights are kept."""
    best, kept = math.inf, None
    x_val, y_val = torch.ones(6, 8).double(), torch.arange(6) % 3
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            sum(w * CE(out, y) for w, out in zip((0.3, 0.3, 1.0), net(x), strict=True)).backward()  # type: ignore[union-attr]
            opt.step()
        net.eval()
        with torch.no_grad():
            found = float(CE(net(x_val), y_val))
        net.train()
        if found < best:
            best, kept = found, copy.deepcopy(net.state_dict())
    net.load_state_dict(kept)


add_program("answers at three depths, one in evaluation", _deep, lambda: classified(Supervised))


def _hard_points(net: Any, batch: Any) -> Tensor:
    """The hardest four of eight points of each sample count (OHKM)."""
    each = (net(batch[0]) - batch[1]).square()
    return each.topk(4, dim=1)[0].mean(1).mean()


by_loss("the hardest points of each sample", _hard_points, lambda: made(small_net(8), normal(21, 8), normal(21, 8)))


def _listed(net: Any, batch: Any) -> Tensor:
    """A ranking loss over lists (ListNet), one list a sample."""
    return -(batch[1].softmax(1) * net(batch[0])[..., 0].log_softmax(1)).sum(1).mean()


by_loss("rankings of lists", _listed, lambda: made(small_net(1), normal(21, 5, 8), normal(21, 5)))


def _queried(net: Any, batch: Any) -> Tensor:
    """A ranking loss within queries, which are numbered rows (LambdaRank's pairs)."""
    score, better = net(batch[0])[:, 0], batch[1]
    pairs = (batch[2][:, None] == batch[2][None]) & (better[:, None] > better[None])
    apart = score[:, None] - score[None]
    return F.softplus(-apart)[pairs].mean() if pairs.any() else score.sum() * 0


by_loss(
    "rankings within queries",
    _queried,
    lambda: made(small_net(1), normal(24, 8), normal(24), torch.arange(24) // 4, batch=8),
)


# ---- weights of samples, averages, and data


def _learned_weights(net: Any, opt: Any, batches: Any) -> None:
    """Each sample has a learned weight, kept in an embedding with an optimizer of its own."""
    trust = nn.Embedding(21, 1).double()
    nn.init.zeros_(trust.weight)
    second = torch.optim.SGD(trust.parameters(), lr=0.1)
    for x, y, number in _twice(batches):
        opt.zero_grad()
        second.zero_grad()
        weight = torch.sigmoid(trust(number)[:, 0])
        (weight * CE(net(x), y, reduction="none") - 0.1 * weight.log()).mean().backward()
        opt.step()
        second.step()


add_program(
    "a learned weight for each sample", _learned_weights,
    lambda: made(small_net(), normal(21, 8), torch.randint(3, (21,)), torch.arange(21)),
)  # fmt: skip


class Shadow:
    """An average with a decay that warms up, over all of ``state_dict()``, put in to evaluate (DDPM)."""

    def __init__(self, net: Any) -> None:
        self.kept, self.steps = {k: v.clone() for k, v in net.state_dict().items()}, 0

    def update(self, net: Any) -> None:
        self.steps += 1
        decay = min(0.99, (1 + self.steps) / (10 + self.steps))
        for k, v in net.state_dict().items():
            self.kept[k] = decay * self.kept[k] + (1 - decay) * v if v.is_floating_point() else v


def _with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def _averaged(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    shadow = Shadow(net)
    x_val, y_val = torch.ones(6, 8).double(), torch.arange(6) % 3
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
            shadow.update(net)
        backup = {k: v.clone() for k, v in net.state_dict().items()}
        net.load_state_dict(shadow.kept)
        net.eval()
        with torch.no_grad():
            found = CE(net(x_val), y_val)
        net.train()
        net.load_state_dict(backup)
    return {"average": torch.cat([v.flatten() for v in shadow.kept.values()]), "found": found.clone()}


add_program("an average that warms up, put in to evaluate", _averaged, lambda: classified(_with_norm))


def _averaged_late(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """A mean of weights from the second epoch on, with a schedule of its own (SWALR), by hand."""
    schedule = torch.optim.swa_utils.SWALR(opt, swa_lr=0.02, anneal_epochs=2)
    mean, count = [torch.zeros_like(p) for p in net.parameters()], 0
    for epoch in range(4):
        for x, y in batches:
            one_step(net, opt, x, y)
        if epoch > 0:
            count += 1
            with torch.no_grad():
                for m, p in zip(mean, net.parameters(), strict=True):
                    m += (p - m) / count
            schedule.step()
    with torch.no_grad():
        for m, p in zip(mean, net.parameters(), strict=True):
            p.copy_(m)
    return {}


add_program("a mean of weights, put in at the end", _averaged_late)


class Gaps(Dataset[Any]):
    """Some samples have no label and are left out by the collate_fn."""

    def __init__(self) -> None:
        self.x, self.y = normal(24, 8), torch.randint(-1, 3, (24,))

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


def _labelled(rows: list[Any]) -> Any:
    return default_collate([r for r in rows if r[1] >= 0] or rows[:1])


def _filtered() -> Made:
    net = small_net().double()
    return net, sgd(net), DataLoader(Gaps(), 6, collate_fn=_labelled)


add_program(
    "samples without labels left out by a collate_fn",
    lambda net, opt, b: [one_step(net, opt, x, y.clamp(min=0)) for x, y in _twice(b)][:0],
    _filtered,
)


def _cut_and_pasted(rows: list[Any]) -> Any:
    """Pieces of pictures are pasted into others (CutMix), as torchvision's transform does in a collate_fn."""
    x, y = default_collate(rows)
    soft = F.one_hot(y, 3).double()
    x = x.clone()
    x[:, 2:5] = x.roll(1, 0)[:, 2:5]
    return x, soft.mul(5 / 8).add(soft.roll(1, 0), alpha=3 / 8)


def _cut() -> Made:
    net = small_net().double()
    return net, sgd(net), DataLoader(
        TensorDataset(normal(21, 8), torch.randint(3, (21,))), 6, collate_fn=_cut_and_pasted
    )  # fmt: skip


add_program("pieces pasted in a collate_fn", _steps, _cut)


def _resumed_rng(net: Any, opt: Any, batches: Any) -> None:
    """A run that is saved with the state of the generator and goes on."""
    for _ in range(2):
        state = torch.get_rng_state()
        for x, y in batches:
            one_step(net, opt, x, y)
        torch.set_rng_state(state)
        for x, y in batches:
            one_step(net, opt, x, y)


add_program("an order repeated by the generator's state", _resumed_rng, lambda: classified(shuffle=True))


def _interleaved(net: Any, opt: Any, batches: Any) -> None:
    """Two iterators over the loader take turns."""
    first, second = iter(batches), iter(batches)
    for a, b in zip(first, second, strict=False):
        one_step(net, opt, *a)
        one_step(net, opt, *b)


add_program("two iterators in turn", _interleaved)


def _zipped(net: Any, opt: Any, batches: Any) -> None:
    """A batch is taken from the middle of an epoch, and the rest is left."""
    for x, y in itertools.islice(batches, 1, 3):
        one_step(net, opt, x, y)
    for x, y in batches:
        one_step(net, opt, x, y)


add_program("an epoch begun in the middle", _zipped)


def _tolerant(net: Any, opt: Any, batches: Any) -> None:
    """Steps whose gradients have a large norm are left out, by the norm over all parameters."""
    for x, y in _twice(batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        size = torch.sqrt(sum(p.grad.pow(2).sum() for p in net.parameters()))  # type: ignore[arg-type]
        if size < 0.6:
            opt.step()


add_program("steps left out by the norm of gradients", _tolerant)


def _clipped_each(net: Any, opt: Any, batches: Any) -> None:
    """Each parameter's gradient is clipped by its own norm, and values are clamped in place."""
    for x, y in _twice(batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for p in net.parameters():
            nn.utils.clip_grad_norm_(p, 0.1)
            p.grad.clamp_(-0.05, 0.05)
        opt.step()


add_program("each gradient clipped by itself", _clipped_each)


def _uneven_weights(net: Any, opt: Any, batches: Any) -> None:
    """Uncertainties of two tasks, learned; one task has samples without a label (nan)."""
    for x, y, target in _twice(batches):
        opt.zero_grad()
        out = net(x)
        known = ~torch.isnan(target)
        second = (out[:, 0][known] - target[known]).square().mean() if known.any() else out.sum() * 0
        (CE(out, y) + second).backward()
        opt.step()


def _partly_labelled() -> Made:
    target = normal(21)
    target[::4] = float("nan")
    return made(small_net(), normal(21, 8), torch.randint(3, (21,)), target)


add_program("targets that are nan left out", _uneven_weights, _partly_labelled)


def _nan_mean(net: Any, batch: Any) -> Tensor:
    """The same by nanmean."""
    return (net(batch[0])[:, 0] - batch[2]).square().nanmean()


by_loss("targets that are nan, by nanmean", _nan_mean, _partly_labelled)
