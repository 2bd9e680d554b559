"""Programs of which a rank has too few samples: the numbers of one process, or a line of ours; what fails alone fails
with its own words."""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import asa
from asa.api.calls import Call
from asa.api.job.loss import copied
from asa.api.losses.tape import Tape
from asa.api.model.coupling import Scored, fewest_rows, keeps_rows
from asa.errors import UsageError
from asa.executor.model.step import microbatches_of
from asa.launch import run_ranks
from planner_tests.programs import Program, State, classes, cross_entropy, distance, epochs, numbers

X, Y = numbers(20, 8), classes(20, 4)
UNLIKE = torch.cat([torch.tensor([0, 0, 2, 2, 3, 2, 2, 3, 1, 0, 0, 1]), Y[12:]])
"""Of the first batch two ranks have one and three labels above 1, of the second two and none."""


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4))


class _Kept(nn.Module):
    """Keeps a state with the batch's rows."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 6), nn.Linear(6, 4)
        if buffer:
            self.register_buffer("h", torch.zeros(5, 6))
        else:
            self.h = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.cell(x, self.h if self.h is None else self.h[: len(x)].to(x.dtype))
        self.h = h.detach()
        return self.head(h)


class _Deviation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.std(0))


class _Two(nn.Module):
    """Refuses one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) < 2:
            raise ValueError("two samples are the least")
        return self.a(x)


def _loop(loss: Any) -> Any:
    return lambda net, opt, batches: epochs(net, opt, batches, loss)


def _program(loss: Any = cross_entropy, model: Any = _net, batch: int = 6, **options: Any) -> Program:
    return Program(model=model, x=X, y=Y, batch=batch, loop=_loop(loss), options=options)


def _parts() -> Program:
    return replace(_program(_some), y=UNLIKE)


def _some(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Only some samples go through the model; a rank may have none of them, or all."""
    keep = y > 1
    return F.cross_entropy(net(x[keep]), y[keep]) if keep.any() else 0 * net(x).sum()


def _part_by_part(net: Any, opt: Any, batches: Any) -> State:
    """A backward for each part of a batch that has samples; a rank may have none of them."""
    for x, y in batches:
        opt.zero_grad()
        for high in (False, True):
            mine = (y > 1) == high
            if mine.sum() == 0:
                continue
            if mine.any():
                F.cross_entropy(net(x[mine]), y[mine]).backward()
        opt.step()
    return dict(net.state_dict())


def _summed_by_hand(net: Any, opt: Any, batches: Any) -> State:
    several = hasattr(net, "plan")
    for x, y in batches:
        opt.zero_grad()
        cross_entropy(net, x, y).backward()
        for p in net.parameters() if several else ():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= 2
                dist.broadcast(p.grad, 0)
        opt.step()
    return dict(net.state_dict())


RIGHT: dict[str, tuple[Program, list[str]]] = {
    "a part of the batch in the model": (_parts(), ["ddp", "fsdp", "mixed"]),
    "a backward for each part of the batch": (
        Program(model=_net, x=X, y=UNLIKE, loop=_part_by_part), ["ddp", "zero1"],
    ),
    "a state with rows in an attribute": (_program(model=lambda: _Kept(buffer=False), batch=10), ["ddp", "fsdp"]),
    "gradients summed by hand": (
        Program(model=_net, x=X, y=Y, loop=_summed_by_hand), ["fsdp", "tensor", "mixed-sharded"],
    ),
    "a model of two samples or more": (_program(model=_Two), ["ddp"]),
}  # fmt: skip


def _worst(count: int) -> Any:
    return lambda net, x, y: F.cross_entropy(net(x), y, reduction="none").topk(count).values.mean()


def _later(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Of one sample there is no deviation; it goes in from the second batch of its size on."""
    out = net(x)
    net.origin.calls = getattr(net.origin, "calls", 0) + 1
    late = net.origin.calls > 10 and len(x) < 3
    return F.cross_entropy(out, y) + (out.std(0).sum() if late else 0)


SAID: dict[str, tuple[Program, str, str]] = {
    "the worst two": (_program(_worst(2)), "ddp", "a batch of 2 samples is computed by every rank"),
    "the worst two, parts of a model": (_program(_worst(2)), "mixed", "a batch of 2 samples is computed by every rank"),
    "the worst five": (_program(_worst(5)), "fsdp", "topk fails on the 3 samples that this rank has of a batch of 6"),
    "a deviation over the batch": (
        _program(model=lambda: nn.Sequential(nn.Linear(8, 4), _Deviation())), "mixed",
        "a batch of 2 samples is computed by every rank",
    ),
    "alone, too": (_program(_worst(9)), "ddp", "RuntimeError: selected index k out of range"),
    "another loss of a small batch": (
        Program(model=_net, x=X, y=Y, loop=lambda *a: epochs(*a, _later, count=3)), "ddp",
        "one of them is no number",
    ),
    "parts that ranks cannot share": (_parts(), "tensor", "model runs whole under ddp from now on: ranks"),
}  # fmt: skip


def _ran(_rank: int, programs: list[tuple[Program, Any]]) -> list[tuple[State, str]]:
    found = []
    for program, plan in programs:
        text, state = io.StringIO(), State()
        with warnings.catch_warnings(record=True) as heard, contextlib.redirect_stderr(text):
            warnings.simplefilter("always")
            net, opt, batches = asa.parallelize(*program.made(), plan=plan, **(program.options or {}))
            try:
                state = program.loop(net, opt, batches)
            except Exception as error:
                text.write(f"{type(error).__name__}: {error}")
            net.close()
        found.append((state, "\n".join([text.getvalue(), *(str(w.message) for w in heard)])))
    return found


def test_small_shares_are_as_in_one_process_or_named() -> None:
    right = [(name, program, plan) for name, (program, plans) in RIGHT.items() for plan in plans]
    programs = [(program, program.plan(plan)) for _, program, plan in right]
    programs += [(program, program.plan(plan)) for program, plan, _ in SAID.values()]
    by_rank = run_ranks(2, _ran, programs, threads=1, timeout_s=120)
    for found in by_rank:
        for (name, program, plan), (state, text) in zip(right, found, strict=False):
            assert state, (name, plan, text)
            assert distance(state, program.alone()) < 1e-11, (name, plan)
    for i, (name, (_, _, words)) in enumerate(SAID.items()):
        said = "\n".join(found[len(right) + i][1] for found in by_rank)
        assert words in said, (name, said)


def test_what_a_model_needs_of_a_batch() -> None:
    call = Call((X[:6],))
    assert fewest_rows(_net().double(), call) == 1
    assert fewest_rows(_Two().double(), call) == 2
    assert fewest_rows(nn.Sequential(nn.Linear(8, 4), _Deviation()).double(), call) == 2
    assert fewest_rows(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).double(), call) == 1
    assert fewest_rows(_net().double(), None) == 1
    worst = Scored(_net().double(), lambda z, y: F.cross_entropy(z, y, reduction="none").topk(4).values.mean())
    assert fewest_rows(worst, Call((X[:6], Y[:6]))) == 4


def test_a_model_that_keeps_rows() -> None:
    assert keeps_rows(_Kept(buffer=False).double(), Call((X[:6],)))
    assert keeps_rows(_Kept(buffer=True).double(), Call((X[:5],)))
    assert not keeps_rows(_net().double(), Call((X[:6],)))
    assert not keeps_rows(_Two().double(), Call((X[:6],)))


@pytest.mark.parametrize(
    ("loss", "fewest"),
    [
        (lambda z, y: F.cross_entropy(z, y), 1),
        (lambda z, y: F.cross_entropy(z, y, reduction="none").topk(2).values.mean(), 2),
        (lambda z, y: z.std(0).sum(), 2),
        (lambda z, y: torch.stack([h.mean() for h in z.chunk(2)]).sum(), 2),
        (lambda z, y: -z.log_softmax(1)[torch.arange(len(y)), y].mean(), 1),
        (lambda z, y: (z.t().std(1) + z.flatten(0).view(len(y), -1).mean()).sum(), 2),
        (lambda z, y: (z @ z.T - torch.eye(len(z)).to(z)).square().mean(), 1),
        (lambda z, y: (z.mean(1) * (y > 1)).sum() / (y > 1).sum(), 1),  # some have some
    ],
)
def test_what_a_loss_needs_of_a_batch(loss: Any, fewest: int) -> None:
    tape = Tape(5, 10)
    y = tape.begin(torch.tensor([0, 2, 1, 3, 0]))
    out = tape.follow(numbers(5, 4).requires_grad_())
    assert tape.fewest(loss(out, y)) == fewest


def test_what_fails_only_on_so_few_is_said() -> None:
    left: list[int] = []
    tape = Tape(2, 4, lambda: left.append(1))
    out = tape.follow(numbers(2, 4).requires_grad_())
    with pytest.raises(UsageError, match="topk fails on the 2 samples that this rank has of a batch of 4"):
        out.mean(1).topk(3)
    assert left
    with pytest.raises(RuntimeError, match="out of range"):
        out.mean(1).topk(5)


def _of_pairs(rows: list[Any]) -> tuple[Tensor, Tensor]:
    if len(rows) < 2:
        raise ValueError("no pair")
    return torch.stack([r[0] for r in rows]).flatten(), torch.stack([r[1] for r in rows])


def _collated(_rank: int) -> str:
    net = _net().double()
    loader = DataLoader(TensorDataset(X[:2], Y[:2]), 2, collate_fn=_of_pairs)
    try:
        _, _, batches = asa.parallelize(
            net, torch.optim.SGD(net.parameters()), loader, strategies=("ddp",), example_input=X[:2], cache=None,
            cluster="local-gloo-2", time_limit_s=0.1,
        )  # fmt: skip
        next(iter(batches))
    except UsageError as error:
        return str(error)
    return "a batch came"


def test_a_collate_fn_that_takes_no_single_sample() -> None:
    for said in run_ranks(2, _collated, threads=1, timeout_s=120):
        assert said.startswith("the loader's collate_fn makes no batch of the 1 samples that this rank has of a batch")


def test_a_small_batch_has_fewer_microbatches_where_more_samples_are_needed() -> None:
    plan = replace(_program().plan("single"), num_microbatches=4)
    assert microbatches_of(plan, 12) == 4
    assert microbatches_of(plan, 12, 5) == 2
    assert microbatches_of(plan, 2) == 2
    assert microbatches_of(plan, 2, 2) == 1


def test_a_loss_is_copied_with_what_it_closes_over() -> None:
    calls: list[int] = []

    def loss(output: Tensor, _labels: Tensor) -> Tensor:
        calls.append(1)
        return output.sum()

    copied(loss)(X, Y)
    assert not calls
    held = (n for n in range(3))

    def other(output: Tensor, _labels: Tensor) -> Tensor:
        return output.sum() * next(held)

    assert copied(other) is None
