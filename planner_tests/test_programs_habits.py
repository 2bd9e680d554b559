"""Habits of loops that are easily got wrong on several ranks: the numbers of one process, a line, or a refusal.

More of them are in ``benchmarks/program_table/habits.py``.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, TensorDataset

import asa
from asa.errors import UsageError
from asa.launch import run_ranks
from planner_tests.programs import Program, State, classes, cross_entropy, distance, epochs, heard_of, numbers

CE = F.cross_entropy
X0, Y0 = numbers(4, 8, seed=7), classes(4, 3, seed=8)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 3))


def _program(loop: Any, count: int = 21, batch: int = 6, model: Any = _net) -> Program:
    return Program(model=model, x=numbers(count, 8), y=classes(count, 3), batch=batch, loop=loop)


def _with_loss(loss: Any) -> Any:
    return lambda net, opt, batches: epochs(net, opt, batches, loss)


def _guided(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """The model is called for something else between a call and its loss."""
    out = net(x)
    with torch.no_grad():
        wanted = net(X0).softmax(1).mean(0)
    return CE(out, y) + (out.softmax(1) - wanted).square().mean()


def _drawn_through_data(net: Any, opt: Any, batches: Any) -> State:
    torch.manual_seed(7)
    for m in net.modules():
        if isinstance(m, nn.Linear):
            m.weight.data.normal_(0.0, 0.1)
            m.bias.data.zero_()
    epochs(net, opt, batches, cross_entropy)
    for m in net.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()
    return epochs(net, opt, batches, cross_entropy)


def _some_leaves(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward(inputs=list(net.parameters())[-2:])
        opt.step()
    return dict(net.state_dict())


EXACT: dict[str, tuple[Any, list[str]]] = {
    "two calls in one backward": (_with_loss(lambda n, x, y: CE(n(x), y) + CE(n(X0), Y0)), ["ddp", "tensor"]),
    "a call in between": (_with_loss(_guided), ["ddp", "fsdp"]),
    "slices": (_with_loss(lambda n, x, y: CE(n[-1](n[:-1](x)), y)), ["ddp"]),
    "children": (_with_loss(lambda n, x, y: CE(nn.Sequential(*n.children())(x), y)), ["ddp"]),
    "a checkpoint around the model": (
        _with_loss(lambda n, x, y: CE(checkpoint(n, x, use_reentrant=False), y)), ["ddp"]),
    "drawn through data": (_drawn_through_data, ["fsdp"]),
    "gradients of some leaves": (_some_leaves, ["ddp", "tensor"]),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_the_numbers_of_one_process(name: str) -> None:
    loop, plans = EXACT[name]
    program = _program(loop)
    alone = program.alone()
    for plan, states in program.spread(plans).items():
        for state in states:
            assert isinstance(state, dict), f"{plan}: {state}"
            assert distance(state, alone) < 1e-11, plan


def _counted(net: Any, opt: Any, batches: Any) -> State:
    """An update for every 16 samples."""
    seen = 0
    for x, y in batches:
        CE(net(x), y).backward()
        seen += len(x)
        if seen >= 16:
            opt.step()
            opt.zero_grad()
            seen = 0
    return {}


def _class_weights(net: Any, opt: Any, batches: Any) -> State:
    """Weights by a pass over the loader. A rank's share has as many samples as there are classes."""
    counts = torch.ones(3, dtype=torch.float64)
    for _, y in batches:
        counts += torch.bincount(y, minlength=3)
    return epochs(net, opt, batches, lambda n, x, y: CE(n(x), y, weight=counts.sum() / counts))


def _state_in_place(net: Any, opt: Any, batches: Any) -> State:
    for v in net.state_dict().values():
        v.mul_(0.5)
    return epochs(net, opt, batches, cross_entropy)


def _backward_hook(net: Any, opt: Any, batches: Any) -> State:
    layer = [m for m in net.modules() if isinstance(m, nn.Linear)][-1]
    layer.register_full_backward_hook(lambda _m, gs, _o: tuple(g / g.norm() for g in gs))
    return epochs(net, opt, batches, cross_entropy)


def _appended(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return CE(net(torch.cat([x, X0])), torch.cat([y, Y0]))


def _lovasz(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Takes the first of sorted samples, which is no loop over samples."""
    errors, order = (1 - net(x)[:, 0] * (2.0 * (y == 0) - 1)).sort(descending=True)
    kept = (y == 0).double()[order]
    part = 1 - (kept.sum() - kept.cumsum(0)) / (kept.sum() + (1 - kept).cumsum(0))
    return torch.dot(F.relu(errors), torch.cat([part[:1], part[1:] - part[:-1]]))


def _changed_data(net: Any, opt: Any, batches: Any) -> State:
    """What a loop knows of its samples goes into the data set."""
    for _ in range(2):
        for x, y in batches:
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
            batches.dataset.tensors[0][0] += float(x.sum())
    return {}


SAID: dict[str, tuple[Any, int, str]] = {
    "steps by samples": (_counted, 24, "asks how many samples a batch has, and gets 4 of 8"),
    "class weights by a pass": (_class_weights, 24, "a tensor [3] beside the batch"),
    "a state changed in place": (_state_in_place, 24, "0.weight of model.state_dict() was changed in place"),
    "a backward hook": (_backward_hook, 24, "a backward hook on 2 gets gradients of this rank's samples"),
    "samples appended": (_with_loss(_appended), 24, "ranks have the same others"),
    "a first sample": (_with_loss(_lovasz), 24, "the loss is not a mean over samples"),
    "samples changed": (_changed_data, 24, "the data set is no longer the same on all ranks"),
}  # fmt: skip


def test_what_differs_is_named() -> None:
    cases = [_program(loop, count, 6 if "class" in name else 8) for name, (loop, count, _) in SAID.items()]
    rank = run_ranks(2, heard_of, [(p, p.plan("ddp")) for p in cases], threads=1, timeout_s=120)[0]
    for (name, (_, _, words)), lines in zip(SAID.items(), rank, strict=True):
        assert any(words in line for line in lines), (name, lines)


def test_parts_that_are_drawn_through_modules_are_named() -> None:
    program = _program(_drawn_through_data)
    lines = run_ranks(2, heard_of, [(program, program.plan("tensor"))], threads=1, timeout_s=120)[0][0]
    assert any("Linear.weight was changed through model.modules()" in line for line in lines), lines


def test_nothing_is_said_of_usual_loops() -> None:
    usual = _program(_with_loss(lambda n, x, y: CE(n(x).view(len(x), 3), y)))  # the last batch is uneven
    layers = _program(_with_loss(lambda n, x, y: CE(n[2](n[1](n[0](x))), y)), 24)
    rank = run_ranks(2, heard_of, [(p, p.plan("ddp")) for p in (usual, layers)], threads=1, timeout_s=120)[0]
    assert not [line for lines in rank for line in lines if "samples a batch" in line or "not a mean" in line]


def _replaced(net: Any, _opt: Any, _batches: Any) -> None:
    layer = [m for m in net.modules() if isinstance(m, nn.Linear)][-1]
    layer.weight = nn.Parameter(torch.zeros(3, 12, dtype=torch.float64))


def _item_replaced(net: Any, _opt: Any, _batches: Any) -> None:
    net[2] = nn.Linear(12, 3)


def _layers_called(net: Any, _opt: Any, batches: Any) -> None:
    layers = [m for m in net.modules() if isinstance(m, nn.Linear | nn.GELU)]
    for x, y in batches:
        for layer in layers:
            x = layer(x)
        CE(x, y).backward()


def _layers_recomputed(net: Any, _opt: Any, batches: Any) -> None:
    for x, y in batches:
        CE(checkpoint_sequential([net[0], net[2]], 2, x, use_reentrant=False), y).backward()


def _left_early(net: Any, opt: Any, batches: Any) -> None:
    rank = torch.distributed.get_rank()
    for _ in range(2):
        for i, (x, y) in enumerate(batches):
            opt.zero_grad()
            CE(net(x), y).backward()
            opt.step()
            if i == rank:
                break


REFUSED: dict[str, tuple[Any, str]] = {
    "a weight": (_replaced, "the parameter weight of a Linear was replaced or tied behind asa.parallelize"),
    "a layer": (_item_replaced, "model[2] cannot be replaced behind asa.parallelize"),
    "the type": (lambda net, _o, _b: net.float(), "parameters cannot change from torch.float64 on cpu to torch.float"),
    "layers by themselves": (_layers_called, "a loss goes through layers of the model without a call of it"),
    "layers under a checkpoint": (_layers_recomputed, "is computed again in a backward"),
    "epochs left early": (_left_early, "ranks are at different places of their loops: rank 0 begins or ends an epoch"),
}  # fmt: skip


def _refused(_rank: int, loops: list[tuple[Program, Any]]) -> list[str]:
    said = []
    for program, plan in loops:
        net, opt, batches = asa.parallelize(*program.made(), plan=plan)
        try:
            program.loop(net, opt, batches)
            said.append("nothing")
        except UsageError as error:
            said.append(str(error))
    return said


def test_what_is_refused_says_so_in_a_line() -> None:
    programs = [_program(loop, 24) for loop, _ in REFUSED.values()]
    rank = run_ranks(2, _refused, [(p, p.plan("ddp")) for p in programs], threads=1, timeout_s=120)[0]
    for (name, (_, words)), text in zip(REFUSED.items(), rank, strict=True):
        assert words in text, name


def _read(net: Any, opt: Any, batches: Any) -> State:
    """Numbers of parameters as a program reads and prints them, and as it clips them beside others."""
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        opt.step()
    found = {}
    with torch.no_grad():
        for name, p in net.named_parameters():
            try:
                found[f"{name} far"] = F.mse_loss(p, p * 0.9)
            except UsageError:  # of parts it is refused
                found[f"{name} far"] = (p - p * 0.9).square().mean()
            found[f"{name} text"] = torch.tensor(float(f"{p.grad.norm():.6f}"))
            found[f"{name} norm"] = nn.utils.get_total_norm([p.grad, X0])
            p.grad.add_(torch.ones(p.shape, dtype=p.dtype), alpha=0.1)
            found[f"{name} moved"] = p.grad.norm()
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in found.items()}


@pytest.mark.parametrize("plan", ["fsdp", "tensor"])
def test_numbers_of_parameters_that_ranks_hold_in_parts(plan: str) -> None:
    program = _program(_read)
    alone = program.alone()
    for state in program.spread([plan])[plan]:
        assert isinstance(state, dict), state
        assert distance({k: torch.as_tensor(v).as_subclass(Tensor) for k, v in state.items()}, alone) < 1e-9


def _marked() -> nn.Module:
    net = _net()
    for p in list(net.parameters())[::2]:
        p.no_decay = True  # type: ignore[attr-defined]
    return net


def _by_marks(net: Any, _opt: Any, batches: Any) -> State:
    groups = [
        {"params": [p for p in net.parameters() if hasattr(p, "no_decay") is marked], "weight_decay": 0.5 * marked}
        for marked in (False, True)
    ]
    return epochs(net, torch.optim.SGD(groups, lr=0.1), batches, cross_entropy)


def test_marks_on_parameters_are_kept() -> None:
    program = _program(_by_marks, model=_marked)
    alone = program.alone()
    for states in program.spread(["tensor", "fsdp"]).values():
        assert all(isinstance(s, dict) and distance(s, alone) < 1e-11 for s in states), states


def test_one_process_keeps_what_modules_allow() -> None:
    net = _net()
    with pytest.warns(UserWarning, match="1 process"):
        model, _, _ = asa.parallelize(
            net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(TensorDataset(X0.float(), Y0), 2)
        )
    model[2] = nn.Linear(12, 5)  # type: ignore[assignment]
    assert model(X0.float()).shape == (4, 5)
    assert next(model.double().parameters()).dtype is torch.float64


class _BegunByData(nn.Module):
    """The first batch sets a shift and a scale: by ``data``, or in place."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.a, self.b, self.by, self.ready = nn.Linear(8, 12), nn.Linear(12, 3), by, False
        self.shift, self.scale = nn.Parameter(torch.zeros(12)), nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if not self.ready:
            shift, scale = -h.mean(0).detach(), 1 / (h.std(0).detach() + 1e-3)
            if self.by == "data":
                self.shift.data, self.scale.data = shift, scale
            else:
                self.shift.data.copy_(shift)
                self.scale.data.copy_(scale)
            self.ready = True
        return self.b(F.gelu((h + self.shift) * self.scale))


class _Follows(nn.Module):
    """A frozen copy follows the trained layer in forward, by no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.slow, self.b = nn.Linear(8, 12), nn.Linear(8, 12).requires_grad_(False), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for new, old in zip(self.a.parameters(), self.slow.parameters(), strict=True):
                old.data = old.data * 0.9 + new.data * 0.1
        return self.b(F.gelu(self.a(x)) + self.slow(x))


def _placed(_rank: int, by: str) -> tuple[str, list[str], str]:
    """What is said of the model, what of its state differs right after the call, and why shards are refused."""
    program = _program(_with_loss(cross_entropy), model=lambda: _BegunByData(by))
    net, opt, batches = program.made()
    first = {k: v.clone() for k, v in net.state_dict().items()}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        placed, *_ = asa.parallelize(net, opt, batches, plan=program.plan("ddp"))
    changed = [k for k, v in placed.state_dict().items() if not torch.equal(v, first[k])]
    placed.close()
    with pytest.raises(UsageError) as refused:
        asa.parallelize(*program.made(), plan=program.plan("fsdp"))
    return " ".join(str(w.message) for w in heard), changed, str(refused.value)


@pytest.mark.parametrize("by", ["data", "copy_"])
def test_parameters_that_forward_writes_are_restored_after_trials_and_never_shards(by: str) -> None:
    for rank, (said, changed, refused) in enumerate(run_ranks(2, _placed, by, threads=1, timeout_s=120)):
        assert not changed
        assert "forward changes shift, of which ranks hold shards" in refused
        assert rank or "forward changes shift and 1 more, which are parameters" in said


def _following(_rank: int) -> list[State]:
    program = _program(_with_loss(cross_entropy), model=_Follows)
    planned = {"cache": None, "time_limit_s": 0.1, "cluster": "profiles/cluster.local-gloo-2.json"}
    return [
        program.loop(*asa.parallelize(*program.made(), **options)[:3])  # type: ignore[arg-type]
        for options in (planned, {"plan": program.plan("ddp")})
    ]


def test_a_model_that_writes_parameters_in_forward_runs_whole() -> None:
    alone = _program(_with_loss(cross_entropy), model=_Follows).alone()
    for states in run_ranks(2, _following, threads=1, timeout_s=120):
        assert [distance(state, alone) < 1e-11 for state in states] == [True, True]


class _TwoWays(nn.Module):
    """Is called with one tensor, or with two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        h = F.gelu(self.a(x))
        return self.b(h if shift is None else h + shift)


def _uses(_rank: int, plans: list[str]) -> dict[str, list[str]]:
    """What becomes of uses of parameters that were listed before the call."""
    found: dict[str, list[str]] = {}
    program = _program(_with_loss(cross_entropy), count=12, model=_TwoWays)
    for name in plans:
        net, opt, batches = program.made()
        held = list(net.parameters())
        net, opt, batches = asa.parallelize(net, opt, batches, plan=program.plan(name))
        for use in ("clip", "average", "update"):
            try:
                for x, y in batches:
                    opt.zero_grad()
                    CE(net(x), y).backward()
                    if use == "clip":
                        nn.utils.clip_grad_norm_(held, 0.1)
                    elif use == "average":
                        held[0].detach().clone()
                    else:
                        torch.optim.SGD(held, lr=0.1).step()
                found.setdefault(name, []).append("")
            except UsageError as error:
                found.setdefault(name, []).append(str(error))
        held = list(net.parameters())
        opt.zero_grad()
        net.run_whole("it is called otherwise")
        try:
            nn.utils.clip_grad_norm_(held, 0.1)
            found[name].append("")
        except UsageError as error:
            found[name].append(str(error))
        assert held[0].shape == (12, 8)
        net.close()
    return found


def test_parameters_that_were_listed_before_are_the_models_or_refused() -> None:
    plans = ["ddp", "zero1", "tensor", "fsdp"]
    for found in run_ranks(2, _uses, plans, threads=1, timeout_s=120):
        for name in plans:
            *before, rebuilt = found[name]
            if name in ("ddp", "zero1"):
                assert before == ["", "", ""], name
            else:
                assert all("list model.parameters() anew" in said for said in before), (name, before)
            assert name == "fsdp" or "list model.parameters() anew" in rebuilt, name


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _ScaledTwice(nn.Module):
    """Scaled by attributes, and called with one tensor or with two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.middle, self.b, self.gain = nn.Linear(8, 12), _Scaled(), nn.Linear(12, 3), 1.0

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        h = self.middle(F.gelu(self.a(x)))
        return self.b(h if shift is None else h + shift) * self.gain


def _scaled_later(net: Any, opt: Any, batches: Any) -> State:
    epochs(net, opt, batches, cross_entropy)
    net.gain, net.middle.scale = 0.5, 0.3
    return epochs(net, opt, batches, lambda n, x, y: CE(n(x, x[:, :1]), y))


def test_attributes_are_kept_when_a_model_begins_to_run_whole() -> None:
    program = _program(_scaled_later, model=_ScaledTwice)
    alone = program.alone()
    for plan, states in program.spread(["ddp", "tensor"]).items():
        for state in states:
            assert isinstance(state, dict), f"{plan}: {state}"
            assert distance(state, alone) < 1e-11, plan


class _ScaledLayer(nn.Module):
    """Is traced through, because a layer is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(12, 12), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class _ScaledOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.middle, self.b = nn.Linear(8, 12), _ScaledLayer(), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.middle(self.a(x))))


def _scaled(how: str) -> Any:
    def loop(net: Any, opt: Any, batches: Any) -> State:
        for epoch in range(2):
            if epoch and how == "name":
                net.middle.scale = 0.3
                assert net.middle.scale == 0.3
                assert isinstance(net.middle, _ScaledLayer)
            for m in net.modules() if epoch and how == "modules" else ():
                if isinstance(m, _ScaledLayer):
                    m.scale = 0.3
            epochs(net, opt, batches, cross_entropy)
        return {}

    return loop


def test_an_attribute_of_a_layer_that_was_traced_through_is_warned_of() -> None:
    programs = [_program(_scaled(how), 24, model=_ScaledOnce) for how in ("name", "modules", "not at all")]
    cases = [(p, p.plan(plan)) for p in programs for plan in ("ddp", "tensor")]
    *changed, first, second = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)[0]
    for lines in changed:
        assert any("model.middle.scale was changed behind asa.parallelize" in line for line in lines), lines
    assert not any("was changed" in line for line in first + second)


def _dropping_later(net: Any, opt: Any, batches: Any) -> State:
    for rate in (0.0, 0.5):
        net[1].p = rate
        epochs(net, opt, batches, cross_entropy)
    return {}


def test_a_rate_of_dropout_that_is_set_later_is_told() -> None:
    program = _program(
        _dropping_later, 24, model=lambda: nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.0), nn.Linear(12, 3))
    )
    (lines,) = run_ranks(2, heard_of, [(program, program.plan("ddp"))], threads=1, timeout_s=120)[0]
    assert sum("draws random numbers by sample and step" in line for line in lines) == 1


def _by_norms_of_layers(net: Any, opt: Any, batches: Any) -> State:
    for x, y in batches:
        opt.zero_grad()
        CE(net(x), y).backward()
        for m in net.modules():
            if isinstance(m, nn.Linear):
                m.weight.grad.div_(m.weight.grad.norm())
        opt.step()
    return {}


def test_gradients_that_are_changed_through_modules_are_warned_of() -> None:
    program = _program(_by_norms_of_layers, 24)
    cases = [(program, program.plan(plan)) for plan in ("tensor", "ddp")]
    parts, whole = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)[0]
    assert any("weight.grad was changed through model.modules()" in line for line in parts)
    assert not any("changed through" in line for line in whole)


def _probed(net: Any, opt: Any, batches: Any) -> State:
    """A probe that is not placed learns on detached outputs."""
    probe = nn.Linear(3, 3).double()
    nn.init.eye_(probe.weight)
    nn.init.zeros_(probe.bias)
    other = torch.optim.SGD(probe.parameters(), lr=0.1)
    for x, y in batches:
        opt.zero_grad()
        out = net(x)
        CE(out, y).backward()
        opt.step()
        other.zero_grad()
        CE(probe(out.detach()), y).backward()
        other.step()
    return {}


def test_a_second_model_that_is_not_placed_is_warned_of() -> None:
    programs = [_program(_probed, 24), _program(_with_loss(cross_entropy), 24)]
    cases = [(p, p.plan("ddp")) for p in programs]
    probed, usual = run_ranks(2, heard_of, cases, threads=1, timeout_s=120)[0]
    assert any("of an optimizer that was not handed to asa.parallelize are no longer the same" in s for s in probed)
    assert not any("no longer the same" in line for line in usual)


def _with_gradients(_rank: int, plan: str) -> list[str]:
    program = _program(_with_loss(cross_entropy), 24)
    net, opt, batches = program.made()
    CE(net(X0), Y0).backward()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        asa.parallelize(net, opt, batches, plan=program.plan(plan))[0].close()
    return [str(w.message) for w in heard]


@pytest.mark.parametrize(("plan", "lost"), [("ddp", False), ("tensor", True)])
def test_gradients_from_before_the_call_are_kept_or_warned_of(plan: str, lost: bool) -> None:
    heard = run_ranks(2, _with_gradients, plan, threads=1, timeout_s=120)[0]
    assert any("had a gradient before the call" in line for line in heard) is lost
