"""Programs whose model changes or reads something around it: lists, generators, numbers of its class and of its file,
memory that parameters share, and norms that are removed."""

from __future__ import annotations

import random
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, remove_weight_norm, weight_norm

from asa.api.plans.planning import measured
from asa.api.steps.batches import GlobalBatches
from asa.errors import InvalidInputError, UsageError
from asa.executor.model.parameter_memory import in_one_memory
from asa.executor.model.votes import Votes
from asa.launch import run_ranks
from asa.tracing import trace
from asa.tracing.preserve import preserved
from asa.tracing.surroundings import Surroundings
from planner_tests.programs import Named, Program, State, classes, cross_entropy, epochs, numbers

LOCAL = str(Path(__file__).parent.parent / "profiles" / "cluster.local-gloo-2.json")
COUNT = [0]
LEFT: dict[str, Tensor] = {}
COIN = random.Random(0)
SETTINGS = SimpleNamespace(rate=1.0)
STEPS = 0


class InGlobalList(Named):
    def forward(self, x: Tensor) -> Tensor:
        COUNT[0] += 1
        return super().forward(x) * COUNT[0]


class InGlobalNumber(Named):
    def forward(self, x: Tensor) -> Tensor:
        global STEPS
        STEPS += 1
        return super().forward(x) * STEPS


class InGlobalDictionary(Named):
    def forward(self, x: Tensor) -> Tensor:
        LEFT["x"] = x
        return super().forward(x)


class InClass(Named):
    steps: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).steps += 1
        return super().forward(x) * self.steps


class InGlobalGenerator(Named):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * COIN.random()


def _with(make: Any, change: Any) -> Any:
    """A model that keeps ``make()``, which ``change`` changes."""

    class Keeping(Named):
        def __init__(self) -> None:
            super().__init__()
            self.kept = make()

        def forward(self, x: Tensor) -> Tensor:
            change(self.kept, x)
            return super().forward(x)

    return Keeping


CHANGING = [
    InGlobalList, InGlobalNumber, InGlobalDictionary, InClass, InGlobalGenerator,
    _with(list, lambda kept, x: kept.append(x)),
    _with(dict, lambda kept, x: kept.update(x=x)),
    _with(set, lambda kept, x: kept.add(len(kept))),
    _with(lambda: [{"deep": []}], lambda kept, x: kept[0]["deep"].append(x)),
    _with(lambda: SimpleNamespace(n=0), lambda kept, x: setattr(kept, "n", kept.n + 1)),
    _with(lambda: random.Random(0), lambda kept, x: kept.random()),
    _with(lambda: np.random.default_rng(0), lambda kept, x: kept.random()),
    _with(lambda: np.random.RandomState(0), lambda kept, x: kept.rand()),
    _with(lambda: torch.zeros(2), lambda kept, x: kept.add_(1)),
    _with(lambda: np.zeros(2), lambda kept, x: kept.__iadd__(1)),
]  # fmt: skip


@pytest.mark.parametrize("kind", CHANGING, ids=range(len(CHANGING)))
def test_what_a_forward_changes_around_it_is_put_back_and_not_traced_through(kind: Any) -> None:
    net, x = kind().double(), numbers(3, 8)
    around = Surroundings(net.modules())
    assert not around.changed()
    with preserved(net):
        net(x)
        assert around.changed()
    assert not around.changed()
    traced = trace(net, x, name="model")
    assert not around.changed()
    assert ([c.name for c in traced.facts], "forward changes" in traced.notes[0]) == (["model"], True)


def test_what_no_forward_changes_is_traced_through() -> None:
    net = _with(lambda: ([1], {"a": torch.ones(2)}), lambda kept, x: None)()
    assert [c.name for c in trace(net.double(), numbers(3, 8), name="model").facts] == ["first", "head"]


class Penalised(Named):
    """Leaves a penalty in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.penalties: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.relu(self.first(x))
        self.penalties.append(hidden.square().mean())
        return self.head(hidden)  # type: ignore[no-any-return]


def _penalised(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y) + 0.1 * sum(net.penalties)
        net.penalties.clear()
        loss.backward()
        opt.step()
    return dict(net.state_dict())


def _program(model: Any = Named, loop: Any = None, count: int = 18) -> Program:
    usual = loop or (lambda net, opt, batches: epochs(net, opt, batches, cross_entropy))
    return Program(model=model, x=numbers(count, 8), y=classes(count, 3), loop=usual)


def test_penalties_in_a_list_count_once() -> None:
    program = _program(Penalised, _penalised)
    alone = program.alone()
    for name, states in program.spread(["ddp", "tensor", "fsdp"]).items():
        for state in states:
            assert not isinstance(state, str), (name, state)
            assert max(float((state[k] - v).abs().max()) for k, v in alone.items()) < 1e-12


class InLayer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = x.square().mean()
        return super().forward(x)


def _of_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), InLayer(12, 3))


def _by_layers(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        (loss + sum(m.penalty for m in net.modules() if hasattr(m, "penalty"))).backward()
        opt.step()
    return dict(net.state_dict())


class ByRate(Named):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SETTINGS.rate


def _slower(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        opt.step()
        SETTINGS.rate /= 2
    return dict(net.state_dict())


def _heard(_rank: int, cases: list[tuple[Program, Any]]) -> list[str]:
    import asa

    lines = []
    for program, plan in cases:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            net, opt, batches = asa.parallelize(*program.made(), plan=plan)
            program.loop(net, opt, batches)
            net.close()
        lines.append(" ".join(str(w.message) for w in heard if w.category is UserWarning))
    return lines


def test_what_is_left_around_or_read_there_is_told_of() -> None:
    programs = [_program(Penalised, _penalised, 15), _program(_of_layer, _by_layers, 15), _program(ByRate, _slower)]
    cases = [(p, p.plan("fsdp")) for p in programs] + [(p, p.plan("fsdp")) for p in map(_even, programs[:2])]
    for lines in run_ranks(2, _heard, cases, threads=1, timeout_s=120):
        assert "leaves tensors with gradients in penalties" in lines[0]
        assert "leaves tensors with gradients in model.2.penalty" in lines[1]
        assert "SETTINGS.rate, which the forward of the model names, was changed behind" in lines[2]
        assert lines[3:] == ["", ""]


def _even(program: Program) -> Program:
    return _program(program.model, program.loop)


class OneMemory(Named):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.float64)
        self.head.weight = nn.Parameter(self.first.weight.data.view(-1)[:36].view(3, 12))


def test_parameters_that_overlap_are_found() -> None:
    flat = torch.zeros(10)
    a, b, c = nn.Parameter(flat[:4]), nn.Parameter(flat[4:8]), nn.Parameter(flat[7:])
    assert in_one_memory([("a", a), ("b", b), ("also b", b)]) is None
    assert in_one_memory([("c", c), ("a", a), ("b", b)]) == ("b", "c")


def _behind_the_call(_rank: int, cases: list[tuple[Program, Any]], uses: list[Any]) -> list[str]:
    import asa

    errors = []
    for (program, plan), use in zip(cases, uses, strict=True):
        made = program.made()
        held = use(made[0]) if use is not None else None
        try:
            net, opt, batches = asa.parallelize(*made, plan=plan)
            program.loop(net, opt, batches)
            held(net)
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def _view(net: Any) -> Any:
    row = net.first.weight.data[0]
    return lambda _: row.mul_(2)


class NoElements(Named):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 12))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.none.sum()


class WithOld(Named):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            weight_norm(self.first)


class WithNew(Named):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.first)


def _remove_old(_: Any) -> Any:
    return lambda net: remove_weight_norm(net.first)


def _remove_new(_: Any) -> Any:
    return lambda net: parametrize.remove_parametrizations(net.first, "weight")


def test_what_cannot_be_is_refused_in_a_line() -> None:
    named, shared, empty = _program(), _program(OneMemory), _program(NoElements)
    old, new = _program(WithOld), _program(WithNew)
    cases = [(named, named.plan("fsdp")), (named, named.plan("tensor")), (shared, shared.plan("tensor")),
             (shared, shared.plan("zero1")), (empty, empty.plan("fsdp")), (old, old.plan("ddp")),
             (new, new.plan("ddp"))]  # fmt: skip
    uses = [_view, _view, None, None, None, _remove_old, _remove_new]
    words = ["or a view of one", "or a view of one", "two parameters in one memory", "two parameters in one memory",
             "none has no elements", "removed behind asa.parallelize", "removed behind asa.parallelize"]  # fmt: skip
    for errors in run_ranks(2, _behind_the_call, cases, uses, threads=1, timeout_s=120):
        for error, said in zip(errors, words, strict=True):
            assert (error.startswith("UsageError"), said in error) == (True, True), (error, said)


class Child(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.linear, self.parent = nn.Linear(8, 8), lambda: parent

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.parent().scale  # type: ignore[no-any-return, attr-defined]


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.child = Child(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("model", "words"), [
    (Parent, "a copy of the model uses scale of the model itself"),
    (_with(threading.Lock, lambda kept, x: None), "the model cannot be copied .TypeError: cannot pickle"),
])  # fmt: skip
def test_a_model_that_cannot_be_copied_is_refused_in_a_line(model: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        measured(model(), torch.ones(2, 8), num_classes=1, global_batch=4, precision="fp32", limit_s=1.0)


class InPlace(Named):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.9))


class OnSparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, self.table)


class Parts(nn.Module):
    """Normalises parts of three samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.norm(part) for part in x.split(3)]))  # type: ignore[no-any-return]


def _listed(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
    torch.manual_seed(0)
    net = {"in place": InPlace, "parts": Parts, "sparse": OnSparse}[kind]().double()
    batches = [(numbers(count, 8), classes(count, 3, seed=count)) for count in (6, 6, 5)]
    if kind == "sparse":
        batches = [((x * (x > 0)).to_sparse(), y) for x, y in batches]
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), batches


def _of_lists(_rank: int, kind: str, options: dict[str, Any]) -> tuple[State, str]:
    import asa

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        net, opt, batches = asa.parallelize(
            *_listed(kind), cluster=LOCAL, cache=None, time_limit_s=0.5, timeout_s=30, **options
        )
        state = epochs(net, opt, batches, cross_entropy)
        net.close()
    return state, " ".join(str(w.message) for w in heard if w.category is UserWarning)


@pytest.mark.parametrize(("kind", "options", "said"), [
    ("in place", {"strategies": ("ddp",)}, "changes its inputs in place"),
    ("sparse", {"strategies": ("fsdp",)}, ""),
    ("parts", {"strategies": ("ddp",), "batch_norm": "exact"}, "normalises over parts of a batch"),
])  # fmt: skip
def test_batches_that_a_trial_could_change_or_not_cut(kind: str, options: dict[str, Any], said: str) -> None:
    alone = epochs(*_listed(kind), cross_entropy)
    ranks = run_ranks(2, _of_lists, kind, options, threads=1, timeout_s=120)
    assert said in ranks[0][1]
    for state, _ in ranks:
        if kind != "parts":
            assert max(float((state[k] - v).abs().max()) for k, v in alone.items()) < 1e-12


def _in_job(_rank: int) -> tuple[State, str]:
    import asa

    net, opt, batches = _listed("in place")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        job = asa.Job(net, opt, batches, nn.functional.cross_entropy, strategies=("gpipe",), replan=False,
                      cluster=LOCAL, cache=None, time_limit_s=0.5, timeout_s=30)  # fmt: skip
    for batch in batches:
        job.train_step(batch)
    state = job.state_dict()
    job.close()
    return state, " ".join(str(w.message) for w in heard)


def test_nested_tensors_are_refused_in_a_line() -> None:
    rows = [numbers(2 + i, 4, seed=i) for i in range(4)]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    with pytest.raises(UsageError, match="nested tensors, whose rows ranks cannot share"):
        GlobalBatches([(nested, classes(4, 3))], Votes(), lambda total: list(range(total))).example()


def test_microbatches_of_a_model_that_changes_its_inputs() -> None:
    alone = epochs(*_listed("in place"), cross_entropy)
    ranks = run_ranks(2, _in_job, threads=1, timeout_s=120)
    assert "changes its inputs in place" in ranks[0][1]
    for state, _ in ranks:
        assert max(float((state[k] - v).abs().max()) for k, v in alone.items()) < 1e-12
