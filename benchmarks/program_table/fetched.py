"""Programs after training scripts of public repositories, in the words of this table: models that train themselves,
layers that go back through themselves, files of whole models, optimizers that change in mid-run."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import asa
from benchmarks.program_table import Made, loader, made, normal, program, sgd
from benchmarks.program_table.common import CE, MSE, Named, classified, one_step, small_net

HELD = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(5, 8)
"""Samples that are not trained on."""


def add(name: str, loop: Any, make: Any = classified, **options: Any) -> None:
    """Add a program."""
    program("repository", f"fetched: {name}", make, loop, **options)


def by_loss(name: str, loss: Any, make: Any = classified, **options: Any) -> None:
    """Add a program of the usual loop, which returns what it prints."""

    def loop(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
        printed = []
        for _ in range(2):
            for batch in batches:
                opt.zero_grad()
                value = loss(net, batch)
                value.backward()
                opt.step()
                printed.append(asa.reduce(value.detach()))
        return {"printed": torch.stack(printed)}

    add(name, loop, make, **options)


def _entropy(net: Any, batch: Any) -> Tensor:
    return CE(net(batch[0]), batch[1])


def _of(model: Any, *, trained: bool = False) -> Any:
    """A maker of ``model``, whose optimizer has all parameters, or those that are trained."""

    def make() -> Made:
        net = model().double()
        parameters = [p for p in net.parameters() if p.requires_grad or not trained]
        opt = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        return net, opt, loader(normal(21, 8), torch.randint(3, (21,)))

    return make


# --- models with loops of their own


class Fitted(nn.Module):
    """compile() and fit(), as in keras."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.history = small_net(), []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def compile(self, opt: Any, loss: Any) -> None:  # type: ignore[override]
        self.opt, self.loss = opt, loss

    def fit(self, batches: Any, count: int = 2) -> None:
        super().train()
        for _ in range(count):
            for x, y in batches:
                self.opt.zero_grad()
                loss = self.loss(self(x), y)
                loss.backward()
                self.opt.step()
                self.history.append(asa.reduce(loss.detach()))


class Agent(nn.Module):
    """An actor with a critic, which updates itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)
        self.updates = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.actor(h), self.critic(h)[:, 0]

    def update(self, opt: Any, x: Tensor, action: Tensor, reward: Tensor) -> None:
        logits, value = self(x)
        gain = (reward - value).detach()
        chosen = logits.log_softmax(1).gather(1, action[:, None])[:, 0]
        opt.zero_grad()
        (MSE(value, reward) - (chosen * gain).mean()).backward()
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        opt.step()
        self.updates += 1


class Damped(Named):
    """Its zero_grad() keeps a half."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


def _fit(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    net.compile(opt, CE)
    net.fit(batches)
    return {"printed": torch.stack(net.history)}


def _acted(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for batch in batches:
            net.update(opt, *batch)


def _damped(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        net.zero_grad()
        CE(net(x), y).backward()
        opt.step()


add("compile and fit", _fit, lambda: classified(Fitted, 24))
add("an agent that updates itself", _acted, lambda: made(Agent(), normal(21, 8), torch.randint(3, (21,)), normal(21)))
add("zero_grad() of its own", _damped, lambda: classified(Damped))


# --- averages within the model, with a context in which they take the place of the weights


class Averages(nn.Module):
    """Averages in buffers, whose names have no dots."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {n: n.replace(".", "") for n, _ in model.named_parameters()}
        self.register_buffer("updates", torch.tensor(0))
        for n, p in model.named_parameters():
            self.register_buffer(self.names[n], p.detach().clone())

    def forward(self, model: nn.Module) -> None:
        self.updates += 1
        rest = 1 - min(0.9, (1 + int(self.updates)) / (10 + int(self.updates)))
        own = dict(self.named_buffers())
        with torch.no_grad():
            for n, p in model.named_parameters():
                own[self.names[n]].sub_(rest * (own[self.names[n]] - p))

    def copy_to(self, model: nn.Module) -> None:
        own = dict(self.named_buffers())
        for n, p in model.named_parameters():
            p.data.copy_(own[self.names[n]])


class Latent(nn.Module):
    """A model with averages of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_net()
        self.averages = Averages(self.model)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]

    def averaged(self) -> None:
        self.averages(self.model)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        kept = [p.clone() for p in self.model.parameters()]
        self.averages.copy_to(self.model)
        yield
        for k, p in zip(kept, self.model.parameters(), strict=True):
            p.data.copy_(k)


def _averaged(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    printed = []
    for _ in range(2):
        for x, y in batches:
            one_step(net, opt, x, y)
            net.averaged()
        with net.scope(), torch.no_grad():
            printed.append(net(HELD).square().mean())
    return {"printed": torch.stack(printed)}


add("averages in buffers of the model, a scope", _averaged, _of(Latent))


# --- layers that go back through themselves, or by other weights


class _Reversed(torch.autograd.Function):
    """Two couplings of halves, which are undone in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module) -> Tensor:
        a, b = x.chunk(2, -1)
        a = a + f(b)
        b = b + g(a)
        ctx.blocks, ctx.out = (f, g), (a.detach(), b.detach())
        return torch.cat([a, b], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (f, g), (a, b), (da, db) = ctx.blocks, ctx.out, gradient.chunk(2, -1)
        with torch.enable_grad():
            a = a.requires_grad_()
            ga = g(a)
            torch.autograd.backward(ga, db)
        da, b = da + a.grad, (b - ga).detach()
        with torch.enable_grad():
            b = b.requires_grad_()
            torch.autograd.backward(f(b), da)
        return torch.cat([da, db + b.grad], -1), None, None


class Reversible(nn.Module):
    """Keeps the activations of the last block only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.f, self.g = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Reversed.apply(self.first(x), self.f, self.g))  # type: ignore[no-any-return, no-untyped-call]


class _Aligned(torch.autograd.Function):
    """A linear layer whose backward has fixed weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(x, back)
        return x @ w.T + b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, back = ctx.saved_tensors
        return g @ back, g.T @ x, g.sum(0), None


class Aligned(nn.Linear):
    """Feedback alignment."""

    def __init__(self, before: int, behind: int) -> None:
        super().__init__(before, behind)
        self.register_buffer("back", torch.randn(behind, before) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return _Aligned.apply(x, self.weight, self.bias, self.back)  # type: ignore[no-any-return, no-untyped-call]


by_loss("a block undone in backward", _entropy, _of(Reversible))
by_loss("feedback alignment", _entropy, _of(lambda: nn.Sequential(Aligned(8, 16), nn.Tanh(), Aligned(16, 3))))


# --- weights that forward, a mode or the loop puts in the place of others


class Normed(nn.Module):
    """A spectral norm by hand: vectors are parameters, which forward assigns."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, w = layer, layer.weight.data
        del layer._parameters["weight"]
        layer.bar = nn.Parameter(w)
        layer.u = nn.Parameter(F.normalize(torch.randn(w.shape[0]), dim=0), requires_grad=False)
        layer.v = nn.Parameter(F.normalize(torch.randn(w.shape[1]), dim=0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        layer.v.data = F.normalize(layer.bar.data.T @ layer.u.data, dim=0)
        layer.u.data = F.normalize(layer.bar.data @ layer.v.data, dim=0)
        layer.weight = layer.bar / layer.u.dot(layer.bar @ layer.v)
        return layer(x)  # type: ignore[no-any-return]


class Adapted(nn.Linear):
    """An adapter that eval() adds to the weight, and train() takes out."""

    def __init__(self, before: int, behind: int) -> None:
        super().__init__(before, behind)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, before) * 0.1), nn.Parameter(torch.zeros(behind, 2))
        self.merged = False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.up @ self.down) * (-2.0 if mode else 2.0)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out if self.merged else out + (x @ self.down.T @ self.up.T) * 2.0


def _evaluated(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    printed = []
    for _ in range(2):
        net.train()
        for x, y in batches:
            one_step(net, opt, x, y)
        net.eval()
        with torch.no_grad():
            printed.append(net(HELD).square().mean())
    net.train()
    return {"printed": torch.stack(printed)}


def _switched(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    printed = []
    for epoch in range(4):
        for x, y in batches:
            one_step(net, opt, x, y)
        if "t0" in opt.param_groups[0]:
            own = {p: p.data.clone() for p in net.parameters()}
            for p in net.parameters():
                p.data = opt.state[p]["ax"].clone()
            with torch.no_grad():
                printed.append(net(HELD).square().mean())
            for p, data in own.items():
                p.data = data
        elif epoch == 1:
            opt = torch.optim.ASGD(net.parameters(), lr=0.05, t0=0, lambd=0.0)
    return {"printed": torch.stack(printed)}


by_loss("a spectral norm by hand, vectors are parameters", _entropy,
        _of(lambda: nn.Sequential(Normed(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 3)), trained=True))  # fmt: skip
add("adapters merged by eval()", _evaluated,
    _of(lambda: nn.Sequential(Adapted(8, 16), nn.ReLU(), Adapted(16, 3)), trained=True))  # fmt: skip
add("an average by ASGD from the third epoch, put in to evaluate", _switched)


# --- files, epochs and rates


class Renamed(Named):
    """Reads states with old names."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for name in [n for n in state if n.startswith(f"{prefix}old.")]:
            state[name.replace("old.", "first.")] = state.pop(name)
        super()._load_from_state_dict(state, prefix, *rest)


def _old_names(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    kept = {n.replace("first.", "old."): t.clone() for n, t in net.state_dict().items()}
    for x, y in batches:
        one_step(net, opt, x, y)
    file = io.BytesIO()
    torch.save(net, file)
    net.load_state_dict(kept)
    for x, y in batches:
        one_step(net, opt, x, y)
    file.seek(0)
    return {"held": torch.load(file, weights_only=False)(HELD).detach()}


def _endless() -> Made:
    net, data = Named().double(), TensorDataset(normal(21, 8), torch.randint(3, (21,)))
    return net, sgd(net), DataLoader(data, 6, sampler=RandomSampler(data, replacement=True, num_samples=10**10))


def _some_steps(net: Any, opt: Any, batches: Any) -> None:
    reader = iter(batches)
    for _ in range(7):
        one_step(net, opt, *next(reader))


add("old names are loaded, a file of the whole model", _old_names, lambda: classified(Renamed))
add("ten thousand million samples an epoch", _some_steps, _endless)
