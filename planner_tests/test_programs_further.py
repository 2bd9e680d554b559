"""Numbers of a rank's own that leave torch's operators, records as outputs, and parameters assigned by hand.

More of them are in ``benchmarks/program_table/further.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

import asa
from asa.errors import UsageError
from asa.launch import run_ranks
from asa.sharding.split.of_rank import Operands
from asa.tracing.records import numbers_in, understood
from planner_tests.programs import Named, Program, State, assert_as_alone, classes, epochs, heard_of, numbers

CE = F.cross_entropy
COUNT, BATCH = 21, 6


def _usual(net: Any, opt: Any, batches: Any) -> State:
    return epochs(net, opt, batches, lambda n, x, y: CE(n(x), y), 2)


def _program(loop: Any, model: Any = Named, **options: Any) -> Program:
    x, y = numbers(COUNT, 8), classes(COUNT, 3)
    return Program(model=model, x=x, y=y, batch=BATCH, loop=loop, **options)


# ---- numbers of a rank's own, in what ranks hold in parts


def _late(net: Any, opt: Any, batches: Any) -> State:
    """A decay by the loss, in the last batches of the fourth epoch, long after losses are compared."""
    for epoch in range(4):
        for k, (x, y) in enumerate(batches):
            opt.zero_grad()
            loss = CE(net(x), y)
            loss.backward()
            opt.step()
            if epoch == 3 and k == 2:
                with torch.no_grad():
                    for p in net.parameters():
                        p.mul_(1 - 0.1 * loss.detach())
    return dict(net.state_dict())


def _copied(net: Any, opt: Any, batches: Any) -> State:
    """What a copy has is outside of torch's operators."""
    for x, y in batches:
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        opt.step()
        size = torch.tensor(float(copy.copy(loss.detach())))
        for p in net.parameters():
            p.data = p.data * (1 - 0.1 * size)
    return dict(net.state_dict())


def _assigned_gradient(net: Any, opt: Any, batches: Any) -> State:
    """The same layer's gradient by hand."""
    for x, y in batches:
        with torch.no_grad():
            error = net(x).softmax(1) - F.one_hot(y, 3).double()
            for name, p in net.named_parameters():
                p.grad = error.mean(0) if name == "head.bias" else torch.zeros(p.shape, dtype=torch.float64)
        opt.step()
    return dict(net.state_dict())


def _momentum(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        opt.step()
        for p in net.parameters():
            opt.state[p]["momentum_buffer"].mul_(torch.exp(-loss.detach()))
    return dict(net.state_dict())


def _by_data(net: Any, opt: Any, batches: Any) -> State:
    """Old code reads ``.data``."""
    for x, y in batches:
        opt.zero_grad()
        loss = CE(net(x), y)
        loss.backward()
        for p in net.parameters():
            p.grad.mul_(loss.data)
        opt.step()
    return dict(net.state_dict())


def _alike(net: Any, opt: Any, batches: Any) -> State:
    """Numbers of all ranks: norms, rates, noise of one seed."""
    g = torch.Generator().manual_seed(1)
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        size = torch.stack([torch.tensor(float(p.grad.norm())) for p in net.parameters()]).norm()
        with torch.no_grad():
            for p in net.parameters():
                p.grad.mul_(1 / (1 + size))
                p.add_(0.01 * torch.randn(p.shape, generator=g).double())
        opt.step()
    return dict(net.state_dict())


IN_PARTS = "ranks hold in parts with numbers that differ between ranks"
NO_LONGER = "weights that all ranks hold alike are no longer the same"
IS_CHANGED = "is changed in the loop by numbers of this rank's samples"


def _said_of(plans: Sequence[str], loops: Sequence[Any]) -> dict[tuple[str, Any], list[str]]:
    """What both ranks say of every loop under every plan, by plan and loop."""
    programs = {loop: _program(loop) for loop in loops}
    names = list(product(plans, loops))
    cases = [(programs[loop], programs[loop].plan(plan)) for plan, loop in names]
    by_rank = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)
    return {name: [*one, *two] for name, one, two in zip(names, *by_rank, strict=True)}


def test_numbers_of_a_rank_in_what_ranks_hold_in_parts_are_warned_of() -> None:
    for (plan, loop), said in _said_of(("fsdp", "tensor", "mixed"), (_late, _copied, _momentum, _alike)).items():
        found = any(text in line for line in said for text in (IN_PARTS, NO_LONGER))
        assert found is (loop is not _alike), (plan, loop, said)


def test_data_and_gradients_of_a_rank_are_warned_of() -> None:
    for name, said in _said_of(("ddp", "fsdp", "zero1"), (_by_data, _assigned_gradient)).items():
        assert any(text in line for line in said for text in (IS_CHANGED, IN_PARTS)), (name, said)


def test_operands_are_told_apart_by_their_values_and_their_order() -> None:
    figures = []
    for operands in (["a", 2.0, torch.ones(3)], [2.0, torch.ones(3)], [2.0, torch.full((3,), 1.1)], [2.0, 3.0, 1.0]):
        noted = Operands()
        noted.note(operands)
        figures.append(noted.figure())
        assert noted.figure() == 0
    assert figures[0] == figures[1]
    assert len({*figures}) == 3
    noted.note([float("nan"), torch.tensor(float("inf"))])
    assert noted.figure() == 0


# ---- copies, rates, assignments


def _again(net: Any, opt: Any, batches: Any) -> State:
    """A batch that is kept by deepcopy is used once more."""
    kept: Any = None
    for batch in batches:
        for x, y in filter(None, (batch, kept)):
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
        kept = copy.deepcopy(batch)
    return dict(net.state_dict())


class Plain(torch.optim.Optimizer):
    """Has no rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"size": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["size"])


def _by_layers(net: Any, opt: Any, batches: Any) -> State:
    """``layer.bias -= x``, which assigns what it has changed."""
    for x, y in batches:
        with torch.no_grad():
            net.first.weight *= 0.9
            net.head.bias -= 0.1
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()
    return dict(net.state_dict())


def _by_norms_with_gradients(net: Any, opt: Any, batches: Any) -> State:
    """A gradient is multiplied by what has gradients itself, without ``no_grad``."""
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        for p in net.parameters():
            p.grad.mul_(1 / (1 + p.norm()))
        opt.step()
    return dict(net.state_dict())


def _weights_of_no_grad(net: Any, opt: Any, batches: Any) -> State:
    """Weights of samples are made of their losses under ``no_grad``: they have no gradients in a comparison either."""
    return epochs(net, opt, batches, _weighed, 2)


def _weighed(net: Any, x: Tensor, y: Tensor) -> Tensor:
    each = CE(net(x), y, reduction="none")
    with torch.no_grad():
        weights = 1 / (1 + each)
    return (weights * each).mean()


def _single_calls(net: Any, opt: Any, batches: Any) -> State:
    """Each sample is a call and a backward of its own; the last batch has three, of which ranks would have 2 and 1."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            for xi, yi in zip(x, y, strict=True):
                (CE(net(xi[None]), yi[None]) / len(x)).backward()
            opt.step()
    return dict(net.state_dict())


def _probed(net: Any, opt: Any, batches: Any) -> State:
    """Two samples of the loop's own are looked at behind each step: as many as one rank has of the last batch."""
    seen = []
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()
        with torch.no_grad():
            seen.append(net(torch.ones(2, 8, dtype=torch.float64)).sum())
    return {"seen": torch.stack(seen), **net.state_dict()}


@pytest.mark.parametrize(
    "loop", [_again, _probed, _single_calls, _by_layers, _by_norms_with_gradients, _weights_of_no_grad]
)
def test_loops_that_copy_and_assign_are_those_of_one_process(loop: Any) -> None:
    assert_as_alone(_program(loop), ["ddp", "fsdp", "tensor", "mixed"])


def test_an_optimizer_without_a_rate_is_that_of_one_process() -> None:
    assert_as_alone(_program(_usual, optimizer=lambda net: Plain(net.parameters())), ["ddp", "fsdp", "tensor"])


def test_weights_made_under_no_grad_are_no_difference() -> None:
    cases = [(p := _program(_weights_of_no_grad), p.plan("ddp"))]
    for lines in run_ranks(2, heard_of, cases, threads=1, timeout_s=120):
        assert not any("not a mean over samples" in line for line in lines[0]), lines[0]


class Positive(nn.Module):
    """Weights that are positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.abs().log()


class Parametrized(Named):
    """A layer with a computed weight."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.first, "weight", Positive())


def _assigned(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()
        with torch.no_grad():
            net.first.weight = net.first.weight * 0.9
    return dict(net.state_dict())


def test_a_parametrized_weight_can_be_assigned() -> None:
    assert_as_alone(_program(_assigned, Parametrized), ["ddp", "fsdp", "tensor"])


def _by_singular_value(net: Any, opt: Any, batches: Any) -> State:
    """A matrix between two vectors, which torch's sharded tensors fail on."""
    u = torch.ones(12, dtype=torch.float64)
    v = torch.ones(8, dtype=torch.float64)
    return epochs(net, opt, batches, lambda n, x, y: CE(n(x), y) + 0.1 * (u @ n.first.weight @ v))


def test_what_sharded_tensors_fail_on_is_refused_in_a_line() -> None:
    program = _program(_by_singular_value)
    assert all(str(state).startswith("UsageError:") for state in program.spread(["fsdp"])["fsdp"])


# ---- outputs


@dataclass
class Record:
    """Outputs by attribute."""

    logits: Tensor
    rest: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Slotted:
    """Outputs in slots."""

    x: Tensor


class Linked:
    """An object that may be in itself: no record."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.other = x, self


class Fields(dict[str, Tensor]):
    """Outputs by attribute and by name."""

    __getattr__ = dict.__getitem__


class Answers(Named):
    """Returns a record."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.first(x))
        return self.kind(logits=self.head(h), rest={"hidden": h})


class AnswersByName(Answers):
    """Has a second input, with which it is not cut."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return super().forward(x * scale)


def _of_records(net: Any, opt: Any, batches: Any) -> State:
    def loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        return CE(out.logits, y) + 0.1 * out.rest["hidden"].square().mean()

    return epochs(net, opt, batches, loss, 2)


def _of_records_called(net: Any, opt: Any, batches: Any) -> State:
    return epochs(net, opt, batches, lambda n, x, y: CE(n(x, scale=0.5).logits, y), 2)


@pytest.mark.parametrize("kind", [Record, Fields])
def test_records_are_understood(kind: Any) -> None:
    assert_as_alone(_program(_of_records, lambda: Answers(kind)), ["ddp", "fsdp", "tensor"])


def test_records_of_a_model_that_runs_whole_are_understood() -> None:
    assert_as_alone(_program(_of_records_called, lambda: AnswersByName(Record)), ["ddp", "fsdp"])


class Odd:
    """Has more than tensors."""

    def __init__(self, logits: Tensor, rest: Any) -> None:
        self.logits, self.rest, self.more = logits, rest, object()


def _refused(_rank: int, program: Program) -> str:
    options: Any = {"strategies": ("ddp",), "cache": None, "time_limit_s": 0.1,
                    "cluster": "profiles/cluster.local-gloo-2.json"}  # fmt: skip
    example = {"x": program.x[:2], "scale": 0.5}
    with pytest.raises(UsageError, match="returns a Odd, whose tensors cannot be found") as refused:
        program.loop(*asa.parallelize(*program.made(), example_input=example, **options))
    return str(refused.value)


def test_objects_whose_tensors_are_not_found_are_refused() -> None:
    program = _program(_of_records_called, lambda: AnswersByName(Odd))
    assert all("\n" not in line for line in run_ranks(2, _refused, program, threads=1, timeout_s=120))


def test_records_are_taken_apart_and_put_together() -> None:
    out = understood({"a": Record(torch.ones(2), {"b": torch.zeros(1)}), "c": Fields(x=torch.ones(1)), "d": "text"})
    doubled = pytree.tree_map(lambda leaf: leaf * 2, out)
    assert type(doubled["a"]) is Record
    assert type(doubled["c"]) is Fields
    assert doubled["a"].logits.tolist() == [2, 2]
    assert doubled["c"].x.tolist() == [2]
    assert pytree.tree_leaves(understood(SimpleNamespace(x=torch.ones(1), y="text")))[1] == "text"
    slotted = pytree.tree_map(lambda leaf: leaf * 2, understood(Slotted(torch.ones(1))))
    assert slotted.x.tolist() == [2]
    cyclic = Linked(torch.ones(1))
    cyclic.other = cyclic
    assert pytree.tree_leaves(understood(cyclic)) == [cyclic]
    assert numbers_in((torch.ones(1), 0.5))
    assert not numbers_in({"a": torch.ones(1), "b": None, "c": "text"})


class Kept:
    """Keys of a layer, and where they are."""

    def __init__(self, keys: Tensor) -> None:
        self.keys, self.device, self.dtype, self.begun = keys, keys.device, keys.dtype, True


class Layers:
    """Keys of all layers, as language models return them for later calls."""

    def __init__(self, *keys: Tensor) -> None:
        self.layers, self.kind = [Kept(k) for k in keys], Kept


def test_what_a_language_model_keeps_is_a_record() -> None:
    both = SimpleNamespace(own=Layers(torch.ones(2)), other=Layers(torch.zeros(2)), updated={0: True})
    found = [leaf for leaf in pytree.tree_leaves(understood(both)) if isinstance(leaf, Tensor)]
    assert [t.tolist() for t in found] == [[1, 1], [0, 0]]
    assert not numbers_in(both)
    doubled = pytree.tree_map(lambda leaf: leaf * 2 if isinstance(leaf, Tensor) else leaf, both)
    assert doubled.own.layers[0].keys.tolist() == [2, 2]
    assert doubled.own.layers[0].device == torch.device("cpu")


class Share(NamedTuple):
    """Logits, and a figure of the batch."""

    logits: Tensor
    share: float


class Figures(Named):
    """Returns a Python number of its samples."""

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return Share(out, float((out.detach() > 0).double().mean()))


def _by_figure(net: Any, opt: Any, batches: Any) -> State:
    def loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        return out.share * CE(out.logits, y)

    return epochs(net, opt, batches, loss, 2)


def test_a_number_in_an_output_is_no_constant_and_is_said() -> None:
    program = _program(_by_figure, Figures)
    for lines in run_ranks(2, heard_of, [(program, program.plan("ddp"))], threads=1, timeout_s=120):
        assert any("goes into the loss" in line for line in lines[0]), lines[0]
    for state in program.spread(["tensor"])["tensor"]:
        assert "there is a Python number in its output" in str(state)


class Centred(nn.Module):
    """A loss with a centre that follows the batches (self-distillation)."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(3, dtype=torch.float64)

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        target = ((teacher - self.centre) / 0.1).softmax(1)
        self.centre = 0.9 * self.centre + 0.1 * teacher.mean(0)
        return -(target * student.log_softmax(1)).sum(1).mean()


def _distilled(net: Any, opt: Any, batches: Any) -> State:
    criterion = Centred()

    def loss(net: Any, x: Tensor, _y: Tensor) -> Tensor:
        with torch.no_grad():
            target = net(1.1 * x)
        return criterion(net(0.9 * x), target)

    return epochs(net, opt, batches, loss, 2)


def test_outputs_without_gradients_are_part_of_the_comparison() -> None:
    program = _program(_distilled)
    for lines in run_ranks(2, heard_of, [(program, program.plan("ddp"))], threads=1, timeout_s=120):
        assert any("differs between ranks" in line for line in lines[0]), lines[0]
