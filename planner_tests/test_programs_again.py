"""Training scripts of public repositories, once more: gradients that outlive a change of plan, optimizers with lists,
norms gone over again, functions that were imported by name.

More of them are in ``benchmarks/program_table/fetched.py``.
"""

from __future__ import annotations

import random
import sys
import types
import warnings
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_reduce as imported_all_reduce
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn

import asa
from asa.api.calls import guesses
from asa.api.losses.bends import sides_of
from asa.api.losses.program_text import index_read
from asa.api.losses.trial import percent
from asa.api.model.optimizers import lost_epsilon
from asa.api.patching import replace_imported, replace_once
from asa.api.steps.batches import check_flattened, warn_of_squares
from asa.errors import UsageError
from asa.launch import run_ranks
from asa.tracing.records import understood
from planner_tests.programs import Named, Program, State, assert_as_alone, classes, cross_entropy, heard_of, numbers


def _program(loop: Any, model: Any = Named, **options: Any) -> Program:
    return Program(**({"model": model, "x": numbers(21, 8), "y": classes(21, 3), "loop": loop} | options))


def _usual(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        cross_entropy(net, x, y).backward()
        opt.step()
    return dict(net.state_dict())


def _three_views(net: Any, opt: Any, batches: Any) -> State:
    """Gradients of the step before are cleared behind the model; the last batch is shared unevenly."""
    for i, (x, y) in enumerate(batches):
        outputs = net(torch.cat([x, x * 0.5, x + 1])).chunk(3)
        loss = F.cross_entropy(outputs[0], y) + (outputs[1] - outputs[2]).square().mean()
        if i != 2:
            opt.zero_grad()
        loss.backward()
        opt.step()
    return dict(net.state_dict())


def test_a_model_that_runs_whole_from_now_on_keeps_its_gradients() -> None:
    assert_as_alone(_program(_three_views, x=numbers(15, 8), y=classes(15, 3)), ["tensor", "mixed-sharded"])


class Ahead(nn.Module):
    """Answers for some steps more."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, future: int = 0) -> Tensor:
        for _ in range(1 + future):
            x = torch.tanh(self.cell(x))
        return self.head(x)  # type: ignore[no-any-return]


def _in_closures(net: Any, opt: Any, batches: Any) -> State:
    answers = []
    for _ in range(2):
        for x, y in batches:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                opt.zero_grad()
                loss = cross_entropy(net, x, y)
                loss.backward()
                return loss

            opt.step(closure)
        with torch.no_grad():
            answers.append(net(numbers(3, 8, seed=4), future=2))
    return {**net.state_dict(), "answers": torch.stack(answers)}


def test_an_optimizer_that_keeps_lists_goes_on_when_the_model_runs_whole() -> None:
    def lbfgs(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3)

    program = _program(_in_closures, Ahead, x=numbers(8, 8), y=classes(8, 3), batch=8, optimizer=lbfgs)
    assert_as_alone(program, ["ddp"], within=1e-8)
    for answer in program.spread(["zero1"])["zero1"]:
        assert "LBFGS updates all parameters together" in str(answer)


def _by_one_vector(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        cross_entropy(net, x, y).backward()
        vector = torch.cat([p.grad.clone().flatten() for p in net.parameters()])
        vector, start = vector / (1 + vector.norm()), 0
        for p in net.parameters():
            p.grad = vector[start : start + p.numel()].view_as(p).clone()
            start += p.numel()
        opt.step()
    return dict(net.state_dict())


def test_gradients_are_assigned_from_one_vector() -> None:
    assert_as_alone(_program(_by_one_vector), ["ddp", "fsdp", "tensor"])


class Normed(nn.Module):
    """With a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


def _norms_again(net: Any, opt: Any, batches: Any) -> State:
    averaged = AveragedModel(net)
    _usual(net, opt, batches)
    averaged.update_parameters(net)
    update_bn(batches, averaged)
    return {n: t for n, t in averaged.state_dict().items() if t.is_floating_point()}


def test_statistics_of_norms_are_those_of_whole_batches() -> None:
    assert_as_alone(_program(_norms_again, Normed, options={"batch_norm": "exact"}), ["ddp", "tensor"])


def _looked_through(net: Any, opt: Any, batches: Any) -> State:
    seen = 0.0
    for x, _ in batches:
        seen += float(x.sum()) * 0
    return _usual(net, opt, batches)


def _added_up(net: Any, opt: Any, batches: Any) -> State:
    total = sum(x.sum(0) for x, _ in batches)
    assert asa.reduce(total, "sum").shape == (8,)
    return _usual(net, opt, batches)


def test_a_pass_without_a_backward_is_told_of() -> None:
    program, other = _program(_looked_through), _program(_added_up)
    for each in (program, other):
        found = run_ranks(2, heard_of, [(each, each.plan("ddp"))], threads=1)
        told = any("without a backward" in line for (lines,) in found for line in lines)
        assert told is (each is program)


class _Marked:
    read: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        self.read = index_read(sys._getframe(1))
        return 5, 6


def test_which_dimension_is_read_is_seen() -> None:
    x = _Marked()
    assert (x.shape[-1], x.read) == (6, -1)
    assert (len(x.shape), x.read) == (2, None)


def _of_classes(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        answers = net(x)
        (F.cross_entropy(answers, y) * 3 / answers.size(1) * answers.shape[-1] / 3).backward()
        opt.step()
    return dict(net.state_dict())


def test_the_number_of_classes_is_not_the_number_of_samples() -> None:
    program = _program(_of_classes, x=numbers(16, 8), y=classes(16, 3), batch=8)
    for (lines,) in run_ranks(2, heard_of, [(program, program.plan("ddp"))], threads=1):
        assert not any("how many samples" in line for line in lines)


def test_rows_of_flattened_tensors_are_not_shared() -> None:
    x, y = torch.zeros(5, 4), torch.zeros(20)
    with pytest.raises(UsageError, match=r"batch\[1\] has 20 rows, one for each of 5 x 4"):
        check_flattened((x, y), 5)
    check_flattened((x, y[:5], torch.zeros(4), torch.zeros(5, 1, 3)), 5)


def test_records_have_names_of_their_parts() -> None:
    batch = understood(types.SimpleNamespace(x=torch.zeros(3, 2), mask=torch.zeros(3, 3)))
    with pytest.warns(UserWarning, match=r"batch\.mask is of shape"):
        warn_of_squares(batch, 3)


def test_what_was_imported_by_name_is_replaced() -> None:
    owner, program, beside = types.ModuleType("owner"), types.ModuleType("program"), types.ModuleType("beside")
    owner.f = program.g = lambda: 1  # type: ignore[attr-defined]
    beside.f = other = lambda: 1  # type: ignore[attr-defined]
    sys.modules["planner_tests.program"], sys.modules["planner_tests.beside"] = program, beside
    try:
        replace_once(owner, "f", lambda original: lambda: original() + 1)
        replace_imported()
    finally:
        del sys.modules["planner_tests.program"], sys.modules["planner_tests.beside"]
    assert owner.f() == program.g() == 2
    assert beside.f is other


def _imported(_rank: int) -> bool:
    asa.parallelize(*_program(_usual).made(), plan=_program(_usual).plan("ddp"))[0].close()
    return imported_all_reduce is dist.all_reduce


def test_collectives_that_were_imported_by_name_are_those_that_ranks_follow() -> None:
    assert run_ranks(2, _imported, threads=1) == [True, True]


def test_an_epsilon_that_is_nothing_is_told_of() -> None:
    weights = [torch.zeros(2, dtype=torch.float16, requires_grad=True)]
    assert "1e-08 of AdamW is 0 in torch.float16" in lost_epsilon(torch.optim.AdamW(weights))
    assert not lost_epsilon(torch.optim.AdamW(weights, eps=1e-4))
    assert not lost_epsilon(torch.optim.SGD(weights))
    assert not lost_epsilon(torch.optim.AdamW([torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)]))


class Gated(nn.Module):
    """Chooses a layer by sample, and leaves how evenly, and what it found, in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.head = (
            nn.Linear(8, 2),
            nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        shares, hidden = self.gate(x).softmax(1), x
        for i, expert in enumerate(self.experts):
            if (mine := shares.argmax(1) == i).any():
                hidden = torch.where(mine[:, None], shares[:, i : i + 1] * expert(x), hidden)
        self.balance, self.hidden = shares.square().sum(1).mean(), hidden
        return self.head(hidden)  # type: ignore[no-any-return]


def _with_attributes(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        (loss + net.balance + 0.1 * (net.hidden.sum(1) - y).square().mean()).backward()
        opt.step()
    return dict(net.state_dict())


def test_what_forward_leaves_in_attributes_of_the_model_is_an_output() -> None:
    assert_as_alone(_program(_with_attributes, Gated), ["ddp", "tensor"])


def test_a_model_is_called_with_what_a_record_has() -> None:
    batch = types.SimpleNamespace(y=numbers(4), x=numbers(4, 8))
    assert [call.tensor is batch.x for call in guesses(Named(), batch)] == [False, True]
    assert [call.tensor is batch.y for call in guesses(nn.Linear(8, 3), batch)] == [False, True]


class Centred(nn.Module):
    """Has a centre of what it sees, and takes a number that no batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor, scale: float) -> Tensor:
        if self.training:
            self.centre.lerp_(x.detach().mean(0), 0.1)
        return self.head((x - self.centre) * scale)  # type: ignore[no-any-return]


def _scaled(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(net(x, 0.5), y).backward()
        opt.step()
    return dict(net.state_dict())


def _of_centre(_rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        net, opt, batches = asa.parallelize(
            *_program(_scaled, Centred).made(), strategies=("ddp",), cluster="local-gloo-2", cache=None
        )
        _scaled(net, opt, batches)
        net.close()
    return [str(w.message) for w in heard]


def test_buffers_that_a_call_changes_are_told_of_where_it_was_not_known() -> None:
    first, second = run_ranks(2, _of_centre, threads=1)
    assert sum("forward changes centre: on each rank" in line for line in first) == 1
    assert not any("forward changes" in line for line in second)


class DropsByItself(nn.Module):
    """Drops with a generator that it makes in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.draw: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        self.draw = torch.Generator().manual_seed(5) if self.draw is None else self.draw
        if self.training:
            h = h * (torch.rand(h.shape, generator=self.draw, dtype=h.dtype) > 0.3) / 0.7
        return self.head(h + 0.1 * torch.empty_like(h[:, :1]).normal_(generator=self.draw))  # type: ignore[no-any-return]


def test_a_generator_of_the_models_own_draws_what_it_draws_on_one_device() -> None:
    assert_as_alone(_program(_usual, DropsByItself), ["ddp", "mixed"])


class Growing(nn.Module):
    """Layers in a list that the trace goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.stages, self.head = nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = torch.relu(stage(x))
        return self.head(x)  # type: ignore[no-any-return]


def _grown(net: Any, opt: Any, batches: Any) -> State:
    net.stages.append(nn.Linear(8, 8).double())
    return _usual(net, opt, batches)


def _inserted(net: Any, opt: Any, batches: Any) -> State:
    net.stages.insert(0, nn.Linear(8, 8).double())
    return _usual(net, opt, batches)


@pytest.mark.parametrize(("loop", "what"), [(_grown, "the module 1"), (_inserted, "a module")])
def test_a_layer_that_is_added_to_a_traced_list_is_refused(loop: Any, what: str) -> None:
    for answer in _program(loop, Growing).spread(["tensor"])["tensor"]:
        assert f"{what} of a ModuleList was replaced or tied behind asa.parallelize" in str(answer)


def _not_finite(net: Any, opt: Any, batches: Any) -> State:
    for i, (x, y) in enumerate(batches):
        opt.zero_grad()
        (cross_entropy(net, x, y) * (float("nan") if i == 1 else 1.0)).backward()
        try:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
            opt.step()
        except RuntimeError as error:
            if "is non-finite" not in str(error):
                raise
    return dict(net.state_dict())


def test_a_norm_that_is_not_finite_is_refused_in_torchs_words() -> None:
    assert_as_alone(_program(_not_finite), ["zero1"], within=1e-9)


def test_small_shares_are_told_from_none() -> None:
    assert [percent(s) for s in (0.1234, 2e-6, 0.0)] == ["12.3%", "0.0002%", "0.0%"]


def _distilled_by_hooks(net: Any, opt: Any, batches: Any) -> State:
    """The loss has what hooks keep of two layers, of which tensor parallelism gives a rank a part."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _module, _inputs, output: kept.update({name: output})

    handles = [net.first.register_forward_hook(keep("first"))]
    handles += [m.register_forward_hook(keep(n)) for n, m in net.named_modules() if n == "head"]
    for epoch in range(2):
        for x, y in batches:
            opt.zero_grad()
            loss = cross_entropy(net, x, y)
            (loss + 0.1 * sum((k.square().mean() for k in kept.values()), torch.zeros(()))).backward()
            opt.step()
        if epoch == 0:
            for handle in handles:
                handle.remove()
            kept.clear()
    return {**net.state_dict(), "kept": torch.tensor(float(len(kept)))}


def test_a_forward_hook_sees_whole_tensors_where_ranks_would_hold_parts() -> None:
    assert_as_alone(_program(_distilled_by_hooks), ["tensor", "mixed"], within=1e-9)


class DrawsByNumpy(nn.Module):
    """Drops with a generator of numpy's, or shifts by one of Python's."""

    def __init__(self, by_sample: bool) -> None:
        super().__init__()
        self.head, self.by_sample = nn.Linear(8, 3), by_sample
        self.draw, self.shift = numpy.random.default_rng(1), random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.as_tensor(self.draw.random(x.shape) > 0.3) if self.by_sample else 1
        return self.head(torch.roll(x * kept, self.shift.randint(0, 7), 1))  # type: ignore[no-any-return]


def test_a_generator_of_numpys_that_draws_for_a_ranks_samples_is_told() -> None:
    programs = [_program(_usual, partial(DrawsByNumpy, by_sample)) for by_sample in (True, False)]
    for told, untold in run_ranks(2, heard_of, [(p, p.plan("ddp")) for p in programs], threads=1)[:1]:
        assert any("for the samples of its rank" in line for line in told)
        assert not any("random numbers" in line for line in untold)
    assert_as_alone(programs[1], ["ddp"])


def test_the_only_row_of_a_batch_is_no_mean() -> None:
    row = torch.ones(1, requires_grad=True) * 2
    assert sides_of(F.huber_loss(row * 3, torch.zeros(1)), [row]) == ()
    assert sides_of((row * 3).relu().mean(), [row]) == ()
    assert sides_of((row.mean() - 1).abs(), [row]) == (1,)
    assert sides_of((row.mean(0, keepdim=True) - 1).abs().sum(), [row]) == (1,)


class Boxes(nn.Module):
    """A detector whose loss is a mean over images, each with the mean over its own boxes; inside or outside."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        found = self.head(torch.relu(self.body(x))).view(len(x), 3, 4)
        return found if places is None else mean_over_images(found, places)


def mean_over_images(found: Tensor, places: Tensor) -> Tensor:
    """``places``: some of four for each image, and -1."""
    return torch.stack(
        [F.cross_entropy(f.t()[p[p >= 0]], p[p >= 0] % 3) for f, p in zip(found, places, strict=True)]
    ).mean()


def _boxes(net: Any, opt: Any, batches: Any) -> State:
    for epoch in range(2):
        for x, places in batches:
            opt.zero_grad()
            (net(x, places) if epoch else mean_over_images(net(x), places)).backward()
            opt.step()
    return dict(net.state_dict())


def test_means_over_the_boxes_of_each_image_are_weighed_by_images() -> None:
    places = torch.tensor([[0, 1, 2], [3, -1, -1], [2, 0, -1]]).repeat(5, 1)
    assert_as_alone(_program(_boxes, Boxes, x=numbers(14, 8), y=places[:14], batch=4), ["ddp", "zero1"])
