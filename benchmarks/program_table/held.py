"""Programs of public repositories: what they hold from before the call, and second models beside the trained one."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

from benchmarks.program_table import Made, epochs, made, normal, pairs
from benchmarks.program_table.common import (
    CE,
    MSE,
    Named,
    add_program,
    classified,
    one_step,
    small_net,
)
from benchmarks.program_table.scripts import numbers

# ---- what a program holds from before the call, and what it reaches through layers


def _holding(held: Any, net: Any = Named, **options: Any) -> Made:
    """``held(net)``, made before the call, is an attribute of the optimizer."""
    model, opt, batches = classified(net, **options)
    opt.held = held(model)
    return model, opt, batches


def _clips_held(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        nn.utils.clip_grad_norm_(opt.held, 0.05)
        opt.step()


add_program("parameters listed before: clipped", _clips_held, lambda: _holding(lambda n: list(n.parameters())))


def _penalises_held(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        (CE(net(x), y) + 0.05 * sum(p.square().sum() for k, p in opt.held if "bias" not in k)).backward()
        opt.step()


add_program(
    "parameters listed before: a penalty", _penalises_held, lambda: _holding(lambda n: list(n.named_parameters()))
)


def _averages_held(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    average = [p.detach().clone() for p in opt.held]
    for x, y in itertools.chain(batches, batches):
        one_step(net, opt, x, y)
        for a, p in zip(average, opt.held, strict=True):
            a.lerp_(p.detach(), 0.2)
    return {f"average{i}": a for i, a in enumerate(average)}


add_program("parameters listed before: averaged", _averages_held, lambda: _holding(lambda n: list(n.parameters())))


def _moves_held(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        with torch.no_grad():
            for p in opt.held:
                if p.grad is not None:
                    p.sub_(0.05 * p.grad)


add_program("parameters listed before: moved by hand", _moves_held, lambda: _holding(lambda n: list(n.parameters())))


def _calls_held(_: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        opt.zero_grad()
        CE(opt.held(x), y).backward()
        opt.step()


add_program("the model from before is trained", _calls_held, lambda: _holding(lambda n: n))


def _judges_held(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    x, y = batches.dataset.tensors
    seen = []
    for _ in range(2):
        for a, b in batches:
            one_step(net, opt, a, b)
        with torch.no_grad():
            seen.append(CE(opt.held(x), y))
    return numbers(seen=torch.stack(seen))


add_program("the model from before is evaluated", _judges_held, lambda: _holding(lambda n: n))


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
                one_step(net, opt, x, y)

    return loop


def _scale(layer: Any, epoch: int) -> None:
    layer.scale = 1 / (1 + epoch)


def _cool(net: Any, _opt: Any, epoch: int) -> None:
    net.middle.temperature.fill_(1.0 + epoch)


def _replace(net: Any, _opt: Any, epoch: int) -> None:
    net.middle.temperature = torch.tensor(1.0 + epoch).double()


def _register(net: Any, _opt: Any, epoch: int) -> None:
    net.middle.register_buffer("temperature", torch.tensor(1.0 + epoch).double())


add_program("a layer's attribute by epoch", _by_epoch(lambda n, _o, e: _scale(n.middle, e)), lambda: classified(Inner))
add_program(
    "a layer's attribute, by modules()",
    _by_epoch(lambda n, _o, e: [_scale(m, e) for m in n.modules() if isinstance(m, Scaled)]),
    lambda: classified(Inner),
)
add_program(
    "a layer's attribute, held from before",
    _by_epoch(lambda _n, o, e: _scale(o.held, e)),
    lambda: _holding(lambda n: n.middle, Inner),
)
add_program(
    "a layer's attribute, by get_submodule",
    _by_epoch(lambda n, _o, e: _scale(n.get_submodule("middle"), e)),
    lambda: classified(Inner),
)
add_program("a layer's buffer by epoch", _by_epoch(_cool), lambda: classified(Inner))
add_program("a layer's buffer replaced", _by_epoch(_replace), lambda: classified(Inner))
add_program("a layer's buffer registered again", _by_epoch(_register), lambda: classified(Inner))
add_program(
    "a layer's buffer, held from before",
    _by_epoch(lambda _n, o, e: o.held.fill_(1.0 + e)),
    lambda: _holding(lambda n: n.middle.temperature, Inner),
)
add_program(
    "a layer's buffer, by state_dict",
    _by_epoch(lambda n, _o, e: n.load_state_dict({"middle.temperature": torch.tensor(1.0 + e)}, strict=False)),
    lambda: classified(Inner),
)
add_program(
    "dropout switched off and on",
    _by_epoch(lambda n, _o, e: setattr(n.drop, "p", 0.0) or n.drop.train(e % 2 == 0)),
    lambda: classified(Inner),
)
add_program(
    "dropout from the second epoch",
    _by_epoch(lambda n, _o, e: setattr(n.drop, "p", 0.4 * e)),
    lambda: classified(Inner),
)


def _layerwise_clip(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for m in (net.first, net.second, net.head):
            nn.utils.clip_grad_norm_(m.parameters(), 0.02)
        opt.step()


add_program("clipped layer by layer", _layerwise_clip, lambda: classified(Named))


def _layerwise_rate(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for m in (net.first, net.second, net.head):
            m.weight.grad.mul_(0.1 * m.weight.norm() / (m.weight.grad.norm() + 1e-6))
        opt.step()


add_program("scaled by norms of layers", _layerwise_rate, lambda: classified(Named))


def _modules_rate(net: Any, opt: Any, batches: Any) -> None:
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        CE(net(x), y).backward()
        for m in net.modules():
            if isinstance(m, nn.Linear):
                m.weight.grad.div_(m.weight.grad.norm() + 1e-3)
        opt.step()


add_program("scaled by norms of modules()", _modules_rate, lambda: classified(Named))


def _max_norm(net: Any, opt: Any, batches: Any) -> None:
    """Rows of every layer are shortened (max-norm constraint)."""
    for x, y in itertools.chain(batches, batches):
        one_step(net, opt, x, y)
        with torch.no_grad():
            for m in (net.first, net.second):
                m.weight.copy_(torch.renorm(m.weight, 2, 0, 0.5))


add_program("rows of layers shortened", _max_norm, lambda: classified(Named))


def _logged(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Means and norms of weights and gradients of layers are logged."""
    seen = []
    for x, y in batches:
        one_step(net, opt, x, y)
        seen += [
            net.first.weight.norm().item(),
            net.first.weight.grad.abs().max().item(),
            net.second.weight.std().item(),
        ]
        seen += [float(m.weight.detach().mean()) for m in net.children()]
    return numbers(seen=seen)


add_program("figures of layers logged", _logged, lambda: classified(Named))


def _histogram(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Weights as arrays, as TensorBoard takes them."""
    for x, y in batches:
        one_step(net, opt, x, y)
    return numbers(
        size=net.second.weight.detach().cpu().numpy().size,
        total=float(np.abs(net.second.weight.detach().numpy()).sum()),
    )


add_program("weights of a layer as an array", _histogram, lambda: classified(Named))


def _layer_states(net: Any, opt: Any, batches: Any) -> None:
    """A layer's state is taken, and loaded after an epoch."""
    kept = copy.deepcopy(net.second.state_dict())
    for x, y in batches:
        one_step(net, opt, x, y)
    net.second.load_state_dict(kept)
    for x, y in batches:
        one_step(net, opt, x, y)


add_program("a layer's state loaded again", _layer_states, lambda: classified(Named))


def _layer_foreign(net: Any, opt: Any, batches: Any) -> None:
    """A layer's state comes from another model."""
    torch.manual_seed(4)
    net.second.load_state_dict(nn.Linear(16, 16).double().state_dict())
    for x, y in batches:
        one_step(net, opt, x, y)


add_program("a layer's state from another model", _layer_foreign, lambda: classified(Named))


def _copied_weight(net: Any, opt: Any, batches: Any) -> None:
    """Weights of a layer are copied from elsewhere by ``copy_`` and by ``data``."""
    torch.manual_seed(4)
    other = Named().double()
    with torch.no_grad():
        net.first.weight.copy_(other.first.weight)
        net.second.weight.data = other.second.weight.data.clone()
    for x, y in batches:
        one_step(net, opt, x, y)


add_program("weights of layers copied in", _copied_weight, lambda: classified(Named))

# ---- optimizers with a state from before


def _begun(kind: Any, steps: int = 2, **options: Any) -> Made:
    net, _, batches = classified()
    opt = kind(net.parameters(), lr=0.02, **options)
    g = torch.Generator().manual_seed(9)
    x, y = torch.randn(6, 8, generator=g).double(), torch.randint(3, (6,), generator=g)
    for _ in range(steps):
        one_step(net, opt, x, y)
    opt.zero_grad()
    return net, opt, batches


for name, kind, more in (
    ("Adam", torch.optim.Adam, {"eps": 1e-3}),
    ("SGD", torch.optim.SGD, {"momentum": 0.9}),
    ("RMSprop", torch.optim.RMSprop, {"eps": 1e-2, "momentum": 0.5, "centered": True}),
):
    add_program(
        f"a state from before: {name}", epochs(pairs(CE)), lambda kind=kind, more=more: _begun(kind, **more), CE
    )
for name, kind, more in (
    ("Adagrad, begun", torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
    ("Adamax", torch.optim.Adamax, {"eps": 1e-3}),
    ("RAdam", torch.optim.RAdam, {"eps": 1e-3}),
    ("SGD, nesterov, dampened", torch.optim.SGD, {"momentum": 0.9, "dampening": 0.0, "nesterov": True}),
):
    add_program(
        f"another optimizer: {name}", epochs(pairs(CE)), lambda kind=kind, more=more: _begun(kind, 0, **more), CE
    )


def _gradients_before() -> Made:
    net, opt, batches = classified()
    CE(net(torch.ones(4, 8).double()), torch.zeros(4).long()).backward()
    return net, opt, batches


def _adds_first(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        CE(net(x), y).backward()
        opt.step()
        opt.zero_grad()


add_program("gradients from before", _adds_first, _gradients_before)

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


add_program("a probe on detached features", _probe)


def _apart(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """A second model that is not placed learns from the same batches."""
    torch.manual_seed(3)
    second = small_net().double()
    other = torch.optim.SGD(second.parameters(), lr=0.1)
    for x, y in itertools.chain(batches, batches):
        one_step(net, opt, x, y)
        other.zero_grad()
        CE(second(x), y).backward()
        other.step()
    return {f"second.{k}": v for k, v in second.state_dict().items()}


add_program("a second model from the same batches", _apart)


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


add_program("a critic that is not placed", _critic_apart, lambda: made(small_net(8), normal(21, 8), normal(21, 8)))


def _teaches(net: Any, opt: Any, batches: Any) -> None:
    """A teacher that is trained beside the student, on the student's answers."""
    torch.manual_seed(3)
    teacher = small_net().double()
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


add_program("a teacher trained beside", _teaches)


def _pseudo(net: Any, opt: Any, batches: Any) -> None:
    """Answers to all samples are collected, and are the labels of a second phase."""
    for x, y in batches:
        one_step(net, opt, x, y)
    xs, labels = [], []
    net.eval()
    with torch.no_grad():
        for x, _ in batches:
            xs.append(x)
            labels.append(net(x).argmax(1))
    net.train()
    for x, y in DataLoader(TensorDataset(torch.cat(xs), torch.cat(labels)), 6):
        one_step(net, opt, x, y)


add_program("answers as labels of a second phase", _pseudo)


def _clustered(net: Any, opt: Any, batches: Any) -> None:
    """Features are clustered behind every epoch; the clusters are the labels by place (DeepCluster)."""
    labels = torch.arange(21) % 3
    for _ in range(2):
        at = 0
        for x, _y in batches:
            one_step(net, opt, x, labels[at : at + len(x)])
            at += len(x)
        with torch.no_grad():
            feats = torch.cat([net(x) for x, _ in batches])
        centres = feats[:3].clone()
        for _ in range(3):
            near = torch.cdist(feats, centres).argmin(1)
            centres = torch.stack([feats[near == k].mean(0) if (near == k).any() else centres[k] for k in range(3)])
        labels = torch.cdist(feats, centres).argmin(1)


add_program("clusters as labels by place", _clustered)


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


add_program(
    "a sampler by losses",
    _weighed,
    lambda: made(small_net(), normal(21, 8), torch.randint(3, (21,)), torch.arange(21), sampler=Weighted()),
)


def _active(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """Active learning: the most uncertain samples of a pool are added for the next round."""
    x, y = batches.dataset.tensors
    known = list(range(8))
    for _ in range(3):
        for a, b in DataLoader(TensorDataset(x[known], y[known]), 4):
            one_step(net, opt, a, b)
        with torch.no_grad():
            p = net(x).softmax(1)
        entropy = -(p * p.log()).sum(1)
        entropy[known] = -1
        known += entropy.topk(4).indices.tolist()
    return numbers(known=known)


add_program("active learning", _active)


def _one_loss(net: Any, opt: Any, batches: Any) -> None:
    """Outputs of all batches, and one loss of them."""
    for _ in range(3):
        opt.zero_grad()
        outs, ys = zip(*((net(x), y) for x, y in batches), strict=True)
        CE(torch.cat(outs), torch.cat(ys)).backward()
        opt.step()


add_program("one loss of all batches", _one_loss)


def _mean_losses(net: Any, opt: Any, batches: Any) -> None:
    """The mean of the losses of all batches."""
    for _ in range(3):
        opt.zero_grad()
        torch.stack([CE(net(x), y) for x, y in batches]).mean().backward()
        opt.step()


add_program("the mean of the losses of all batches", _mean_losses)


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


add_program("features kept, the head trained", _cached_features, lambda: classified(Named))


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


add_program("gradients of outputs by numpy, a mean", _by_numpy(len))
add_program("gradients of outputs by numpy, a sum", _by_numpy(lambda _y: 3.0))


def _by_torch(net: Any, opt: Any, batches: Any) -> None:
    """The same by torch, without a mean."""
    for x, y in itertools.chain(batches, batches):
        opt.zero_grad()
        out = net(x)
        out.backward((out.detach().softmax(1) - F.one_hot(y, 3)) / 3.0)
        opt.step()


add_program("gradients of outputs by torch, a sum", _by_torch)


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


add_program("a task by name", _tasks, lambda: classified(Tasks))


def _dropped_order(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """A model with dropout, and an order that the loop draws behind it."""
    x, y = batches.dataset.tensors
    orders = []
    for _ in range(2):
        order = torch.randperm(len(x))
        orders.append(order)
        for i in range(0, 21, 6):
            one_step(net, opt, x[order[i : i + 6]], y[order[i : i + 6]])
    return {}


add_program(
    "dropout, and an order of the loop's",
    _dropped_order,
    lambda: classified(lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 3))),
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
            one_step(net, opt, a, b)
        with torch.no_grad():
            values.append(CE(net(x), y).item())
    net.load_state_dict(first)
    opt.load_state_dict(state)
    opt.param_groups[0]["lr"] = (0.5, 0.1, 0.02)[int(np.argmin(values))]
    for a, b in batches:
        one_step(net, opt, a, b)
    return numbers(values=values)


add_program("a rate that is searched", _found_rate)


def _rolled_back(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    """A step that made a held-out loss worse is taken back."""
    x, y = batches.dataset.tensors
    best, back = math.inf, 0
    for a, b in itertools.chain(batches, batches):
        kept = [p.detach().clone() for p in net.parameters()]
        one_step(net, opt, a, b)
        with torch.no_grad():
            value = CE(net(x), y).item()
            if value > best:
                back += 1
                for p, k in zip(net.parameters(), kept, strict=True):
                    p.copy_(k)
            best = min(best, value)
    return numbers(back=back)


add_program("steps taken back", _rolled_back)


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


add_program("attributes, then another call", _another_call, lambda: classified(TwoWays))
