"""Optimizers and loops: what people do between a loss and the next batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks.program_table import Made, epochs, loader, made, normal, pairs, program

CE = F.cross_entropy


def _net(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 3))


def _classes(net: Callable[[], nn.Module] = _net) -> Made:
    return made(net(), normal(20, 8), torch.randint(3, (20,)))


def _with(optimizer: Callable[[nn.Module], Any], net: Callable[[], nn.Module] = _net) -> Callable[[], Made]:
    def make() -> Made:
        found, _, batches = _classes(net)
        return found, optimizer(found), batches

    return make


class Lion(torch.optim.Optimizer):
    """By the sign of a moving average."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.add_((0.9 * average + 0.1 * p.grad).sign(), alpha=-group["lr"])
                average.mul_(0.99).add_(p.grad, alpha=0.01)


class LAMB(torch.optim.Optimizer):
    """Adam with each tensor's step in proportion to its norm."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                m, v = s.setdefault("m", torch.zeros_like(p)), s.setdefault("v", torch.zeros_like(p))
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = m / (v.sqrt() + 1e-3)
                p.add_(update, alpha=-group["lr"] * float(p.norm() / update.norm().clamp(min=1e-6)))


def _accumulate(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        opt.zero_grad()
        for i, (x, y) in enumerate(batches):
            (CE(net(x), y) / 2).backward()
            if i % 2:
                opt.step()
                opt.zero_grad(set_to_none=False)


def _sam(net: Any, opt: Any, batches: Any) -> None:
    """Sharpness-aware: a step up, the gradient there, a step back, a step down."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            norm = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()
            ups = []
            with torch.no_grad():
                for p in net.parameters():
                    up = None if p.grad is None else p.grad * (0.05 / (norm + 1e-12))
                    ups.append(up)
                    if up is not None:
                        p.add_(up)
            opt.zero_grad()
            CE(net(x), y).backward()
            with torch.no_grad():
                for p, up in zip(net.parameters(), ups, strict=True):
                    if up is not None:
                        p.sub_(up)
            opt.step()


def _scaled(net: Any, opt: Any, batches: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            scaler.scale(CE(net(x), y)).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()


def _autocast(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = CE(net(x.float()), y)
        loss.backward()
        opt.step()


def _average(net: Any, opt: Any, batches: Any) -> dict[str, Tensor]:
    average = [p.detach().clone() for p in net.parameters()]
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
            with torch.no_grad():
                for a, p in zip(average, net.parameters(), strict=True):
                    a.lerp_(p, 0.2)
    with torch.no_grad():
        for p, a in zip(net.parameters(), average, strict=True):
            p.copy_(a)
    return {}


def _teacher_made() -> Made:
    net, opt, batches = _classes()
    opt.teacher = copy.deepcopy(net)
    return net, opt, batches


def _teacher(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            with torch.no_grad():
                wanted = opt.teacher(x).softmax(1)
            opt.zero_grad()
            out = net(x)
            (CE(out, y) + F.kl_div(out.log_softmax(1), wanted, reduction="batchmean")).backward()
            opt.step()


def _schedule(net: Any, opt: Any, batches: Any) -> None:
    one = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=8)
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
            one.step()


def _added(net: Any, opt: Any, batches: Any) -> None:
    """The last layer joins the optimizer in the second epoch."""
    for epoch in range(2):
        if epoch:
            opt.add_param_group({"params": list(net.parameters())[-2:], "lr": 0.01})
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()


def _nearly_all() -> Made:
    net, _, batches = _classes()
    return net, torch.optim.SGD(list(net.parameters())[:-2], lr=0.05, momentum=0.9), batches


def _mixed_up(net: Any, opt: Any, batches: Any) -> None:
    """Mixup drawn in the loop."""
    for _ in range(2):
        for x, y in batches:
            share, order = float(torch.distributions.Beta(1.0, 1.0).sample()), torch.randperm(len(x))
            opt.zero_grad()
            out = net(share * x + (1 - share) * x[order])
            (share * CE(out, y) + (1 - share) * CE(out, y[order])).backward()
            opt.step()


def _mixed_fixed(net: Any, opt: Any, batches: Any) -> None:
    """Samples mixed with their neighbours in the batch, nothing drawn."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            out = net(0.7 * x + 0.3 * x.flip(0))
            (0.7 * CE(out, y) + 0.3 * CE(out, y.flip(0))).backward()
            opt.step()


def _normalised(net: Any, opt: Any, batches: Any) -> None:
    """Inputs divided by the deviation of their batch."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net((x - x.mean(0)) / (x.std(0) + 0.1)), y).backward()
            opt.step()


def _noise(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x + 0.1 * torch.randn_like(x)), y).backward()
            opt.step()


def _python_noise(net: Any, opt: Any, batches: Any) -> None:
    import random

    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x * (1 if random.random() > 0.5 else -1)), y).backward()
            opt.step()


def _decided(net: Any, opt: Any, batches: Any) -> None:
    """Batches whose loss is small are skipped, by the number that ``loss.item()`` gives."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            loss = CE(net(x), y)
            if loss.item() < 1.1:
                continue
            loss.backward()
            opt.step()


def _weighted_by_value(net: Any, opt: Any, batches: Any) -> None:
    """The loss is divided by a running mean of itself."""
    mean = 1.0
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            loss = CE(net(x), y)
            mean = 0.5 * mean + 0.5 * float(loss.detach())
            (loss / mean).backward()
            opt.step()


def _plateau(net: Any, opt: Any, batches: Any) -> None:
    """A schedule that goes by the loss."""
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    for _ in range(4):
        total = 0.0
        for x, y in batches:
            opt.zero_grad()
            loss = CE(net(x), y)
            loss.backward()
            opt.step()
            total += loss.item() * (1 + 0.5 * len(x))
        schedule.step(total)


def _pieces(net: Any, opt: Any, batches: Any) -> None:
    """A batch in two calls of the model and one backward."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            half = max(1, len(x) // 2)
            outs = [net(x[:half])] + ([net(x[half:])] if len(x) > half else [])
            CE(torch.cat(outs), y).backward()
            opt.step()


def _closure(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                opt.zero_grad()
                loss = CE(net(x), y)
                loss.backward()
                return loss

            opt.step(closure)


def _gan_made() -> Made:
    net, opt, _ = made(nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)), torch.zeros(1))
    return net, opt, loader(normal(20, 6), normal(20, 4))


def _gan(net: Any, opt: Any, batches: Any) -> Any:
    """Discriminator and generator with an optimizer each; the noise comes with the data."""
    import asa

    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6)).double()
    with torch.no_grad():
        for i, p in enumerate(generator.parameters()):
            p.copy_(torch.linspace(-0.3, 0.3, p.numel(), dtype=p.dtype).view_as(p).roll(i))
    other = torch.optim.Adam(generator.parameters(), lr=0.01, eps=1e-3)
    if hasattr(net, "plan"):
        generator, other, _ = asa.parallelize(
            generator, other, loader(normal(20, 4)), strategies=("ddp",), cache=None, time_limit_s=0.5,
            cluster="profiles/cluster.local-gloo-2.json",
        )  # fmt: skip
    bce = F.binary_cross_entropy_with_logits
    for _ in range(2):
        for real, z in batches:
            opt.zero_grad()
            fake = generator(z)
            on_real, on_fake = net(real), net(fake.detach())
            (bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))).backward()
            opt.step()
            other.zero_grad()
            judged = net(fake)
            bce(judged, torch.ones_like(judged)).backward()
            other.step()
    return {f"generator.{k}": v for k, v in generator.state_dict().items()}


def _hooked_made() -> Made:
    net, opt, batches = _classes()
    next(net.parameters()).register_hook(lambda g: g.clamp(-0.01, 0.01))
    return net, opt, batches


def _activations(net: Any, opt: Any, batches: Any) -> None:
    """A hook on the gradient of an output."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            out = net(x)
            out.register_hook(lambda g: g.sign() * 0.01)
            CE(out, y).backward()
            opt.step()


def _frozen() -> nn.Module:
    net = _net()
    net[0].requires_grad_(False)
    return net


def _parametrized(kind: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        net = _net()
        wrap = {"weight": parametrizations.weight_norm, "spectral": parametrizations.spectral_norm}[kind]
        wrap(net[2])
        return net

    return build


class _LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = _net().requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(5, dtype=torch.complex128))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8))


class _Fields(dict[str, Tensor]):
    """An output with attributes."""

    __getattr__ = dict.__getitem__


class _Answer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = _net(), kind

    def forward(self, x: Tensor) -> Any:
        out = self.net(x)
        return {"fields": _Fields(logits=out), "none": (out, None), "list": [out, out * 2]}[self.kind]


class _Dropping(nn.Module):
    """Drops whole residual branches of samples (stochastic depth), by its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        h = self.a(x)
        keep = (torch.rand(len(x), 1, dtype=x.dtype) > 0.3) if self.training else 1
        return self.c(h + F.gelu(self.b(h)) * keep)


_SGD = torch.optim.SGD
usual = epochs(pairs(CE))
_optimizers: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW": lambda n: torch.optim.AdamW(n.parameters(), lr=0.01, eps=1e-3),
    "Adafactor": lambda n: torch.optim.Adafactor(n.parameters(), lr=0.01),
    "Muon": lambda n: torch.optim.Muon([p for p in n.parameters() if p.dim() == 2], lr=0.01),
    "RMSprop": lambda n: torch.optim.RMSprop(n.parameters(), lr=0.005, eps=1e-2),
    "Lion": lambda n: Lion(n.parameters()), "LAMB": lambda n: LAMB(n.parameters()),
    "decay by group": lambda n: torch.optim.AdamW(
        [{"params": [p for p in n.parameters() if p.dim() > 1], "weight_decay": 0.1},
         {"params": [p for p in n.parameters() if p.dim() < 2], "weight_decay": 0.0}], lr=0.01, eps=1e-3),
    "LBFGS": lambda n: torch.optim.LBFGS(n.parameters(), lr=0.1, max_iter=2),
}  # fmt: skip
for _name, _optimizer in _optimizers.items():
    program("optimizer", _name, _with(_optimizer), _closure if _name == "LBFGS" else usual,
            None if _name == "LBFGS" else CE, within=1e-6 if _name == "Muon" else 1e-8)  # fmt: skip
program("loop", "accumulation", _classes, _accumulate)
program("loop", "sharpness-aware minimization", _classes, _sam)
program("loop", "GradScaler", _classes, _scaled)
program("loop", "averaged weights", _classes, _average)
program("loop", "frozen teacher", _teacher_made, _teacher)
program("loop", "one-cycle schedule", _classes, _schedule)
program("loop", "schedule by the loss", _classes, _plateau)
program("loop", "parameters added later", _nearly_all, _added)
program(
    "loop", "clip by norm", _classes, epochs(pairs(CE), after=lambda n: nn.utils.clip_grad_norm_(n.parameters(), 0.1))
)
program(
    "loop",
    "clip by value",
    _classes,
    epochs(pairs(CE), after=lambda n: nn.utils.clip_grad_value_(n.parameters(), 0.01)),
)
program("loop", "mixup drawn in the loop", _classes, _mixed_up)
program("loop", "neighbours mixed in the loop", _classes, _mixed_fixed)
program("loop", "inputs normalised by their batch", _classes, _normalised)
program("loop", "noise drawn in the loop", _classes, _noise)
program("loop", "a coin of Python's in the loop", _classes, _python_noise)
program("loop", "batches skipped by their loss", _classes, _decided)
program("loop", "a loss divided by its own mean", _classes, _weighted_by_value)
program("loop", "a batch in two calls", _classes, _pieces)
program("loop", "a closure", _classes, _closure)
program("generative", "GAN, two optimizers", _gan_made, _gan)
program("loop", "a hook on a parameter", _hooked_made, usual)
program("loop", "a hook on an output", _classes, _activations)
program("model", "frozen first layer", lambda: _classes(_frozen), usual, CE)
program("model", "low-rank adapter", lambda: _classes(_LowRank), usual, CE)
program("model", "weight norm", lambda: _classes(_parametrized("weight")), usual, CE)
program("model", "spectral norm", lambda: _classes(_parametrized("spectral")), usual, CE)
program("model", "complex parameters", lambda: _classes(_Complex), usual, CE)
program("model", "compiled", lambda: _classes(lambda: torch.compile(_net(), backend="eager")), usual, CE)
program(
    "model",
    "output with fields",
    lambda: _classes(lambda: _Answer("fields")),
    epochs(lambda n, b: CE(n(b[0]).logits, b[1])),
)
program(
    "model", "output with None", lambda: _classes(lambda: _Answer("none")), epochs(lambda n, b: CE(n(b[0])[0], b[1]))
)
program("model", "list of outputs", lambda: _classes(lambda: _Answer("list")),
        epochs(lambda n, b: sum(CE(o, b[1]) for o in n(b[0]))))  # fmt: skip
program("model", "stochastic depth of samples", lambda: _classes(_Dropping), usual, CE)
program(
    "model", "dropout", lambda: _classes(lambda: nn.Sequential(_net(), nn.Dropout(0.5), nn.Linear(3, 3))), usual, CE
)
program(
    "model", "bfloat16 autocast", lambda: (lambda m: (m[0].float(), m[1], m[2]))(_classes()), _autocast, within=0.05
)
