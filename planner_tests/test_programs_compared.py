"""Programs whose losses, inputs or hooks see other samples of the batch: a warning names what differs, whenever it
begins; and programs that do nothing of that hear nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import asa
from asa.launch import run_ranks
from planner_tests.programs import Program, State, classes, numbers

Loop = Callable[[Any, Any, Any], None]


def _loop(loss: Callable[[Any, int, Tensor, Tensor], Tensor], count: int = 2) -> Loop:
    def loop(net: Any, opt: Any, batches: Any) -> None:
        for epoch in range(count):
            for x, y in batches:
                opt.zero_grad()
                loss(net, epoch, x, y).backward()
                opt.step()

    return loop


def _spread_out(z: Tensor) -> Tensor:
    return -z.var(0).sum()


def _hooked(net: Any, x: Tensor, y: Tensor) -> Tensor:
    out = net(x)
    out.register_hook(lambda g: g.sign())
    return F.cross_entropy(out, y)


def _each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


def _attacked(net: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(net(x), y), x)
    return F.cross_entropy(net((x + 0.5 * slope).detach()), y)


def _penalised(net: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(net(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum(1).mean()


def _measured(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Beside the loss, things that are looked at sample by sample."""
    z = net(x)
    assert len({int(k) for k in z.argmax(1)} | {max(y), min(y)}) > 0
    return F.cross_entropy(z, y)


class _Late:
    """Another loss for the last of three batches, far behind the steps that are looked at anyway."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, net: Any, _epoch: int, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        z = net(x)
        return F.cross_entropy(z, y) + (_spread_out(z) if self.calls > 15 and self.calls % 3 == 0 else 0)


class _Kept:
    """Divides by a running mean of the losses so far, a tensor."""

    def __init__(self) -> None:
        self.mean = torch.ones((), dtype=torch.float64)

    def __call__(self, net: Any, _epoch: int, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        self.mean = 0.5 * self.mean + 0.5 * loss.detach()
        return loss / self.mean


class _Own:
    """Divides by a running mean of the losses so far, a number of Python's."""

    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, net: Any, _epoch: int, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        self.mean = 0.5 * self.mean + 0.5 * loss.item()
        return loss / self.mean


class _Queue:
    """Tells answers from those that were kept of earlier batches, as many as a rank has samples or a multiple."""

    def __init__(self) -> None:
        self.kept = numbers(9, 3)

    def __call__(self, net: Any, _epoch: int, x: Tensor, y: Tensor) -> Tensor:
        z = net(x)
        loss = F.cross_entropy(torch.cat([z.square().sum(1, keepdim=True), z @ self.kept.T], 1), torch.zeros_like(y))
        self.kept = torch.cat([self.kept, z.detach()])[-9:]
        return loss + F.cross_entropy(z, torch.zeros(len(z), dtype=torch.long))


SAID: dict[str, tuple[Loop, str]] = {
    "another loss from the second epoch on": (
        _loop(lambda n, e, x, y: F.cross_entropy(n(x), y) + (_spread_out(n(x)) if e else 0)), "not a mean over samples"
    ),
    "neighbours mixed": (
        _loop(lambda n, _, x, y: F.cross_entropy(n(0.7 * x + 0.3 * x.flip(0)), y), 1), "what the model is given"
    ),
    "labels of neighbours": (_loop(lambda n, _, x, y: F.cross_entropy(n(x), y.roll(1)), 1), "not a mean over samples"),
    "noise": (
        _loop(lambda n, _, x, y: F.cross_entropy(n(x + torch.randn_like(x)), y), 1), "what the model is given"
    ),
    "a number of a rank's own": (_loop(_Own(), 1), "a number that differs between ranks"),
    "a queue of answers": (_loop(_Queue(), 1), "beside the batch (test_programs_compared.py:"),
    "a threshold of the batch": (
        _loop(lambda n, _, x, y: (lambda r: (r * (r <= r.detach().quantile(0.8))).mean())(_each(n(x), y)), 1),
        "not a mean over samples",
    ),
    "a mean kept between steps": (_loop(_Kept(), 2), "not a mean over samples"),
    "weights by the place in a batch": (
        _loop(lambda n, _, x, y: (_each(n(x), y) * torch.arange(1.0, 1 + len(y)).double()).mean(), 1), "place in it"
    ),
    "gradients of the inputs": (_loop(lambda n, _, x, y: _attacked(n, x, y), 1), "not checked"),
    "from one step on": (_loop(_Late(), 8), "not a mean over samples"),
    "measured": (_loop(lambda n, _, x, y: _measured(n, x, y), 1), "this rank's samples"),
    "logged by a format": (
        _loop(lambda n, _, x, y: (lambda z: (f"{z:.3f} {z}", z)[1])(F.cross_entropy(n(x), y)), 1), "this rank's samples"
    ),
    "logged": (
        _loop(lambda n, _, x, y: (lambda z: (z.item(), z)[1])(F.cross_entropy(n(x), y)), 1), "this rank's samples"
    ),
    "pieces of one sample": (
        _loop(lambda n, _, x, y: sum(F.cross_entropy(*p) for p in zip(n(x).chunk(3), y.chunk(3), strict=True)), 1),
        "not checked: it is computed sample by sample",
    ),
    "weights made by numpy": (
        _loop(lambda n, _, x, y: (_each(n(x), y) * torch.from_numpy(1.0 / (1 + y.numpy().cumsum()))).mean(), 1),
        "not checked: it is computed with tensors that are made of what was taken out of torch",
    ),
    "a whole number of a rank's own": (
        _loop(lambda n, _, x, y: (lambda r: r * int(10 * r.detach()))(F.cross_entropy(n(x), y)), 1),
        "a number that differs between ranks",
    ),
    "a branch by a tensor": (
        _loop(lambda n, _, x, y: (lambda r: r * (2 if r > r.detach().round(decimals=1) else 1))(
            F.cross_entropy(n(x), y)), 4), "this rank's samples"
    ),
    "a sum beside gathered outputs": (
        _loop(lambda n, _, x, y: (lambda z: (asa.gather(z) - 1).square().mean() + _each(z, y).sum())(n(x)), 1),
        "not a mean over samples",
    ),
    "pieces of as many samples as a rank has": (
        _loop(lambda n, _, x, y: sum(F.cross_entropy(n(a), b) for a, b in zip(x.split(3), y.split(3), strict=True)), 1),
        "also that of this rank's",
    ),
    "times its samples": (_loop(lambda n, _, x, y: F.cross_entropy(n(x), y) * len(y), 1), "also that of this rank's"),
    "a long graph": (
        _loop(lambda n, _, x, y: F.nll_loss(reduce(lambda z, _: z + 0.001, range(2500), n(x)), y, reduction="sum"), 1),
        "not a mean over samples",
    ),
    "a penalty on the mean's gradient": (_loop(lambda n, _, x, y: _penalised(n, x, y), 1), "not checked"),
    "a hook on an output": (_loop(lambda n, _, x, y: _hooked(n, x, y), 1), "has a hook on its gradient"),
}  # fmt: skip
QUIET: dict[str, Loop] = {
    "inputs by themselves": _loop(lambda n, _, x, y: F.cross_entropy(n(x.clamp(-1, 1) * 2 + 1), y.clone())),
    "two backwards of one forward": _loop(
        lambda n, _, x, y: (lambda z: (F.cross_entropy(z, y).backward(retain_graph=True), z.square().mean())[1])(n(x))
    ),
    "indexed by place": _loop(lambda n, _, x, y: -n(x).log_softmax(1)[torch.arange(len(y)), y].mean()),
    "gathered": _loop(lambda n, _, x, y: asa.gather(n(x)).std(0).sum() + asa.reduce(_each(n(x), y).mean())),
    "divided by a count of all": _loop(lambda n, _, x, y: asa.mean_over(_each(n(x), y)[y > 0].sum(), (y > 0).sum())),
    "counted on from rank to rank": _loop(lambda n, _, x, y: (n(x) + 0 * torch.arange(len(y))[:, None]).mean()),
    "divided by how many numbers there are": _loop(lambda n, _, x, y: n(x).square().sum() / n(x).numel()),
    "cubes, divided by its samples": _loop(lambda n, _, x, y: (n(x) ** 3).sum() / len(x)),
}


def _program(loop: Loop) -> Program:
    def trained(net: Any, opt: Any, batches: Any) -> State:
        loop(net, opt, batches)
        return dict(net.state_dict())

    return Program(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3)), x=numbers(18, 5), y=classes(18, 3),
        loop=trained,
    )  # fmt: skip


def _heard(_rank: int, loops: list[Loop], plan: Any) -> list[list[str]]:
    found = []
    for loop in loops:
        program = _program(loop)
        net, opt, batches = asa.parallelize(*program.made(), plan=plan)
        with warnings.catch_warnings(record=True) as heard, pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("always")
            lines: list[str] = []
            patch.setattr("asa.api.losses.trial.say", lambda _place, text, lines=lines: lines.append(text))
            program.loop(net, opt, batches)
        found.append(lines + [str(w.message) for w in heard])
        net.close()
    return found


def test_what_sees_other_samples_is_named_and_nothing_else_is() -> None:
    loops = [*(loop for loop, _ in SAID.values()), *QUIET.values()]
    plan = _program(loops[0]).plan("ddp")
    for rank in run_ranks(2, _heard, loops, plan, threads=1, timeout_s=120):
        for (name, (_, words)), lines in zip(SAID.items(), rank, strict=False):
            assert any(words in line for line in lines), (name, lines)
            if words == "this rank's samples" and "branch" not in name:
                assert len(lines) == 1, (name, lines)
        for name, lines in zip(QUIET, rank[len(SAID) :], strict=True):
            assert not lines, (name, lines)


def _looked_again(_rank: int, plan: Any) -> int:
    """Times that looking at the losses of the usual loop began again, in 30 batches."""
    program = Program(
        model=_program(QUIET["indexed by place"]).model, x=numbers(60, 5), y=classes(60, 3), batch=2, loop=lambda *_: {}
    )  # fmt: skip
    net, opt, batches = asa.parallelize(*program.made(), plan=plan)
    _loop(lambda n, _, x, y: F.cross_entropy(n(x), y), 1)(net, opt, batches)
    net.close()
    assert net.trial is not None
    return net.trial._restarts


def test_a_loss_that_is_no_longer_looked_at_is_no_other_loss() -> None:
    plan = _program(QUIET["indexed by place"]).plan("ddp")
    assert run_ranks(2, _looked_again, plan, threads=1, timeout_s=120) == [0, 0]
