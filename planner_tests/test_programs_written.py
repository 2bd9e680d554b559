"""Parameters that a loss uses beside outputs, gradients and states that a loop writes late, and batches that a
``collate_fn`` makes smaller.

More of them are in ``benchmarks/program_table/outside.py``.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

import asa
from asa.api.steps.batches import rows_made
from asa.errors import UsageError
from asa.launch import run_ranks
from planner_tests.programs import Named, Program, State, assert_as_alone, classes, heard_of, numbers, sgd

CE = F.cross_entropy


class Tied(nn.Module):
    """Features; the loop multiplies by the table of words, which ``forward`` reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.words(tokens)))


def _tied(net: Any, opt: Any, batches: Any) -> State:
    for tokens, labels in batches:
        opt.zero_grad()
        logits = net(tokens) @ net.words.weight.T
        (CE(logits.flatten(0, 1), labels.flatten()) + 0.01 * net.words.weight.square().mean()).backward()
        opt.step()
    return dict(net.state_dict())


def _program(loop: Any, count: int = 21) -> Program:
    return Program(model=Named, x=numbers(count, 8), y=classes(count, 3), loop=loop)


def test_a_parameter_beside_outputs_counts_by_samples() -> None:
    program = Program(model=Tied, x=classes(21 * 5, 11).view(21, 5), y=classes(21 * 5, 11, 2).view(21, 5), loop=_tied)
    assert_as_alone(program, ["mixed", "ddp", "zero1"])


def _scaled_by_weights(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        weight = net.head.weight
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        (CE(net(x) * weight.abs().mean(), y) + 0.01 * weight.square().mean()).backward()
        opt.step()
    return dict(net.state_dict())


def test_a_sharded_parameter_that_the_loss_takes_whole_has_the_gradient_of_all_samples() -> None:
    assert_as_alone(_program(_scaled_by_weights), ["fsdp", "zero2"])


def _assigned_late(net: Any, opt: Any, batches: Any) -> State:
    """In the last batches of the fourth epoch, the head's gradient is a rule of the loop's own."""
    for epoch in range(4):
        for k, (x, y) in enumerate(batches):
            opt.zero_grad()
            out = net(x)
            CE(out, y).backward()
            if epoch == 3 and k == 4:
                net.head.bias.grad = (out.detach().softmax(1) - F.one_hot(y, 3).double()).mean(0)
            opt.step()
    return dict(net.state_dict())


def _clipped(net: Any, opt: Any, batches: Any) -> State:
    """What all ranks write alike is nothing to warn of."""
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        for p in net.parameters():
            p.grad = p.grad * 0.9
        opt.step()
    return dict(net.state_dict())


@pytest.mark.parametrize("plan", ["zero1", "ddp"])
def test_gradients_that_a_loop_writes_late_are_compared(plan: str) -> None:
    cases = [((p := _program(loop, 33)), p.plan(plan)) for loop in (_assigned_late, _clipped)]
    late, alike = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)[0]
    assert any("gradients that the loop wrote differ between ranks" in line for line in late)
    assert not any("gradients that the loop wrote" in line for line in alike)


def _momenta(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()
        for p in net.parameters():
            opt.state[p]["momentum_buffer"].mul_(0.5)
    return dict(net.state_dict())


def _momenta_if_there(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()
        for p in net.parameters():
            if p in opt.state:
                opt.state[p]["momentum_buffer"].mul_(0.5)
        opt.load_state_dict(opt.state_dict())
    return dict(net.state_dict())


def test_state_of_a_parameter_that_another_rank_updates_is_refused_in_a_line() -> None:
    found = _program(_momenta).spread(["zero1"])["zero1"]
    assert all("only on the rank that updates it" in str(each) for each in found)
    assert_as_alone(_program(_momenta_if_there), ["zero1"])


def _begun_anew(net: Any, opt: Any, batches: Any) -> State:
    """The state of a layer's parameters is left out, by the parameters of the layer."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
        for p in net.head.parameters():
            opt.state.pop(p, None)
    return dict(net.state_dict())


def test_parameters_of_a_layer_are_those_of_the_model() -> None:
    assert_as_alone(_program(_begun_anew), ["tensor", "mixed", "ddp"])


def _in_turn(net: Any, opt: Any, batches: Any) -> State:
    for pair in zip(iter(batches), iter(batches), strict=True):
        for x, y in pair:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
    return dict(net.state_dict())


def test_epochs_in_turn() -> None:
    assert_as_alone(_program(_in_turn), ["ddp", "tensor"])


class Gaps(Dataset[Any]):
    """Samples, some of which have no label."""

    def __init__(self) -> None:
        self.x, self.y = numbers(20, 8), classes(20, 4) - 1

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


def _labelled(rows: list[Any]) -> Any:
    return default_collate([r for r in rows if r[1] >= 0])


def _trained_on_gaps(_rank: int, ranks: int) -> State:
    torch.manual_seed(3)
    net = Named().double()
    made: Any = net, sgd(net), DataLoader(Gaps(), 6, collate_fn=_labelled)
    if ranks > 1:
        warnings.simplefilter("ignore")
        made = asa.parallelize(*made, strategies="ddp", cluster="profiles/cluster.local-gloo-2.json", cache=None,
                               time_limit_s=0.1)  # fmt: skip
    net, opt, batches = made
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()
    return dict(net.state_dict())


def test_a_collate_fn_may_leave_samples_out() -> None:
    alone = _trained_on_gaps(0, 1)
    for state in run_ranks(2, _trained_on_gaps, 2, threads=1, timeout_s=120):
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)


def test_rows_that_a_collate_fn_makes() -> None:
    x, y = numbers(4, 8), classes(4, 3)
    assert rows_made((x, y), 4) == rows_made((x, y), 6) == 4
    assert rows_made((x, y[:3]), 4) == 4
    for batch in ((x, y[:3]), (x, y)):
        with pytest.raises(UsageError, match=r"collate_fn made .* rows of a batch of"):
            rows_made(batch, 3 if batch[1] is y else 6)
