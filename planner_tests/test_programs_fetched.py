"""Habits of public training scripts: models with loops of their own, files of whole models, states with old names.

More of them are in ``benchmarks/program_table/fetched.py``.
"""

from __future__ import annotations

import contextlib
import copy
import io
import queue
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import asa
from asa.api.model.own_methods import check_overridden
from asa.api.steps.batches import reads_in
from asa.errors import UsageError
from asa.launch import run_ranks
from planner_tests.programs import Named, Program, State, assert_as_alone, classes, distance, heard_of, numbers


def _program(loop: Any, model: Any = Named, **options: Any) -> Program:
    return Program(model=model, x=numbers(21, 8), y=classes(21, 3), loop=loop, **options)


class Trainer(Named):
    """Trains itself, in the way of several libraries."""

    def compile(self, opt: Any, loss: Any) -> None:  # type: ignore[override]
        """Keep the optimizer and the loss."""
        self.opt, self.loss, self.seen = opt, loss, 0

    def fit(self, batches: Any, count: int = 1) -> None:
        """Train."""
        for _ in range(count):
            for x, y in batches:
                self.update(x, y)

    def update(self, x: Tensor, y: Tensor) -> float:
        """Train on one batch; returns its loss."""
        self.zero_grad()
        loss = self.loss(self(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        self.opt.step()
        self.seen += 1
        return loss.item()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Keep a part of the gradients."""
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.25)

    def train(self, mode: Any = True, opt: Any = None) -> Any:
        """A mode, or training."""
        return super().train(mode) if opt is None else self.fit(mode)


def _fitted(net: Any, opt: Any, batches: Any) -> State:
    net.compile(opt, F.cross_entropy)
    net.fit(batches)
    for x, y in batches:
        net.update(x, y)
    net.train(batches, opt)
    net.train()
    return dict(net.state_dict())


def test_methods_of_the_model_that_train_are_shared_by_ranks() -> None:
    assert_as_alone(_program(_fitted, Trainer), ["ddp", "fsdp", "tensor"])


class Listing(Named):
    """Hides its head."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Of the first layer."""
        return self.first.parameters(recurse)


class Training(Named):
    """Has another train()."""

    def train(self, batches: Any, opt: Any) -> None:  # type: ignore[override]
        """Train."""


def test_models_that_hide_what_ranks_share_are_refused() -> None:
    for model, method in ((Listing(), "parameters"), (Training(), "train")):
        with pytest.raises(UsageError, match=rf"{type(model).__name__}.{method}\(\) is not torch's"):
            check_overridden(model)
    check_overridden(Trainer())


class Scoped(Named):
    """Lends its averages."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [p.detach().clone().double() for p in self.parameters()]

    @contextlib.contextmanager
    def averages(self) -> Iterator[None]:
        """With averages in place of the weights."""
        own = [p.detach().clone() for p in self.parameters()]
        for p, k in zip(self.parameters(), self.kept, strict=True):
            p.data.copy_(k)
        yield
        for p, o in zip(self.parameters(), own, strict=True):
            p.data.copy_(o)


def _scoped(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    held = numbers(5, 8, seed=3)
    with net.averages(), torch.no_grad():
        answers = net(held)
    return {"averaged": answers, **net.state_dict()}


def test_a_context_of_the_model_holds_where_ranks_have_parts() -> None:
    assert_as_alone(_program(_scoped, Scoped), ["ddp", "tensor"])


class Renamed(Named):
    """Reads states with old names."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for name in [n for n in state if n.startswith(f"{prefix}old.")]:
            state[name.replace("old.", "first.")] = state.pop(name)
        super()._load_from_state_dict(state, prefix, *rest)


def _loaded(net: Any, opt: Any, batches: Any) -> State:
    old = {n.replace("first.", "old."): t.clone() for n, t in net.state_dict().items()}
    for i, (x, y) in enumerate(batches):
        if i == 2:
            net.load_state_dict(old)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    assert type(back) is Renamed
    return {"answers": back(numbers(5, 8, seed=3)).detach(), **net.state_dict()}


def test_a_model_reads_old_states_and_is_saved_whole() -> None:
    assert_as_alone(_program(_loaded, Renamed), ["ddp", "fsdp", "tensor"])


class _Undone(torch.autograd.Function):
    """A block whose backward computes it again, and goes back through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.block(x), gradient)
        return x.grad, None


class Reversible(Named):
    """Keeps no activations of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(12, 12), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Undone.apply(F.relu(self.first(x)), self.block))  # type: ignore[no-any-return, no-untyped-call]


def _usual(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    return dict(net.state_dict())


def test_a_backward_within_a_backward_is_shared() -> None:
    assert_as_alone(_program(_usual, Reversible), ["ddp", "fsdp"])


def _many(_rank: int) -> list[Tensor]:
    """The labels of three batches of an epoch of ten thousand million."""
    torch.manual_seed(0)
    net, data = Named().double(), TensorDataset(numbers(21, 8), torch.arange(21))
    loader = DataLoader(data, 6, sampler=RandomSampler(data, replacement=True, num_samples=10**10))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    options: Any = {"plan": _program(_usual).plan("ddp")} if torch.distributed.is_initialized() else {}
    net, opt, batches = (net, opt, loader) if not options else asa.parallelize(net, opt, loader, **options)
    seen = []
    for _, y in batches:
        seen.append(asa.gather(y) if options else y)
        if len(seen) == 3:
            return seen
    return seen


def test_an_epoch_that_never_ends_is_drawn_batch_by_batch() -> None:
    alone = _many(0)
    for seen in run_ranks(2, _many, threads=1, timeout_s=120):
        assert [sorted(y.tolist()) for y in seen] == [sorted(y.tolist()) for y in alone]


class Ahead(threading.Thread):
    """Reads batches ahead."""

    def __init__(self, batches: Any) -> None:
        super().__init__(daemon=True)
        self.batches, self.read = batches, queue.Queue[Any](1)
        self.start()

    def run(self) -> None:
        for batch in self.batches:
            self.read.put(batch)


class AheadLoader(DataLoader[Any]):
    """In the way of prefetch_generator."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        ahead = Ahead(super().__iter__())
        return iter(ahead.read.get, None)


class Cut(Named):
    """Returns the beginning of another graph."""

    def forward(self, x: Tensor) -> Any:
        hidden = F.relu(self.first(x)).detach().requires_grad_()
        return self.head(hidden), hidden


def _cut(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        out, hidden = net(x)
        F.cross_entropy(out, y).backward()
        assert hidden.grad is not None
        opt.step()
    return {}


def _curved(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        F.cross_entropy(net(x), y).backward(create_graph=True)
        opt.step()
    return {}


def _traced(net: Any, opt: Any, batches: Any) -> State:
    assert torch.jit.trace(copy.deepcopy(net), numbers(2, 8)) is not None
    torch.jit.trace(net, numbers(2, 8))
    return {}


class Repeated(Named):
    """Two rows for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.repeat(2, 1))


def _repeated(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x), y.repeat(2)).backward()
        opt.step()
    return dict(net.state_dict())


def test_what_ranks_cannot_do_alike_is_refused_in_a_line() -> None:
    loops: Any = ((_cut, Cut, "ddp"), (_curved, Named, "ddp"), (_traced, Named, "ddp"), (_repeated, Repeated, "tensor"))
    words = ("a graph of its own begins", "create_graph=True", "the model is traced", "12 rows for 6 samples")
    for (loop, model, plan), said in zip(loops, words, strict=True):
        for answer in _program(loop, model).spread([plan])[plan]:
            assert isinstance(answer, str)
            assert said in answer


def test_a_loader_that_reads_in_a_thread_is_refused() -> None:
    ahead = AheadLoader(TensorDataset(numbers(21, 8), classes(21, 3)), 6)
    iter(ahead)
    assert "Ahead" in {reads_in(thread) for thread in threading.enumerate()}
    assert not reads_in(threading.main_thread())


def _by_place(net: Any, opt: Any, batches: Any) -> State:
    """Cells of a table of all rows, by offsets that grow with the row (a distribution that is projected)."""
    for x, y in batches:
        at = (torch.arange(len(x)) * 3)[:, None]
        wanted = torch.zeros(len(x), 3, dtype=x.dtype)
        wanted.view(-1).index_add_(0, (at + torch.stack([y, (y + 1) % 3], 1)).view(-1), x[:, :2].abs().reshape(-1))
        opt.zero_grad()
        (-(wanted * net(x).log_softmax(1)).sum(1)).mean().backward()
        opt.step()
    return dict(net.state_dict())


class Normed(Named):
    """Power iterations in parameters that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(F.normalize(torch.ones(12), dim=0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        w = self.first.weight
        self.u.data = F.normalize(w.data @ (w.data.T @ self.u.data), dim=0)
        return self.head(F.relu(F.linear(x, w / self.u.dot(w @ (w.data.T @ self.u)).sqrt(), self.first.bias)))


def _validated(net: Any, opt: Any, batches: Any) -> State:
    """An evaluation with another argument, while there are gradients."""
    for x, y in batches:
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            net(x, scale=2.0)
        opt.step()
    return dict(net.state_dict())


class Scaled(Named):
    """Takes a number, too."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


def test_right_programs_are_told_nothing_that_is_false() -> None:
    program = _program(_by_place)
    for each in (program, _program(_validated, Scaled)):
        assert_as_alone(each, ["ddp"])
    said = [line for lines in run_ranks(2, heard_of, [(program, program.plan("ddp"))], threads=1) for line in lines[0]]
    assert not [line for line in said if "by the sample's place" in line or "not a mean over samples" in line]


def _normed(_rank: int) -> tuple[State, list[str]]:
    options: Any = {"strategies": ("ddp",), "cache": None, "time_limit_s": 0.1,
                    "cluster": "profiles/cluster.local-gloo-2.json"}  # fmt: skip
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        net, opt, batches = asa.parallelize(*_program(_usual, Normed).made(), **options)
        return _usual(net, opt, batches), [str(w.message) for w in heard]


def test_what_forward_writes_alike_on_all_ranks_is_no_difference() -> None:
    wanted = _program(_usual, Normed).alone()
    for state, said in run_ranks(2, _normed, threads=1, timeout_s=120):
        assert distance(state, wanted) < 1e-11
        assert not any("forward changes" in line for line in said)
