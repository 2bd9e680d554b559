"""Programs that depend on what is around a model: settings of torch, globals, memory, other objects."""

from __future__ import annotations

import copy
import random
import threading
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.program_table import Made, epochs, made, normal, pairs, program
from benchmarks.program_table.common import CE, MSE, Named, classified, small_net

KIND = "around"


def add(name: str, loop: Any, make: Any = classified, job_loss: Any = None, **options: Any) -> None:
    """Add a program to the table."""
    program(KIND, f"around: {name}", make, loop, job_loss, **options)


def usual(name: str, make: Any = classified, loss: Any = CE, job: bool = True, **options: Any) -> None:
    """A program of the usual loop, whose loss is one of outputs and labels; it can be a Job."""
    add(name, epochs(pairs(loss)), make, loss if job else None, **options)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# settings of torch


def _with_setting(on: Any, off: Any) -> tuple[Any, Any]:
    """``make`` and ``loop`` of a program that is run under a setting."""

    def make() -> Made:
        on()
        return classified()

    def loop(net: Any, opt: Any, batches: Any) -> None:
        try:
            epochs(pairs(CE))(net, opt, batches)
        finally:
            off()

    return make, loop


for name, setting, on, off in (
    ("float64 by default", torch.set_default_dtype, torch.float64, torch.float32),
    ("a default device", torch.set_default_device, "cpu", None),
    ("deterministic algorithms", torch.use_deterministic_algorithms, True, False),
    ("backward in one thread", torch.autograd.set_multithreading_enabled, False, True),
):
    _make, _loop = _with_setting(partial(setting, on), partial(setting, off))  # type: ignore[arg-type]
    add(name, _loop, _make)


def _without_gradients() -> Made:
    torch.set_grad_enabled(False)
    return classified()


def _with_gradients(net: Any, opt: Any, batches: Any) -> None:
    torch.set_grad_enabled(True)
    epochs(pairs(CE))(net, opt, batches)


add("called without gradients", _with_gradients, _without_gradients)


def _flops(net: Any, opt: Any, batches: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for epoch in range(2):
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            if epoch == 0 and i == 0:
                with FlopCounterMode(display=False):
                    CE(net(x), y).backward()
            else:
                CE(net(x), y).backward()
            opt.step()


add("FLOPs counted in the first step", _flops)

# globals


class Annealed(Named):
    """Scales by a count that the class keeps."""

    steps: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            type(self).steps += 1
        return super().forward(x) * min(1.0, 0.2 + type(self).steps / 8)


def _annealed() -> Made:
    Annealed.steps = 0
    return classified(Annealed)


usual("a count of the class", _annealed)

STEPS = [0]


class ByGlobal(Named):
    def forward(self, x: Tensor) -> Tensor:
        STEPS[0] += 1
        return super().forward(x) * min(1.0, 0.2 + STEPS[0] / 8)


def _by_global() -> Made:
    STEPS[0] = 0
    return classified(ByGlobal)


usual("a count in a global list", _by_global)

LOSSES: list[Tensor] = []


class Leaving(Named):
    """Leaves a penalty on its features in a global list."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        if self.training:
            LOSSES.append(hidden.square().mean())
        return self.head(F.relu(self.second(hidden)))  # type: ignore[no-any-return]


def _leaving() -> Made:
    LOSSES.clear()
    return classified(Leaving)


def _collecting(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            loss = CE(net(x), y)
            loss = loss + 0.1 * sum(LOSSES)
            LOSSES.clear()
            loss.backward()
            opt.step()


add("penalties in a global list", _collecting, _leaving)


class LeavingInside(Named):
    """Leaves a penalty in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.aux: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        self.aux.append(hidden.square().mean())
        return self.head(F.relu(self.second(hidden)))  # type: ignore[no-any-return]


def _collecting_inside(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            loss = CE(net(x), y) + 0.1 * sum(net.aux)
            net.aux.clear()
            loss.backward()
            opt.step()


add("penalties in a list of the model", _collecting_inside, lambda: classified(LeavingInside))


class LeavingInLayers(Named):
    """Layers leave penalties in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.second = Leaver(16, 16)


class Leaver(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.l_aux = x.square().mean()
        return super().forward(x)


def _collecting_layers(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            loss = CE(net(x), y)
            (loss + 0.1 * sum(m.l_aux for m in net.modules() if hasattr(m, "l_aux"))).backward()
            opt.step()


add("penalties in attributes of layers", _collecting_layers, lambda: classified(LeavingInLayers))
add("penalties in attributes of layers, even", _collecting_layers, lambda: classified(LeavingInLayers, count=24))
COIN = [random.Random(0)]


class ByCoin(Named):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        if COIN[0].random() < 0.5:
            x = F.relu(self.second(x))
        return self.head(x)  # type: ignore[no-any-return]


def _by_coin() -> Made:
    COIN[0] = random.Random(0)
    return classified(ByCoin)


usual("a coin of a global generator", _by_coin)


class ByOwnCoin(Named):
    def __init__(self) -> None:
        super().__init__()
        self.coin = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        if self.coin.random() < 0.5:
            x = F.relu(self.second(x))
        return self.head(x)  # type: ignore[no-any-return]


usual("a coin of the model's generator", lambda: classified(ByOwnCoin))


class ByNumpyCoin(Named):
    def __init__(self) -> None:
        super().__init__()
        self.coin = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.coin.uniform(0.5, 1.5))


usual("a factor of the model's numpy generator", lambda: classified(ByNumpyCoin))


class ByTorchCoin(Named):
    def __init__(self) -> None:
        super().__init__()
        self.coin = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(1, generator=self.coin, dtype=x.dtype)


usual("a factor of the model's torch generator", lambda: classified(ByTorchCoin))

FACTOR = SimpleNamespace(value=1.0)


class ByConfig(Named):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * FACTOR.value


def _by_config() -> Made:
    FACTOR.value = 1.0
    return classified(ByConfig)


def _configured(net: Any, opt: Any, batches: Any) -> None:
    for epoch in range(3):
        FACTOR.value = 1.0 / (epoch + 1)
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()


add("a factor in a global object, set by epoch", _configured, _by_config)


class Warmth:
    """A loss with a count of its own."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        return CE(out, y) * min(1.0, self.steps / 6)


add("a loss that counts its calls", lambda net, opt, batches: epochs(pairs(Warmth()))(net, opt, batches))

# objects that the model keeps


class Keeping(Named):
    """Keeps what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.numbers = (i for i in range(1000))
        self.log = open("/dev/null", "w")  # noqa: SIM115

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x)


usual("a lock, a generator and a file in the model", lambda: classified(Keeping))


class Agent(Named):
    """Has its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-3)


def _agent() -> Made:
    net = Agent()
    return net, net.optimizer, DataLoader(TensorDataset(normal(21, 8), torch.randint(3, (21,))), 6)


def _by_its_own(net: Any, _opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            net.optimizer.zero_grad()
            CE(net(x), y).backward()
            net.optimizer.step()


add("the optimizer in the model", _by_its_own, _agent, CE)


class Child(nn.Module):
    def __init__(self, parent: nn.Module, weak: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.parent = weakref.ref(parent) if weak else (lambda: parent)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.parent().scale  # type: ignore[no-any-return, attr-defined]


class Parent(nn.Module):
    def __init__(self, weak: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.a, self.b, self.head = Child(self, weak), Child(self, weak), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.b(F.relu(self.a(x)))))  # type: ignore[no-any-return]


usual("layers that know the model by a weak reference", lambda: classified(lambda: Parent(True)))
usual("layers that know the model by a closure", lambda: classified(lambda: Parent(False)))


class Shortened(Named):
    """Names only what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def parameters(self, recurse: bool = True) -> Any:  # type: ignore[override]
        return (p for p in super().parameters(recurse) if p.requires_grad)


usual("a model that lists what is trained", lambda: classified(Shortened))


class Light(Named):
    """Leaves frozen layers out of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def state_dict(self, *args: Any, **more: Any) -> Any:  # type: ignore[override]
        return {k: v for k, v in super().state_dict(*args, **more).items() if not k.startswith("first")}


def _light(net: Any, opt: Any, batches: Any) -> Any:
    epochs(pairs(CE))(net, opt, batches)
    return {f"first.{n}": p.detach().clone() for n, p in net.first.named_parameters()}


usual("a model that saves what is trained", lambda: classified(Light), job=False)

# parameters


def _in_order_of_rank(kind: Any) -> Any:
    def make() -> Made:
        net, _, batches = classified(Named)
        listed = list(net.parameters())
        if rank() == 1:
            listed = listed[::-1]
        return net, kind(listed), batches

    return make


def _grouped(listed: list[Tensor]) -> torch.optim.Optimizer:
    groups = [{"params": [p for p in listed if p.dim() > 1], "weight_decay": 0.1}]
    return torch.optim.SGD([*groups, {"params": [p for p in listed if p.dim() == 1]}], lr=0.05, momentum=0.9)


def _adam(listed: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(listed, lr=0.01, eps=1e-3)


usual("parameters in another order on each rank, Adam", _in_order_of_rank(_adam))
usual("parameters in another order on each rank, groups", _in_order_of_rank(_grouped))


def _saved_and_loaded(net: Any, opt: Any, batches: Any) -> None:
    for epoch in range(3):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
        if epoch == 0:
            saved = copy.deepcopy({"net": net.state_dict(), "opt": opt.state_dict()})
        if epoch == 1:
            net.load_state_dict(saved["net"])
            opt.load_state_dict(saved["opt"])


add("parameters in another order on each rank, gone back", _saved_and_loaded,
    _in_order_of_rank(_adam))  # fmt: skip


class Empty(Named):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0))
        self.prompts = nn.Parameter(torch.empty(0, 16))
        self.steps = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain + self.shift + self.none.sum() + self.prompts.sum()


usual("parameters of no elements, of one and of integers", lambda: classified(Empty))


class OneMemory(nn.Module):
    """The second layer has rows of the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.first, self.second, self.head = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))
        self.second.weight = nn.Parameter(self.first.weight.data[:8])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))))  # type: ignore[no-any-return]


usual("two parameters in one memory", lambda: classified(OneMemory))


def _flat() -> Made:
    net, opt, batches = classified(Named)
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    at = 0
    for p in net.parameters():
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    net.flat = flat
    return net, opt, batches


def _decayed_flat(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()
        net.flat.mul_(0.99)


add("parameters that are views of one tensor", epochs(pairs(CE)), _flat, CE)
add("parameters that are views of one tensor, changed by it", _decayed_flat, _flat)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.body(x))
        return self.a(x), self.b(x)


def _zeros(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for i, (x, y) in enumerate(batches):
            opt.zero_grad(set_to_none=False)
            CE(net(x)[i % 2], y).backward()
            opt.step()


add("heads in turn, gradients set to zero", _zeros, lambda: classified(Heads))


def _late(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            opt.step()
            opt.zero_grad()
            CE(net(x), y).backward()
    opt.step()


add("the step at the start of the next batch", _late)


def _twice(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()
        opt.step()


add("two steps with one gradient", _twice)


def _at_once(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        opt.zero_grad()
        a, b = net(x)
        torch.autograd.backward([CE(a, y), 0.5 * CE(b, y)], [torch.tensor(1.0), torch.tensor(0.3)])  # type: ignore[no-untyped-call]
        opt.step()


add("two losses in one backward", _at_once, lambda: classified(Heads))


def _normed(kind: Any) -> Any:
    def net() -> nn.Module:
        named = Named()
        kind(named.second)
        return named

    return lambda: classified(net)


def _removed(net: Any, opt: Any, batches: Any) -> Any:
    epochs(pairs(CE), 1)(net, opt, batches)
    plain = copy.deepcopy(net)
    parametrize.remove_parametrizations(plain.second, "weight")
    return {f"plain {n}": t for n, t in plain.state_dict().items()}


add("a norm of weights removed from a copy", _removed, _normed(parametrizations.weight_norm))
add("a spectral norm removed from a copy", _removed, _normed(parametrizations.spectral_norm))


class Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.bn(self.conv(x))).mean((2, 3)))  # type: ignore[no-any-return]


def _folded(net: Any, opt: Any, batches: Any) -> Any:
    epochs(pairs(CE))(net, opt, batches)
    plain = copy.deepcopy(net).eval()
    fused = nn.utils.fusion.fuse_conv_bn_eval(plain.conv, plain.bn)
    return {"fused": fused.weight.detach(), "fused bias": fused.bias.detach()}


add("a norm folded into a convolution", _folded,
    lambda: made(Folded(), normal(20, 3, 6, 6), torch.randint(3, (20,))), batch_norm="exact")  # fmt: skip


def _teaching(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            net.eval()
            with torch.no_grad():
                before = net(x).softmax(1)
            net.train()
            opt.zero_grad()
            out = net(x)
            (CE(out, y) + CE(out, before)).backward()
            opt.step()


add("its own answers in evaluation, norms exact", _teaching,
    lambda: made(Folded(), normal(20, 3, 6, 6), torch.randint(3, (20,))), batch_norm="exact")  # fmt: skip

# data


def _sparse_rows(rows: Any) -> Any:
    x, y = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
    return (x * (x > 0.5)).to_sparse(), y


class OnSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(8, 12)), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(torch.sparse.mm(x, self.table)))  # type: ignore[no-any-return]


usual("sparse rows by collate", lambda: classified(OnSparse, collate_fn=_sparse_rows))


def _sparse_batches() -> Made:
    net, opt, batches = classified(OnSparse, collate_fn=_sparse_rows)
    return net, opt, list(batches)


usual("sparse rows in a list", _sparse_batches)


def _jagged(rows: Any) -> Any:
    return torch.nested.nested_tensor([r[0][: int(r[1]) + 2, None] * torch.ones(4, dtype=torch.float64) for r in rows],
                                      layout=torch.jagged), torch.stack([r[1] for r in rows])  # fmt: skip


class OnJagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.head(torch.stack([row.mean(0) for row in x.unbind()]))  # type: ignore[no-any-return]


usual("nested tensors by collate", lambda: classified(OnJagged, collate_fn=_jagged))


class OnBytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 3, 1, 2).to(self.head.weight.dtype).div_(255)
        return self.head(F.relu(self.conv(x)).mean((2, 3)))  # type: ignore[no-any-return]


usual("bytes, channels last",
      lambda: made(OnBytes(), torch.randint(256, (20, 6, 6, 3)).to(torch.uint8), torch.randint(3, (20,))))  # fmt: skip


class InPlace(Named):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.9).sub_(0.01)
        return super().forward(x)


usual("inputs changed in place", lambda: classified(InPlace))


def _kept_batches() -> Made:
    net, opt, batches = classified(InPlace, count=24)
    return net, opt, list(batches)


usual("inputs changed in place, a list of batches", _kept_batches)


class Rows(torch.utils.data.Dataset[Any]):
    """Rows that are views of one tensor."""

    def __init__(self) -> None:
        self.x, self.y = normal(24, 8), torch.randint(3, (24,))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return self.x[6 * i : 6 * i + 6], self.y[6 * i : 6 * i + 6]


def _views() -> Made:
    net, opt, _ = classified(InPlace)
    return net, opt, DataLoader(Rows(), batch_size=None)


usual("inputs changed in place, views of one tensor", _views)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, 8, mode="mean", include_last_offset=True), nn.Linear(8, 3)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(words, offsets))  # type: ignore[no-any-return]


def _bag(rows: Any) -> Any:
    words = [torch.arange(int(r[1]) + 1) + int(r[1]) for r in rows]
    return torch.cat(words), torch.tensor([0, *np.cumsum([len(w) for w in words])]), torch.stack([r[1] for r in rows])


add("bags with their last offset", epochs(lambda net, b: CE(net(b[0], b[1]), b[2])),
    lambda: classified(Bags, collate_fn=_bag))  # fmt: skip


def _probe(net: Any, opt: Any, batches: Any) -> None:
    x0, _ = next(iter(batches))
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
        with torch.no_grad():
            net(x0)


add("a batch looked at first, shuffled", _probe, lambda: classified(shuffle=True))


def _reseeded(net: Any, opt: Any, batches: Any) -> None:
    for epoch in range(3):
        batches.generator.manual_seed(epoch)
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()


add("the loader's generator seeded by epoch", _reseeded,
    lambda: classified(shuffle=True, generator=torch.Generator().manual_seed(7)))  # fmt: skip


def _larger(net: Any, opt: Any, batches: Any) -> None:
    for epoch in range(3):
        batches.batch_sampler.batch_size = 4 + 3 * epoch
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()


add("the batch sampler's size set by epoch", _larger)


def _anew(net: Any, opt: Any, batches: Any) -> None:
    for epoch in range(2):
        fresh = DataLoader(batches.dataset, 5, shuffle=True, generator=torch.Generator().manual_seed(epoch))
        for x, y in fresh:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()


add("a loader made anew in every epoch", _anew)
usual("fewer samples than a batch", lambda: classified(count=5))


def _one_at_first() -> Made:
    net, opt, _ = classified()
    return net, opt, [(normal(n, 8), torch.randint(3, (n,))) for n in (1, 7, 2, 6)]


usual("one sample in the first batch", _one_at_first)

# forward


class Turning(nn.Module):
    """A cache of angles that grows with the length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self._make(2)

    def _make(self, length: int) -> None:
        angles = torch.arange(length, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.length:
            self._make(x.shape[1])
        a, b = self.first(x).chunk(2, -1)
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        return self.head(torch.cat([a * cos - b * sin, a * sin + b * cos], -1).mean(1))  # type: ignore[no-any-return]


def _lengths() -> Made:
    net, opt, _ = made(Turning(), normal(2, 2), torch.zeros(2).long())
    return net, opt, [(normal(6, t, 4), torch.randint(3, (6,))) for t in (3, 5, 4, 8)]


usual("a cache that grows with the length", _lengths)


class InSegments(Named):
    def forward(self, x: Tensor) -> Tensor:
        layers = nn.Sequential(self.first, nn.ReLU(), self.second, nn.ReLU())
        return self.head(checkpoint_sequential(layers, 2, x, use_reentrant=False))  # type: ignore[no-any-return]


usual("checkpoints of a sequence", lambda: classified(InSegments))


class Ghost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.head = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.cat([self.bn(part) for part in x.chunk(max(1, -(-len(x) // 3)))])
        return self.head(F.relu(x))  # type: ignore[no-any-return]


usual("norms of parts of a batch", lambda: classified(Ghost, count=24), job=False)
usual("norms of parts of a batch, exact", lambda: classified(Ghost, count=24), job=False, batch_norm="exact")


class Slim(nn.Module):
    """Uses the first columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.width = nn.Linear(8, 16), nn.Linear(16, 3), 16

    def set_width(self, width: int) -> None:
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.linear(x, self.first.weight[: self.width], self.first.bias[: self.width]))
        return F.linear(x, self.head.weight[:, : self.width], self.head.bias)


def _slim(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            for width in (16, 8, 4):
                net.set_width(width)
                CE(net(x), y).backward()
            opt.step()


add("widths in turn by a method", _slim, lambda: classified(Slim))


def _slim_by_apply(net: Any, opt: Any, batches: Any) -> None:
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            for width in (16, 8, 4):
                net.apply(lambda m, w=width: setattr(m, "width", w))
                CE(net(x), y).backward()
            opt.step()


add("widths in turn by apply", _slim_by_apply, lambda: classified(Slim))


class Scaled(Named):
    def forward(self, x: Tensor, *, alpha: float = 1.0) -> Tensor:
        return super().forward(x) * alpha


def _by_keyword(net: Any, opt: Any, batches: Any) -> None:
    step = 0
    for _ in range(2):
        for x, y in batches:
            step += 1
            opt.zero_grad()
            CE(net(x, alpha=1 / step), y).backward()
            opt.step()


add("a number by keyword that changes", _by_keyword, lambda: classified(Scaled))


class Yielding(Named):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        x = F.relu(self.first(x))
        yield self.head(x)
        yield self.head(F.relu(self.second(x)))


add("answers of a generator", epochs(lambda net, b: sum(CE(o, b[1]) for o in net(b[0]))),
    lambda: classified(Yielding))  # fmt: skip


class Localised(nn.Module):
    """A spatial transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.conv, self.head = nn.Linear(3 * 36, 6), nn.Conv2d(3, 6, 3), nn.Linear(6, 3)
        nn.init.zeros_(self.where.weight)
        self.where.bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0]))

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
        return self.head(F.relu(self.conv(F.grid_sample(x, grid, align_corners=False))).mean((2, 3)))  # type: ignore[no-any-return]


usual("a spatial transformer", lambda: made(Localised(), normal(20, 3, 6, 6), torch.randint(3, (20,))))


class Frames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.rnn, self.head = nn.LSTM(4, 8, bidirectional=True, proj_size=5), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        seen = F.relu(self.conv(x.reshape(b * t, *x.shape[2:]))).mean((2, 3)).view(b, t, -1)
        return self.head(self.rnn(seen.transpose(0, 1))[0][-1])  # type: ignore[no-any-return]


usual("frames, then a recurrent layer with a projection",
      lambda: made(Frames(), normal(20, 4, 1, 5, 5), torch.randint(3, (20,))))  # fmt: skip


class Mapped(Named):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(super().forward)(x)


usual("a forward under vmap", lambda: classified(Mapped))


class Generating(nn.Module):
    """Keeps keys and values in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.words(x))
        if not self.training:
            self.cache = h if self.cache is None else torch.cat([self.cache, h], 1)
            h = self.cache
        return self.head(h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None])  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(self, x: Tensor, count: int) -> Tensor:
        self.eval()
        self.cache, out = None, [x]
        for _ in range(count):
            out.append(self(out[-1])[:, -1:].argmax(-1))
        self.cache = None
        self.train()
        return torch.cat(out, 1)


def _generating(net: Any, opt: Any, batches: Any) -> Any:
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x).flatten(0, 1), y.flatten()).backward()
            opt.step()
        text = net.generate(torch.zeros(1, 1, dtype=torch.long), 4)
    return {"text": text.double()}


add("a cache of keys in evaluation", _generating,
    lambda: made(Generating(), torch.randint(11, (20, 5)), torch.randint(11, (20, 5))))  # fmt: skip

# what one rank does


def _out_of_memory(net: Any, opt: Any, batches: Any) -> None:
    for i, (x, y) in enumerate(batches):
        try:
            opt.zero_grad()
            out = net(x)
            if i == 1 and rank() == 1:
                raise RuntimeError("out of memory")
            CE(out, y).backward()
            opt.step()
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            opt.zero_grad()


add("a batch that does not fit on one rank", _out_of_memory)


def _regressed(net: Any, opt: Any, batches: Any) -> None:
    for x, y in batches:
        opt.zero_grad()
        MSE(net(x), F.one_hot(y, 3).double()).backward()
        opt.step()


add("squared errors of classes", _regressed, lambda: classified(small_net))
